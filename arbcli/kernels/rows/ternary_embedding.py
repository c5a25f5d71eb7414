"""Embedding with a packed table: y[m] = w[ids[m]], and its gradient by id, g[v] += gy[m].

Only the requested rows are decoded. The tokens of an id are summed without atomics, in an order
that depends only on the ids, so the gradient is bitwise deterministic.
"""

import torch
from torch import Tensor
from torch.nn.functional import embedding, embedding_bag

from arbcli.kernels.codec.decode_digits import (
    add_remainder,
    decode_digits,
    native_arguments,
    round_weight,
)
from arbcli.kernels.codec.decode_weight import decode_weight_triton
from arbcli.kernels.codec.layout import PLANE
from arbcli.kernels.codec.packed import Packed, load_scale
from arbcli.kernels.codec.packing import byte_tiles, digit_of, plane_offsets
from arbcli.kernels.runtime import native
from arbcli.kernels.runtime.arguments import DTYPE_IS_REAL
from arbcli.kernels.runtime.operation import Operation, tl, triton
from arbcli.kernels.runtime.overlap import overlap_options, wait_for_last

MAX_DECODED = 4096
"""Maximum rows of a table that is decoded as a whole, if it has fewer rows than lookups."""
MAX_COUNTED = 1024
"""Maximum rows of a table for which each row scans all ids; larger tables use a sort."""


def decodes_whole(ids: Tensor, packed: Packed) -> bool:
    """Return whether the whole table is decoded for (M,) ids, each row once."""
    return packed.out_features < len(ids) and packed.out_features <= MAX_DECODED


def _embedding_rows_torch(
    ids: Tensor, packed: Packed, dtype: torch.dtype = torch.bfloat16
) -> Tensor:
    if decodes_whole(ids, packed):
        return embedding(ids, decode_digits(packed, dtype))
    return decode_digits(packed.rows(ids), dtype)


def embedding_rows_native(
    ids: Tensor, packed: Packed, dtype: torch.dtype = torch.bfloat16
) -> Tensor:
    """Compute `embedding_rows` with the native loop."""
    y = torch.empty(len(ids), packed.in_features, dtype=dtype, device=ids.device)
    outside = native.call(
        "look_up", *native_arguments(packed), ids, ids.stride(0), packed.out_features, y,
        dtype == torch.bfloat16, len(ids), native.threads_for(y.numel()),
    )  # fmt: skip
    if outside:
        raise IndexError(f"{outside} of {len(ids)} ids are outside of 0..{packed.out_features - 1}")
    return y


def _embedding_grad_torch(grad_y: Tensor, ids: Tensor, num_embeddings: int) -> Tensor:
    # a bag has the tokens of one id, and one thread sums it in order
    order, bounds = _segments(ids, num_embeddings)
    rows = grad_y.to(torch.float32).contiguous()
    return embedding_bag(order, rows, bounds, mode="sum", include_last_offset=True)


def _segments(ids: Tensor, num_embeddings: int) -> tuple[Tensor, Tensor]:
    """Group tokens by id: tokens of id v are order[bounds[v] : bounds[v + 1]], ascending."""
    sorted_ids, order = torch.sort(ids, stable=True)
    every_id = torch.arange(num_embeddings + 1, device=ids.device)
    return order, torch.searchsorted(sorted_ids, every_id)


