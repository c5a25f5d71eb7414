"""Attention of several new bytes of a text that may be taken back: nothing is stored in the ring.

Each byte attends to what is in the ring, to the bytes before it of these, and to itself, with the
bits that it has when they come one by one: where a byte before it would have been stored, its key
and value take the place of what is in the slot. So bytes after it, which would overwrite the
oldest ones of a full ring, do not. Keys, rotated and normalised, and values are returned; how many
of them stay is said later, and `keep_accepted_` stores those.
"""

from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor

from arbcli.kernels.attention.attend_parts import (
    MOST_PARTS,
    WIDTHS,
    AttentionParts,
    PartsOfRows,
    attend_parts,
    attend_parts_reference,
    attend_rows_triton,
)
from arbcli.kernels.attention.decode_attention import PLACE, decode_attention
from arbcli.kernels.dice import Dice
from arbcli.kernels.runtime._triton import tl, triton
from arbcli.kernels.runtime.arguments import BF16, INT32, Arguments, Array, Number, compiled_check
from arbcli.kernels.runtime.backend import uses_triton
from arbcli.kernels.runtime.inputs import TensorOptions
from arbcli.kernels.runtime.operation import EXACT, Case, Operation
from arbcli.kernels.runtime.overlap import overlap_options, wait_for_last

MOST_AHEAD = 8
"""Bytes at a time."""


def slots_of(position: Tensor, rows: int, window: int) -> Tensor:
    """Find the slots of positions from an int32 scalar on: (M,) int64."""
    return ((position + torch.arange(rows, device=position.device)) % window).long()


def _in_turn(
    attend: Callable[[Tensor, Tensor], AttentionParts | Tensor],
    qkv: Tensor,
    keys: Tensor,
    values: Tensor,
    new: Tensor,
    position: Tensor,
) -> list:
    """Attend from one position after another, and take back what they store.

    Args:
        attend: from (3, heads, d) and a position; it stores them in the rings.
        qkv: (M, 3, heads, d).
        keys: the ring, (heads, W, d).
        values: likewise.
        new: (2, M, heads, d), set to the keys and values that it stored.
        position: int32 scalar.

    Returns:
        What `attend` gives for each.
    """
    slots = slots_of(position, len(qkv), keys.shape[1])
    before = keys[:, slots], values[:, slots]
    found = [attend(row, position + number) for number, row in enumerate(qkv.unbind())]
    for ring, old, stored in zip((keys, values), before, new, strict=True):
        stored.copy_(ring[:, slots].transpose(0, 1))
        ring.index_copy_(1, slots, old)
    return found


def attend_ahead_reference(
    qkv: Tensor,
    keys: Tensor,
    values: Tensor,
    new: Tensor,
    position: Tensor,
    cos: Tensor,
    sin: Tensor,
    eps: float,
    most: int = MOST_PARTS,
) -> tuple[Tensor, ...]:
    """Compute the values and totals of `attend_ahead`, and new keys and values: float64."""
    averages, totals, stored = [], [], []
    for row, of_row in enumerate(qkv):
        at = int(position) + row
        place = torch.tensor(at)
        rings = keys, values
        average, total, keys, values = attend_parts_reference(
            of_row, *rings, place, cos, sin, eps, most
        )
        averages.append(average)
        totals.append(total)
        slot = at % keys.shape[1]
        stored.append(torch.stack([keys[:, slot], values[:, slot]]))
    return torch.stack(averages), torch.stack(totals), torch.stack(stored, dim=1)


def _attend_ahead_torch(
    qkv: Tensor, keys: Tensor, values: Tensor, new: Tensor, position: Tensor, cos: Tensor,
    sin: Tensor, eps: float, most: int = MOST_PARTS,
) -> PartsOfRows:  # fmt: skip
    def attend(row: Tensor, place: Tensor) -> AttentionParts:
        return attend_parts(row, keys, values, place, cos, sin, eps, most)

    found = _in_turn(attend, qkv, keys, values, new, position)
    values_of_rows, totals = (
        torch.stack([getattr(part, name) for part in found]) for name in ("values", "totals")
    )
    return PartsOfRows(values_of_rows, totals, position, found[0].span)


def _attend_ahead_triton(
    qkv: Tensor, keys: Tensor, values: Tensor, new: Tensor, position: Tensor, cos: Tensor,
    sin: Tensor, eps: float, most: int = MOST_PARTS,
) -> PartsOfRows:  # fmt: skip
    return attend_rows_triton(qkv, keys, values, position, cos, sin, eps, new, most)


