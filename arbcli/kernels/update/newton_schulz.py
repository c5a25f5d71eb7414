"""Symmetric products of Newton-Schulz iterations: A = x @ x.T and P = alpha I + beta A + gamma A A.

Both results are symmetric, so only tiles on and below the diagonal are computed, and each is stored
twice: as it is and transposed. That is half the arithmetic of a library's product.

Where tiles are few for the processors, all steps along K of all of them are dealt evenly to one
program a processor, so that no processor waits for another's last tile (2048 rows are 136 tiles of
128, and an H200 has 132 processors). Where a tile is shared, the program with its first step adds
to its own float32 sums those that the others left in memory, in their order: the same bits every
run. Otherwise a program computes a whole tile.

    3 tiles of 6 steps, 4 programs, of 5, 5, 4 and 4 steps:

    tile       0            1            2
    step       0 1 2 3 4 5  0 1 2 3 4 5  0 1 2 3 4 5
    program    0 0 0 0 0 1  1 1 1 1 2 2  2 2 3 3 3 3
               stored by 0  stored by 1  stored by 2

A program waits only for programs of higher numbers here, and these are launched first: the last of
them has program id 0. So all that are waited for run already, however few fit on the GPU at once.

Shapes alone decide what runs. An H200 took, in bfloat16 and microseconds, against cuBLAS:

    gram              768x768     4.1 against 4.9      small tiles
                      768x2048    6.3 against 8.7
                      768x4096    10.1 against 10.5
                      384x2048    5.7 against 5.3      left to cuBLAS, as all of few rows
                      2048x2048   26.0 against 23.7    left to cuBLAS, as all of few products
                      2048x5632   57.1 against 58.2    shared tiles
                      2048x6144   58.6 against 63.2
                      2048x11264  101.5 against 113.6
               4 of   2048x2048   79.3 against 91.1
                      8192x8192   866 against 1652     many tiles; 1448 if they are shared
    polynomial        256, 384    4.2, 4.4 against the same without the identity
                      768         5.2 against 6.3      small tiles
                      2048        28.2 against 29.1    shared tiles
               4 of   2048        87.2 against 115.0
               8 of   768         24.2 against 19.0    left to cuBLAS
                      8192        933 against 1666     many tiles; 1405 if they are shared
"""

from typing import NamedTuple, no_type_check

import torch
from torch import Tensor

from arbcli.kernels.runtime._triton import described, tl, triton
from arbcli.kernels.runtime.backend import backend_of, capability, num_processors
from arbcli.kernels.runtime.operation import Operation

HOPPER = (9, 0)
"""Compute capability of the H100 and H200, which the kernel is tuned for."""
SMALL_ROWS = 768
"""Largest n for small tiles."""
SMALL_STACK = 384
"""Largest n of a stack whose polynomials the kernel takes: there launches cost more than products,
and the library's way has three."""
MAX_SHARED = 256
"""Largest n of stacks that share a polynomial: with 384 rows a step of `small` was no faster."""
SMALL_GRAM = (512, 4096)
"""A single matrix of few rows has its `gram` from the kernel if n is larger, and m no larger."""
MIN_ROWS = 2048
"""Smallest n beyond the small ones whose products the kernel takes."""
MIN_PRODUCTS = 2**34
"""Smallest n * n * m, of all matrices, whose `gram` the kernel takes from there on."""


class Tiling(NamedTuple):
    """How a product is cut: tiles of `block` by `block`, `block_k` deep a step."""

    block: int
    block_k: int
    num_warps: int
    num_stages: int


SMALL_TILES = Tiling(block=64, block_k=128, num_warps=4, num_stages=4)
GRAM_TILES = Tiling(block=128, block_k=64, num_warps=8, num_stages=6)
POLYNOMIAL_TILES = Tiling(block=128, block_k=64, num_warps=8, num_stages=4)
MANY_TILES = Tiling(block=128, block_k=64, num_warps=8, num_stages=3)
"""Tilings for Hopper's tensor cores, TMA and shared memory; two programs of the last one fit."""
OTHER_TILES = Tiling(block=32, block_k=32, num_warps=8, num_stages=2)
"""Tiling for float32, and for all other GPUs."""
MANY = 8
"""Tiles a processor from which on they are not shared."""


def _gram_torch(x: Tensor) -> Tensor:
    return x @ x.mT


def _gram_polynomial_torch(a: Tensor, alpha: float, beta: float, gamma: float) -> Tensor:
    add_product = torch.addmm if a.dim() == 2 else torch.baddbmm
    polynomial = add_product(a, a, a, beta=beta, alpha=gamma)
    polynomial.diagonal(dim1=-2, dim2=-1).add_(alpha)
    return polynomial


