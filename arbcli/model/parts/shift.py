"""Half of each vector from the position before.

u = projection of the normalised stream
v[t] = (first half of u[t], second half of u[t - 1]),  u[-1] = 0
stream + output(v)
"""

from collections.abc import Iterator

import torch
from torch import Tensor, nn

from arbcli.config.parts.shift import ShiftConfig
from arbcli.config.site import Site
from arbcli.model.flow import Flow, Reading, project
from arbcli.model.initial import output_std
from arbcli.model.layers.kinds import layers_for
from arbcli.model.mark import Written
from arbcli.model.parts.base import Part
from arbcli.model.state import Clock, State


class Shift(Part):
    """Mix each position with the one before."""

    name = "shift"

    def __init__(self, config: ShiftConfig, site: Site) -> None:
        super().__init__()
        parts, dim = layers_for(site), site.dim
        self.half = dim // 2
        self.input = parts.linear(dim, dim, site, area="attention")
        std = output_std(dim, site.depth)
        self.output = parts.linear(dim, dim, site, area="attention", std=std)

    def forward(
        self,
        x: Tensor,
        norm: nn.Module,
        added: Tensor | None = None,
        reading: Reading | None = None,
        state: "Last | None" = None,
    ) -> Flow:
        """Mix every position of (B, T, D) with the one before: see `Part.forward`."""
        u, x = project(self.input, x, norm, added)
        own, passed = u.split(self.half, dim=-1)
        before = state.half[None] if state else torch.zeros_like(passed[:, :1])
        shifted = torch.cat((before, passed[:, :-1]), dim=1)
        if state:
            state.half.copy_(passed[0, -1:])
        return Flow(x, self.output(torch.cat((own, shifted), dim=-1)))

    def new_state(self, clock: Clock) -> "Last":
        """Make room for half a vector."""
        return Last(clock, self.half)


class Last(State):
    """The half that the next position takes, (1, D / 2)."""

    def __init__(self, clock: Clock, half: int) -> None:
        super().__init__(clock)
        self.half = torch.zeros(1, half, dtype=clock.dtype, device=clock.device)

    def written(self) -> Iterator[Written]:
        """List it."""
        yield Written(self.half)

    def reset(self) -> None:
        """Begin a new text."""
        self.half.zero_()
