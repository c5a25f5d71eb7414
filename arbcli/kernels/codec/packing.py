"""Pack five trits per byte, and unpack them: byte = sum over d of (trit_d + 1) * 3**d, 0..242.

`layout` describes the position of each weight.
"""

import torch
from torch import Tensor

from arbcli.kernels.codec.layout import BLOCK, MAX_BYTE, PLANE, TRITS_PER_BYTE, row_bytes
from arbcli.kernels.runtime.operation import Operation, tl, triton


def has_planes(group_size: int) -> bool:
    """Return whether groups consist of whole planes, so that each plane has one scale."""
    return group_size % PLANE == 0


def _planes(flat: Tensor, in_features: int) -> tuple[Tensor, Tensor]:
    """Split (N, bytes, 5) digits into full blocks and the short block, as views."""
    blocks = in_features // BLOCK
    full = flat[:, : blocks * PLANE].unflatten(1, (blocks, PLANE))  # (N, blocks, 32, 5)
    return full, flat[:, blocks * PLANE :]  # (N, width, 5)


_DIGITS = torch.tensor(
    [[byte // 3**d % 3 - 1 for d in range(5)] + [0] * 3 for byte in range(256)], dtype=torch.int8
).view(torch.int64)[:, 0]
"""The five trits of every byte, as five bytes of one int64, so that one lookup fetches all."""


def unpack_trits_torch(packed: Tensor, in_features: int, dtype: torch.dtype = torch.int8) -> Tensor:
    """Unpack with a lookup table of 256 entries."""
    numbers = _DIGITS.to(packed.device).index_select(0, packed.to(torch.int32).flatten())
    digits = numbers.view(torch.int8).view(*packed.shape, 8)[:, :, :TRITS_PER_BYTE]
    full, short = _planes(digits, in_features)
    blocks, width = full.shape[1], short.shape[1]
    trits = digits.new_empty(len(packed), blocks * BLOCK + width * TRITS_PER_BYTE)
    trits[:, : blocks * BLOCK].unflatten(1, (blocks, TRITS_PER_BYTE, PLANE)).copy_(full.mT)
    trits[:, blocks * BLOCK :].unflatten(1, (TRITS_PER_BYTE, width)).copy_(short.mT)
    return trits[:, :in_features].to(dtype)


def pack_trits_torch(trits: Tensor) -> Tensor:
    """Pack the five planes of each block by Horner's rule."""
    rows, in_features = trits.shape
    blocks, rest = divmod(in_features, BLOCK)
    width = -(-rest // TRITS_PER_BYTE)
    packed = torch.empty(rows, row_bytes(in_features), dtype=torch.uint8, device=trits.device)
    full = trits[:, : blocks * BLOCK].unflatten(1, (blocks, TRITS_PER_BYTE, PLANE))
    short = trits.new_zeros(rows, TRITS_PER_BYTE * width)
    short[:, :rest] = trits[:, blocks * BLOCK :]
    short = short.unflatten(1, (TRITS_PER_BYTE, width))
    packed[:, : blocks * PLANE] = _horner(full.movedim(2, 0)).flatten(1)
    packed[:, blocks * PLANE :] = _horner(short.movedim(1, 0))
    return packed


def _horner(planes: Tensor) -> Tensor:
    """Combine five planes of trits, the least significant first."""
    byte = planes[4]
    for digit in (3, 2, 1, 0):
        byte = torch.add(planes[digit], byte, alpha=3)
    return byte.add_(MAX_BYTE // 2).view(torch.uint8)  # -121..121, which int8 holds


@triton.jit
def digit_of(byte, digit: tl.constexpr):
    """Extract trit `digit` of packed bytes as int32 in {-1, 0, +1}."""
    power: tl.constexpr = 3**digit
    return (byte.to(tl.int32) // power) % 3 - 1


@triton.jit
def first_digit(byte):
    """Convert bytes to the fixed-point numbers of `take_trit`: byte / 81 * 2**30, rounded up."""
    return byte.to(tl.uint32) * 13256072


@triton.jit
def take_trit(left, digit: tl.constexpr):
    """Decode the next trit T of bytes, for digits 4 down to 0; return it and the rest of the bytes.

    The top two bits of `left` hold a digit and the bits below a fraction, mod 4. Even digits d are
    there as they are, 0..2; flipping the lower bit gives -T mod 4. As the top bits of a float32, 00
    is 0, 01 is 2 and 11 is -2, which is -2 T. Then 3 left + T has the next digit less 1 on top:
    that is its T mod 4, and reads as 2 T. From there 3 left + T has the digit after it, even again.

    Returns:
        -2 T as float32 for even digits and 2 T for odd ones, and the new `left`.
    """
    if digit % 2 == 0:
        bits = (left ^ 0x40000000) & 0xC0000000
        left = left * 3 - bits
    else:
        bits = left & 0xC0000000
        left = left * 3 + bits
    return bits.to(tl.float32, bitcast=True), left


@triton.jit
def place(trit, digit: tl.constexpr):
    """Compute the contribution of trit `digit` to its byte."""
    power: tl.constexpr = 3**digit
    return (trit + 1) * power


@triton.jit
def plane_offsets(offs_byte, K, digit: tl.constexpr):
    """Compute the index k of the weight in `digit` of each byte of a row.

    Padding, and bytes beyond the end of the row, get k >= K, so that one comparison masks both.
    """
    block = offs_byte // 32
    rest = K - block * 160
    width = tl.minimum((rest + 4) // 5, 32)
    j = offs_byte % 32
    k = block * 160 + width * digit + j
    return tl.where(j < width, k, K)


@triton.jit
def trit_positions(k, K):
    """Compute the byte index of each weight `k` of a row, and the factor for `trit_at`.

    The factor is 2**32 / 3**(digit + 1), rounded up. Times the byte, mod 2**32, it is a fraction of
    2**32: its first, second and last third are the trits -1, 0 and 1. Rounding adds under 2**8.
    """
    return positions_in_block(k // 160, k % 160, K)


@triton.jit
def positions_in_block(block, offset, K):
    """Compute `trit_positions` of weight `offset` of a block."""
    width = tl.minimum((K - block * 160 + 4) // 5, 32)
    byte, factor = block * 32 + offset, 1431655766
    for digit in tl.static_range(1, 5):
        later = offset >= digit * width
        byte = tl.where(later, block * 32 + offset - digit * width, byte)
        factor = tl.where(later, 2**32 // 3 ** (digit + 1) + 1, factor)
    return byte, factor.to(tl.uint32)


@triton.jit
def trit_at(byte, factor):
    """Decode one trit of each byte as float32; see `trit_positions`."""
    # the high word of 3 * fraction is 0, 1 or 2; added to the bits of 2**23 it is an exact float32
    lifted = tl.umulhi(byte.to(tl.uint32) * factor, 3) + 0x4B000000
    return lifted.to(tl.float32, bitcast=True) - 8388609.0


@triton.jit
def _unpack_trits_kernel(
    packed_ptr, trits_ptr,
    N, K, row_bytes,
    stride_pn, stride_pb, stride_tn, stride_tk,
    BLOCK_N: tl.constexpr, BLOCK_B: tl.constexpr,
):  # fmt: skip
    offs_n = tl.program_id(0).to(tl.int64) * BLOCK_N + tl.arange(0, BLOCK_N)
    offs_b = tl.program_id(1) * BLOCK_B + tl.arange(0, BLOCK_B)
    mask_n = offs_n[:, None] < N
    byte = tl.load(  # [BLOCK_N, BLOCK_B] uint8
        packed_ptr + offs_n[:, None] * stride_pn + offs_b[None, :] * stride_pb,
        mask=mask_n & (offs_b < row_bytes)[None, :], other=0,
    )  # fmt: skip
    for digit in tl.static_range(5):
        k = plane_offsets(offs_b, K, digit)
        trit = digit_of(byte, digit).to(tl.int8)
        trits_ptrs = trits_ptr + offs_n[:, None] * stride_tn + k[None, :] * stride_tk
        tl.store(trits_ptrs, trit, mask=mask_n & (k < K)[None, :])


@triton.jit
def _pack_trits_kernel(
    trits_ptr, packed_ptr,
    N, K, row_bytes,
    stride_tn, stride_tk, stride_pn, stride_pb,
    BLOCK_N: tl.constexpr, BLOCK_B: tl.constexpr,
):  # fmt: skip
    offs_n = tl.program_id(0).to(tl.int64) * BLOCK_N + tl.arange(0, BLOCK_N)
    offs_b = tl.program_id(1) * BLOCK_B + tl.arange(0, BLOCK_B)
    mask_n = offs_n[:, None] < N
    byte = tl.zeros((BLOCK_N, BLOCK_B), dtype=tl.int32)
    for digit in tl.static_range(5):
        k = plane_offsets(offs_b, K, digit)
        trit = tl.load(  # [BLOCK_N, BLOCK_B] int8, 0 in the padding
            trits_ptr + offs_n[:, None] * stride_tn + k[None, :] * stride_tk,
            mask=mask_n & (k < K)[None, :], other=0,
        )  # fmt: skip
        byte += place(trit.to(tl.int32), digit)
    packed_ptrs = packed_ptr + offs_n[:, None] * stride_pn + offs_b[None, :] * stride_pb
    tl.store(packed_ptrs, byte.to(tl.uint8), mask=mask_n & (offs_b < row_bytes)[None, :])


def byte_tiles(rows: int, num_bytes: int, block_n: int = 32) -> tuple[int, int]:
    """Count the programs that cover (rows, num_bytes) packed bytes in tiles of `block_n` by 32."""
    return triton.cdiv(rows, block_n), triton.cdiv(num_bytes, PLANE)


def _unpack_trits_triton(packed: Tensor, in_features: int) -> Tensor:
    rows, num_bytes = packed.shape
    trits = torch.empty(rows, in_features, dtype=torch.int8, device=packed.device)
    if trits.numel():
        _unpack_trits_kernel[byte_tiles(rows, num_bytes)](
            packed, trits, rows, in_features, num_bytes, *packed.stride(), *trits.stride(),
            BLOCK_N=32, BLOCK_B=PLANE,
        )  # fmt: skip
    return trits


def _pack_trits_triton(trits: Tensor) -> Tensor:
    rows, in_features = trits.shape
    num_bytes = row_bytes(in_features)
    packed = torch.empty(rows, num_bytes, dtype=torch.uint8, device=trits.device)
    if packed.numel():
        _pack_trits_kernel[byte_tiles(rows, num_bytes)](
            trits, packed, rows, in_features, num_bytes, *trits.stride(), *packed.stride(),
            BLOCK_N=32, BLOCK_B=PLANE,
        )  # fmt: skip
    return packed


def illegal_bytes(packed: Tensor) -> int:
    """Count bytes that are not five trits (243..255) in uint8 of any shape, on the CPU.

    Uses numpy: several threads may call it at once, and torch would start threads for each call.
    """
    flat = packed.cpu().reshape(-1).numpy()
    return int((flat > MAX_BYTE).sum()) if flat.max(initial=0) > MAX_BYTE else 0


pack_trits = Operation(
    "pack_trits", _pack_trits_triton, pack_trits_torch,
    "trits: int8[N, K]",
)  # fmt: skip
"""Pack five trits per byte.

Args:
    trits: (N, K) int8 in {-1, 0, +1}, any strides.

Returns:
    (N, row_bytes(K)) uint8 in 0..242.
"""
unpack_trits = Operation(
    "unpack_trits", _unpack_trits_triton, unpack_trits_torch,
    "packed: uint8[N, row_bytes(in_features)]; in_features",
)  # fmt: skip
"""Unpack bytes to trits.

Args:
    packed: (N, row_bytes(K)) uint8, any strides.
    in_features: K, the number of weights per row.

Returns:
    (N, K) int8 in {-1, 0, +1}.
"""
