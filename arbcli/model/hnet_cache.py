"""What an `HNet` remembers of one text, at all of its stages."""

import torch
from torch import Tensor
from torch.nn import functional

from arbcli.config.hnet import HNetConfig
from arbcli.kernels.chunks.boundary_scores import boundary_scores
from arbcli.kernels.chunks.route_position import route_position_, take_chunk_
from arbcli.kernels.chunks.smooth_chunks import smooth_chunks
from arbcli.kernels.chunks.spread_chunks import spread_chunks
from arbcli.kernels.runtime.conditions import has_conditions
from arbcli.model.blocks.chunking import Routed, share_of
from arbcli.model.blocks.mamba import MambaCache
from arbcli.model.cache import KeyValueCache
from arbcli.model.layers.norm import NORM_EPS


class HNetCache:
    """What an `HNet` remembers of one text: keys and values of all blocks, and the last chunk.

    Args:
        config: of the model.
        positions: bytes that the text can have.
        dtype: of keys and values.
        device: where they are.
        stored: float8_e4m3fn or int8, to keep them in eight bits; None is `dtype`. States of
            Mamba-2 are none of them.
    """

    def __init__(
        self,
        config: HNetConfig,
        positions: int,
        dtype: torch.dtype,
        device: torch.device,
        *,
        stored: torch.dtype | None = None,
    ) -> None:
        self.positions, self.window = positions, min(config.window, *config.slots, positions)
        self.stages = [
            StageCache(config, stage, positions, dtype, device, stored)
            for stage in range(config.stages)
        ]
        self.main = KeyValueCache(config.main(), positions, dtype, device, stored=stored)

    @property
    def nbytes(self) -> int:
        """Bytes that keys, values and states take."""
        of_stages = sum(stage.encoder.nbytes + stage.decoder.nbytes for stage in self.stages)
        return self.main.nbytes + of_stages

    @property
    def position(self) -> Tensor:
        """Bytes seen; a step reads it on the device, and nobody waits for it."""
        return self.stages[0].encoder.position

    def depths(self) -> Tensor:
        """Count the stages that began a chunk at each byte that was read last: (T,) int64."""
        counts = torch.zeros_like(self.stages[0].begins[0], dtype=torch.int64)
        places = torch.arange(len(counts), device=counts.device)
        for stage in self.stages:
            places = places[stage.begins[0]]
            if not len(places):  # what is inside has read nothing
                break
            counts[places] += 1
        return counts

    def reset(self) -> None:
        """Begin a new text."""
        for stage in self.stages:
            stage.encoder.reset()
            stage.decoder.reset()
            stage.mean.zero_()
        self.main.reset()


class StageCache:
    """What a stage remembers, and what its encoder leaves for its decoder."""

    x: Tensor
    """(1, T, D), the new positions, encoded; normalised if there are several."""
    residual: Tensor
    """(1, T, D), what of them goes past the inner network."""
    p: Tensor
    """(1, T) float32, how likely chunks begin at them."""
    begins: Tensor
    """(1, T) bool, whether they do."""
    y: Tensor
    """(1, 1, D), what the decoder is given of a single one."""

    def __init__(
        self,
        config: HNetConfig,
        stage: int,
        positions: int,
        dtype: torch.dtype,
        device: torch.device,
        stored: torch.dtype | None,
    ) -> None:
        own = config.outer(stage)

        def new_cache() -> KeyValueCache | MambaCache:
            if config.outer_blocks == "mamba":
                return MambaCache(own, config.states, dtype, device)
            about = {"window": config.window, "stored": stored}
            return KeyValueCache(own, positions, dtype, device, **about)

        self.encoder, self.decoder = new_cache(), new_cache()
        like = {"dtype": dtype, "device": device}
        self.last = torch.zeros(2, own.dim, **like)
        """The position before the new ones, encoded and normalised, and what is projected of it
        for the position behind it."""
        self.mean = torch.zeros(own.dim, dtype=torch.float32, device=device)
        """The last chunk, smoothed."""
        self.byte = torch.zeros(1, 1, dtype=torch.int64, device=device)
        """The last byte."""
        self.handle = torch.zeros_like(self.byte) if has_conditions(device) else None
        """That of a conditional node, which is told whether a single position begins a chunk."""
        self._means: Tensor | None = None

    def begin(self, router: str, x: Tensor, rows: Tensor, ids: Tensor, length: int) -> None:
        """Route a single position: see `route_position_`."""
        about = (self.mean, self.last.view(-1), self.byte, ids)
        places = (self.encoder.position, self.decoder.position, length, NORM_EPS, self.handle)
        self.p, self.begins, y = route_position_(router, x.view(-1), rows.view(-1), *about, *places)
        self.x, self.residual, self.y = x, rows[..., -x.shape[-1] :], y.view(x.shape)

    def take(self, z: Tensor, counted: Tensor | None) -> None:
        """Take a single new chunk: see `take_chunk_`."""
        vectors = (part.view(-1) for part in (self.residual, self.mean, self.y))
        take_chunk_(z.view(-1), self.p, *vectors, counted)

    def route(self, x: Tensor, query_key: Tensor, places: Tensor) -> Routed:
        """Compare new positions (1, T, D) with those before them; `places` is where they are."""
        width = x.shape[-1]
        # of the position before only the query counts
        last_query_key = functional.pad(self.last[1], (0, width))
        before = (
            torch.cat((self.last[:1][None], x), dim=1),
            torch.cat((last_query_key[None, None], query_key), dim=1),
        )
        p = boundary_scores(*before)[:, 1:].masked_fill(places == 0, 1)
        self.last[0].copy_(x[0, -1])
        self.last[1].copy_(query_key[0, -1, :width])
        return Routed(p, p > 0.5)

    def chosen(self) -> Tensor:
        """Take the new positions that begin chunks, (1, n, D)."""
        return self.x[self.begins][None]

    def take_in(self, z: Tensor) -> None:
        """Smooth new chunks, (1, n, D) of what the inner network gives."""
        p = self.p[self.begins][None]
        share = torch.cat((torch.ones_like(p[:, :1]), share_of(p)), dim=1)
        self._means = smooth_chunks(torch.cat((self.mean[None, None], z.float()), dim=1), share)
        self.mean.copy_(self._means[0, -1])

    def spread(self) -> Tensor:
        """Give every new position its chunk, (1, T, D), and what went past the inner network."""
        means, self._means = self._means, None
        if means is None:
            means, owner = self.mean[None, None], torch.zeros_like(self.begins, dtype=torch.int64)
        else:
            owner = self.begins.cumsum(1)
        return spread_chunks(self.residual, means, owner)
