"""Verification of `arbcli.kernels.attention.decode_attention`."""

from functools import partial
from math import prod

import torch
from torch import Tensor
from torch.nn import functional

from arbcli.kernels.attention import decode_attention
from arbcli.kernels.attention.eight_bits import decode_entries, quantise_entries
from arbcli.kernels.runtime.texts import text_by_text
from arbcli.model.parts.cached import FORMATS
from arbcli.verify.kernels.attention.eight_bits import (
    decode_entries_reference,
    round_entries_reference,
)
from arbcli.verify.kernels.attention.rotary_norm import rotate_reference
from arbcli.verify.verification import CaseGenerator, Gate, Verification, float32_sums


@text_by_text(3, *decode_attention.SHARED)
def decode_attention_reference(
    qkv: Tensor, keys: Tensor, values: Tensor, position: Tensor, cos: Tensor, sin: Tensor,
    semaphores: Tensor, eps: float, one_program: bool = False, exponents: Tensor | None = None,
) -> tuple[Tensor, ...]:  # fmt: skip
    """Compute the result, the rings and the `semaphores` of `decode_attention`, in float64.

    Keys and values are decoded.
    """
    p, slot, x = int(position), int(position) % keys.shape[1], qkv.to(torch.float64)
    q, k = rotated_reference(x, cos[p], sin[p], eps)
    if exponents is None:
        keys, values = keys.to(torch.float64), values.to(torch.float64)
        keys[:, slot], values[:, slot] = k, x[2]
    else:
        q, k = (part.to(qkv.dtype).to(torch.float64) for part in (q, k))
        dtype = keys.dtype
        keys, values = map(decode_entries_reference, (keys, values), exponents)
        keys[:, slot], values[:, slot] = (round_entries_reference(new, dtype) for new in (k, x[2]))
    return attend_reference(q, keys, values, p), keys, values, torch.zeros_like(semaphores)


def rotated_reference(qkv: Tensor, cos: Tensor, sin: Tensor, eps: float) -> Tensor:
    """Rotate and normalise the query and the key of one byte, in float64."""
    root = (qkv[:2].square().mean(-1, True) + eps).sqrt()
    return rotate_reference(qkv[:2], cos, sin) / root


def attend_reference(q: Tensor, keys: Tensor, values: Tensor, position: int) -> Tensor:
    """Attend to a ring that includes the byte at `position`, in float64."""
    length = min(position + 1, keys.shape[1])
    y = torch.empty_like(q)
    for head in range(len(q)):
        weight = torch.exp(keys[head, :length] @ q[head] / q.shape[-1] ** 0.5)
        y[head] = weight / weight.sum() @ values[head, :length]
    return y


def _append_state(inputs: tuple, y: Tensor) -> tuple[Tensor, ...]:
    """Return the result, the semaphores and the decoded rings."""
    _, keys, values, *_, semaphores, _, _, exponents = inputs
    rings = zip((keys, values), exponents.unbind(-3), strict=True)
    return y, *(decode_entries(*ring, torch.float32) for ring in rings), semaphores


def _draw(rng: CaseGenerator, group_size: int, m: int, n: int, k: int, max_half: int = 65) -> tuple:
    texts = (1 + rng.integer(4),) if rng.chance(0.4) else ()
    heads, half = 1 + rng.integer(4), min(k + 1, max_half)
    qkv, keys, values = (
        rng.reals(prod(shape[:-1]), shape[-1]).contiguous().view(shape)
        for shape in ((*texts, 3, heads, 2 * half), *(((*texts, heads, n, 2 * half),) * 2))
    )
    position = rng.integers(0, 3 * n - 1, *texts, dtype=torch.int32).contiguous()
    angle = rng.reals(3 * n, half, dtype=torch.float32).contiguous()
    semaphores = torch.zeros(*texts, heads, dtype=torch.int32, device=rng.device)
    return qkv, keys, values, position, angle.cos(), angle.sin(), semaphores, 0.1, rng.chance(0.3)


def _set_next_octave(qkv: Tensor) -> Tensor:
    """Set numbers that round up to the next octave, out of the range of int8 codes."""
    qkv = qkv.clone()
    qkv[..., 2, :, 1] = 3.99
    return qkv


def _draw_8bit(rng: CaseGenerator, group_size: int, m: int, n: int, k: int) -> tuple:
    max_half = 256 if rng.chance(0.2) else 65
    qkv, keys, values, *rest, _ = _draw(rng, group_size, m, n, k, max_half)
    dtype = rng.pick((*FORMATS.values(),))
    values = values * torch.exp2(rng.integers(-9, 9, *values.shape[:-1])[..., None].float())
    (keys, key_exponents), (values, value_exponents) = (
        quantise_entries(x, dtype) for x in (keys, values)
    )
    return qkv, keys, values, *rest, False, torch.stack((key_exponents, value_exponents), dim=-3)


decode_attention_verification = Verification(
    decode_attention.DECODE_ATTENTION, decode_attention_reference, shapes=((1, 2100, 1),),
    gate=float32_sums("of up to 5000 values", "no worse than torch's attention by 10 %"),
    compared=("keys", "values", "semaphores"), draw=_draw, torch_is_peer=True, needs_rows=False,
    library=lambda qkv, keys, values, *_: partial(
        functional.scaled_dot_product_attention, qkv[None, 0, :, None], keys[None], values[None]
    ),
)  # fmt: skip
decode_attention_8bit_verification = Verification(
    decode_attention.DECODE_ATTENTION_8BIT, decode_attention_reference,
    changed={"next octave": {"qkv": _set_next_octave}},
    gate=Gate(
        relative=3e-3,
        reason="a result in bf16 is rounded, and a sum's last bit may decide how a code is"
    ),
    compared=_append_state, draw=_draw_8bit, needs_rows=False,
)  # fmt: skip
