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
from arbcli.kernels.codec.decode_digits import decode_digits_torch
from arbcli.kernels.codec.decode_e4m3 import DECODE_E4M3
from arbcli.kernels.codec.layout import PLANE
from arbcli.kernels.codec.packed import Packed, num_groups
from arbcli.kernels.codec.packing import pack_trits_torch
from arbcli.kernels.dice import Dice
from arbcli.kernels.matmul.arranged import MOST_ROWS
from arbcli.kernels.matmul.coded import code
from arbcli.kernels.matmul.coded_rows import CODED_ROWS, MOST_TEXTS
from arbcli.kernels.matmul.digits_matmul import DIGITS_MATMUL, arrange_digits
from arbcli.kernels.matmul.fp8_matmul import MULTIPLE
from arbcli.kernels.matmul.grouped_matmul import GROUPED_GRAD_W, GROUPED_MATMUL
from arbcli.kernels.matmul.quantise_rows import E4M3, QUANTISE_ROWS
from arbcli.kernels.matmul.round_nvfp4 import ROUND_NVFP4
from arbcli.kernels.matmul.row_matmul import MOST_COLUMNS, ROW_MATMUL
from arbcli.kernels.matmul.scaled_nvfp4 import ENCODE_NVFP4
from arbcli.kernels.matmul.ternary_matmul import TERNARY_MATMUL, TERNARY_MATMUL_GRAD_X
from arbcli.kernels.registry import KERNELS
from arbcli.kernels.rows.expert_combine import rounded_gradients, rounded_sum
from arbcli.kernels.rows.weighted_rows import touched_rows
from arbcli.kernels.runtime.operation import Case, Operation
from arbcli.kernels.update.blend_moment import moment_max
from arbcli.kernels.update.hadamard import block_of
from arbcli.kernels.update.newton_schulz import GRAM, GRAM_POLYNOMIAL
from arbcli.kernels.update.quantise_gradient import NONE

TILES = (16, 32, 64, 128, 160, 256, 320)
"""Where tiles, planes and blocks of weights end."""
ROW_TILES = (8, 16, 32, 64, 128)
"""The same of rows of activations, which fused products take up to 64 of."""
REAL_ROWS = (1, 64, 2048)


def _pack_trits(dice: Dice, group_size: int, m: int, n: int, k: int) -> tuple:
    return (dice.integers(-1, 1, n, k),)


def _unpack_trits(dice: Dice, group_size: int, m: int, n: int, k: int) -> tuple:
    return dice.trits(n, k), k


def _decode_weight(dice: Dice, group_size: int, m: int, n: int, k: int) -> tuple:
    return (dice.packed(n, k, group_size, spread=127),)


def _decode_digits(dice: Dice, group_size: int, m: int, n: int, k: int) -> tuple:
    return (dice.packed(n, k, group_size, spread=90, digits="all"),)


def _decode_e4m3(dice: Dice, group_size: int, m: int, n: int, k: int) -> tuple:
    return dice.packed(n, k, group_size, spread=12), dice.below(2) == 1


def _quantise_rows(dice: Dice, group_size: int, m: int, n: int, k: int) -> tuple:
    return (dice.view(dice.reals(m, k) * dice.pick((1.0, 2.0**-40, 2.0**40))),)


