"""Draw cases of a kernel: random ones, and the matrices of real models.

Every drawing makes one case for a matrix of N outputs by K inputs and M rows of activations, from
dice that also decide strides, offsets, types and states. Loaded dice leave those plain.
"""

from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from arbcli.kernels.attention.append_position import APPEND_POSITION, in_eight_bits
from arbcli.kernels.attention.attend_parts import MOST_PARTS, WIDTHS
from arbcli.kernels.attention.causal_attention_backward import (
    random_attention,
    rounded_causal_gradients,
)
from arbcli.kernels.attention.choose_entries import random_index
from arbcli.kernels.attention.choose_next import index_of_byte
from arbcli.kernels.attention.compress_blocks import COMPRESS_BLOCKS, rounded_block_gradients
from arbcli.kernels.attention.compressed_attention import (
    COMPRESSED_ATTENTION,
    Sight,
    random_sight,
)
from arbcli.kernels.attention.compressed_attention_backward import (
    rounded_attention_gradients,
)
from arbcli.kernels.attention.decode_attention import DECODE_ATTENTION
from arbcli.kernels.attention.decode_attention_rows import DECODE_ATTENTION_ROWS
from arbcli.kernels.attention.decode_compressed import DECODE_COMPRESSED, attention_of_byte
from arbcli.kernels.attention.decode_latent import DECODE_LATENT
from arbcli.kernels.attention.eight_bits import FORMATS, quantise_entries
from arbcli.kernels.attention.rotary_norm import ROTARY_NORM, rounded_gradient, rounded_once
from arbcli.kernels.attention.sum_choices import random_choices
from arbcli.kernels.codec.layout import PLANE
from arbcli.kernels.codec.packed import Packed
from arbcli.kernels.dice import Dice
from arbcli.kernels.matmul.arranged import MOST_ROWS
from arbcli.kernels.matmul.coded import code
from arbcli.kernels.matmul.coded_rows import CODED_ROWS, MOST_TEXTS
from arbcli.kernels.matmul.digits_matmul import DIGITS_MATMUL, arrange_digits
from arbcli.kernels.matmul.row_matmul import MOST_COLUMNS, ROW_MATMUL
from arbcli.kernels.registry import KERNELS
from arbcli.kernels.runtime.operation import Case, Operation

TILES = (16, 32, 64, 128, 160, 256, 320)
"""Where tiles, planes and blocks of weights end."""
ROW_TILES = (8, 16, 32, 64, 128)
"""The same of rows of activations, which fused products take up to 64 of."""
REAL_ROWS = (1, 64, 2048)


def _row_matmul(dice: Dice, group_size: int, m: int, n: int, k: int) -> tuple:
    x, *rest = _rows_of_trits(dice, group_size, 1, n, min(k, MOST_COLUMNS), code)
    # whole numbers, which 15 bits hold: of a few results, what is rounded may be most
    return (8 * x).round(), *rest


def _row_by_row(dice: Dice, group_size: int, m: int, n: int, k: int) -> tuple:
    rows = 1 + (m - 1) % MOST_ROWS
    x, *rest = _rows_of_trits(dice, group_size, rows, n, min(k, MOST_COLUMNS), code)
    return (8 * x).round(), *rest


def _coded_rows(dice: Dice, group_size: int, m: int, n: int, k: int) -> tuple:
    return _rows_of_trits(dice, group_size, 1 + (m - 1) % MOST_TEXTS, n, k, code)


