"""Weighted sums of rows of a packed table, y[m] = sum over j of weights[m, j] * w[ids[m, j]].

A *slot* is one (m, j). A table can have millions of rows, of which a step touches thousands, so no
tensor here has the shape of the table, and only the gradient of rows can have one row per slot.
Rows are decoded in the kernel that sums them. A thread has a few adjacent weights of one group: it
computes their byte offsets and digits once, and for each slot loads these bytes and one scale.

The gradient has only the touched rows, in a compact matrix. `touched_rows` sorts slots by row. Sums
use no atomics and their order depends only on the ids, so the gradient is bitwise deterministic.
"""

from collections.abc import Iterator

import torch
from torch import Tensor
from torch.nn.functional import embedding_bag

from arbcli.kernels.codec.decode_digits import add_remainder, decode_digits_torch, round_weight
from arbcli.kernels.codec.packed import Packed, load_scale
from arbcli.kernels.codec.packing import trit_at, trit_positions
from arbcli.kernels.rows.table_rows import TouchedRows
from arbcli.kernels.runtime.arguments import DTYPE_IS_REAL, compiled_check, declared
from arbcli.kernels.runtime.backend import chunk_elements
from arbcli.kernels.runtime.operation import Operation, tl, triton

FEW = 8
"""Maximum slots of rows that are summed in parallel, one slot at a time."""
CHUNK_ELEMENTS = 1 << 20
"""Weights that the torch backend decodes at a time."""


