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

import torch
from torch import Tensor

from arbcli.kernels.runtime.operation import Operation, tl, triton

PIECE = 64
"""Positions that are computed together."""


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
        outputs = (qs @ ks.mT * weight) @ vs
        if start:
            outputs = outputs + c.exp()[..., None] * (qs @ state)
        y[:, piece] = outputs.transpose(1, 2)
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
    # base pointers of a head; a program has BLOCK_P columns of v and of the state
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
        # positions of a piece, in the direction of the scan
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
        # decay between pairs of positions of the piece
        c, end = tl.cumsum(g, axis=0), tl.sum(g, axis=0)
        apart = tl.where(is_before, c[:, None] - c[None, :], 0)
        weight = tl.where(is_before, tl.exp(apart), 0)
        scores = tl.dot(q, tl.trans(k), input_precision="ieee") * weight
        # what earlier pieces contribute through the state, then the piece itself
        y = tl.exp(c)[:, None] * tl.dot(q, state.to(dtype), input_precision="ieee")
        y += tl.dot(scores.to(dtype), v, input_precision="ieee")
        tl.store(y_ptr + t * H * P + p, y, mask=inside & (p < P))
        # carry the state to the end of the piece
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


decay_scan = Operation(
    "decay_scan", _decay_scan_triton, _decay_scan_torch,
    "q, k: real[B, T, H, N]; v: real[B, T, H, P]; g: float32[B, T, H]; reverse",
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
