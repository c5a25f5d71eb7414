"""Verification of `arbcli.families.compressed.kernels.append_position`."""

import torch
from torch import Tensor

from arbcli.families.compressed.kernels import append_position
from arbcli.kernels.attention.eight_bits import decode_entries, quantise_entries
from arbcli.kernels.runtime.texts import text_by_text
from arbcli.verify.kernels.attention.eight_bits import (
    decode_entries_reference,
    round_entries_reference,
)
from arbcli.verify.kernels.attention.rotary_norm import normalise_reference, rotate_reference
from arbcli.verify.verification import CaseGenerator, Gate, Verification, float32_sums


@text_by_text(5, *append_position.SHARED)
def append_position_reference(
    new: Tensor, recent: Tensor, entries: Tensor, opened: Tensor, beta: Tensor, position: Tensor,
    cos: Tensor, sin: Tensor, eps: float,
) -> tuple[Tensor, ...]:  # fmt: skip
    """Compute the result and the buffers of `append_position_`, in float64."""
    p, m = int(position), opened.shape[1]
    new, recent, entries, opened = (part.double() for part in (new, recent, entries, opened))
    begin = p // m * m
    recent[p % len(recent)] = rotate_reference(normalise_reference(new[0], eps), cos[p], sin[p])
    opened[:, p % m] = new[1:].flatten(1)
    share = torch.exp(opened[1] + beta.double().T)[: p % m + 1]
    mixed = (share * opened[0, : p % m + 1]).sum(dim=0) / share.sum(dim=0)
    still = normalise_reference(mixed.view(new[0].shape), eps)
    entries[p // m % len(entries)] = rotate_reference(still, cos[begin], sin[begin])
    return still, recent, entries, opened


@text_by_text(5, *append_position.SHARED)
def append_position_8bit_reference(
    new: Tensor, recent: Tensor, entries: Tensor, opened: Tensor, beta: Tensor, position: Tensor,
    cos: Tensor, sin: Tensor, eps: float, exponents: tuple[Tensor, Tensor],
) -> tuple[Tensor, ...]:  # fmt: skip
    """Compute the values that `append_position_` stores in eight bits, in float64."""
    numbers = [
        decode_entries_reference(*part) for part in zip((recent, entries), exponents, strict=True)
    ]
    before = [part.clone() for part in numbers]
    still, *after, opened = append_position_reference(
        new, numbers[0], numbers[1], opened, beta, position, cos, sin, eps
    )
    for old, new_rows in zip(before, after, strict=True):
        changed = (old != new_rows).any(dim=-1)
        x = new_rows[changed].to(new.dtype).double()
        new_rows[changed] = round_entries_reference(x, recent.dtype)
    return still, *after, opened


def _append_buffers(inputs: tuple, still: Tensor) -> tuple[Tensor, ...]:
    """Return the result and the contents of the buffers, decoded to floats."""
    _, recent, entries, opened, *_, exponents = inputs
    rows = zip((recent, entries), exponents, strict=True)
    return still, *(decode_entries(*row, torch.float32) for row in rows), opened


def quantise_inputs(inputs: tuple, stored: torch.dtype) -> tuple:
    """Quantise the inputs of `append_position_` to codes and exponents."""
    quantised = [quantise_entries(part, stored) for part in inputs[1:3]]
    codes, exponents = zip(*quantised, strict=True)
    return inputs[0], *codes, *inputs[3:], exponents


def _draw(rng: CaseGenerator, group_size: int, m: int, n: int, k: int) -> tuple:
    kv, half, ratio = rng.pick((1, 2)), 1 + min(k, 64), 2 + rng.integer(9)
    position, slots = rng.integer(60), 1 + rng.integer(8)
    sizes = (3, kv, 2 * half), (1 + rng.integer(7), kv, 2 * half), (slots, kv, 2 * half)
    buffers = (rng.reals(*size).contiguous() for size in (*sizes, (2, ratio, kv * 2 * half)))
    angle = rng.reals(position + 1, half, dtype=torch.float32).contiguous()
    beta = rng.reals(kv * 2 * half, ratio, dtype=torch.float32).contiguous()
    inputs = (*buffers, beta, rng.scalar(position), angle.cos(), angle.sin(), 0.1)
    return rng.texts(inputs, 5, *append_position.SHARED)


append_position_verification = Verification(
    append_position.APPEND_POSITION, append_position_reference,
    gate=float32_sums("over a block", "no worse than torch by 10 %"),
    compared=("recent", "entries", "opened"), draw=_draw, torch_is_peer=True, needs_rows=False,
)  # fmt: skip
append_position_8bit_verification = Verification(
    append_position.APPEND_POSITION_8BIT, append_position_8bit_reference, gate=Gate(
        relative=1e-2,
        reason="a result in bf16 is rounded, and a sum's last bit may decide how a code is"
    ),
    compared=_append_buffers,
    draw=lambda rng, *sizes: quantise_inputs(_draw(rng, *sizes), rng.pick(append_position.CODES)),
    needs_rows=False,
)  # fmt: skip
