"""Verification of `arbcli.families.mamba.kernels.decay_scan`."""

from collections.abc import Iterator
from functools import partial

import torch
from torch import Tensor

from arbcli.families.mamba.kernels.decay_scan import (
    decay_scan,
)
from arbcli.kernels.runtime.arguments import normals
from arbcli.verify.case_generator import CaseGenerator
from arbcli.verify.verification import Case, Gate, Timing, Verification


def decay_scan_reference(q: Tensor, k: Tensor, v: Tensor, g: Tensor, reverse: bool) -> Tensor:
    """Compute the reference result of `decay_scan`, a position at a time in float64."""
    q, k, v, g = (part.double() for part in (q, k, v, g))
    length, y = q.shape[1], torch.zeros(v.shape, dtype=torch.float64, device=v.device)
    state = q.new_zeros(())
    for t in reversed(range(length)) if reverse else range(length):
        step = t + 1 if reverse else t
        if 0 <= step < length:
            state = state * g[:, step, :, None, None].exp()
        state = state + k[:, t, :, :, None] * v[:, t, :, None, :]
        y[:, t] = (q[:, t, :, :, None] * state).sum(dim=2)
    return y


def _draw(
    generator: torch.Generator, device: torch.device, batch: int, length: int, heads: int,
    states: int, width: int,
) -> tuple:  # fmt: skip
    draw = normals(generator, device)

    # so that a piece still matters two pieces later
    decays = -0.02 * torch.rand(batch, length, heads, generator=generator).to(device)
    return (
        draw(batch, length, heads, states), draw(batch, length, heads, states),
        draw(batch, length, heads, width), decays,
    )  # fmt: skip


def _cases(device: torch.device, _group_size: int) -> Iterator[Case]:
    generator = torch.Generator().manual_seed(0)
    draw = partial(_draw, generator, device)
    for reverse in (False, True):
        end = " reverse" if reverse else ""
        for shape in ((1, 1, 1, 1, 1), (2, 33, 3, 5, 7), (1, 159, 2, 16, 20), (1, 17, 2, 3, 150)):
            label = "x".join(map(str, shape)) + end
            yield Case(label, (*draw(*shape), reverse))
        q, k, v, g = draw(1, 70, 4, 9, 66)
        shared = q[:, :, :1].expand(-1, -1, 4, -1), k[:, :, :1].expand(-1, -1, 4, -1)
        yield Case(f"1x70x4x9x66 all heads alike{end}", (*shared, v, g, reverse))
        yield Case(f"1x70x4x9x66 forgets at once{end}", (q, k, v, g * 0 - 100, reverse))
        yield Case(f"1x70x4x9x66 forgets nothing{end}", (q, k, v, g * 0, reverse))
    q, k, v, g = (part.transpose(0, 1)[:, ::2] for part in draw(20, 3, 2, 6, 5))
    yield Case("3x10x2x6x5 strided", (q, k, v, g, False))
    yield Case("2x0x2x3x4 empty", (*draw(2, 0, 2, 3, 4), True))
    if device.type == "cuda":  # the interpreter's bf16 arithmetic is wrong
        *parts, g = draw(2, 700, 5, 64, 128)
        for reverse in (False, True):
            inputs = (*(part.bfloat16() for part in parts), g, reverse)
            yield Case(f"2x700x5x64x128 bf16{' reverse' if reverse else ''}", inputs)


def scan_in_bf16(q: Tensor, k: Tensor, v: Tensor, g: Tensor, reverse: bool) -> Tensor:
    """Attend with scores and decays rounded to bfloat16, as torch would without a kernel."""
    c = g.double().cumsum(1).transpose(1, 2)
    apart = c[..., :, None] - c[..., None, :]
    if reverse:
        apart = -apart
    ones = torch.ones(apart.shape[-2:], dtype=torch.bool, device=g.device)
    seen = ones.triu() if reverse else ones.tril()
    weight = apart.masked_fill(~seen, -torch.inf).exp().float()
    q, k, v = (part.transpose(1, 2) for part in (q, k, v))
    scores = ((q @ k.mT).float() * weight).to(q.dtype)
    return (scores @ v).transpose(1, 2)


def _timings(device: torch.device, _group_size: int) -> Iterator[Timing]:
    draw = partial(torch.randn, device=device, dtype=torch.bfloat16)
    q, k, v = draw(8, 4096, 1, 64), draw(8, 4096, 1, 64), draw(8, 4096, 16, 64)
    shared = q.expand(-1, -1, 16, -1), k.expand(-1, -1, 16, -1)
    inputs = *shared, v, -torch.rand(8, 4096, 16, device=device), False
    query, key, value = (part.transpose(1, 2).contiguous() for part in (*shared, v))
    attend = torch.nn.functional.scaled_dot_product_attention
    peer = partial(attend, query, key, value, is_causal=True)
    yield Timing("8x4096x16x64x64 bf16", inputs, peer=peer, peer_name="causal attention")


def _draw_decays(rng: CaseGenerator, *shape: int) -> Tensor:
    return rng.view(-rng.reals(*shape, dtype=torch.float32).square())


decay_scan_verification = Verification(
    decay_scan, decay_scan_reference, _cases,
    Gate(
        relative=1e-5, peer_slack=1.0,
        reason="float32 sums over the sequence; in bf16 scores and states are rounded, peers' too",
    ),
    sizes={"B": (1, 2), "T": "m", "H": (1, 3), "P": "min(n, 70)", "N": (1, 9, 32)},
    peer=scan_in_bf16, timings=_timings, values={"g": _draw_decays, "reverse": (False, True)},
)  # fmt: skip
