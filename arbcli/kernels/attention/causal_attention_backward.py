"""Gradient of causal attention, bitwise deterministic.

With s = q . k / sqrt(d), p = exp(s - log), y = sum of p v and the gradient g of y, of each query:

    grad_v[n] = sum over m of p[m, n] g[m]
    e[m, n] = p[m, n] (g[m] . v[n] - g[m] . y[m])
    grad_q[m] = sum over n of e[m, n] k[n] / sqrt(d)
    grad_k[n] = sum over m of e[m, n] q[m] / sqrt(d)

Programs for queries and programs for keys both compute p and e, so no two programs add to the same
gradient: seven products instead of five, and no matrix of the size of p is stored. A head of keys
may serve a group of query heads, whose contributions one program adds up.
Source: T. Dao, "FlashAttention-2", https://arxiv.org/abs/2307.08691, algorithm 2.
"""

import torch
from torch import Tensor

from arbcli.kernels.attention.rotary_norm import load_angles, store_rotated_back
from arbcli.kernels.rows.dropout import mask_constants
from arbcli.kernels.runtime._triton import described, tl, triton
from arbcli.kernels.runtime.backend import capability
from arbcli.kernels.runtime.operation import Operation
from arbcli.kernels.update.random_bits import random_words

LOG2_E = 1.4426950408889634
HOPPER = (9, 0)
"""Compute capability for which the tile sizes were tuned."""
MAX_TOGETHER, WIDEST_TOGETHER = 4, 64
"""Maximum blocks of queries, and width of a head, for which one launch has all programs."""
REGISTERS = 168
"""Registers of a thread for such a width, for three programs on a processor."""


