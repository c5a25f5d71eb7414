"""Verification of `arbcli.families.hnet.kernels.boundary_scores`."""

from collections.abc import Iterator
from math import prod

import torch
from torch import Tensor

from arbcli.families.hnet.kernels.boundary_scores import (
    boundary_scores,
    boundary_scores_backward,
)
from arbcli.kernels.runtime.arguments import normals
from arbcli.verify.timed import Timed
from arbcli.verify.verification import Drawn, Gate, Verification, cases_of


def boundary_scores_reference(x: Tensor, qk: Tensor) -> Tensor:
    """Compute the reference result of `boundary_scores`, in float64."""
    x, (q, k) = x.double(), qk.double().chunk(2, dim=2)
    u, v = (x + q)[:, :-1], (x + k)[:, 1:]
    lengths = ((part.square().sum(dim=2) + 1e-6).sqrt() for part in (u, v))
    p = (1 - (u * v).sum(dim=2) / prod(lengths)) / 2
    return torch.cat([torch.ones_like(x[:, :1, 0]), p], dim=1)


def boundary_scores_backward_reference(grad_p: Tensor, x: Tensor, qk: Tensor) -> tuple[Tensor, ...]:
    """Compute the reference result of `boundary_scores_backward`, by autograd in float64."""
    x, qk = x.double().requires_grad_(), qk.double().requires_grad_()
    with torch.enable_grad():
        total = (boundary_scores_reference(x, qk) * grad_p.double()).sum()
    return torch.autograd.grad(total, (x, qk))


def _draw(device: torch.device) -> Iterator[Drawn]:
    generator = torch.Generator().manual_seed(0)
    draw = normals(generator, device)
    for batch, length, width in ((1, 1, 5), (2, 33, 7), (3, 5, 33), (1, 18, 159)):
        label = f"{batch}x{length}x{width}"
        inputs = draw(batch, length, width), draw(batch, length, 2 * width)
        yield label, inputs, (draw(batch, length),)
    x = draw(2, 9, 40)
    yield "2x9x40 identity", (x, torch.zeros(2, 9, 80, device=device)), (draw(2, 9),)
    same = x[:, :1].expand(-1, 9, -1)
    yield "2x9x40 all alike", (same, draw(2, 1, 80).expand(-1, 9, -1)), (draw(2, 9),)
    x, qk = draw(2, 9, 40), draw(2, 9, 80)
    x[:, 4:], qk[:, 4:] = 0, 0
    yield "2x9x40 zeros at the end", (x, qk), (draw(2, 9),)
    strided = draw(10, 9, 6).permute(2, 1, 0)[::2], draw(20, 9, 3).permute(2, 1, 0)
    yield "3x9x10 strided", strided, (draw(9, 3).T,)
    yield "2x0x5 empty", (draw(2, 0, 5), draw(2, 0, 10)), (draw(2, 0),)
    if device.type == "cuda":  # the interpreter's bf16 arithmetic is wrong
        x, qk = draw(3, 300, 776).bfloat16(), draw(3, 300, 1552).bfloat16()
        yield "3x300x776 bf16", (x, qk), (draw(3, 300),)


_GATE = Gate(
    relative=1e-5, peer_slack=0.1, rounded=True,
    reason="float32 sums over a row, of which differences are taken; in bf16 one rounding",
)  # fmt: skip
_SIZES = {"B": (1, 3), "T": "m", "D": "max(k, 5)"}
"""(B, T, D); D = 1 is left out, as the cosine of scalars has no gradient."""

boundary_scores_verification = Verification(
    boundary_scores, boundary_scores_reference, cases_of(_draw), _GATE, sizes=_SIZES,
    timed=[Timed("32x4096x512 bf16", boundary_scores.torch, B=32, T=4096, D=512)],
)  # fmt: skip
boundary_scores_backward_verification = Verification(
    boundary_scores_backward, boundary_scores_backward_reference,
    cases_of(_draw, lambda inputs, grads: (*grads, *inputs)), _GATE, sizes=_SIZES,
    timed=[Timed("32x4096x512 bf16", boundary_scores_backward.torch, B=32, T=4096, D=512)],
)  # fmt: skip
