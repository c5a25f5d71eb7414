"""Verification of `arbcli.families.mamba.kernels.mamba_step`."""

import torch
from torch import Tensor

from arbcli.families.mamba.kernels.mamba_step import SHARED, mamba_step
from arbcli.kernels.runtime.texts import stacked_texts, text_by_text
from arbcli.verify.verification import CaseGenerator, Verification, float32_sums


@text_by_text(7, *SHARED)
def mamba_step_reference(
    rows: Tensor, ring: Tensor, state: Tensor, taps: Tensor, rate: Tensor, bias: Tensor,
    skip: Tensor, position: Tensor, active: Tensor | None = None,
) -> tuple[Tensor, ...]:  # fmt: skip
    """Compute the reference result of `mamba_step` and change, a head at a time in float64."""
    heads, states, width = state.shape
    inner, num_taps, p = heads * width, ring.shape[0], int(position)
    rows, ring, state = rows.double(), ring.double(), state.double()
    z, new, t = rows.split((inner, inner + 2 * states, heads))
    before = state.clone()
    ring[p % num_taps] = new
    mixed = torch.zeros_like(new)
    for i in range(num_taps):
        mixed += taps[:, i].double() * ring[(p + 1 + i) % num_taps]
    mixed = mixed / (1 + torch.exp(-mixed))
    u, b, c = mixed.split((inner, states, states))
    y = torch.empty_like(u)
    for head in range(heads):
        columns = slice(head * width, (head + 1) * width)
        dt = torch.log1p(torch.exp(t[head] + bias[head].double()))
        decay = torch.exp(-torch.exp(rate[head].double()) * dt)
        state[head] = decay * state[head] + b[:, None] * (dt * u[columns])
        y[columns] = c @ state[head] + skip[head].double() * u[columns]
    stays = active is not None and not active
    return z / (1 + torch.exp(-z)) * y, ring, before if stays else state


def draw_step(
    heads: int, states: int, width: int, taps: int, position: int, dtype: torch.dtype,
    generator: torch.Generator,
) -> tuple[Tensor, ...]:  # fmt: skip
    """Draw the inputs of `mamba_step`; of positions before the first the ring has zeros."""

    def draw(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator, device=generator.device)

    mixed = heads * width + 2 * states
    ring = draw(taps, mixed)
    seen = (position - 1 - torch.arange(min(position, taps), device=ring.device)) % taps
    ring = torch.zeros_like(ring).index_copy_(0, seen, ring[seen])
    rows = draw(heads * width + mixed + heads).to(dtype)
    vectors = draw(3, heads).unbind()
    place = torch.tensor(position, dtype=torch.int32, device=ring.device)
    return rows, ring.to(dtype), draw(heads, states, width), draw(mixed, taps) / 2, *vectors, place


def _draw(rng: CaseGenerator, _group_size: int, _m: int, n: int, _k: int) -> tuple:
    heads, states, taps = rng.pick((3, 4)), rng.pick((1, 9, 64)), rng.pick((2, 4, 8))
    shape = heads, states, min(n, 70), taps
    inputs = draw_step(*shape, rng.integer(14), rng.dtype, rng.generator)
    if not rng.chance(0.4):
        return inputs
    others = [draw_step(*shape, at, rng.dtype, rng.generator) for at in (0, 13)]
    texts = [inputs, *((*text[:3], *inputs[3:7], text[7]) for text in others)]
    active = rng.integers(0, 1, 3, dtype=torch.int32).contiguous()
    return *stacked_texts(texts, *SHARED), active


def _extreme_steps(rows: Tensor) -> Tensor:
    """Set a step size of hardly anything, and one of much."""
    rows = rows.clone()
    rows[-2], rows[-1] = -90, 30
    return rows


mamba_step_verification = Verification(
    mamba_step, mamba_step_reference,
    changed={"extreme steps": {"rows": _extreme_steps}},
    gate=float32_sums("over states", "one rounding, as torch has"),
    compared=("ring", "state"), draw=_draw, torch_is_peer=True,
)  # fmt: skip
