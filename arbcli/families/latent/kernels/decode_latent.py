"""Multi-head latent attention of one new byte, fused between its two projections.

A position p stores a latent vector c_p for all heads. With n_p = c_p / rms(c_p), head h has the key
(W_h n_p, t_p) and the value V_h n_p; t_p is rotated by the position. The query (q_h, u_h) of a head
is rotated in its second part and normalised, and keys are divided by their root-mean-square, whose
inverse l_hp is stored:

    s_hp = (q_h . W_h n_p + u_h . t_p) l_hp scale,    y_h = V_h sum over p of softmax(s_h)_p n_p

W_h.T q_h is computed once, and V_h multiplies last, so keys and values are never expanded, except
the new key, for its length. A program computes one head of a text. As queries and keys are
normalised, no score exceeds `scale` times the width of a head, and no maximum is subtracted.
Source: DeepSeek-AI, "DeepSeek-V2", https://arxiv.org/abs/2405.04434, section 2.1.
"""

import torch
from torch import Tensor
from torch.nn import functional

from arbcli.kernels.attention.rotary_norm import load_angles, load_halves, rotate, store_halves
from arbcli.kernels.runtime.operation import Operation, tl, triton
from arbcli.kernels.runtime.overlap import overlap_options, wait_for_last
from arbcli.kernels.runtime.texts import text_by_text

SHARED = (1, 6, 7)
"""Arguments of `decode_latent` that are the same for all texts."""

TILE = 8192
"""Elements of weights, or of latents, that a program loads at a time."""
WARPS = 8


@text_by_text(5, *SHARED)
def _decode_latent_torch(
    row: Tensor, up: Tensor, latent: Tensor, rotated: Tensor, lengths: Tensor, position: Tensor,
    cos: Tensor, sin: Tensor, scale: float, eps: float,
) -> Tensor:  # fmt: skip
    (window, size), heads, rotary = latent.shape, lengths.shape[1], rotated.shape[1]
    dim, slot = len(row) - size - rotary, (position % window).long()[None]
    width = dim // heads
    still = width - rotary
    cos, sin = (table.index_select(0, position[None]) for table in (cos, sin))

    def rotate_here(x: Tensor) -> Tensor:
        return rotate(x, cos, sin).to(row.dtype)

    q = row[:dim].view(heads, width)
    q = torch.cat([q[:, :still], rotate_here(q[:, still:])], dim=1).float()
    q = functional.rms_norm(q, (width,), eps=eps)
    latent.index_copy_(0, slot, row[None, dim : dim + size])
    rotated.index_copy_(0, slot, rotate_here(row[None, dim + size :]))
    key_matrices, value_matrices = up.float().view(heads, -1, size).split((still, width), dim=1)
    n, t = functional.rms_norm(latent.float(), (size,), eps=eps), rotated.float()
    now = key_matrices @ n.index_select(0, slot)[0]
    key = now.square().sum(1) + t.index_select(0, slot).square().sum(1)
    lengths.index_copy_(0, slot, torch.rsqrt(key / width + eps)[None])
    latent_query = (q[:, None, :still] @ key_matrices)[:, 0]
    score = (latent_query @ n.T + q[:, still:] @ t.T) * lengths.T * scale
    seen = torch.arange(window, device=row.device) <= position
    share = torch.softmax(score.masked_fill(~seen, -torch.inf), dim=1)
    return (value_matrices @ (share @ n)[..., None])[..., 0].to(row.dtype)


@triton.jit
def _load_rotated_halves(pointer, offs_r, mask_r, cos, sin, HALF: tl.constexpr):
    """Load and rotate both halves of the rotary part, rounded to the dtype of the ring."""
    first, second = load_halves(pointer + offs_r, mask_r, HALF)
    dtype: tl.constexpr = pointer.dtype.element_ty
    return (first * cos - second * sin).to(dtype), (first * sin + second * cos).to(dtype)


