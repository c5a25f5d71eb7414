"""Cross-entropy of a large vocabulary in chunks of symbols, with the logits of one chunk at a time.

Forward, each chunk updates the log-sum-exp of every row. Backward, the logits of a chunk are
recomputed and replaced by their gradient, in place.
"""

from collections.abc import Iterator
from dataclasses import replace

import torch
from torch import Tensor

from arbcli.kernels.dice import Dice
from arbcli.kernels.runtime._triton import tl, triton
from arbcli.kernels.runtime.arguments import FLOAT, INT64, Array
from arbcli.kernels.runtime.backend import row_chunks
from arbcli.kernels.runtime.operation import Case, Gate, Operation
from arbcli.kernels.timed import Timed

MOST_SYMBOLS = 4096
"""Maximum number of symbols per chunk; one program holds a chunk of a row."""


def add_symbols_reference(
    total: Tensor, of_target: Tensor, logits: Tensor, targets: Tensor
) -> tuple[Tensor, Tensor]:
    """Compute the reference result of `add_symbols_` in `total` and `of_target`, in float64."""
    logits = logits.to(torch.float64)
    total = torch.logsumexp(torch.cat((total.double()[:, None], logits), dim=1), dim=1)
    here = torch.arange(logits.shape[1], device=logits.device) == targets[:, None]
    return total, of_target.double() + torch.where(here, logits, 0).sum(dim=1)


def grade_symbols_reference(
    logits: Tensor, targets: Tensor, total: Tensor, scale: Tensor
) -> Tensor:
    """Compute the reference result of `grade_symbols_` in `logits`, in float64."""
    shares = torch.exp(logits.to(torch.float64) - total.double()[:, None])
    here = torch.arange(logits.shape[1], device=logits.device) == targets[:, None]
    return (shares - here.double()) * scale.double()[:, None]


def _add_symbols_torch(total: Tensor, of_target: Tensor, logits: Tensor, targets: Tensor) -> None:
    for rows in row_chunks(logits):
        part, place = logits[rows].float(), targets[rows]
        inside = (place >= 0) & (place < part.shape[1])
        found = part.gather(1, place.clamp(0, part.shape[1] - 1)[:, None])[:, 0]
        of_target[rows] += torch.where(inside, found, 0)
        highest = part.amax(dim=1)
        sums = (part - highest[:, None]).exp_().sum(dim=1)
        total[rows] = torch.logaddexp(total[rows], sums.log_().add_(highest))


def _grade_symbols_torch(logits: Tensor, targets: Tensor, total: Tensor, scale: Tensor) -> None:
    symbols = torch.arange(logits.shape[1], device=logits.device)
    for rows in row_chunks(logits):
        shares = (logits[rows].float() - total[rows, None]).exp_()
        shares -= (symbols == targets[rows, None]).float()
        logits[rows] = shares.mul_(scale[rows, None])


@triton.jit
def _add_symbols_kernel(
    total_ptr, of_target_ptr, logits_ptr, targets_ptr,
    N,
    stride_m, stride_n, stride_t,
    BLOCK_N: tl.constexpr,
):  # fmt: skip
    m, offs_n = tl.program_id(0).to(tl.int64), tl.arange(0, BLOCK_N)
    inside = offs_n < N
    ptrs = logits_ptr + m * stride_m + offs_n.to(tl.int64) * stride_n
    x = tl.load(ptrs, mask=inside, other=float("-inf")).to(tl.float32)
    target = tl.load(targets_ptr + m * stride_t)
    before, so_far = tl.load(total_ptr + m), tl.load(of_target_ptr + m)
    highest = tl.maximum(tl.max(x, axis=0), before)
    total = tl.sum(tl.exp(x - highest), axis=0) + tl.exp(before - highest)
    found = tl.sum(tl.where((offs_n == target) & inside, x, 0.0), axis=0)
    tl.debug_barrier()  # all threads read before any thread writes
    tl.store(total_ptr + m, tl.log(total) + highest)
    tl.store(of_target_ptr + m, so_far + found)