def _rows_of_trits(dice: Dice, group_size: int, m: int, n: int, k: int, lay_out) -> tuple:
    gated, size = dice.below(2) == 1, PLANE * max(1, group_size // PLANE)
    n, k = n + n % 2, -(-k // 8) * 8
    weight = lay_out(dice.packed(n, k, size, digits="trit"), gated)
    x = dice.reals(m, k, dtype=torch.bfloat16).contiguous()
    added = dice.reals(m, weight.out_features).contiguous() if dice.below(2) else None
    return x, *weight, dice.pick((None, 1e-6)), added, dice.dtype


def _digits_matmul(dice: Dice, group_size: int, m: int, n: int, k: int) -> tuple:
    gated, size = dice.below(2) == 1, PLANE * max(1, group_size // PLANE)
    k = -(-k // 8) * 8
    packed = dice.packed(n + n % 2, k, size, digits="all")
    if not packed.nibble:  # z is within a byte
        packed = packed._replace(remainder=(packed.remainder >> 1).clamp(min=-63))
    weight = arrange_digits(packed, gated)
    x = dice.reals(1 + (m - 1) % MOST_ROWS, k, dtype=torch.bfloat16).contiguous()
    added = dice.reals(len(x), weight.out_features).contiguous() if dice.below(2) else None
    return x, *weight, dice.pick((None, 1e-6)), added, dice.dtype


def _rotary_norm(dice: Dice, group_size: int, m: int, n: int, k: int) -> tuple:
    batch, heads, half = 1 + dice.below(3), 1 + dice.below(4), 2 + min(k, 64)
    angle = dice.reals(m, half, dtype=torch.float32)
    qkv = dice.reals(batch * m * 3 * heads, 2 * half).contiguous()
    angle = angle.contiguous()
    return qkv.view(batch, m, 3, heads, 2 * half), angle.cos(), angle.sin(), 1e-6


def _rotary_norm_backward(dice: Dice, group_size: int, m: int, n: int, k: int) -> tuple:
    qkv, cos, sin, eps = _rotary_norm(dice, group_size, m, n, k)
    r = ROTARY_NORM.torch(qkv, cos, sin, eps)[1]
    batch, length, _, heads, width = qkv.shape
    rows = [dice.reals(batch * heads * length, width) for _ in range(3)]
    grads = [grad.reshape(batch, heads, length, width) for grad in rows]
    return *grads, qkv, r, cos, sin


def _decode_attention(dice: Dice, group_size: int, m: int, n: int, k: int) -> tuple:
    heads, half, position = 1 + dice.below(4), 1 + min(k, 64), dice.below(3 * n)
    qkv = dice.reals(3 * heads, 2 * half).contiguous().view(3, heads, 2 * half)
    rings = (dice.reals(heads * n, 2 * half).contiguous() for _ in range(2))
    angle = dice.reals(position + 1, half, dtype=torch.float32).contiguous()
    tickets = torch.zeros(heads, dtype=torch.int32, device=dice.device)
    return (
        qkv, *(ring.view(heads, n, 2 * half) for ring in rings), dice.scalar(position),
        angle.cos(), angle.sin(), tickets, 1e-6,
    )  # fmt: skip


def _attend_parts(dice: Dice, group_size: int, m: int, n: int, k: int) -> tuple:
    heads, width, position = 1 + dice.below(3), WIDTHS[k % 2], dice.below(3 * n)
    qkv = dice.reals(3 * heads, width, dtype=torch.bfloat16).contiguous().view(3, heads, width)
    rings = [dice.reals(heads * n, width, dtype=torch.bfloat16).contiguous() for _ in range(2)]
    angle = dice.reals(position + 1, width // 2, dtype=torch.float32).contiguous()
    return (
        # a ring begins at a multiple of 16 bytes
        qkv, *(ring.clone().view(heads, n, width) for ring in rings), dice.scalar(position),
        angle.cos(), angle.sin(), 1e-6, dice.pick((1, 3, MOST_PARTS)),
    )  # fmt: skip


def _attend_ahead(dice: Dice, group_size: int, m: int, n: int, k: int) -> tuple:
    rows, heads, width = 2 + m % (MOST_ROWS - 1), 1 + dice.below(3), WIDTHS[k % 2]
    slots, position, half = max(n, rows), dice.below(3 * n), {"dtype": torch.bfloat16}
    qkv = dice.reals(rows * 3 * heads, width, **half).contiguous().view(rows, 3, heads, width)
    rings = [dice.reals(heads * slots, width, **half).contiguous() for _ in range(2)]
    angle = dice.reals(position + rows, width // 2, dtype=torch.float32).contiguous()
    return (
        qkv, *(ring.clone().view(heads, slots, width) for ring in rings),
        torch.zeros(2, rows, heads, width, device=dice.device, **half), dice.scalar(position),
        angle.cos(), angle.sin(), 1e-6, dice.pick((1, 3, MOST_PARTS)),
    )  # fmt: skip


def _keep_accepted(dice: Dice, group_size: int, m: int, n: int, k: int) -> tuple:
    rows, heads, width = 1 + m % MOST_ROWS, 1 + dice.below(3), 1 + k
    slots = max(n, rows)
    rings = [dice.reals(heads * slots, width).contiguous() for _ in range(2)]
    new = dice.reals(2 * rows * heads, width).contiguous().view(2, rows, heads, width)
    return (
        *(ring.view(heads, slots, width) for ring in rings), new, dice.scalar(dice.below(3 * n)),
        dice.scalar(1 + dice.below(rows)),
    )  # fmt: skip


def _decode_attention_8bit(dice: Dice, group_size: int, m: int, n: int, k: int) -> tuple:
    qkv, keys, values, *rest = _decode_attention(dice, group_size, m, n, k)
    stored = dice.pick((*FORMATS.values(),))
    values = values * torch.exp2(dice.integers(-9, 9, *values.shape[:2])[..., None].float())
    (keys, of_keys), (values, of_values) = (quantise_entries(x, stored) for x in (keys, values))
    return qkv, keys, values, torch.stack((of_keys, of_values)), *rest


def _decode_attention_rows(dice: Dice, group_size: int, m: int, n: int, k: int) -> tuple:
    texts, heads, half = 1 + m % 4, 1 + dice.below(3), 1 + min(k, 64)
    qkv = dice.reals(texts * 3 * heads, 2 * half).contiguous().view(texts, 3, heads, 2 * half)
    rings = (dice.reals(texts * heads * n, 2 * half).contiguous() for _ in range(2))
    position = dice.integers(0, 3 * n - 1, texts, dtype=torch.int32).contiguous()
    angle = dice.reals(3 * n, half, dtype=torch.float32).contiguous()
    tickets = torch.zeros(texts, heads, dtype=torch.int32, device=dice.device)
    return (
        qkv, *(ring.view(texts, heads, n, 2 * half) for ring in rings), position,
        angle.cos(), angle.sin(), tickets, 1e-6,
    )  # fmt: skip


def _compressed_attention(dice: Dice, group_size: int, m: int, n: int, k: int) -> tuple:
    ratio, length = 2 + dice.below(5), 1 + min(m, dice.pick((1, 5, 60)))
    kept, window = dice.pick((0, 3)), dice.pick((1, 4, 200))
    start = kept + dice.below(9) if kept else 0
    sight = Sight(window, ratio, dice.pick((2, 10**4)), start)
    kv, width = dice.pick((1, 2)), 2 * min(1 + k, dice.pick((1, 9, 32)))
    shape = (kv * dice.pick((1, 3, 8)), kv, width, dice.pick((0, 1, 5, 40)))
    about = torch.Generator().manual_seed(dice.below(2**31))
    x, recent, entries, *rest = random_sight(about, sight, dice.pick((1, 2)), length, kept, shape)
    vectors = (dice.view(part.to(dice.device, dice.dtype)) for part in (x, recent, entries))
    return (*vectors, *(_on(dice.device, part) for part in rest), 1e-6)


def _on(device: torch.device, value: Any) -> Any:
    return value.to(device) if isinstance(value, Tensor) else value


def _causal_attention_backward(dice: Dice, group_size: int, m: int, n: int, k: int) -> tuple:
    about = torch.Generator().manual_seed(dice.below(2**31))
    length = 2 + min(m, dice.pick((1, 40, 150)))
    shape = dice.pick((1, 2)), dice.pick((1, 3)), length, dice.pick((16, 32, 64))
    *parts, logs = random_attention(about, shape, dice.dtype)
    return *(dice.view(part.to(dice.device)) for part in parts), logs.to(dice.device)


def _compressed_attention_backward(dice: Dice, group_size: int, m: int, n: int, k: int) -> tuple:
    inputs = _compressed_attention(dice, group_size, m, n, k)
    y, logs, *_ = COMPRESSED_ATTENTION.torch(*inputs)
    return dice.reals(*y.shape), y, logs, *inputs


def _choose_entries(dice: Dice, group_size: int, m: int, n: int, k: int) -> tuple:
    entries, groups = dice.pick((0, 1, 7, 150)), 1 + min(m, dice.pick((1, 70)))
    shape = (dice.pick((1, 2)), groups, dice.pick((1, 3)), 1 + min(k, 40), entries)
    about = torch.Generator().manual_seed(dice.below(2**31))
    parts = random_index(about, *shape)
    first = dice.pick((0, 1, max(0, entries - groups)))
    views = (dice.view(part.to(dice.device, dice.dtype)) for part in parts)
    return *views, first, dice.pick((3, 10**4)), dice.pick((1, 5, 100))


def _sum_choices(dice: Dice, group_size: int, m: int, n: int, k: int) -> tuple:
    entries, number = dice.pick((1, 8, 90)), 1 + min(m, 60)
    size, batch = 1 + dice.below(entries), dice.pick((1, 2))
    about = torch.Generator().manual_seed(dice.below(2**31))
    chosen = random_choices(about, batch, number, size, entries).to(dice.device)
    return dice.reals(batch, number, size, 1 + min(k, 200)).contiguous(), chosen, entries


def _decode_latent(dice: Dice, group_size: int, m: int, n: int, k: int) -> tuple:
    heads, half, still = 1 + dice.below(3), 1 + min(k // 8, 20), dice.below(40)
    width, size, position = 2 * half + still, 1 + min(k, 300), dice.below(3 * n)
    angle = dice.reals(position + 1, half, dtype=torch.float32).contiguous()
    shapes = ((1, heads * width + size + 2 * half), (heads * (width + still), size),
              (n, size), (n, 2 * half))  # fmt: skip
    row, *others = (dice.reals(*shape).contiguous() for shape in shapes)
    others[0] *= size**-0.5  # keys about as long as queries: exp of no score overflows
    lengths = dice.reals(n, heads, dtype=torch.float32).abs().clamp(max=2).contiguous()
    return (
        row[0], *others, lengths, dice.scalar(position), angle.cos(), angle.sin(),
        width**-0.5, 1e-6,
    )  # fmt: skip


def _drawn_with(dice: Dice) -> torch.Generator:
    return torch.Generator().manual_seed(dice.below(2**31))


def _compress_blocks(dice: Dice, group_size: int, m: int, n: int, k: int) -> tuple:
    heads, half, ratio = dice.pick((1, 2)), 1 + min(k, 40), 2 + dice.below(7)
    batch, length = dice.pick((1, 2)), 1 + min(m, 60)
    x = dice.reals(batch, length, 6 * heads * half)
    beta = dice.reals(2 * heads * half, ratio, dtype=torch.float32)
    angle = dice.reals(length, half, dtype=torch.float32)
    return x, beta, angle.cos(), angle.sin(), heads, 1e-6


def _compress_blocks_backward(dice: Dice, group_size: int, m: int, n: int, k: int) -> tuple:
    inputs = _compress_blocks(dice, group_size, m, n, k)
    recent, entries, _ = COMPRESS_BLOCKS.torch(*inputs)
    return *(dice.reals(*t.shape, dtype=torch.float32) for t in (recent, entries)), *inputs


def _append_position(dice: Dice, group_size: int, m: int, n: int, k: int) -> tuple:
    kv, half, ratio = dice.pick((1, 2)), 1 + min(k, 64), 2 + dice.below(9)
    position, slots = dice.below(60), 1 + dice.below(8)
    sizes = (3, kv, 2 * half), (1 + dice.below(7), kv, 2 * half), (slots, kv, 2 * half)
    buffers = (dice.reals(*size).contiguous() for size in (*sizes, (2, ratio, kv * 2 * half)))
    angle = dice.reals(position + 1, half, dtype=torch.float32).contiguous()
    beta = dice.reals(kv * 2 * half, ratio, dtype=torch.float32).contiguous()
    return *buffers, beta, dice.scalar(position), angle.cos(), angle.sin(), 1e-6


def _append_position_8bit(dice: Dice, group_size: int, m: int, n: int, k: int) -> tuple:
    stored = dice.pick(tuple(FORMATS.values()))
    return in_eight_bits(_append_position(dice, group_size, m, n, k), stored)


def _choose_next(dice: Dice, group_size: int, m: int, n: int, k: int) -> tuple:
    ratio, most, size = 2 + dice.below(4), 1 + dice.below(60), 1 + dice.below(9)
    return index_of_byte(
        _drawn_with(dice), dice.device, dice.dtype, dice.pick((1, 3)), 2 * (1 + min(k, 19)),
        most + 1, size, ratio, most, dice.below(3 * most * ratio),
    )  # fmt: skip


def _decode_compressed(dice: Dice, group_size: int, m: int, n: int, k: int) -> tuple:
    ratio, most, kv = 2 + dice.below(4), 1 + dice.below(60), dice.pick((1, 2))
    return attention_of_byte(
        _drawn_with(dice), dice.device, dice.dtype, kv * dice.pick((1, 3, 8)), kv,
        2 * (1 + min(k, 63)), 1 + dice.below(70), most + 1, dice.pick((0, 2, 9, 40)), ratio, most,
        dice.below(2 * most * ratio),
    )  # fmt: skip


@dataclass(frozen=True, slots=True)
class Drawing:
    """How the cases of a kernel are drawn, and what large ones are compared with."""

    draw: Callable[[Dice, int, int, int, int], tuple]
    """(dice, group size, M, N, K) to the inputs of a case."""
    reference: Callable | None = None
    """For large cases; None is the torch backend, for exact kernels, or the reference itself."""
    peer: Callable | None = None
    """torch's own operation, for the gate in bf16."""
    needs_rows: bool = False
    """Whether M matters."""
    one_layout: bool = False
    """Whether its inputs are laid out as its one caller does it: contiguous, in an order of its
    own."""


DRAWINGS = {
    "row_matmul": Drawing(_row_matmul, None, ROW_MATMUL.torch, one_layout=True),
    "row_by_row": Drawing(_row_by_row, None, ROW_MATMUL.torch, needs_rows=True, one_layout=True),
    "coded_rows": Drawing(_coded_rows, None, CODED_ROWS.torch, one_layout=True),
    "digits_matmul": Drawing(_digits_matmul, None, DIGITS_MATMUL.torch, one_layout=True),
    "rotary_norm": Drawing(
        _rotary_norm, None, rounded_once, needs_rows=True, one_layout=True
    ),
    "rotary_norm_backward": Drawing(
        _rotary_norm_backward, None, rounded_gradient, needs_rows=True
    ),
    "causal_attention_backward": Drawing(
        _causal_attention_backward, None, rounded_causal_gradients, needs_rows=True
    ),
    "decode_attention": Drawing(
        _decode_attention, None, DECODE_ATTENTION.torch, one_layout=True
    ),
    "attend_parts": Drawing(_attend_parts, one_layout=True),
    "attend_ahead": Drawing(_attend_ahead, one_layout=True),
    "keep_accepted": Drawing(_keep_accepted, one_layout=True),
    "decode_attention_8bit": Drawing(_decode_attention_8bit, one_layout=True),
    "decode_attention_rows": Drawing(
        _decode_attention_rows, None, DECODE_ATTENTION_ROWS.torch, one_layout=True
    ),
    "decode_latent": Drawing(_decode_latent, None, DECODE_LATENT.torch, one_layout=True),


    "compress_blocks": Drawing(
        _compress_blocks, None, COMPRESS_BLOCKS.torch, needs_rows=True
    ),
    "compress_blocks_backward": Drawing(
        _compress_blocks_backward, None, rounded_block_gradients, needs_rows=True
    ),
    "compressed_attention": Drawing(
        _compressed_attention, None, COMPRESSED_ATTENTION.torch, needs_rows=True
    ),
    "compressed_attention_backward": Drawing(
        _compressed_attention_backward, None, rounded_attention_gradients, needs_rows=True
    ),
    "choose_entries": Drawing(_choose_entries, needs_rows=True),
    "sum_choices": Drawing(_sum_choices, needs_rows=True, one_layout=True),
    "append_position": Drawing(
        _append_position, None, APPEND_POSITION.torch, one_layout=True
    ),
    "append_position_8bit": Drawing(_append_position_8bit, one_layout=True),
    "choose_next": Drawing(_choose_next, one_layout=True),
    "decode_compressed": Drawing(
        _decode_compressed, None, DECODE_COMPRESSED.torch, one_layout=True
    ),
}  # fmt: skip


DRAWINGS |= {
    spec.name: Drawing(
        spec.drawn, spec.large_reference, spec.peer, bool(spec.needs_rows), spec.one_layout
    )
    for spec in KERNELS
    if spec.arguments or spec.draw
}


def fuzz_cases(
    name: str, device: torch.device, group_size: int, seeds: Iterable[int]
) -> Iterator[Case]:
    """Draw one random case of a kernel from each seed."""
    for seed in seeds:
        dice = Dice(seed, device)
        m, n, k = dice.near(ROW_TILES), dice.near(TILES), dice.near(TILES)
        if m * n < 64 or n * k < 64:  # so few sums can cancel to any relative error
            m, n, k = m + 64, n + 64, k + 5
        case = _case(name, f"seed {seed}: ", dice, group_size, m, n, k)
        # two rows of some matrix at a time, or about half of one
        chunk = dice.pick((None, 1, n * k // 2, m * k // 2))
        label = case.label if chunk is None else f"{case.label} by {chunk}"
        yield replace(case, label=label, chunk_elements=chunk)


@dataclass(frozen=True, slots=True)
class Drawn:
    """What random cases of a kernel really were, read off their inputs."""

    cases: int
    elements: tuple[int, int]
    """Of the largest tensor of a case: the fewest and the most."""
    dtypes: dict[str, int]
    """Cases by the type of a tensor that they have; so are the other counts."""
    group_sizes: dict[str, int]
    strided: int
    """Cases with a tensor that is not contiguous."""
    offset: int
    """Cases with a tensor that begins inside of its memory."""
    saturated: int
    """Cases with a tensor of bytes all of which are one number, and not 0."""
    in_parts: int
    """Cases that the torch backend works on in parts."""
    never: tuple[str, ...]
    """Which of these the kernel could have had, and had not."""


class Tally:
    """Counts what the random cases of a kernel are, one after another.

    Args:
        name: of the kernel.
    """

    def __init__(self, name: str) -> None:
        self.name, self.counts = name, Counter()
        self.dtypes, self.group_sizes = Counter(), Counter()
        self.elements: list[int] = []
        self.has_bytes = False

    def add(self, case: Case) -> None:
        """Count one case."""
        tensors = list(_tensors(case.inputs))
        size_of = {v.group_size for v in case.inputs if isinstance(v, Packed)}
        of_bytes = [t for t in tensors if t.dtype in (torch.int8, torch.uint8)]
        self.has_bytes |= bool(of_bytes)
        self.elements.append(max(t.numel() for t in tensors))
        self.dtypes.update({str(t.dtype).removeprefix("torch.") for t in tensors})
        self.group_sizes.update(map(str, size_of))
        self.counts["strided"] += any(not t.is_contiguous() for t in tensors)
        self.counts["offset"] += any(t.storage_offset() > 0 for t in tensors)
        self.counts["saturated"] += any(map(_is_saturated, of_bytes))
        self.counts["in_parts"] += case.chunk_elements is not None

    def drawn(self) -> Drawn:
        """Sum up."""
        possible = ["in_parts"]
        if not DRAWINGS[self.name].one_layout:
            possible += ["strided", "offset", *(["saturated"] if self.has_bytes else [])]
        return Drawn(
            cases=len(self.elements),
            elements=(min(self.elements), max(self.elements)),
            dtypes=dict(sorted(self.dtypes.items())),
            group_sizes=dict(self.group_sizes),
            **{name: self.counts[name] for name in ("strided", "offset", "saturated", "in_parts")},
            never=tuple(name.replace("_", " ") for name in possible if not self.counts[name]),
        )


def _tensors(inputs: tuple) -> Iterator[Tensor]:
    for value in inputs:
        if isinstance(value, tuple):
            yield from _tensors(value)
        elif isinstance(value, Tensor):
            yield value


def _is_saturated(values: Tensor) -> bool:
    if values.numel() < 5:
        return False
    first = values[(0,) * values.dim()]
    return bool(first != 0) and bool((values == first).all())


def real_rows(name: str) -> tuple[int, ...]:
    """List the numbers of rows that the matrices of models are met by in a kernel."""
    return REAL_ROWS if DRAWINGS[name].needs_rows else REAL_ROWS[:1]


def real_cases(
    name: str,
    device: torch.device,
    group_size: int,
    shapes: Iterable[tuple[int, int]],
    rows: int | None = None,
    turn: int | None = None,
    dice: type[Dice] = Dice,
) -> Iterator[Case]:
    """Draw a case of a kernel for every matrix (N, K) of a model, in each type it is used in.

    What a kernel is given does not always grow with a matrix: a case that is as one before, in all
    shapes, strides, types and arguments, is left out.

    Args:
        name: of the kernel.
        device: of the tensors.
        group_size: G.
        shapes: (N, K) of the matrices.
        rows: of activations, one of `real_rows`; None is each of them.
        turn: None draws all. Else each matrix has one number of rows and one type, by turns; six
            turns in succession are all.
        dice: what draws.
    """
    seen, choices = set(), real_rows(name)
    for index, (n, k) in enumerate(shapes):
        for place, m in enumerate(choices):
            its_turn = turn is None or (index + turn - place) % len(choices) == 0
            if rows not in (None, m) or not its_turn:
                continue
            for kind, dtype in enumerate((torch.bfloat16, torch.float32)):
                if turn is not None and (index // len(choices) + turn - kind) % 2:
                    continue
                case = _case(name, "", dice(0, device, dtype), group_size, m, n, k)
                form = _form(case.inputs)
                if form not in seen:
                    seen.add(form)
                    yield case
                if not any(_is_real(value) for value in case.inputs):
                    break


def _form(value: Any) -> Any:
    """Say what there is to know of inputs but the numbers in tensors."""
    if isinstance(value, Tensor):
        return value.shape, value.stride(), value.storage_offset(), value.dtype
    return tuple(map(_form, value)) if isinstance(value, tuple) else repr(value)


def real_reference(spec: Operation) -> Callable:
    """Choose what large cases are compared with, as the references take a weight at a time."""
    if DRAWINGS[spec.name].reference:
        return DRAWINGS[spec.name].reference
    return spec.torch if spec.gate.exact else spec.reference


def _case(name: str, prefix: str, dice: Dice, group_size: int, m: int, n: int, k: int) -> Case:
    drawing = DRAWINGS[name]
    inputs = drawing.draw(dice, group_size, m, n, k)
    size = f"{m}x{n}x{k}" if drawing.needs_rows else f"{n}x{k}"
    low = dice.dtype == torch.bfloat16
    label = f"{prefix}{size} bf16" if low and any(map(_is_real, inputs)) else f"{prefix}{size}"
    return Case(label, inputs, drawing.peer if low else None)


def _is_real(value: object) -> bool:
    return isinstance(value, Tensor) and value.dtype.is_floating_point
