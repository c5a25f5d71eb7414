"""A short causal convolution of every channel: y[t, d] = sum over i of w[d, i] x[t - W + 1 + i, d].

x is zero before the first position. `reverse` uses later positions, x[t + W - 1 - i, d], which
computes the gradient of x.
"""

from collections.abc import Iterator
from functools import partial

import torch
from torch import Tensor
from torch.nn import functional

from arbcli.kernels.runtime._triton import tl, triton
from arbcli.kernels.runtime.arguments import FLOAT, Array, Number
from arbcli.kernels.runtime.inputs import normals
from arbcli.kernels.runtime.operation import Case, Gate, Operation, Timing, cases_of
from arbcli.kernels.timed import Timed

MOST_TAPS = 8


def causal_conv_reference(x: Tensor, w: Tensor, reverse: bool) -> Tensor:
    """Compute the reference result of `causal_conv`, a position and a tap at a time in float64."""
    y = torch.zeros(x.shape, dtype=torch.float64, device=x.device)
    length, taps = x.shape[1], w.shape[1]
    for t in range(length):
        for i in range(taps):
            source = t + taps - 1 - i if reverse else t - taps + 1 + i
            if 0 <= source < length:
                y[:, t] += w[:, i].double() * x[:, source].double()
    return y


def causal_conv_grad_w_reference(grad_y: Tensor, x: Tensor, taps: int) -> Tensor:
    """Compute the reference result of `causal_conv_grad_w`, a position and a tap at a time."""
    grad = torch.zeros(x.shape[2], taps, dtype=torch.float64, device=x.device)
    for t in range(x.shape[1]):
        for i in range(taps):
            if t - taps + 1 + i >= 0:
                grad[:, i] += (grad_y[:, t].double() * x[:, t - taps + 1 + i].double()).sum(dim=0)
    return grad


def _shifted(x: Tensor, taps: int, reverse: bool) -> Iterator[Tensor]:
    """Return the input of each tap, shifted."""
    ends = (0, 0, 0, taps - 1) if reverse else (0, 0, taps - 1, 0)
    padded = functional.pad(x, ends)
    for i in range(taps):
        start = taps - 1 - i if reverse else i
        yield padded[:, start : start + x.shape[1]].float()


def _causal_conv_torch(x: Tensor, w: Tensor, reverse: bool = False) -> Tensor:
    y = torch.zeros(x.shape, dtype=torch.float32, device=x.device)
    for tap, part in zip(w.unbind(1), _shifted(x, w.shape[1], reverse), strict=True):
        y += tap * part
    return y.to(x.dtype)


def _causal_conv_grad_w_torch(grad_y: Tensor, x: Tensor, taps: int) -> Tensor:
    grads = [(grad_y.float() * part).sum(dim=(0, 1)) for part in _shifted(x, taps, False)]
    return torch.stack(grads, dim=1)


