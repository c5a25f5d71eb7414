"""Multi-head latent attention: compressed keys and values, with a separate rotary part.

The cache of a position has one vector for all heads: `latent` elements from which keys and values
are projected, and `rotary` elements, rotated by the position, that are part of each head's key.

Decoding attends to the latent vectors directly: a query times a key W n is (W.T query) times n, and
a mean of values W' n is W' times the mean of n. Two products of one row replace the projection of
all keys and values. The norms of the keys are cached too, as keys are normalised.
Source: DeepSeek-AI, "DeepSeek-V2", https://arxiv.org/abs/2405.04434, section 2.1.
"""

import torch
from torch import Tensor, nn
from torch.nn import functional

from arbcli.config.layer_spec import LayerSpec
from arbcli.families.latent.config import LatentAttentionConfig
from arbcli.families.latent.kernels.decode_latent import decode_latent
from arbcli.kernels.attention.rotary_norm import rotate
from arbcli.model.layers.attend import positions_seen
from arbcli.model.layers.kinds import layers_for
from arbcli.model.layers.norm import NORM_EPS, unit_rms
from arbcli.model.layers.rotary import broadcast_heads, rotary_table, rows_at, table_rows
from arbcli.model.parts.base import BlockInputs, BlockOutput, project
from arbcli.model.parts.cached import CachedAttention
from arbcli.model.state import PositionCounter, Rows, State

SHARPNESS = 2.0
"""Factor of the scores. As only part of a normalised key depends on the position, attention cannot
become sharp enough with 1."""
ALIGNMENT = 16
"""Required alignment of rows in GPU attention kernels, in bytes."""


class LatentAttention(CachedAttention):
    """Latent self-attention; queries and keys are normalised after the rotation."""

    draws = ("query_down", "latent_norm", "up", "sub_norm", "output")
    name = "attention"
    steps_fused = True

    def __init__(self, config: LatentAttentionConfig, spec: LayerSpec) -> None:
        super().__init__()
        parts, dim = layers_for(spec), spec.dim
        self.heads, self.head_dim = config.heads, config.head_width(spec)
        self.latent, self.rotary = config.latent, config.rotary
        self.still, self.causal = self.head_dim - self.rotary, spec.causal
        self.query_down = parts.linear(dim + self.latent + self.rotary, dim, spec, area="attention")
        self.latent_norm = parts.norm(self.latent, spec)
        up = self.heads * (self.still + self.head_dim)
        self.up = parts.linear(up, self.latent, spec, area="attention")
        self.sub_norm = parts.norm(dim, spec) if config.sub_norm else None
        self.output = parts.output(dim, spec, area="attention")

    def forward(
        self,
        x: Tensor,
        norm: nn.Module,
        added: Tensor | None = None,
        inputs: BlockInputs | None = None,
        state: "LatentRing | None" = None,
    ) -> BlockOutput:
        """Attend from each position of (B, T, D): see `Part.forward`."""
        projected, x = project(self.query_down, x, norm, added)
        batch, length, dim = x.shape
        q, c = projected.split((dim, self.latent + self.rotary), dim=-1)
        table = state.angles if state else rotary_table(length, self.rotary, x.device)
        angles = broadcast_heads(table)
        q = q.view(batch, length, self.heads, self.head_dim)
        rotated = rotate(q[..., self.still :], *angles).to(x.dtype)
        q = torch.cat((q[..., : self.still], rotated), dim=-1)
        rotated = rotate(c[..., None, self.latent :], *angles).to(x.dtype)  # (B, T, 1, rotary)
        latent, mask = c[..., : self.latent], None
        if state is None:
            (latent,) = self.cache_format.round(latent)
        else:
            latent, rotated, mask = state.extend(latent, rotated)
            if length == 1:
                y = self._attend_one(q, latent, rotated, state)
                return BlockOutput(x, self.output(y.view(batch, length, dim), self.sub_norm))
        k, v = self._keys_and_values(latent, rotated)
        if state is not None:
            state.extend_lengths(k[:, -length:])
        q, k = (unit_rms(part) for part in (q, k))
        q, k, v = (part.transpose(1, 2) for part in (q, k, v))
        causal, scale = self.causal and mask is None, SHARPNESS * self.head_dim**-0.5
        if state is None and inputs and inputs.dropout and inputs.dropout.attention:
            from arbcli.model.layers.attend_dropped import attend_dropped

            seen = None if self.causal else positions_seen(length, None, False, q.device)
            y = attend_dropped(q, k, v, inputs.dropout.attention, seen=seen, scale=scale)
        else:
            y = functional.scaled_dot_product_attention(
                q, k, v, attn_mask=mask, is_causal=causal, scale=scale
            )  # (B, H, T, head_dim)
        return BlockOutput(
            x, self.output(y.transpose(1, 2).reshape(batch, length, dim), self.sub_norm)
        )

    def step(self, x: Tensor, state: "LatentRing", residual: Tensor | None) -> Tensor:
        """Attend from one new position: see `Part.step`."""
        row = self.query_down.fused(x, normalise=True)
        y = state.attend_one(row, self.up.decoded(x.dtype), SHARPNESS * self.head_dim**-0.5)
        normalise = self.sub_norm is not None
        return self.output.fused(y.view(x.shape), normalise=normalise, added=residual)

    def new_state(self, clock: PositionCounter) -> "LatentRing":
        """Create the ring buffer of latent vectors."""
        return LatentRing(clock, self)

    def _keys_and_values(self, latent: Tensor, rotated: Tensor) -> tuple[Tensor, Tensor]:
        """Project latent vectors to keys and values, (B, T, heads, head_dim), not normalised."""
        kv = self.up(latent, self.latent_norm)
        kv = kv.view(len(kv), -1, self.heads, self.still + self.head_dim)
        k = torch.cat((kv[..., : self.still], rotated.expand(-1, -1, self.heads, -1)), dim=-1)
        v = kv[..., self.still :]
        if self.still * v.itemsize % ALIGNMENT:
            v = v.contiguous()
        return k, v

    def _attend_one(
        self, q: Tensor, latent: Tensor, rotated: Tensor, state: "LatentRing"
    ) -> Tensor:
        """Attend from one query, (1, 1, heads, head_dim), to the ring and the new position.

        Returns:
            (heads, head_dim), computed in float32.
        """
        k, _ = self._keys_and_values(latent[:, -1:], rotated[:, -1:])
        up = self.up.weight.weight(torch.float32).view(self.heads, -1, self.latent)
        key_matrices, value_matrices = up.split(
            (self.still, self.head_dim), dim=1
        )  # (heads, ..., latent)
        q = unit_rms(q[0, 0]).float()
        still, query = q.split((self.still, self.rotary), dim=-1)
        n = self.latent_norm(latent[0]).float()  # (W + 1, latent)
        latent_query = (still[:, None] @ key_matrices)[:, 0]  # (heads, latent)
        scores = latent_query @ n.T + query @ rotated[0, :, 0].float().T  # (heads, W + 1)
        scores *= state.extend_lengths(k).T * (SHARPNESS * self.head_dim**-0.5)
        share = torch.softmax(scores.masked_fill(~state.mask, -torch.inf), dim=-1)
        y = value_matrices @ (share @ n)[..., None]  # (heads, head_dim, 1)
        return y[..., 0].to(latent.dtype)


