"""Verification of `arbcli.families.hnet.kernels.smooth_chunks`."""

from collections.abc import Iterator

import torch
from torch import Tensor

from arbcli.families.hnet.kernels.smooth_chunks import (
    smooth_chunks,
    smooth_chunks_backward,
)
from arbcli.kernels.runtime.arguments import normals
from arbcli.verify.case_generator import CaseGenerator
from arbcli.verify.timed import Timed
from arbcli.verify.verification import Gate, Verification, cases_of


def smooth_chunks_reference(z: Tensor, p: Tensor) -> Tensor:
    """Compute the reference result of `smooth_chunks`, one chunk after another in float64."""
    s = torch.zeros(z.shape, dtype=torch.float64, device=z.device)
    last = s.new_zeros(len(s), 1)
    for j in range(z.shape[1]):
        share = p[:, j, None].double()
        last = s[:, j] = share * z[:, j].double() + (1 - share) * last
    return s


def smooth_chunks_backward_reference(
    grad_s: Tensor, z: Tensor, p: Tensor, s: Tensor
) -> tuple[Tensor, Tensor]:
    """Compute the reference result of `smooth_chunks_backward`, by autograd in float64."""
    z, p = z.double().requires_grad_(), p.double().requires_grad_()
    total, last = z.new_zeros(()), z.new_zeros(len(z), 1)
    for j in range(z.shape[1]):
        last = p[:, j, None] * z[:, j] + (1 - p[:, j, None]) * last
        total = total + (last * grad_s[:, j].double()).sum()
    if not z.numel():
        return torch.zeros_like(z), torch.zeros_like(p)
    grad_z, grad_p = torch.autograd.grad(total, (z, p))
    return grad_z, grad_p


def _draw(device: torch.device) -> Iterator[tuple[str, Tensor, Tensor, Tensor]]:
    """Draw (label, z, p, grad_s)."""
    generator = torch.Generator().manual_seed(0)
    normal = normals(generator, device)

    def shares(*shape: int) -> Tensor:
        return torch.rand(shape, generator=generator).to(device)

    for shape in ((1, 1, 1), (2, 33, 7), (3, 5, 33)):
        label = "x".join(map(str, shape))
        yield label, normal(*shape), shares(*shape[:2]), normal(*shape)
    ends = (shares(2, 40) < 0.5).float()
    yield "2x40x5 all or nothing", normal(2, 40, 5), ends, normal(2, 40, 5)
    low = torch.full((1, 65), 1e-4, device=device)
    yield "1x65x3 almost nothing", normal(1, 65, 3), low, normal(1, 65, 3)
    strided = normal(10, 9, 6).permute(2, 1, 0)[::2], shares(9, 6).T[::2]
    yield "3x9x10 strided", *strided, normal(10, 3, 9).permute(1, 2, 0)
    yield "2x0x3 empty", normal(2, 0, 3), shares(2, 0), normal(2, 0, 3)
    if device.type == "cuda":  # the interpreter's bf16 arithmetic is wrong
        z = normal(3, 700, 776).bfloat16()
        yield "3x700x776 bf16", z, shares(3, 700), normal(3, 700, 776)


_GATE = Gate(
    relative=1e-5, peer_slack=0.1, rounded=True,
    reason="float32 sums over chunks and columns; in bf16 no worse than one rounding",
)  # fmt: skip

_TIMED = [
    Timed("32x1024x512 bf16", lambda z, *_: torch.cumsum(z, 1, dtype=torch.float32), "cumsum",
          B=32, C=1024, D=512)
]  # fmt: skip
smooth_chunks_verification = Verification(
    smooth_chunks, smooth_chunks_reference, cases_of(_draw, lambda z, p, _: (z, p)), _GATE,
    sizes={"B": (1, 3), "C": "m"}, timed=_TIMED, values={"p": CaseGenerator.shares},
)  # fmt: skip


def _draw_backward(rng: CaseGenerator, *sizes: int) -> tuple:
    z, p = smooth_chunks_verification.drawn(rng, *sizes)
    return rng.reals(*z.shape, dtype=torch.float32), z, p, smooth_chunks.torch(z, p)


smooth_chunks_backward_verification = Verification(
    smooth_chunks_backward, smooth_chunks_backward_reference,
    cases_of(_draw, lambda z, p, grad: (grad, z, p, smooth_chunks_reference(z, p).float())), _GATE,
    draw=_draw_backward, needs_rows=True, timed=_TIMED, values={"p": CaseGenerator.shares},
)  # fmt: skip
