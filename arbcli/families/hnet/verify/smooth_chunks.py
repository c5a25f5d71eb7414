"""Verification of `arbcli.families.hnet.kernels.smooth_chunks`."""

import torch
from torch import Tensor

from arbcli.families.hnet.kernels.smooth_chunks import smooth_chunks, smooth_chunks_backward
from arbcli.verify.verification import CaseGenerator, Verification, float32_sums, gradients_of


def smooth_chunks_reference(z: Tensor, p: Tensor) -> Tensor:
    """Compute the reference result of `smooth_chunks`, one chunk after another in float64."""
    z, p, means = z.double(), p.double()[..., None], list[Tensor]()
    for j in range(z.shape[1]):
        means.append(p[:, j] * z[:, j] + (1 - p[:, j]) * (means[-1] if means else 0))
    return torch.stack(means, dim=1) if means else torch.zeros_like(z)


_GATE = float32_sums("over chunks and columns")


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
    smooth_chunks_backward,
    gradients_of(smooth_chunks_reference, (0, 1), ignored=(3,)),
    gate=_GATE, shapes=((0, 1, 3),),
    draw=_draw_backward, needs_rows=True, values={"p": _draw_shares},
)  # fmt: skip
