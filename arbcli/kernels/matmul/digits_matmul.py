"""`arranged_matmul` for weights that are all digits: y = added + gate(rms_norm(x) @ w.T).

z is arranged as one byte a weight, each row padded with zeros to whole planes of 32 weights, and
the scales, over the unit of z, as bf16, one a plane: 1.06 bytes a weight. A weight is z * scale
rounded to bf16, the same that `decode_weight` gives. Norm, gate and sum can each be left out; the
norm's division is done last, on the products.

Work. A thread has 16 neighbouring weights of some rows at a time, so that x is loaded once for all
of these rows, and adds up its products; threads are summed at the end.
"""

from collections.abc import Iterator
from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional

from arbcli.kernels.codec.decode_digits import digits_torch, round_weight, with_remainders
from arbcli.kernels.codec.packed import Packed, random_packed
from arbcli.kernels.codec.packing import PLANE
from arbcli.kernels.codec.scales import scales_torch
from arbcli.kernels.matmul.arranged_matmul import check_few_rows, with_torch
from arbcli.kernels.runtime._triton import INTERPRETED, tl, triton
from arbcli.kernels.runtime.backend import uses_triton
from arbcli.kernels.runtime.overlap import overlap_options, wait_for_last
from arbcli.kernels.runtime.spec import MATRIX, Case, Gate, KernelSpec, Timing

LARGEST_Z = 127


class ArrangedDigits(NamedTuple):
    """A matrix as one byte a weight, and its scales."""

    z: Tensor
    """(rows, planes, 32) int8."""
    scales: Tensor
    """(rows, planes) bfloat16."""
    out_features: int
    """N: elements of a result, after gating; half of the rows then."""
    in_features: int
    """K."""
    gated: bool
    """Whether the lower half of the rows is the gate's other input."""


