"""Attention of every position to itself and the W - 1 before it, and as many after it or none."""

import torch
from torch import Tensor
from torch.nn import functional

WIDTH_MULTIPLE = 8
"""Widths of heads that torch's flash attention takes as they are."""


def attend_in_window(
    q: Tensor, k: Tensor, v: Tensor, window: int, *, causal: bool = True
) -> Tensor:
    """Attend to the nearest positions.

    On a GPU, in bf16, this is torch's flash attention, whose kernel skips what is outside. torch's
    public function would not: it takes a mask of T x T. Elsewhere positions are cut into pieces of
    W, and each piece attends to itself and its neighbours, under a mask of W x 2 W or W x 3 W.

    Args:
        q: (B, heads, T, d).
        k: like q.
        v: like q.
        window: W, smaller than T.
        causal: whether positions after it are left out.

    Returns:
        (B, heads, T, d).
    """
    if q.is_cuda and q.dtype == torch.bfloat16 and q.shape[-1] % WIDTH_MULTIPLE == 0:
        return _attend_by_flash(q, k, v, window, causal)
    batch, _, length, _ = q.shape
    pieces = -(-length // window)
    q, k, v = (functional.pad(part, (0, 0, 0, pieces * window - length)) for part in (q, k, v))
    q = q.unflatten(2, (pieces, window)).flatten(0, 1)  # (B * heads, pieces, W, d)
    k, v = (_with_neighbours(part, window, causal) for part in (k, v))
    query = torch.arange(window, device=q.device)[:, None] + window
    key = torch.arange(k.shape[2], device=q.device)
    seen = (key <= query) if causal else (key < query + window)
    place = torch.arange(-1, pieces - 1, device=q.device)[:, None, None] * window + key
    # what is padded sees itself, or nothing would be divided by nothing
    exists = (place >= 0) & ((place < length) | (key == query))
    seen = (seen & (key > query - window) & exists)[None]
    y = functional.scaled_dot_product_attention(q, k, v, attn_mask=seen)
    return y.flatten(1, 2).unflatten(0, (batch, -1))[:, :, :length]


def _attend_by_flash(q: Tensor, k: Tensor, v: Tensor, window: int, causal: bool) -> Tensor:
    q, k, v = (part.transpose(1, 2) for part in (q, k, v))  # (B, T, heads, d), as the kernel wants
    length = q.shape[1]
    y, *_ = torch.ops.aten._flash_attention_forward(
        q, k, v, None, None, length, length, 0.0, causal, False,
        window_size_left=window - 1, window_size_right=0 if causal else window - 1,
    )  # fmt: skip
    return y.transpose(1, 2)


def _with_neighbours(x: Tensor, window: int, causal: bool) -> Tensor:
    """Turn (B, heads, n W, d) into (B * heads, n, 2 W or 3 W, d): each piece after the one before.

    Unless it is causal, the one after it follows.
    """
    after = 0 if causal else window
    pieces = functional.pad(x, (0, 0, window, after)).unflatten(2, (-1, window)).flatten(0, 1)
    number = x.shape[2] // window
    return torch.cat([pieces[:, i : i + number] for i in range(2 if causal else 3)], dim=2)
