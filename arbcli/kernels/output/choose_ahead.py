"""Choose several bytes of a text at once, and accept those whose proposals they equal.

A check reads the last byte of a text and M - 1 proposals after it, and so has the logits of M
bytes. Each is chosen as `choose_byte` chooses it, by the random numbers of its position. The first
one is a byte of the text whatever was proposed; and each following one is, as long as the bytes
before it equal their proposals. So what is accepted is what would be chosen one by one.
"""

from collections.abc import Iterator

import torch
from torch import Tensor

from arbcli.kernels.output.choose_byte import (
    CHOICES,
    MAX_SYMBOLS,
    choose_byte_reference,
    choose_byte_torch,
    choose_symbol,
)
from arbcli.kernels.runtime._triton import tl, triton
from arbcli.kernels.runtime.arguments import INT32, INT64, UINT8, Array, Number
from arbcli.kernels.runtime.inputs import TensorOptions
from arbcli.kernels.runtime.operation import EXACT, Case, Operation
from arbcli.kernels.runtime.overlap import overlap_options, wait_for_last

MOST_AHEAD = 8
"""Bytes at a time."""


def choose_ahead_reference(
    chosen: Tensor,
    text: Tensor,
    logits: Tensor,
    position: Tensor,
    key: Tensor,
    temperature: float,
    top_k: int,
    top_p: float,
) -> tuple[Tensor, Tensor]:
    """Compute what `choose_ahead_` must leave in `chosen` and `text`: one byte after another."""
    found = []
    for row, of_row in enumerate(logits):
        place = torch.tensor(int(position) + 1 + row)
        byte, text = choose_byte_reference(
            chosen[:1], text, of_row, place, key, temperature, top_k, top_p
        )
        found.append(byte)
    return torch.cat(found), text


def _choose_ahead_torch(
    chosen: Tensor, text: Tensor, logits: Tensor, position: Tensor, key: Tensor,
    temperature: float, top_k: int, top_p: float,
) -> None:  # fmt: skip
    for row, of_row in enumerate(logits):
        byte, place = chosen[row : row + 1], position + (1 + row)
        choose_byte_torch(byte, text, of_row, place, key, temperature, top_k, top_p)


@triton.jit
def _choose_ahead_kernel(
    chosen_ptr, text_ptr, logits_ptr, position_ptr, key_ptr,
    temperature, top_k, top_p, V,
    DRAWN: tl.constexpr, SOME: tl.constexpr, BLOCK_V: tl.constexpr, BLOCK_J: tl.constexpr,
    OVERLAP: tl.constexpr,
):  # fmt: skip
    wait_for_last(OVERLAP)
    row = tl.program_id(0)
    place = tl.load(position_ptr) + (1 + row)
    choice = choose_symbol(
        logits_ptr + row * V, place, tl.load(key_ptr), temperature, top_k, top_p, V,
        DRAWN, SOME, BLOCK_V, BLOCK_J,
    )  # fmt: skip
    tl.store(chosen_ptr + row, choice.to(tl.int64))
    tl.store(text_ptr + place, choice.to(tl.uint8))


def _choose_ahead_triton(
    chosen: Tensor, text: Tensor, logits: Tensor, position: Tensor, key: Tensor,
    temperature: float, top_k: int, top_p: float,
) -> None:  # fmt: skip
    rows, symbols = logits.shape
    _choose_ahead_kernel[(rows,)](
        chosen, text, logits, position, key, float(temperature), top_k, float(top_p), symbols,
        DRAWN=temperature > 0, SOME=top_k < symbols or top_p < 1,
        BLOCK_V=triton.next_power_of_2(symbols), BLOCK_J=32, num_warps=8,
        **overlap_options(logits),
    )  # fmt: skip


