"""Mamba-2, a state space model, with packed projections, taps and vectors.

    z, u, B, C, dt = projection of the normalised stream
    u, B, C = silu(causal convolution of width 4)
    dt = softplus(dt + bias),  a = exp(-exp(A) dt)
    S[t] = a[t] S[t - 1] + dt[t] B[t] u[t],  y[t] = C[t] S[t] + D u[t]        in each head
    stream + output(norm(silu(z) y))

B and C are the same for all heads.

Source: T. Dao and A. Gu, "Transformers are SSMs", https://arxiv.org/abs/2405.21060, section 7.
"""

import math
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd import Function
from torch.nn import functional

from arbcli.config.layer_spec import LayerSpec
from arbcli.families.mamba.config import EXPAND, MambaConfig
from arbcli.families.mamba.kernels.causal_conv import causal_conv, causal_conv_grad_w
from arbcli.families.mamba.kernels.decay_scan import decay_scan
from arbcli.families.mamba.kernels.mamba_step import mamba_step
from arbcli.model.initial import projection_std
from arbcli.model.layers.compiled import KeepsInputs, operator
from arbcli.model.layers.kinds import layers_for
from arbcli.model.parts.base import BlockInputs, BlockOutput, Part, project
from arbcli.model.state import PositionCounter, State

TAPS = 4
RATES = (1.0, 16.0)
"""Initial exp(A) of the first and the last head."""
STEPS = (1e-3, 1e-1)
"""Initial dt of the first and the last head, without the projection."""


def mamba_values(heads: int) -> tuple[list[float], list[float]]:
    """Return the initial A and dt bias of each head, evenly spaced in `RATES` and `STEPS`.

    Packed vectors cannot represent 0, so a zero is replaced by a small number.
    """
    shares = [index / max(1, heads - 1) for index in range(heads)]
    rates = [math.log(RATES[0] + share * (RATES[1] - RATES[0])) or 1e-3 for share in shares]
    steps = [STEPS[0] * (STEPS[1] / STEPS[0]) ** share for share in shares]
    return rates, [math.log(math.expm1(step)) for step in steps]


class Mamba(Part):
    """The Mamba-2 mixer, with `EXPAND` times the heads of its configuration."""

    draws = ("projection", "taps", "rate", "bias", "skip", "gate", "output")
    name = "mamba"
    norm_name = "norm"
    steps_fused = True

    def __init__(self, config: MambaConfig, spec: LayerSpec) -> None:
        super().__init__()
        self.heads, self.inner = EXPAND * config.heads, EXPAND * spec.dim
        self.states = config.states
        self.mixed = self.inner + 2 * self.states
        rates, biases = mamba_values(self.heads)
        parts = layers_for(spec)
        projected = self.inner + self.mixed + self.heads
        self.projection = parts.linear(projected, spec.dim, spec, area="mamba")
        self.taps = parts.taps(self.mixed, TAPS, spec, area="mamba")
        self.rate = parts.vector(rates, spec, area="mamba")
        self.bias = parts.vector(biases, spec, area="mamba")
        self.skip = parts.vector([1.0] * self.heads, spec, area="mamba")
        self.gate = parts.gate(self.inner, spec, normalise=True)
        std = projection_std(self.inner) / math.sqrt(spec.depth)  # one output per block, not two
        self.output = parts.linear(spec.dim, self.inner, spec, std=std, area="mamba")

    def forward(
        self,
        x: Tensor,
        norm: nn.Module,
        added: Tensor | None = None,
        inputs: BlockInputs | None = None,
        state: "MambaState | None" = None,
    ) -> BlockOutput:
        """Mix each position of (B, T, D) with those before it: see `Part.forward`."""
        projected, x = project(self.projection, x, norm, added)
        z, mixed, dt = projected.split((self.inner, self.mixed, self.heads), dim=-1)
        if state is None:
            mixed = _convolve(mixed, self.taps())
        else:
            mixed = state.convolve(mixed, self.taps())
        u, b, c = functional.silu(mixed).split((self.inner, self.states, self.states), dim=-1)
        u = u.unflatten(-1, (self.heads, -1))  # (B, T, H, P)
        dt = functional.softplus(dt.float() + self.bias())
        decay = -self.rate().exp() * dt  # (B, T, H), its logarithm
        values = _scaled(u, dt)
        scan = _scan if state is None else state.scan
        y = scan(c, b, values, decay)
        return BlockOutput(x, self.output(_gate_and_scan(z, y, self.skip(), u), self.gate))

    def step(self, x: Tensor, state: "MambaState", residual: Tensor | None) -> Tensor:
        """Process one new position: see `Part.step`."""
        rows = self.projection.fused(x, normalise=True)
        vectors = (part.prepared() for part in (self.taps, self.rate, self.bias, self.skip))
        y = state.step(rows, *vectors)
        return self.output.fused(y, normalise=True, added=residual)

    def new_state(self, clock: PositionCounter) -> "MambaState":
        """Create the states of the heads, and the ring buffer of the convolution."""
        return MambaState(clock, self)


