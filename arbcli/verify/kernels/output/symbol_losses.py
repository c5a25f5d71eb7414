"""Verification of `arbcli.kernels.output.symbol_losses`."""

from collections.abc import Iterator

import torch
from torch import Tensor

from arbcli.kernels.output.symbol_losses import (
    MOST_SYMBOLS,
    add_symbols_,
    grade_symbols_,
)
from arbcli.verify.case_generator import CaseGenerator
from arbcli.verify.timed import Timed
from arbcli.verify.verification import Case, Gate, Verification


def add_symbols_reference(
    total: Tensor, target_sums: Tensor, logits: Tensor, targets: Tensor
) -> tuple[Tensor, Tensor]:
    """Compute the reference result of `add_symbols_` in `total` and `target_sums`, in float64."""
    logits = logits.to(torch.float64)
    total = torch.logsumexp(torch.cat((total.double()[:, None], logits), dim=1), dim=1)
    here = torch.arange(logits.shape[1], device=logits.device) == targets[:, None]
    return total, target_sums.double() + torch.where(here, logits, 0).sum(dim=1)


def grade_symbols_reference(
    logits: Tensor, targets: Tensor, total: Tensor, scale: Tensor
) -> Tensor:
    """Compute the reference result of `grade_symbols_` in `logits`, in float64."""
    shares = torch.exp(logits.to(torch.float64) - total.double()[:, None])
    here = torch.arange(logits.shape[1], device=logits.device) == targets[:, None]
    return (shares - here.double()) * scale.double()[:, None]


def _chunks(device: torch.device) -> Iterator[tuple[str, Tensor, Tensor, Tensor]]:
    """Draw (label, logits, targets, a float32 per row)."""
    generator = torch.Generator().manual_seed(0)
    for rows, symbols in ((1, 1), (3, 33), (17, 256), (9, 300), (2, 4033), (0, 256)):
        logits = 5 * torch.randn(rows, symbols, generator=generator).to(device)
        targets = torch.randint(-symbols, 2 * symbols, (rows,), generator=generator).to(device)
        row = torch.randn(rows, generator=generator).to(device)
        yield f"{rows}x{symbols}", logits, targets, row
    logits = torch.randn(40, 33, generator=generator).to(device)
    targets = torch.randint(20, (66,), generator=generator).to(device)
    row = torch.randn(33, generator=generator).to(device)
    yield "33x20 strided", logits.T[:, ::2], targets[::2], row
    yield "33x20 large", 300 * logits.T[:, ::2], targets[::2], row
    if device.type == "cuda":  # the interpreter's bf16 arithmetic is wrong
        logits = torch.randn(1000, 4032, generator=generator).to(device, torch.bfloat16)
        targets = torch.randint(-4032, 8064, (1000,), generator=generator).to(device)
        row = torch.randn(1000, generator=generator).to(device)
        yield "1000x4032 bf16", logits, targets, row


def _add_cases(device: torch.device, _group_size: int) -> Iterator[Case]:
    for label, logits, targets, row in _chunks(device):
        for total in (row, torch.full_like(row, -torch.inf)):
            kind = "more" if total is row else "first"
            inputs = (10 * total, row.clone(), logits, targets)
            yield Case(f"{label} {kind}", inputs)


def _grade_cases(device: torch.device, _group_size: int) -> Iterator[Case]:
    for label, logits, targets, row in _chunks(device):
        total = torch.logsumexp(logits.float(), dim=1) + row.abs()
        yield Case(label, (logits, targets, total, row))


_GATE = Gate(
    relative=1e-5, peer_slack=0.1, rounded=True,
    reason="float32 sums of at most 4096 exponentials; in bf16 no worse than one rounding",
)  # fmt: skip


def _total_so_far(rng: CaseGenerator, rows: int) -> Tensor:
    total = rng.reals(rows, dtype=torch.float32)
    return torch.full_like(total, -torch.inf) if rng.chance(0.3) else total


def _draw_graded(rng: CaseGenerator, _group_size: int, m: int, _n: int, k: int) -> tuple:
    logits, scale = rng.reals(m, k + 1), rng.reals(m, dtype=torch.float32).contiguous()
    total = torch.logsumexp(logits.float(), dim=1) + scale.abs().clamp(max=5)
    return logits, rng.integers(-k, 2 * k, m, dtype=torch.int64), total, scale


_SIZES = {"V": f"min(k + 1, {MOST_SYMBOLS})"}

add_symbols_verification = Verification(
    add_symbols_, add_symbols_reference, _add_cases, _GATE, compared=("total", "target_sums"),
    sizes=_SIZES,
    timed=[Timed("16384x4032 bf16", lambda *args: torch.logsumexp(args[2], 1), M=16384, V=4032)],
    values={"total": _total_so_far, "targets": ("-V", "2 * V")},
)  # fmt: skip
grade_symbols_verification = Verification(
    grade_symbols_, grade_symbols_reference, _grade_cases, _GATE, compared=("logits",),
    draw=_draw_graded, needs_rows=True,
    timed=[Timed("16384x4032 bf16", lambda logits, *_: torch.softmax(logits, 1), M=16384, V=4032)],
    values={"targets": ("-V", "2 * V")},
)  # fmt: skip
