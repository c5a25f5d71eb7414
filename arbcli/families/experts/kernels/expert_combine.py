"""Sum the outputs of a token's experts: y[m] = sum over j of gates[m, j] * values[p[m, j]].

The values are sorted by expert; p has the positions of each token's values. The backward reads the
values again: the gradient of a gate is the dot product of its value and the gradient of y.

Without gates, the sum is also the backward of the dispatch, which copies a token to all its slots.
"""

import torch
from torch import Tensor

from arbcli.kernels.runtime.operation import Operation, tl, triton

MAX_SLOTS = 16
"""Maximum number of slots per token; a program loads from all of them at once."""


def _expert_combine_torch(values: Tensor, positions: Tensor, gates: Tensor | None) -> Tensor:
    y = torch.zeros(len(positions), values.shape[1], dtype=torch.float32, device=values.device)
    for j in range(positions.shape[1]):
        part = values[positions[:, j]].float()
        y += part if gates is None else part * gates[:, j, None]
    return y.to(values.dtype)


def _expert_combine_backward_torch(
    grad_y: Tensor, values: Tensor, positions: Tensor, gates: Tensor | None
) -> tuple[Tensor, Tensor]:
    grad_values = torch.zeros(values.shape, dtype=values.dtype, device=values.device)
    grad_gates = torch.empty(positions.shape, dtype=torch.float32, device=values.device)
    grad_y = grad_y.float()
    for j, slots in enumerate(positions.T):
        grad = grad_y if gates is None else grad_y * gates[:, j, None]
        grad_values[slots] = grad.to(values.dtype)
        grad_gates[:, j] = (grad_y * values[slots].float()).sum(dim=1)
    return grad_values, grad_gates