@triton.jit
def _tile_at(index, T, BAND: tl.constexpr):
    """Return (row, column) of a tile in the lower triangle of T rows of tiles, with diagonal.

    The triangle's short rows, reversed, complete its long ones to a rectangle. That is walked down
    its columns in bands of BAND rows, so programs at work together read the same rows of x. Of four
    and of five rows of tiles (row, column) lie so:

        30 31 32 33 00        40 41 42 43 44
        20 21 22 10 11        30 31 32 33 00
                              20 21 22 10 11
    """
    width = T | 1
    height = T * (T + 1) // 2 // width
    first = index // (BAND * width) * BAND
    rows = tl.minimum(height - first, BAND)
    r = first + (index - first * width) % rows
    c = (index - first * width) // rows
    long = c < T - r
    return tl.where(long, T - 1 - r, r - T % 2), tl.where(long, c, c - (T - r))


@triton.jit
def _tile_of_stack(index, T, BAND: tl.constexpr, BLOCK: tl.constexpr):
    """Return the matrix of a tile, and its first row and column."""
    tiles_of_matrix = T * (T + 1) // 2
    matrix = index // tiles_of_matrix
    row, column = _tile_at(index - matrix * tiles_of_matrix, T, BAND)
    return matrix, row * BLOCK, column * BLOCK


