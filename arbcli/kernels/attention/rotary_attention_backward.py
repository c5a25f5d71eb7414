"""Gradient of causal attention fused with that of the preceding `rotary_norm_`.

The equations are those of `causal_attention_backward`, followed by `rotary_norm_backward`. A
program keeps the gradient of its queries or keys in registers between the two, so it is neither
rounded nor written to memory.
"""

import torch
from torch import Tensor

from arbcli.kernels.attention.causal_attention_backward import (
    causal_attention_backward,
    launch_backward,
)
from arbcli.kernels.attention.rotary_norm import rotary_norm_backward, unpack_qkv
from arbcli.kernels.runtime.operation import Operation


def _rotary_attention_backward_torch(
    grad_y: Tensor, qkv: Tensor, r: Tensor, cos: Tensor, sin: Tensor, y: Tensor, logs: Tensor
) -> Tensor:
    grads = causal_attention_backward.torch(grad_y, *unpack_qkv(qkv), y, logs)
    return rotary_norm_backward.torch(*grads, qkv, r, cos, sin)


def _rotary_attention_backward_triton(
    grad_y: Tensor, qkv: Tensor, r: Tensor, cos: Tensor, sin: Tensor, y: Tensor, logs: Tensor
) -> Tensor:
    grads = torch.empty_like(qkv)
    launch_backward(grads, (grad_y, *unpack_qkv(qkv), y), logs, (r, cos, sin))
    return grads


rotary_attention_backward = Operation(
    "rotary_attention_backward", _rotary_attention_backward_triton,
    _rotary_attention_backward_torch,
    "grad_y: real[B, H, T, D]; qkv: real[B, T, 3, H, D] dense; r: float32[B, T, 2, H] dense; "
    "cos, sin: float32[T, D // 2] dense; y: real[B, H, T, D]; logs: float32[B, H, T] dense",
    where=("16 <= D <= 128 and D & (D - 1) == 0",),
)  # fmt: skip
"""Compute the gradient of causal attention and of the preceding `rotary_norm_`.

Args:
    grad_y: (B, heads, T, d) bfloat16 or float32, d a power of two from 16 to 128, any strides.
    qkv: (B, T, 3, heads, d) contiguous, the output of `rotary_norm_`.
    r: the result of `rotary_norm_`.
    cos: as in `rotary_norm_`.
    sin: likewise.
    y: the result of attention, like `grad_y`.
    logs: (B, heads, T) float32, contiguous: log-sum-exp of the scores of each query.

Returns:
    Gradient of the input of `rotary_norm_`, like `qkv`.
"""