def accept_ahead_reference(
    ids: Tensor,
    chosen: Tensor,
    rows: Tensor,
    last: Tensor,
    position: Tensor,
    places: Tensor,
    accepted: Tensor,
) -> tuple[Tensor, ...]:
    """Compute what `accept_ahead_` must leave, in Python's integers."""
    proposed, found, count = ids.tolist(), chosen.tolist(), 1
    while count < len(found) and proposed[count] == found[count - 1]:
        count += 1
    ids = ids.clone()
    ids[0] = found[count - 1]
    first = int(position)
    after = torch.tensor([first + count + k for k in range(len(found))]).to(places)
    kept = torch.tensor([first, count]).to(accepted)
    return ids, rows[count - 1].clone(), after[0], after, kept


def _accept_ahead_torch(
    ids: Tensor, chosen: Tensor, rows: Tensor, last: Tensor, position: Tensor, places: Tensor,
    accepted: Tensor,
) -> None:  # fmt: skip
    equal = (ids[1:] == chosen[:-1]).long().cumprod(0)
    count = 1 + equal.sum()[None]
    accepted.copy_(torch.cat([position[None], count.to(torch.int32)]))
    ids[:1].copy_(chosen.gather(0, count - 1))
    last.copy_(rows.index_select(0, count - 1)[0])
    position += count[0].to(torch.int32)
    places.copy_(position + torch.arange(len(places), device=places.device))


@triton.jit
def _accept_ahead_kernel(
    ids_ptr, chosen_ptr, rows_ptr, last_ptr, position_ptr, places_ptr, accepted_ptr, M, D,
    BLOCK: tl.constexpr, OVERLAP: tl.constexpr,
):  # fmt: skip
    wait_for_last(OVERLAP)
    row = tl.arange(0, 8)
    chosen = tl.load(chosen_ptr + row, mask=row < M, other=0)
    proposed = tl.load(ids_ptr + row + 1, mask=row < M - 1, other=-1)
    count = tl.min(tl.where(chosen == proposed, 8, row + 1), axis=0)
    byte = tl.sum(tl.where(row == count - 1, chosen, 0), axis=0)
    first = tl.load(position_ptr)
    tl.debug_barrier()  # all have read what is written now
    tl.store(ids_ptr, byte)
    tl.store(position_ptr, first + count)
    tl.store(places_ptr + row, first + count + row, mask=row < M)
    tl.store(accepted_ptr, first)
    tl.store(accepted_ptr + 1, count)
    for start in range(0, D, BLOCK):
        d = start + tl.arange(0, BLOCK)
        x = tl.load(rows_ptr + ((count - 1) * D + d), mask=d < D, other=0)
        tl.store(last_ptr + d, x, mask=d < D)


def _accept_ahead_triton(
    ids: Tensor, chosen: Tensor, rows: Tensor, last: Tensor, position: Tensor, places: Tensor,
    accepted: Tensor,
) -> None:  # fmt: skip
    _accept_ahead_kernel[(1,)](
        ids, chosen, rows, last, position, places, accepted, len(chosen), rows.shape[1],
        BLOCK=1024, num_warps=4, **overlap_options(rows),
    )  # fmt: skip


def _choices(device: torch.device, _group_size: int) -> Iterator[Case]:
    generator = torch.Generator().manual_seed(0)
    random = 3 * torch.randn(8, 256, generator=generator)
    kinds = {"8 rows": random, "2 rows of 33 symbols": random[:2, :33].contiguous(),
             "some equal": random[:5].round()}  # fmt: skip
    if device.type == "cuda":  # the interpreter computes wrongly in bf16
        kinds["bf16"] = random[:3].bfloat16()
    place: TensorOptions = {"dtype": torch.int32, "device": device}
    for number, (kind, logits) in enumerate(kinds.items()):
        for choice in CHOICES:
            chosen, text = torch.full((len(logits),), 300), torch.arange(12, dtype=torch.uint8)
            position, key = torch.tensor(number, **place), torch.tensor(-(7**number), **place)
            tensors = (part.to(device) for part in (chosen, text, logits))
            yield Case(f"{kind}, {choice}", (*tensors, position, key, *choice))


