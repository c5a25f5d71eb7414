"""Gradient of causal attention fused with that of the preceding `rotary_norm_`.

The equations are those of `causal_attention_backward`, followed by `rotary_norm_backward`. A
program keeps the gradient of its queries or keys in registers between the two, so it is neither
rounded nor written to memory.
"""

from collections.abc import Iterator
from functools import partial

import torch
from torch import Tensor

from arbcli.kernels.attention.causal_attention_backward import (
    causal_attention_backward,
    causal_attention_backward_reference,
    causal_attention_float64,
    launch_backward,
    rounded_causal_gradients,
)
from arbcli.kernels.attention.rotary_norm import (
    rotary_norm_,
    rotary_norm_backward,
    rotary_norm_backward_reference,
    unpack_qkv,
)
from arbcli.kernels.dice import Dice
from arbcli.kernels.runtime.arguments import FLOAT, Array
from arbcli.kernels.runtime.operation import Case, Gate, Operation, Timing

EPS = 1e-6


def rotary_attention_backward_reference(
    grad_y: Tensor, qkv: Tensor, r: Tensor, cos: Tensor, sin: Tensor, y: Tensor, logs: Tensor
) -> Tensor:
    """Compute `rotary_attention_backward` by both references, in float64."""
    q, k, v = causal_attention_backward_reference(grad_y, *unpack_qkv(qkv), y, logs)
    return rotary_norm_backward_reference(q, k, v, qkv, r, cos, sin)


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


def rounded_gradient(
    grad_y: Tensor, qkv: Tensor, r: Tensor, cos: Tensor, sin: Tensor, y: Tensor, logs: Tensor
) -> Tensor:
    """Compute the gradient in float64, with p, e and the gradients of queries and keys rounded."""
    grads = rounded_causal_gradients(grad_y, *unpack_qkv(qkv), y, logs)
    return rotary_norm_backward_reference(*grads, qkv, r, cos, sin).to(qkv.dtype)


def _random(generator: torch.Generator, shape: tuple[int, ...], dtype: torch.dtype) -> tuple:
    """Draw inputs for (B, T, heads, d): the saved tensors of the forward pass, and a gradient."""
    batch, length, heads, width = shape
    qkv = torch.randn(batch, length, 3, heads, width, generator=generator).to(dtype)
    angle = 7 * torch.randn(length, width // 2, generator=generator)
    cos, sin = angle.cos(), angle.sin()
    qkv, r = rotary_norm_.torch(qkv, cos, sin, EPS)
    y, logs = causal_attention_float64(*unpack_qkv(qkv))
    grad_y = torch.randn(batch, length, heads, width, generator=generator).to(dtype)
    return grad_y.transpose(1, 2), qkv, r, cos, sin, y.to(dtype), logs.float()


def _cases(device: torch.device, _group_size: int) -> Iterator[Case]:
    generator = torch.Generator().manual_seed(0)
    shapes = [(1, 2, 1, 16, torch.float32), (1, 40, 1, 32, torch.float32)]
    shapes += [(2, 18, 3, 16, torch.float32), (1, 0, 2, 16, torch.float32)]
    shapes += [(1, 70, 1, 16, torch.float32)]
    if device.type == "cuda":
        shapes += [(2, 200, 3, 64, torch.bfloat16), (1, 1024, 2, 128, torch.bfloat16)]
        shapes += [(3, 130, 5, 128, torch.bfloat16)]
    for *shape, dtype in shapes:
        inputs = _random(generator, tuple(shape), dtype)
        label = "x".join(map(str, shape)) + (" bf16" if dtype == torch.bfloat16 else "")
        yield Case(label, tuple(part.to(device) for part in inputs))


def _timings(device: torch.device, _group_size: int) -> Iterator[Timing]:
    for batch, heads, length, width in ((8, 16, 2048, 128), (16, 12, 1024, 64)):
        qkv = torch.randn(batch, length, 3, heads, width, device=device, dtype=torch.bfloat16)
        angle = torch.randn(length, width // 2, device=device)
        table = angle.cos(), angle.sin()
        rotate = rotary_norm_.run("triton" if device.type == "cuda" else "torch")
        qkv, r = rotate(qkv, *table, EPS)
        q, k, v = unpack_qkv(qkv)
        y, logs, *_ = torch.ops.aten._scaled_dot_product_flash_attention(q, k, v, 0.0, True)
        grad_y = torch.randn_like(y)

        def both(inputs: tuple) -> Tensor:
            grad_y, qkv, r, cos, sin, y, logs = inputs
            grads = causal_attention_backward.triton(grad_y, *unpack_qkv(qkv), y, logs)
            return rotary_norm_backward.triton(*grads, qkv, r, cos, sin)

        inputs = (grad_y, qkv, r, *table, y, logs)
        yield Timing(
            f"{batch}x{heads}x{length}x{width} bf16",
            inputs,
            peer=partial(both, inputs),
            peer_name="one after the other",
            flops=5 * batch * heads * length**2 * width,
        )


def _draw(dice: Dice, group_size: int, m: int, n: int, k: int) -> tuple:
    length = 2 + min(m, dice.pick((1, 40, 150)))
    shape = dice.pick((1, 2)), length, dice.pick((1, 3)), dice.pick((16, 32, 64))
    grad_y, qkv, r, cos, sin, y, logs = _random(dice.seeded(), shape, dice.dtype)
    grad_y, y = (dice.view(part.to(dice.device)) for part in (grad_y, y))
    return grad_y, *(part.to(dice.device) for part in (qkv, r, cos, sin)), y, logs.to(dice.device)


_HEADS, _TABLE = Array("B, H, T, D"), Array("T, D // 2", FLOAT, dense=True)

rotary_attention_backward = Operation(
    "rotary_attention_backward", _rotary_attention_backward_triton,
    _rotary_attention_backward_torch, rotary_attention_backward_reference, _cases,
    Gate(
        relative=2e-5, peer_slack=0.2,
        reason="float32 sums; in bf16 the peer rounds what products take and what they give",
    ),
    {
        "grad_y": _HEADS,
        "qkv": Array("B, T, 3, H, D", dense=True),
        "r": Array("B, T, 2, H", FLOAT, dense=True),
        "cos": _TABLE,
        "sin": _TABLE,
        "y": _HEADS,
        "logs": Array("B, H, T", FLOAT, dense=True),
    },
    where=("16 <= D <= 128 and D & (D - 1) == 0",), draw=_draw, needs_rows=True,
    peer=rounded_gradient, timings=_timings,
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