@triton.jit
def _add_products(
    acc, x_desc, matrix, m, n, first, last,
    TRANSPOSED: tl.constexpr, BLOCK: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    """Add a tile's products of the steps from `first` to before `last`."""
    for number in range(first, last):
        k = number * BLOCK_K
        if TRANSPOSED:
            left = x_desc.load([matrix, k, m]).reshape(BLOCK_K, BLOCK).T
            right = x_desc.load([matrix, k, n]).reshape(BLOCK_K, BLOCK)
        else:
            left = x_desc.load([matrix, m, k]).reshape(BLOCK, BLOCK_K)
            right = x_desc.load([matrix, n, k]).reshape(BLOCK, BLOCK_K).T
        acc = tl.dot(left, right, acc, input_precision="ieee")
    return acc


@triton.jit
def _store_tile(
    acc, matrix, m, n, addend_ptr, y_desc, N, stride_matrix, stride_row, alpha, beta, gamma,
    BLOCK: tl.constexpr,
):  # fmt: skip
    """Store a tile and its transpose; one on the diagonal is made its own transpose."""
    offs = tl.arange(0, BLOCK)
    # the polynomial of the Gram matrix, in float32
    if addend_ptr is not None:
        rows, columns = (m + offs)[:, None], (n + offs)[None, :]
        addend_ptrs = addend_ptr + matrix.to(tl.int64) * stride_matrix
        addend_ptrs += rows.to(tl.int64) * stride_row + columns
        addend = tl.load(addend_ptrs, mask=(rows < N) & (columns < N), other=0)
        acc = gamma * acc + beta * addend.to(tl.float32)
        acc += tl.where(rows == columns, alpha, 0.0)
    # both triangles, rounded once, so the result is symmetric to the last bit
    y = acc.to(y_desc.dtype)
    if m == n:
        y = tl.where(offs[:, None] >= offs[None, :], y, y.T)
    y_desc.store([matrix, m, n], y.reshape(1, BLOCK, BLOCK))
    y_desc.store([matrix, n, m], y.T.reshape(1, BLOCK, BLOCK))


@triton.jit(do_not_specialize=["num_tiles"])
@no_type_check
def _symmetric_kernel(
    x_desc, addend_ptr, y_desc, parts_ptr, ready_ptr,
    N, K, num_tiles, stride_matrix, stride_row,
    alpha, beta, gamma,
    SHARED: tl.constexpr, TRANSPOSED: tl.constexpr,
    BLOCK: tl.constexpr, BLOCK_K: tl.constexpr, BAND: tl.constexpr,
):  # fmt: skip
    """Compute y = x @ x.T, or alpha I + beta addend + gamma x @ x.T where there is an addend."""
    steps = tl.cdiv(K, BLOCK_K)
    tiles = tl.cdiv(N, BLOCK)
    result = (addend_ptr, y_desc, N, stride_matrix, stride_row, alpha, beta, gamma)
    if not SHARED:
        # one program per tile of the lower triangle
        index = tl.program_id(0)
        matrix, m, n = _tile_of_stack(index, tiles, BAND, BLOCK)
        acc = tl.zeros((BLOCK, BLOCK), dtype=tl.float32)
        acc = _add_products(acc, x_desc, matrix, m, n, 0, steps, TRANSPOSED, BLOCK, BLOCK_K)
        _store_tile(acc, matrix, m, n, *result, BLOCK)
    else:
        # the steps of all tiles, one after another, are divided evenly among programs
        num_programs = tl.num_programs(0)
        mine = num_programs - 1 - tl.program_id(0)  # waits are for programs that began before
        share, rest = num_tiles * steps // num_programs, num_tiles * steps % num_programs
        step = mine * share + tl.minimum(mine, rest)
        end = step + share + (mine < rest).to(tl.int32)
        offs = tl.arange(0, BLOCK)
        offs_part = offs[:, None] * BLOCK + offs[None, :]
        while step < end:
            # the part of a tile that is in this program's share
            index = step // steps
            first = step - index * steps
            last = tl.minimum(first + end - step, steps)
            matrix, m, n = _tile_of_stack(index, tiles, BAND, BLOCK)
            acc = tl.zeros((BLOCK, BLOCK), dtype=tl.float32)
            acc = _add_products(acc, x_desc, matrix, m, n, first, last, TRANSPOSED, BLOCK, BLOCK_K)
            if first > 0:  # the tile is another program's, which waits for this part
                tl.store(parts_ptr + mine * BLOCK * BLOCK + offs_part, acc)
                tl.debug_barrier()
                tl.atomic_xchg(ready_ptr + mine, 1, sem="release")
            else:
                # the program with the first steps of a tile adds the parts of the others, in order
                other = mine + 1
                while last < steps:
                    while tl.atomic_add(ready_ptr + other, 0, sem="acquire") == 0:
                        pass
                    part_ptrs = parts_ptr + other * BLOCK * BLOCK + offs_part
                    acc += tl.load(part_ptrs, cache_modifier=".cg")
                    last += share + (other < rest).to(tl.int32)
                    other += 1
                _store_tile(acc, matrix, m, n, *result, BLOCK)
            step += steps - first


def _symmetric(x: Tensor, has_addend: bool, alpha: float, beta: float, gamma: float) -> Tensor:
    """Compute a product for a matrix or a stack of them; the addend is x itself."""
    stack = _readable(x if x.dim() == 3 else x[None])
    number, rows, _ = stack.shape
    y = empty_aligned(number, rows, rows, x)
    if stack.numel():
        _launch(stack, has_addend, y, alpha, beta, gamma)
    else:
        y.zero_()
    return y if x.dim() == 3 else y[0]


def _launch(
    stack: Tensor, has_addend: bool, y: Tensor, alpha: float, beta: float, gamma: float
) -> None:
    _, n, k = stack.shape
    (block, block_k, num_warps, num_stages), shared = _choose(stack, has_addend)
    num_programs = num_tiles = _num_tiles(stack, block)
    parts = ready = None
    if shared:
        num_programs = min(num_processors(stack), num_tiles * triton.cdiv(k, block_k))
        parts = torch.empty(num_programs, block * block, dtype=torch.float32, device=stack.device)
        ready = torch.zeros(num_programs, dtype=torch.int32, device=stack.device)
    transposed = stack.stride(2) != 1
    rows = stack.mT if transposed else stack
    oblong = [1, block_k, block] if transposed else [1, block, block_k]
    _symmetric_kernel[(num_programs,)](
        described(rows, oblong),
        rows if has_addend else None,
        described(y, [1, block, block]),
        parts, ready, n, k, num_tiles, rows.stride(0), rows.stride(1), alpha, beta, gamma,
        SHARED=shared, TRANSPOSED=transposed, BLOCK=block, BLOCK_K=block_k, BAND=8,
        num_warps=num_warps, num_stages=num_stages,
    )  # fmt: skip


def _choose(stack: Tensor, has_addend: bool) -> tuple[Tiling, bool]:
    """Choose a tiling, and whether programs share tiles, from the shape, the type and the GPU."""
    many = MANY * num_processors(stack)
    if not _fits(stack):
        return OTHER_TILES, _num_tiles(stack, OTHER_TILES.block) < many
    if stack.shape[1] <= SMALL_ROWS:
        return SMALL_TILES, False
    if _num_tiles(stack, MANY_TILES.block) >= many:
        return MANY_TILES, False
    return (POLYNOMIAL_TILES if has_addend else GRAM_TILES), True


def _num_tiles(stack: Tensor, block: int) -> int:
    tiles = triton.cdiv(stack.shape[1], block)
    return stack.shape[0] * (tiles * (tiles + 1) // 2)


def _fits(x: Tensor) -> bool:
    """Whether the tiles for matrix units are for this type and GPU."""
    return x.dtype == torch.bfloat16 and capability(x) == HOPPER


def _readable(stack: Tensor) -> Tensor:
    """Return a stack, or a copy, that the copy engine can read: by rows or else by columns."""
    if has_aligned_rows(stack) or has_aligned_rows(stack.mT):
        return stack
    number, rows, columns = stack.shape
    return empty_aligned(number, rows, columns, stack).copy_(stack)


def has_aligned_rows(stack: Tensor) -> bool:
    """Return whether the copy engine can read the rows of a stack, (B, n, k), in place."""
    starts = (stack.data_ptr(), *(s * stack.itemsize for s in stack.stride()[:2]))
    return stack.stride(2) == 1 and all(start % 16 == 0 and start > 0 for start in starts)


def empty_aligned(matrices: int, n: int, k: int, like: Tensor) -> Tensor:
    """Create an uninitialised stack, (matrices, n, k), whose rows begin at multiples of 16 bytes.

    Args:
        matrices: number of matrices.
        n: number of rows.
        k: number of columns.
        like: tensor of the same dtype and device.
    """
    unit = 16 // like.itemsize
    width = triton.cdiv(k, unit) * unit
    return torch.empty(matrices, n, width, dtype=like.dtype, device=like.device)[:, :, :k]


def gram_triton(x: Tensor) -> Tensor:
    """Compute `gram` with the Triton kernel, in every shape."""
    return _symmetric(x, False, 0.0, 0.0, 1.0)


def gram_polynomial_triton(a: Tensor, alpha: float, beta: float, gamma: float) -> Tensor:
    """Compute `gram_polynomial` with the Triton kernel, in every shape."""
    return _symmetric(a, True, alpha, beta, gamma)


def _faster_gram(x: Tensor) -> Tensor:
    return gram_triton(x) if _pays(x, False) else _gram_torch(x)


def _faster_gram_polynomial(a: Tensor, alpha: float, beta: float, gamma: float) -> Tensor:
    run = gram_polynomial_triton if _pays(a, True) else _gram_polynomial_torch
    return run(a, alpha, beta, gamma)


def _pays(x: Tensor, has_addend: bool) -> bool:
    """Whether the kernel is faster than the matrix library; an addend is the polynomial's."""
    if not (backend_of(x) == "triton" and _fits(x)):
        return False
    matrices, (n, m) = x.shape[:-2].numel(), x.shape[-2:]
    if n <= SMALL_ROWS:
        more_than, largest = SMALL_GRAM
        if has_addend:
            return matrices == 1 or n <= SMALL_STACK
        return matrices == 1 and n > more_than and m <= largest
    return n >= MIN_ROWS and (has_addend or matrices * n * n * m >= MIN_PRODUCTS)


def shares_polynomial(stack: Tensor) -> bool:
    """Return whether a polynomial of more matrices has the same bits for those of a stack.

    A program of the kernel has a tile of one matrix, for few rows, and the matrix library computes
    the squares of a stack.

    Args:
        stack: (B, n, m).
    """
    return stack.shape[-2] <= MAX_SHARED and _pays(stack, True) and not _pays(stack, False)


gram = Operation(
    "gram", _faster_gram, _gram_torch,
    "x: real[*B, N, K]",
    where=("len(B) < 2",),
)  # fmt: skip
"""Multiply a matrix by its own transpose: a[i, j] = sum over k of x[i, k] * x[j, k].

On Hopper GPUs the kernel computes those bfloat16 matrices that it is faster on, by shape (see
the module); the matrix library computes all others.

Args:
    x: (n, m), or a stack (b, n, m), bfloat16 or float32, any strides.

Returns:
    (n, n) or (b, n, n) in the dtype of `x`, accumulated in float32. The kernel's is exactly
    symmetric; the library's to rounding.
"""
gram_polynomial = Operation(
    "gram_polynomial", _faster_gram_polynomial, _gram_polynomial_torch,
    "a: real[*B, N, N]; alpha; beta; gamma",
    where=("len(B) < 2",),
)  # fmt: skip
"""Evaluate alpha I + beta a + gamma a @ a for a symmetric matrix.

With the coefficients of Newton-Schulz the product of this with x is an iteration. The kernel
rounds once, and is used on Hopper GPUs for bfloat16 of the shapes that it is faster on.

Args:
    a: (n, n), or a stack (b, n, n), bfloat16 or float32, symmetric, any strides.
    alpha: of the identity.
    beta: of the matrix.
    gamma: of its square, which is accumulated in float32.

Returns:
    Like `a`; exactly symmetric from the kernel, to rounding from the library.
"""
