"""Routing of one position between the encoder and the decoder of a stage.

`route_position_` decides whether a chunk begins at the position, stores the vectors that the next
position is compared with, and adds the last chunk to the position's residual:

    begins = position = 0, or, depending on the router,
        learned:  p = (1 - cos(x' + q', n + k)) / 2 > 1/2,   n = x / sqrt(mean(x**2) + eps),
                  x' and q' the n and the q of the position before
        every:    `length` divides the position
        space:    the previous byte is a space and this one is not
    y = residual + mean

If a chunk begins, the inner network computes its z, and `take_chunk_` updates the running mean:

    mean = P z + (1 - P) mean,   P = p, clipped away from 0 and 1;   y = residual + mean

Both kernels also increment positions. In a CUDA graph, the first also sets the condition of the
following conditional node: whether a chunk begins.

With several texts, each text has its own program. In a text that the step skips, no chunk begins
and no buffer changes.
"""

import torch
from torch import Tensor
from torch.nn import functional

from arbcli.families.hnet.kernels.boundary_scores import TINY
from arbcli.kernels.runtime.conditions import tell_condition
from arbcli.kernels.runtime.operation import Operation, tl, triton
from arbcli.kernels.runtime.overlap import overlap_options, wait_for_last
from arbcli.kernels.runtime.texts import text_by_text

ROUTERS = ("learned", "every", "space")
MIN_SHARE = 1e-4
"""P is clipped to this value and 1 minus this value."""
_LEAST, _MOST = tl.constexpr(MIN_SHARE), tl.constexpr(1 - MIN_SHARE)


