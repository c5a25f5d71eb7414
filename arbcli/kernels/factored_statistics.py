"""Mean squares of a gradient's rows and columns, R[n] = mean of g[n, :]**2, and their memory.

A running statistic is two int8 digits of its log2 in steps of 1/128: log2 = whole + fraction / 128,
whole = -128 standing for one never set. It is averaged arithmetically and then its log is rounded
stochastically: an average of logs trails behind, and a rounded one would stand still.
"""

import math
from collections.abc import Iterator

import torch
from torch import Tensor

from arbcli.kernels._triton import tl, triton
from arbcli.kernels.backend import uses_triton
from arbcli.kernels.random_bits import random_bits, random_bits_reference, random_words
from arbcli.kernels.spec import MATRIX, Case, Gate, KernelSpec, Timing

UNSET = -128
"""The whole digit of a statistic that has seen no gradient."""
LOWEST, HIGHEST = -127 * 128, 127 * 128 + 127
"""128 log2 of a statistic saturates here, the pair of digits as one."""


def mean_squares_reference(grad: Tensor) -> tuple[Tensor, Tensor]:
    """Compute what `mean_squares` must return, in float64."""
    squares = grad.to(torch.float64) ** 2
    return squares.mean(dim=1) + 1e-30, squares.mean(dim=0) + 1e-30


def averaged_digits(whole: int, fraction: int, value: float, word: int) -> tuple[int, int]:
    """Average `value` into one statistic, given the 16 random bits `word` that round it."""
    average = value if whole == -128 else 0.99 * 2 ** (whole + fraction / 128) + 0.01 * value
    t = 128 * math.log2(average) if average > 0 else -math.inf
    t = min(max(t, -127 * 128), 127 * 128 + 127)
    return divmod(math.floor(t + word / 65536), 128)


def statistic_value_reference(statistic: Tensor) -> Tensor:
    """Compute what `statistic_value` must return, in float64."""
    whole, fraction = statistic.to(torch.float64).unbind(dim=1)
    return torch.where(whole == -128, 0, 2 ** (whole + fraction / 128))


def average_statistic_reference(
    statistic: Tensor, value: Tensor, key: Tensor, ok: Tensor
) -> Tensor:
    """Compute what `average_statistic` must do and return, one statistic at a time."""
    if int(ok):
        words = (random_bits_reference(int(key), 1, len(value))[0] % 65536).tolist()
        rows = zip(statistic.tolist(), value.tolist(), words, strict=True)
        digits = [averaged_digits(*pair, new, word) for pair, new, word in rows]
        statistic.copy_(torch.tensor(digits, dtype=torch.int8).reshape(-1, 2))
    return statistic_value_reference(statistic)


def _mean_squares_torch(grad):
    squares = grad.to(torch.float32).square()
    return squares.mean(dim=1) + 1e-30, squares.mean(dim=0) + 1e-30


def _average_statistic_torch(statistic, value, key, ok):
    old = statistic_value(statistic)
    average = torch.where(statistic[:, 0] == UNSET, value, 0.99 * old + 0.01 * value)
    t = (128 * torch.log2(average)).clamp(LOWEST, HIGHEST)
    index = torch.arange(len(value), dtype=torch.int32, device=value.device)
    word = random_bits(key, index.new_zeros(1), index)[0] & 0xFFFF
    low = torch.floor(t)
    # the same as floor(t + word / 65536), which would lose bits of the word to a large t
    t = low.to(torch.int32) + (((t - low) * 65536).to(torch.int32) + word >> 16)
    digits = torch.stack((t >> 7, t & 127), dim=1).to(torch.int8)
    statistic.copy_(torch.where(ok != 0, digits, statistic))
    return statistic_value(statistic)


def statistic_value(statistic: Tensor) -> Tensor:
    """Decode (L, 2) int8 digits to (L,) float32: 2**(whole + fraction / 128), 0 where unset."""
    whole, fraction = statistic.to(torch.float32).unbind(dim=1)
    return torch.where(whole == UNSET, 0, torch.exp2(whole + fraction / 128))