@triton.jit
def _decode_latent_kernel(
    row_ptr, up_ptr, latent_ptr, rotated_ptr, lengths_ptr, position_ptr, cos_ptr, sin_ptr, y_ptr,
    W, HEADS, scale, eps,
    LATENT: tl.constexpr, STILL: tl.constexpr, HALF: tl.constexpr, WIDTH: tl.constexpr,
    BLOCK_L: tl.constexpr, BLOCK_R: tl.constexpr, BLOCK_N: tl.constexpr, OVERLAP: tl.constexpr,
):  # fmt: skip
    head, text = tl.program_id(0), tl.program_id(1).to(tl.int64)
    position = tl.load(position_ptr + text)
    row_ptr += text * (HEADS * WIDTH + LATENT + 2 * HALF)
    latent_ptr, rotated_ptr = latent_ptr + text * W * LATENT, rotated_ptr + text * W * (2 * HALF)
    lengths_ptr, y_ptr = lengths_ptr + text * W * HEADS, y_ptr + text * HEADS * WIDTH
    slot, seen = position % W, tl.minimum(position + 1, W)
    # angles of the position, which do not depend on the previous kernel
    offs_l, offs_r, offs_n = tl.arange(0, BLOCK_L), tl.arange(0, BLOCK_R), tl.arange(0, BLOCK_N)
    mask_l, mask_r = offs_l < LATENT, offs_r < HALF
    table = position.to(tl.int64) * HALF
    cos, sin = load_angles(cos_ptr + table, sin_ptr + table, offs_r, mask_r)
    wait_for_last(OVERLAP)
    # latent and rotary key of the new byte: all heads compute them, and one stores them
    c_ptr, q_ptr = row_ptr + HEADS * WIDTH, row_ptr + head * WIDTH
    c = tl.load(c_ptr + offs_l, mask=mask_l, other=0)
    t_0, t_1 = _load_rotated_halves(c_ptr + LATENT, offs_r, mask_r, cos, sin, HALF)
    if head == 0:
        tl.store(latent_ptr + slot * LATENT + offs_l, c, mask=mask_l)
        store_halves(rotated_ptr + slot * (2 * HALF) + offs_r, t_0, t_1, mask_r, HALF)
    c, t_0, t_1 = c.to(tl.float32), t_0.to(tl.float32), t_1.to(tl.float32)
    n = c * tl.rsqrt(tl.sum(c * c) / LATENT + eps)

    # W.T q, and the squares of the query and of the new key
    u_0, u_1 = _load_rotated_halves(q_ptr + STILL, offs_r, mask_r, cos, sin, HALF)
    u_0, u_1 = u_0.to(tl.float32), u_1.to(tl.float32)
    query_squares, key_squares = tl.sum(u_0 * u_0 + u_1 * u_1), tl.sum(t_0 * t_0 + t_1 * t_1)
    latent_query = tl.zeros((BLOCK_L,), tl.float32)
    w_ptr = up_ptr + head.to(tl.int64) * ((STILL + WIDTH) * LATENT)
    for start in range(0, STILL, BLOCK_N):
        k = start + offs_n
        mask = (k < STILL)[:, None] & mask_l[None, :]
        w = tl.load(w_ptr + (k[:, None] * LATENT + offs_l[None, :]), mask=mask, other=0)
        w = w.to(tl.float32)  # [BLOCK_N, BLOCK_L]
        q = tl.load(q_ptr + k, mask=k < STILL, other=0).to(tl.float32)
        key = tl.sum(w * n[None, :], axis=1)
        latent_query += tl.sum(w * q[:, None], axis=0)
        query_squares += tl.sum(q * q)
        key_squares += tl.sum(key * key)
    factor = tl.rsqrt(query_squares / WIDTH + eps) * scale
    length = tl.rsqrt(key_squares / WIDTH + eps)
    tl.store(lengths_ptr + slot * HEADS + head, length)

    # attend in the latent space; the new slot is taken from registers
    total, mean = 0.0, tl.zeros((BLOCK_L,), tl.float32)
    for start in range(0, seen, BLOCK_N):
        s = start + offs_n
        is_new, old = s == slot, (s < seen) & (s != slot)
        both, rotated = old[:, None] & mask_l[None, :], old[:, None] & mask_r[None, :]
        x = tl.load(latent_ptr + (s[:, None] * LATENT + offs_l[None, :]), mask=both, other=0).to(
            tl.float32
        )  # [BLOCK_N, BLOCK_L]
        x = tl.where(is_new[:, None], c[None, :], x)
        # the norm of a latent is a factor of its score and of its weight
        r = tl.rsqrt(tl.sum(x * x, axis=1) / LATENT + eps)
        at = rotated_ptr + (s[:, None] * (2 * HALF) + offs_r[None, :])
        a, b = load_halves(at, rotated, HALF)
        a, b = (
            tl.where(is_new[:, None], t_0[None, :], a),
            tl.where(is_new[:, None], t_1[None, :], b),
        )
        slot_lengths = tl.load(lengths_ptr + (s * HEADS + head), mask=old, other=0)
        # q . k, from latent and rotary part; weights need no maximum
        score = tl.sum(x * latent_query[None, :], axis=1) * r
        score += tl.sum(a * u_0[None, :] + b * u_1[None, :], axis=1)
        weight = tl.exp(score * tl.where(is_new, length, slot_lengths) * factor)
        weight = tl.where(s < seen, weight, 0)
        total += tl.sum(weight)
        mean += tl.sum(x * (weight * r)[:, None], axis=0)
    mean /= total

    # up-project the mean by V
    w_ptr += STILL * LATENT
    for start in range(0, WIDTH, BLOCK_N):
        k = start + offs_n
        mask = (k < WIDTH)[:, None] & mask_l[None, :]
        w = tl.load(w_ptr + (k[:, None] * LATENT + offs_l[None, :]), mask=mask, other=0)
        y = tl.sum(w.to(tl.float32) * mean[None, :], axis=1)
        tl.store(y_ptr + head * WIDTH + k, y.to(y_ptr.dtype.element_ty), mask=k < WIDTH)