def running_sum(x: Tensor, *, reverse: bool = False) -> Tensor:
    """Compute the cumulative sum of (B, T, H) over T, or the reverse one, in float32.

    Uses a scan without decay, as torch's `cumsum` is not deterministic on a GPU.
    """
    ones, zeros = (x.new_full((1, 1, 1), value).expand(x.shape) for value in (1, 0))
    return decay_scan(ones[..., None], ones[..., None], x[..., None], zeros, reverse)[..., 0]


class _CausalConv(KeepsInputs):
    @staticmethod
    def forward(x: Tensor, taps: Tensor) -> Tensor:
        return causal_conv(x, taps)

    @staticmethod
    def backward(ctx: Any, grad_y: Tensor) -> tuple[Tensor | None, ...]:
        x, taps = ctx.saved_tensors
        return causal_conv(grad_y, taps, reverse=True), causal_conv_grad_w(grad_y, x, taps.shape[1])


class _DecayScan(Function):
    """A scan with q and k of (B, T, S) for all heads; their gradients are summed over heads."""

    @staticmethod
    def forward(q: Tensor, k: Tensor, v: Tensor, g: Tensor) -> Tensor:
        return decay_scan(*_expand_heads(q, k, v), v, g)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
        ctx.save_for_backward(*inputs, output)

    @staticmethod
    def backward(ctx: Any, grad_y: Tensor) -> tuple[Tensor | None, ...]:
        q, k, v, g, y = ctx.saved_tensors
        q, k = _expand_heads(q, k, v)
        low = grad_y.to(q.dtype)
        grad_v = decay_scan(k, q, low, g, reverse=True)
        grad_k = decay_scan(v, low, q, g, reverse=True)
        grad_q = decay_scan(low, v, k, g)
        grad_sums = (grad_y * y).sum(dim=-1) - (grad_v * v).sum(dim=-1)
        grad_g = running_sum(grad_sums, reverse=True)
        grad_q, grad_k = (grad.sum(dim=2).to(q.dtype) for grad in (grad_q, grad_k))
        return grad_q, grad_k, grad_v.to(v.dtype), grad_g


def _expand_heads(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
    """Expand (B, T, S) to (B, T, H, S) for the heads of v, without copies."""
    heads = v.shape[2]
    return q[:, :, None].expand(-1, -1, heads, -1), k[:, :, None].expand(-1, -1, heads, -1)


class _Scaled(KeepsInputs):
    """u * dt, computed in float32 and rounded to the dtype of u."""

    @staticmethod
    def forward(u: Tensor, dt: Tensor) -> Tensor:
        return torch.mul(u, dt[..., None], out=torch.empty_like(u))

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor]:
        u, dt = ctx.saved_tensors
        grad_u = torch.mul(grad, dt[..., None], out=torch.empty_like(grad))
        return grad_u, (grad.float() * u).sum(dim=-1)


def _scaled(u: Tensor, dt: Tensor) -> Tensor:
    """Multiply (B, T, H, P) by (B, T, H) float32: (B, T, H, P) in the dtype of u."""
    if torch.compiler.is_compiling():
        return (u * dt[..., None]).to(u.dtype)
    return _Scaled.apply(u, dt)


