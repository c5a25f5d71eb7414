"""Blocks, and lists of them on one stream."""

from collections.abc import Iterator
from functools import partial
from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from arbcli.config.model import BlockConfig, Blocks, StageConfig
from arbcli.config.site import Site
from arbcli.model.flow import Flow, Losses, Reading, each_text, merge, rows_of
from arbcli.model.layers.kinds import stream_norm
from arbcli.model.layers.linear import TernaryLinear, decode_in_groups
from arbcli.model.layers.norm import NORM_EPS
from arbcli.model.layers.streamed import recompute_contexts
from arbcli.model.layers.streams import average_streams, spread_streams
from arbcli.model.parts.base import Part
from arbcli.model.parts.hyper_connection import HyperConnection
from arbcli.model.registry import build_part
from arbcli.model.state import Clock, KeptTexts, State, Track

recomputed = partial(
    checkpoint, use_reentrant=False, preserve_rng_state=False, determinism_check="none",
    context_fn=recompute_contexts,
)  # fmt: skip
"""Has torch compute a block again: there is no dropout, and shapes do not change."""


class Branch(NamedTuple):
    """A part of a block with its norm, and its hyper-connection where there are several streams."""

    part: Part
    norm: nn.Module
    connection: HyperConnection | None


class Block(nn.Module):
    """A mixer and a channel mixer, each after its norm and added to the residual stream.

    Args:
        config: of the block.
        stage: that it belongs to.
        site: where it stands.
        first: number of its first branch in the list of blocks; branches read streams in turns.
    """

    def __init__(self, config: BlockConfig, stage: StageConfig, site: Site, first: int = 0) -> None:
        super().__init__()
        streams, self.contribution, self.bound = stage.streams, stage.contribution, stage.bound
        parts = [build_part(part, site) for part in config.parts]
        norms, connections = [], []
        for part in parts:
            norms.append(stream_norm(site))
            self.add_module(part.norm_name or f"{part.name}_norm", norms[-1])
            self.add_module(part.name, part)
        for number, part in enumerate(parts, first):
            connection = HyperConnection(site, streams, number % streams) if streams > 1 else None
            connections.append(connection)
            if connection:
                self.add_module(f"{part.name}_streams", connection)
        self.branches = [*map(Branch, parts, norms, connections)]
        """The parts in their order, which are modules under their own names."""

    def forward(
        self,
        x: Tensor,
        added: Tensor | None = None,
        reading: Reading | None = None,
        state: State | None = None,
        *,
        whole: bool = True,
    ) -> Flow:
        """Add what the parts make of the stream.

        Args:
            x: the stream, (B, T, D), or (B, T, n, D).
            added: what is still to be added to it.
            reading: what is read besides.
            state: of the text before, which the positions are added to; B is 1.
            whole: whether to add what the last part makes, too; else it is left to the next norm,
                which adds it at no cost.
        """
        losses: list[Losses] = []

        def apply(branch: Branch, x: Tensor, added: Tensor | None = None) -> Flow:
            flow = branch.part(x, branch.norm, added, reading, state)
            losses.append(flow.losses)
            if self.contribution == 1:
                return flow
            return flow._replace(added=self.contribution * flow.added)

        for branch in self.branches:
            if branch.connection is None:
                x, added, _ = apply(branch, x, added)
            else:
                x = branch.connection(x, lambda h, branch=branch: apply(branch, h).added)
        if (whole or self.bound is not None) and added is not None:
            x, added = x + added, None
        return Flow(x if self.bound is None else bounded(x, self.bound), added, merge(*losses))

    def step(self, x: Tensor, state: State | None, reading: Reading | None = None) -> Tensor:
        """Add to positions of a text, or one of several: by kernels where parts have any."""
        read = reading or Reading()

        def apply(branch: Branch, x: Tensor, *, whole: bool) -> Tensor:
            part, norm, _ = branch
            fits = x.shape[1] == 1 or part.steps_along
            if fits and part.steps_fused and getattr(state, "fuses", True):
                return part.step(x, state, whole=whole)
            if len(x) == 1:
                added = part(x, norm, None, reading, state).added
            elif part.steps_texts:
                added = part.step_texts(x, norm, read)
            else:
                rows = [
                    part(row, norm, None, read.of(text), state and state.each[text]).added
                    for text, row in enumerate(rows_of(x))
                ]
                added = torch.cat(rows)
            return x + added if whole else added

        for branch in self.branches:
            if branch.connection is None:
                x = apply(branch, x, whole=True)
            else:
                add = partial(apply, branch, whole=False)
                x = branch.connection(x, add, fused=True)
        return x

    def new_state(self, clock: Clock) -> State | None:
        """Make the state of a text."""
        found = [branch.part.new_state(clock) for branch in self.branches]
        return next(filter(None, found), None)

    def linears(self) -> list[nn.Module] | None:
        """List the linear layers in the order of a forward; None if a part decodes its own."""
        found = [branch.part.linears() for branch in self.branches]
        return [layer for layers in found for layer in layers] if all(found) else None


