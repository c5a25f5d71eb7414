"""Verification of `arbcli.kernels.output.symbol_losses`."""

import torch
from torch import Tensor

from arbcli.kernels.output.symbol_losses import MAX_SYMBOLS, add_symbols_, grade_symbols_
from arbcli.verify.verification import CaseGenerator, Verification, filled, float32_sums


def add_symbols_reference(
    total: Tensor, target_sums: Tensor, logits: Tensor, targets: Tensor
) -> tuple[Tensor, Tensor]:
    """Compute the reference result of `add_symbols_` in `total` and `target_sums`, in float64."""
    logits = logits.to(torch.float64)
    total = torch.logsumexp(torch.cat((total.double()[:, None], logits), dim=1), dim=1)
    is_target = torch.arange(logits.shape[1], device=logits.device) == targets[:, None]
    return total, target_sums.double() + torch.where(is_target, logits, 0).sum(dim=1)


def grade_symbols_reference(
    logits: Tensor, targets: Tensor, total: Tensor, scale: Tensor
) -> Tensor:
    """Compute the reference result of `grade_symbols_` in `logits`, in float64."""
    shares = torch.exp(logits.to(torch.float64) - total.double()[:, None])
    is_target = torch.arange(logits.shape[1], device=logits.device) == targets[:, None]
    return (shares - is_target.double()) * scale.double()[:, None]


_GATE = float32_sums("of at most 4096 exponentials")


def _draw_total(rng: CaseGenerator, rows: int) -> Tensor:
    total = rng.reals(rows, dtype=torch.float32)
    return torch.full_like(total, -torch.inf) if rng.chance(0.3) else total


def _draw_grade(rng: CaseGenerator, _group_size: int, m: int, _n: int, k: int) -> tuple:
    logits, scale = rng.reals(m, k + 1), rng.reals(m, dtype=torch.float32).contiguous()
    total = torch.logsumexp(logits.float(), dim=1) + scale.abs().clamp(max=5)
    return logits, rng.integers(-k, 2 * k, m, dtype=torch.int64), total, scale


_SIZES = {"V": f"min(k + 1, {MAX_SYMBOLS})"}

add_symbols_verification = Verification(
    add_symbols_, add_symbols_reference,
    shapes=((0, 1, 255),),
    changed={"large": {"logits": lambda x: 300 * x}, "first": {"total": filled(-torch.inf)}},
    gate=_GATE, compared=("total", "target_sums"),
    sizes=_SIZES,
    values={"total": _draw_total, "targets": ("-V", "2 * V")},
)  # fmt: skip
grade_symbols_verification = Verification(
    grade_symbols_, grade_symbols_reference,
    shapes=((0, 1, 255),),
    gate=_GATE, compared=("logits",),
    draw=_draw_grade, needs_rows=True,
    values={"targets": ("-V", "2 * V")},
)  # fmt: skip