class _ConcatenateSkip(Function):
    """Concatenation of z and y + skip * u, which is rounded to the dtype of z."""

    @staticmethod
    def forward(z: Tensor, y: Tensor, skip: Tensor, u: Tensor) -> Tensor:
        both = z.new_empty(*z.shape[:-1], 2 * z.shape[-1])
        first, second = both.chunk(2, dim=-1)
        first.copy_(z)
        torch.add(y, skip[:, None] * u, out=second.unflatten(-1, y.shape[-2:]))
        return both

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Tensor, ...], output: Tensor) -> None:
        ctx.save_for_backward(*inputs[2:])

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, ...]:
        skip, u = ctx.saved_tensors
        grad_z, grad_y = grad.chunk(2, dim=-1)
        grad_y = grad_y.unflatten(-1, u.shape[-2:]).float()
        grad_skip = (grad_y * u).sum(dim=(0, 1, 3))
        return grad_z, grad_y, grad_skip, (grad_y * skip[:, None]).to(u.dtype)


def _gate_and_scan(z: Tensor, y: Tensor, skip: Tensor, u: Tensor) -> Tensor:
    """Concatenate z, (B, T, H P), and y + skip * u, (B, T, H, P) float32: (B, T, 2 H P)."""
    if torch.compiler.is_compiling():
        return torch.cat((z, (y + skip[:, None] * u).to(z.dtype).flatten(-2)), dim=-1)
    return _ConcatenateSkip.apply(z, y, skip, u)


_convolve, _scan = operator(_CausalConv), operator(_DecayScan)


class MambaState(State):
    """States of the heads, and a ring buffer of the convolution's inputs: see `mamba_step`.

    Args:
        clock: position counter of the stack of blocks.
        layer: the mixer.
    """

    stored = ("state", "ring")

    def __init__(self, clock: PositionCounter, layer: Mamba) -> None:
        super().__init__(clock)
        width = layer.inner // layer.heads
        self.state = clock.zeros(layer.heads, layer.states, width, dtype=torch.float32)
        self.ring = clock.zeros(TAPS, layer.mixed)

    def reset(self) -> None:
        """Begin a new text."""
        for part in self.tensors():
            part.zero_()

    def step(self, rows: Tensor, taps: Tensor, rate: Tensor, bias: Tensor, skip: Tensor) -> Tensor:
        """Run `mamba_step` on (B, 1, n); the caller counts positions."""
        clock = self.clock
        rows = rows.view(*clock.position.shape, -1)
        y = mamba_step(
            rows, self.ring, self.state, taps, rate, bias, skip, clock.position, clock.active
        )
        return y.view(-1, 1, y.shape[-1])

    def convolve(self, x: Tensor, taps: Tensor) -> Tensor:
        """Convolve new positions, (1, T, D), after those in the ring.

        Args:
            x: the positions.
            taps: (D, W) float32.

        Returns:
            (1, T, D).
        """
        positions = self.clock.position + torch.arange(1 - TAPS, x.shape[1], device=x.device)
        slots = positions % TAPS
        x = torch.cat((self.ring[slots[: TAPS - 1]][None], x), dim=1)
        self.ring.index_copy_(0, slots[-TAPS:], x[0, -TAPS:])
        return causal_conv(x, taps)[:, TAPS - 1 :]

    def scan(self, q: Tensor, k: Tensor, v: Tensor, g: Tensor) -> Tensor:
        """Run `decay_scan` on new positions from the state, and update the state.

        Args:
            q: (1, T, N), the same for all heads.
            k: like q.
            v: (1, T, H, P).
            g: (1, T, H) float32, logarithms of decays.

        Returns:
            (1, T, H, P) float32.
        """
        q, k = _expand_heads(q, k, v)
        c = running_sum(g).transpose(1, 2)  # (1, H, T)
        end = c[..., -1:]
        past = c.exp()[..., None] * (q.float().transpose(1, 2) @ self.state)
        y = decay_scan(q, k, v, g) + past.transpose(1, 2)
        fading = k.float().transpose(1, 2) * (end - c).exp()[..., None]
        added = fading.mT @ v.float().transpose(1, 2)
        state, active = (end.exp()[..., None] * self.state + added)[0], self.clock.active
        self.state.copy_(state if active is None else torch.where(active > 0, state, self.state))
        return y
