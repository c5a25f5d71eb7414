"""A vector quantiser: each position is stood for by the nearest of many codes.

    z = W_query norm(x), divided by its root-mean-square;   q = round(32 z) in int8
    k = argmin over codes c of |q - c|**2;   y = W_output norm(c_k / 32)

The gradient of c_k / 32 goes on to z as it is, and the mean of (z - c_k / 32)**2 is a loss, so that
positions stay near their codes. Sources: A. van den Oord et al., "Neural Discrete Representation
Learning", https://arxiv.org/abs/1711.00937; for codes that are revived P. Dhariwal et al.,
"Jukebox", https://arxiv.org/abs/2005.00341, section 3.

Codes learn by no gradient. After a step each code that was chosen becomes the mean of what chose it
and of itself, which counts as often as it was chosen before, `MEMORY` times at most: a mean at
first, then one that follows. It is rounded at random to int8, by bits that follow from its place
and the step. A hand goes around the codes, past as many in a step as there are positions, and takes
a life of each; being chosen gives all of them back. One that has none becomes the vector of a
position.
"""

from typing import Any

import torch
from torch import Tensor

from arbcli.config.parts.memories import QuantiserConfig
from arbcli.config.site import Site
from arbcli.kernels.rows.nearest_codes import nearest_codes
from arbcli.kernels.rows.table_rows import gather_rows, scatter_rows_
from arbcli.model.initial import output_std
from arbcli.model.layers.kinds import layers_for
from arbcli.model.layers.norm import NORM_EPS
from arbcli.model.parts.codebook import Found
from arbcli.model.parts.ngrams import MIX
from arbcli.model.step_memory import StepMemory

UNIT = 32
"""Of codes in one root-mean-square of a vector."""
MOST = 127
MEMORY = 32
"""Times at most that a code counts in its next mean, as often as it was chosen."""


