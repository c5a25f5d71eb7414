"""Verification of `arbcli.kernels.rows.weighted_rows`."""

from collections.abc import Callable, Iterator
from functools import partial

import torch
from torch import Tensor
from torch.nn.functional import embedding_bag

from arbcli.kernels.codec.decode_weight import decode_weight
from arbcli.kernels.codec.packed import Packed
from arbcli.kernels.rows.weighted_rows import (
    FEW,
    WEIGHTED_ROWS_GRAD,
    touched_rows,
    weighted_rows,
    weighted_rows_grad_weights,
)
from arbcli.kernels.runtime.arguments import normals, placed
from arbcli.verify.case_generator import CaseGenerator
from arbcli.verify.kernels.codec.decode_digits import (
    add_remainders,
    decode_digits_reference,
    decode_large,
    fix_float32,
)
from arbcli.verify.kernels.codec.packed import random_packed
from arbcli.verify.verification import Case, Gate, Timing, Verification


def weighted_rows_reference(
    ids: Tensor, weights: Tensor, packed: Packed, *, decode: Callable = decode_digits_reference
) -> Tensor:
    """Compute the reference result of `weighted_rows`, one slot at a time, in float64."""
    table, ids = _append_zero_row(decode(packed), ids)
    weights = weights.double().masked_fill(ids == packed.out_features, 0)  # even if it is NaN
    y = table.new_zeros(len(ids), packed.in_features)
    for j in range(ids.shape[1]):
        y += weights[:, j, None] * table[ids[:, j]]
    return y


def weighted_rows_grad_weights_reference(
    grad_y: Tensor, ids: Tensor, packed: Packed, *, decode: Callable = decode_digits_reference
) -> Tensor:
    """Compute `weighted_rows_grad_weights` in float64, one slot at a time."""
    table, ids = _append_zero_row(decode(packed), ids)
    grad = table.new_zeros(ids.shape)
    for j in range(ids.shape[1]):
        grad[:, j] = (grad_y.double() * table[ids[:, j]]).sum(dim=1)
    return grad


def _append_zero_row(table: Tensor, ids: Tensor) -> tuple[Tensor, Tensor]:
    """Append a row of zeros, in float64, for ids out of range."""
    inside = (ids >= 0) & (ids < len(table))
    zeros = table.new_zeros(1, table.shape[1])
    return torch.cat([table, zeros]).double(), ids.where(inside, len(table))


def weighted_rows_grad_reference(
    grad_y: Tensor, weights: Tensor, tokens: Tensor, order: Tensor, bounds: Tensor
) -> Tensor:
    """Compute the reference result of `weighted_rows_grad`, in float64."""
    sizes = bounds.diff()
    rows = torch.arange(len(sizes), device=bounds.device).repeat_interleave(sizes)
    slots = order[: len(rows)]
    grad = grad_y.new_zeros(len(sizes), grad_y.shape[1], dtype=torch.float64)
    return grad.index_add_(0, rows, weights[slots, None].double() * grad_y[tokens[slots]])


def _scale_path(group_size: int) -> tuple[bool, bool]:
    """Return whether groups are at least as wide as wide chunks, and whether chunks are padded."""
    return group_size >= 8, group_size % 4 > 0


def _slots_cases(generator: torch.Generator) -> Iterator[tuple[str, Tensor, int, int]]:
    """Draw (label, ids, number of rows, D) with awkward slots."""

    def draw(*shape: int, rows: int) -> Tensor:
        return torch.randint(0, rows, shape, generator=generator)

    yield "duplicates", draw(9, 8, rows=5), 5, 64
    yield "outside", torch.tensor([[4, -1, 0], [-1, -1, -1], [5, 2, 1 << 40], [0, -9, 4]]), 5, 33
    yield "one id", torch.full((150, 3), 2), 4, 40
    yield "one slot", torch.tensor([[1]]), 2, 1
    yield "more slots than unrolled", draw(3, 19, rows=40), 40, 165
    yield "ragged", draw(5, 2, rows=11), 11, 323
    yield "wide", draw(2, 3, rows=6), 6, 1311
    yield "strided ids", draw(6, 70, rows=9).T[::5], 9, 70
    yield "no tokens", draw(0, 3, rows=4), 4, 33
    yield "no slots", draw(4, 0, rows=4), 4, 33
    yield "empty table", torch.tensor([[0, -1, 3]]), 0, 40


