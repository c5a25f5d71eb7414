"""Activation and norm of a gated MLP: y = rms_norm(silu(gate) * up).

gate and up are the two halves of a row. With h = silu(gate) * up, s = sigmoid(gate) and grad_h from
the norm: grad_up = grad_h * silu(gate) and grad_gate = grad_h * up * s * (1 + gate * (1 - s)).
Without an eps the norm is omitted: y = h.
"""

import torch
from torch import Tensor
from torch.nn import functional

from arbcli.kernels.norm.pack_gates import load_packed, unpack_gates
from arbcli.kernels.norm.rms_norm import (
    dense_rows,
    load_rows,
    norm_backward_native,
    norm_gradient,
    norm_native,
    store_rows,
    tile_at,
    tiling,
)
from arbcli.kernels.runtime.backend import row_chunks
from arbcli.kernels.runtime.operation import Operation, tl, triton

WHOLE_BACKWARD = 2048
"""Largest row, in columns, for which a backward program keeps all six matrices in registers."""
WIDE_BACKWARD = {"WHOLE": False, "BLOCK_M": 1, "BLOCK_D": 2048, "num_warps": 16}
"""Tile of wider rows, small enough that the second pass reads them from cache."""


def _gated_rms_norm_torch(gate_up: Tensor, eps: float | None) -> Tensor:
    width = gate_up.shape[-1] // 2
    y = torch.empty(*gate_up.shape[:-1], width, dtype=gate_up.dtype, device=gate_up.device)
    gate_up, out = gate_up.reshape(-1, 2 * width), y.view(-1, width)
    for rows in row_chunks(gate_up):
        gate, up = gate_up[rows].chunk(2, dim=-1)
        product = functional.silu(gate.float()).mul_(up)
        if eps is not None:
            product = functional.rms_norm(product, (width,), eps=eps)
        out[rows] = product
    return y


def _output_for(x: Tensor, overwrite: bool) -> Tensor:
    """Return the buffer of a result like x: x itself (in place), or a new tensor."""
    if overwrite and x.is_contiguous():
        return x
    return torch.empty(x.shape, dtype=x.dtype, device=x.device)