def attend_ahead(
    qkv: Tensor,
    keys: Tensor,
    values: Tensor,
    new: Tensor,
    position: Tensor,
    cos: Tensor,
    sin: Tensor,
    eps: float,
    most: int = MOST_PARTS,
) -> PartsOfRows:
    """Attend from several new bytes, in parts.

    Args:
        qkv: (M, 3, heads, d) bfloat16, contiguous, of 2 to 8 bytes, d 64 or 128.
        keys: (heads, W, d) bfloat16, of at least M slots, as of `attend_parts`; not changed.
        values: like `keys`.
        new: (2, M, heads, d), set to the keys as they are to be stored, and the values.
        position: int32 scalar tensor: how many bytes came before the first one.
        cos: (P, d / 2) float32, contiguous.
        sin: like `cos`.
        eps: added to the mean square.
        most: parts of a head at most.

    Returns:
        Parts of each byte, with the bits of `attend_parts`.

    Raises:
        ValueError: a dtype or a shape does not fit.
    """
    return ATTEND_AHEAD(qkv, keys, values, new, position, cos, sin, eps, most)


def attend_in_turn(
    qkv: Tensor,
    keys: Tensor,
    values: Tensor,
    new: Tensor,
    position: Tensor,
    cos: Tensor,
    sin: Tensor,
    semaphores: Tensor,
    eps: float,
    alone: bool = False,
) -> Tensor:
    """Do the same by `decode_attention`, of one byte after another.

    Args:
        qkv: (M, 3, heads, d) float32 or bfloat16, contiguous.
        keys: as of `decode_attention`, of at least M slots; it is what it was afterwards.
        values: like `keys`.
        new: (2, M, heads, d), set to the keys as they are to be stored, and the values.
        position: int32 scalar tensor: how many bytes came before the first one.
        cos: as of `decode_attention`, like those that follow.
        sin: likewise.
        semaphores: likewise.
        eps: likewise.
        alone: likewise.

    Returns:
        (M, heads, d).
    """
    _check_turn(qkv, keys, values, new, position, cos, sin)

    def attend(row: Tensor, place: Tensor) -> Tensor:
        return decode_attention(row, keys, values, place, cos, sin, semaphores, eps, alone)

    return torch.stack(_in_turn(attend, qkv, keys, values, new, position))


_BYTES = "M, 3, H, D", "H, W, D", "H, W, D", "2, M, H, D"
_NAMES = "qkv", "keys", "values", "new"
_FIT = (f"1 <= M <= {MOST_AHEAD}", "M <= W", "D % 2 == 0")
_PLACE: Arguments = {**PLACE, "position": Array("", INT32)}
_check_turn = compiled_check(
    "attend_in_turn",
    {
        **{name: Array(of, dense=True) for name, of in zip(_NAMES, _BYTES, strict=True)},
        **_PLACE,
    },
    _FIT,
)


class Kept(NamedTuple):
    """Rings of one attention, and what may be stored in them."""

    keys: Tensor
    """(heads, W, d)."""
    values: Tensor
    new: Tensor
    """(2, M, heads, d)."""


def keep_accepted_reference(
    keys: Tensor, values: Tensor, new: Tensor, position: Tensor, accepted: Tensor
) -> tuple[Tensor, Tensor]:
    """Compute what `keep_accepted_` must leave in one pair of rings: one vector after another."""
    keys, values = keys.clone(), values.clone()
    for row in range(int(accepted)):
        for head in range(len(keys)):
            slot = (int(position) + row) % keys.shape[1]
            keys[head, slot], values[head, slot] = new[0, row, head], new[1, row, head]
    return keys, values


def _keep_accepted_torch(rings: list[Kept], position: Tensor, accepted: Tensor) -> None:
    for keys, values, new in rings:
        rows = new.shape[1]
        slots = slots_of(position, rows, keys.shape[1])
        stays = (torch.arange(rows, device=new.device) < accepted)[:, None]
        for ring, of_ring in zip((keys, values), new, strict=True):
            old = ring[:, slots]
            ring.index_copy_(1, slots, torch.where(stays, of_ring.transpose(0, 1), old))


