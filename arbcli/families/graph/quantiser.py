"""A vector quantiser: replaces each position by the nearest code of a codebook.

    z = W_query norm(x), divided by its root-mean-square;   q = round(32 z) in int8
    k = argmin over codes c of |q - c|**2;   y = W_output norm(c_k / 32)

The gradient of c_k / 32 is passed to z (straight-through), and the mean of (z - c_k / 32)**2 is the
commitment loss. Sources: A. van den Oord et al., "Neural Discrete Representation Learning",
https://arxiv.org/abs/1711.00937; for the revival of dead codes P. Dhariwal et al., "Jukebox",
https://arxiv.org/abs/2005.00341, section 3.

Codes are not trained by gradients. After a step each selected code becomes the mean of the
positions that selected it and of itself, with the weight of its earlier selections, at most
`MEMORY`: a mean that turns into a moving average. It is rounded stochastically to int8, by bits
that only depend on the code and the step. A pointer, the hand, passes over as many codes in a step
as there are positions, and takes one life of each; selection restores all lives. A code without
lives is replaced by the vector of a position.
"""

import torch
from torch import Tensor

from arbcli.config.layer_spec import LayerSpec
from arbcli.families.graph.codebook import CodebookOutput, alive_gauge
from arbcli.families.graph.config import QuantiserConfig
from arbcli.families.graph.kernels.nearest_codes import nearest_codes
from arbcli.kernels.rows.table_rows import gather_rows, scatter_rows_
from arbcli.model.layers.kinds import layers_for
from arbcli.model.layers.norm import NORM_EPS
from arbcli.model.ngrams import MIX
from arbcli.model.packed_model import StepMemory

UNIT = 32
"""Integer value of 1 in codes."""
INT8_MAX = 127
MEMORY = 32
"""Maximum weight of a code in its next mean, in selections."""


