"""A gated linear recurrence.

    u, z, g = projection of the normalised stream
    h[t] = a[t] h[t - 1] + (1 - a[t]) u[t],  a = sigmoid(g),  h[-1] = 0        in each head
    stream + output(silu(z) h)

Positions are read together: with c[t] the sum of log a up to t,
h[t] = exp(c[t]) h[-1] + sum over s <= t of exp(c[t] - c[s]) (1 - a[s]) u[s].

Source: E. Martin and C. Cundy, "Parallelizing Linear Recurrent Neural Nets Over Sequence Length",
https://arxiv.org/abs/1709.04057, with a gate for each head.
"""

from collections.abc import Iterator

import torch
from torch import Tensor, nn
from torch.nn import functional

from arbcli.config.parts.recurrent import RecurrentConfig
from arbcli.config.site import Site
from arbcli.model.flow import Flow, Reading, project
from arbcli.model.initial import output_std
from arbcli.model.layers.kinds import layers_for
from arbcli.model.mark import Written
from arbcli.model.parts.base import Part
from arbcli.model.state import Clock, State


class Recurrent(Part):
    """Mean each position with those before, as its gates say."""

    name = "recurrent"

    def __init__(self, config: RecurrentConfig, site: Site) -> None:
        super().__init__()
        parts, dim = layers_for(site), site.dim
        self.heads, self.dim = config.heads, dim
        self.input = parts.linear(2 * dim + self.heads, dim, site, area="attention")
        std = output_std(dim, site.depth)
        self.output = parts.linear(dim, dim, site, area="attention", std=std)

    def forward(
        self,
        x: Tensor,
        norm: nn.Module,
        added: Tensor | None = None,
        reading: Reading | None = None,
        state: "Mean | None" = None,
    ) -> Flow:
        """Mix every position of (B, T, D) with those before it: see `Part.forward`."""
        projected, x = project(self.input, x, norm, added)
        u, z, gates = projected.split((self.dim, self.dim, self.heads), dim=-1)
        values = u.float().unflatten(-1, (self.heads, -1)).transpose(1, 2)  # (B, H, T, d)
        gates = gates.float().transpose(1, 2)  # (B, H, T)
        before = gates.new_ones(gates.shape[-1], gates.shape[-1]).tril()
        logs = -functional.softplus(-gates) @ before.T
        fading = (logs[..., None] - logs[..., None, :]).masked_fill(before == 0, -torch.inf).exp()
        mean = fading @ (torch.sigmoid(-gates)[..., None] * values)
        if state:
            mean = mean + logs.exp()[..., None] * state.mean
            state.keep(mean[:, :, -1:])
        mean = mean.transpose(1, 2).flatten(-2).to(x.dtype)
        return Flow(x, self.output(functional.silu(z) * mean))

    def new_state(self, clock: Clock) -> "Mean":
        """Make room for a vector."""
        return Mean(clock, self.heads, self.dim // self.heads)


class Mean(State):
    """The mean of the positions read, (H, 1, d) float32."""

    by_text = ("mean",)

    def __init__(self, clock: Clock, heads: int, width: int) -> None:
        super().__init__(clock)
        self.mean = clock.zeros(heads, 1, width, dtype=torch.float32)

    def keep(self, mean: Tensor) -> None:
        """Keep (1, H, 1, d), unless the text has ended."""
        active = self.clock.active
        self.mean.copy_(mean[0] if active is None else torch.where(active > 0, mean[0], self.mean))

    def written(self) -> Iterator[Written]:
        """List it: all of it changes."""
        yield Written(self.mean)

    def reset(self) -> None:
        """Begin a new text."""
        self.mean.zero_()
