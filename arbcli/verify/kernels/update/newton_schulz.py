"""Verification of `arbcli.kernels.update.newton_schulz`."""

import torch
from torch import Tensor

from arbcli.kernels.update import newton_schulz
from arbcli.verify.verification import (
    CaseGenerator,
    Verification,
    float32_sums,
    no_rows,
    same_inputs,
)


def gram_reference(x: Tensor) -> Tensor:
    """Compute the reference result of `gram`, in float64."""
    return torch.einsum("...ik,...jk->...ij", x.double(), x.double())


def gram_polynomial_reference(a: Tensor, alpha: float, beta: float, gamma: float) -> Tensor:
    """Compute the reference result of `gram_polynomial`, in float64."""
    a = a.double()
    square = torch.einsum("...ik,...kj->...ij", a, a)
    return alpha * torch.eye(a.shape[-1], device=a.device) + beta * a + gamma * square


_GATE = float32_sums("", "no worse than torch's product by 10 %")


def _draw(rng: CaseGenerator, group_size: int, m: int, n: int, k: int) -> tuple:
    stack = (1 + rng.integer(3),) if rng.chance(0.3) else ()
    n, k = (n, k) if rng.chance(0.3) else (min(n, k), max(n, k))
    return (rng.reals(*stack, n, k),)


def _draw_symmetric(rng: CaseGenerator, group_size: int, m: int, n: int, k: int) -> tuple:
    (x,) = _draw(rng, group_size, m, n, k)
    x = x.float() / max(n, k) ** 0.5
    a = x @ x.mT
    return rng.view(((a + a.mT) / 4).to(rng.dtype)), 3.4445, -4.775, 2.0315


gram_verification = Verification(
    newton_schulz.gram, gram_reference, gate=_GATE, shapes=((1, 1, 1),),
    changed={
        "a row for all": {"x": lambda x: x[:1].expand_as(x)}, "zeros": {"x": torch.zeros_like},
        "nothing to sum": {"x": lambda x: x[:, :0]}, "empty": {"x": no_rows},
    },
    triton=newton_schulz.gram_triton, draw=_draw, torch_is_peer=True,
    library=same_inputs(newton_schulz.gram.torch), needs_rows=False,
    not_verified=("kernels of the matrix library, which computes the other shapes",),
)  # fmt: skip
gram_polynomial_verification = Verification(
    newton_schulz.gram_polynomial, gram_polynomial_reference, gate=_GATE, shapes=((1, 1, 1),),
    changed={
        "square alone": {"alpha": 0.0, "beta": 0.0, "gamma": 1.0}, "zeros": {"a": torch.zeros_like},
    },
    triton=newton_schulz.gram_polynomial_triton, draw=_draw_symmetric, torch_is_peer=True,
    needs_rows=False,
)  # fmt: skip
