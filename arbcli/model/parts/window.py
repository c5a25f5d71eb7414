"""Sliding-window attention: to the last W positions, and with `causal` False to as many after."""

import torch
from torch import Tensor
from torch.nn import functional

WIDTH_MULTIPLE = 8
"""Multiple of the head width that torch's flash attention supports without padding."""


def attend_in_window(
    q: Tensor, k: Tensor, v: Tensor, window: int, *, causal: bool = True
) -> Tensor:
    """Compute sliding-window attention.

    In bf16 on a GPU this is torch's flash attention kernel, which skips positions outside of the
    window; torch's public function would need a T x T mask. Elsewhere the sequence is split into
    pieces of W positions, which attend to themselves and their neighbours with a W x 2 W or W x 3 W
    mask.

    Args:
        q: (B, heads, T, d).
        k: like q.
        v: like q.
        window: W, smaller than T.
        causal: whether to exclude later positions.

    Returns:
        (B, heads, T, d).
    """
    if q.is_cuda and q.dtype == torch.bfloat16 and q.shape[-1] % WIDTH_MULTIPLE == 0:
        return _attend_by_flash(q, k, v, window, causal)
    batch, _, length, _ = q.shape
    pieces = -(-length // window)
    q, k, v = (functional.pad(part, (0, 0, 0, pieces * window - length)) for part in (q, k, v))
    q = q.unflatten(2, (pieces, window)).flatten(0, 1)  # (B * heads, pieces, W, d)
    k, v = (_neighbours(part, window, causal) for part in (k, v))
    query = torch.arange(window, device=q.device)[:, None] + window
    key = torch.arange(k.shape[2], device=q.device)
    seen = (key <= query) if causal else (key < query + window)
    place = torch.arange(-1, pieces - 1, device=q.device)[:, None, None] * window + key
    # padding attends to itself, as a row without keys would be 0 / 0
    exists = (place >= 0) & ((place < length) | (key == query))
    seen = (seen & (key > query - window) & exists)[None]
    y = functional.scaled_dot_product_attention(q, k, v, attn_mask=seen)
    return y.flatten(1, 2).unflatten(0, (batch, -1))[:, :, :length]


def _attend_by_flash(q: Tensor, k: Tensor, v: Tensor, window: int, causal: bool) -> Tensor:
    q, k, v = (part.transpose(1, 2) for part in (q, k, v))  # (B, T, heads, d), the kernel's layout
    length = q.shape[1]
    y, *_ = torch.ops.aten._flash_attention_forward(
        q, k, v, None, None, length, length, 0.0, causal, False,
        window_size_left=window - 1, window_size_right=0 if causal else window - 1,
    )  # fmt: skip
    return y.transpose(1, 2)


def _neighbours(x: Tensor, window: int, causal: bool) -> Tensor:
    """Concatenate each piece of (B, heads, n W, d) with the previous one: (B * heads, n, 2 W, d).

    If not causal, the next piece follows too: (B * heads, n, 3 W, d).
    """
    after = 0 if causal else window
    pieces = functional.pad(x, (0, 0, window, after)).unflatten(2, (-1, window)).flatten(0, 1)
    number = x.shape[2] // window
    return torch.cat([pieces[:, i : i + number] for i in range(2 if causal else 3)], dim=2)