def _table_cases(device: torch.device, group_size: int) -> Iterator[tuple[str, Tensor, Packed]]:
    """Draw (label, ids, table)."""
    generator = torch.Generator().manual_seed(0)
    for label, ids, rows, dim in _slots_cases(generator):
        packed = random_packed(rows, dim, group_size, generator, spread=8).to(device)
        label = f"{'x'.join(map(str, ids.shape))} of {rows}x{dim} {label}"
        yield label, placed(ids, device), packed
    packed = random_packed(14, 70, group_size, generator, spread=127).to(device)
    ids = torch.tensor([[6, 1, 6], [0, 5, 3]], device=device)
    for name, all_digits in add_remainders(packed, generator):
        yield f"2x3 of 14x70 {name}", ids, all_digits
    yield "2x3 of 14x70 whole octaves", ids, packed._replace(fraction=None)
    yield "2x3 of 7x70 strided table", ids, packed.rows(slice(None, None, 2))


def _weighted_rows_cases(device: torch.device, group_size: int) -> Iterator[Case]:
    generator = torch.Generator().manual_seed(1)
    for label, ids, packed in _table_cases(device, group_size):
        weights = torch.randn(ids.shape, generator=generator).to(device)
        inside = (ids >= 0) & (ids < packed.out_features)
        yield Case(label, (ids, weights.masked_fill_(~inside, torch.nan), packed))
    weights = torch.randn(3, 4, generator=generator).to(device).T[::2]
    yield Case("2x3 of 7x70 strided weights", (ids, weights, packed))


def _grad_weights_cases(device: torch.device, group_size: int) -> Iterator[Case]:
    generator = torch.Generator().manual_seed(2)
    for label, ids, packed in _table_cases(device, group_size):
        grad_y = torch.randn(len(ids), packed.in_features, generator=generator).to(device)
        yield Case(label, (grad_y, ids, packed))
    grad_y = torch.randn(packed.in_features, 4, generator=generator).to(device).T[::2]
    yield Case("2x3 of 7x70 strided gradient", (grad_y, ids, packed))


def _grad_cases(device: torch.device, _group_size: int) -> Iterator[Case]:
    generator = torch.Generator().manual_seed(3)
    draw = normals(generator, device)
    for label, ids, rows, dim in _slots_cases(generator):
        _, order, bounds, _ = touched_rows(ids.flatten().to(device), rows)
        tokens = torch.arange(ids.numel(), device=device) // max(1, ids.shape[1])
        weights = draw(ids.numel())
        label = f"{'x'.join(map(str, ids.shape))} to {rows}x{dim} {label}"
        yield Case(label, (draw(len(ids), dim), weights, tokens, order, bounds))
    # rows with `FEW` slots, one fewer, one more, none, and most of them
    sizes = (FEW, 1, FEW - 1, FEW + 1, 0, 300, 2)
    ids = torch.arange(len(sizes)).repeat_interleave(torch.tensor(sizes))
    ids = ids[torch.randperm(len(ids), generator=generator)].to(device)
    _, order, bounds, _ = touched_rows(ids, len(sizes))
    tokens = torch.randint(0, 20, ids.shape, generator=generator).to(device)
    yield Case("few and many", (draw(20, 35), draw(len(ids)), tokens, order, bounds))
    strided = (draw(35, 40).T[::2], draw(2 * len(ids))[::2], tokens.repeat_interleave(3)[::3])
    yield Case("few and many, strided", (*strided, order, bounds))


SHAPES = ((2048, 32, 5_000_000, 64, 76), (2048, 8, 131_072, 1024, 8))
"""(M, k, V, D, V divided by the number of touched rows)."""


def _production_slots(
    device: torch.device, group_size: int
) -> Iterator[tuple[str, Tensor, Tensor, Packed]]:
    """Draw (label, ids, weights, table), with distant rows of a large table, each used once.

    So the roofline counts the bytes that are read, not the table.
    """
    for tokens, slots, rows, dim, apart in SHAPES:
        packed = random_packed(rows, dim, group_size, torch.Generator(device), spread=8)
        packed = packed.rows(slice(None, None, apart))
        ids = torch.randperm(packed.out_features, device=device)[: tokens * slots]
        weights = torch.randn(tokens, slots, device=device)
        label = f"{tokens}x{slots} of {rows}x{dim}"
        yield label, ids.view(tokens, slots), weights, packed


def _weighted_rows_timings(device: torch.device, group_size: int) -> Iterator[Timing]:
    for label, ids, weights, packed in _production_slots(device, group_size):
        half = decode_weight(packed), weights.to(torch.bfloat16)
        peer = partial(embedding_bag, ids, half[0], mode="sum", per_sample_weights=half[1])
        inputs = (ids, weights, packed)
        yield Timing(f"{label} bf16", inputs, peer=peer)