def arrange_digits(packed: Packed, gated: bool = False) -> ArrangedDigits:
    """Arrange a packed matrix whose weights are all digits.

    Args:
        packed: N rows by K weights, in groups of a multiple of 32.
        gated: whether results are to be gated; then N is even.

    Raises:
        ValueError: a dtype or a shape does not fit, or z is beyond what a byte holds.
    """
    packed.check()
    if packed.group_size % PLANE or packed.remainder is None:
        raise ValueError(f"need all digits in groups of whole planes, got {packed.group_size}")
    rows, in_features = packed.out_features, packed.in_features
    if gated and rows % 2:
        raise ValueError(f"{rows} rows are not two halves")
    planes = -(-in_features // PLANE)
    z = torch.zeros(rows, planes * PLANE, dtype=torch.int8, device=packed.trits.device)
    most = max(1, (1 << 26) // max(1, in_features))
    for start in range(0, rows, most):
        part = slice(start, min(start + most, rows))
        values = digits_torch(packed, torch.float32, part).mul_(packed.unit)
        if int(values.abs().amax()) > LARGEST_Z:
            raise ValueError(f"z is beyond {LARGEST_Z}, which a byte holds")
        z[part, :in_features] = values.to(torch.int8)
    group = torch.arange(planes, device=z.device) * PLANE // packed.group_size
    scales = scales_torch(packed.exponent, packed.fraction)[:, group] / packed.unit
    # a kernel that overlaps the one before it reads them without waiting for any kernel
    if z.is_cuda:
        torch.cuda.synchronize(z.device)
    return ArrangedDigits(
        z.view(rows, planes, PLANE), scales.bfloat16(), rows // (1 + gated), in_features, gated
    )


def digits_matmul_reference(
    x: Tensor,
    z: Tensor,
    scales: Tensor,
    out_features: int,
    in_features: int,
    gated: bool,
    eps: float | None,
    added: Tensor | None,
    dtype: torch.dtype,
) -> Tensor:
    """Compute what `digits_matmul` must return, in float64."""
    weight = (z.double() * scales.double()[:, :, None]).to(torch.bfloat16).double()
    x = x.double()
    if eps is not None:
        x = x / ((x * x).sum(1, keepdim=True) / in_features + eps) ** 0.5
    y = x @ weight.flatten(1)[:, :in_features].T
    if gated:
        gate, up = y[:, :out_features], y[:, out_features:]
        y = gate / (1 + torch.exp(-gate)) * up
    return y if added is None else added.double() + y


def _digits_matmul_torch(x, z, scales, out_features, in_features, gated, eps, added, dtype):
    weight = (z.float() * scales.float()[:, :, None]).bfloat16().float().flatten(1)
    x = x.float()
    if eps is not None:
        x = functional.rms_norm(x, x.shape[1:], eps=eps)
    y = x @ weight[:, :in_features].T
    if gated:
        y = functional.silu(y[:, :out_features]) * y[:, out_features:]
    return (y if added is None else added + y).to(dtype)


@triton.jit
def _weights(z, scale, INTERPRETED: tl.constexpr):
    """Multiply z by its scale, and round to bf16: float32 [rows, planes, 32]."""
    weight = z.to(tl.float32) * scale
    # the interpreter rounds bf16 wrongly
    return round_weight(weight, 1) if INTERPRETED else weight.to(tl.bfloat16).to(tl.float32)


@triton.jit
def _load_rows(z_ptr, scales_ptr, n, plane, rows, planes):
    """Load z, [rows, planes, 32] int8, and scales, [rows, planes, 1], of a tile."""
    mask = (n < rows) & (plane < planes)
    at = n * planes + plane
    j = tl.arange(0, 32)[None, None, :]
    z = tl.load(z_ptr + at * 32 + j, mask=mask, other=0)
    return z, tl.load(scales_ptr + at, mask=mask, other=0).to(tl.float32)


@triton.jit(do_not_specialize=["N"])
def _digits_matmul_kernel(
    x_ptr, z_ptr, scales_ptr, added_ptr, y_ptr,
    N, K, planes, eps,
    M: tl.constexpr, NORM: tl.constexpr, GATED: tl.constexpr, ADD: tl.constexpr,
    BLOCK_N: tl.constexpr, BLOCK_P: tl.constexpr, INTERPRETED: tl.constexpr, OVERLAP: tl.constexpr,
):  # fmt: skip
    """Compute `BLOCK_N` elements of each row of the result, `BLOCK_P` planes at a time."""
    offs_n = tl.program_id(0).to(tl.int64) * BLOCK_N + tl.arange(0, BLOCK_N)
    n = offs_n[:, None, None]
    j = tl.arange(0, 32)[None, None, :]
    plane = tl.arange(0, BLOCK_P)[None, :, None]
    rows = N * 2 if GATED else N
    z, scale = _load_rows(z_ptr, scales_ptr, tl.where(n < N, n, rows), plane, rows, planes)
    if GATED:
        z_up, scale_up = _load_rows(z_ptr, scales_ptr, n + N, plane, rows, planes)
    wait_for_last(OVERLAP)
    zero = tl.zeros((BLOCK_N, BLOCK_P, 32), dtype=tl.float32)
    squares = tl.zeros((1, BLOCK_P, 32), dtype=tl.float32)
    sums, ups, of_x = (), (), ()
    for _ in tl.static_range(M):
        sums, ups, of_x = sums + (zero,), ups + (zero,), of_x + (squares,)  # noqa: RUF005
    for start in range(0, planes, BLOCK_P):
        if start > 0:
            plane = start + tl.arange(0, BLOCK_P)[None, :, None]
            z, scale = _load_rows(z_ptr, scales_ptr, tl.where(n < N, n, rows), plane, rows, planes)
            if GATED:
                z_up, scale_up = _load_rows(z_ptr, scales_ptr, n + N, plane, rows, planes)
        k = plane * 32 + j
        weight = _weights(z, scale, INTERPRETED)
        if GATED:
            weight_up = _weights(z_up, scale_up, INTERPRETED)
        new_sums, new_ups, new_of_x = (), (), ()
        for m in tl.static_range(M):
            x = tl.load(x_ptr + m * K + k, mask=k < K, other=0).to(tl.float32)
            new_sums = new_sums + (sums[m] + weight * x,)  # noqa: RUF005
            new_ups = new_ups + (ups[m] + weight_up * x if GATED else ups[m],)  # noqa: RUF005
            new_of_x = new_of_x + (of_x[m] + x * x if NORM else of_x[m],)  # noqa: RUF005
        sums, ups, of_x = new_sums, new_ups, new_of_x
    for m in tl.static_range(M):
        factor = 1.0
        if NORM:
            factor = tl.rsqrt(tl.sum(of_x[m]) / K + eps)
        y = tl.sum(tl.sum(sums[m], axis=2), axis=1) * factor
        if GATED:
            up = tl.sum(tl.sum(ups[m], axis=2), axis=1) * factor
            y = y / (1 + tl.exp(-y)) * up
        at, mask = m * N + offs_n, offs_n < N
        if ADD:
            y += tl.load(added_ptr + at, mask=mask, other=0).to(tl.float32)
        tl.store(y_ptr + at, y.to(y_ptr.dtype.element_ty), mask=mask)


def _digits_matmul_triton(x, z, scales, out_features, in_features, gated, eps, added, dtype):
    y = torch.empty(len(x), out_features, dtype=dtype, device=x.device)
    to = y if added is None else added.contiguous()
    planes = scales.shape[1]
    # the sums of every row of x are in registers
    block_n = max(1, 4 // len(x) // (1 + gated))
    block_p = min(64 if len(x) <= 2 else 16, triton.next_power_of_2(planes))
    _digits_matmul_kernel[(triton.cdiv(out_features, block_n),)](
        x, z, scales, to, y, out_features, in_features, planes, 0.0 if eps is None else eps,
        M=len(x), NORM=eps is not None, GATED=gated, ADD=added is not None,
        BLOCK_N=block_n, BLOCK_P=block_p, INTERPRETED=INTERPRETED,
        num_warps=4, **overlap_options(x),
    )  # fmt: skip
    return y


def digits_matmul(
    x: Tensor,
    weight: ArrangedDigits,
    eps: float | None = None,
    added: Tensor | None = None,
    dtype: torch.dtype | None = None,
) -> Tensor:
    """Normalise few rows, multiply them by an arranged matrix, gate the result and add to it.

    Args:
        x: (M, K) bfloat16, contiguous, 1 to 8 rows.
        weight: the matrix, and whether the result is gated.
        eps: added to the mean square; None leaves the norm out.
        added: like the result; None leaves the sum out.
        dtype: of the result, bfloat16 or float32; by default that of `x`.

    Returns:
        (M, N) in `dtype`, accumulated in float32 and rounded once.

    Raises:
        ValueError: a dtype or a shape does not fit.
    """
    dtype = dtype or x.dtype
    check_few_rows(x, weight.in_features, added, (dtype, weight.out_features))
    run = _digits_matmul_triton if uses_triton(x) else _digits_matmul_torch
    return run(x, *weight, eps, added, dtype)


SHAPES = (
    (1, 1, 8, 32, False, 0.1, False), (1, 34, 1000, 32, True, 1e-6, True),
    (1, 17, 328, 96, False, 1e-6, True), (2, 6, 4136, 64, False, None, False),
    (5, 10, 168, 32, True, 1e-6, False), (8, 9, 2090, 32, False, 1e-6, True),
)  # fmt: skip
"""(M, rows, K, G, gated, eps, whether something is added)."""


def random_digits(rows: int, in_features: int, group_size: int, generator) -> Packed:
    """Draw a matrix of all digits with z within what a byte holds."""
    packed = random_packed(rows, in_features, group_size, generator, spread=8)
    _, (_, packed) = with_remainders(packed, generator)
    return packed


def _cases(device: torch.device, _group_size: int) -> Iterator[Case]:
    generator = torch.Generator().manual_seed(0)
    dtypes = (torch.float32,) if device.type == "cpu" else (torch.float32, torch.bfloat16)
    for m, rows, in_features, group_size, gated, eps, adds in SHAPES:
        weight = arrange_digits(random_digits(rows, in_features, group_size, generator), gated)
        z = torch.randint(-LARGEST_Z, LARGEST_Z + 1, weight.z.shape, generator=generator)
        z.flatten(1)[:, in_features:] = 0
        weight = weight._replace(z=z.to(torch.int8))
        x = torch.randn(m, in_features, generator=generator)
        x *= 2.0 ** torch.randint(-3, 4, x.shape, generator=generator)
        added = torch.randn(m, weight.out_features, generator=generator)
        parts = weight.z.to(device), weight.scales.to(device), *weight[2:]
        for dtype in dtypes:  # bf16 results have a coarser gate
            label = f"{m}x{rows}x{in_features}{' gate' * gated}{' norm' * (eps is not None)}"
            yield Case(
                f"{label}{' sum' * adds} {str(dtype).removeprefix('torch.')}",
                (x.to(device, torch.bfloat16), *parts, eps,
                 added.to(device, dtype) if adds else None, dtype),
                peer=_digits_matmul_torch if dtype == torch.bfloat16 else None,
            )  # fmt: skip


def _timings(device: torch.device, _group_size: int) -> Iterator[Timing]:
    generator = torch.Generator(device)
    half = {"device": device, "dtype": torch.bfloat16}
    shapes = ((1, 11264, 2048, True), (1, 2048, 5632, False), (1, *MATRIX, False))
    for m, rows, in_features, gated in (*shapes, (1, 16384, 16384, False), (8, *MATRIX, False)):
        z = torch.randint(
            -LARGEST_Z, LARGEST_Z + 1, (rows, -(-in_features // PLANE), PLANE),
            generator=generator, device=device, dtype=torch.int8,
        )  # fmt: skip
        scales = torch.full(z.shape[:2], 2.0**-12, **half)
        weight = ArrangedDigits(z, scales, rows // (1 + gated), in_features, gated)
        dense = (z * scales[:, :, None]).flatten(1)[:, :in_features].contiguous()
        x, added = torch.randn(m, in_features, **half), torch.randn(m, weight.out_features, **half)
        yield Timing(
            f"{m}x{rows}x{in_features}{' gate' * gated}",
            (x, *weight, 1e-6, added, x.dtype),
            peer=partial(with_torch, x, dense, gated, added),
            peer_name="torch and cuBLAS bf16",
            flops=2 * m * rows * in_features,
        )


DIGITS_MATMUL = KernelSpec(
    "digits_matmul",
    _digits_matmul_triton,
    _digits_matmul_torch,
    digits_matmul_reference,
    _cases,
    Gate(
        exact=False,
        relative=1e-5,
        peer_slack=0.1,
        reason="float32 sums of up to 4136 products; in bf16 one rounding, as torch's float32 has",
    ),
    timings=_timings,
)