def bounded(x: Tensor, most: float) -> Tensor:
    """Scale vectors (..., D) down whose root-mean-square is above `most`, in float32."""
    inverse = torch.rsqrt(x.float().square().mean(dim=-1, keepdim=True) + NORM_EPS)
    return (x * (most * inverse).clamp(max=1)).to(x.dtype)


def is_compiled(block: Block) -> bool:
    """Return whether `block.compile()` was called."""
    return block._compiled_call_impl is not None


class Stack(nn.ModuleList):
    """A list of blocks on one stream, or on several that begin and end as one.

    Args:
        blocks: configurations.
        stage: that they belong to.
        site: where they stand.
        grouped: whether small matrices are decoded several at a time, if the blocks are equal.
    """

    if TYPE_CHECKING:

        def __iter__(self) -> Iterator[Block]: ...

    def __init__(
        self,
        blocks: Blocks,
        stage: StageConfig,
        site: Site,
        *,
        grouped: bool = False,
    ) -> None:
        first, made = 0, []
        for config in blocks:
            made.append(Block(config, stage, site, first))
            first += len(config.parts)
        super().__init__(made)
        self.streams, self.float_twin = stage.streams, site.weights != "ternary"
        linears = [block.linears() for block in self]
        if grouped and not self.float_twin and len(set(blocks)) == 1 and all(linears):
            decode_in_groups(
                [
                    [each.weight for each in layers if isinstance(each, TernaryLinear)]
                    for layers in linears
                    if layers
                ]
            )

    def forward(
        self,
        x: Tensor,
        reading: Reading | None = None,
        track: Track | None = None,
        *,
        recompute: bool = False,
        some: slice = slice(None),
    ) -> Flow:
        """Pass the stream (B, T, D) through blocks.

        Args:
            x: the stream.
            reading: what is read besides.
            track: states of the text before, inside of `clock.reading`. Those of several texts take
                a position of each, one text after another.
            recompute: whether a backward computes what is inside a block again.
            some: which blocks.

        Returns:
            The stream, (B, T, D), and what is still to be added to it.
        """
        if track and track.each:
            texts = enumerate(zip(rows_of(x), track.each, strict=True))
            read = reading or Reading()
            rows = [self(row, read.of(text), own, some=some) for text, (row, own) in texts]
            return Flow(torch.cat([flow.whole() for flow in rows]))
        if self.streams > 1:
            x = spread_streams(x, self.streams)
            if any(map(is_compiled, self)):
                x = x.contiguous()  # for strides of its own a block would be compiled once more
        added: Tensor | None = None
        losses: list[Losses] = []
        states = track.blocks[some] if track else None
        for index, block in enumerate([*self][some]):
            if recompute and torch.is_grad_enabled():
                flow = recomputed(block, x, None, reading)
            else:
                # a hook sees the whole stream; what is compiled adds up by itself
                whole = self.float_twin or is_compiled(block) or bool(block._forward_hooks)
                state = states[index] if states else None
                flow = block(x, added, reading, state, whole=whole)
            x, added = flow.x, flow.added
            losses.append(flow.losses)
        if self.streams > 1:
            x = average_streams(x)
        return Flow(x, added, merge(*losses))

    def step(
        self, x: Tensor, track: Track, reading: Reading | None = None, some: slice = slice(None)
    ) -> Tensor:
        """Pass positions of a text, or one of several, through blocks: see `Block.step`."""
        if self.streams > 1:
            x = spread_streams(x, self.streams)
        for block, state in zip([*self][some], track.blocks[some], strict=True):
            x = block.step(x, state, reading)
        return each_text(average_streams, x) if self.streams > 1 else x

    def new_track(self, ctx: int, texts: KeptTexts) -> Track:
        """Make the states of a text, or of several: see `Clock`."""
        clock = Clock(ctx, texts)
        return Track(clock, [block.new_state(clock) for block in self])
