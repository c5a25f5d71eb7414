"""Decoding step of a Mamba-2 block, fused between its two projections.

    z, u, B, C, t = rows
    u, B, C = silu(causal convolution)        with the inputs of earlier positions
    dt = softplus(t + bias),  a = exp(-exp(rate) dt)
    S = a S + B (dt u),   y = silu(z) (C S + skip u)                           in each head

The inputs of earlier positions are in a ring of W slots for W taps: position p is in slot p mod W,
so no slot is both read and written. Each of several texts has separate programs. A text that is not
continued keeps its state; the slot of its next position is then undefined.
"""

import torch
from torch import Tensor
from torch.nn import functional

from arbcli.kernels.runtime.operation import Operation, tl, triton
from arbcli.kernels.runtime.overlap import overlap_options, wait_for_last
from arbcli.kernels.runtime.texts import text_by_text

SHARED = (3, 4, 5, 6)
"""Arguments of `mamba_step` that are the same for all texts."""


@text_by_text(7, *SHARED)
def _mamba_step_torch(
    rows: Tensor, ring: Tensor, state: Tensor, taps: Tensor, rate: Tensor, bias: Tensor,
    skip: Tensor, position: Tensor, active: Tensor | None = None,
) -> Tensor:  # fmt: skip
    heads, states, width = state.shape
    inner, num_taps = heads * width, len(ring)
    z, new, t = rows.split((inner, inner + 2 * states, heads))
    ring.index_copy_(0, (position % num_taps).long()[None], new[None])
    slots = (position + 1 + torch.arange(num_taps, device=rows.device)) % num_taps
    mixed = (taps.T * ring[slots].float()).sum(dim=0)
    u, b, c = functional.silu(mixed).split((inner, states, states))
    u = u.view(heads, width)
    dt = functional.softplus(t.float() + bias)
    values = u * dt[:, None]
    decay = (-rate.exp() * dt).exp()
    new_state = decay[:, None, None] * state + b[:, None] * values[:, None]
    y = ((c[:, None] * new_state).sum(dim=1) + skip[:, None] * u).flatten()
    state.copy_(new_state if active is None else torch.where(active > 0, new_state, state))
    return (functional.silu(z.float()) * y).to(rows.dtype)


@triton.jit
def _silu(x):
    return x / (1 + tl.exp(-x))


@triton.jit
def _softplus(x):
    """Compute log(1 + exp(x)), to all digits where exp(x) is small."""
    small = tl.exp(tl.minimum(x, 20.0))
    whole = 1 + small
    value = tl.where(
        whole == 1, small, tl.log(whole) * (small / tl.where(whole == 1, 1, whole - 1))
    )
    return tl.where(x > 20, x, value)


@triton.jit
def _convolve(ring_ptr, taps_ptr, channel, mask, position, MIXED, TAPS: tl.constexpr):
    """Add up what the positions before give to some channels."""
    total = tl.zeros(channel.shape, tl.float32)
    for i in tl.static_range(TAPS - 1):
        slot = (position + 1 + i) % TAPS
        x = tl.load(ring_ptr + slot * MIXED + channel, mask=mask, other=0).to(tl.float32)
        total += x * tl.load(taps_ptr + channel * TAPS + i, mask=mask, other=0)
    return total


