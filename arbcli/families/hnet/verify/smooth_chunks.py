"""Verification of `arbcli.families.hnet.kernels.smooth_chunks`."""

import torch
from torch import Tensor

from arbcli.families.hnet.kernels.smooth_chunks import (
    smooth_chunks,
    smooth_chunks_backward,
)
from arbcli.verify.case_generator import CaseGenerator
from arbcli.verify.verification import Gate, Verification


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


_GATE = Gate(
    relative=1e-5, peer_slack=0.1, rounded=True,
    reason="float32 sums over chunks and columns; in bf16 no worse than one rounding",
)  # fmt: skip


def _draw_shares(rng: CaseGenerator, *shape: int) -> Tensor:
    shares = rng.shares(*shape)
    return shares.round() if rng.chance(0.3) else shares  # all or nothing


smooth_chunks_verification = Verification(
    smooth_chunks, smooth_chunks_reference, gate=_GATE, shapes=((0, 1, 3),),
    sizes={"B": (1, 3), "C": "m"}, values={"p": _draw_shares},
)  # fmt: skip


def _draw_backward(rng: CaseGenerator, *sizes: int) -> tuple:
    z, p = smooth_chunks_verification.drawn(rng, *sizes)
    return rng.reals(*z.shape, dtype=torch.float32), z, p, smooth_chunks.torch(z, p)


smooth_chunks_backward_verification = Verification(
    smooth_chunks_backward, smooth_chunks_backward_reference,
    gate=_GATE, shapes=((0, 1, 3),),
    draw=_draw_backward, needs_rows=True, values={"p": _draw_shares},
)  # fmt: skip
