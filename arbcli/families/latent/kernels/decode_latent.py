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

from collections.abc import Iterator

import torch
from torch import Tensor
from torch.nn import functional

from arbcli.kernels.attention.decode_attention import PLACE
from arbcli.kernels.attention.rotation import rotate, rotate_reference
from arbcli.kernels.dice import Dice
from arbcli.kernels.runtime._triton import tl, triton
from arbcli.kernels.runtime.arguments import FLOAT, Array, Number
from arbcli.kernels.runtime.operation import Case, Gate, Operation
from arbcli.kernels.runtime.overlap import overlap_options, wait_for_last
from arbcli.kernels.runtime.texts import stacked_texts, text_by_text
from arbcli.kernels.timed import Timed

SHARED = (1, 6, 7)
"""Arguments of `decode_latent` that are the same for all texts."""

TILE = 8192
"""Elements of weights, or of latents, that a program loads at a time."""
WARPS = 8


@text_by_text(5, *SHARED)
def decode_latent_reference(
    row: Tensor, up: Tensor, latent: Tensor, rotated: Tensor, lengths: Tensor, position: Tensor,
    cos: Tensor, sin: Tensor, scale: float, eps: float,
) -> tuple[Tensor, ...]:  # fmt: skip
    """Compute the result and the rings of `decode_latent` in float64, one head at a time."""
    dtype, p, (window, size), heads = row.dtype, int(position), latent.shape, lengths.shape[1]
    rotary, dim = rotated.shape[1], len(row) - size - rotated.shape[1]
    width, slot = dim // heads, p % window
    row, up, latent, rotated, lengths = (x.double() for x in (row, up, latent, rotated, lengths))

    def turn(x: Tensor) -> Tensor:
        rotated = rotate_reference(x, cos[p], sin[p])
        return rotated.to(dtype).double()  # rounded like stored values

    latent[slot], rotated[slot] = row[dim : dim + size], turn(row[dim + size :])
    n = latent / (latent.square().mean(1, keepdim=True) + eps).sqrt()
    seen, y = min(p + 1, window), torch.empty(heads, width, dtype=torch.float64, device=row.device)
    for head in range(heads):
        q = row[head * width : (head + 1) * width]
        q = torch.cat([q[: width - rotary], turn(q[width - rotary :])])
        q = q / (q.square().mean() + eps).sqrt()
        w = up[head * (2 * width - rotary) : (head + 1) * (2 * width - rotary)]
        keys = torch.cat([n @ w[: width - rotary].T, rotated], dim=1)
        lengths[slot, head] = 1 / (keys[slot].square().mean() + eps).sqrt()
        score = keys[:seen] @ q * lengths[:seen, head] * scale
        y[head] = torch.softmax(score, 0) @ n[:seen] @ w[width - rotary :].T
    return y, latent, rotated, lengths


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

    def turn(x: Tensor) -> Tensor:
        return rotate(x, cos, sin).to(row.dtype)

    q = row[:dim].view(heads, width)
    q = torch.cat([q[:, :still], turn(q[:, still:])], dim=1).float()
    q = functional.rms_norm(q, (width,), eps=eps)
    latent.index_copy_(0, slot, row[None, dim : dim + size])
    rotated.index_copy_(0, slot, turn(row[None, dim + size :]))
    to_keys, to_values = up.float().view(heads, -1, size).split((still, width), dim=1)
    n, t = functional.rms_norm(latent.float(), (size,), eps=eps), rotated.float()
    now = to_keys @ n.index_select(0, slot)[0]
    key = now.square().sum(1) + t.index_select(0, slot).square().sum(1)
    lengths.index_copy_(0, slot, torch.rsqrt(key / width + eps)[None])
    in_latent = (q[:, None, :still] @ to_keys)[:, 0]
    score = (in_latent @ n.T + q[:, still:] @ t.T) * lengths.T * scale
    seen = torch.arange(window, device=row.device) <= position
    share = torch.softmax(score.masked_fill(~seen, -torch.inf), dim=1)
    return (to_values @ (share @ n)[..., None])[..., 0].to(row.dtype)