def _grad_weights_timings(device: torch.device, group_size: int) -> Iterator[Timing]:
    for label, ids, _, packed in _production_slots(device, group_size):
        tokens, slots = ids.shape
        grad_y = torch.randn(tokens, packed.in_features, device=device, dtype=torch.bfloat16)
        # the operation that autograd calls for torch's `embedding_bag`, which has no bf16
        peer = partial(
            torch.ops.aten._embedding_bag_per_sample_weights_backward,
            grad_y.float(), decode_weight(packed, torch.float32), ids.flatten(),
            torch.arange(0, ids.numel(), slots, device=device),
            torch.arange(ids.numel(), device=device) // slots, 0,
        )  # fmt: skip
        yield Timing(f"{label} bf16", (grad_y, ids, packed), peer=peer, peer_name="torch, float32")


def _grad_timings(device: torch.device, _group_size: int) -> Iterator[Timing]:
    for tokens, slots, rows, dim, _ in SHAPES:
        size = tokens * slots
        grad_y = torch.randn(tokens, dim, device=device, dtype=torch.bfloat16)
        weights = torch.randn(size, device=device)
        slot_rows = torch.arange(size, device=device) // slots
        for kind in ("spread", "one row has half"):
            ids = torch.randint(rows, (size,), device=device)
            if kind != "spread":
                ids[::2] = 7
            touched = touched_rows(ids, rows)
            inputs = (grad_y, weights, slot_rows, touched.order, touched.bounds)
            peer = partial(
                _add_products, grad_y, weights, slot_rows, torch.searchsorted(touched.rows, ids)
            )
            label = f"{tokens}x{slots} to {rows}x{dim} bf16, {kind}"
            yield Timing(label, inputs, peer=peer)


def _add_products(grad_y: Tensor, weights: Tensor, tokens: Tensor, rows: Tensor) -> Tensor:
    products = weights[:, None] * grad_y[tokens]
    return products.new_zeros(products.shape).index_add_(0, rows, products)


def _slots(rng: CaseGenerator, m: int, n: int) -> Tensor:
    """Draw the ids of at least 64 slots, the same number of every token, some of them outside."""
    return rng.integers(-1, n, m, max(1 + rng.below(12), -(-64 // m)), dtype=torch.int64)


def _draw(rng: CaseGenerator, group_size: int, m: int, n: int, k: int) -> tuple:
    ids = _slots(rng, max(m, -(-64 // k)), n)  # few sums can cancel
    weights = rng.reals(*ids.shape, dtype=torch.float32)
    return ids, weights, rng.packed(n, k, group_size)


def _draw_grad_weights(rng: CaseGenerator, group_size: int, m: int, n: int, k: int) -> tuple:
    packed = rng.packed(n, k, group_size)
    m = max(m, 16)  # all slots can have one id, and few products can cancel
    return rng.reals(m, k), _slots(rng, m, n), packed


def _draw_grad(rng: CaseGenerator, group_size: int, m: int, n: int, k: int) -> tuple:
    ids = _slots(rng, m, n)
    tokens = torch.arange(ids.numel(), device=rng.device) // ids.shape[1]
    _, order, bounds, _ = touched_rows(ids.flatten(), n)
    weights = rng.reals(ids.numel(), dtype=torch.float32)
    return rng.reals(m, k), weights, rng.view(tokens), order, bounds


weighted_rows_verification = Verification(
    weighted_rows, weighted_rows_reference, _weighted_rows_cases,
    Gate(relative=1e-6, reason="float32 sums of up to tens of rows"),
    triton=fix_float32(weighted_rows.triton), torch=fix_float32(weighted_rows.torch),
    draw=_draw, large_reference=partial(weighted_rows_reference, decode=decode_large),
    needs_rows=True, scale_path=_scale_path, timings=_weighted_rows_timings,
    long=("150x3*", "3x19*"),
)  # fmt: skip
weighted_rows_grad_weights_verification = Verification(
    weighted_rows_grad_weights, weighted_rows_grad_weights_reference, _grad_weights_cases,
    Gate(relative=1e-6, reason="float32 sums of up to thousands of columns"),
    draw=_draw_grad_weights,
    large_reference=partial(weighted_rows_grad_weights_reference, decode=decode_large),
    needs_rows=True, scale_path=_scale_path, timings=_grad_weights_timings,
    long=("150x3*",),
)  # fmt: skip
weighted_rows_grad_verification = Verification(
    WEIGHTED_ROWS_GRAD, weighted_rows_grad_reference, _grad_cases,
    Gate(relative=1e-6, reason="float32 sums of up to thousands of slots"),
    triton=fix_float32(WEIGHTED_ROWS_GRAD.triton), torch=fix_float32(WEIGHTED_ROWS_GRAD.torch),
    draw=_draw_grad, needs_rows=True, timings=_grad_timings,
)  # fmt: skip
