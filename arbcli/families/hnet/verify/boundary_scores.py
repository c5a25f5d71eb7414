"""Verification of `arbcli.families.hnet.kernels.boundary_scores`."""

from math import prod
from typing import Any

import torch
from torch import Tensor

from arbcli.families.hnet.kernels.boundary_scores import boundary_scores, boundary_scores_backward
from arbcli.verify.verification import Gate, Verification, gradients_of


def boundary_scores_reference(x: Tensor, qk: Tensor) -> Tensor:
    """Compute the reference result of `boundary_scores`, in float64."""
    x, (q, k) = x.double(), qk.double().chunk(2, dim=2)
    u, v = (x + q)[:, :-1], (x + k)[:, 1:]
    lengths = ((part.square().sum(dim=2) + 1e-6).sqrt() for part in (u, v))
    p = (1 - (u * v).sum(dim=2) / prod(lengths)) / 2
    return torch.cat([torch.ones_like(x[:, :1, 0]), p], dim=1)


_GATE = Gate(
    relative=1e-5, peer_slack=0.1, rounded=True,
    reason="float32 sums over a row, of which differences are taken; in bf16 one rounding",
)  # fmt: skip
_SIZES = {"B": (1, 3), "T": "m", "D": "max(k, 5)"}
"""(B, T, D); D = 1 is left out, as the cosine of scalars has no gradient."""


def _zeros_at_the_end(values: Tensor) -> Tensor:
    return torch.cat((values[:, :4], torch.zeros_like(values[:, 4:])), dim=1)


_CHANGED: dict[str, dict[str, Any]] = {
    "identity": {"qk": torch.zeros_like},
    "all alike": dict.fromkeys(("x", "qk"), lambda x: x[:, :1].expand_as(x)),
    "zeros at the end": dict.fromkeys(("x", "qk"), _zeros_at_the_end),
}


boundary_scores_verification = Verification(
    boundary_scores, boundary_scores_reference, gate=_GATE, shapes=((0, 1, 5),), changed=_CHANGED,
    sizes=_SIZES,
)  # fmt: skip
boundary_scores_backward_verification = Verification(
    boundary_scores_backward, gradients_of(boundary_scores_reference, (0, 1)),
    gate=_GATE, shapes=((0, 1, 5),), changed=_CHANGED,
    sizes=_SIZES,
)  # fmt: skip
