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
from arbcli.kernels.runtime.arguments import FLOAT, Array
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


_HEADS, _TABLE = Array("B, H, T, D"), Array("T, D // 2", FLOAT, dense=True)

rotary_attention_backward = Operation(
    "rotary_attention_backward", _rotary_attention_backward_triton,
    _rotary_attention_backward_torch,
    {
        "grad_y": _HEADS,
        "qkv": Array("B, T, 3, H, D", dense=True),
        "r": Array("B, T, 2, H", FLOAT, dense=True),
        "cos": _TABLE,
        "sin": _TABLE,
        "y": _HEADS,
        "logs": Array("B, H, T", FLOAT, dense=True),
    },
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