@triton.jit
def _mean_squares_kernel(
    grad_ptr, rows_ptr, columns_ptr,
    N, K,
    stride_gn, stride_gk,
    BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    tile_n = tl.program_id(0).to(tl.int64)
    tile_k = tl.program_id(1).to(tl.int64)
    offs_n = tile_n * BLOCK_N + tl.arange(0, BLOCK_N)
    offs_k = tile_k * BLOCK_K + tl.arange(0, BLOCK_K)
    mask_n, mask_k = offs_n < N, offs_k < K
    grad_ptrs = grad_ptr + offs_n[:, None] * stride_gn + offs_k[None, :] * stride_gk
    grad = tl.load(grad_ptrs, mask=mask_n[:, None] & mask_k[None, :], other=0).to(tl.float32)
    squares = grad * grad  # [BLOCK_N, BLOCK_K]
    tl.store(rows_ptr + tile_k * N + offs_n, tl.sum(squares, axis=1), mask=mask_n)
    tl.store(columns_ptr + tile_n * K + offs_k, tl.sum(squares, axis=0), mask=mask_k)


@triton.jit
def _mean_partials_kernel(
    partials_ptr, mean_ptr,
    P, L, count,
    BLOCK_P: tl.constexpr, BLOCK_L: tl.constexpr,
):  # fmt: skip
    """Sum (P, L) partial sums over P, always in the same order, and divide by `count`."""
    offs_l = tl.program_id(0).to(tl.int64) * BLOCK_L + tl.arange(0, BLOCK_L)
    mask_l = offs_l < L
    total = tl.zeros((BLOCK_P, BLOCK_L), dtype=tl.float32)
    for start in range(0, P, BLOCK_P):
        offs_p = start + tl.arange(0, BLOCK_P)
        partials_ptrs = partials_ptr + offs_p.to(tl.int64)[:, None] * L + offs_l[None, :]
        total += tl.load(partials_ptrs, mask=(offs_p < P)[:, None] & mask_l[None, :], other=0)
    tl.store(mean_ptr + offs_l, tl.sum(total, axis=0) / count + 1e-30, mask=mask_l)


@triton.jit
def _decode(whole, fraction):
    """Decode digits to float32 inside a kernel, as `statistic_value` does."""
    log = whole.to(tl.float32) + fraction.to(tl.float32) / 128
    return tl.where(whole == -128, 0.0, tl.exp2(log))


@triton.jit
def _average_statistic_kernel(
    statistic_ptr, value_ptr, key_ptr, ok_ptr, running_ptr,
    L,
    stride_sl, stride_sd, stride_vl,
    LOWEST: tl.constexpr, HIGHEST: tl.constexpr, BLOCK_L: tl.constexpr,
):  # fmt: skip
    offs_l = tl.program_id(0) * BLOCK_L + tl.arange(0, BLOCK_L)
    mask = offs_l < L
    offs = offs_l.to(tl.int64)
    whole_ptrs = statistic_ptr + offs * stride_sl
    fraction_ptrs = whole_ptrs + stride_sd
    whole = tl.load(whole_ptrs, mask=mask, other=0)  # [BLOCK_L] int8
    fraction = tl.load(fraction_ptrs, mask=mask, other=0)
    if tl.load(ok_ptr) != 0:
        value = tl.load(value_ptr + offs * stride_vl, mask=mask, other=1)
        average = tl.where(whole == -128, value, 0.99 * _decode(whole, fraction) + 0.01 * value)
        t = tl.minimum(tl.maximum(128 * tl.log2(average), LOWEST), HIGHEST)
        word = random_words(tl.load(key_ptr), tl.zeros_like(offs_l), offs_l) & 0xFFFF
        low = tl.floor(t)
        above = ((t - low) * 65536).to(tl.int32)
        digits = low.to(tl.int32) + ((above + word.to(tl.int32)) >> 16)
        whole, fraction = (digits >> 7).to(tl.int8), (digits & 127).to(tl.int8)
        tl.store(whole_ptrs, whole, mask=mask)
        tl.store(fraction_ptrs, fraction, mask=mask)
    tl.store(running_ptr + offs, _decode(whole, fraction), mask=mask)


def _mean_squares_triton(grad):
    rows, columns = grad.shape
    tiles_n, tiles_k = triton.cdiv(rows, 64), triton.cdiv(columns, 128)
    row_sums = torch.empty(tiles_k, rows, dtype=torch.float32, device=grad.device)
    column_sums = torch.empty(tiles_n, columns, dtype=torch.float32, device=grad.device)
    _mean_squares_kernel[(tiles_n, tiles_k)](
        grad, row_sums, column_sums, rows, columns, *grad.stride(), BLOCK_N=64, BLOCK_K=128
    )
    return _mean_partials(row_sums, columns), _mean_partials(column_sums, rows)


def _mean_partials(partials, count):
    num_partials, length = partials.shape
    mean = torch.empty(length, dtype=torch.float32, device=partials.device)
    _mean_partials_kernel[(triton.cdiv(length, 64),)](
        partials, mean, num_partials, length, count, BLOCK_P=32, BLOCK_L=64
    )
    return mean


def _average_statistic_triton(statistic, value, key, ok):
    running = torch.empty(len(value), dtype=torch.float32, device=value.device)
    if len(value):
        _average_statistic_kernel[(triton.cdiv(len(value), 256),)](
            statistic, value, key, ok, running, len(value), *statistic.stride(), value.stride(0),
            LOWEST=LOWEST, HIGHEST=HIGHEST, BLOCK_L=256,
        )  # fmt: skip
    return running


def mean_squares(grad: Tensor) -> tuple[Tensor, Tensor]:
    """Average the squares of a gradient over its rows and over its columns, in one pass.

    Args:
        grad: (N, K) float32 or bfloat16, not empty, any strides.

    Returns:
        (N,) and (K,) float32, each plus 1e-30; summed in float32, always in the same order.

    Raises:
        ValueError: a dtype or a shape does not fit.
    """
    got = f"{grad.dtype} of shape {tuple(grad.shape)}"
    if grad.dtype not in (torch.float32, torch.bfloat16) or grad.dim() != 2 or not grad.numel():
        raise ValueError(f"need a float32 or bfloat16 matrix that is not empty, got {got}")
    return _mean_squares_triton(grad) if uses_triton(grad) else _mean_squares_torch(grad)


def average_statistic(statistic: Tensor, value: Tensor, key: Tensor, ok: Tensor) -> Tensor:
    """Average new values into running statistics, in place: 0.99 old + 0.01 new, or new if unset.

    The log of the average is rounded to 1/128 as floor(t + r / 65536), t = 128 log2, with r the low
    16 bits of the random word (key, 0, l).

    Args:
        statistic: (L, 2) int8 digits, whole and fraction, any strides; changed.
        value: (L,) float32, not negative, any stride.
        key: int32 scalar tensor, from `stream_keys`.
        ok: int32 scalar tensor; where it is 0, nothing changes.

    Returns:
        (L,) float32, the statistics as they are decoded from the digits afterwards; 0 where unset.

    Raises:
        ValueError: a dtype or a shape does not fit.
    """
    if statistic.dtype != torch.int8 or statistic.dim() != 2 or statistic.shape[1] != 2:
        got = f"{statistic.dtype} {tuple(statistic.shape)}"
        raise ValueError(f"need int8 digits of shape (L, 2), got {got}")
    if value.dtype != torch.float32 or value.shape != statistic.shape[:1]:
        got = f"{value.dtype} {tuple(value.shape)}"
        raise ValueError(f"need {len(statistic)} float32 values, got {got}")
    for name, scalar in (("key", key), ("ok", ok)):
        if scalar.dtype != torch.int32 or scalar.dim() != 0:
            got = f"{scalar.dtype} {tuple(scalar.shape)}"
            raise ValueError(f"need `{name}` as an int32 scalar tensor, got {got}")
    run = _average_statistic_triton if uses_triton(statistic) else _average_statistic_torch
    return run(statistic, value, key, ok)


def _grad_cases(device: torch.device, _group_size: int) -> Iterator[Case]:
    generator = torch.Generator().manual_seed(0)
    for rows, columns in ((1, 1), (3, 33), (63, 123), (2113, 2), (1, 1311), (65, 257)):
        grad = torch.randn(rows, columns, generator=generator).to(device)
        yield Case(f"{rows}x{columns}", (grad,))
    yield Case("33x43 strided", (grad[::2, ::6],))
    yield Case("257x65 transposed", (grad.T,))
    yield Case("5x7 zeros", (torch.zeros(5, 7, device=device),))
    if device.type == "cuda":  # the interpreter computes wrongly in bf16
        grad = torch.randn(4097, 2048, generator=generator).to(device, torch.bfloat16)
        yield Case("4097x2048 bf16", (grad,))


def _statistic_cases(device: torch.device, _group_size: int) -> Iterator[Case]:
    generator = torch.Generator().manual_seed(1)

    def digits(length: int, low: int, high: int) -> Tensor:
        pairs = torch.randint(low * 128, high * 128, (length,), generator=generator)
        return torch.stack((pairs >> 7, pairs & 127), dim=1).to(device, torch.int8)

    def values(length: int, spread: float = 3.0) -> Tensor:
        return torch.exp(spread * torch.randn(length, generator=generator)).to(device)

    key, yes, no = (torch.tensor(x, dtype=torch.int32, device=device) for x in (-12345, 1, 0))
    for length in (1, 33, 1311):
        yield Case(f"{length} running", (digits(length, -3, 3), values(length), key, yes))
    unset = digits(300, -3, 3)
    unset[::3, 0] = UNSET
    yield Case("300 a third unset", (unset, values(300), key, yes))
    yield Case("300 refused", (unset, values(300), key, no))
    yield Case("100 wide range", (digits(100, -127, 128), values(100, 30.0), key, yes))
    wide = digits(129, -9, -8).T.contiguous().T
    yield Case("43x2 strided", (wide[::3], values(86, 1.0)[::2], key, yes))
    yield Case("65 tiny", (digits(65, -100, -98), values(65) * 1e-30, key, yes))
    yield Case("0 empty", (digits(0, 0, 1), values(0), key, yes))


def _grad_timings(device: torch.device, _group_size: int) -> Iterator[Timing]:
    grad = torch.randn(MATRIX, device=device, dtype=torch.bfloat16)
    yield Timing("11264x2048 bf16", (grad,))


def _statistic_timings(device: torch.device, _group_size: int) -> Iterator[Timing]:
    statistic = torch.zeros(MATRIX[0], 2, dtype=torch.int8, device=device)
    value = torch.rand(MATRIX[0], device=device)
    key, ok = torch.ones(2, dtype=torch.int32, device=device)
    yield Timing("11264", (statistic, value, key, ok), run=_average_statistic_triton)


def _with_state(run):
    """Wrap an implementation so that it returns what it left in the digits, decoded, too."""

    def with_state(statistic, *inputs):
        running = run(statistic, *inputs)
        return running, statistic_value_reference(statistic)

    return with_state


MEAN_SQUARES = KernelSpec(
    "mean_squares",
    _mean_squares_triton,
    _mean_squares_torch,
    mean_squares_reference,
    _grad_cases,
    Gate(exact=False, relative=1e-6, reason="float32 sums of up to thousands of squares"),
    timings=_grad_timings,
)
AVERAGE_STATISTIC = KernelSpec(
    "average_statistic",
    _with_state(_average_statistic_triton),
    _with_state(_average_statistic_torch),
    _with_state(average_statistic_reference),
    _statistic_cases,
    Gate(
        exact=False,
        relative=2 ** (1 / 128) - 1 + 1e-5,
        reason="a float log2 at a rounding boundary lands one step of 1/128, 0.54 %, to the side",
    ),
    timings=_statistic_timings,
)