@triton.jit
def _keep_accepted_kernel(
    addresses_ptr, sizes_ptr, position_ptr, accepted_ptr, M,
    WORD: tl.constexpr, BLOCK: tl.constexpr, OVERLAP: tl.constexpr,
):  # fmt: skip
    ring, row = tl.program_id(0), tl.program_id(1)
    to = tl.load(addresses_ptr + 2 * ring).to(tl.pointer_type(WORD))
    source = tl.load(addresses_ptr + 2 * ring + 1).to(tl.pointer_type(WORD))
    heads, window = tl.load(sizes_ptr + 3 * ring), tl.load(sizes_ptr + 3 * ring + 1)
    width = tl.load(sizes_ptr + 3 * ring + 2)
    wait_for_last(OVERLAP)
    if row < tl.load(accepted_ptr):
        slot = (tl.load(position_ptr) + row) % window
        for start in range(0, heads * width, BLOCK):
            at = start + tl.arange(0, BLOCK)
            some, head = at < heads * width, at // width
            vector = tl.load(source + (row * heads * width + at), mask=some, other=0)
            target = (head.to(tl.int64) * window + slot) * width + at % width
            tl.store(to + target, vector, mask=some)


class Table(NamedTuple):
    """Where rings are, for one launch that stores in all of them."""

    rings: list[Kept]
    """Tensors that the addresses belong to, which must not move."""
    addresses: Tensor
    """(2 R, 2) int64, of each ring and of its new vectors."""
    sizes: Tensor
    """(2 R, 3) int32: heads, slots and width of each."""


def table_of(rings: list[Kept]) -> Table:
    """Make the table of some rings; all have as many new vectors, of one dtype."""
    addresses: list[tuple[int, int]] = []
    sizes: list[tuple[int, ...]] = []
    for keys, values, new in rings:
        for ring, of_ring in zip((keys, values), new, strict=True):
            addresses.append((ring.data_ptr(), of_ring.data_ptr()))
            sizes.append(tuple(ring.shape))
    device = rings[0].keys.device
    return Table(
        rings,
        torch.tensor(addresses, dtype=torch.int64, device=device),
        torch.tensor(sizes, dtype=torch.int32, device=device),
    )


def _keep_accepted_triton(table: Table, position: Tensor, accepted: Tensor) -> None:
    new = table.rings[0].new
    rows, word = new.shape[1], tl.int16 if new.element_size() == 2 else tl.int32
    _keep_accepted_kernel[(len(table.addresses), rows)](
        table.addresses, table.sizes, position, accepted, rows,
        WORD=word, BLOCK=1024, num_warps=4, **overlap_options(new),
    )  # fmt: skip


def keep_accepted_(table: Table, position: Tensor, accepted: Tensor) -> None:
    """Store the keys and values of positions that stay in their rings, in place.

    Args:
        table: of the rings, and their new vectors.
        position: int32 scalar tensor, that of the first new vector.
        accepted: int32 scalar tensor: how many of them stay.

    Raises:
        ValueError: a dtype or a shape does not fit.
    """
    for rings in table.rings:
        KEEP_ACCEPTED.check(*rings, position, accepted)
    if uses_triton(table.addresses):
        _keep_accepted_triton(table, position, accepted)
    else:
        _keep_accepted_torch(table.rings, position, accepted)


SHAPES = ((3, 2, 7, 64, 0, 16), (4, 1, 40, 128, 30, 16), (8, 1, 100, 128, 95, 16),
          (2, 2, 200, 64, 450, 16), (5, 1, 5, 128, 7, 1), (3, 2, 300, 64, 598, 1))  # fmt: skip
"""(M, heads, W, d, position, most parts)."""
LARGE = ((4, 16, 2048, 128, 2046, 16), (8, 16, 2048, 128, 5000, 16), (4, 12, 1024, 64, 100, 16))