@triton.jit
def _mamba_step_kernel(
    rows_ptr, ring_ptr, state_ptr, taps_ptr, rate_ptr, bias_ptr, skip_ptr, position_ptr,
    active_ptr, y_ptr, HEADS, N, P,
    TAPS: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_P: tl.constexpr, OVERLAP: tl.constexpr,
):  # fmt: skip
    # base pointers of this text; a program has one head
    head, text = tl.program_id(0), tl.program_id(1)
    position = tl.load(position_ptr + text)
    inner = HEADS * P
    MIXED = inner + 2 * N
    rows_ptr += text.to(tl.int64) * (inner + MIXED + HEADS)
    ring_ptr += text.to(tl.int64) * (TAPS * MIXED)
    state_ptr += text.to(tl.int64) * (inner * N)
    y_ptr += text.to(tl.int64) * inner
    n, p = tl.arange(0, BLOCK_N), tl.arange(0, BLOCK_P)
    mask_n, mask_p = n < N, p < P
    # all that the kernel before this one does not write
    state_ptrs = state_ptr + (head * N + n[:, None]) * P + p[None, :]
    mask = mask_n[:, None] & mask_p[None, :]
    state = tl.load(state_ptrs, mask=mask, other=0)
    u_columns, b_columns, c_columns = head * P + p, inner + n, inner + N + n
    u = _convolve(ring_ptr, taps_ptr, u_columns, mask_p, position, MIXED, TAPS)
    b = _convolve(ring_ptr, taps_ptr, b_columns, mask_n, position, MIXED, TAPS)
    c = _convolve(ring_ptr, taps_ptr, c_columns, mask_n, position, MIXED, TAPS)
    last_ptr = taps_ptr + TAPS - 1
    last_u = tl.load(last_ptr + u_columns * TAPS, mask=mask_p, other=0)
    last_b = tl.load(last_ptr + b_columns * TAPS, mask=mask_n, other=0)
    last_c = tl.load(last_ptr + c_columns * TAPS, mask=mask_n, other=0)
    rate, skip = tl.exp(tl.load(rate_ptr + head)), tl.load(skip_ptr + head)
    bias = tl.load(bias_ptr + head)
    wait_for_last(OVERLAP)
    # the projections of this position
    new_ptr = rows_ptr + inner
    new_u = tl.load(new_ptr + u_columns, mask=mask_p, other=0)
    new_b = tl.load(new_ptr + b_columns, mask=mask_n, other=0)
    new_c = tl.load(new_ptr + c_columns, mask=mask_n, other=0)
    z = tl.load(rows_ptr + u_columns, mask=mask_p, other=0).to(tl.float32)
    # step size; last tap of the convolution, and its activation
    dt = _softplus(tl.load(new_ptr + MIXED + head).to(tl.float32) + bias)
    u = _silu(u + new_u.to(tl.float32) * last_u)
    b = _silu(b + new_b.to(tl.float32) * last_b)
    c = _silu(c + new_c.to(tl.float32) * last_c)
    # decay the state, add the outer product of B and dt u, and read it by C
    state = tl.exp(-rate * dt) * state + b[:, None] * (u * dt)[None, :]
    y = tl.sum(c[:, None] * state, axis=0) + skip * u
    # texts that are skipped keep their state
    if active_ptr is not None:
        mask = mask & (n < tl.where(tl.load(active_ptr + text) > 0, N, 0))[:, None]
    tl.store(state_ptrs, state, mask=mask)
    tl.store(y_ptr + u_columns, (_silu(z) * y).to(y_ptr.dtype.element_ty), mask=mask_p)
    # inputs of this position, to the ring
    slot_ptr = ring_ptr + position % TAPS * MIXED
    tl.store(slot_ptr + u_columns, new_u, mask=mask_p)
    first = n < tl.where(head == 0, N, 0)  # one program writes what is of all heads
    tl.store(slot_ptr + b_columns, new_b, mask=first)
    tl.store(slot_ptr + c_columns, new_c, mask=first)


def _mamba_step_triton(
    rows: Tensor, ring: Tensor, state: Tensor, taps: Tensor, rate: Tensor, bias: Tensor,
    skip: Tensor, position: Tensor, active: Tensor | None = None,
) -> Tensor:  # fmt: skip
    heads, states, width = state.shape[-3:]
    y = rows.new_empty(*position.shape, heads * width)
    _mamba_step_kernel[(heads, position.numel())](
        rows, ring, state, taps, rate, bias, skip, position, active, y, heads, states, width,
        TAPS=ring.shape[-2], BLOCK_N=triton.next_power_of_2(states),
        BLOCK_P=triton.next_power_of_2(width), num_warps=4, **overlap_options(rows),
    )  # fmt: skip
    return y


mamba_step = Operation(
    "mamba_step", _mamba_step_triton, _mamba_step_torch,
    "rows: real[*X, 2 * H * P + 2 * N + H] dense; ring: real[*X, W, H * P + 2 * N] dense; "
    "state: float32[*X, H, N, P] dense; taps: float32[H * P + 2 * N, W] dense; "
    "rate, bias, skip: float32[H] dense; position: int32[*X] dense; active: int32[*X]? dense",
    where=("len(X) < 2", "W > 0 and W & (W - 1) == 0"),
)  # fmt: skip
"""Compute one position of a block, from its first projection to the input of its norm.

Of several texts `rows`, `ring`, `state`, `position` and the result have a dimension for them in
front.

Args:
    rows: (2 H P + 2 N + H,) float32 or bfloat16, contiguous: z, u, B, C and t.
    ring: (W, H P + 2 N) like rows; slot `position` mod W is written. Slots of positions before
        the first must be zeros.
    state: (H, N, P) float32, contiguous; overwritten.
    taps: (H P + 2 N, W) float32, contiguous, W a power of two.
    rate: (H,) float32.
    bias: like `rate`.
    skip: like `rate`.
    position: int32 scalar tensor: number of earlier positions. It is read on the device.
    active: int32 like `position`, 0 for texts that the step skips; None for none.

Returns:
    (H P,) like rows.
"""
