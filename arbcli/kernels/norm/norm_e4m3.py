"""RMS norm fused with quantisation to e4m3: (q, scale) = quantise_rows(norm(x)), optionally gated.

The norm is first rounded to the dtype of x, as if it were stored, so the bits are those of the two
separate kernels. The torch backend, and rows too wide for registers, run the two separately.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from arbcli.kernels.matmul.quantise_rows import E4M3, has_e4m3, quantise_rows, store_e4m3
from arbcli.kernels.norm.gated_rms_norm import GATED_ARGUMENTS, GATED_WHERE, gated_rms_norm, sigmoid
from arbcli.kernels.norm.rms_norm import (
    WHOLE_ROW,
    add_rms_norm,
    dense_rows,
    load_rows,
    load_weight,
    rms_norm,
    store_rows,
    tiling,
)
from arbcli.kernels.runtime._triton import tl, triton
from arbcli.kernels.runtime.arguments import Array
from arbcli.kernels.runtime.operation import Operation


def compose(norm: Callable, round_rows: Callable) -> Callable[..., Any]:
    """Compose a norm, rounded to the dtype of its input, and `quantise_rows`."""

    def run(*inputs: Any) -> tuple[Tensor, ...]:
        results = norm(*inputs)
        *before, y = results if isinstance(results, tuple) else (results,)
        return *before, *round_rows(y.to(inputs[0].dtype))

    return run


@triton.jit
def _norm_e4m3_kernel(
    x_ptr, other_ptr, weight_ptr, total_ptr, q_ptr, scale_ptr,
    M, D, eps, one,
    stride_xm, stride_om,
    GATED: tl.constexpr, ADD: tl.constexpr, HAS_NORM: tl.constexpr, HAS_WEIGHT: tl.constexpr,
    WHOLE: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_D: tl.constexpr, NATIVE: tl.constexpr,
):  # fmt: skip
    """Normalise x, x + `other`, or a gate and `other`, and quantise the result."""
    offs_m = (tl.program_id(0).to(tl.int64) * BLOCK_M + tl.arange(0, BLOCK_M))[:, None]
    offs_d = tl.arange(0, BLOCK_D)
    mask = (offs_m < M) & (offs_d < D)[None, :]
    y = load_rows(x_ptr, offs_m, offs_d, mask, stride_xm)
    if GATED:
        up = load_rows(other_ptr, offs_m, offs_d, mask, stride_om)
        y = y * sigmoid(y) * up
    if ADD:  # normalise the sum as rounded for the store
        y += load_rows(other_ptr, offs_m, offs_d, mask, stride_om)
        y = y.to(total_ptr.dtype.element_ty).to(tl.float32)
        store_rows(total_ptr, y, offs_m, offs_d, mask, D)
    if HAS_NORM:
        r = tl.rsqrt(tl.sum(y * y, axis=1) / D + eps)[:, None]
        y = y * r * load_weight(weight_ptr, offs_d, D, one, HAS_WEIGHT)
    y = y.to(x_ptr.dtype.element_ty).to(tl.float32)
    store_e4m3(q_ptr, scale_ptr, y, offs_m, offs_d, mask, M, D, NATIVE)


def _launch(
    x: Tensor, other: Tensor, total: Tensor, weight: Tensor | None, eps: float | None, *,
    gated: bool = False, add: bool = False,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    rows, width = len(x), x.shape[1] // (2 if gated else 1)
    q = torch.empty(rows, width, dtype=E4M3, device=x.device)
    scale = torch.empty(rows, 1, device=x.device)
    if q.numel():
        grid, tile = tiling(rows, width)
        _norm_e4m3_kernel[grid](
            x, other, scale if weight is None else weight, total, q.view(torch.uint8), scale,
            rows, width, eps or 0.0, 1.0, x.stride(0), other.stride(0),
            GATED=gated, ADD=add, HAS_NORM=eps is not None, HAS_WEIGHT=weight is not None,
            NATIVE=has_e4m3(x), **tile,
        )  # fmt: skip
    return q, scale


def _rms_norm_e4m3_triton(x: Tensor, weight: Tensor | None, eps: float) -> tuple[Tensor, Tensor]:
    if x.shape[1] > WHOLE_ROW:
        return quantise_rows(rms_norm(x, weight, eps))
    x = dense_rows(x)
    return _launch(x, x, x, weight, eps)


def _add_rms_norm_e4m3_triton(
    x: Tensor, added: Tensor, weight: Tensor | None, eps: float
) -> tuple[Tensor, Tensor, Tensor]:
    if x.shape[1] > WHOLE_ROW:
        total, y = add_rms_norm(x, added, weight, eps)
        return total, *quantise_rows(y)
    total = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    parts = dense_rows(x), dense_rows(added), total
    return total, *_launch(*parts, weight, eps, add=True)


def _gated_rms_norm_e4m3_triton(gate_up: Tensor, eps: float | None) -> tuple[Tensor, Tensor]:
    width = gate_up.shape[1] // 2
    if width > WHOLE_ROW:
        return quantise_rows(gated_rms_norm(gate_up, eps))
    gate_up = dense_rows(gate_up)
    return _launch(gate_up, gate_up[:, width:], gate_up, None, eps, gated=True)


_X = Array("M, D")

rms_norm_e4m3 = Operation(
    "rms_norm_e4m3", _rms_norm_e4m3_triton, compose(rms_norm, quantise_rows),
    {**rms_norm.arguments, "x": _X}, where=("D > 0",),
)  # fmt: skip
"""Compute `rms_norm` of the rows of `x`, and quantise them with `quantise_rows`.

Args:
    x: (M, D) float32 or bfloat16, any strides.
    weight: gains, (D,) float32, contiguous; None is ones.
    eps: added to the mean square.

Returns:
    (M, D) float8_e4m3fn, and (M, 1) float32 scales.
"""
add_rms_norm_e4m3 = Operation(
    "add_rms_norm_e4m3", _add_rms_norm_e4m3_triton, compose(add_rms_norm, quantise_rows),
    {**add_rms_norm.arguments, "x": _X, "added": _X}, where=("D > 0",),
)  # fmt: skip
"""Compute x + added as in `add_rms_norm`, and `rms_norm_e4m3` of the sum.

Returns:
    (M, D) x + added in the dtype of `x`; (M, D) float8_e4m3fn, and (M, 1) float32 scales.
"""
gated_rms_norm_e4m3 = Operation(
    "gated_rms_norm_e4m3", _gated_rms_norm_e4m3_triton, compose(gated_rms_norm, quantise_rows),
    {**GATED_ARGUMENTS, "gate_up": Array("M, W")}, where=("W > 0", *GATED_WHERE),
)  # fmt: skip
"""Compute `gated_rms_norm` of (M, 2 D) `gate_up`, and quantise its rows to e4m3."""