def causal_attention_backward_torch(
    grad_y: Tensor, q: Tensor, k: Tensor, v: Tensor, y: Tensor, logs: Tensor,
    factors: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """Compute `causal_attention_backward`, one text at a time.

    `factors`, (B, heads, T, T) float32, are those by which dropout multiplied the weights.
    """
    grads = split_heads(new_gradients(q, k.shape[1]), k.shape[1])
    scale, group = q.shape[3] ** -0.5, q.shape[1] // k.shape[1]
    for text, (*places, g, query, key, value, result, log) in enumerate(
        zip(*grads, grad_y, q, k, v, y, logs, strict=True)
    ):
        g, query = g.float(), query.float()
        key, value = (part.float().repeat_interleave(group, dim=0) for part in (key, value))
        kept = p = torch.exp(query @ key.mT * scale - log[..., None]).tril()
        grad_p = g @ value.mT
        if factors is not None:
            kept, grad_p = p * factors[text], grad_p * factors[text]
        e = p * (grad_p - (g * result).sum(dim=-1, keepdim=True))
        parts = e @ key * scale, e.mT @ query * scale, kept.mT @ g
        for place, part in zip(places, parts, strict=True):
            place.copy_(part.unflatten(0, (len(place), -1)).sum(dim=1))
    return grads


def new_gradients(q: Tensor, kv: int) -> Tensor:
    """Allocate the gradients of q, and of `kv` heads of k and of v: (B, T, heads + 2 kv, d)."""
    batch, heads, length, width = q.shape
    return torch.empty(batch, length, heads + 2 * kv, width, dtype=q.dtype, device=q.device)


def split_heads(grads: Tensor, kv: int) -> tuple[Tensor, Tensor, Tensor]:
    """View a buffer of `new_gradients` as gradients of q, k and v, (B, their heads, T, d)."""
    q, k, v = grads.transpose(1, 2).split([grads.shape[2] - 2 * kv, kv, kv], dim=1)
    return q, k, v


@triton.jit
def _load_rows(desc, b, h, first, ROWS: tl.constexpr, D: tl.constexpr):
    """Load rows of a head, [ROWS, D]; zeros beyond the last row."""
    return desc.load([b, h, first, 0]).reshape(ROWS, D)


@triton.jit
def _store_rows(
    grads_ptr, values, b, head, first, T, num_heads, ROWS: tl.constexpr, D: tl.constexpr
):  # fmt: skip
    """Store rows, [ROWS, D], of one of the heads of q, k and v."""
    t = first + tl.arange(0, ROWS)
    row = (b.to(tl.int64) * T + t) * num_heads + head
    ptrs = grads_ptr + row[:, None] * D + tl.arange(0, D)[None, :]
    tl.store(ptrs, values.to(grads_ptr.dtype.element_ty), mask=(t < T)[:, None])


@triton.jit
def _store_turned(
    grads_ptr, values, y_desc, r_ptr, cos_ptr, sin_ptr, b, h, first, part, T, H,
    ROWS: tl.constexpr, D: tl.constexpr,
):  # fmt: skip
    """Store the gradient of these queries or keys before `rotary_norm_`."""
    t, offs_h = first + tl.arange(0, ROWS), tl.arange(0, D // 2)[None, :]
    known, token = t < T, b.to(tl.int64) * T + t
    # backward of the norm: project the gradient off y, times the inverse RMS
    y = _load_rows(y_desc, b, h, first, ROWS, D).to(tl.float32)
    r = tl.load(r_ptr + (token * 2 + part) * H + h, mask=known, other=0)[:, None]
    values = (values - y * (tl.sum(y * values, axis=1) / D)[:, None]) * r
    # backward of the rotation: rotate by the negative angle
    one, other = tl.split(values.reshape(ROWS, 2, D // 2).permute(0, 2, 1))
    table, mask = t.to(tl.int64)[:, None] * (D // 2) + offs_h, known[:, None]
    cos, sin = load_angles(cos_ptr, sin_ptr, table, mask)
    ptrs = grads_ptr + ((token * 3 + part) * H + h)[:, None] * D + offs_h
    store_rotated_back(ptrs, one, other, cos, sin, mask, D // 2)


@triton.jit
def _store_gradient(
    grads_ptr, values, y_desc, r_ptr, cos_ptr, sin_ptr, b, h, first, part, T, H,
    GROUP: tl.constexpr, ROWS: tl.constexpr, D: tl.constexpr, TURNED: tl.constexpr,
):  # fmt: skip
    """Store the gradient of these queries or keys; if `TURNED`, that before `rotary_norm_`."""
    if TURNED:
        _store_turned(
            grads_ptr, values, y_desc, r_ptr, cos_ptr, sin_ptr, b, h, first, part, T, H, ROWS, D
        )
    else:
        _store_rows(grads_ptr, values, b, part * H + h, first, T, H + H // GROUP * 2, ROWS, D)


@triton.jit
def drop_weights(x, key_ptr, rows, columns, THRESHOLD: tl.constexpr, FACTOR: tl.constexpr):
    """Drop attention weights, or their gradients, as `arbcli.kernels.rows.dropout` does.

    Args:
        x: (queries, keys) or (keys, queries) float32.
        key_ptr: key of the mask.
        rows: number of each query among those of all heads and texts; broadcast against `columns`.
        columns: position of each key.
        THRESHOLD: smallest word that is kept, minus 2**31; None drops nothing.
        FACTOR: factor of what is kept.
    """
    if THRESHOLD is not None:  # a branch, as what follows a return is compiled, too
        words = random_words(tl.load(key_ptr), rows, columns).to(tl.int32, bitcast=True)
        x = tl.where((words ^ -2147483648) >= THRESHOLD, x * FACTOR, 0.0)
    return x


@triton.jit
def _add_keys(
    grad, q, g, log, delta, k_desc, v_desc, key_ptr, b, h, m, row, begin, end, scale,
    D: tl.constexpr, BLOCK: tl.constexpr, MASKED: tl.constexpr, PRECISION: tl.constexpr,
    THRESHOLD: tl.constexpr, FACTOR: tl.constexpr,
):  # fmt: skip
    """Add the contributions of keys `begin` to `end` to the gradient of a block of queries."""
    for first in range(begin, end, BLOCK):
        # attention weights again, from the logarithm of their sum
        k = _load_rows(k_desc, b, h, first, BLOCK, D)
        p = tl.exp2(tl.dot(q, k.T, input_precision=PRECISION) * scale - log[:, None])
        if MASKED:
            n = first + tl.arange(0, BLOCK)
            p = tl.where(n[None, :] <= m[:, None], p, 0)
        # gradient of the weights, through the mask of dropout
        v = _load_rows(v_desc, b, h, first, BLOCK, D)
        grad_p = tl.dot(g, v.T, input_precision=PRECISION)
        places = first + tl.arange(0, BLOCK)
        grad_p = drop_weights(
            grad_p, key_ptr, (row + m)[:, None], places[None, :], THRESHOLD, FACTOR
        )
        # backward of the softmax, then of the scores
        e = p * (grad_p - delta[:, None])
        grad = tl.dot(e.to(k.dtype), k, grad, input_precision=PRECISION)
    return grad


@triton.jit
def _delta(g, y):
    """Sum g * y over the width, [ROWS]."""
    return tl.sum(g.to(tl.float32) * y.to(tl.float32), axis=1)


@triton.jit
def _queries(
    grad_y_desc, q_desc, k_desc, v_desc, y_desc, logs_ptr, log2_ptr, delta_ptr, grads_ptr,
    r_ptr, cos_ptr, sin_ptr, key_ptr, first, h, b, T, H, padded, scale, log2_e,
    GROUP: tl.constexpr, D: tl.constexpr, BLOCK: tl.constexpr, PRECISION: tl.constexpr,
    TURNED: tl.constexpr, THRESHOLD: tl.constexpr, FACTOR: tl.constexpr,
):  # fmt: skip
    """Compute the gradient of a block of queries; store `log2` and `delta` for the keys."""
    m = first + tl.arange(0, BLOCK)
    offset = b.to(tl.int64) * H + h
    q = _load_rows(q_desc, b, h, first, BLOCK, D)
    g = _load_rows(grad_y_desc, b, h, first, BLOCK, D)
    # sums that every pair of query and key needs; programs for keys load them
    delta = _delta(g, _load_rows(y_desc, b, h, first, BLOCK, D))
    log = tl.load(logs_ptr + offset * T + m, mask=m < T, other=0) * log2_e
    tl.store(delta_ptr + offset * padded + m, delta)
    tl.store(log2_ptr + offset * padded + m, log)
    grad = tl.zeros((BLOCK, D), dtype=tl.float32)
    # keys before the block are all visible
    grad = _add_keys(
        grad, q, g, log, delta, k_desc, v_desc, key_ptr, b, h // GROUP, m, offset * T, 0, first,
        scale * log2_e, D, BLOCK, False, PRECISION, THRESHOLD, FACTOR,
    )  # fmt: skip
    # keys of the block itself are masked
    grad = _add_keys(
        grad, q, g, log, delta, k_desc, v_desc, key_ptr, b, h // GROUP, m, offset * T, first,
        first + BLOCK, scale * log2_e, D, BLOCK, True, PRECISION, THRESHOLD, FACTOR,
    )  # fmt: skip
    _store_gradient(
        grads_ptr, grad * scale, q_desc, r_ptr, cos_ptr, sin_ptr, b, h, first, 0, T, H, GROUP,
        BLOCK, D, TURNED,
    )  # fmt: skip


@triton.jit
def _queries_kernel(
    grad_y_desc, q_desc, k_desc, v_desc, y_desc, logs_ptr, log2_ptr, delta_ptr, grads_ptr,
    r_ptr, cos_ptr, sin_ptr, key_ptr, T, H, padded, scale, log2_e,
    GROUP: tl.constexpr, D: tl.constexpr, BLOCK: tl.constexpr, PRECISION: tl.constexpr,
    TURNED: tl.constexpr, THRESHOLD: tl.constexpr, FACTOR: tl.constexpr,
):  # fmt: skip
    """Compute the gradient of a block of queries, and `delta`, their sum of g * y, for the keys."""
    first = (tl.num_programs(0) - 1 - tl.program_id(0)) * BLOCK  # blocks with the most keys first
    _queries(
        grad_y_desc, q_desc, k_desc, v_desc, y_desc, logs_ptr, log2_ptr, delta_ptr, grads_ptr,
        r_ptr, cos_ptr, sin_ptr, key_ptr, first, tl.program_id(1), tl.program_id(2), T, H, padded,
        scale, log2_e, GROUP, D, BLOCK, PRECISION, TURNED, THRESHOLD, FACTOR,
    )  # fmt: skip


@triton.jit
def _add_queries(
    grad_k, grad_v, k, v, grad_y_desc, q_desc, y_desc, log_ptr, delta_ptr, key_ptr, b, h, n, row,
    begin, T, scale, log2_e, D: tl.constexpr, BLOCK: tl.constexpr, PRECISION: tl.constexpr,
    KEPT: tl.constexpr, THRESHOLD: tl.constexpr, FACTOR: tl.constexpr,
):  # fmt: skip
    """Add the contributions of queries from `begin` on to the gradients of keys and values.

    All are masked: a loop of its own for later queries, which see all of these keys, is slower.
    """
    for first in range(begin, T, BLOCK):
        m = first + tl.arange(0, BLOCK)
        q = _load_rows(q_desc, b, h, first, BLOCK, D)
        if KEPT:  # noqa: SIM108 (of constants, triton compiles one branch of a statement only)
            log = tl.load(log_ptr + m)
        else:
            log = tl.load(log_ptr + m, mask=m < T, other=0) * log2_e
        # attention weights again, transposed: [keys, queries]
        p = tl.exp2(tl.dot(k, q.T, input_precision=PRECISION) * scale - log[None, :])
        p = tl.where(n[:, None] <= m[None, :], p, 0)
        # gradient of the values: the dropped weights times that of the outputs
        g = _load_rows(grad_y_desc, b, h, first, BLOCK, D)  # zeros beyond the last query
        rows, columns = (row + m)[None, :], n[:, None]
        dropped = drop_weights(p, key_ptr, rows, columns, THRESHOLD, FACTOR)
        grad_v = tl.dot(dropped.to(g.dtype), g, grad_v, input_precision=PRECISION)
        if KEPT:
            delta = tl.load(delta_ptr + m)
        else:
            delta = _delta(g, _load_rows(y_desc, b, h, first, BLOCK, D))
        # gradient of the keys: backward of dropout, softmax and scores
        grad_p = tl.dot(v, g.T, input_precision=PRECISION)
        grad_p = drop_weights(grad_p, key_ptr, rows, columns, THRESHOLD, FACTOR)
        e = p * (grad_p - delta[None, :])
        grad_k = tl.dot(e.to(q.dtype), q, grad_k, input_precision=PRECISION)
    return grad_k, grad_v


@triton.jit
def _keys(
    grad_y_desc, q_desc, k_desc, v_desc, y_desc, logs_ptr, delta_ptr, grads_ptr,
    r_ptr, cos_ptr, sin_ptr, key_ptr, first, head, b, T, H, padded, scale, log2_e,
    GROUP: tl.constexpr, D: tl.constexpr, BLOCK: tl.constexpr, PRECISION: tl.constexpr,
    TURNED: tl.constexpr, KEPT: tl.constexpr, THRESHOLD: tl.constexpr, FACTOR: tl.constexpr,
):  # fmt: skip
    """Compute the gradients of a block of keys and values, over the group of their query heads.

    `logs_ptr` and `delta_ptr` have what programs for queries stored if `KEPT`, `padded` numbers a
    head; else `logs_ptr` has the logarithms of the forward, and `delta` is computed again.
    """
    n = first + tl.arange(0, BLOCK)
    k = _load_rows(k_desc, b, head, first, BLOCK, D)
    v = _load_rows(v_desc, b, head, first, BLOCK, D)
    grad_k = tl.zeros((BLOCK, D), dtype=tl.float32)
    grad_v = tl.zeros((BLOCK, D), dtype=tl.float32)
    for member in range(GROUP):
        h = head * GROUP + member
        offset = b.to(tl.int64) * H + h
        numbers = offset * (padded if KEPT else T)
        grad_k, grad_v = _add_queries(
            grad_k, grad_v, k, v, grad_y_desc, q_desc, y_desc, logs_ptr + numbers,
            delta_ptr + numbers, key_ptr, b, h, n, offset * T, first, T, scale * log2_e, log2_e,
            D, BLOCK, PRECISION, KEPT, THRESHOLD, FACTOR,
        )  # fmt: skip
    kv = H // GROUP
    _store_rows(grads_ptr, grad_v, b, H + kv + head, first, T, H + 2 * kv, BLOCK, D)
    _store_gradient(
        grads_ptr, grad_k * scale, k_desc, r_ptr, cos_ptr, sin_ptr, b, head, first, 1, T, H, GROUP,
        BLOCK, D, TURNED,
    )  # fmt: skip


@triton.jit
def _keys_kernel(
    grad_y_desc, q_desc, k_desc, v_desc, log2_ptr, delta_ptr, grads_ptr,
    r_ptr, cos_ptr, sin_ptr, key_ptr, T, H, padded, scale, log2_e,
    GROUP: tl.constexpr, D: tl.constexpr, BLOCK: tl.constexpr, PRECISION: tl.constexpr,
    TURNED: tl.constexpr, THRESHOLD: tl.constexpr, FACTOR: tl.constexpr,
):  # fmt: skip
    """Compute the gradients of a block of keys and values; the first ones have the most queries."""
    _keys(
        grad_y_desc, q_desc, k_desc, v_desc, grad_y_desc, log2_ptr, delta_ptr, grads_ptr,
        r_ptr, cos_ptr, sin_ptr, key_ptr, tl.program_id(0) * BLOCK, tl.program_id(1),
        tl.program_id(2), T, H, padded, scale, log2_e, GROUP, D, BLOCK, PRECISION, TURNED, True,
        THRESHOLD, FACTOR,
    )  # fmt: skip


@triton.jit
def _both_kernel(
    grad_y_desc, q_desc, k_desc, v_desc, y_desc, logs_ptr, log2_ptr, delta_ptr, grads_ptr,
    r_ptr, cos_ptr, sin_ptr, key_ptr, T, H, padded, scale, log2_e,
    GROUP: tl.constexpr, D: tl.constexpr, BLOCK: tl.constexpr, PRECISION: tl.constexpr,
    TURNED: tl.constexpr, THRESHOLD: tl.constexpr, FACTOR: tl.constexpr,
):  # fmt: skip
    """Compute the gradient of a block of keys and values, or of a block of queries.

    Programs for queries store `delta` though no other program reads it: the compiler then sums it
    in the same order for queries as for keys.
    """
    block, blocks = tl.program_id(0), tl.num_programs(0) // 2
    h, b = tl.program_id(1), tl.program_id(2)
    if block < blocks:
        _keys(
            grad_y_desc, q_desc, k_desc, v_desc, y_desc, logs_ptr, logs_ptr, grads_ptr,
            r_ptr, cos_ptr, sin_ptr, key_ptr, block * BLOCK, h, b, T, H, padded, scale, log2_e,
            GROUP, D, BLOCK, PRECISION, TURNED, False, THRESHOLD, FACTOR,
        )  # fmt: skip
        return
    _queries(
        grad_y_desc, q_desc, k_desc, v_desc, y_desc, logs_ptr, log2_ptr, delta_ptr, grads_ptr,
        r_ptr, cos_ptr, sin_ptr, key_ptr, (2 * blocks - 1 - block) * BLOCK, h, b, T, H, padded,
        scale, log2_e, GROUP, D, BLOCK, PRECISION, TURNED, THRESHOLD, FACTOR,
    )  # fmt: skip


def _tiles(q: Tensor) -> tuple[int, int]:
    """Choose the rows per program, by the GPU's shared memory, and the pipeline stages for keys."""
    if q.dtype == torch.float32:
        return 16, 2
    if capability(q) != HOPPER:
        return 32, 2
    return 64, 3 if q.shape[3] <= 64 else 2


def launch_backward(
    grads: Tensor, inputs: tuple[Tensor, ...], logs: Tensor,
    turned: tuple[Tensor, Tensor, Tensor] | None = None,
    dropped: tuple[Tensor, float] | None = None,
) -> None:  # fmt: skip
    """Launch the programs for queries and for keys.

    Args:
        grads: buffer of the gradients of q, k and v, contiguous: see `new_gradients`.
        inputs: grad_y, q, k, v and y of `causal_attention_backward`.
        logs: as in `causal_attention_backward`.
        turned: r, cosines and sines of the `rotary_norm_` that computed q and k; the gradients
            are then those of its input.
        dropped: key, an int32 scalar tensor, and rate of the dropout of attention weights; None
            drops nothing.
    """
    _, q, k, *_ = inputs
    batch, heads, length, width = q.shape
    kv = k.shape[1]
    if not q.numel():
        return
    block, stages_of_keys = _tiles(q)
    blocks = triton.cdiv(length, block)
    parts = [described(_readable(part), [1, 1, block, width]) for part in inputs]
    precision = "ieee" if q.dtype == torch.float32 else "tf32"
    r, cos, sin = turned or (logs, logs, logs)
    chosen = {
        "GROUP": heads // kv, "D": width, "BLOCK": block, "PRECISION": precision,
        "TURNED": turned is not None,
    }  # fmt: skip
    key, rate = dropped or (logs, None)
    chosen |= {"THRESHOLD": None, "FACTOR": None} if rate is None else mask_constants(rate)
    padded = blocks * block  # key programs read whole blocks of queries
    log2, delta = torch.empty(2, batch, heads, padded, dtype=torch.float32, device=q.device)
    others = r, cos, sin, key, length, heads, padded, width**-0.5, LOG2_E
    narrow = width <= WIDEST_TOGETHER
    registers = REGISTERS if narrow and q.dtype == torch.bfloat16 else None
    if narrow and blocks <= MAX_TOGETHER and kv == heads:
        _both_kernel[2 * blocks, heads, batch](
            *parts, logs, log2, delta, grads, *others, **chosen, num_warps=4, num_stages=2,
            maxnreg=registers,
        )  # fmt: skip
        return
    _queries_kernel[blocks, heads, batch](
        *parts, logs, log2, delta, grads, *others, **chosen, num_warps=4, num_stages=2
    )
    _keys_kernel[blocks, kv, batch](
        *parts[:4], log2, delta, grads, *others, **chosen, num_warps=4,
        num_stages=stages_of_keys, maxnreg=registers,
    )  # fmt: skip


def _causal_attention_backward_triton(
    grad_y: Tensor, q: Tensor, k: Tensor, v: Tensor, y: Tensor, logs: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    kv = k.shape[1]
    grads = new_gradients(q, kv)
    launch_backward(grads, (grad_y, q, k, v, y), logs)
    return split_heads(grads, kv)


def _readable(x: Tensor) -> Tensor:
    """Copy a tensor that descriptors cannot read: rows that are not aligned, or have stride 0."""
    aligned = all(stride and stride * x.itemsize % 16 == 0 for stride in x.stride()[:3])
    fits = aligned and x.stride(3) == 1 and x.data_ptr() % 16 == 0
    return x if fits else x.clone(memory_format=torch.contiguous_format)


def flash_attention_backward(
    grad_y: Tensor, q: Tensor, k: Tensor, v: Tensor, y: Tensor, logs: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """Compute `causal_attention_backward` with torch's flash attention, on a GPU in bfloat16.

    In torch's deterministic mode its bits are the same in every run.
    """
    length, nothing = q.shape[2], logs  # seed and offset of dropout, which is 0
    return torch.ops.aten._scaled_dot_product_flash_attention_backward(
        grad_y, q, k, v, y, logs, None, None, length, length, 0.0, True, nothing, nothing
    )


causal_attention_backward = Operation(
    "causal_attention_backward", _causal_attention_backward_triton, causal_attention_backward_torch,
    "grad_y, q: real[B, H, T, D]; k, v: real[B, KV, T, D]; y: real[B, H, T, D]; "
    "logs: float32[B, H, T] dense",
    where=("16 <= D <= 128 and D & (D - 1) == 0", "H % max(KV, 1) == 0"),
)  # fmt: skip
"""Compute the gradients of causal attention with scores divided by sqrt(d).

Args:
    grad_y: (B, heads, T, d) bfloat16 or float32, d a power of two from 16 to 128, any strides.
    q: likewise.
    k: (B, kv, T, d), likewise; head n of it serves query heads n * heads / kv to the next.
    v: like k.
    y: like q, the result of attention.
    logs: (B, heads, T) float32, contiguous: log-sum-exp of the scores of each query.

Returns:
    Gradients of q, k and v, like them: parts of one tensor (B, T, heads + 2 kv, d).
"""