@triton.jit
def _load_rotated_halves(pointer, offs_r, mask_r, cos, sin, HALF: tl.constexpr):
    """Load and rotate both halves of the rotary part, rounded to the dtype of the ring."""
    first = tl.load(pointer + offs_r, mask=mask_r, other=0).to(tl.float32)
    second = tl.load(pointer + HALF + offs_r, mask=mask_r, other=0).to(tl.float32)
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
    offs_l, offs_r, offs_n = tl.arange(0, BLOCK_L), tl.arange(0, BLOCK_R), tl.arange(0, BLOCK_N)
    mask_l, mask_r = offs_l < LATENT, offs_r < HALF
    cos = tl.load(cos_ptr + position.to(tl.int64) * HALF + offs_r, mask=mask_r, other=0)
    sin = tl.load(sin_ptr + position.to(tl.int64) * HALF + offs_r, mask=mask_r, other=0)
    wait_for_last(OVERLAP)
    c_ptr, q_ptr = row_ptr + HEADS * WIDTH, row_ptr + head * WIDTH
    c = tl.load(c_ptr + offs_l, mask=mask_l, other=0)
    t_0, t_1 = _load_rotated_halves(c_ptr + LATENT, offs_r, mask_r, cos, sin, HALF)
    if head == 0:
        tl.store(latent_ptr + slot * LATENT + offs_l, c, mask=mask_l)
        tl.store(rotated_ptr + slot * (2 * HALF) + offs_r, t_0, mask=mask_r)
        tl.store(rotated_ptr + slot * (2 * HALF) + HALF + offs_r, t_1, mask=mask_r)
    c, t_0, t_1 = c.to(tl.float32), t_0.to(tl.float32), t_1.to(tl.float32)
    n = c * tl.rsqrt(tl.sum(c * c) / LATENT + eps)

    # W.T q, and the squares of the query and of the new key
    u_0, u_1 = _load_rotated_halves(q_ptr + STILL, offs_r, mask_r, cos, sin, HALF)
    u_0, u_1 = u_0.to(tl.float32), u_1.to(tl.float32)
    of_query, of_key = tl.sum(u_0 * u_0 + u_1 * u_1), tl.sum(t_0 * t_0 + t_1 * t_1)
    in_latent = tl.zeros((BLOCK_L,), tl.float32)
    w_ptr = up_ptr + head.to(tl.int64) * ((STILL + WIDTH) * LATENT)
    for start in range(0, STILL, BLOCK_N):
        k = start + offs_n
        mask = (k < STILL)[:, None] & mask_l[None, :]
        w = tl.load(w_ptr + (k[:, None] * LATENT + offs_l[None, :]), mask=mask, other=0)
        w = w.to(tl.float32)  # [BLOCK_N, BLOCK_L]
        q = tl.load(q_ptr + k, mask=k < STILL, other=0).to(tl.float32)
        key = tl.sum(w * n[None, :], axis=1)
        in_latent += tl.sum(w * q[:, None], axis=0)
        of_query += tl.sum(q * q)
        of_key += tl.sum(key * key)
    factor = tl.rsqrt(of_query / WIDTH + eps) * scale
    length = tl.rsqrt(of_key / WIDTH + eps)
    tl.store(lengths_ptr + slot * HEADS + head, length)

    total, mean = 0.0, tl.zeros((BLOCK_L,), tl.float32)
    for start in range(0, seen, BLOCK_N):
        s = start + offs_n
        is_new, old = s == slot, (s < seen) & (s != slot)
        both, rotated = old[:, None] & mask_l[None, :], old[:, None] & mask_r[None, :]
        x = tl.load(latent_ptr + (s[:, None] * LATENT + offs_l[None, :]), mask=both, other=0).to(
            tl.float32
        )  # [BLOCK_N, BLOCK_L]
        x = tl.where(is_new[:, None], c[None, :], x)
        r = tl.rsqrt(tl.sum(x * x, axis=1) / LATENT + eps)
        at = rotated_ptr + (s[:, None] * (2 * HALF) + offs_r[None, :])
        a = tl.load(at, mask=rotated, other=0).to(tl.float32)
        b = tl.load(at + HALF, mask=rotated, other=0).to(tl.float32)
        a, b = (
            tl.where(is_new[:, None], t_0[None, :], a),
            tl.where(is_new[:, None], t_1[None, :], b),
        )
        of_s = tl.load(lengths_ptr + (s * HEADS + head), mask=old, other=0)
        score = tl.sum(x * in_latent[None, :], axis=1) * r
        score += tl.sum(a * u_0[None, :] + b * u_1[None, :], axis=1)
        weight = tl.exp(score * tl.where(is_new, length, of_s) * factor)
        weight = tl.where(s < seen, weight, 0)
        total += tl.sum(weight)
        mean += tl.sum(x * (weight * r)[:, None], axis=0)
    mean /= total

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


