"""Verification of `arbcli.families.ahead.kernels.repeat_ahead`."""

from collections.abc import Iterator

import torch
from torch import Tensor

from arbcli.families.ahead.kernels.accept_ahead import MAX_AHEAD
from arbcli.families.ahead.kernels.repeat_ahead import MAX_MATCH, SPAN, repeat_ahead_
from arbcli.verify.verification import Case, Verification


def repeat_ahead_reference(
    repeated: Tensor, equal: Tensor, text: Tensor, position: Tensor
) -> tuple[Tensor, Tensor]:
    """Compute the buffers of `repeat_ahead_`, one position at a time."""
    known, limit = bytes(text[: int(position) + 1].tolist()), MAX_MATCH.value
    best, longest = len(known) - 1, 0
    for end in range(max(1, len(known) - SPAN.value), len(known)):
        length = 0
        while length < min(limit, end) and known[end - 1 - length] == known[-1 - length]:
            length += 1
        if length >= longest:
            best, longest = end, length
    followed = known[best:]
    repeats = [followed[i % len(followed)] for i in range(len(repeated))]
    return torch.tensor(repeats).to(repeated), torch.tensor(longest).to(equal)


TEXTS = (b"a", b"ab", b"aaaa", b"abcdabcdab", b"xyz_1 xyz_2 xyz_1 xyz_", b"no two alike",
         b"0123456789abcdefghi, 3456789abcdefghi; 0123456789abcdefghi")  # fmt: skip
"""The last text has two positions with more equal bytes than are compared."""


def _cases(device: torch.device, _group_size: int) -> Iterator[Case]:
    generator = torch.Generator().manual_seed(0)
    long = torch.randint(3, (2 * SPAN.value,), generator=generator)
    kinds = {text.decode(): torch.tensor([*text]) for text in TEXTS} | {"three symbols": long}
    for label, apart in (("as far", SPAN.value), ("just too far", SPAN.value + 1)):
        ends = 255 - torch.arange(30)  # other bytes increase, so at most one byte is equal
        kinds[f"a place {label}"] = torch.cat([ends, torch.arange(apart - 30) % 251, ends])
    for label, text in kinds.items():
        for size in (1, 3, 8):
            position = torch.tensor(len(text) - 1, dtype=torch.int32)
            room = torch.cat([text, torch.full((9,), 7)]).to(torch.uint8)
            repeated, equal = torch.arange(300, 300 + size), torch.tensor(-1, dtype=torch.int32)
            inputs = (part.to(device) for part in (repeated, equal, room, position))
            yield Case(f"{label}, {size} bytes", (*inputs,))


repeat_ahead_verification = Verification(
    repeat_ahead_, repeat_ahead_reference, cases=_cases, compared=("repeated", "equal"),
    sizes={"M": f"min(m + 1, {MAX_AHEAD})", "P": "n + k"},
    values={"text": (0, 2), "position": (0, "P - 1")},
)  # fmt: skip