@text_by_text(7)
def _route_position_torch(
    router: str, x: Tensor, rows: Tensor, mean: Tensor, last: Tensor, byte: Tensor, ids: Tensor,
    encoder: Tensor, decoder: Tensor, length: int, eps: float, handle: Tensor | None = None,
    active: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    width, is_first = len(x), (encoder == 0)[None]
    goes = torch.ones_like(encoder) if active is None else active
    if router == "learned":
        q, k = rows[: 2 * width].split(width)
        n = functional.rms_norm(x, x.shape, eps=eps)
        u = last[:width].float() + last[width:].float()
        v = n.float() + k.float()
        length_u, length_v = ((part.square().sum() + 1e-6).sqrt() for part in (u, v))
        p = (1 - (u * v / (length_u * length_v)).sum()) / 2
        p = p[None].masked_fill(is_first, 1)
        begins = p > 0.5
        last.copy_(torch.where(goes > 0, torch.cat((n, q)), last))
    else:
        if router == "every":
            begins = (encoder % length == 0)[None]
        else:
            before, now = ((part == 32) | ((part >= 9) & (part < 14)) for part in (byte, ids))
            begins = is_first | (before & ~now).flatten()
            byte.copy_(torch.where(goes > 0, ids.view_as(byte), byte))
        p = begins.float()
    decoder.copy_(encoder)
    encoder += goes
    y = (rows[-width:].float() + mean).to(rows.dtype)
    return p, begins & (goes > 0), y


def _take_chunk_torch(
    z: Tensor, p: Tensor, residual: Tensor, mean: Tensor, y: Tensor, position: Tensor | None = None,
    begins: Tensor | None = None,
) -> None:  # fmt: skip
    share = p.clamp(MIN_SHARE, 1 - MIN_SHARE)
    taken = torch.ones_like(p) if begins is None else begins[:, None]
    mean.copy_(torch.where(taken > 0, share * z.float() + (1 - share) * mean, mean))
    y.copy_(torch.where(taken > 0, (residual.float() + mean).to(y.dtype), y))
    if position is not None:
        position += 1 if begins is None else begins


@triton.jit
def _is_space(byte):
    return (byte == 32) | ((byte >= 9) & (byte < 14))


@triton.jit
def _inverse_length(u):
    return 1 / tl.sqrt(tl.sum(u * u) + TINY)


@triton.jit
def _route_position_kernel(
    x_ptr, rows_ptr, mean_ptr, last_ptr, byte_ptr, ids_ptr, encoder_ptr, decoder_ptr,
    handle_ptr, active_ptr, p_ptr, begins_ptr, y_ptr,
    D, LENGTH, eps,
    LEARNED: tl.constexpr, EVERY: tl.constexpr, TELLS: tl.constexpr,
    BLOCK_D: tl.constexpr, OVERLAP: tl.constexpr,
):  # fmt: skip
    d, text = tl.arange(0, BLOCK_D), tl.program_id(0)
    mask = d < D
    PARTS: tl.constexpr = 3 if LEARNED else 1
    x_ptr, rows_ptr, mean_ptr = x_ptr + text * D, rows_ptr + text * PARTS * D, mean_ptr + text * D
    last_ptr, y_ptr = last_ptr + text * 2 * D, y_ptr + text * D
    # only the previous kernel, which computes the rows, may still be running
    position = tl.load(encoder_ptr + text)
    goes = 1
    if active_ptr is not None:
        goes = tl.load(active_ptr + text)
    kept = d < D * goes
    mean = tl.load(mean_ptr + d, mask=mask, other=0)
    dtype = y_ptr.dtype.element_ty
    # probability that a chunk begins, by the router
    if LEARNED:
        # n of this position; n + q of the previous one
        x = tl.load(x_ptr + d, mask=mask, other=0).to(tl.float32)
        x = (x * tl.rsqrt(tl.sum(x * x) / D + eps)).to(dtype)
        u = tl.load(last_ptr + d, mask=mask, other=0).to(tl.float32)
        u += tl.load(last_ptr + D + d, mask=mask, other=0).to(tl.float32)
        wait_for_last(OVERLAP)
        # cosine of the previous n + q and this n + k
        q = tl.load(rows_ptr + d, mask=mask, other=0)
        v = tl.load(rows_ptr + D + d, mask=mask, other=0).to(tl.float32) + x.to(tl.float32)
        residual = tl.load(rows_ptr + 2 * D + d, mask=mask, other=0).to(tl.float32)
        cos = tl.sum(u * v) * (_inverse_length(u) * _inverse_length(v))
        p = tl.where(position == 0, 1.0, (1 - cos) / 2)
        # what the next position is compared with; skipped texts keep theirs
        tl.store(last_ptr + d, x, mask=kept)
        tl.store(last_ptr + D + d, q, mask=kept)
    else:
        wait_for_last(OVERLAP)
        residual = tl.load(rows_ptr + d, mask=mask, other=0).to(tl.float32)
        if EVERY:
            p = (position % LENGTH == 0).to(tl.float32)
        else:
            byte = tl.load(ids_ptr + text)
            before = tl.load(byte_ptr + text)
            begins = _is_space(before) & (_is_space(byte) == 0)
            p = (begins | (position == 0)).to(tl.float32)
            tl.debug_barrier()  # all threads read before any thread writes
            tl.store(byte_ptr + text, tl.where(goes > 0, byte, before))
    # output, as if no chunk began, and the decision
    tl.store(y_ptr + d, (residual + mean).to(dtype), mask=mask)
    tl.store(p_ptr + text, p)
    tl.store(begins_ptr + text, (p * goes > 0.5).to(tl.uint8))
    # set the condition of the graph node that computes the inner network
    if TELLS:
        tell_condition(handle_ptr, p > 0.5)
    # advance the positions once all threads have read them
    tl.debug_barrier()
    tl.store(decoder_ptr + text, position)
    tl.store(encoder_ptr + text, position + goes)


@triton.jit
def _take_chunk_kernel(
    z_ptr, p_ptr, residual_ptr, mean_ptr, y_ptr, position_ptr, begins_ptr,
    D, COUNTS: tl.constexpr, BLOCK_D: tl.constexpr, OVERLAP: tl.constexpr,
):  # fmt: skip
    d, text = tl.arange(0, BLOCK_D), tl.program_id(0)
    z_ptr, residual_ptr = z_ptr + text * D, residual_ptr + text * D
    mean_ptr, y_ptr = mean_ptr + text * D, y_ptr + text * D
    begins = 1
    if begins_ptr is not None:
        begins = tl.load(begins_ptr + text)
    mask = d < D * begins
    # load what the inner network does not write, then wait for it
    share = tl.minimum(tl.maximum(tl.load(p_ptr + text), _LEAST), _MOST)
    mean = tl.load(mean_ptr + d, mask=mask, other=0)
    residual = tl.load(residual_ptr + d, mask=mask, other=0).to(tl.float32)
    wait_for_last(OVERLAP)
    z = tl.load(z_ptr + d, mask=mask, other=0).to(tl.float32)
    # exponential moving average of chunks, and the output that depends on it
    mean = share * z + (1 - share) * mean
    tl.store(mean_ptr + d, mean, mask=mask)
    tl.store(y_ptr + d, (residual + mean).to(y_ptr.dtype.element_ty), mask=mask)
    if COUNTS:
        position = tl.load(position_ptr + text)
        tl.debug_barrier()
        tl.store(position_ptr + text, position + begins)


def _route_position_triton(
    router: str, x: Tensor, rows: Tensor, mean: Tensor, last: Tensor, byte: Tensor, ids: Tensor,
    encoder: Tensor, decoder: Tensor, length: int, eps: float, handle: Tensor | None = None,
    active: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    width = x.shape[-1]
    p = torch.empty(*x.shape[:-1], 1, dtype=torch.float32, device=x.device)
    begins = torch.empty_like(p, dtype=torch.bool)
    y = torch.empty_like(x)
    _route_position_kernel[(p.numel(),)](
        x, rows, mean, last, byte, ids, encoder, decoder,
        encoder if handle is None else handle, active, p, begins.view(torch.uint8), y,
        width, length, eps,
        LEARNED=router == "learned", EVERY=router == "every", TELLS=handle is not None,
        **_blocks(width), **overlap_options(x),
    )  # fmt: skip
    return p, begins, y


def _take_chunk_triton(
    z: Tensor, p: Tensor, residual: Tensor, mean: Tensor, y: Tensor, position: Tensor | None = None,
    begins: Tensor | None = None,
) -> None:  # fmt: skip
    width = z.shape[-1]
    _take_chunk_kernel[(p.numel(),)](
        z, p, residual, mean, y, mean if position is None else position, begins, width,
        COUNTS=position is not None, **_blocks(width), **overlap_options(z),
    )  # fmt: skip


def _blocks(width: int) -> dict[str, int]:
    """Choose few warps: each of their threads sets the condition."""
    block_d = triton.next_power_of_2(width)
    return {"BLOCK_D": block_d, "num_warps": min(8, max(1, block_d // 512))}


route_position_ = Operation(
    "route_position", _route_position_triton, _route_position_torch,
    f"router: {'|'.join(ROUTERS)}; x: real[*T, D] dense; "
    "rows: real[*T, D * (3 if router == 'learned' else 1)] dense; mean: float32[*T, D] dense; "
    "last: real[*T, 2 * D] dense; byte: int64[*T] one; ids: int64[*T] one; "
    "encoder: int32[*T] dense; decoder: int32[*T] dense; length; eps; handle: int64[*T]? one; "
    "active: int32[*T]? dense",
    where=("len(T) < 2",),
)  # fmt: skip
"""Route one position, and increment the position.

With several texts, all tensors and results have a leading batch dimension.

Args:
    router: one of `ROUTERS`.
    x: (D,) float32 or bfloat16, contiguous: encoder output, not normalised.
    rows: projections of the normalised x, like x: q, k and residual, (3 D,), for the `learned`
        router; otherwise the residual, (D,).
    mean: (D,) float32: running mean of chunks.
    last: (2 D,) like x: n and q of the previous position; overwritten by `learned`.
    byte: int64, one element: the previous byte; overwritten by `space`.
    ids: int64, one element: the byte.
    encoder: int32 scalar tensor: number of earlier positions; incremented.
    decoder: int32 scalar tensor: set to the old value of `encoder`.
    length: length of chunks, for `every`.
    eps: added to the mean square.
    handle: int64, one element on the GPU of x: handle of the conditional node to set; 0 for
        none, as with several texts.
    active: int32 like `encoder`: 0 for texts that the step skips; None skips none.

Returns:
    p, (1,) float32; begins, (1,) bool; and y = residual + mean, (D,) like x.
"""
take_chunk_ = Operation(
    "take_chunk", _take_chunk_triton, _take_chunk_torch,
    "z: real[*T, D] dense; p: float32[*T, 1] dense; residual: real[*T, D] dense; "
    "mean: float32[*T, D] dense; y: real[*T, D] dense; position, begins: int32[*T]? dense",
    where=("len(T) < 2", "begins is None or len(T) == 1"),
)  # fmt: skip
"""Update the running mean with the inner network's output for a chunk at the last position.

With several texts, all tensors have a leading batch dimension.

Args:
    z: (D,) float32 or bfloat16, contiguous: output of the inner network.
    p: (1,) float32, from `route_position_`.
    residual: (D,) like z.
    mean: (D,) float32: running mean of chunks; overwritten.
    y: (D,) like z: overwritten with residual + mean.
    position: int32 scalar tensor, incremented, or None.
    begins: (B,) int32, with several texts: 0 for texts in which no chunk begins, which do not
        change; None if a chunk begins in every text.
"""