SHAPES = ((1, 2, 3, 2, 1, 0), (2, 10, 24, 4, 7, 3), (3, 16, 40, 8, 33, 32), (2, 24, 16, 24, 40, 99),
          (1, 70, 130, 6, 70, 71))  # fmt: skip
"""(heads, d, L, R, W, position): rings that are empty, filling, just full and overwritten."""
LARGE = ((20, 128, 512, 32, 64, 300), (4, 64, 128, 32, 256, 200))


def _cases(device: torch.device, _group_size: int) -> Iterator[Case]:
    generator = torch.Generator().manual_seed(0)
    shapes = [(*shape, torch.float32) for shape in SHAPES]
    if device.type == "cuda":  # the interpreter's bf16 arithmetic is wrong
        shapes += [(*shape, dtype) for shape in LARGE for dtype in (torch.float32, torch.bfloat16)]
    for heads, width, size, rotary, window, position, dtype in shapes:
        low = dtype == torch.bfloat16
        up = heads * (2 * width - rotary)
        sizes = ((heads * width + size + rotary,), (up, size), (window, size), (window, rotary))
        parts = [torch.randn(shape, generator=generator).to(device, dtype) for shape in sizes]
        parts[1] *= size**-0.5  # keys about as long as queries: exp of no score overflows
        lengths = torch.rand(window, heads, generator=generator).to(device)
        angle = 7 * torch.randn(position + 2, rotary // 2, generator=generator).to(device)
        place = torch.tensor(position, dtype=torch.int32, device=device)
        inputs = (*parts, lengths, place, angle.cos(), angle.sin(), 2 * width**-0.5, 0.1)
        label = f"{heads}x{width}x{size}x{rotary} at {position} of {window}{' bf16' if low else ''}"
        yield Case(label, inputs)
        if window in (33, 64):  # one text is at its first position
            begins = (-parts[0], *inputs[1:5], torch.zeros_like(place), *inputs[6:])
            texts = stacked_texts([inputs, begins, inputs], *SHARED)
            yield Case(f"3 texts of {label}", texts)


def _draw_rings(dice: Dice, group_size: int, m: int, n: int, k: int) -> tuple:
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
        width**-0.5, 0.1,
    )  # fmt: skip


decode_latent = Operation(
    "decode_latent", _decode_latent_triton, _decode_latent_torch, decode_latent_reference, _cases,
    Gate(
        relative=1e-5, peer_slack=0.1,
        reason="float32 sums of up to 512 products; in bf16 no worse than torch's by 10 %",
    ),
    {
        "row": Array("*T, Q", dense=True),
        "up": Array("2 * (Q - L - R) - H * R, L", dense=True),
        "latent": Array("*T, W, L", dense=True), "rotated": Array("*T, W, R", dense=True),
        "lengths": Array("*T, W, H", FLOAT, dense=True), **PLACE,
        "cos": Array("P, R // 2", FLOAT, dense=True), "sin": Array("P, R // 2", FLOAT, dense=True),
        "scale": Number(()), "eps": Number(()),
    },
    where=(
        "len(T) < 2", "W > 0 and H > 0", "R % 2 == 0 and R > 0",
        "(Q - L - R) % H == 0 and R * H <= Q - L - R",
    ),
    compared=("latent", "rotated", "lengths"), draw=_draw_rings, needs_rows=False,
    torch_is_peer=True,
    timed=[
        Timed(f"{'16 texts of ' * len(texts)}20x128x512 of 64 bf16",
              None if texts else _decode_latent_torch, "torch, step by step", T=texts, H=20, L=512,
              R=32, Q=20 * 128 + 512 + 32, W=64, P=64, position=63, scale=2 * 128**-0.5, eps=1e-6)
        for texts in ((), (16,))
    ],
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
