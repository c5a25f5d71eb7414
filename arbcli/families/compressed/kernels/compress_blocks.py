"""Inputs of compressed attention: normalised and rotated bytes, and one pooled entry per block.

Each byte has a vector r, a value v and a gate a per key head, of width d. n(x) is
x / sqrt(mean(x**2) + eps), R_t is the rotation by the angles of position t, and i runs over the m
bytes of block j:

    recent[t] = R_t n(r[t]),  still[j] = n(c),  entries[j] = R_(j m) still[j]
    c = sum over i of p[i] v[i],  p[i] = softmax over i of (a[i] + beta[i]), element by element

With dc the gradient of c, the gradient of v[i] is p[i] dc and that of a[i] is p[i] dc (v[i] - c);
the gradient of beta is the sum of the latter over blocks. `still` has no gradient: only an indexer
reads it.
"""

import torch
from torch import Tensor
from torch.nn import functional

from arbcli.kernels.attention import rotary_norm as rotary
from arbcli.kernels.runtime.operation import Operation, tl, triton


def _compress_blocks_torch(
    x: Tensor, beta: Tensor, cos: Tensor, sin: Tensor, heads: int, eps: float
) -> tuple[Tensor, Tensor, Tensor]:
    (_, length, width), m = x.shape, beta.shape[1]
    head, number = (width // 3 // heads,), length // m
    recent, values, gates = x.split(width // 3, dim=2)
    recent = functional.rms_norm(recent.unflatten(2, (heads, -1)).float(), head, eps=eps)
    cos, sin = cos[:, None], sin[:, None]
    recent = rotary.rotate(recent, cos, sin).to(x.dtype)
    values, gates = (part[:, : number * m].float() for part in (values, gates))
    share = (gates.unflatten(1, (number, m)) + beta.T).softmax(dim=2)
    mixed = (share * values.unflatten(1, (number, m))).sum(dim=2).unflatten(2, (heads, -1))
    still = functional.rms_norm(mixed, head, eps=eps).to(x.dtype)
    starts = [part[::m][:number] for part in (cos, sin)]
    return recent, rotary.rotate(still, *starts).to(x.dtype), still


def _compress_blocks_backward_torch(
    grad_recent: Tensor, grad_entries: Tensor, x: Tensor, beta: Tensor, cos: Tensor, sin: Tensor,
    heads: int, eps: float,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    leaf_x, leaf_beta = (part.detach().float().requires_grad_() for part in (x, beta))
    with torch.enable_grad():
        recent, entries, _ = _compress_blocks_torch(leaf_x, leaf_beta, cos, sin, heads, eps)
    grad_x, grad_beta = torch.autograd.grad(
        (recent, entries), (leaf_x, leaf_beta), (grad_recent, grad_entries), allow_unused=True
    )
    return grad_x.to(x.dtype), torch.zeros_like(beta) if grad_beta is None else grad_beta


def grad_beta(grad_x: Tensor, beta: Tensor) -> Tensor:
    """Sum the gate gradients of x, (B, T, 3 G d), over all blocks: (G d, m) float32, as `beta`."""
    (width, m), number = beta.shape, grad_x.shape[1] // beta.shape[1]
    grad_gates = grad_x[:, : number * m, 2 * width :].reshape(-1, m, width)
    return grad_gates.sum(dim=0, dtype=torch.float32).T.contiguous()


@triton.jit
def _rows_of(x_ptr, part, t, kv, offs, mask, stride_t, KV: tl.constexpr, HALF: tl.constexpr):
    """Load both halves of the vectors, values or gates of rows: [BLOCK_M, BLOCK_H] float32."""
    ptrs = x_ptr + t.to(tl.int64)[:, None] * stride_t + (part * KV + kv) * (2 * HALF) + offs
    return rotary.load_halves(ptrs, mask, HALF)


@triton.jit
def _shares(a, beta_ptr, base, i, offs, mask, M):
    """Compute the softmax over a block of one half of a head: [BLOCK_M, BLOCK_H]."""
    a += tl.load(beta_ptr + (base + offs) * M + i[:, None], mask=mask, other=0)
    a = tl.where(mask, a, -1e30)
    p = tl.where(mask, tl.exp(a - tl.max(a, axis=0)[None, :]), 0)
    return p / tl.maximum(tl.sum(p, axis=0), 1e-30)[None, :]


@triton.jit
def _compress_blocks_kernel(
    x_ptr, beta_ptr, cos_ptr, sin_ptr, recent_ptr, entries_ptr, still_ptr,
    T, M, E, eps, stride_xb, stride_xt,
    KV: tl.constexpr, HALF: tl.constexpr, BLOCK_H: tl.constexpr, BLOCK_M: tl.constexpr,
):  # fmt: skip
    WIDTH: tl.constexpr = 2 * HALF
    block, b = tl.program_id(0), (tl.program_id(1) // KV).to(tl.int64)
    kv = tl.program_id(1) % KV
    i, offs = tl.arange(0, BLOCK_M), tl.arange(0, BLOCK_H)[None, :]
    t = block * M + i
    mask = ((i < M) & (t < T))[:, None] & (offs < HALF)
    x_ptr += b * stride_xb
    dtype = x_ptr.dtype.element_ty
    # recent bytes: normalise and rotate
    r1, r2 = _rows_of(x_ptr, 0, t, kv, offs, mask, stride_xt, KV, HALF)
    r = rotary.inverse_rms(r1, r2, eps, HALF)[:, None]
    cos, sin = rotary.load_angles(cos_ptr, sin_ptr, t[:, None] * HALF + offs, mask)
    out = recent_ptr + ((b * T + t) * KV + kv)[:, None] * WIDTH + offs
    rotary.store_rotated(out, r1, r2, cos, sin, r, mask, HALF)
    if block < E:
        # pool the values of a full block, by softmax over its bytes for each element
        v1, v2 = _rows_of(x_ptr, 1, t, kv, offs, mask, stride_xt, KV, HALF)
        a1, a2 = _rows_of(x_ptr, 2, t, kv, offs, mask, stride_xt, KV, HALF)
        p1 = _shares(a1, beta_ptr, kv * WIDTH, i, offs, mask, M)
        p2 = _shares(a2, beta_ptr, kv * WIDTH + HALF, i, offs, mask, M)
        c1, c2 = tl.sum(p1 * v1, axis=0)[None, :], tl.sum(p2 * v2, axis=0)[None, :]
        # normalise the entry, round it, and rotate it by the first position of the block
        rc = rotary.inverse_rms(c1, c2, eps, HALF)[:, None]
        e1, e2 = (c1 * rc).to(dtype), (c2 * rc).to(dtype)
        at = ((b * E + block) * KV + kv) * WIDTH + offs
        half = offs < HALF
        rotary.store_halves(still_ptr + at, e1, e2, half, HALF)
        cos0 = tl.load(cos_ptr + block * M * HALF + offs, mask=half, other=0)
        sin0 = tl.load(sin_ptr + block * M * HALF + offs, mask=half, other=0)
        n1, n2 = e1.to(tl.float32), e2.to(tl.float32)
        rotary.store_rotated(entries_ptr + at, n1, n2, cos0, sin0, 1.0, half, HALF)


@triton.jit
def _unrotated(g1, g2, x1, x2, r, cos, sin, HALF: tl.constexpr):
    """Compute the gradient of rows before normalisation and rotation."""
    g1, g2 = rotary.rotate_back(g1, g2, cos, sin)
    return rotary.norm_backward(g1, g2, x1 * r[:, None], x2 * r[:, None], r, HALF)


@triton.jit
def _compress_blocks_backward_kernel(
    grad_recent_ptr, grad_entries_ptr, x_ptr, beta_ptr, cos_ptr, sin_ptr, grad_ptr,
    T, M, E, eps, stride_xb, stride_xt,
    KV: tl.constexpr, HALF: tl.constexpr, BLOCK_H: tl.constexpr, BLOCK_M: tl.constexpr,
):  # fmt: skip
    WIDTH: tl.constexpr = 2 * HALF
    block, b = tl.program_id(0), (tl.program_id(1) // KV).to(tl.int64)
    kv = tl.program_id(1) % KV
    i, offs = tl.arange(0, BLOCK_M), tl.arange(0, BLOCK_H)[None, :]
    t = block * M + i
    mask = ((i < M) & (t < T))[:, None] & (offs < HALF)
    x_ptr += b * stride_xb
    dtype = grad_ptr.dtype.element_ty
    # recent bytes: backward of rotation and norm
    r1, r2 = _rows_of(x_ptr, 0, t, kv, offs, mask, stride_xt, KV, HALF)
    r = rotary.inverse_rms(r1, r2, eps, HALF)
    cos, sin = rotary.load_angles(cos_ptr, sin_ptr, t[:, None] * HALF + offs, mask)
    rows = ((b * T + t) * KV + kv)[:, None] * WIDTH + offs
    g1, g2 = rotary.load_halves(grad_recent_ptr + rows, mask, HALF)
    g1, g2 = _unrotated(g1, g2, r1, r2, r, cos, sin, HALF)
    out = grad_ptr + (b * T + t)[:, None] * (3 * KV * WIDTH) + kv * WIDTH + offs
    rotary.store_halves(out, g1, g2, mask, HALF)
    out += KV * WIDTH
    if block < E:
        # recompute shares and entry of a full block
        v1, v2 = _rows_of(x_ptr, 1, t, kv, offs, mask, stride_xt, KV, HALF)
        a1, a2 = _rows_of(x_ptr, 2, t, kv, offs, mask, stride_xt, KV, HALF)
        p1 = _shares(a1, beta_ptr, kv * WIDTH, i, offs, mask, M)
        p2 = _shares(a2, beta_ptr, kv * WIDTH + HALF, i, offs, mask, M)
        c1, c2 = tl.sum(p1 * v1, axis=0)[None, :], tl.sum(p2 * v2, axis=0)[None, :]
        rc = rotary.inverse_rms(c1, c2, eps, HALF)
        half = offs < HALF
        at = ((b * E + block) * KV + kv) * WIDTH + offs
        # gradient of the pooled vector: backward of rotation and norm
        e1, e2 = rotary.load_halves(grad_entries_ptr + at, half, HALF)
        cos0 = tl.load(cos_ptr + block * M * HALF + offs, mask=half, other=0)
        sin0 = tl.load(sin_ptr + block * M * HALF + offs, mask=half, other=0)
        e1, e2 = _unrotated(e1, e2, c1, c2, rc, cos0, sin0, HALF)
        # gradients of values and gates: backward of the weighted sum and the softmax
        g1, g2 = p1 * e1, p2 * e2
        rotary.store_halves(out, g1, g2, mask, HALF)
        tl.store(out + KV * WIDTH, (g1 * (v1 - c1)).to(dtype), mask=mask)
        tl.store(out + KV * WIDTH + HALF, (g2 * (v2 - c2)).to(dtype), mask=mask)
    else:
        # the last block is not full: its values and gates have no gradient
        zero = tl.zeros((BLOCK_M, BLOCK_H), dtype=tl.float32)
        rotary.store_halves(out, zero, zero, mask, HALF)
        rotary.store_halves(out + KV * WIDTH, zero, zero, mask, HALF)


def _tile(x: Tensor, beta: Tensor, heads: int) -> dict[str, int]:
    half, block_m = x.shape[2] // 6 // heads, triton.next_power_of_2(beta.shape[1])
    block_h = triton.next_power_of_2(half)
    warps = min(16, max(1, block_m * block_h // 512))
    return {"KV": heads, "HALF": half, "BLOCK_H": block_h, "BLOCK_M": block_m, "num_warps": warps}


def _compress_blocks_triton(
    x: Tensor, beta: Tensor, cos: Tensor, sin: Tensor, heads: int, eps: float
) -> tuple[Tensor, Tensor, Tensor]:
    (x,) = rotary.dense_heads(x)
    (batch, length, width), m = x.shape, beta.shape[1]
    number, vector = length // m, (heads, width // 3 // heads)
    recent = torch.empty(batch, length, *vector, dtype=x.dtype, device=x.device)
    entries, still = (
        torch.empty(batch, number, *vector, dtype=x.dtype, device=x.device) for _ in range(2)
    )
    _compress_blocks_kernel[(triton.cdiv(length, m), batch * heads)](
        x, beta.contiguous(), cos.contiguous(), sin.contiguous(), recent, entries, still,
        length, m, number, eps, *x.stride()[:2], **_tile(x, beta, heads),
    )  # fmt: skip
    return recent, entries, still


def _compress_blocks_backward_triton(
    grad_recent: Tensor, grad_entries: Tensor, x: Tensor, beta: Tensor, cos: Tensor, sin: Tensor,
    heads: int, eps: float,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    (x,) = rotary.dense_heads(x)
    (batch, length, _), m = x.shape, beta.shape[1]
    number = length // m
    grad_x = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    _compress_blocks_backward_kernel[(triton.cdiv(length, m), batch * heads)](
        grad_recent.contiguous(), grad_entries.contiguous(), x, beta.contiguous(),
        cos.contiguous(), sin.contiguous(), grad_x, length, m, number, eps, *x.stride()[:2],
        **_tile(x, beta, heads),
    )  # fmt: skip
    return grad_x, grad_beta(grad_x, beta)


_WHERE = ("X % (6 * heads) == 0", "T > 0 and M > 0")
compress_blocks = Operation(
    "compress_blocks", _compress_blocks_triton, _compress_blocks_torch,
    "x: real[B, T, X]; beta: float32[X // 3, M]; cos, sin: float32[T, X // 6 // heads]; heads; eps",
    where=_WHERE,
)  # fmt: skip
"""Compute the normalised bytes and the pooled entries of a text that starts at position 0.

Args:
    x: (B, T, 3 G d) float32 or bfloat16, d even: projected vectors, values and gates of the heads.
    beta: (G d, m) float32.
    cos: (T, d / 2) float32.
    sin: like `cos`.
    heads: G.
    eps: added to mean squares.

Returns:
    Bytes (B, T, G, d), entries (B, T // m, G, d), and entries before rotation, in the dtype
    of x; computed in float32.
"""
compress_blocks_backward = Operation(
    "compress_blocks_backward", _compress_blocks_backward_triton, _compress_blocks_backward_torch,
    "grad_recent: any_real[B, T, heads, X // 3 // heads]; "
    "grad_entries: any_real[B, T // M, heads, X // 3 // heads]; x: real[B, T, X]; "
    "beta: float32[X // 3, M]; cos, sin: float32[T, X // 6 // heads]; heads; eps",
    where=_WHERE,
)  # fmt: skip
"""Propagate gradients back through `compress_blocks`.

`grad_recent` is the gradient of the bytes, (B, T, G, d) float32 or bfloat16, and `grad_entries`
that of the entries, (B, T // m, G, d). The other arguments are those of `compress_blocks`.

Returns:
    Gradients of x, in its dtype, and of beta, float32; kernels sum gate gradients after rounding
    to the dtype of x.
"""
