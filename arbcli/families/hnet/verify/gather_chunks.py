"""Verification of `arbcli.families.hnet.kernels.gather_chunks`."""

from collections.abc import Iterator

import torch
from torch import Tensor

from arbcli.families.hnet.kernels.gather_chunks import (
    gather_chunks,
)
from arbcli.kernels.runtime.arguments import normals
from arbcli.verify.timed import Timed
from arbcli.verify.verification import Case, Verification


def gather_chunks_reference(x: Tensor, index: Tensor) -> Tensor:
    """Compute `gather_chunks`, one row at a time."""
    y = torch.zeros(*index.shape, x.shape[2], dtype=x.dtype, device=x.device)
    for b, places in enumerate(index.tolist()):
        for r, place in enumerate(places):
            if place >= 0:
                y[b, r] = x[b, place]
    return y


def _cases(device: torch.device, _group_size: int) -> Iterator[Case]:
    generator = torch.Generator().manual_seed(0)
    draw = normals(generator, device)

    def places(batch: int, rows: int, length: int) -> Tensor:
        return torch.randint(-1, length, (batch, rows), generator=generator).to(device)

    for batch, length, rows, width in ((1, 1, 1, 1), (2, 33, 9, 159), (3, 7, 31, 300)):
        inputs = draw(batch, length, width), places(batch, rows, length)
        yield Case(f"{batch}x{rows} of {length}x{width}", inputs)
    x, index = draw(70, 6, 5).permute(2, 1, 0)[::2, ::2], places(9, 6, 3).T[::2, ::2]
    yield Case("3x5 of 3x70 strided", (x, index))
    yield Case("2x5 of 4x9 nowhere", (draw(2, 4, 9), places(2, 5, 1).clamp(max=-1)))
    yield Case("2x0 of 4x9 empty", (draw(2, 4, 9), places(2, 0, 1)))
    yield Case("2x3 of 0x9 empty", (draw(2, 0, 9), places(2, 3, 1).clamp(max=-1)))
    if device.type == "cuda":  # the interpreter's bf16 arithmetic is wrong
        yield Case("4x300 of 700x776 bf16", (draw(4, 700, 776).bfloat16(), places(4, 300, 700)))


gather_chunks_verification = Verification(
    gather_chunks, gather_chunks_reference, _cases, sizes={"B": (1, 3), "S": "m", "R": (1, 9, "m")},
    timed=[
        Timed("32x1024 of 4096x512 bf16", gather_chunks.torch, B=32, S=4096, D=512, R=1024,
              index=lambda rng, *shape: torch.arange(0, 4096, 4).to(rng.device).repeat(32, 1))
    ],
    values={"index": (-1, "S - 1")},
)  # fmt: skip
