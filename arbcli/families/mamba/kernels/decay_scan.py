"""Linear attention with decay: the scan of a state space model, and of its backward.

    y[t] = sum over s <= t of exp(g[s + 1] + ... + g[t]) (q[t] . k[s]) v[s]

The same recurrence with a state S, (N, P), is S[t] = exp(g[t]) S[t - 1] + k[t] v[t],
y[t] = q[t] S[t]. In Mamba-2 q is C, k is B, v is dt x and g is dt A. Pieces of the sequence are
computed as attention, and S is passed from piece to piece. `reverse` sums over s >= t, with
exp(g[t + 1] + ... + g[s]).

The gradients are scans, too: dv is the reverse scan of (k, q, dy), dk that of (v, dy, q), and dq
the scan of (dy, v, k). With G[t] = g[0] + ... + g[t], dG[t] is dy[t] . y[t] - dv[t] . v[t].

Source: T. Dao and A. Gu, "Transformers are SSMs", https://arxiv.org/abs/2405.21060, section 6.
"""

from collections.abc import Iterator
from functools import partial

import torch
from torch import Tensor

from arbcli.kernels.dice import Dice
from arbcli.kernels.runtime._triton import tl, triton
from arbcli.kernels.runtime.arguments import FLOAT, Array, Number
from arbcli.kernels.runtime.inputs import normals
from arbcli.kernels.runtime.operation import Case, Gate, Operation, Timing

PIECE = 64
"""Positions that are computed together."""


def decay_scan_reference(q: Tensor, k: Tensor, v: Tensor, g: Tensor, reverse: bool) -> Tensor:
    """Compute the reference result of `decay_scan`, a position at a time in float64."""
    q, k, v, g = (part.double() for part in (q, k, v, g))
    length, y = q.shape[1], torch.zeros(v.shape, dtype=torch.float64, device=v.device)
    state = q.new_zeros(())
    for t in reversed(range(length)) if reverse else range(length):
        step = t + 1 if reverse else t
        if 0 <= step < length:
            state = state * g[:, step, :, None, None].exp()
        state = state + k[:, t, :, :, None] * v[:, t, :, None, :]
        y[:, t] = (q[:, t, :, :, None] * state).sum(dim=2)
    return y


def _decay_scan_torch(q: Tensor, k: Tensor, v: Tensor, g: Tensor, reverse: bool = False) -> Tensor:
    if reverse:
        g = torch.cat((torch.zeros_like(g[:, :1]), g.flip(1)[:, :-1]), dim=1)[:, : g.shape[1]]
        return _decay_scan_torch(q.flip(1), k.flip(1), v.flip(1), g, False).flip(1)
    y = torch.empty(v.shape, dtype=torch.float32, device=v.device)
    state = q.new_zeros(())
    for start in range(0, q.shape[1], PIECE):
        piece = slice(start, start + PIECE)
        # (B, H, L, ...) each
        qs, ks, vs = (part[:, piece].float().transpose(1, 2) for part in (q, k, v))
        c = g[:, piece].transpose(1, 2).cumsum(2)
        later = torch.ones(c.shape[2], c.shape[2], dtype=torch.bool, device=c.device).triu(1)
        weight = (c[..., :, None] - c[..., None, :]).masked_fill(later, -torch.inf).exp()
        found = (qs @ ks.mT * weight) @ vs
        if start:
            found = found + c.exp()[..., None] * (qs @ state)
        y[:, piece] = found.transpose(1, 2)
        end = c[..., -1:]
        state = end.exp()[..., None] * state + (ks * (end - c).exp()[..., None]).mT @ vs
    return y


