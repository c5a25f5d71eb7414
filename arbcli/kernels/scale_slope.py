"""Slope of the loss in the log of each scale: s[n, g] = sum over k in group g of grad * w."""

from collections.abc import Iterator

import torch
from torch import Tensor

from arbcli.kernels._triton import tl, triton
from arbcli.kernels.backend import row_chunks, uses_triton
from arbcli.kernels.decode_weight import (
    check_scales,
    decode_weight_reference,
    decode_weight_torch,
    load_scale,
    random_packed,
)
from arbcli.kernels.packing import check_packed, trit_at
from arbcli.kernels.spec import MATRIX, Case, Gate, KernelSpec, Timing


def scale_slope_reference(
    grad: Tensor, packed: Tensor, exponent: Tensor, fraction: Tensor | None, group_size: int
) -> Tensor:
    """Compute what `scale_slope` must return, in float64, one group at a time."""
    weight = decode_weight_reference(packed, exponent, fraction, grad.shape[1], group_size)
    products = grad.double() * weight.double()
    return torch.stack([group.sum(1) for group in products.split(group_size, dim=1)], dim=1)


def _scale_slope_torch(grad, packed, exponent, fraction, group_size):
    in_features = grad.shape[1]
    slope = torch.empty(exponent.shape, dtype=torch.float32, device=grad.device)
    whole = in_features // group_size
    for rows in row_chunks(grad):
        digits = None if fraction is None else fraction[rows]
        product = decode_weight_torch(
            packed[rows], exponent[rows], digits, in_features, group_size, torch.float32
        )
        product *= grad[rows]
        full = product[:, : whole * group_size].unflatten(1, (whole, group_size))
        torch.sum(full, dim=2, out=slope[rows, :whole])
        if whole < slope.shape[1]:
            torch.sum(product[:, whole * group_size :], dim=1, out=slope[rows, whole])
    return slope


@triton.jit
def _scale_slope_kernel(
    grad_ptr, packed_ptr, exponent_ptr, fraction_ptr, slope_ptr,
    N, K, num_groups,
    stride_gn, stride_gk, stride_pn, stride_pb,
    stride_en, stride_eg, stride_fn, stride_fg, stride_sn, stride_sg,
    GROUP: tl.constexpr, GROUP_TILE: tl.constexpr, HAS_FRACTION: tl.constexpr,
    BLOCK_N: tl.constexpr, BLOCK_G: tl.constexpr,
):  # fmt: skip
    offs_n = tl.program_id(0).to(tl.int64) * BLOCK_N + tl.arange(0, BLOCK_N)
    offs_g = tl.program_id(1) * BLOCK_G + tl.arange(0, BLOCK_G)
    inner = tl.arange(0, GROUP_TILE)[None, None, :]
    n, k = offs_n[:, None, None], offs_g[None, :, None] * GROUP + inner
    mask = (n < N) & (k < K) & (inner < GROUP)  # [BLOCK_N, BLOCK_G, GROUP_TILE]
    grad = tl.load(grad_ptr + n * stride_gn + k * stride_gk, mask=mask, other=0.0)
    trit = trit_at(packed_ptr + n * stride_pn, k, K, stride_pb, mask)
    total = tl.sum(grad.to(tl.float32) * trit.to(tl.float32), axis=2)

    mask_g = (offs_n < N)[:, None] & (offs_g < num_groups)[None, :]
    scale = load_scale(
        exponent_ptr, fraction_ptr, offs_n[:, None], offs_g[None, :], mask_g,
        stride_en, stride_eg, stride_fn, stride_fg, HAS_FRACTION,
    )  # fmt: skip
    slope_ptrs = slope_ptr + offs_n[:, None] * stride_sn + offs_g[None, :] * stride_sg
    tl.store(slope_ptrs, total * scale, mask=mask_g)


def _scale_slope_triton(grad, packed, exponent, fraction, group_size):
    (rows, in_features), groups = grad.shape, exponent.shape[1]
    slope = torch.empty(rows, groups, dtype=torch.float32, device=grad.device)
    if slope.numel():
        digits = exponent if fraction is None else fraction
        tile = triton.next_power_of_2(group_size)
        block_g = max(1, 128 // tile)
        _scale_slope_kernel[(triton.cdiv(rows, 16), triton.cdiv(groups, block_g))](
            grad, packed, exponent, digits, slope, rows, in_features, groups,
            *grad.stride(), *packed.stride(), *exponent.stride(), *digits.stride(),
            *slope.stride(),
            GROUP=group_size, GROUP_TILE=tile, HAS_FRACTION=fraction is not None,
            BLOCK_N=16, BLOCK_G=block_g,
        )  # fmt: skip
    return slope


def scale_slope(
    grad: Tensor, packed: Tensor, exponent: Tensor, fraction: Tensor | None, group_size: int
) -> Tensor:
    """Sum gradient times weight over every group: dL / d(ln scale).

    Args:
        grad: (N, K) float32 or bfloat16, dL/dw.
        packed: (N, row_bytes(K)) uint8.
        exponent: (N, ceil(K / G)) int8.
        fraction: like `exponent`; None stands for zeros.
        group_size: G.

    Returns:
        (N, ceil(K / G)) float32.

    Raises:
        ValueError: a dtype or a shape does not fit.
    """
    check_packed(packed, grad.shape[1])
    check_scales(packed, exponent, fraction, grad.shape[1], group_size)
    run = _scale_slope_triton if uses_triton(grad) else _scale_slope_torch
    return run(grad, packed, exponent, fraction, group_size)


def _cases(device: torch.device, group_size: int) -> Iterator[Case]:
    generator = torch.Generator().manual_seed(0)
    for rows, in_features in ((1, 1), (3, 33), (33, 123), (2, 1311)):
        grad = torch.randn(rows, in_features, generator=generator).to(device)
        state = random_packed(rows, in_features, group_size, generator, spread=8)
        state = [digits.to(device) for digits in state]
        yield Case(f"{rows}x{in_features}", (grad, *state, group_size))
    yield Case("2x1311 whole octaves", (grad, *state[:2], None, group_size))
    grad = torch.randn(170, 6, generator=generator).to(device)
    state = [d.to(device)[::2] for d in random_packed(6, 170, group_size, generator, spread=8)]
    yield Case("3x170 strided", (grad.T[::2], *state, group_size))
    if device.type == "cuda":
        yield Case("3x170 bfloat16", (grad.T[::2].bfloat16(), *state, group_size))


def _timings(device: torch.device, group_size: int) -> Iterator[Timing]:
    grad = torch.randn(MATRIX, device=device, dtype=torch.bfloat16)
    state = random_packed(*MATRIX, group_size, torch.Generator(device), spread=8)
    yield Timing("11264x2048 bf16", (grad, *state, group_size))


SCALE_SLOPE = KernelSpec(
    "scale_slope",
    _scale_slope_triton,
    _scale_slope_torch,
    scale_slope_reference,
    _cases,
    Gate(exact=False, relative=1e-6, reason="float32 sums of at most 128 products"),
    uses_scales=True,
    timings=_timings,
)
