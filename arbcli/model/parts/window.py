"""Attention of every position to itself and the W - 1 before it."""

import torch
from torch import Tensor
from torch.nn import functional

WIDTH_MULTIPLE = 8
"""Widths of heads that torch's flash attention takes as they are."""


def attend_in_window(q: Tensor, k: Tensor, v: Tensor, window: int) -> Tensor:
    """Attend causally to the last positions.

    On a GPU, in bf16, this is torch's flash attention, whose kernel skips what is outside. torch's
    public function would not: it takes a mask of T x T. Elsewhere positions are cut into pieces of
    W, and each piece attends to itself and the one before, under a mask of W x 2 W.

    Args:
        q: (B, heads, T, d).
        k: like q.
        v: like q.
        window: W, smaller than T.

    Returns:
        (B, heads, T, d).
    """
    if q.is_cuda and q.dtype == torch.bfloat16 and q.shape[-1] % WIDTH_MULTIPLE == 0:
        return _attend_by_flash(q, k, v, window)
    batch, _, length, _ = q.shape
    pieces = -(-length // window)
    q, k, v = (functional.pad(part, (0, 0, 0, pieces * window - length)) for part in (q, k, v))
    q = q.unflatten(2, (pieces, window)).flatten(0, 1)  # (B * heads, pieces, W, d)
    k, v = (_with_piece_before(part, window) for part in (k, v))
    query = torch.arange(window, device=q.device)[:, None] + window
    key = torch.arange(2 * window, device=q.device)
    seen = (key <= query) & (key > query - window)
    # before the first piece there is none
    is_first = torch.arange(pieces, device=q.device)[:, None, None] == 0
    seen = (seen & ~(is_first & (key < window)))[None]
    y = functional.scaled_dot_product_attention(q, k, v, attn_mask=seen)
    return y.flatten(1, 2).unflatten(0, (batch, -1))[:, :, :length]


def _attend_by_flash(q: Tensor, k: Tensor, v: Tensor, window: int) -> Tensor:
    q, k, v = (part.transpose(1, 2) for part in (q, k, v))  # (B, T, heads, d), as the kernel wants
    length = q.shape[1]
    y, *_ = torch.ops.aten._flash_attention_forward(
        q, k, v, None, None, length, length, 0.0, True, False,
        window_size_left=window - 1, window_size_right=0,
    )  # fmt: skip
    return y.transpose(1, 2)


def _with_piece_before(x: Tensor, window: int) -> Tensor:
    """Turn (B, heads, n W, d) into (B * heads, n, 2 W, d): each piece after the one before."""
    pieces = functional.pad(x, (0, 0, window, 0)).unflatten(2, (-1, window)).flatten(0, 1)
    return torch.cat((pieces[:, :-1], pieces[:, 1:]), dim=2)
