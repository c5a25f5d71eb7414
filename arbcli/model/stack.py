"""Blocks, and stacks of blocks on a residual stream."""

from collections.abc import Iterator
from functools import partial
from importlib import import_module
from itertools import accumulate
from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from arbcli.config.layer_spec import LayerSpec
from arbcli.config.model import BlockConfig, Blocks, StageConfig
from arbcli.families import RESIDUAL
from arbcli.model.layers.kinds import stream_norm
from arbcli.model.layers.linear import LinearWeight, TernaryLinear
from arbcli.model.layers.norm import NORM_EPS
from arbcli.model.packed import recompute_contexts
from arbcli.model.parts.base import (
    BlockInputs,
    BlockOutput,
    Losses,
    Part,
    build_part,
    map_texts,
    merge_losses,
    split_texts,
)

if TYPE_CHECKING:
    from arbcli.families.streams.hyper_connection import HyperConnection
    from arbcli.model.state import PositionCounter, State, StateSpec, Track

checkpointed = partial(
    checkpoint, use_reentrant=False, preserve_rng_state=False, determinism_check="none",
    context_fn=recompute_contexts,
)  # fmt: skip
"""Activation checkpointing of a block; its random masks depend on keys, not on a generator, and its
shapes are fixed."""


class Branch(NamedTuple):
    """A part of a block with its norm, and its hyper-connection if there are several streams."""

    part: Part
    norm: nn.Module
    connection: "HyperConnection | None"


def _norm_name(part: Part) -> str:
    return part.norm_name or f"{part.name}_norm"