@triton.jit
def _embedding_rows_kernel(
    ids_ptr, packed_ptr, exponent_ptr, fraction_ptr, remainder_ptr, y_ptr,
    M, V, K, row_bytes,
    stride_im, stride_pn, stride_pb, stride_en, stride_eg, stride_fn, stride_fg,
    stride_an, stride_ak, trit_unit, low_unit,
    GROUP: tl.constexpr, HAS_FRACTION: tl.constexpr, INT8: tl.constexpr,
    NIBBLE: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_B: tl.constexpr, OVERLAP: tl.constexpr,
):  # fmt: skip
    offs_m = (tl.program_id(0).to(tl.int64) * BLOCK_M + tl.arange(0, BLOCK_M))[:, None]
    offs_b = tl.program_id(1) * BLOCK_B + tl.arange(0, BLOCK_B)
    mask_m = offs_m < M
    wait_for_last(OVERLAP)
    offs_n = tl.load(ids_ptr + offs_m * stride_im, mask=mask_m, other=0)  # [BLOCK_M, 1] int64
    inside = (offs_n >= 0) & (offs_n < V)
    byte = tl.load(  # [BLOCK_M, BLOCK_B] uint8
        packed_ptr + offs_n * stride_pn + offs_b[None, :] * stride_pb,
        mask=inside & (offs_b < row_bytes)[None, :], other=0,
    )  # fmt: skip
    for digit in tl.static_range(5):
        k = plane_offsets(offs_b, K, digit)[None, :]
        scale = load_scale(
            exponent_ptr, fraction_ptr, offs_n, k // GROUP, inside & (k < K),
            stride_en, stride_eg, stride_fn, stride_fg, HAS_FRACTION,
        )  # fmt: skip
        trit = digit_of(byte, digit).to(tl.float32)
        offset, some = offs_n * stride_an + k * stride_ak, inside & (k < K)
        digits = add_remainder(trit, remainder_ptr, offset, some, trit_unit, low_unit, INT8, NIBBLE)
        weight = tl.where(inside, round_weight(digits * scale, INT8), float("nan"))
        y_ptrs = y_ptr + offs_m * K + k
        tl.store(y_ptrs, weight.to(y_ptr.dtype.element_ty), mask=mask_m & (k < K))


@triton.jit
def _table_rows_kernel(
    ids_ptr, table_ptr, y_ptr, M, V, K, stride_im, BLOCK_M: tl.constexpr, BLOCK_K: tl.constexpr
):
    """Copy rows of a decoded table."""
    offs_m = (tl.program_id(0).to(tl.int64) * BLOCK_M + tl.arange(0, BLOCK_M))[:, None]
    k = (tl.program_id(1) * BLOCK_K + tl.arange(0, BLOCK_K))[None, :]
    n = tl.load(ids_ptr + offs_m * stride_im, mask=offs_m < M, other=0)
    inside, mask = (n >= 0) & (n < V), (offs_m < M) & (k < K)
    row = tl.load(table_ptr + n * K + k, mask=mask & inside, other=0)
    y = tl.where(inside, row.to(tl.float32), float("nan"))
    tl.store(y_ptr + offs_m * K + k, y.to(y_ptr.dtype.element_ty), mask=mask)


@triton.jit
def _segments_kernel(ids_ptr, order_ptr, bounds_ptr, M, V, stride_im, BLOCK: tl.constexpr):
    """Compute the first index of an id's tokens, and store its tokens from there on, in order."""
    v = tl.program_id(0)
    before = tl.zeros((BLOCK,), dtype=tl.int32)
    for start in range(0, M, BLOCK):
        m = start + tl.arange(0, BLOCK)
        ids = tl.load(ids_ptr + m.to(tl.int64) * stride_im, mask=m < M, other=V)
        before += (ids < v).to(tl.int32)
    begin = tl.sum(before)
    tl.store(bounds_ptr + v, begin.to(tl.int64))
    if v < V:
        for start in range(0, M, BLOCK):
            m = start + tl.arange(0, BLOCK)
            ids = tl.load(ids_ptr + m.to(tl.int64) * stride_im, mask=m < M, other=V)
            here = (ids == v).to(tl.int32)
            slot = begin + tl.cumsum(here, axis=0) - 1
            tl.store(order_ptr + slot, m.to(tl.int64), mask=here > 0)
            begin += tl.sum(here)