@triton.jit
def _causal_conv_kernel(
    x_ptr, w_ptr, y_ptr,
    T, D, stride_xb, stride_xt, stride_xd, stride_wd, stride_wi,
    TAPS: tl.constexpr, REVERSE: tl.constexpr, BLOCK_T: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    b = tl.program_id(2).to(tl.int64)
    t = (tl.program_id(0) * BLOCK_T + tl.arange(0, BLOCK_T)).to(tl.int64)[:, None]
    d = (tl.program_id(1) * BLOCK_D + tl.arange(0, BLOCK_D)).to(tl.int64)[None, :]
    y = tl.zeros((BLOCK_T, BLOCK_D), dtype=tl.float32)
    for i in tl.static_range(TAPS):
        source = t + TAPS - 1 - i if REVERSE else t - TAPS + 1 + i
        mask = (source >= 0) & (source < T) & (d < D)
        x_ptrs = x_ptr + b * stride_xb + source * stride_xt + d * stride_xd
        x = tl.load(x_ptrs, mask=mask, other=0).to(tl.float32)
        y += x * tl.load(w_ptr + d * stride_wd + i * stride_wi, mask=d < D, other=0)
    tl.store(y_ptr + (b * T + t) * D + d, y.to(y_ptr.dtype.element_ty), mask=(t < T) & (d < D))


@triton.jit
def _causal_conv_grad_w_kernel(
    grad_y_ptr, x_ptr, grad_w_ptr,
    T, D, stride_gb, stride_gt, stride_gd, stride_xb, stride_xt, stride_xd,
    TAPS: tl.constexpr, BLOCK_T: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    b, i = tl.program_id(1).to(tl.int64), tl.program_id(2)
    d = (tl.program_id(0) * BLOCK_D + tl.arange(0, BLOCK_D)).to(tl.int64)[None, :]
    total = tl.zeros((BLOCK_T, BLOCK_D), dtype=tl.float32)
    for start in range(0, T, BLOCK_T):
        t = (start + tl.arange(0, BLOCK_T)).to(tl.int64)[:, None]
        mask = (t < T) & (d < D)
        grad_ptrs = grad_y_ptr + b * stride_gb + t * stride_gt + d * stride_gd
        grad = tl.load(grad_ptrs, mask=mask, other=0).to(tl.float32)
        source = t - TAPS + 1 + i
        x_ptrs = x_ptr + b * stride_xb + source * stride_xt + d * stride_xd
        total += grad * tl.load(x_ptrs, mask=mask & (source >= 0), other=0).to(tl.float32)
    grad_w = tl.sum(total, axis=0)[None, :]
    tl.store(grad_w_ptr + (b * D + d) * TAPS + i, grad_w, mask=d < D)


def _causal_conv_triton(x: Tensor, w: Tensor, reverse: bool = False) -> Tensor:
    batch, length, width = x.shape
    y = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    if y.numel():
        block_t, block_d = 16, 128
        grid = triton.cdiv(length, block_t), triton.cdiv(width, block_d), batch
        _causal_conv_kernel[grid](
            x, w, y, length, width, *x.stride(), *w.stride(),
            TAPS=w.shape[1], REVERSE=reverse, BLOCK_T=block_t, BLOCK_D=block_d,
        )  # fmt: skip
    return y


def _causal_conv_grad_w_triton(grad_y: Tensor, x: Tensor, taps: int) -> Tensor:
    batch, length, width = x.shape
    parts = torch.empty(batch, width, taps, dtype=torch.float32, device=x.device)
    if parts.numel():
        _causal_conv_grad_w_kernel[(triton.cdiv(width, 64), batch, taps)](
            grad_y, x, parts, length, width, *grad_y.stride(), *x.stride(),
            TAPS=taps, BLOCK_T=32, BLOCK_D=64,
        )  # fmt: skip
    return parts.sum(dim=0)


def _draw(device: torch.device) -> Iterator[tuple[str, Tensor, Tensor, Tensor]]:
    """Draw (label, x, taps, gradient of the result)."""
    generator = torch.Generator().manual_seed(0)
    draw = normals(generator, device)
    for batch, length, width, taps in ((1, 1, 1, 4), (2, 33, 7, 4), (3, 5, 133, 8), (1, 18, 9, 1)):
        shape = batch, length, width
        label = f"{batch}x{length}x{width}, {taps} taps"
        yield label, draw(*shape), draw(width, taps), draw(*shape)
    x, grad_y = (draw(7, 9, 6).permute(2, 1, 0)[::2] for _ in range(2))
    yield "3x9x7, 4 taps strided", x, draw(4, 7).T, grad_y
    yield "2x0x5, 4 taps empty", draw(2, 0, 5), draw(5, 4), draw(2, 0, 5)
    if device.type == "cuda":  # the interpreter's bf16 arithmetic is wrong
        x, grad_y = (draw(3, 300, 776).bfloat16() for _ in range(2))
        yield "3x300x776, 4 taps bf16", x, draw(776, 4), grad_y


def _cases(device: torch.device, _group_size: int) -> Iterator[Case]:
    for label, x, w, _ in _draw(device):
        for reverse in (False, True):
            yield Case(f"{label}{' reverse' if reverse else ''}", (x, w, reverse))


def _timings(device: torch.device, _group_size: int) -> Iterator[Timing]:
    x = torch.randn(16, 4096, 1152, device=device, dtype=torch.bfloat16)
    w = torch.randn(1152, 4, device=device)
    weight = w.bfloat16()[:, None]
    peer = partial(functional.conv1d, x.mT.contiguous(), weight, padding=3, groups=1152)
    yield Timing("16x4096x1152, 4 taps bf16", (x, w, False), peer=peer, peer_name="conv1d")


_GATE = Gate(
    relative=1e-5, peer_slack=0.1, rounded=True,
    reason="float32 sums over taps, or over the sequence; in bf16 no worse than one rounding",
)  # fmt: skip

causal_conv = Operation(
    "causal_conv", _causal_conv_triton, _causal_conv_torch, causal_conv_reference, _cases, _GATE,
    {"x": Array("B, T, D"), "w": Array("D, W", FLOAT), "reverse": Number((False, True))},
    where=(f"0 < W <= {MOST_TAPS}",), sizes={"B": (1, 3), "T": "m", "W": (1, 4, 8)},
    timings=_timings,
)  # fmt: skip
"""Convolve every channel with its causal taps.

Args:
    x: (B, T, D) float32 or bfloat16, any strides.
    w: (D, W) float32, W from 1 to 8.
    reverse: whether to look ahead instead.

Returns:
    Like x; summed in float32.
"""
causal_conv_grad_w = Operation(
    "causal_conv_grad_w", _causal_conv_grad_w_triton, _causal_conv_grad_w_torch,
    causal_conv_grad_w_reference,
    cases_of(_draw, lambda x, w, grad_y: (grad_y, x, w.shape[1])), _GATE,
    {"grad_y": Array("B, T, D"), "x": Array("B, T, D"), "taps": Number((1, 4, 8))},
    where=(f"0 < taps <= {MOST_TAPS}",), sizes={"B": (1, 3), "T": "m + 8"},
    timed=[
        Timed("16x4096x1152, 4 taps bf16", _causal_conv_grad_w_torch, B=16, T=4096, D=1152, taps=4)
    ],
)  # fmt: skip
"""Compute the gradient of the taps of `causal_conv`, (D, W) float32.

Args:
    grad_y: like x, any strides.
    x: as in `causal_conv`.
    taps: W.
"""
