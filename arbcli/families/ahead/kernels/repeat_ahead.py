"""Prompt lookup: find an earlier occurrence of a text's last bytes, and the bytes after it.

Of the positions before the last byte, the kernel selects the one with the longest suffix that
equals the end of the text, up to `MAX_MATCH` bytes; ties go to the latest position. The bytes
after it are the proposals. If the text ends before M bytes, the proposals repeat from the start.
"""

import torch
from torch import Tensor

from arbcli.families.ahead.config import MAX_AHEAD
from arbcli.kernels.runtime.operation import Operation, tl, triton
from arbcli.kernels.runtime.overlap import overlap_options, wait_for_last

MAX_MATCH = tl.constexpr(16)
"""Maximum number of bytes that are compared per position."""
SPAN = tl.constexpr(4096)
"""Number of positions before the last byte that are searched."""


def _repeat_ahead_torch(repeated: Tensor, equal: Tensor, text: Tensor, position: Tensor) -> None:
    place, last = position.long(), len(text) - 1
    back = torch.arange(1, min(SPAN.value, max(last, 1)) + 1, device=text.device)
    before = torch.arange(MAX_MATCH.value, device=text.device)[:, None]
    at = place - back - before  # (bytes, positions)
    same = text[at.clamp(0, last)] == text[(place - before).clamp(0, last)]
    length = (same & (at >= 0)).long().cumprod(0).sum(0)
    best = (length * SPAN.value - back).argmax(0, keepdim=True)
    numbers, period = torch.arange(len(repeated), device=text.device), back[best]
    source = place - period + 1 + numbers % period
    repeated.copy_(text[source.clamp(0, last)])
    equal.copy_(length[best][0])


@triton.jit
def _repeat_ahead_kernel(
    repeated_ptr, equal_ptr, text_ptr, position_ptr, M,
    MOST: tl.constexpr, SPAN: tl.constexpr, OVERLAP: tl.constexpr,
):  # fmt: skip
    wait_for_last(OVERLAP)
    position = tl.load(position_ptr)
    back = 1 + tl.arange(0, SPAN)
    length, same = tl.zeros((SPAN,), tl.int32), back <= position
    for i in tl.range(0, MOST):
        at = position - back - i
        same &= at >= 0
        byte = tl.load(text_ptr + at, mask=same, other=0)
        same &= byte == tl.load(text_ptr + tl.maximum(position - i, 0))
        length += same.to(tl.int32)
    best = tl.max(length * SPAN - back, axis=0) + SPAN  # ties go to the latest position
    row, period = tl.arange(0, 8), SPAN - best % SPAN
    source = tl.maximum(position - period + 1 + row % period, 0)
    byte = tl.load(text_ptr + source, mask=row < M, other=0)
    tl.store(repeated_ptr + row, byte.to(tl.int64), mask=row < M)
    tl.store(equal_ptr, best // SPAN)


def _repeat_ahead_triton(repeated: Tensor, equal: Tensor, text: Tensor, position: Tensor) -> None:
    _repeat_ahead_kernel[(1,)](
        repeated, equal, text, position, len(repeated),
        MOST=MAX_MATCH, SPAN=SPAN, num_warps=16, **overlap_options(text),
    )  # fmt: skip


repeat_ahead_ = Operation(
    "repeat_ahead", _repeat_ahead_triton, _repeat_ahead_torch,
    "repeated: int64[M] dense; equal: int32[]; text: uint8[P] dense; position: int32[]",
    where=(f"1 <= M <= {MAX_AHEAD}", "P > 0"),
)  # fmt: skip
"""Copy the bytes after the longest earlier occurrence of the text's last bytes, in place.

Args:
    repeated: (M,) int64, contiguous: set to the proposals after the last byte; undefined if
        `equal` is 0.
    equal: int32 scalar: set to the number of equal bytes, 0 to 16.
    text: (P,) uint8, contiguous.
    position: int32 scalar, below P: position of the last byte; later elements are not read.
"""
