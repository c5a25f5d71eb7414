"""Attention of one new byte over a ring of keys, left in parts for the product that reads it.

The equation is that of `decode_attention`: y = softmax(q . k / sqrt(d)) @ v for each head, over the
slots of a ring in which the new key and value are stored first. The ring is divided into spans of
slots; part p of S has the spans p, p + S, p + 2 S and so on. For each part and head, the result has
the sum of exp(q . k / sqrt(d)) over its slots, the *total*, and the mean of its values with these
weights. So y is the mean of all parts, weighted by their totals.

A kernel that reads y combines the parts while it reads them. So no program waits for another to add
up the parts, which would take longer than reading them.

Spans of a ring in S = 3 parts, and slots of width 128 in the threads of a warp:

    slots    | span 0 | span 1 | span 2 | span 3 | span 4 | span 5 | 6, not filled
    part         0        1        2        0        1        2
    thread   0 .. 15: slot s, elements 8 t .. 8 t + 7;   16 .. 31: slot s + 1;   next warp: s + 2

Reason: the widest load is 16 bytes per thread, and 16 threads load a slot of 256 bytes at once. A
score is summed over these 16 threads by shuffles; then each of them has it for its own eight
elements of the value. Parts take spans in turn, so that they stay equal while a ring fills up.

Work. A program computes one part of a head. In each pass a warp has two slots of width 128, or four
of 64: a thread has eight elements of a slot. A program issues the loads of its first span before it
waits for the kernel that computes query, key and value. A long ring has more spans than parts, so
that the product reads few parts; then a program loads its next span while it computes with one.
"""

from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional

from arbcli.kernels.attention.decode_attention import rotated_torch
from arbcli.kernels.runtime import ptx
from arbcli.kernels.runtime.arguments import compiled_check, declared
from arbcli.kernels.runtime.backend import backend_of
from arbcli.kernels.runtime.operation import Operation, tl, triton
from arbcli.kernels.runtime.overlap import overlap_options, wait_for_last

WIDTHS = (64, 128)
"""Supported widths of heads."""
WARPS = 8
"""Number of warps per program."""
PASSES = (6, 4)
"""Passes per span, if a program has one span, or several, of which it prefetches the next."""
MAX_PARTS = 16
"""Maximum number of parts per head; each program of the next product reads all of them."""
REGISTERS = 128
"""Maximum number of registers per thread."""

_check_parts = compiled_check(
    "parts of attention",
    declared("values: bfloat16[S, V] dense; totals: float32[S, H] dense; position: int32[]; span"),
    ("H > 0 and V % H == 0",),
)


class AttentionParts(NamedTuple):
    """Attention of one byte, with S partial results per head that remain to be combined.

    The first min(S, ceil((position + 1) / span)) parts are defined. The others are uninitialised
    and must not be read.
    """

    values: Tensor
    """(S, heads * d) bfloat16: the weighted mean of each part's values."""
    totals: Tensor
    """(S, heads) float32: the sum of each part's weights."""
    position: Tensor
    """int32 scalar tensor: number of earlier bytes."""
    span: int
    """Number of slots per span."""

    def check(self) -> None:
        """Raise an error if shapes or dtypes of the parts do not match.

        Raises:
            ValueError: a dtype or a shape does not fit.
        """
        _check_parts(*self)

    def combine(self) -> Tensor:
        """Combine the parts: (heads * d,) bfloat16, computed in float32 and rounded once."""
        parts, heads = self.totals.shape
        begins = self.span * torch.arange(parts, device=self.totals.device)
        filled = (begins <= self.position)[:, None]
        totals = torch.where(filled, self.totals, 0)[..., None]  # (S, heads, 1)
        values = torch.where(filled, self.values, 0).float().view(parts, heads, -1)
        total, sums = torch.zeros_like(totals[0]), torch.zeros_like(values[0])
        for part, share in zip(values, totals, strict=True):
            total, sums = total + share, sums + part * share
        return (sums * (1 / total)).to(torch.bfloat16).flatten()


class Sharing(NamedTuple):
    """Partition of the slots of a ring into parts and spans."""

    parts: int
    """Number of parts per head."""
    passes: int
    """Number of passes per span."""
    span: int
    """Number of slots per span."""