@triton.jit
def _expert_combine_kernel(
    values_ptr, positions_ptr, gates_ptr, y_ptr,
    M, S, D,
    stride_vs, stride_vd, stride_pm, stride_pj, stride_gm, stride_gj,
    SLOTS: tl.constexpr, HAS_GATES: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    offs_m = (tl.program_id(0).to(tl.int64) * BLOCK_M + tl.arange(0, BLOCK_M))[:, None]
    offs_d = (tl.program_id(1) * BLOCK_D + tl.arange(0, BLOCK_D)).to(tl.int64)[None, :]
    mask_m, mask_d = offs_m < M, offs_d < D
    total = tl.zeros((BLOCK_M, BLOCK_D), dtype=tl.float32)
    for j in tl.static_range(SLOTS):
        slot = tl.load(positions_ptr + offs_m * stride_pm + j * stride_pj, mask=mask_m, other=0)
        inside = (slot >= 0) & (slot < S)
        value_ptrs = values_ptr + slot * stride_vs + offs_d * stride_vd
        value = tl.load(value_ptrs, mask=inside & mask_d, other=float("nan")).to(tl.float32)
        if HAS_GATES:
            gate_ptrs = gates_ptr + offs_m * stride_gm + j * stride_gj
            value *= tl.load(gate_ptrs, mask=mask_m, other=0)
        total += value
    y_ptrs = y_ptr + offs_m * D + offs_d
    tl.store(y_ptrs, total.to(y_ptr.dtype.element_ty), mask=mask_m & mask_d)


@triton.jit
def _expert_combine_backward_kernel(
    grad_y_ptr, values_ptr, positions_ptr, gates_ptr, grad_values_ptr, grad_gates_ptr,
    S, D,
    stride_ym, stride_yd, stride_vs, stride_vd, stride_pm, stride_pj, stride_gm, stride_gj,
    SLOTS: tl.constexpr, HAS_GATES: tl.constexpr, BLOCK_J: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    m = tl.program_id(0).to(tl.int64)
    offs_j = tl.arange(0, BLOCK_J)
    mask_j = offs_j < SLOTS
    slot = tl.load(positions_ptr + m * stride_pm + offs_j * stride_pj, mask=mask_j, other=-1)
    inside = ((slot >= 0) & (slot < S))[:, None]
    gate = tl.full((BLOCK_J,), 1.0, dtype=tl.float32)
    if HAS_GATES:
        gate = tl.load(gates_ptr + m * stride_gm + offs_j * stride_gj, mask=mask_j, other=0)
    products = tl.zeros((BLOCK_J, BLOCK_D), dtype=tl.float32)
    for start in range(0, D, BLOCK_D):
        offs_d = (start + tl.arange(0, BLOCK_D)).to(tl.int64)[None, :]
        mask = inside & (offs_d < D)
        grad_y_ptrs = grad_y_ptr + m * stride_ym + offs_d * stride_yd
        grad_y = tl.load(grad_y_ptrs, mask=offs_d < D, other=0).to(tl.float32)  # [1, BLOCK_D]
        value_ptrs = values_ptr + slot[:, None] * stride_vs + offs_d * stride_vd
        products += grad_y * tl.load(value_ptrs, mask=mask, other=0).to(tl.float32)
        grad = (gate[:, None] * grad_y).to(grad_values_ptr.dtype.element_ty)
        tl.store(grad_values_ptr + slot[:, None] * D + offs_d, grad, mask=mask)
    tl.store(grad_gates_ptr + m * SLOTS + offs_j, tl.sum(products, axis=1), mask=mask_j)


def _expert_combine_triton(values: Tensor, positions: Tensor, gates: Tensor | None) -> Tensor:
    (tokens, slots), width = positions.shape, values.shape[1]
    y = torch.empty(tokens, width, dtype=values.dtype, device=values.device)
    if y.numel():
        weights = positions if gates is None else gates
        _expert_combine_kernel[(triton.cdiv(tokens, 4), triton.cdiv(width, 256))](
            values, positions, weights, y, tokens, *values.shape,
            *values.stride(), *positions.stride(), *weights.stride(),
            SLOTS=slots, HAS_GATES=gates is not None, BLOCK_M=4, BLOCK_D=256,
        )  # fmt: skip
    return y


def _expert_combine_backward_triton(
    grad_y: Tensor, values: Tensor, positions: Tensor, gates: Tensor | None
) -> tuple[Tensor, Tensor]:
    tokens, slots = positions.shape
    # rows without a token have a zero gradient; otherwise every row is written
    make = torch.empty if len(values) == tokens * slots else torch.zeros
    grad_values = make(values.shape, dtype=values.dtype, device=values.device)
    grad_gates = torch.empty(positions.shape, dtype=torch.float32, device=values.device)
    if tokens:
        weights, block_j = positions if gates is None else gates, triton.next_power_of_2(slots)
        _expert_combine_backward_kernel[(tokens,)](
            grad_y, values, positions, weights, grad_values, grad_gates, *values.shape,
            *grad_y.stride(), *values.stride(), *positions.stride(), *weights.stride(),
            SLOTS=slots, HAS_GATES=gates is not None,
            BLOCK_J=block_j, BLOCK_D=min(512, 2048 // block_j),
        )  # fmt: skip
    return grad_values, grad_gates


_WHERE = (f"0 < S <= {MAX_SLOTS}", "M * S <= V")
expert_combine = Operation(
    "expert_combine", _expert_combine_triton, _expert_combine_torch,
    "values: real[V, D]; positions: int64[M, S]; gates: float32[M, S]?",
    where=_WHERE,
)  # fmt: skip
"""Sum the slots of every token.

y[m] = sum over j of gates[m, j] * values[positions[m, j]]

Args:
    values: (S, D) float32 or bfloat16, any strides.
    positions: (M, k) int64 in 0..S-1, k from 1 to 16, no slot twice. One outside is an
        IndexError of the torch backend on a CPU, and a row of NaN in the kernel.
    gates: (M, k) float32; None stands for ones.

Returns:
    (M, D) in the dtype of `values`; summed in float32, in the order of j.
"""
expert_combine_backward = Operation(
    "expert_combine_backward", _expert_combine_backward_triton, _expert_combine_backward_torch,
    "grad_y: real[M, D]; values: real[V, D]; positions: int64[M, S]; gates: float32[M, S]?",
    where=_WHERE,
)  # fmt: skip
"""Compute the gradients of `expert_combine` in one pass.

grad_values[positions[m, j]] = gates[m, j] * grad_y[m]
grad_gates[m, j] = sum over d of grad_y[m, d] * values[positions[m, j], d]

Args:
    grad_y: (M, D) in the dtype of `values`, any strides.
    values: as in `expert_combine`.
    positions: as in `expert_combine`. The kernel ignores slots out of range.
    gates: as in `expert_combine`.

Returns:
    Gradients of `values`, like them, zero in rows without a token, and of `gates`, float32;
    the latter without gates too.
"""