def _gated_rms_norm_backward_torch(
    grad_y: Tensor, gate_up: Tensor, eps: float | None,
    overwrite: bool = False,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    width = grad_y.shape[-1]
    grad_gate_up = _output_for(gate_up, overwrite)
    y = torch.empty(grad_y.shape, dtype=gate_up.dtype, device=gate_up.device)
    gate_up, grad_y = gate_up.reshape(-1, 2 * width), grad_y.reshape(-1, width)
    grads, out = grad_gate_up.view(-1, 2 * width), y.view(-1, width)
    for rows in row_chunks(gate_up):
        gate, up = gate_up[rows].to(torch.float32, copy=overwrite).chunk(2, dim=-1)
        share = torch.sigmoid(gate)
        silu = gate * share
        grad, product = grad_y[rows].float(), silu * up
        if eps is not None:
            grad, product = norm_gradient(grad, product, None, eps)
        out[rows] = product
        grads[rows, width:] = torch.mul(silu, grad, out=product)
        slope = silu.neg_().add_(gate).add_(1).mul_(share)  # of silu
        grads[rows, :width] = slope.mul_(up).mul_(grad)
    return grad_gate_up, y


def _packed_gates_backward_torch(
    grad_y: Tensor, codes: Tensor, bases: Tensor, eps: float | None,
    overwrite: bool = False,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    gate_up = unpack_gates(codes, bases).to(grad_y.dtype)
    return _gated_rms_norm_backward_torch(grad_y, gate_up, eps, overwrite=True)


def _gated_rms_norm_native(gate_up: Tensor, eps: float | None) -> Tensor:
    return norm_native(gate_up, None, eps, gated=True)


def _gated_rms_norm_backward_native(
    grad_y: Tensor, gate_up: Tensor, eps: float | None,
    overwrite: bool = False,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    result = _output_for(gate_up, overwrite)
    return norm_backward_native(grad_y, gate_up, None, eps, gated=True, grad_x=result)


@triton.jit
def _load_product(
    gate_ptr, up_ptr, start, offs_m, M, D, stride_xm, BLOCK_D: tl.constexpr
):  # fmt: skip
    """Load the tile of `tile_at` of silu(gate) * up; return its columns and mask, too."""
    offs_d, mask = tile_at(start, offs_m, M, D, BLOCK_D)
    gate, up = _load_gates(gate_ptr, up_ptr, offs_m, offs_d, mask, M, D, stride_xm, False)
    return gate * sigmoid(gate) * up, offs_d, mask


@triton.jit
def _gated_rms_norm_kernel(
    gate_ptr, up_ptr, y_ptr,
    M, D, eps, one,
    stride_xm,
    HAS_NORM: tl.constexpr,
    WHOLE: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    offs_m = (tl.program_id(0).to(tl.int64) * BLOCK_M + tl.arange(0, BLOCK_M))[:, None]
    if WHOLE:  # rows stay in registers
        y, offs_d, mask = _load_product(gate_ptr, up_ptr, 0, offs_m, M, D, stride_xm, BLOCK_D)
        if HAS_NORM:
            y *= tl.rsqrt(tl.sum(y * y, axis=1) / D + eps)[:, None] * one
        store_rows(y_ptr, y, offs_m, offs_d, mask, D)
    else:
        squares = tl.zeros((BLOCK_M,), dtype=tl.float32)
        if HAS_NORM:
            for start in range(0, D, BLOCK_D):
                product, _, _ = _load_product(
                    gate_ptr, up_ptr, start, offs_m, M, D, stride_xm, BLOCK_D
                )
                squares += tl.sum(product * product, axis=1)
        r = tl.rsqrt(squares / D + eps)[:, None]
        for start in range(0, D, BLOCK_D):
            y, offs_d, mask = _load_product(
                gate_ptr, up_ptr, start, offs_m, M, D, stride_xm, BLOCK_D
            )
            if HAS_NORM:
                y *= r * one
            store_rows(y_ptr, y, offs_m, offs_d, mask, D)


@triton.jit
def _gated_rms_norm_backward_kernel(
    grad_y_ptr, gate_ptr, up_ptr, grad_gate_ptr, grad_up_ptr, y_ptr,
    M, D, eps, one,
    stride_ym, stride_xm,
    HAS_NORM: tl.constexpr, PACKED: tl.constexpr,
    WHOLE: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    """Compute gradients from gate and up, or from the codes and bases of `pack_gates`."""
    offs_m = (tl.program_id(0).to(tl.int64) * BLOCK_M + tl.arange(0, BLOCK_M))[:, None]
    r = tl.zeros((BLOCK_M, 1), dtype=tl.float32)
    mean = r
    # rows wider than a tile: a first pass sums y**2 and y * grad
    if HAS_NORM and not WHOLE:
        squares = tl.zeros((BLOCK_M,), dtype=tl.float32)
        products = tl.zeros((BLOCK_M,), dtype=tl.float32)
        for start in range(0, D, BLOCK_D):
            offs_d, mask = tile_at(start, offs_m, M, D, BLOCK_D)
            gate, up = _load_gates(gate_ptr, up_ptr, offs_m, offs_d, mask, M, D, stride_xm, PACKED)
            y = gate * sigmoid(gate) * up
            grad = load_rows(grad_y_ptr, offs_m, offs_d, mask, stride_ym)
            squares += tl.sum(y * y, axis=1)
            products += tl.sum(y * grad * one, axis=1)
        r = tl.rsqrt(squares / D + eps)
        mean = (products * r / D)[:, None]
        r = r[:, None]
    for start in range(0, D, BLOCK_D):  # only once, if a tile has the whole row
        offs_d, mask = tile_at(start, offs_m, M, D, BLOCK_D)
        gate, up = _load_gates(gate_ptr, up_ptr, offs_m, offs_d, mask, M, D, stride_xm, PACKED)
        grad = load_rows(grad_y_ptr, offs_m, offs_d, mask, stride_ym)
        # recompute the forward
        share = sigmoid(gate)
        silu = gate * share
        y = silu * up
        if HAS_NORM:
            grad *= one
            if WHOLE:
                squares, products = tl.split(tl.sum(tl.join(y * y, y * grad), axis=1))
                r = tl.rsqrt(squares / D + eps)[:, None]
                mean = (products[:, None] * r) / D
                # times 1, which no compiler knows: products are computed again and not kept
                share *= one
                silu = gate * share
                y = silu * up
            y *= r
            # backward of the norm: gradient of silu(gate) * up
            grad = r * (grad - y * mean)
            y *= one
        # the output again, which the gradient of the next weight needs; then those of up and gate
        store_rows(y_ptr, y, offs_m, offs_d, mask, D)
        store_rows(grad_up_ptr, grad * silu, offs_m, offs_d, mask, 2 * D)
        slope = share * (1 + gate - silu)
        store_rows(grad_gate_ptr, grad * up * slope, offs_m, offs_d, mask, 2 * D)


@triton.jit
def _load_gates(gate_ptr, up_ptr, offs_m, offs_d, mask, M, D, stride_xm, PACKED: tl.constexpr):
    """Load tiles of gate and up; of codes and bases, if these are packed."""
    if PACKED:
        gate, up = load_packed(gate_ptr, up_ptr, offs_m, offs_d, mask, M, D)
    else:
        gate = load_rows(gate_ptr, offs_m, offs_d, mask, stride_xm)
        up = load_rows(up_ptr, offs_m, offs_d, mask, stride_xm)
    return gate, up


@triton.jit
def sigmoid(x):
    """Compute 1 / (1 + exp(-x))."""
    return 1 / (1 + tl.exp(-x))


def _gated_rms_norm_triton(gate_up: Tensor, eps: float | None) -> Tensor:
    width = gate_up.shape[-1] // 2
    y = torch.empty(*gate_up.shape[:-1], width, dtype=gate_up.dtype, device=gate_up.device)
    if y.numel():
        gate_up = dense_rows(gate_up)
        grid, tile = tiling(len(gate_up), width)
        _gated_rms_norm_kernel[grid](
            gate_up, gate_up[:, width:], y,
            len(gate_up), width, eps or 0.0, 1.0, gate_up.stride(0),
            HAS_NORM=eps is not None, **tile,
        )  # fmt: skip
    return y


def _gated_rms_norm_backward_triton(
    grad_y: Tensor, gate_up: Tensor, eps: float | None,
    overwrite: bool = False,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    # a program reads its rows before it writes to them
    y, grad_gate_up = (_output_for(x, overwrite) for x in (grad_y, gate_up))
    if y.numel():
        gate_up = dense_rows(gate_up)
        parts = gate_up, gate_up[:, y.shape[-1] :]
        _launch_backward(grad_y, parts, eps, grad_gate_up, y, packed=False)
    return grad_gate_up, y


def _packed_gates_backward_triton(
    grad_y: Tensor, codes: Tensor, bases: Tensor, eps: float | None,
    overwrite: bool = False,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    y, (rows, width) = _output_for(grad_y, overwrite), grad_y.shape
    grad_gate_up = torch.empty(rows, 2 * width, dtype=grad_y.dtype, device=grad_y.device)
    if y.numel():
        _launch_backward(grad_y, (codes, bases), eps, grad_gate_up, y, packed=True)
    return grad_gate_up, y


def _launch_backward(
    grad_y: Tensor, parts: tuple[Tensor, Tensor], eps: float | None,
    grad_gate_up: Tensor, y: Tensor, *, packed: bool,
) -> None:  # fmt: skip
    width, grad_y = y.shape[-1], dense_rows(grad_y)
    grid, tile = _backward_tiling(len(grad_y), width, normalised=eps is not None)
    if packed and not tile["WHOLE"]:
        tile = tile | {"num_warps": 8}  # eight bytes of codes per thread
    grads = grad_gate_up.view(-1, 2 * width)
    _gated_rms_norm_backward_kernel[grid](
        grad_y, *parts, grads, grads[:, width:], y,
        len(grad_y), width, eps or 0.0, 1.0, grad_y.stride(0), parts[0].stride(0),
        HAS_NORM=eps is not None, PACKED=packed, **tile,
    )  # fmt: skip


def _backward_tiling(
    rows: int, width: int, *, normalised: bool
) -> tuple[tuple[int], dict[str, int]]:
    if normalised and width > WHOLE_BACKWARD:
        return (rows,), WIDE_BACKWARD
    elements = 16 if normalised and width > WHOLE_BACKWARD // 2 else 8
    return tiling(rows, width, elements, WHOLE_BACKWARD)


GATED_WHERE = ("W % 2 == 0",)

gated_rms_norm = Operation(
    "gated_rms_norm", _gated_rms_norm_triton, _gated_rms_norm_torch,
    "gate_up: real[*B, W]; eps",
    native=_gated_rms_norm_native, where=GATED_WHERE,
)  # fmt: skip
"""Multiply silu of the first half of every row by the second half, and apply RMS norm.

Args:
    gate_up: (..., 2 D) float32 or bfloat16, any strides.
    eps: added to the mean square; None omits the norm.

Returns:
    (..., D) in the dtype of `gate_up`, contiguous; computed in float32 and rounded once.
"""
gated_rms_norm_backward = Operation(
    "gated_rms_norm_backward", _gated_rms_norm_backward_triton, _gated_rms_norm_backward_torch,
    "grad_y: real[*B, W // 2]; gate_up: real[*B, W]; eps; overwrite",
    native=_gated_rms_norm_backward_native, where=GATED_WHERE,
)  # fmt: skip
"""Compute the gradient of `gate_up` in `gated_rms_norm`, and recompute its result.

`grad_y` is (..., D) in the dtype of `gate_up`, with any strides. With `overwrite`, the gradient may
be written to `gate_up`, and y to `grad_y`, if these are contiguous. The other arguments are those
of `gated_rms_norm`.

Returns:
    The gradient, (..., 2 D) like `gate_up`, and y, (..., D) like the result of `gated_rms_norm`.
"""
packed_gates_backward = Operation(
    "packed_gates_backward", _packed_gates_backward_triton, _packed_gates_backward_torch,
    "grad_y: real[M, D]; codes: uint8[M, 3 * D] dense; bases: uint8[M, 2] dense; eps; overwrite",
    where=("D > 0",),
)  # fmt: skip
"""Compute `gated_rms_norm_backward` from the codes and bases of `pack_gates`.

`grad_y` is (M, D) float32 or bfloat16, with any strides. With `overwrite`, y is written to it if it
is contiguous.

Returns:
    The gradient of gate and up, (M, 2 D), and y, (M, D), in the dtype of `grad_y`.
"""