def _cases(device: torch.device, _group_size: int) -> Iterator[Case]:
    generator = torch.Generator().manual_seed(0)
    for rows, heads, window, width, position, most in (
        *SHAPES, *(LARGE if device.type == "cuda" else ()),
    ):  # fmt: skip
        sizes = (rows, 3, heads, width), (heads, window, width), (heads, window, width)
        parts = [torch.randn(size, generator=generator).bfloat16().to(device) for size in sizes]
        angle = 7 * torch.randn(position + rows, width // 2, generator=generator).to(device)
        at = torch.tensor(position, dtype=torch.int32, device=device)
        parts.append(torch.zeros(2, rows, heads, width, dtype=torch.bfloat16, device=device))
        label = f"{rows} rows of {heads}x{window}x{width} at {position} in {most} or fewer"
        yield Case(label, (*parts, at, angle.cos(), angle.sin(), 0.1, most))


def _without_gaps(run: Callable) -> Callable:
    """Wrap an implementation so that parts that nobody writes are 0."""

    def without_gaps(
        qkv: Tensor, keys: Tensor, values: Tensor, new: Tensor, position: Tensor, *others: Any
    ) -> tuple[Tensor, ...]:
        before = keys.clone(), values.clone()
        found = run(qkv, keys, values, new, position, *others)
        begins = found.span * torch.arange(found.totals.shape[1], device=qkv.device)
        rows = torch.arange(len(qkv), device=qkv.device)[:, None]
        used = (begins <= position + rows)[..., None]
        sums, totals = (torch.where(used, part, 0) for part in found[:2])
        same = [torch.equal(*pair) for pair in zip(before, (keys, values), strict=True)]
        if not all(same):
            raise ValueError("a ring was changed")
        return sums, totals, new

    return without_gaps


def _draw_ahead(dice: Dice, group_size: int, m: int, n: int, k: int) -> tuple:
    rows, heads, width = 2 + m % (MOST_AHEAD - 1), 1 + dice.below(3), WIDTHS[k % 2]
    slots, position, half = max(n, rows), dice.below(3 * n), torch.bfloat16
    qkv = dice.reals(rows * 3 * heads, width, dtype=half).contiguous().view(rows, 3, heads, width)
    rings = [dice.reals(heads * slots, width, dtype=half).contiguous() for _ in range(2)]
    angle = dice.reals(position + rows, width // 2, dtype=torch.float32).contiguous()
    return (
        qkv, *(ring.clone().view(heads, slots, width) for ring in rings),
        torch.zeros(2, rows, heads, width, device=dice.device, dtype=half), dice.scalar(position),
        angle.cos(), angle.sin(), 0.1, dice.pick((1, 3, MOST_PARTS)),
    )  # fmt: skip


ATTEND_AHEAD = Operation(
    "attend_ahead", _without_gaps(_attend_ahead_triton), _without_gaps(_attend_ahead_torch),
    attend_ahead_reference, _cases, attend_parts.gate,
    {
        **{name: Array(of, BF16, dense=True) for name, of in zip(_NAMES, _BYTES, strict=True)},
        **_PLACE, "eps": Number(()), "most": Number(()),
    },
    where=(*_FIT, "M > 1", f"D in {WIDTHS}"),
    launch=(_attend_ahead_triton, _attend_ahead_torch, _attend_ahead_torch), draw=_draw_ahead,
    needs_rows=False,
)  # fmt: skip


def _kept_cases(device: torch.device, _group_size: int) -> Iterator[Case]:
    generator = torch.Generator().manual_seed(0)
    for heads, window, width, position in ((2, 5, 6, 0), (3, 9, 64, 7), (1, 40, 1100, 79)):
        for accepted in (1, 3, 4):
            sizes = (heads, window, width), (heads, window, width), (2, 4, heads, width)
            parts = [torch.randn(size, generator=generator).to(device) for size in sizes]
            place: TensorOptions = {"dtype": torch.int32, "device": device}
            at, count = torch.tensor(position, **place), torch.tensor(accepted, **place)
            yield Case(f"{accepted} of 4 in {heads}x{window}x{width}", (*parts, at, count))


def _in_one_pair(run: Callable[[Table, Tensor, Tensor], None]) -> Callable:
    """Wrap an implementation so that it takes one pair of rings, and returns them."""

    def in_one_pair(
        keys: Tensor, values: Tensor, new: Tensor, position: Tensor, accepted: Tensor
    ) -> tuple[Tensor, Tensor]:
        run(table_of([Kept(keys, values, new)]), position, accepted)
        return keys, values

    return in_one_pair


def _draw_kept(dice: Dice, group_size: int, m: int, n: int, k: int) -> tuple:
    rows, heads, width = 1 + m % MOST_AHEAD, 1 + dice.below(3), 1 + k
    slots = max(n, rows)
    rings = [dice.reals(heads * slots, width).contiguous() for _ in range(2)]
    new = dice.reals(2 * rows * heads, width).contiguous().view(2, rows, heads, width)
    return (
        *(ring.view(heads, slots, width) for ring in rings), new, dice.scalar(dice.below(3 * n)),
        dice.scalar(1 + dice.below(rows)),
    )  # fmt: skip


_RING, _COUNT = Array("H, W, D", dense=True), Array("", INT32)

KEEP_ACCEPTED = Operation(
    "keep_accepted", _in_one_pair(_keep_accepted_triton),
    _in_one_pair(lambda table, *given: _keep_accepted_torch(table.rings, *given)),
    keep_accepted_reference, _kept_cases, EXACT,
    {
        "keys": _RING, "values": _RING, "new": Array("2, M, H, D", dense=True),
        "position": _COUNT, "accepted": _COUNT,
    },
    draw=_draw_kept, needs_rows=False,
)  # fmt: skip