class Block(nn.Module):
    """A pre-norm residual block of a mixer and a channel mixer.

    Args:
        config: configuration of the block.
        stage: configuration of the stage that it belongs to.
        spec: storage settings and width of the stage.
        first: index of its first branch in the stack; branches read the streams in turn.
    """

    def __init__(
        self, config: BlockConfig, stage: StageConfig, spec: LayerSpec, first: int = 0
    ) -> None:
        super().__init__()
        streams, self.contribution, self.bound = stage.streams, stage.contribution, stage.bound
        parts = [build_part(part, spec) for part in config.parts]
        norms, connections = [], []
        for part, part_config in zip(parts, config.parts, strict=True):
            norms.append(stream_norm(spec, rounded=part_config.is_bitnet))
            self.add_module(_norm_name(part), norms[-1])
            self.add_module(part.name, part)
        for number, part in enumerate(parts, first):
            connection = None
            if streams > 1:
                residual = import_module(RESIDUAL)
                connection = residual.HyperConnection(spec, streams, number % streams)
            connections.append(connection)
            if connection:
                self.add_module(f"{part.name}_streams", connection)
        self.branches = [*map(Branch, parts, norms, connections)]
        """The parts in order; each is also a submodule under its own name."""
        if streams == 1 and stage.bound is None and parts[-1].ends_with_product:
            last = parts[-1].linears()[-1]
            if isinstance(last, TernaryLinear):
                last.weight.is_last = True

    @property
    def draws(self) -> tuple[str, ...]:
        """See `arbcli.model.packed.DrawOrder`."""
        parts = [branch.part for branch in self.branches]
        pairs = [name for part in parts for name in (_norm_name(part), part.name)]
        return (*pairs, *(f"{part.name}_streams" for part in parts))

    def forward(
        self,
        x: Tensor,
        added: Tensor | None = None,
        inputs: BlockInputs | None = None,
        state: "State | None" = None,
        *,
        add_residual: bool = True,
    ) -> BlockOutput:
        """Add the outputs of the parts to the residual stream.

        Args:
            x: the stream, (B, T, D), or (B, T, n, D).
            added: pending addition to the stream.
            inputs: additional inputs, with the dropout of this block alone.
            state: decoding state, to which the positions are added; B is 1.
            add_residual: whether to add the output of the last part; otherwise it stays pending, to
                be fused into the next norm.
        """
        losses: list[Losses] = []
        dropout = inputs.dropout if inputs else None

        def apply(number: int, x: Tensor, added: Tensor | None = None) -> BlockOutput:
            branch, branch_inputs = self.branches[number], inputs
            if inputs and dropout:
                branch_inputs = inputs._replace(dropout=dropout.select(number, 1))
            output = branch.part(x, branch.norm, added, branch_inputs, state)
            losses.append(output.losses)
            if self.contribution != 1:
                output = output._replace(added=self.contribution * output.added)
            if dropout is None:
                return output
            return output._replace(added=dropout.drop(number, output.added))

        for number, branch in enumerate(self.branches):
            if branch.connection is None:
                x, added, _ = apply(number, x, added)
            else:
                x = branch.connection(x, lambda h, number=number: apply(number, h).added)
        if (add_residual or self.bound is not None) and added is not None:
            x, added = x + added, None
        return BlockOutput(
            x if self.bound is None else clamp_rms(x, self.bound), added, merge_losses(*losses)
        )

    def step(self, x: Tensor, state: "State | None", inputs: BlockInputs | None = None) -> Tensor:
        """Run the block for positions of a text, or one of each text, by fused kernels if possible.

        Args:
            x: the stream, (1, T, D) or (B, 1, D), or with n streams (B, 1, n, D).
            state: decoding state of the text or of the batch.
            inputs: additional inputs.

        Returns:
            The stream, of the shape of x.
        """
        inputs = inputs or BlockInputs()

        def apply(branch: Branch, residual: Tensor | None, x: Tensor) -> Tensor:
            part, norm, _ = branch
            fits = x.shape[1] == 1 or part.steps_positions
            if fits and part.steps_fused and getattr(state, "fuses", True):
                return part.step(x, state, residual)
            if len(x) == 1:
                added = part(x, norm, None, inputs, state).added
            elif part.steps_texts:
                added = part.step_texts(x, norm, inputs)
            else:
                rows = [
                    part(
                        row, norm, None, inputs.select_text(text), state and state.text_views[text]
                    ).added
                    for text, row in enumerate(split_texts(x))
                ]
                added = torch.cat(rows)
            return added if residual is None else residual + added

        for branch in self.branches:
            if branch.connection is None:
                x = apply(branch, x, x)
            else:
                x = branch.connection(x, partial(apply, branch, None), fused=True)
        return x

    def new_state(self, clock: "PositionCounter") -> "State | None":
        """Create the decoding state of a text."""
        return next(filter(None, [branch.part.new_state(clock) for branch in self.branches]), None)

    def linears(self) -> list[nn.Module] | None:
        """Return the linear layers in order of use; None if a part decodes its own weights."""
        part_layers = [branch.part.linears() for branch in self.branches]
        return [layer for layers in part_layers for layer in layers] if all(part_layers) else None


def clamp_rms(x: Tensor, limit: float) -> Tensor:
    """Scale down vectors (..., D) whose RMS exceeds `limit`, in float32."""
    inverse = torch.rsqrt(x.float().square().mean(dim=-1, keepdim=True) + NORM_EPS)
    return (x * (limit * inverse).clamp(max=1)).to(x.dtype)


def is_compiled(block: Block) -> bool:
    """Return whether `block.compile()` was called."""
    return block._compiled_call_impl is not None


