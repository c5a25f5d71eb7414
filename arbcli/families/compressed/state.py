"""Decoding state of compressed attention: recent bytes, entries, and the incomplete block.

The state of a layer has ring buffers of the last W bytes, and of all visible entries plus the
incomplete one; the values and gates of the incomplete block; and the indexer's keys and last
selection. Entry j is in slot j mod the number of slots. It is recomputed with each byte of its
block, and becomes visible when the block is complete.
"""

import math
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from arbcli.families.compressed.kernels.append_position import append_position_
from arbcli.families.compressed.kernels.choose_next import choose_next_
from arbcli.families.compressed.kernels.compressed_attention import Sight, compressed_attention
from arbcli.families.compressed.kernels.decode_compressed import decode_compressed
from arbcli.kernels.attention.rotary_norm import rotate
from arbcli.kernels.matmul.quantise_rows import E4M3
from arbcli.model.layers.norm import NORM_EPS, unit_rms
from arbcli.model.layers.rotary import broadcast_heads, rows_at, table_rows
from arbcli.model.state import PositionCounter, Rows, State


def takes_all(chosen: Tensor | None, number: int, sight: Sight) -> bool:
    """Return whether all entries are selected, so that the indexer makes no difference.

    Args:
        chosen: (B, N, k) selected entries; None, without an indexer, gives False.
        number: E, the number of entries.
        sight: positions and entries that a byte attends to.
    """
    return chosen is not None and chosen.shape[-1] >= number <= sight.max_entries