@triton.jit
def _embedding_grad_kernel(
    grad_y_ptr, order_ptr, bounds_ptr, grad_ptr,
    D,
    stride_ym, stride_yd,
    BLOCK_M: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    v = tl.program_id(0).to(tl.int64)
    offs_d = tl.program_id(1) * BLOCK_D + tl.arange(0, BLOCK_D)
    mask_d = offs_d < D
    first = tl.load(bounds_ptr + v)
    last = tl.load(bounds_ptr + v + 1)
    total = tl.zeros((BLOCK_M, BLOCK_D), dtype=tl.float32)
    for start in range(first, last, BLOCK_M):
        offs_m = start + tl.arange(0, BLOCK_M)
        mask_m = offs_m < last
        token = tl.load(order_ptr + offs_m, mask=mask_m, other=0)  # [BLOCK_M] int64
        y_ptrs = grad_y_ptr + token[:, None] * stride_ym + offs_d.to(tl.int64)[None, :] * stride_yd
        total += tl.load(y_ptrs, mask=mask_m[:, None] & mask_d[None, :], other=0).to(tl.float32)
    tl.store(grad_ptr + v * D + offs_d, tl.sum(total, axis=0), mask=mask_d)


def _embedding_rows_triton(
    ids: Tensor, packed: Packed, dtype: torch.dtype = torch.bfloat16
) -> Tensor:
    y = torch.empty(len(ids), packed.in_features, dtype=dtype, device=ids.device)
    if decodes_whole(ids, packed):
        grid = (triton.cdiv(len(ids), 8), triton.cdiv(packed.in_features, 256))
        _table_rows_kernel[grid](
            ids, decode_weight_triton(packed, dtype), y, len(ids), packed.out_features,
            packed.in_features, ids.stride(0),
            BLOCK_M=8, BLOCK_K=256,
        )  # fmt: skip
    elif y.numel():
        rows, num_bytes = packed.trits.shape
        # decoding one position has few rows, and is bound by load latency
        tile = triton.next_power_of_2(len(ids)) if len(ids) <= 8 else 32
        _embedding_rows_kernel[byte_tiles(len(ids), num_bytes, tile)](
            ids, *packed.all_pointers, y, len(ids), rows, packed.in_features, num_bytes,
            ids.stride(0), *packed.all_strides, *packed.worths,
            **packed.all_constants, BLOCK_M=tile, BLOCK_B=PLANE, num_warps=min(tile, 4),
            **overlap_options(ids),
        )  # fmt: skip
    return y


def _embedding_grad_triton(grad_y: Tensor, ids: Tensor, num_embeddings: int) -> Tensor:
    width = grad_y.shape[1]
    grad = torch.empty(num_embeddings, width, dtype=torch.float32, device=grad_y.device)
    if grad.numel():
        order, bounds = _segments_triton(ids, num_embeddings)
        # narrow blocks of columns give many programs even if one id has most tokens
        _embedding_grad_kernel[(num_embeddings, triton.cdiv(width, 32))](
            grad_y, order, bounds, grad, width, *grad_y.stride(), BLOCK_M=64, BLOCK_D=32
        )
    return grad


def _segments_triton(ids: Tensor, num_embeddings: int) -> tuple[Tensor, Tensor]:
    if num_embeddings > MAX_COUNTED:
        return _segments(ids, num_embeddings)
    order = torch.empty(len(ids), dtype=torch.int64, device=ids.device)
    bounds = torch.empty(num_embeddings + 1, dtype=torch.int64, device=ids.device)
    block = min(max(triton.next_power_of_2(len(ids)), 128), 4096)
    _segments_kernel[(num_embeddings + 1,)](
        ids, order, bounds, len(ids), num_embeddings, ids.stride(0), BLOCK=block, num_warps=8
    )
    return order, bounds


embedding_rows = Operation(
    "embedding_rows", _embedding_rows_triton, _embedding_rows_torch,
    "ids: int64[M]; packed: packed[V, D]; dtype",
    native=embedding_rows_native, where=(DTYPE_IS_REAL,),
)  # fmt: skip
"""Decode the rows `ids` of a packed table.

Args:
    ids: (M,) int64 in 0..V-1; may repeat. An id out of range raises IndexError in CPU backends
        and gives a row of NaN in the Triton kernel, which cannot wait for the device.
    packed: the table, V rows by D weights.
    dtype: bfloat16, or float32 with the same bf16 values.

Returns:
    (M, D) in `dtype`; exact, and bitwise equal on every backend.
"""

embedding_grad = Operation(
    "embedding_grad", _embedding_grad_triton, _embedding_grad_torch,
    "grad_y: real[M, D]; ids: int64[M]; num_embeddings",
)  # fmt: skip
"""Sum the gradients of the tokens of each id.

Args:
    grad_y: (M, D) float32 or bfloat16, any strides.
    ids: (M,) int64 in 0..V-1.
    num_embeddings: V.

Returns:
    (V, D) float32, zeros for an id without tokens; summed in float32, in a fixed order.
"""