class Stack(nn.ModuleList):
    """A list of blocks on one residual stream, or on several that are expanded and averaged.

    Args:
        blocks: configurations of the blocks.
        stage: configuration of the stage that they belong to.
        spec: storage settings and width of the stage.
    """

    if TYPE_CHECKING:

        def __iter__(self) -> Iterator[Block]: ...

    def __init__(self, blocks: Blocks, stage: StageConfig, spec: LayerSpec) -> None:
        *firsts, self.num_branches = accumulate((len(block.parts) for block in blocks), initial=0)
        modules = [
            Block(config, stage, spec, first) for config, first in zip(blocks, firsts, strict=True)
        ]
        super().__init__(modules)
        self._firsts = firsts
        self.first_branch = 0
        """Number of branches of the model before this stack, in the order of a forward."""
        self.configs, self.streams = blocks, stage.streams
        self.is_baseline = spec.weights != "ternary"

    def weights_of_blocks(self) -> list[list[LinearWeight]]:
        """Return the weights of each block in the order of a forward.

        Empty if blocks differ, or have a part that decodes its own weights.
        """
        linears = [block.linears() for block in self]
        if self.is_baseline or len(set(self.configs)) > 1 or not all(linears):
            return []
        return [
            [layer.weight for layer in layers if isinstance(layer, TernaryLinear)]
            for layers in linears
            if layers
        ]

    def forward(
        self,
        x: Tensor,
        inputs: BlockInputs | None = None,
        track: "Track | None" = None,
        *,
        recompute: bool = False,
        span: slice = slice(None),
    ) -> BlockOutput:
        """Run the stream (B, T, D) through the blocks.

        Args:
            x: the stream.
            inputs: additional inputs.
            track: decoding states, within `clock.reading`. In a batch of texts x has one position
                of each, and texts are computed one after another.
            recompute: whether to use activation checkpointing.
            span: slice of blocks to run.

        Returns:
            The stream, (B, T, D), with a pending addition.
        """
        if track and track.text_views:
            texts = enumerate(zip(split_texts(x), track.text_views, strict=True))
            inputs = inputs or BlockInputs()
            rows = [
                self(row, inputs.select_text(text), view, span=span) for text, (row, view) in texts
            ]
            return BlockOutput(torch.cat([output.total() for output in rows]))
        if self.streams > 1:
            x = import_module(RESIDUAL).spread_streams(x, self.streams)
            if any(map(is_compiled, self)):
                x = x.contiguous()  # other strides would compile the block again
        added: Tensor | None = None
        losses: list[Losses] = []
        states = track.blocks[span] if track else None
        dropout, firsts = inputs.dropout if inputs else None, self._firsts[span]
        for index, block in enumerate([*self][span]):
            if inputs and dropout:
                first = self.first_branch + firsts[index]
                inputs = inputs._replace(dropout=dropout.select(first, len(block.branches)))
            if recompute and torch.is_grad_enabled():
                output = checkpointed(block, x, None, inputs)
            else:
                # hooks expect the complete stream, and compiled blocks fuse the addition themselves
                add_residual = self.is_baseline or is_compiled(block) or bool(block._forward_hooks)
                state = states[index] if states else None
                output = block(x, added, inputs, state, add_residual=add_residual)
            x, added = output.x, output.added
            losses.append(output.losses)
        if self.streams > 1:
            x = import_module(RESIDUAL).average_streams(x)
        return BlockOutput(x, added, merge_losses(*losses))

    def step(
        self,
        x: Tensor,
        track: "Track",
        inputs: BlockInputs | None = None,
        span: slice = slice(None),
    ) -> Tensor:
        """Run positions of a text, or one of each text, through the blocks: see `Block.step`."""
        residual = import_module(RESIDUAL) if self.streams > 1 else None
        if residual:
            x = residual.spread_streams(x, self.streams)
        for block, state in zip([*self][span], track.blocks[span], strict=True):
            x = block.step(x, state, inputs)
        return map_texts(residual.average_streams, x) if residual else x

    def new_track(self, ctx: int, texts: "StateSpec") -> "Track":
        """Create the decoding states of a text, or of a batch of texts: see `PositionCounter`."""
        from arbcli.model.state import PositionCounter, Track  # training needs no states

        clock = PositionCounter(ctx, texts)
        return Track(clock, [block.new_state(clock) for block in self])


def run_position(
    stack: Stack, x: Tensor, track: "Track", inputs: BlockInputs, *, fused: bool
) -> Tensor:
    """Run one position of each text, (B, 1, D), through a stack; the caller counts positions."""
    with track.clock.reading_uncounted():
        return stack.step(x, track, inputs) if fused else stack(x, inputs, track).total()