def _decode_latent_triton(
    row: Tensor, up: Tensor, latent: Tensor, rotated: Tensor, lengths: Tensor, position: Tensor,
    cos: Tensor, sin: Tensor, scale: float, eps: float,
) -> Tensor:  # fmt: skip
    (window, size), heads, rotary = latent.shape[-2:], lengths.shape[-1], rotated.shape[-1]
    width = (row.shape[-1] - size - rotary) // heads
    y = row.new_empty(*position.shape, heads, width)
    block_l = triton.next_power_of_2(size)
    _decode_latent_kernel[(heads, position.numel())](
        row, up, latent, rotated, lengths, position, cos, sin, y, window, heads, scale, eps,
        LATENT=size, STILL=width - rotary, HALF=rotary // 2, WIDTH=width,
        BLOCK_L=block_l, BLOCK_R=triton.next_power_of_2(rotary // 2),
        BLOCK_N=max(1, min(32, TILE // block_l)), num_warps=WARPS, **overlap_options(row),
    )  # fmt: skip
    return y


decode_latent = Operation(
    "decode_latent", _decode_latent_triton, _decode_latent_torch,
    "row: real[*T, Q] dense; up: real[2 * (Q - L - R) - H * R, L] dense; latent: real[*T, W, L] "
    "dense; rotated: real[*T, W, R] dense; lengths: float32[*T, W, H] dense; position: int32[*T] "
    "dense; cos, sin: float32[P, R // 2] dense; scale; eps",
    where=(
        "len(T) < 2", "W > 0 and H > 0", "R % 2 == 0 and R > 0",
        "(Q - L - R) % H == 0 and R * H <= Q - L - R",
    ),
)  # fmt: skip
"""Store one new position in the rings, and attend to the rings.

With several texts, all arguments but `up`, `cos` and `sin`, and the result, have a leading
batch dimension.

Args:
    row: (heads * d + L + R,) float32 or bfloat16, contiguous: queries, the latent vector, and
        the rotary part of the key. The last R elements of each query are rotated too.
    up: (heads * (d - R + d), L) like `row`: for each head, the up-projections of keys and then of
        values.
    latent: (W, L) like `row`; slot `position` mod W is written, also in `rotated` and `lengths`.
    rotated: (W, R) like `row`.
    lengths: (W, heads) float32: inverse root-mean-squares of keys.
    position: int32 scalar tensor below P: number of earlier bytes. Read on the device.
    cos: (P, R / 2) float32.
    sin: like `cos`.
    scale: factor of scores.
    eps: added to mean squares.

All are contiguous. Slots that were never written must be finite.

Returns:
    (heads, d) like `row`, computed in float32.
"""