def _decoded_slots(ids: Tensor, packed: Packed) -> Iterator[tuple[slice, Tensor, Tensor]]:
    """Decode the rows of a few tokens at a time: (tokens, mask of valid ids, (m, k, D) rows)."""
    (num_tokens, slots), num_rows, width = ids.shape, packed.out_features, packed.in_features
    if num_rows == 0:
        return
    step = max(1, chunk_elements(CHUNK_ELEMENTS) // max(1, slots * width))
    for start in range(0, num_tokens, step):
        part = slice(start, min(start + step, num_tokens))
        inside = (ids[part] >= 0) & (ids[part] < num_rows)
        flat = ids[part].clamp(0, num_rows - 1).flatten()
        rows = decode_digits_torch(packed.rows(flat), torch.float32)
        yield part, inside, rows.view(*inside.shape, width)


def _weighted_rows_torch(
    ids: Tensor, weights: Tensor, packed: Packed, dtype: torch.dtype = torch.bfloat16
) -> Tensor:
    y = torch.zeros(len(ids), packed.in_features, device=ids.device)
    for part, inside, rows in _decoded_slots(ids, packed):
        weight = weights[part].masked_fill(~inside, 0)[..., None]
        for j in range(ids.shape[1]):
            y[part] += weight[:, j] * rows[:, j]
    return y.to(dtype)


def _weighted_rows_grad_weights_torch(grad_y: Tensor, ids: Tensor, packed: Packed) -> Tensor:
    grad = torch.zeros(ids.shape, device=ids.device)
    for part, inside, rows in _decoded_slots(ids, packed):
        rows *= grad_y[part].float()[:, None]  # pairwise summation, which rounds less
        grad[part] = rows.sum(dim=2).masked_fill_(~inside, 0)
    return grad


def _weighted_rows_grad_torch(
    grad_y: Tensor, weights: Tensor, tokens: Tensor, order: Tensor, bounds: Tensor,
    dtype: torch.dtype | None = None,
) -> Tensor:  # fmt: skip
    dtype = dtype or grad_y.dtype
    num_rows, width = len(bounds) - 1, grad_y.shape[1]
    if num_rows * width == 0:
        return torch.zeros(num_rows, width, dtype=dtype, device=grad_y.device)
    # a bag has the slots of one row, and one thread sums it in order
    order = order[: int(bounds[-1])]
    grad = embedding_bag(
        tokens[order], grad_y.to(torch.float32).contiguous(), bounds,
        mode="sum", per_sample_weights=weights[order], include_last_offset=True,
    )  # fmt: skip
    return grad.to(dtype)


@triton.jit
def _chunk_columns(D, GROUP: tl.constexpr, WIDTH: tl.constexpr, CHUNKS: tl.constexpr):
    """Compute the group of each chunk, [CHUNKS, 1, 1], and its columns, [CHUNKS, 1, WIDTH].

    A chunk is up to `WIDTH` adjacent columns of one group, padded with column D.
    """
    group_chunks: tl.constexpr = (GROUP + WIDTH - 1) // WIDTH
    chunk = (tl.program_id(1) * CHUNKS + tl.arange(0, CHUNKS))[:, None, None]
    within = chunk % group_chunks * WIDTH + tl.arange(0, WIDTH)[None, None, :]
    k = chunk // group_chunks * GROUP + within
    return chunk // group_chunks, tl.where((within < GROUP) & (k < D), k, D)


@triton.jit
def _chunk_bytes(k, D):
    """Compute the byte and the factor of each column (`trit_positions`); column D is not used."""
    offs_byte, factor = trit_positions(k, D)
    return tl.where(k < D, offs_byte, 0), factor


@triton.jit
def _load_slot(
    ids_ptr, packed_ptr, exponent_ptr, fraction_ptr, remainder_ptr,
    mask, group, k, offs_byte, factor, V, D,
    stride_pn, stride_pb, stride_en, stride_eg, stride_fn, stride_fg,
    stride_an, stride_ak, trit_unit, low_unit,
    GROUP: tl.constexpr, HAS_FRACTION: tl.constexpr, INT8: tl.constexpr,
    NIBBLE: tl.constexpr,
):  # fmt: skip
    """Load the row of one slot per token: a mask of valid ids, scales and digits.

    For a slot without a row, row 0 is loaded and discarded: unmasked loads are cheaper.
    """
    v = tl.load(ids_ptr, mask=mask, other=-1)  # [1, BLOCK_M, 1] int64
    inside = (v >= 0) & (v < V)
    v = tl.where(inside, v, 0)
    scale = load_scale(  # [CHUNKS, BLOCK_M, 1]
        exponent_ptr, fraction_ptr, v, group, group * GROUP < D,
        stride_en, stride_eg, stride_fn, stride_fg, HAS_FRACTION,
    )  # fmt: skip
    byte = tl.load(packed_ptr + v * stride_pn + offs_byte * stride_pb)
    trit, offset = trit_at(byte, factor), v * stride_an + k * stride_ak
    return (
        inside,
        scale,
        add_remainder(trit, remainder_ptr, offset, k < D, trit_unit, low_unit, INT8, NIBBLE),
    )


@triton.jit
def _weighted_rows_kernel(
    ids_ptr, weights_ptr, packed_ptr, exponent_ptr, fraction_ptr, remainder_ptr, y_ptr,
    M, V, D, slots,
    stride_im, stride_ij, stride_wm, stride_wj,
    stride_pn, stride_pb, stride_en, stride_eg, stride_fn, stride_fg,
    stride_an, stride_ak, trit_unit, low_unit,
    GROUP: tl.constexpr, HAS_FRACTION: tl.constexpr, INT8: tl.constexpr,
    NIBBLE: tl.constexpr,
    WIDTH: tl.constexpr, UNROLL: tl.constexpr, BLOCK_M: tl.constexpr, CHUNKS: tl.constexpr,
):  # fmt: skip
    offs_m = (tl.program_id(0).to(tl.int64) * BLOCK_M + tl.arange(0, BLOCK_M))[None, :, None]
    mask_m = offs_m < M
    limit = tl.where(mask_m, slots, 0)
    # a thread has a chunk of columns of one group, of one token
    group, k = _chunk_columns(D, GROUP, WIDTH, CHUNKS)
    offs_byte, factor = _chunk_bytes(k, D)
    total = tl.zeros((CHUNKS, BLOCK_M, WIDTH), dtype=tl.float32)
    for start in range(0, slots, UNROLL):
        # unrolled, so that loads of several slots are under way
        for step in tl.static_range(UNROLL):
            j = start + step
            mask_j = j < limit
            inside, scale, digits = _load_slot(
                ids_ptr + offs_m * stride_im + j * stride_ij,
                packed_ptr, exponent_ptr, fraction_ptr, remainder_ptr,
                mask_j, group, k, offs_byte, factor, V, D,
                stride_pn, stride_pb, stride_en, stride_eg, stride_fn, stride_fg,
                stride_an, stride_ak, trit_unit, low_unit, GROUP, HAS_FRACTION, INT8, NIBBLE,
            )  # fmt: skip
            weights_ptrs = weights_ptr + offs_m * stride_wm + j * stride_wj
            weight = tl.load(weights_ptrs, mask=inside, other=0)
            # a weight of all digits is rounded as in a product; the scale of a trit is a factor
            if INT8:
                total += weight * round_weight(scale * digits, INT8)
            else:
                total += (weight * scale) * digits
    y_ptrs = y_ptr + offs_m * D + k
    tl.store(y_ptrs, total.to(y_ptr.dtype.element_ty), mask=mask_m & (k < D))


@triton.jit
def _weighted_rows_grad_weights_kernel(
    grad_y_ptr, ids_ptr, packed_ptr, exponent_ptr, fraction_ptr, remainder_ptr, parts_ptr,
    M, V, D, slots,
    stride_ym, stride_yd, stride_im, stride_ij,
    stride_pn, stride_pb, stride_en, stride_eg, stride_fn, stride_fg,
    stride_an, stride_ak, trit_unit, low_unit,
    GROUP: tl.constexpr, HAS_FRACTION: tl.constexpr, INT8: tl.constexpr,
    NIBBLE: tl.constexpr,
    WIDTH: tl.constexpr, UNROLL: tl.constexpr, BLOCK_M: tl.constexpr, CHUNKS: tl.constexpr,
):  # fmt: skip
    offs_m = (tl.program_id(0).to(tl.int64) * BLOCK_M + tl.arange(0, BLOCK_M))[None, :, None]
    mask_m = offs_m < M
    limit = tl.where(mask_m, slots, 0)
    group, k = _chunk_columns(D, GROUP, WIDTH, CHUNKS)
    # the gradient of a token is loaded once for all slots
    grad_y = tl.load(  # [CHUNKS, BLOCK_M, WIDTH]
        grad_y_ptr + offs_m * stride_ym + k.to(tl.int64) * stride_yd, mask=mask_m & (k < D), other=0
    ).to(tl.float32)
    offs_byte, factor = _chunk_bytes(k, D)
    parts_ptrs = parts_ptr + (tl.program_id(1).to(tl.int64) * M + offs_m) * slots
    for start in range(0, slots, UNROLL):
        for step in tl.static_range(UNROLL):
            j = start + step
            mask_j = j < limit
            inside, scale, digits = _load_slot(
                ids_ptr + offs_m * stride_im + j * stride_ij,
                packed_ptr, exponent_ptr, fraction_ptr, remainder_ptr,
                mask_j, group, k, offs_byte, factor, V, D,
                stride_pn, stride_pb, stride_en, stride_eg, stride_fn, stride_fg,
                stride_an, stride_ak, trit_unit, low_unit, GROUP, HAS_FRACTION, INT8, NIBBLE,
            )  # fmt: skip
            if INT8:
                weight = round_weight(scale * digits, INT8)
                chunk_sums = tl.sum(grad_y * weight, axis=2, keep_dims=True)
            else:
                chunk_sums = tl.sum(grad_y * digits, axis=2, keep_dims=True) * scale
            # the chunks of this program; the launcher adds up programs
            product = tl.sum(chunk_sums, axis=0, keep_dims=True)
            tl.store(parts_ptrs + j, tl.where(inside, product, 0), mask=mask_j)


@triton.jit
def _load_products(
    grad_y_ptr, weights_ptr, tokens_ptr, order_ptr, place, mask, offs_d, D,
    stride_ym, stride_yd, stride_w, stride_t,
):  # fmt: skip
    """Load weights[s] * grad_y[tokens[s]] for a range of the sorted slots s."""
    slot = tl.load(order_ptr + place, mask=mask, other=0)
    token = tl.load(tokens_ptr + slot * stride_t, mask=mask, other=0)
    weight = tl.load(weights_ptr + slot * stride_w, mask=mask, other=0)
    y_ptrs = grad_y_ptr + token[:, None] * stride_ym + offs_d.to(tl.int64)[None, :] * stride_yd
    grad_y = tl.load(y_ptrs, mask=mask[:, None] & (offs_d < D)[None, :], other=0)
    return weight[:, None] * grad_y.to(tl.float32)


@triton.jit
def _weighted_rows_grad_kernel(
    grad_y_ptr, weights_ptr, tokens_ptr, order_ptr, bounds_ptr, grad_ptr,
    R, D,
    stride_ym, stride_yd, stride_w, stride_t,
    MOST: tl.constexpr, BLOCK_R: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    """Sum rows of up to `MOST` slots in parallel, then each longer row alone."""
    first_r = tl.program_id(0).to(tl.int64) * BLOCK_R
    offs_r = first_r + tl.arange(0, BLOCK_R)
    offs_d = tl.program_id(1) * BLOCK_D + tl.arange(0, BLOCK_D)
    mask_r = offs_r < R
    first = tl.load(bounds_ptr + offs_r, mask=mask_r, other=0)
    last = tl.load(bounds_ptr + offs_r + 1, mask=mask_r, other=0)
    # rows of few slots: one slot of each row at a time
    few = last - first <= MOST
    total = tl.zeros((BLOCK_R, BLOCK_D), dtype=tl.float32)
    for step in range(0, tl.max(tl.where(few, last - first, 0), axis=0)):
        total += _load_products(
            grad_y_ptr, weights_ptr, tokens_ptr, order_ptr, first + step,
            few & (first + step < last), offs_d, D, stride_ym, stride_yd, stride_w, stride_t,
        )  # fmt: skip
    grad_ptrs = grad_ptr + offs_r[:, None] * D + offs_d[None, :]
    mask = (mask_r & few)[:, None] & (offs_d < D)[None, :]
    tl.store(grad_ptrs, total.to(grad_ptr.dtype.element_ty), mask=mask)
    # rows of many slots, one by one: BLOCK_M slots at a time
    if tl.max(last - first, axis=0) > MOST:
        for r in range(first_r, tl.minimum(first_r + BLOCK_R, R)):
            begin = tl.load(bounds_ptr + r)
            end = tl.load(bounds_ptr + r + 1)
            if end - begin > MOST:
                many = tl.zeros((BLOCK_M, BLOCK_D), dtype=tl.float32)
                for start in range(begin, end, BLOCK_M):
                    place = start + tl.arange(0, BLOCK_M)
                    many += _load_products(
                        grad_y_ptr, weights_ptr, tokens_ptr, order_ptr, place, place < end,
                        offs_d, D, stride_ym, stride_yd, stride_w, stride_t,
                    )  # fmt: skip
                row_sum = tl.sum(many, axis=0).to(grad_ptr.dtype.element_ty)
                tl.store(grad_ptr + r * D + offs_d, row_sum, mask=offs_d < D)


def _chunking(packed: Packed) -> tuple[int, int]:
    """Choose the width of chunks of columns, and count the chunks of a row."""
    dim, group_size = packed.in_features, packed.group_size
    width = 8 if dim > 256 and group_size >= 8 else 4  # more threads for short rows
    whole, rest = divmod(dim, group_size)
    return width, whole * triton.cdiv(group_size, width) + triton.cdiv(rest, width)


def _tile(chunks: int, slots: int, threads: int, max_chunks: int, unroll: int) -> dict[str, int]:
    """Choose the tile of a program, with one chunk of one token a thread."""
    chunks = min(max_chunks, triton.next_power_of_2(chunks))
    return {
        "BLOCK_M": threads // chunks, "CHUNKS": chunks, "num_warps": threads // 32,
        "UNROLL": min(unroll, triton.next_power_of_2(slots)),
    }  # fmt: skip


def _weighted_rows_triton(
    ids: Tensor, weights: Tensor, packed: Packed, dtype: torch.dtype = torch.bfloat16
) -> Tensor:
    (num_tokens, slots), num_rows, dim = ids.shape, packed.out_features, packed.in_features
    make = torch.zeros if slots * num_rows == 0 else torch.empty
    y = make(num_tokens, dim, dtype=dtype, device=ids.device)
    if slots * num_rows * y.numel():
        width, chunks = _chunking(packed)
        tile = _tile(chunks, slots, threads=64, max_chunks=32, unroll=8)
        grid = (triton.cdiv(num_tokens, tile["BLOCK_M"]), triton.cdiv(chunks, tile["CHUNKS"]))
        _weighted_rows_kernel[grid](
            ids, weights, *packed.all_pointers, y, num_tokens, num_rows, dim, slots,
            *ids.stride(), *weights.stride(), *packed.all_strides, *packed.worths,
            **packed.all_constants, WIDTH=width, **tile,
        )  # fmt: skip
    return y


def _weighted_rows_grad_weights_triton(grad_y: Tensor, ids: Tensor, packed: Packed) -> Tensor:
    (num_tokens, slots), num_rows, dim = ids.shape, packed.out_features, packed.in_features
    if dim * num_rows * ids.numel() == 0:
        return torch.zeros(ids.shape, device=ids.device)
    width, chunks = _chunking(packed)
    tile = _tile(chunks, slots, threads=128, max_chunks=32, unroll=4)  # no sum crosses warps
    grid = (triton.cdiv(num_tokens, tile["BLOCK_M"]), triton.cdiv(chunks, tile["CHUNKS"]))
    parts = torch.empty(grid[1], num_tokens, slots, device=ids.device)
    _weighted_rows_grad_weights_kernel[grid](
        grad_y, ids, *packed.all_pointers, parts, num_tokens, num_rows, dim, slots,
        *grad_y.stride(), *ids.stride(), *packed.all_strides, *packed.worths,
        **packed.all_constants, WIDTH=width, **tile,
    )  # fmt: skip
    return parts[0] if len(parts) == 1 else parts.sum(dim=0)


def _weighted_rows_grad_triton(
    grad_y: Tensor, weights: Tensor, tokens: Tensor, order: Tensor, bounds: Tensor,
    dtype: torch.dtype | None = None,
) -> Tensor:  # fmt: skip
    num_rows, width = len(bounds) - 1, grad_y.shape[1]
    grad = torch.empty(num_rows, width, dtype=dtype or grad_y.dtype, device=grad_y.device)
    if grad.numel():
        # narrow blocks of columns give many programs even if one row has most slots
        block_r, block_d = 16, 32
        _weighted_rows_grad_kernel[(triton.cdiv(num_rows, block_r), triton.cdiv(width, block_d))](
            grad_y, weights, tokens, order, bounds, grad, num_rows, width,
            *grad_y.stride(), weights.stride(0), tokens.stride(0),
            MOST=FEW, BLOCK_R=block_r, BLOCK_M=128, BLOCK_D=block_d,
        )  # fmt: skip
    return grad


_check_ids = compiled_check("touched_rows", declared("ids: int64[S]; num_rows"))


def touched_rows(ids: Tensor, num_rows: int) -> TouchedRows:
    """Return the distinct rows of slots, and the slots grouped by row.

    Shapes depend only on the shapes of the arguments, so the host does not wait for the device.

    Args:
        ids: (S,) int64. A slot whose id is outside 0..V-1, such as -1, belongs to no row.
        num_rows: V.

    Returns:
        R = min(S, V) rows, of which `count` are touched; padding has the id V and no slots.

    Raises:
        ValueError: `ids` is not a vector of int64.
    """
    _check_ids(ids, num_rows)
    inside = (ids >= 0) & (ids < num_rows)
    keys = ids.masked_fill(~inside, num_rows)
    # half the bits are half the work of a sort
    keys = keys.to(torch.int32) if num_rows < 2**31 else keys
    keys, order = torch.sort(keys, stable=True)
    begins = keys < num_rows
    begins[1:] &= keys[1:] != keys[:-1]
    ranks = torch.cumsum(begins, dim=0)  # index of a slot's row, from 1
    places = torch.arange(1, min(len(ids), num_rows) + 2, device=ids.device)
    slots = inside.sum()
    bounds = torch.minimum(torch.searchsorted(ranks, places), slots)
    count = begins.sum()
    rows = keys[bounds[:-1].clamp(max=max(len(ids) - 1, 0))].to(torch.int64)
    rows = rows.masked_fill(places[:-1] > count, num_rows)
    return TouchedRows(rows, order, bounds, count)


def weighted_rows_grad(
    grad_y: Tensor, weights: Tensor, tokens: Tensor, touched: TouchedRows,
    dtype: torch.dtype | None = None,
) -> Tensor:  # fmt: skip
    """Compute the gradient of the table's rows in `weighted_rows`.

    Args:
        grad_y: (M, D) float32 or bfloat16, any strides.
        weights: (S,) float32: weight of each slot.
        tokens: (S,) int64 in 0..M-1: row of `grad_y` of each slot.
        touched: result of `touched_rows` for the S ids.
        dtype: bfloat16 or float32; None is that of `grad_y`.

    Returns:
        (R, D) in `dtype`: row r is the sum over its slots s of weights[s] * grad_y[tokens[s]], and
        padding is zeros; summed in float32, in a fixed order.

    Raises:
        ValueError: a dtype or a shape does not fit.
    """
    return WEIGHTED_ROWS_GRAD(grad_y, weights, tokens, touched.order, touched.bounds, dtype)


weighted_rows = Operation(
    "weighted_rows", _weighted_rows_triton, _weighted_rows_torch,
    "ids: int64[M, S]; weights: float32[M, S]; packed: packed[V, D]; dtype",
    where=(DTYPE_IS_REAL,),
)  # fmt: skip
"""Compute weighted sums of rows of a packed table.

Args:
    ids: (M, k) int64, any strides; may repeat. A slot whose id is outside 0..V-1, such as -1,
        is ignored, even if its weight is NaN.
    weights: (M, k) float32, any strides.
    packed: the table, V rows by D weights.
    dtype: bfloat16 or float32.

Returns:
    (M, D) in `dtype`, y[m] = sum over j of weights[m, j] * w[ids[m, j]], added in float32 in
    the order of j.
"""
weighted_rows_grad_weights = Operation(
    "weighted_rows_grad_weights", _weighted_rows_grad_weights_triton,
    _weighted_rows_grad_weights_torch,
    "grad_y: real[M, D]; ids: int64[M, S]; packed: packed[V, D]",
)  # fmt: skip
"""Compute the gradient of the weights of `weighted_rows`.

Args:
    grad_y: (M, D) float32 or bfloat16, any strides.
    ids: (M, k) int64, as for `weighted_rows`.
    packed: the table, V rows by D weights.

Returns:
    (M, k) float32, the product of grad_y[m] and w[ids[m, j]]; 0 where the id is outside.
"""
WEIGHTED_ROWS_GRAD = Operation(
    "weighted_rows_grad", _weighted_rows_grad_triton, _weighted_rows_grad_torch,
    "grad_y: real[M, D]; weights: float32[S]; tokens: int64[S]; order: int64[S] dense; "
    "bounds: int64[R] dense; dtype",
    where=(f"dtype is None or {DTYPE_IS_REAL}",),
)  # fmt: skip
