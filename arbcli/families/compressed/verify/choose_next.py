"""Verification of `arbcli.families.compressed.kernels.choose_next`."""

import torch
from torch import Tensor

from arbcli.families.compressed.kernels.choose_next import SHARED, choose_next_
from arbcli.kernels.matmul.quantise_rows import E4M3
from arbcli.kernels.runtime.texts import text_by_text
from arbcli.verify.kernels.attention.rotary_norm import normalise_reference, rotate_reference
from arbcli.verify.kernels.matmul.quantise_rows import round_e4m3_reference
from arbcli.verify.verification import CaseGenerator, Gate, Verification


@text_by_text(4, *SHARED)
def choose_next_reference(
    query: Tensor, key: Tensor, keys: Tensor, choice: Tensor, position: Tensor, cos: Tensor,
    sin: Tensor, m: int, max_entries: int, eps: float,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """Compute `choice` and `keys` after `choose_next_`, in float64.

    Only the queries, and the key for their scores, are rounded to the dtype of the queries.
    """
    p, (slots, width), dtype = int(position), keys.shape, query.dtype
    is_e4m3 = keys.dtype == E4M3
    heads = len(query) // (width + 1)
    query, key, keys = (part.double() for part in (query, key, keys))

    def rotated(x: Tensor, place: int) -> Tensor:
        return rotate_reference(normalise_reference(x, eps), cos[place], sin[place])

    new = rotated(key, p // m * m)
    keys[p // m % slots] = round_e4m3_reference(new.to(dtype).double()) if is_e4m3 else new
    complete = (p + 1) // m
    choice = torch.full_like(choice, -1) if complete == 0 else choice.clone()
    if (p + 1) % m == 0:
        q, w = rotated(query[: heads * width].view(heads, width), p), query[heads * width :]
        seen = range(max(0, complete - max_entries), complete)
        q, stored = (part.to(dtype).double() for part in (q, keys))
        dots = stored[[j % slots for j in seen]] @ q.T  # (entries, h)
        scores = (dots.clamp(min=0) * w).sum(dim=1).tolist()
        best = sorted(zip(scores, seen, strict=True), reverse=True)[: len(choice)]
        choice.fill_(-1)
        for place, j in enumerate(sorted(j for _, j in best)):
            choice[place] = j
    return choice, keys


def _append_state(inputs: tuple, _result: None) -> tuple[Tensor, Tensor]:
    """Return the modified buffers."""
    _, _, keys, choice, *_ = inputs
    return choice, keys.float() if keys.dtype == E4M3 else keys


_QUARTERS = (1.0, 0.0, -1.0, 0.0), (0.0, 1.0, 0.0, -1.0)
"""Cosines and sines of multiples of 90 degrees."""


def index_of_byte(
    generator: torch.Generator, device: torch.device, dtype: torch.dtype, heads: int, width: int,
    slots: int, size: int, m: int, max_entries: int, position: int,
) -> tuple:  # fmt: skip
    """Draw inputs of `choose_next_` whose scores are often equal, and exact in every dtype.

    So the selection does not depend on rounding or on the order of sums. Queries and the new key
    contain ones, or alternate ones and fives; with an eps of 3 the norm divides these by 2 or 4.
    Rotations are by multiples of 90 degrees.
    """

    def integers(low: int, high: int, *shape: int) -> Tensor:
        return torch.randint(low, high + 1, shape, generator=generator)

    vectors = 1 - 2 * integers(0, 1, heads + 1, width)
    vectors[:, ::2] *= 1 + 4 * integers(0, 1, heads + 1, 1)
    weights, keys = integers(-3, 3, heads), integers(-3, 3, slots, width)
    query = torch.cat((vectors[1:].flatten(), weights))
    choice = torch.arange(size, dtype=torch.int32, device=device)
    quarter = integers(0, 3, position + 1, width // 2)
    cos, sin = (torch.tensor(of, device=device)[quarter.to(device)] for of in _QUARTERS)
    place = torch.tensor(position, dtype=torch.int32, device=device)
    tensors = (part.to(device, dtype) for part in (query, vectors[0], keys))
    return (*tensors, choice, place, cos, sin, m, max_entries, 3.0)


def _draw(rng: CaseGenerator, group_size: int, m: int, n: int, k: int) -> tuple:
    ratio, max_entries, size = 2 + rng.integer(4), 1 + rng.integer(60), 1 + rng.integer(9)
    heads = rng.pick((1, 3))
    query, key, keys, *rest = index_of_byte(
        rng.seeded(), rng.device, rng.dtype, heads, 2 * (1 + min(k, 19)),
        max_entries + 1, size, ratio, max_entries, rng.integer(3 * max_entries * ratio),
    )  # fmt: skip
    if rng.chance(0.2):  # all scores are equal: the last entries are selected
        query[-heads:] = 0
    keys = keys.to(E4M3) if rng.chance(0.3) else keys
    return rng.texts((query, key, keys, *rest), 4, *SHARED)


choose_next_verification = Verification(
    choose_next_, choose_next_reference, gate=Gate(
        relative=1e-6,
        reason="choices and drawn keys are exact; a square root may err in its last bit"
    ),
    compared=_append_state, draw=_draw, needs_rows=False,
)  # fmt: skip
