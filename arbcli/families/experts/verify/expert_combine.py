"""Verification of `arbcli.families.experts.kernels.expert_combine`."""

import torch
from torch import Tensor

from arbcli.families.experts.kernels.expert_combine import (
    MAX_SLOTS,
    expert_combine,
    expert_combine_backward,
)
from arbcli.verify.verification import CaseGenerator, Verification, float32_sums


def expert_combine_reference(values: Tensor, positions: Tensor, gates: Tensor | None) -> Tensor:
    """Compute the reference result of `expert_combine`, in float64."""
    gates = torch.ones_like(positions) if gates is None else gates
    return torch.einsum("mj,mjd->md", gates.double(), values.double()[positions])


def expert_combine_backward_reference(
    grad_y: Tensor, values: Tensor, positions: Tensor, gates: Tensor | None
) -> tuple[Tensor, Tensor]:
    """Compute the reference result of `expert_combine_backward`, in float64."""
    gates = torch.ones_like(positions) if gates is None else gates
    grad = gates.double()[..., None] * grad_y.double()[:, None]
    grad_values = torch.zeros_like(values, dtype=torch.float64).index_put_((positions,), grad)
    return grad_values, torch.einsum("md,mjd->mj", grad_y.double(), values.double()[positions])


_GATE = float32_sums("of up to thousands of products")


def _draw_slots(rng: CaseGenerator, group_size: int, m: int, n: int, k: int) -> tuple:
    slots, spare = rng.pick((1, 2, 3, MAX_SLOTS)), rng.integer(3)
    order = torch.randperm(m * slots + spare, generator=rng.generator, device=rng.device)
    positions = rng.view(order[: m * slots].view(m, slots))
    gates = None if rng.chance(0.2) else rng.reals(m, slots, dtype=torch.float32)
    return rng.reals(len(order), k), positions, gates


expert_combine_verification = Verification(
    expert_combine, expert_combine_reference, gate=_GATE, shapes=((0, 1, 7), (3, 1, 513)),
    changed={"gates of zero": {"gates": torch.zeros_like}}, draw=_draw_slots,
    needs_rows=True,
)  # fmt: skip
expert_combine_backward_verification = Verification(
    expert_combine_backward, expert_combine_backward_reference,
    gate=_GATE, shapes=((0, 1, 7), (3, 1, 513)),
    changed={"gates of zero": {"gates": torch.zeros_like}},
    draw=lambda rng, g, m, n, k: (rng.reals(m, k), *_draw_slots(rng, g, m, n, k)),
    needs_rows=True,
)  # fmt: skip
