"""Verification of `arbcli.kernels.output.cross_entropy`."""

from functools import partial

import torch
from torch import Tensor
from torch.nn import functional

from arbcli.kernels.output.cross_entropy import cross_entropy, cross_entropy_backward
from arbcli.verify.verification import Verification, float32_sums, same_inputs


def cross_entropy_reference(logits: Tensor, targets: Tensor) -> Tensor:
    """Compute the reference result of `cross_entropy`, in float64."""
    logits = logits.to(torch.float64)
    highest = logits.amax(dim=1, keepdim=True)
    total = torch.exp(logits - highest).sum(dim=1)
    return total.log() + highest[:, 0] - logits.gather(1, targets[:, None])[:, 0]


def cross_entropy_backward_reference(logits: Tensor, targets: Tensor, scale: Tensor) -> Tensor:
    """Compute the reference result of `cross_entropy_backward`, in float64."""
    scale = scale.double() / max(len(logits), 1)
    logits = logits.to(torch.float64)
    shares = torch.exp(logits - logits.amax(dim=1, keepdim=True))
    shares /= shares.sum(dim=1, keepdim=True)
    is_target = torch.arange(logits.shape[1], device=logits.device) == targets[:, None]
    return (shares - is_target.double()) * scale


_GATE = float32_sums("of at most 300 exponentials")

_SIZES = {"V": "min(k + 1, 4096)"}

cross_entropy_verification = Verification(
    cross_entropy, cross_entropy_reference, gate=_GATE, sizes=_SIZES, shapes=((0, 1, 255),),
    library=same_inputs(partial(functional.cross_entropy, reduction="none")),
    changed={"large": {"logits": lambda x: 300 * x}},
    values={"targets": (0, "V - 1")},
)  # fmt: skip
cross_entropy_backward_verification = Verification(
    cross_entropy_backward, cross_entropy_backward_reference,
    gate=_GATE, sizes=_SIZES, shapes=((0, 1, 255),),
    changed={"large": {"logits": lambda x: 300 * x}},
    values={"targets": (0, "V - 1"), "scale": lambda rng: rng.real(0.1)},
)  # fmt: skip