class Quantiser(StepMemory):
    """The nearest codes of the projected stream, projected back: see the module's docstring.

    Buffers:
        codes: (V, width) int8, in units of 1/32.
        uses: (V, 1) int8, number of selections since the code was created, up to 127.
        lives: (V, 1) int8, remaining lives.
        hand: (1,) int32, index of the code that loses a life next.

    Args:
        config: configuration of the codes.
        spec: storage settings and width of the stage.
        area: parameter group of the tensors.
    """

    draws = ("norm", "query", "sub_norm", "output")
    unread = frozenset(("uses", "lives", "hand"))
    codes: Tensor
    uses: Tensor
    lives: Tensor
    hand: Tensor

    def __init__(self, config: QuantiserConfig, spec: LayerSpec, area: str) -> None:
        super().__init__(area)
        layers, self.config = layers_for(spec), config
        self.norm = layers.norm(spec.dim, spec)
        self.query = layers.linear(config.width, spec.dim, spec, area=area)
        self.declare("codes", torch.zeros(config.codes, config.width, dtype=torch.int8), "codes")
        for name in ("uses", "lives"):
            self.declare(name, torch.zeros(config.codes, 1, dtype=torch.int8), "counters")
        self.declare("hand", torch.zeros(1, dtype=torch.int32), "counters")
        self.sub_norm = layers.norm(config.width, spec)
        self.output = layers.output(config.width, spec, area=area)

    def forward(self, x: Tensor) -> CodebookOutput:
        """Quantise a stream, (B, T, D), and compute the commitment loss."""
        z = self.query(x, self.norm).float()
        z = z * torch.rsqrt(z.square().mean(dim=-1, keepdim=True) + NORM_EPS)
        with torch.no_grad():
            q = (z * UNIT).round_().clamp_(-INT8_MAX, INT8_MAX).to(torch.int8).flatten(0, -2)
            chosen = nearest_codes(q, self.codes)
            rows = self.codes[chosen].view(z.shape).float() / UNIT
        cost = None
        if torch.is_grad_enabled():
            self.record("vectors", q)
            self.record("chosen", chosen)
            cost = (z - rows).square().mean()
        values = (rows + (z - z.detach())).to(x.dtype)
        codes = chosen.view(x.shape[:-1])
        confidence = torch.ones(codes.shape, device=x.device)
        return CodebookOutput(self.output(values, self.sub_norm), codes, confidence, cost)

    def table(self, ids: Tensor, weights: Tensor, dtype: torch.dtype) -> Tensor:
        """Sum weighted codes like `TernaryTable`; the codes get no gradient.

        Args:
            ids: (M, k) int64; negative ids are ignored.
            weights: (M, k) float32; differentiable.
            dtype: dtype of the result.

        Returns:
            (M, width) of `dtype`.
        """
        rows = gather_rows(self.codes, ids.flatten()).view(*ids.shape, -1).float()
        return (rows * weights[..., None]).sum(dim=1).div(UNIT).to(dtype)

    @torch.no_grad()
    def finish_step(self) -> None:
        """Update the selected codes, and replace dead ones."""
        if self.records:
            q, chosen = (torch.cat(self.records[name]) for name in ("vectors", "chosen"))
            self._move_selected(q, chosen)
            self._replace_dead(q)
        self.forget()

    def _move_selected(self, q: Tensor, chosen: Tensor) -> None:
        """Set each selected code to the weighted mean of itself and its positions."""
        order = chosen.argsort(stable=True)
        ordered, number = chosen[order], len(self.codes)
        is_first = torch.ones_like(ordered, dtype=torch.bool)
        is_first[1:] = ordered[1:] != ordered[:-1]
        slot = is_first.cumsum(0) - 1  # index of each position's code among the selected ones
        rows = torch.full_like(ordered, number).scatter_(0, slot, ordered)
        count = torch.zeros(len(rows), 1, dtype=torch.int32, device=q.device)
        count.index_add_(0, slot, torch.ones_like(count))
        total = torch.zeros(q.shape, dtype=torch.int32, device=q.device)
        total.index_add_(0, slot, q[order].int())
        old, uses = gather_rows(self.codes, rows).int(), gather_rows(self.uses, rows).int()
        weight = uses.clamp(max=MEMORY)
        total_weight = (weight + count).clamp(min=1)
        total += weight * old
        total += _random_bits(rows, q.shape[1], self.hand) % total_weight
        means = total.div_(total_weight, rounding_mode="floor").clamp_(-INT8_MAX, INT8_MAX)
        scatter_rows_(self.codes, rows, means.to(torch.int8))
        scatter_rows_(self.uses, rows, (uses + count).clamp(max=INT8_MAX).to(torch.int8))
        lives = torch.full_like(rows, self.config.patience, dtype=torch.int8)
        scatter_rows_(self.lives, rows, lives[:, None])

    def _replace_dead(self, q: Tensor) -> None:
        """Take one life of the next codes, and replace those without lives by rows of q."""
        number = len(self.codes)
        size = min(len(q), number)
        visited = (self.hand + torch.arange(size, device=q.device)) % number
        lives = (gather_rows(self.lives, visited) - 1).clamp_(min=0)
        dead = lives[:, 0] == 0
        rows = torch.where(dead, visited, number)
        scatter_rows_(self.codes, rows, q[:size])
        scatter_rows_(self.uses, rows, torch.ones_like(lives))
        lives = torch.where(dead[:, None], self.config.patience, lives).to(torch.int8)
        scatter_rows_(self.lives, visited, lives)
        self.hand.copy_((self.hand + size) % number)

    def gauges(self) -> dict[str, float]:
        """Return the share of codes with more than one use; synchronises with the device."""
        return alive_gauge(self.area, float((self.uses > 1).float().mean()))


def _random_bits(rows: Tensor, width: int, step: Tensor) -> Tensor:
    """Hash row, column and step to (R, width) int32 in 0..2**24-1."""
    key = (rows[:, None] * width + torch.arange(width, device=rows.device)) * 2**20 + step
    mixed = (key + 1) * MIX
    mixed = (mixed ^ (mixed >> 29)) * MIX
    return ((mixed >> 40) & 0xFFFFFF).int()