def sharing(window: int, width: int, limit: int) -> Sharing:
    """Choose the partition that was fastest on an H200, with at most `limit` parts."""
    slots = WARPS * 256 // width  # slots per pass
    passes = PASSES[window > limit * PASSES[0] * slots]
    span = passes * slots
    return Sharing(min(-(-window // span), limit), passes, span)


def _attend_parts_torch(
    qkv: Tensor, keys: Tensor, values: Tensor, position: Tensor, cos: Tensor, sin: Tensor,
    eps: float, max_parts: int = MAX_PARTS,
) -> AttentionParts:  # fmt: skip
    window, width = keys.shape[1:]
    parts, _, span = sharing(window, width, max_parts)
    slot = (position % window).long()[None]
    q, k = rotated_torch(qkv, position, cos, sin, eps)
    keys.index_copy_(1, slot, k[:, None])
    values.index_copy_(1, slot, qkv[2][:, None])
    unseen = torch.arange(window, device=qkv.device) > position
    score = (keys.float() @ q.float()[..., None])[..., 0] * width**-0.5
    weight = score.exp().masked_fill(unseen, 0)
    seen = values.float().masked_fill(unseen[:, None], 0)
    fill, split = -window % (parts * span), (-1, parts, span)
    weight = functional.pad(weight, (0, fill)).unflatten(1, split)  # (heads, rounds, S, span)
    seen = functional.pad(seen, (0, 0, 0, fill)).unflatten(1, split)
    totals = weight.sum((1, 3))
    means = torch.einsum("hrps,hrpsd->phd", weight, seen) / totals.T[..., None]
    values_of_parts = means.to(qkv.dtype).flatten(1)
    return AttentionParts(values_of_parts, totals.T.contiguous(), position, span)


@triton.jit
def _angles(pointer, PTX: tl.constexpr):
    """Load eight float32 per thread."""
    angles = ()
    for i in tl.static_range(2):
        words = ptx.load_new(pointer + 4 * i, PTX)
        for j in tl.static_range(4):
            angles = angles + (words[j].to(tl.float32, bitcast=True),)  # noqa: RUF005
    return angles


@triton.jit
def rotate(words, cos, sin, eps, WIDTH: tl.constexpr, PTX: tl.constexpr):
    """Rotate and normalise a head's vector; a thread holds eight elements, in four words.

    `sin` has the sign of each half.
    """
    LANES: tl.constexpr = WIDTH // 8
    # mean square of the vector, over the threads that share it
    x, partner = ptx.unpair_four(words), ()
    square = x[0] * x[0]
    for i in tl.static_range(1, 8):
        square += x[i] * x[i]
    squares = ptx.sum_across((square,), 1, LANES, PTX)
    r = tl.rsqrt(squares[0] / WIDTH + eps)
    # the partner of an element is in the other half, LANES / 2 threads away
    for i in tl.static_range(4):
        partner = partner + ptx.unpair(ptx.shuffle_xor(words[i], LANES // 2, PTX))
    rotated = ()
    for i in tl.static_range(4):
        low = (x[2 * i] * cos[2 * i] + partner[2 * i] * sin[2 * i]) * r
        high = (x[2 * i + 1] * cos[2 * i + 1] + partner[2 * i + 1] * sin[2 * i + 1]) * r
        rotated = rotated + (ptx.round_pair(low, high, PTX),)  # noqa: RUF005
    return rotated


@triton.jit
def products(k, q):
    """Multiply a thread's eight elements of two vectors and sum the products."""
    score, more = k[0] * q[0], k[1] * q[1]
    for i in tl.static_range(2, 8, 2):
        score += k[i] * q[i]
        more += k[i + 1] * q[i + 1]
    return score + more


@triton.jit
def begin_sums(q, k_words, v_words, adds, scale, LANES: tl.constexpr, PTX: tl.constexpr):
    """Compute the weight of a new byte and its weighted value, in the threads that add it."""
    v, sums = ptx.unpair_four(v_words), ()
    scores = ptx.sum_across((products(ptx.unpair_four(k_words), q),), 1, LANES, PTX)
    total = tl.where(adds, tl.exp(scores[0] * scale), 0.0)
    for i in tl.static_range(8):
        sums = sums + (total * v[i],)  # noqa: RUF005
    return sums, total


@triton.jit
def load_span(
    keys_ptr, values_ptr, mine, seen, slot,
    WIDTH: tl.constexpr, STRIDE: tl.constexpr, PASSES: tl.constexpr, PTX: tl.constexpr,
):  # fmt: skip
    """Load a thread's keys and values of a span, except the slot of the new byte."""
    keys, values = (), ()
    for i in tl.static_range(PASSES):
        s = mine + STRIDE * i
        some, at = (s < seen) & (s != slot), s * (WIDTH // 2)
        keys = keys + (ptx.load_where(keys_ptr + at, some, False, PTX),)  # noqa: RUF005
        values = values + (ptx.load_where(values_ptr + at, some, False, PTX),)  # noqa: RUF005
    return keys, values


@triton.jit
def _unpaired(words, AGAIN: tl.constexpr, PTX: tl.constexpr):
    return ptx.unpair_again(words, PTX) if AGAIN else ptx.unpair_four(words)


@triton.jit
def add_span(
    sums, total, keys, values, q, mine, seen, slot, scale,
    WIDTH: tl.constexpr, STRIDE: tl.constexpr, AGAIN: tl.constexpr, PTX: tl.constexpr,
):  # fmt: skip
    """Add the weights and weighted values of a thread's slots of a span to its sums.

    With `AGAIN`, the span is kept for further queries.
    """
    # scores of all slots of the thread: products of eight elements, then sums over LANES
    scores = ()
    for i in tl.static_range(len(keys)):
        scores = scores + (products(_unpaired(keys[i], AGAIN, PTX), q),)  # noqa: RUF005
    scores = ptx.sum_across(scores, 1, WIDTH // 8, PTX)
    # weights need no maximum: queries and keys are normalised, so scores are bounded
    for i in tl.static_range(len(keys)):
        s = mine + STRIDE * i
        weight = tl.where((s < seen) & (s != slot), tl.exp(scores[i] * scale), 0.0)
        v, added = _unpaired(values[i], AGAIN, PTX), ()
        for j in tl.static_range(8):
            added = added + (sums[j] + weight * v[j],)  # noqa: RUF005
        sums = added
        total += weight
    return sums, total


@triton.jit
def rotated_angles(cos_ptr, sin_ptr, position, d, HALF: tl.constexpr, PTX: tl.constexpr):
    """Load cosines and signed sines of a position for a thread's eight elements."""
    angle = position.to(tl.int64) * HALF + d % HALF
    cos, sin = _angles(cos_ptr + angle, PTX), ()
    unsigned = _angles(sin_ptr + angle, PTX)
    for i in tl.static_range(8):
        sin = sin + (tl.where(d < HALF, -unsigned[i], unsigned[i]),)  # noqa: RUF005
    return cos, sin


@triton.jit
def _attend_parts_kernel(
    qkv_ptr, keys_ptr, values_ptr, position_ptr, cos_ptr, sin_ptr, means_ptr, totals_ptr,
    instead_ptr, W, HEADS, scale, eps,
    WIDTH: tl.constexpr, PASSES: tl.constexpr, SEVERAL: tl.constexpr,
    WARPS: tl.constexpr, PTX: tl.constexpr, OVERLAP: tl.constexpr,
):  # fmt: skip
    HALF: tl.constexpr = WIDTH // 2
    LANES: tl.constexpr = WIDTH // 8  # threads per slot
    STRIDE: tl.constexpr = 32 // LANES * WARPS
    OF_WARP: tl.constexpr = 4 * WIDTH + 16  # bytes of shared memory
    # a group of LANES threads has a slot, and a thread eight elements of its vectors
    thread = tl.arange(0, 32 * WARPS)
    warp, lane = thread // 32, thread % 32
    d = 8 * (lane % LANES)
    head, part = tl.program_id(0), tl.program_id(1)
    position = tl.load(position_ptr)
    slot, seen = position % W, tl.minimum(position + 1, W)
    SPAN: tl.constexpr = STRIDE * PASSES
    # the first span of this part; parts take spans in turns
    first = part * SPAN
    if first < seen:
        # issue the loads that do not depend on the previous kernel, then wait for it
        mine = first + thread // LANES
        at = head.to(tl.int64) * W * HALF + d // 2  # words here, of two elements
        keys_of_head, values_of_head = keys_ptr + at, values_ptr + at
        keys, values = load_span(
            keys_of_head, values_of_head, mine, seen, slot, WIDTH, STRIDE, PASSES, PTX
        )
        cos, sin = rotated_angles(cos_ptr, sin_ptr, position, d, HALF, PTX)
        memory = ptx.memory_of(instead_ptr, thread, OF_WARP * WARPS, PTX)
        adds_new = slot // SPAN % tl.num_programs(1) == part
        wait_for_last(OVERLAP, True)

        # the query of the new byte, rotated and normalised, stays in registers
        query_ptr = qkv_ptr + head * HALF + d // 2
        q_words = ptx.load_new(query_ptr, PTX)
        k_words = ptx.load_new(query_ptr + HEADS * HALF, PTX)
        v_words = ptx.load_new(query_ptr + 2 * HEADS * HALF, PTX)
        q = ptx.unpair_four(rotate(q_words, cos, sin, eps, WIDTH, PTX))
        total = tl.zeros(thread.shape, tl.float32)
        sums = (total,) * 8
        # the slot of the new byte, which is in registers
        if PTX:
            adds_new &= ptx.warp_number() == 0
        if adds_new:
            k_words = rotate(k_words, cos, sin, eps, WIDTH, PTX)
            stores = thread < LANES
            sums, total = begin_sums(q, k_words, v_words, stores, scale, LANES, PTX)
            key_ptr, value_ptr = keys_of_head + slot * HALF, values_of_head + slot * HALF
            for i in tl.static_range(4):
                tl.store(key_ptr + i, k_words[i], mask=stores)
                tl.store(value_ptr + i, v_words[i], mask=stores)
        # all other slots: load the next span while this one is added
        if SEVERAL:
            apart = SPAN * tl.num_programs(1)
            for start in range(first, seen, apart):
                span_memory = mine + (start - first)
                next_keys, next_values = load_span(
                    keys_of_head, values_of_head, span_memory + apart, seen, slot,
                    WIDTH, STRIDE, PASSES, PTX,
                )  # fmt: skip
                sums, total = add_span(
                    sums, total, keys, values, q, span_memory, seen, slot, scale,
                    WIDTH, STRIDE, False, PTX,
                )  # fmt: skip
                keys, values = next_keys, next_values
        else:
            sums, total = add_span(
                sums, total, keys, values, q, mine, seen, slot, scale, WIDTH, STRIDE, False, PTX
            )

        # add up the warps through shared memory, and store the mean of this part
        write_sums(memory + OF_WARP * warp, sums, total, d, lane, WIDTH, PTX)
        tl.debug_barrier()
        has_element = True
        if PTX:
            has_element = 32 * ptx.warp_number() < WIDTH
        if has_element:
            store_part(
                memory, means_ptr, totals_ptr, part * HEADS + head, thread % WIDTH,
                thread < WIDTH, WIDTH, WARPS, PTX,
            )  # fmt: skip


@triton.jit
def write_sums(at, sums, total, d, lane, WIDTH: tl.constexpr, PTX: tl.constexpr):
    """Write the sums and the total of a warp to shared memory: 4 * WIDTH + 16 bytes."""
    LANES: tl.constexpr = WIDTH // 8
    sums, totals = ptx.sum_across(sums, LANES, 32, PTX), ptx.sum_across((total,), LANES, 32, PTX)
    upper, four = lane // LANES % 2 == 1, ()  # threads that hold the same sums write one half each
    for i in tl.static_range(4):
        word = tl.where(upper, sums[4 + i], sums[i]).to(tl.int32, bitcast=True)
        four = four + (word,)  # noqa: RUF005
    ptx.write_four(at + 4 * d + tl.where(upper, 16, 0), four, PTX)
    ptx.write_where(at + 4 * WIDTH, totals[0], lane == 0, PTX)


@triton.jit
def store_part(
    memory, means_ptr, totals_ptr, place, offs_d, some,
    WIDTH: tl.constexpr, WARPS: tl.constexpr, PTX: tl.constexpr,
):  # fmt: skip
    """Sum the partial sums of all warps, and store the mean and the total."""
    OF_WARP: tl.constexpr = 4 * WIDTH + 16
    weighted, whole = tl.zeros(offs_d.shape, tl.float32), tl.zeros(offs_d.shape, tl.float32)
    for w in tl.static_range(WARPS):
        weighted += ptx.read_float(memory + (OF_WARP * w + 4 * offs_d), PTX)
        whole += ptx.read_float(memory + (OF_WARP * w + 4 * WIDTH), PTX)
    # the mean is rounded once; the total stays float32, to weight it
    mean = weighted / whole
    rounded = ptx.round_pair(mean, mean, PTX).to(tl.int16)
    tl.store(means_ptr + place * WIDTH + offs_d, rounded, mask=some)
    tl.store(totals_ptr + place + 0 * offs_d, whole, mask=some & (offs_d == 0))


def _attend_parts_triton(
    qkv: Tensor, keys: Tensor, values: Tensor, position: Tensor, cos: Tensor, sin: Tensor,
    eps: float, max_parts: int = MAX_PARTS,
) -> AttentionParts:  # fmt: skip
    heads, window, width = keys.shape
    parts, passes, span = sharing(window, width, max_parts)
    means = torch.empty(parts, heads * width, dtype=qkv.dtype, device=qkv.device)
    totals = torch.empty(parts, heads, dtype=torch.float32, device=qkv.device)
    aligned = (x if x.data_ptr() % 16 == 0 else x.clone() for x in (qkv, cos, sin))
    qkv, cos, sin = (x.view(torch.int32) for x in aligned)
    size = heads * parts * WARPS * (4 * width + 16)
    instead = totals if ptx.HAS_PTX else torch.empty(size, dtype=torch.uint8, device=qkv.device)
    _attend_parts_kernel[(heads, parts)](
        qkv, keys.view(torch.int32), values.view(torch.int32), position, cos, sin,
        means.view(torch.int16), totals, instead, window, heads, width**-0.5, eps,
        WIDTH=width, PASSES=passes, SEVERAL=window > parts * span, WARPS=WARPS,
        PTX=ptx.HAS_PTX, num_warps=WARPS, maxnreg=REGISTERS, **overlap_options(qkv),
    )  # fmt: skip
    return AttentionParts(means, totals, position, span)


def fits_parts(qkv: Tensor) -> bool:
    """Return whether `attend_parts` supports a byte: Triton kernels, bf16, head width 64 or 128.

    Args:
        qkv: (..., d), the byte's query, key and value.
    """
    return fits_heads(qkv) and backend_of(qkv) == "triton" and torch.version.hip is None


def fits_heads(qkv: Tensor) -> bool:
    """Return whether `attend_parts` supports the dtype and the head width d of `qkv`, (..., d)."""
    return qkv.dtype == torch.bfloat16 and qkv.shape[-1] in WIDTHS


ALIGNED = "keys.data_ptr() % 16 == 0 and values.data_ptr() % 16 == 0"
"""Condition of loads of 16 bytes from rings."""

attend_parts = Operation(
    "attend_parts", _attend_parts_triton, _attend_parts_torch,
    "qkv: bfloat16[3, H, D] dense; keys, values: bfloat16[H, W, D] dense; position: int32[]; "
    "cos, sin: float32[P, D // 2] dense; eps; max_parts",
    where=(
        f"D in {WIDTHS}", "W > 0", ALIGNED,
    ),
)  # fmt: skip
"""Store the key and value of one byte in a ring, and attend to the ring in parts.

Args:
    qkv: (3, heads, d) bfloat16, contiguous, d 64 or 128: query, key and value.
    keys: (heads, W, d) bfloat16, contiguous; slot `position` mod W is written. Keys are such as
        are stored here, normalised: exp of no score overflows. Slots that were never written
        are not read. It begins at a multiple of 16 bytes.
    values: like `keys`.
    position: int32 scalar tensor: number of bytes before this one. It is read on the device, and
        must be below P.
    cos: (P, d / 2) float32, contiguous.
    sin: like `cos`.
    eps: added to the mean square.
    max_parts: maximum number of parts per head.

Returns:
    Parts that combine to the mean of the last min(position + 1, W) values, with the weights
    softmax(q . k / sqrt(d)).
"""