class Quantiser(StepMemory):
    """Nearest codes of projections, projected.

    Buffers: codes, (V, width) int8, in units of 1/32; uses, (V, 1) int8, how often each was chosen
    since it was made, up to 127; lives, (V, 1) int8; hand, (1,) int32, the code that is looked at
    next.

    Args:
        config: its shape.
        site: where it stands.
        area: the part of the model that this is.
    """

    codes: Tensor
    uses: Tensor
    lives: Tensor
    hand: Tensor

    def __init__(self, config: QuantiserConfig, site: Site, area: str) -> None:
        super().__init__(area)
        layers, self.config = layers_for(site), config
        self.norm = layers.norm(site.dim, site)
        self.query = layers.linear(config.width, site.dim, site, area=area)
        self.declare("codes", torch.zeros(config.codes, config.width, dtype=torch.int8), "codes")
        for name in ("uses", "lives"):
            self.declare(name, torch.zeros(config.codes, 1, dtype=torch.int8), "counters")
        self.declare("hand", torch.zeros(1, dtype=torch.int32), "counters")
        self.sub_norm = layers.norm(config.width, site)
        std = output_std(config.width, site.depth)
        self.output = layers.linear(site.dim, config.width, site, area=area, std=std)
        self.forget()

    def forget(self) -> None:
        """Forget the forwards of a step that never ended."""
        self._seen: list[Tensor] = []
        self._chosen: list[Tensor] = []

    def forward(self, x: Tensor) -> Found:
        """Find what to add to the stream (B, T, D), and what it costs to be far from a code."""
        z = self.query(x, self.norm).float()
        z = z * torch.rsqrt(z.square().mean(dim=-1, keepdim=True) + NORM_EPS)
        with torch.no_grad():
            q = (z * UNIT).round_().clamp_(-MOST, MOST).to(torch.int8).flatten(0, -2)
            chosen = nearest_codes(q, self.codes)
            rows = self.codes[chosen].view(z.shape).float() / UNIT
        cost = None
        if torch.is_grad_enabled():
            self._seen.append(q)
            self._chosen.append(chosen)
            cost = (z - rows).square().mean()
        values = (rows + (z - z.detach())).to(x.dtype)
        codes = chosen.view(x.shape[:-1])
        sure = torch.ones(codes.shape, device=x.device)
        return Found(self.output(values, self.sub_norm), codes, sure, cost)

    def table(self, ids: Tensor, weights: Tensor, dtype: torch.dtype) -> Tensor:
        """Add up weighted codes, as `TernaryTable` does; nothing steps them by a gradient.

        Args:
            ids: (M, k) int64; one that is negative stands for none.
            weights: (M, k) float32; differentiable.
            dtype: of the result.

        Returns:
            (M, width) of `dtype`.
        """
        rows = gather_rows(self.codes, ids.flatten()).view(*ids.shape, -1).float()
        return (rows * weights[..., None]).sum(dim=1).div(UNIT).to(dtype)

    def join(self, group: Any) -> None:
        """Take what all processes have seen, in the order of the micro-batches."""
        self._seen, self._chosen = group.in_order(self._seen), group.in_order(self._chosen)

    @torch.no_grad()
    def after_step(self) -> None:
        """Move the codes that were chosen, and revive some that were not for long."""
        if self._seen:
            q, chosen = torch.cat(self._seen), torch.cat(self._chosen)
            self._follow(q, chosen)
            self._revive(q)
        self.forget()

    def _follow(self, q: Tensor, chosen: Tensor) -> None:
        """Bring each code that was chosen to the mean of what chose it and of itself."""
        order = chosen.argsort(stable=True)
        ordered, number = chosen[order], len(self.codes)
        begins = torch.ones_like(ordered, dtype=torch.bool)
        begins[1:] = ordered[1:] != ordered[:-1]
        place = begins.cumsum(0) - 1  # of each position's code among those that were chosen
        rows = torch.full_like(ordered, number).scatter_(0, place, ordered)
        count = torch.zeros(len(rows), 1, dtype=torch.int32, device=q.device)
        count.index_add_(0, place, torch.ones_like(count))
        total = torch.zeros(q.shape, dtype=torch.int32, device=q.device)
        total.index_add_(0, place, q[order].int())
        old, uses = gather_rows(self.codes, rows).int(), gather_rows(self.uses, rows).int()
        weight = uses.clamp(max=MEMORY)
        shares = (weight + count).clamp(min=1)
        total += weight * old
        total += _bits(rows, q.shape[1], self.hand) % shares
        moved = total.div_(shares, rounding_mode="floor").clamp_(-MOST, MOST)
        scatter_rows_(self.codes, rows, moved.to(torch.int8))
        scatter_rows_(self.uses, rows, (uses + count).clamp(max=MOST).to(torch.int8))
        lives = torch.full_like(rows, self.config.patience, dtype=torch.int8)
        scatter_rows_(self.lives, rows, lives[:, None])

    def _revive(self, q: Tensor) -> None:
        """Take a life of the next codes; put vectors in the place of those that have none."""
        number = len(self.codes)
        size = min(len(q), number)
        looked_at = (self.hand + torch.arange(size, device=q.device)) % number
        lives = (gather_rows(self.lives, looked_at) - 1).clamp_(min=0)
        dead = lives[:, 0] == 0
        rows = torch.where(dead, looked_at, number)
        scatter_rows_(self.codes, rows, q[:size])
        scatter_rows_(self.uses, rows, torch.ones_like(lives))
        lives = torch.where(dead[:, None], self.config.patience, lives).to(torch.int8)
        scatter_rows_(self.lives, looked_at, lives)
        self.hand.copy_((self.hand + size) % number)

    def gauges(self) -> dict[str, float]:
        """Measure the share of codes that are chosen more than once; waits for the device."""
        name = {"codebook": "codes"}.get(self.area, self.area)
        return {f"alive_{name}": float((self.uses > 1).float().mean())}


def _bits(rows: Tensor, width: int, step: Tensor) -> Tensor:
    """Make numbers in 0..2**24-1 that follow from a row, a column and a step: (R, width) int32."""
    key = (rows[:, None] * width + torch.arange(width, device=rows.device)) * 2**20 + step
    mixed = (key + 1) * MIX
    mixed = (mixed ^ (mixed >> 29)) * MIX
    return ((mixed >> 40) & 0xFFFFFF).int()