def _acceptances(device: torch.device, _group_size: int) -> Iterator[Case]:
    generator = torch.Generator().manual_seed(0)
    for size, wrong, width in (
        (2, 1, 5),
        (2, 9, 5),
        (5, 3, 64),
        (8, 9, 1100),
        (8, 1, 1),
        (1, 9, 3),
    ):
        chosen = torch.randint(256, (size,), generator=generator)
        ids = torch.cat([torch.tensor([7]), chosen[:-1]])
        if wrong < size:
            ids[wrong] = (ids[wrong] + 1) % 256
        inputs = (
            ids, chosen, torch.randn(size, width, generator=generator), torch.zeros(width),
            torch.tensor(40, dtype=torch.int32), torch.zeros(size, dtype=torch.int32),
            torch.zeros(2, dtype=torch.int32),
        )  # fmt: skip
        label = f"{size} rows of {width}, {wrong if wrong < size else 'none'} is another"
        yield Case(label, tuple(part.to(device) for part in inputs))


choose_ahead_ = Operation(
    "choose_ahead", _choose_ahead_triton, _choose_ahead_torch, choose_ahead_reference, _choices,
    EXACT,
    {
        "chosen": Array("M", INT64, dense=True, values=(0, 255)),
        "text": Array("P", UINT8, dense=True),
        "logits": Array("M, V", dense=True, values=lambda dice, *shape: 4 * dice.reals(*shape)),
        "position": Array("", INT32, values=(0, "P - M - 1")),
        "key": Array("", INT32),
        "temperature": Number((0.0, 0.5, 1.0, 2.0)),
        "top_k": Number(("1", "(V + 1) // 2", "V")),
        "top_p": Number((1.0, 0.9, 0.3)),
    },
    where=(f"1 <= M <= {MOST_AHEAD}", f"1 <= V <= {MAX_SYMBOLS}"),
    sizes={"M": f"min(m + 1, {MOST_AHEAD})", "V": f"min(k + 1, {MAX_SYMBOLS})", "P": "n + 10"},
    compared=("chosen", "text"),
)  # fmt: skip
"""Choose the bytes of a text after the one at `position`, each by its logits, in place.

Args:
    chosen: (M,) int64, set to the bytes, 1 to 8 of them.
    text: (P,) uint8, contiguous; elements `position` + 1 to `position` + M are set to them.
    logits: (M, V) float32 or bfloat16, contiguous, V at most 256; finite, or -inf.
    position: int32 scalar tensor, at most P - M - 1. It is read on the device.
    key: int32 scalar tensor, of the random stream.
    temperature: as of `choose_byte_`, like those that follow.
    top_k: likewise.
    top_p: likewise.
"""
accept_ahead_ = Operation(
    "accept_ahead", _accept_ahead_triton, _accept_ahead_torch, accept_ahead_reference,
    _acceptances, EXACT,
    {
        "ids": Array("M", INT64, dense=True, values=(0, 1)),
        "chosen": Array("M", INT64, dense=True, values=(0, 1)),
        "rows": Array("M, D", dense=True),
        "last": Array("D", dense=True),
        "position": Array("", INT32, values=(0, 1000)),
        "places": Array("M", INT32, dense=True),
        "accepted": Array("2", INT32, dense=True),
    },
    where=(f"1 <= M <= {MOST_AHEAD}",),
    sizes={"M": f"min(m + 1, {MOST_AHEAD})", "D": "k + 1"},
    compared=("ids", "last", "position", "places", "accepted"),
)  # fmt: skip
"""Accept the bytes that equal their proposals, and the first that does not, in place.

Args:
    ids: (M,) int64, the byte that was read first and the proposals after it; the first one is
        set to the last byte that is accepted.
    chosen: (M,) int64, what follows each of them.
    rows: (M, D), what the model has of each, any dtype.
    last: (D,), set to the row of the byte before that.
    position: int32 scalar, that of the first of `ids`; set to that of the next one.
    places: (M,) int32, set to the positions from the next one on.
    accepted: (2,) int32, set to `position` as it was, and to how many bytes were accepted,
        which is also how many of `ids` stay in the text.

All are contiguous. They are read and written on the device.
"""