class CompressedState(State):
    """The state of one layer: see the module's docstring.

    Args:
        clock: position counter of the stack of blocks.
        layer: the `CompressedAttention`.
    """

    stored = ("recent", "entries", "open", "keys", "choice")
    views = ("semaphores",)

    def __init__(self, clock: PositionCounter, layer: Any) -> None:
        super().__init__(clock)
        clock.limit(min(clock.ctx, clock.positions))
        self.layer, self.ratio, positions = layer, layer.ratio, clock.positions
        self.window, self.max_entries = layer.sight.window, layer.sight.max_entries
        vector, device = (layer.kv_heads, layer.width), clock.device
        rows = table_rows(positions, clock.ctx)
        self.table = layer.table(rows, device)
        self.no_beta: Tensor | None = None
        """Zero beta of mean pooling, else None."""
        if layer.beta is None:
            self.no_beta = layer.gate_bias(device)
        self.semaphores = clock.semaphores(layer.heads)
        self.recent = Rows(clock, min(self.window, positions), *vector, layer.rotated)
        slots = min(self.max_entries, positions // self.ratio) + 1
        self.entries = Rows(clock, slots, *vector, layer.rotated)
        self.open = clock.zeros(2, self.ratio, layer.kv)
        """Values and gates of the bytes of the incomplete block."""
        self.keys: Tensor | None = None
        """(slots, width), the indexer's keys of entries; e4m3 if the cache is in eight bits."""
        self.choice: Tensor | None = None
        """(k,) int32, the last selection of entries, padded with -1."""
        if layer.indexer:
            indexer = layer.indexer
            self.index_table = indexer.table(rows, device)
            self.keys = clock.zeros(
                slots, indexer.width, dtype=E4M3 if clock.cache_format.code_dtype else None
            )
            self.choice = clock.zeros(max(1, min(indexer.top_k, slots - 1)), dtype=torch.int32) - 1

    def attend(
        self, x: Tensor, norm: Any, q: Tensor, recent: Tensor, values: Tensor, gates: Tensor
    ) -> Tensor:
        """Store new bytes, and attend from them to all visible positions.

        Args:
            x: (1, T, D), the stream.
            norm: norm before the indexer's queries; None if x is normalised.
            q: (1, T, H, d), projected queries.
            recent: (1, T, G d), projected keys.
            values: (1, T, G d), projected values.
            gates: (1, T, G d), projected pooling logits.

        Returns:
            (1, T, H, d).
        """
        if self.clock.length == 1:
            return self._attend_one(x, norm, q, recent, values, gates)
        start, length, m = self.clock.start, q.shape[1], self.ratio
        device, layer = x.device, self.layer

        position_angles = rows_at(self.table, slice(start, start + length))
        ring = len(self.recent)
        kept = min(start, ring, self.window - 1)
        before = self.recent.get(torch.arange(start - kept, start, device=device) % ring)
        new = layer.place_recent(recent, position_angles)[0]
        last = min(length, ring)
        position_ids = torch.arange(start + length - last, start + length, device=device) % ring
        stored = self.recent.round(new)
        self.recent.put(position_ids, new[-last:])
        recent = torch.cat((before, stored))[None]

        num_open, num_complete = start % m, start // m
        block = [
            torch.cat((kept_part[None, :num_open], part), dim=1)
            for kept_part, part in zip(self.open, (values, gates), strict=True)
        ]
        number = block[0].shape[1] // m
        full = [part[:, : number * m].unflatten(1, (number, m)) for part in block]
        still = layer.compress(*full)  # (1, number, G, d)
        firsts = torch.arange(num_complete, num_complete + number, device=device)
        angles = broadcast_heads(rows_at(self.table, firsts * m))
        rotated = layer.placed(still[0], angles).to(still.dtype)
        num_left = block[0].shape[1] - number * m
        for kept_part, part in zip(self.open, block, strict=True):
            kept_part[:num_left] = part[0, number * m :]

        group = (start + 1) // m
        lowest = max(0, group - self.max_entries)
        slots = len(self.entries)
        old = torch.arange(lowest, num_complete, device=device) % slots
        entries = torch.cat((self.entries.get(old), self.entries.round(rotated)))[None]
        # a window has no more of them than there are slots
        self.entries.put(firsts % slots, rotated)
        sight = Sight(self.window, m, self.max_entries, start - lowest * m)
        chosen = None
        if self.keys is not None:
            bits = torch.int8 if self.keys.dtype == E4M3 else self.keys.dtype
            keys = self.keys.view(bits)[old].view(self.keys.dtype).to(q.dtype)
            if number:
                angles = rows_at(self.index_table, firsts * m)
                new_keys = layer.indexer.keys(still, angles)[0].to(self.keys.dtype)
                # torch does not support index_copy_ for e4m3
                self.keys.view(bits).index_copy_(0, firsts % slots, new_keys.view(bits))
                keys = torch.cat((keys, new_keys.to(q.dtype)))
            selected = self._choose(x, norm, keys[None], start, group, lowest)
            chosen = None if takes_all(selected, len(keys), sight) else selected
        cos, sin = position_angles
        return compressed_attention(
            q, recent, entries, chosen, layer.sink(), cos, sin, sight, NORM_EPS
        )[0]

    def _choose(
        self, x: Tensor, norm: Any, keys: Tensor, start: int, group: int, lowest: int
    ) -> Tensor:
        """Select entries for each group of new bytes, (1, N, k) int32; store the last selection."""
        choice, parts = self._choice(), list[Tensor]()
        m, size, indexer, first = self.ratio, len(choice), self.layer.indexer, group
        if (start + 1) % m:  # the first group uses the previous selection, if there is one
            first += 1
            before = torch.where((choice >= 0) & (group > 0), choice - lowest, -1)
            parts.append(before[None, None])
        ends = slice(first * m - 1 - start, x.shape[1], m)
        if ends.start < x.shape[1]:
            angles = rows_at(rows_at(self.index_table, slice(start, start + x.shape[1])), ends)
            q, w = indexer.queries(x[:, ends], norm, angles)
            entries = indexer.choose(q, w, keys, first - lowest, self.max_entries)[..., :size]
            parts.append(functional.pad(entries, (0, size - entries.shape[2]), value=-1))
        chosen = torch.cat(parts, dim=1)
        last = chosen[0, -1]
        choice.copy_(torch.where(last >= 0, last + lowest, -1))
        return chosen[:, :, : keys.shape[1]]

    def _choice(self) -> Tensor:
        assert self.choice is not None, "an indexer has one"
        return self.choice

    def _attend_one(
        self, x: Tensor, norm: Any, q: Tensor, recent: Tensor, values: Tensor, gates: Tensor
    ) -> Tensor:
        """Attend from one new byte; no shape depends on its position."""
        layer = self.layer
        new = torch.stack((recent, values, gates), dim=2).unflatten(-1, (layer.kv_heads, -1))
        still = self.append(new, layer.gate_bias(new.device))
        if self.keys is not None:
            self.choose(layer.indexer.query(x, norm), layer.indexer.key(still.flatten(2)))
        return self.attend_one(q, layer.sink())

    def append(self, new: Tensor, beta: Tensor) -> Tensor:
        """Store one byte of each text.

        Args:
            new: (B, 1, 3, G, d), key, value and gate.
            beta: see `append_position_`.

        Returns:
            (B, 1, G, d), the incomplete entries before their rotation.
        """
        if self.layer.key_gain or self.clock.cache_format.mixed:
            return self._append_plainly(new[0, 0].contiguous(), beta)[None, None]
        texts = self.clock.position.shape
        inputs = (self.open, beta, self.clock.position, *self.table, NORM_EPS, self.exponents)
        new = new.reshape(*texts, *new.shape[2:]).contiguous()
        still = append_position_(new, self.recent.codes, self.entries.codes, *inputs)
        return still.view(-1, 1, *still.shape[-2:])

    def _append_plainly(self, new: Tensor, beta: Tensor) -> Tensor:
        """Run `append` for one text, (3, G, d), with torch operations after the norm."""
        (cos, sin), place = self.table, self.clock.position.long()[None]
        flat, rows = (torch.ones_like(cos), torch.zeros_like(sin)), torch.empty_like(new[:2, None])
        still = append_position_(
            new, rows[0], rows[1], self.open, beta, self.clock.position, *flat, NORM_EPS
        )
        number = place // self.ratio
        for kept, slot, at, row in (
            (self.recent, place, place, rows[0]),
            (self.entries, number, number * self.ratio, rows[1]),
        ):
            angles = broadcast_heads(rows_at(self.table, at))
            kept.put(slot % len(kept), self.layer.placed(row, angles).to(new.dtype))
        return still

    @property
    def fuses(self) -> bool:
        """Whether the fused kernels support the storage format."""
        return not self.clock.cache_format.mixed

    @property
    def exponents(self) -> tuple[Tensor, Tensor] | None:
        """Exponents of recent bytes, (W, G) int8, and of entries, (slots, G) int8.

        A batch of texts has a batch dimension in front. None if the cache is not in eight bits.
        """
        recent, entries = self.recent.exponents, self.entries.exponents
        return None if recent is None or entries is None else (recent, entries)

    def choose(self, query: Tensor, key: Tensor) -> None:
        """Store the key of the incomplete entry, and select anew if it is now complete.

        Args:
            query: projection of the byte for the indexer's query, (B, 1, n).
            key: projection of the entry for the indexer's key, (B, 1, n).
        """
        texts = self.clock.position.shape
        cos, sin = self.index_table
        query, key = (part.view(*texts, -1) for part in (query, key))
        assert self.keys is not None
        choose_next_(
            query, key, self.keys, self._choice(), self.clock.position, cos, sin, self.ratio,
            self.max_entries, NORM_EPS,
        )  # fmt: skip

    def attend_one(self, q: Tensor, sink: Tensor) -> Tensor:
        """Attend from the byte that was stored last; q is (B, 1, H, d), projected queries."""
        choice = self.choice
        if choice is not None and choice.shape[-1] >= len(self.entries) - 1:
            choice = None  # all complete entries are selected
        if self.clock.cache_format.mixed:
            return self._attend_plainly(q[0, 0], sink, choice)[None, None]
        cos, sin = self.table
        x = q.reshape(*self.clock.position.shape, *q.shape[2:]).contiguous()
        y = decode_compressed(
            x, self.recent.codes, self.entries.codes, choice, sink, self.clock.position, cos, sin,
            self.semaphores, self.ratio, self.max_entries, NORM_EPS, *(self.exponents or ()),
        )  # fmt: skip
        return y.view(q.shape)

    def _attend_plainly(self, q: Tensor, sink: Tensor, choice: Tensor | None) -> Tensor:
        """Run `attend_one` for one text, (H, d), with torch; no shape depends on the position."""
        position, (window, slots) = self.clock.position, (len(self.recent), len(self.entries))
        complete = (position + 1) // self.ratio
        if choice is not None:
            numbers = choice.long()
        else:  # the latest entry of each slot, one of which may be incomplete
            numbers = complete - 1 - (complete - 1 - torch.arange(slots, device=q.device)) % slots
        there = (numbers >= 0) & (numbers >= complete - self.max_entries)
        position_ids = torch.arange(window, device=q.device)
        seen = torch.cat((there, position_ids <= position))
        keys = torch.cat((self.entries.get(numbers % slots), self.recent.get(position_ids)))
        cos, sin = rows_at(self.table, position.long()[None])
        turned = rotate(unit_rms(q.float()), cos, sin)
        heads = turned.unflatten(0, (keys.shape[1], -1))  # (G, heads, d)
        keys = keys.float().movedim(1, 0)
        scores = (heads @ keys.mT) / math.sqrt(q.shape[-1])
        scores = scores.masked_fill(~seen, -torch.inf)
        scores = torch.cat((scores, sink.view(len(keys), -1, 1)), dim=-1)
        y = (torch.softmax(scores, dim=-1)[..., :-1] @ keys).flatten(0, 1)
        return rotate(y, cos, -sin).to(q.dtype)