@triton.jit
def _decay_scan_kernel(
    q_ptr, k_ptr, v_ptr, g_ptr, y_ptr,
    T, H, N, P,
    stride_qb, stride_qt, stride_qh, stride_qn, stride_kb, stride_kt, stride_kh, stride_kn,
    stride_vb, stride_vt, stride_vh, stride_vp, stride_gb, stride_gt, stride_gh,
    REVERSE: tl.constexpr, BLOCK_T: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_P: tl.constexpr,
):  # fmt: skip
    b, h = (tl.program_id(1) // H).to(tl.int64), (tl.program_id(1) % H).to(tl.int64)
    q_ptr += b * stride_qb + h * stride_qh
    k_ptr += b * stride_kb + h * stride_kh
    v_ptr += b * stride_vb + h * stride_vh
    g_ptr += b * stride_gb + h * stride_gh
    y_ptr += (b * T * H + h) * P
    n = tl.arange(0, BLOCK_N).to(tl.int64)[None, :]
    p = (tl.program_id(0) * BLOCK_P + tl.arange(0, BLOCK_P)).to(tl.int64)[None, :]
    offs = tl.arange(0, BLOCK_T)
    is_before = offs[:, None] >= offs[None, :]
    state = tl.zeros((BLOCK_N, BLOCK_P), dtype=tl.float32)
    dtype = v_ptr.dtype.element_ty
    for start in range(0, T, BLOCK_T):
        place = start + offs
        inside = place < T
        t = (T - 1 - place if REVERSE else place).to(tl.int64)
        g_ptrs = g_ptr + t * stride_gt
        if REVERSE:
            g = tl.load(g_ptrs + stride_gt, mask=inside & (place > 0), other=0)
        else:
            g = tl.load(g_ptrs, mask=inside, other=0)
        t, inside = t[:, None], inside[:, None]
        q = tl.load(q_ptr + t * stride_qt + n * stride_qn, mask=inside & (n < N), other=0)
        k = tl.load(k_ptr + t * stride_kt + n * stride_kn, mask=inside & (n < N), other=0)
        v = tl.load(v_ptr + t * stride_vt + p * stride_vp, mask=inside & (p < P), other=0)
        c, end = tl.cumsum(g, axis=0), tl.sum(g, axis=0)
        apart = tl.where(is_before, c[:, None] - c[None, :], 0)
        weight = tl.where(is_before, tl.exp(apart), 0)
        scores = tl.dot(q, tl.trans(k), input_precision="ieee") * weight
        y = tl.exp(c)[:, None] * tl.dot(q, state.to(dtype), input_precision="ieee")
        y += tl.dot(scores.to(dtype), v, input_precision="ieee")
        tl.store(y_ptr + t * H * P + p, y, mask=inside & (p < P))
        fading = (k * tl.exp(end - c)[:, None]).to(dtype)
        state = tl.exp(end) * state + tl.dot(tl.trans(fading), v, input_precision="ieee")


def _decay_scan_triton(q: Tensor, k: Tensor, v: Tensor, g: Tensor, reverse: bool = False) -> Tensor:
    (batch, length, heads, states), width = q.shape, v.shape[3]
    y = torch.empty(v.shape, dtype=torch.float32, device=v.device)
    if y.numel():
        # products of a tensor core have 16 on every side
        block_t, block_n, block_p = (
            max(16, triton.next_power_of_2(size)) for size in (length, states, width)
        )
        # products in float32 are of single numbers, and take many registers
        most_t, most_state = (PIECE, 4096) if q.dtype == torch.bfloat16 else (16, 1024)
        block_t, block_p = min(most_t, block_t), min(64, max(16, most_state // block_n), block_p)
        _decay_scan_kernel[(triton.cdiv(width, block_p), batch * heads)](
            q, k, v, g, y, length, heads, states, width,
            *q.stride(), *k.stride(), *v.stride(), *g.stride(),
            REVERSE=reverse, BLOCK_T=block_t, BLOCK_N=block_n, BLOCK_P=block_p,
            num_warps=8 if block_n * block_p >= 1024 else 4,
        )  # fmt: skip
    return y


def _draw(
    generator: torch.Generator, device: torch.device, batch: int, length: int, heads: int,
    states: int, width: int,
) -> tuple:  # fmt: skip
    draw = normals(generator, device)

    # so that a piece still matters two pieces later
    decays = -0.02 * torch.rand(batch, length, heads, generator=generator).to(device)
    return (
        draw(batch, length, heads, states), draw(batch, length, heads, states),
        draw(batch, length, heads, width), decays,
    )  # fmt: skip


def _cases(device: torch.device, _group_size: int) -> Iterator[Case]:
    generator = torch.Generator().manual_seed(0)
    draw = partial(_draw, generator, device)
    for reverse in (False, True):
        end = " reverse" if reverse else ""
        for shape in ((1, 1, 1, 1, 1), (2, 33, 3, 5, 7), (1, 159, 2, 16, 20), (1, 17, 2, 3, 150)):
            label = "x".join(map(str, shape)) + end
            yield Case(label, (*draw(*shape), reverse))
        q, k, v, g = draw(1, 70, 4, 9, 66)
        shared = q[:, :, :1].expand(-1, -1, 4, -1), k[:, :, :1].expand(-1, -1, 4, -1)
        yield Case(f"1x70x4x9x66 all heads alike{end}", (*shared, v, g, reverse))
        yield Case(f"1x70x4x9x66 forgets at once{end}", (q, k, v, g * 0 - 100, reverse))
        yield Case(f"1x70x4x9x66 forgets nothing{end}", (q, k, v, g * 0, reverse))
    q, k, v, g = (part.transpose(0, 1)[:, ::2] for part in draw(20, 3, 2, 6, 5))
    yield Case("3x10x2x6x5 strided", (q, k, v, g, False))
    yield Case("2x0x2x3x4 empty", (*draw(2, 0, 2, 3, 4), True))
    if device.type == "cuda":  # the interpreter's bf16 arithmetic is wrong
        *parts, g = draw(2, 700, 5, 64, 128)
        for reverse in (False, True):
            inputs = (*(part.bfloat16() for part in parts), g, reverse)
            yield Case(f"2x700x5x64x128 bf16{' reverse' if reverse else ''}", inputs)


def scan_in_bf16(q: Tensor, k: Tensor, v: Tensor, g: Tensor, reverse: bool) -> Tensor:
    """Attend with scores and decays rounded to bfloat16, as torch would without a kernel."""
    c = g.double().cumsum(1).transpose(1, 2)
    apart = c[..., :, None] - c[..., None, :]
    if reverse:
        apart = -apart
    ones = torch.ones(apart.shape[-2:], dtype=torch.bool, device=g.device)
    seen = ones.triu() if reverse else ones.tril()
    weight = apart.masked_fill(~seen, -torch.inf).exp().float()
    q, k, v = (part.transpose(1, 2) for part in (q, k, v))
    scores = ((q @ k.mT).float() * weight).to(q.dtype)
    return (scores @ v).transpose(1, 2)


def _timings(device: torch.device, _group_size: int) -> Iterator[Timing]:
    draw = partial(torch.randn, device=device, dtype=torch.bfloat16)
    q, k, v = draw(8, 4096, 1, 64), draw(8, 4096, 1, 64), draw(8, 4096, 16, 64)
    shared = q.expand(-1, -1, 16, -1), k.expand(-1, -1, 16, -1)
    inputs = *shared, v, -torch.rand(8, 4096, 16, device=device), False
    query, key, value = (part.transpose(1, 2).contiguous() for part in (*shared, v))
    attend = torch.nn.functional.scaled_dot_product_attention
    peer = partial(attend, query, key, value, is_causal=True)
    yield Timing("8x4096x16x64x64 bf16", inputs, peer=peer, peer_name="causal attention")


def _draw_decays(dice: Dice, *shape: int) -> Tensor:
    return dice.view(-dice.reals(*shape, dtype=torch.float32).square())


decay_scan = Operation(
    "decay_scan", _decay_scan_triton, _decay_scan_torch, decay_scan_reference, _cases,
    Gate(
        relative=1e-5, peer_slack=1.0,
        reason="float32 sums over the sequence; in bf16 scores and states are rounded, peers' too",
    ),
    {
        "q": Array("B, T, H, N"), "k": Array("B, T, H, N"), "v": Array("B, T, H, P"),
        "g": Array("B, T, H", FLOAT, values=_draw_decays), "reverse": Number((False, True)),
    },
    sizes={"B": (1, 2), "T": "m", "H": (1, 3), "P": "min(n, 70)", "N": (1, 9, 32)},
    peer=scan_in_bf16, timings=_timings,
)  # fmt: skip
"""Compute linear attention with decay.

Args:
    q: (B, T, H, N) float32 or bfloat16, any strides.
    k: like q.
    v: (B, T, H, P) in the dtype of q, any strides.
    g: (B, T, H) float32, logarithms of decays, not positive.
    reverse: whether to attend to later positions instead.

Returns:
    (B, T, H, P) float32.
"""