@triton.jit
def _grade_symbols_kernel(
    logits_ptr, targets_ptr, total_ptr, scale_ptr,
    N,
    stride_m, stride_n, stride_t,
    BLOCK_N: tl.constexpr,
):  # fmt: skip
    m, offs_n = tl.program_id(0).to(tl.int64), tl.arange(0, BLOCK_N)
    inside = offs_n < N
    ptrs = logits_ptr + m * stride_m + offs_n.to(tl.int64) * stride_n
    x = tl.load(ptrs, mask=inside, other=float("-inf")).to(tl.float32)
    here = (offs_n == tl.load(targets_ptr + m * stride_t)).to(tl.float32)
    grad = (tl.exp(x - tl.load(total_ptr + m)) - here) * tl.load(scale_ptr + m)
    tl.store(ptrs, grad.to(logits_ptr.dtype.element_ty), mask=inside)


def _add_symbols_triton(total: Tensor, of_target: Tensor, logits: Tensor, targets: Tensor) -> None:
    rows, symbols = logits.shape
    if rows:
        _add_symbols_kernel[(rows,)](
            total, of_target, logits, targets, symbols, *logits.stride(), *targets.stride(),
            BLOCK_N=triton.next_power_of_2(symbols),
        )  # fmt: skip


def _grade_symbols_triton(logits: Tensor, targets: Tensor, total: Tensor, scale: Tensor) -> None:
    rows, symbols = logits.shape
    if rows:
        _grade_symbols_kernel[(rows,)](
            logits, targets, total, scale, symbols, *logits.stride(), *targets.stride(),
            BLOCK_N=triton.next_power_of_2(symbols),
        )  # fmt: skip


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

_ROW = Array("M", FLOAT, dense=True)
_CHUNK = {"logits": Array("M, V"), "targets": Array("M", INT64, values=("-V", "2 * V"))}
_WHERE, _SIZES = (f"0 < V <= {MOST_SYMBOLS}",), {"V": f"min(k + 1, {MOST_SYMBOLS})"}


def _total_so_far(dice: Dice, rows: int) -> Tensor:
    total = dice.reals(rows, dtype=torch.float32)
    return torch.full_like(total, -torch.inf) if dice.chance(0.3) else total


def _draw_graded(dice: Dice, _group_size: int, m: int, _n: int, k: int) -> tuple:
    logits, scale = dice.reals(m, k + 1), dice.reals(m, dtype=torch.float32).contiguous()
    total = torch.logsumexp(logits.float(), dim=1) + scale.abs().clamp(max=5)
    return logits, dice.integers(-k, 2 * k, m, dtype=torch.int64), total, scale


add_symbols_ = Operation(
    "add_symbols", _add_symbols_triton, _add_symbols_torch, add_symbols_reference, _add_cases,
    _GATE,
    {"total": replace(_ROW, values=_total_so_far), "of_target": _ROW, **_CHUNK},
    where=_WHERE, sizes=_SIZES, compared=("total", "of_target"),
    timed=[Timed("16384x4032 bf16", lambda *given: torch.logsumexp(given[2], 1), M=16384, V=4032)],
)  # fmt: skip
"""Update the log-sum-exp of rows with a chunk of symbols, in place.

Args:
    total: (M,) float32, contiguous: log-sum-exp so far, -inf before the first chunk.
    of_target: (M,) float32, contiguous; the target's logit is added if it is in the chunk.
    logits: (M, N) float32 or bfloat16, N at most 4096, any strides; finite.
    targets: (M,) int64, relative to the first symbol of the chunk; others are out of range.
"""
grade_symbols_ = Operation(
    "grade_symbols", _grade_symbols_triton, _grade_symbols_torch, grade_symbols_reference,
    _grade_cases, _GATE, {**_CHUNK, "total": _ROW, "scale": _ROW},
    where=_WHERE, draw=_draw_graded, needs_rows=True,
    compared=("logits",),
    timed=[Timed("16384x4032 bf16", lambda logits, *_: torch.softmax(logits, 1), M=16384, V=4032)],
)  # fmt: skip
"""Replace the logits of a chunk by the gradient of the scaled losses, in place.

Args:
    logits: as in `add_symbols_`.
    targets: as in `add_symbols_`.
    total: (M,) float32, contiguous: log-sum-exp over all chunks.
    scale: (M,) float32, contiguous: factor of each row's loss.
"""