def _fp8_matmul(dice: Dice, group_size: int, m: int, n: int, k: int) -> tuple:
    n, k, transposed = -(-n // MULTIPLE) * MULTIPLE, -(-k // MULTIPLE) * MULTIPLE, dice.below(2)
    packed = dice.packed(n, k, group_size)
    q, scale = QUANTISE_ROWS.torch(dice.reals(m, n if transposed else k))
    return q.to(E4M3), scale, packed, transposed == 1, dice.dtype


def _nvfp4_matmul(dice: Dice, group_size: int, m: int, n: int, k: int) -> tuple:
    n, k, transposed = -(-n // MULTIPLE) * MULTIPLE, -(-k // MULTIPLE) * MULTIPLE, dice.below(2)
    packed = dice.packed(n, k, group_size)
    q, scale = ROUND_NVFP4.torch(dice.reals(m, n if transposed else k))
    return q, scale, packed, transposed == 1, dice.dtype


def _scaled_nvfp4_matmul(dice: Dice, group_size: int, m: int, n: int, k: int) -> tuple:
    sides = [ENCODE_NVFP4.torch(dice.reals(rows, k)) for rows in (m, n)]
    (a, of_a, first), (b, of_b, second) = sides
    return a, of_a, b, of_b, first * second, dice.dtype


def _ternary_matmul(dice: Dice, group_size: int, m: int, n: int, k: int) -> tuple:
    return dice.reals(m, k), dice.packed(n, k, group_size)


def _ternary_matmul_grad_x(dice: Dice, group_size: int, m: int, n: int, k: int) -> tuple:
    return dice.reals(m, n), dice.packed(n, k, group_size)


def _row_matmul(dice: Dice, group_size: int, m: int, n: int, k: int) -> tuple:
    x, *rest = _rows_of_trits(dice, group_size, 1, n, min(k, MOST_COLUMNS), code)
    # whole numbers, which 15 bits hold: of a few results, what is rounded may be most
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


def _bounds(dice: Dice, slots: int) -> Tensor:
    """Draw bounds of experts; now and then half of the rows are nobody's."""
    experts = dice.pick((1, 2, 4, 9))
    spare = slots // 4 if dice.chance(0.3) else 0
    inner = dice.integers(spare, slots - spare, experts - 1, dtype=torch.int64)
    ends = [spare, *sorted(inner.tolist()), slots - spare]
    return dice.view(torch.tensor(ends, dtype=torch.int64, device=dice.device))


def _grouped_matmul(dice: Dice, group_size: int, m: int, n: int, k: int) -> tuple:
    bounds = _bounds(dice, m)
    w = dice.reals(len(bounds) - 1, n, k)
    if dice.chance(0.3):
        w = w.mT.contiguous().mT
    return dice.reals(m, k), w, bounds, dice.reals(m, n) if dice.chance(0.5) else None


def _grouped_grad_w(dice: Dice, group_size: int, m: int, n: int, k: int) -> tuple:
    return dice.reals(m, n), dice.reals(m, k), _bounds(dice, m)


def _expert_combine(dice: Dice, group_size: int, m: int, n: int, k: int) -> tuple:
    slots, spare = dice.pick((1, 2, 3, 8)), dice.below(3)
    order = torch.randperm(m * slots + spare, generator=dice.generator, device=dice.device)
    positions = dice.view(order[: m * slots].view(m, slots))
    gates = None if dice.chance(0.2) else dice.reals(m, slots, dtype=torch.float32)
    return dice.reals(len(order), k), positions, gates


def _expert_combine_backward(dice: Dice, group_size: int, m: int, n: int, k: int) -> tuple:
    return dice.reals(m, k), *_expert_combine(dice, group_size, m, n, k)


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


def _embedding_rows(dice: Dice, group_size: int, m: int, n: int, k: int) -> tuple:
    ids = dice.integers(0, n - 1, m, dtype=torch.int64)
    return ids, *_decode_weight(dice, group_size, m, n, k)


def _embedding_grad(dice: Dice, group_size: int, m: int, n: int, k: int) -> tuple:
    return dice.reals(m, k), dice.integers(0, n - 1, m, dtype=torch.int64), n


def _slots(dice: Dice, m: int, n: int) -> Tensor:
    """Draw the ids of at least 64 slots, the same number of every token, some of them outside."""
    return dice.integers(-1, n, m, max(1 + dice.below(12), -(-64 // m)), dtype=torch.int64)


def _weighted_rows(dice: Dice, group_size: int, m: int, n: int, k: int) -> tuple:
    ids = _slots(dice, max(m, -(-64 // k)), n)  # few sums can cancel
    weights = dice.reals(*ids.shape, dtype=torch.float32)
    return ids, weights, dice.packed(n, k, group_size)


def _weighted_rows_grad_weights(dice: Dice, group_size: int, m: int, n: int, k: int) -> tuple:
    packed = dice.packed(n, k, group_size)
    m = max(m, 16)  # all slots can have one id, and few products can cancel
    return dice.reals(m, k), _slots(dice, m, n), packed


def _weighted_rows_grad(dice: Dice, group_size: int, m: int, n: int, k: int) -> tuple:
    ids = _slots(dice, m, n)
    tokens = torch.arange(ids.numel(), device=dice.device) // ids.shape[1]
    _, order, bounds, _ = touched_rows(ids.flatten(), n)
    weights = dice.reals(ids.numel(), dtype=torch.float32)
    return dice.reals(m, k), weights, dice.view(tokens), order, bounds


def _gather_rows(dice: Dice, group_size: int, m: int, n: int, k: int) -> tuple:
    dtype = dice.pick((torch.int8, torch.uint8))
    low, high = torch.iinfo(dtype).min, torch.iinfo(dtype).max
    return dice.integers(low, high, n, k, dtype=dtype), dice.integers(-1, n, m, dtype=torch.int64)


def _scatter_rows(dice: Dice, group_size: int, m: int, n: int, k: int) -> tuple:
    buffer, _ = _gather_rows(dice, group_size, m, n, k)
    rows = torch.randperm(n, generator=dice.generator, device=dice.device)[:m]
    rows = torch.where(dice.integers(0, 3, len(rows)) == 0, n, rows)  # a quarter is outside
    limits = torch.iinfo(buffer.dtype)
    values = dice.integers(limits.min, limits.max, len(rows), k, dtype=buffer.dtype)
    return buffer, dice.view(rows), values


def _gradient_statistics(dice: Dice, group_size: int, m: int, n: int, k: int) -> tuple:
    packed = dice.packed(n, k, group_size)
    return dice.reals(n, k), packed, dice.below(2) == 1, dice.chance(0.2)


def _sign_gradient(dice: Dice, group_size: int, m: int, n: int, k: int) -> tuple:
    """Draw integers, so that sums are exact and no sign is an accident of their order."""
    grad_y, x = (dice.view(dice.integers(-4, 4, m, width).to(dice.dtype)) for width in (n, k))
    return grad_y, x, dice.packed(n, k, group_size, digits="trit")


def _gradient_gains(dice: Dice, group_size: int, m: int, n: int, k: int) -> tuple:
    def digits(length: int) -> Tensor:
        if dice.chance(0.15):
            return dice.view(dice.integers(30, 30, length, 2))
        whole = dice.integers(-128 if dice.chance(0.5) else -30, 30, length, 1)
        return dice.view(torch.cat([whole, dice.integers(0, 127, length, 1)], dim=1))

    def sums(*shape: int) -> Tensor:
        return dice.reals(*shape, dtype=torch.float32).mul(8).exp().contiguous()

    slope = torch.zeros(n, num_groups(k, group_size), device=dice.device)
    parts = sums(m), sums(m + 2, n), sums(m + 5, k)
    counters = [torch.zeros((), dtype=torch.int64, device=dice.device) for _ in range(2)]
    squares = parts[0] * dice.pick((1.0, 1.0, 2.0**140))
    state = (digits(n), digits(k)) if dice.below(4) else (None, None)
    return slope, parts[0].double(), squares, *parts[1:], *state, dice.key(), dice.key(), *counters


def _gram(dice: Dice, group_size: int, m: int, n: int, k: int) -> tuple:
    stack = (1 + dice.below(3),) if dice.chance(0.3) else ()
    return (dice.reals(*stack, min(n, k), max(n, k)),)


def _gram_polynomial(dice: Dice, group_size: int, m: int, n: int, k: int) -> tuple:
    (x,) = _gram(dice, group_size, m, n, k)
    x = x.float() / max(n, k) ** 0.5
    a = x @ x.mT
    return dice.view(((a + a.mT) / 4).to(dice.dtype)), 3.4445, -4.775, 2.0315


def _gains(dice: Dice, n: int, k: int, size: float) -> tuple:
    """Draw gains of rows and of columns, of the rows only, or none."""
    rows, columns = (dice.reals(length, dtype=torch.float32).exp() for length in (n, k))
    return dice.pick(((rows * size, columns), (rows * size, None), (None, None)))


def _unit_rows(dice: Dice, group_size: int, m: int, n: int, k: int) -> tuple:
    values = dice.reals(n, k)
    if dice.chance(0.3):
        values[:: 1 + dice.below(3)] = 0
    return values, dice.scalar(1)


def _unit_gain(dice: Dice, group_size: int, m: int, n: int, k: int) -> tuple:
    return dice.reals(n, k), *_gains(dice, n, k, 1.0), dice.scalar(1)


def _step_scales(dice: Dice, group_size: int, m: int, n: int, k: int) -> tuple:
    exponent = dice.integers(-96, 31, n, k)
    slope = dice.reals(n, k, dtype=torch.float32)
    slope_gain = torch.tensor(dice.pick((2.0**8, 2.0**16, 3e19)), device=dice.device)
    control = (dice.scalar(dice.below(2**12 + 1)), dice.scalar(dice.below(20)))
    return (
        exponent, dice.integers(0, 127, n, k), slope, slope_gain, dice.key(), *control,
        dice.scalar(not dice.chance(0.1)),
    )  # fmt: skip


def _merged_steps(dice: Dice, group_size: int, m: int, n: int, k: int) -> tuple:
    shapes = [(n, k), *((1 + dice.below(n), 1 + dice.below(k)) for _ in range(dice.below(4)))]
    matrices = (_step_scales(dice, group_size, m, *shape) for shape in shapes)
    return tuple(part for inputs in matrices for part in inputs)


def _blend_moment(dice: Dice, group_size: int, m: int, n: int, k: int) -> tuple:
    nibble = dice.below(2) == 1
    largest = moment_max(nibble)
    moment = dice.integers(-largest, largest, n, k)
    if nibble:
        moment = dice.view(moment * 16 + dice.integers(0, 15, n, k))
    gains = _gains(dice, n, k, dice.pick((2.0**14, 2.0**16, 2.0**22)))
    squares = torch.tensor(dice.below(1000), device=dice.device)
    return (
        moment, dice.reals(n, k), *gains, dice.key(), dice.scalar(not dice.chance(0.1)), squares,
        dice.pick((0, 58982, 65536)), dice.below(1024), 4 + dice.below(12), nibble,
    )  # fmt: skip


def _quantise_gradient(dice: Dice, group_size: int, m: int, n: int, k: int) -> tuple:
    dtype = dice.pick((torch.int8, torch.int16, torch.int32))
    sums = torch.full((n, k), dice.below(99), dtype=dtype, device=dice.device)
    exponent, fitting = (dice.integers(-9, 1, n).contiguous() for _ in range(2))
    if dice.chance(0.2):
        exponent[:: 1 + dice.below(4)] = NONE
    low, room = None, 29  # in sums of int8
    if dtype == torch.int8 and dice.chance(0.5):
        low, room = dice.integers(0, 15, (n + 1) // 2, k).contiguous().view(torch.uint8), 450
    block = block_of(k) if dice.chance(0.9) else 1
    about = fitting, 1 + dice.below(room), block, True
    return dice.reals(n, k), exponent, dice.key(), sums, low, *about


def _sum_gradients(dice: Dice, group_size: int, m: int, n: int, k: int) -> tuple:
    number, dtype = 1 + dice.below(4), dice.pick((torch.int8, torch.int16, torch.int32))
    low = None
    if dtype == torch.int8 and dice.chance(0.5):
        halves = dice.integers(-128, 127, number, (n + 1) // 2 * k + dice.below(3))
        low = halves.contiguous().view(torch.uint8)[:, : (n + 1) // 2 * k]
        low = low.unflatten(1, ((n + 1) // 2, k))
    room = torch.zeros(number, n * k + dice.below(3), dtype=dtype, device=dice.device)
    parts = room[:, : n * k].unflatten(1, (n, k))
    parts.copy_(dice.integers(-127, 127, number, n, k))
    about = (dice.integers(-9, 9, *shape).contiguous() for shape in ((n,), (number, n)))
    return parts, low, *about, block_of(k) if dice.chance(0.9) else 1


def _weights(dice: Dice, n: int, k: int, radix: int, largest: int) -> tuple[Tensor, Tensor]:
    """Draw trits and remainders, all that z can be."""
    z = dice.integers(-radix - largest, radix + largest, n, k, dtype=torch.int32)
    trits = torch.sign(z) * (z.abs() > radix // 2)
    packed = dice.view(pack_trits_torch(trits.to(torch.int8)))
    return packed, dice.view((z - radix * trits).to(torch.int8))


def _step_by_moment(dice: Dice, group_size: int, m: int, n: int, k: int) -> tuple:
    nibble = dice.below(2) == 1
    radix, largest = (8, 7) if nibble else (32, 127)
    packed, remainder = _weights(dice, n, k, radix, largest)
    moment = None if nibble else dice.integers(-127, 127, n, k)
    if nibble:
        remainder = dice.view(dice.integers(-7, 7, n, k) * 16 + remainder % 16)
    step_size, squares, flips = (
        torch.tensor(value, device=dice.device)
        for value in (dice.below(2**36), dice.below(n * k * largest**2), dice.below(1000))
    )
    limit = dice.scalar(dice.pick((2**14, 2**19, 2**23)))
    return (
        packed, remainder, moment, dice.key(), step_size, squares, limit,
        dice.scalar(not dice.chance(0.1)), flips, radix, largest,
    )  # fmt: skip


def _last_bits(dice: Dice, group_size: int, m: int, n: int, k: int) -> tuple:
    nibble = dice.below(2) == 1
    radix = 14 if nibble else 64
    packed, remainder = _weights(dice, n, k, radix, 7 if nibble else 63)
    if nibble:
        remainder = dice.view(dice.integers(-7, 7, n, k) * 16 + remainder % 16)
    return packed, remainder, radix, nibble


def _take_last_bits(dice: Dice, group_size: int, m: int, n: int, k: int) -> tuple:
    *state, radix, nibble = _last_bits(dice, group_size, m, n, k)
    bits = dice.integers(0, 255, (n + 1) // 2, k, dtype=torch.uint8).contiguous()
    return *state, bits, radix, nibble


def _step_by_direction(dice: Dice, group_size: int, m: int, n: int, k: int) -> tuple:
    gains = _gains(dice, n, k, dice.pick((2.0**14, 2.0**16, 2.0**19)))
    limit = dice.pick((2**14, 2**19, 2**23))
    control = map(dice.scalar, (dice.below(2**12), 6 + dice.below(8), limit))
    return (
        *_weights(dice, n, k, 32, 127), dice.reals(n, k), *gains, dice.key(), *control,
        dice.scalar(not dice.chance(0.1)), torch.tensor(dice.below(1000), device=dice.device),
        32, 127,
    )  # fmt: skip


def _cast_trit_votes(dice: Dice, group_size: int, m: int, n: int, k: int) -> tuple:
    votes = dice.integers(-127, 127, n, k) if dice.chance(0.2) else dice.integers(-2, 2, n, k)
    grad = torch.relu(dice.reals(n, k)) - torch.relu(dice.reals(n, k))  # a quarter is 0
    scalars = dice.scalar(not dice.chance(0.1)), dice.scalar(dice.pick((1, 3, 7, 127)))
    held = dice.integers(0, 1, n, k).bool() if dice.chance(0.3) else None
    return dice.trits(n, k), votes, dice.view(grad), *scalars, held


def _cast_scale_votes(dice: Dice, group_size: int, m: int, n: int, k: int) -> tuple:
    slope = dice.reals(n, k, dtype=torch.float32)
    votes = dice.integers(-3, 3, n, k)
    return dice.integers(-96, 31, n, k), votes, slope, dice.scalar(not dice.chance(0.1))


def _in_float64(packed: Packed) -> Tensor:
    return decode_digits_torch(packed, torch.float32).double()


def _matmul_in_float64(x, packed):
    return x.double() @ _in_float64(packed).T


def _grad_x_in_float64(grad_y, packed):
    return grad_y.double() @ _in_float64(packed)


def _gradient_statistics_in_float64(grad, packed, factored, signs):
    grad = grad.double()
    products = (grad.sign() if signs else grad) * _in_float64(packed)
    groups = torch.arange(packed.in_features, device=grad.device) // packed.group_size
    slope = products.new_zeros(packed.exponent.shape).index_add_(1, groups, products)
    squares = grad.square()
    of_both = (squares.sum(dim) * factored for dim in (1, 0))
    return slope, slope.square().sum(), squares.sum(), *of_both


def _nvfp4_matmul_in_float64(q, scale, packed, transposed, dtype):
    weight = decode_digits_torch(packed, torch.float32)
    weight, weight_scale = ROUND_NVFP4.torch(weight.T if transposed else weight)
    return q.double() @ weight.double().T * (scale.double() * weight_scale.double())


def _fp8_matmul_in_float64(q, scale, packed, transposed, dtype):
    weight, weight_scale = DECODE_E4M3.torch(packed, transposed)
    return (q.double() * scale) @ (weight.double() * weight_scale.T).T


def _embedding_grad_in_float64(grad_y, ids, num_embeddings):
    zeros = grad_y.new_zeros(num_embeddings, grad_y.shape[1], dtype=torch.float64)
    return zeros.index_add_(0, ids, grad_y.double())


def _expert_combine_in_float64(values, positions, gates):
    gates = torch.ones_like(positions) if gates is None else gates
    return torch.einsum("mj,mjd->md", gates.double(), values.double()[positions])


def _expert_combine_backward_in_float64(grad_y, values, positions, gates):
    gates = torch.ones_like(positions) if gates is None else gates
    grad = gates.double()[..., None] * grad_y.double()[:, None]
    grad_values = torch.zeros_like(values, dtype=torch.float64).index_put_((positions,), grad)
    return grad_values, torch.einsum("md,mjd->mj", grad_y.double(), values.double()[positions])


def _weighted_rows_in_float64(ids, weights, packed):
    rows, weights, num_rows = _padded(packed), weights.double(), packed.out_features
    ids = ids.where((ids >= 0) & (ids < num_rows), num_rows)
    return sum(weights[:, j, None] * rows[ids[:, j]] for j in range(ids.shape[1]))


def _grad_weights_in_float64(grad_y, ids, packed):
    rows, grad_y, num_rows = _padded(packed), grad_y.double(), packed.out_features
    ids = ids.where((ids >= 0) & (ids < num_rows), num_rows)
    return torch.stack([(grad_y * rows[slot]).sum(dim=1) for slot in ids.unbind(1)], dim=1)


def _padded(packed: Packed) -> Tensor:
    """Decode a table and append a row of zeros, in float64."""
    table = _in_float64(packed)
    return torch.cat([table, table.new_zeros(1, table.shape[1])])


def _weighted_rows_grad_in_float64(grad_y, weights, tokens, order, bounds):
    sizes = bounds.diff()
    rows = torch.arange(len(sizes), device=bounds.device).repeat_interleave(sizes)
    slots = order[: len(rows)]
    grad = grad_y.new_zeros(len(sizes), grad_y.shape[1], dtype=torch.float64)
    return grad.index_add_(0, rows, weights[slots, None].double() * grad_y[tokens[slots]])


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
    "pack_trits": Drawing(_pack_trits),
    "unpack_trits": Drawing(_unpack_trits),
    "decode_weight": Drawing(_decode_weight),
    "decode_digits": Drawing(_decode_digits),
    "decode_e4m3": Drawing(_decode_e4m3),
    "quantise_rows": Drawing(_quantise_rows, needs_rows=True),
    "round_nvfp4": Drawing(_quantise_rows, None, ROUND_NVFP4.torch, needs_rows=True),
    "nvfp4_matmul": Drawing(_nvfp4_matmul, _nvfp4_matmul_in_float64, needs_rows=True),
    "encode_nvfp4": Drawing(_quantise_rows, None, ENCODE_NVFP4.torch, needs_rows=True),
    "scaled_nvfp4_matmul": Drawing(_scaled_nvfp4_matmul, needs_rows=True, one_layout=True),
    "fp8_matmul": Drawing(_fp8_matmul, _fp8_matmul_in_float64, needs_rows=True),
    "ternary_matmul": Drawing(
        _ternary_matmul, _matmul_in_float64, TERNARY_MATMUL.torch, needs_rows=True
    ),
    "ternary_matmul_grad_x": Drawing(
        _ternary_matmul_grad_x, _grad_x_in_float64, TERNARY_MATMUL_GRAD_X.torch, needs_rows=True
    ),
    "row_matmul": Drawing(_row_matmul, None, ROW_MATMUL.torch, one_layout=True),
    "coded_rows": Drawing(_coded_rows, None, CODED_ROWS.torch, one_layout=True),
    "digits_matmul": Drawing(_digits_matmul, None, DIGITS_MATMUL.torch, one_layout=True),
    "grouped_matmul": Drawing(_grouped_matmul, None, GROUPED_MATMUL.torch, needs_rows=True),
    "grouped_grad_w": Drawing(_grouped_grad_w, None, GROUPED_GRAD_W.torch, needs_rows=True),
    "expert_combine": Drawing(
        _expert_combine, _expert_combine_in_float64, rounded_sum, needs_rows=True
    ),
    "expert_combine_backward": Drawing(
        _expert_combine_backward, _expert_combine_backward_in_float64, rounded_gradients,
        needs_rows=True,
    ),
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
    "embedding_rows": Drawing(_embedding_rows, needs_rows=True),
    "embedding_grad": Drawing(_embedding_grad, _embedding_grad_in_float64, needs_rows=True),
    "weighted_rows": Drawing(_weighted_rows, _weighted_rows_in_float64, needs_rows=True),
    "weighted_rows_grad_weights": Drawing(
        _weighted_rows_grad_weights, _grad_weights_in_float64, needs_rows=True
    ),
    "weighted_rows_grad": Drawing(
        _weighted_rows_grad, _weighted_rows_grad_in_float64, needs_rows=True
    ),
    "gather_rows": Drawing(_gather_rows, needs_rows=True),
    "scatter_rows": Drawing(_scatter_rows, needs_rows=True),
    "gradient_statistics": Drawing(_gradient_statistics, _gradient_statistics_in_float64),
    "sign_gradient": Drawing(_sign_gradient, needs_rows=True),
    "gradient_gains": Drawing(_gradient_gains),
    "unit_gain": Drawing(_unit_gain),
    "unit_rows": Drawing(_unit_rows),
    "gram": Drawing(_gram, None, GRAM.torch),
    "gram_polynomial": Drawing(_gram_polynomial, None, GRAM_POLYNOMIAL.torch),
    "step_scales": Drawing(_step_scales),
    "merged_steps": Drawing(_merged_steps),
    "blend_moment": Drawing(_blend_moment),
    "step_by_moment": Drawing(_step_by_moment),
    "step_by_direction": Drawing(_step_by_direction),
    "cast_trit_votes": Drawing(_cast_trit_votes),
    "cast_scale_votes": Drawing(_cast_scale_votes),
    "quantise_gradient": Drawing(_quantise_gradient),
    "sum_gradients": Drawing(_sum_gradients),
    "last_bits": Drawing(_last_bits),
    "take_last_bits": Drawing(_take_last_bits),
}  # fmt: skip


DRAWINGS |= {
    spec.name: Drawing(
        spec.drawn, spec.large_reference, spec.peer, bool(spec.needs_rows), spec.one_layout
    )
    for spec in KERNELS
    if spec.arguments
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
    wanted: Callable[[str], bool] = lambda label: True,
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
        wanted: is told the label of a case, but for its type, and whether it is to be drawn.
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
                if not wanted(_size(name, m, n, k)):
                    break
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
    size = _size(name, m, n, k)
    low = dice.dtype == torch.bfloat16
    label = f"{prefix}{size} bf16" if low and any(map(_is_real, inputs)) else f"{prefix}{size}"
    return Case(label, inputs, drawing.peer if low else None)


def _size(name: str, m: int, n: int, k: int) -> str:
    return f"{m}x{n}x{k}" if DRAWINGS[name].needs_rows else f"{n}x{k}"


def _is_real(value: object) -> bool:
    return isinstance(value, Tensor) and value.dtype.is_floating_point
