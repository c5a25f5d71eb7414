"""Verification of `arbcli.families.streams.kernels.mix_streams`."""

from collections.abc import Iterator
from functools import partial

import torch
from torch import Tensor

from arbcli.families.streams.kernels.mix_streams import (
    mix_streams,
    mix_streams_backward,
)
from arbcli.families.streams.kernels.stream_weights import STREAMS
from arbcli.kernels.runtime.arguments import normals
from arbcli.verify.verification import Drawn, Gate, Timing, Verification, cases_of


def mix_streams_reference(
    x: Tensor, weights: Tensor, added: Tensor | None, gains: Tensor | None
) -> Tensor:
    """Compute the reference result of `mix_streams`, in float64."""
    y = torch.einsum("mij,mjd->mid", weights.double(), x.double())
    if added is not None and gains is not None:
        y = y + torch.einsum("mi,md->mid", gains.double(), added.double())
    return y


def mix_streams_backward_reference(
    grad_y: Tensor, x: Tensor, weights: Tensor, added: Tensor | None, gains: Tensor | None
) -> tuple[Tensor, ...]:
    """Compute the reference result of `mix_streams_backward`, by autograd in float64."""
    inputs = [part.double().requires_grad_() for part in (x, weights)]
    if added is not None and gains is not None:
        inputs += [part.double().requires_grad_() for part in (added, gains)]
    y = mix_streams_reference(*inputs, *[None] * (4 - len(inputs)))
    return torch.autograd.grad(y, inputs, grad_y.double())


def _draw(device: torch.device) -> Iterator[Drawn]:
    generator = torch.Generator().manual_seed(0)
    normal = normals(generator, device)
    for length, rows, n, width in ((1, 1, 1, 1), (3, 4, 4, 33), (5, 1, 4, 7), (2, 8, 2, 600)):
        inputs: tuple[Tensor | None, ...]
        inputs = normal(length, n, width), normal(length, rows, n), None, None
        grad_y = normal(length, rows, width)
        yield f"{length}x{n}x{width} to {rows}", inputs, (grad_y,)
        inputs = *inputs[:2], normal(length, width), normal(length, rows)
        yield f"{length}x{n}x{width} to {rows} added", inputs, (grad_y,)
    inputs = normal(9, 2, 6).permute(2, 1, 0)[::2], normal(2, 4, 3).permute(2, 1, 0)
    grad_y = normal(9, 4, 3).permute(2, 1, 0)
    yield "3x2x9 to 4 strided", (*inputs, normal(9, 3).T, normal(4, 3).T), (grad_y,)
    inputs = normal(0, 4, 7), normal(0, 4, 4), normal(0, 7), normal(0, 4)
    yield "0x4x7 to 4 empty", inputs, (normal(0, 4, 7),)
    if device.type == "cuda":  # the interpreter's bf16 arithmetic is wrong
        for rows in (1, 4):
            inputs = normal(700, 4, 776).bfloat16(), normal(700, rows, 4)
            inputs = *inputs, normal(700, 776).bfloat16(), normal(700, rows)
            yield f"700x4x776 to {rows} bf16", inputs, (normal(700, rows, 776).bfloat16(),)


def _timed(device: torch.device) -> Drawn:
    """Draw 16384 positions of four streams of a width of 1024."""
    draw = partial(torch.randn, device=device, dtype=torch.bfloat16)
    weights = draw(16384, 4, 5).float()
    inputs = draw(16384, 4, 1024), weights[..., :4], draw(16384, 1024), weights[..., 4]
    return "16384x4x1024 to 4 bf16", inputs, (draw(16384, 4, 1024),)


def _timings(device: torch.device, _group_size: int) -> Iterator[Timing]:
    label, inputs, _ = _timed(device)
    x, weights, added, gains = inputs
    low = torch.cat((weights, gains[..., None]), dim=2).bfloat16()
    peer = partial(torch.bmm, low, torch.cat((x, added[:, None]), dim=1))
    yield Timing(label, inputs, peer=peer, peer_name="bmm")


def _backward_timings(device: torch.device, _group_size: int) -> Iterator[Timing]:
    label, inputs, grads = _timed(device)
    inputs = (*grads, *inputs)
    yield Timing(label, inputs, peer=partial(mix_streams_backward.torch, *inputs))


_GATE = Gate(
    relative=1e-5, peer_slack=0.1, rounded=True,
    reason="float32 sums over streams and columns; in bf16 no worse than one rounding",
)  # fmt: skip
_SIZES = {"S": STREAMS, "R": STREAMS}

mix_streams_verification = Verification(
    mix_streams, mix_streams_reference, cases_of(_draw), _GATE, sizes=_SIZES, timings=_timings
)
mix_streams_backward_verification = Verification(
    mix_streams_backward, mix_streams_backward_reference,
    cases_of(_draw, lambda inputs, grads: (*grads, *inputs)), _GATE, sizes=_SIZES,
    timings=_backward_timings,
)  # fmt: skip