class LatentRing(State):
    """Ring buffers of latent vectors, (1, W, latent), and of the rotated part of their keys.

    Position p is in slot p mod W until p + W overwrites it. In eight bits, latent vectors are codes
    with exponents, and the rotated part is not quantised. `lengths`, (W, heads) float32, has the
    inverse RMS of each key.

    Args:
        clock: position counter of the stack of blocks.
        layer: the attention layer.
    """

    stored = ("latent", "rotated", "lengths")

    def __init__(self, clock: PositionCounter, layer: LatentAttention) -> None:
        super().__init__(clock)
        self.window = min(clock.ctx, clock.positions)
        clock.limit(self.window)
        self.table = rotary_table(
            table_rows(clock.positions, clock.ctx), layer.rotary, clock.device
        )
        self.latent = Rows(clock, self.window, 1, layer.latent, heads_first=True)
        self.rotated = clock.zeros(1, self.window, 1, layer.rotary)
        self.lengths = clock.zeros(self.window, layer.heads, dtype=torch.float32)

    @property
    def fuses(self) -> bool:
        """Whether `attend_one` supports the storage format."""
        return self.latent.exponents is None

    @property
    def angles(self) -> tuple[Tensor, Tensor]:
        """Cosines and sines of the positions being read, (T, d / 2) each."""
        clock, table = self.clock, self.table
        key = "angles", table[0].shape[1]
        return clock.shared(key, lambda: rows_at(table, clock.position_ids))

    @property
    def mask(self) -> Tensor:
        """Attention mask over the ring before the update and the new positions, (T, W + T) bool."""
        return self.clock.shared(("ring mask", self.window), self._mask)

    def _mask(self) -> Tensor:
        position, window, length = self.clock.position, self.window, self.clock.length
        slots = torch.arange(window, device=position.device)
        place = position - 1 - (position - 1 - slots) % window  # place in each slot
        seen = (place >= 0) & (place > self.clock.position_ids[:, None] - window)
        return torch.cat((seen, seen.new_ones(length, length).tril()), dim=1)

    def extend_lengths(self, k: Tensor) -> Tensor:
        """Store the inverse RMS of new keys; return those of ring and new keys.

        Args:
            k: (1, T, heads, head_dim), not normalised.

        Returns:
            (W + T, heads) float32.
        """
        lengths = torch.rsqrt(k[0].float().square().mean(dim=-1) + NORM_EPS)
        extended = torch.cat((self.lengths, lengths))
        self.lengths.index_copy_(0, self.clock.position_ids % self.window, lengths)
        return extended

    def attend_one(self, rows: Tensor, up: Tensor, scale: float) -> Tensor:
        """Store a new position of each text, and attend from it: see `decode_latent`."""
        position = self.clock.position
        rings = self.latent.codes.squeeze(-3), self.rotated.squeeze((-4, -2)), self.lengths
        rows = rows.view(*position.shape, -1)
        return decode_latent(rows, up, *rings, position, *self.table, scale, NORM_EPS)

    def extend(self, latent: Tensor, rotated: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Store new positions; return them after the contents of the ring.

        Returns:
            Latent vectors and rotated parts, (1, W + T, ...) each, and the attention mask, (T, W +
            T) bool.
        """
        slots = self.clock.position_ids % self.window
        after = torch.cat((self.latent.get().clone(), self.latent.put(slots, latent)), dim=1)
        extended = after, torch.cat((self.rotated, rotated), dim=1)
        self.rotated.index_copy_(1, slots, rotated)
        return *extended, self.mask
