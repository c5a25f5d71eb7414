"""Memories between two blocks of the innermost stage, and the router after its last block.

Codebooks read the same stream in parallel, and their outputs are added to it. Iterated experts with
a graph of codes follow. The router mixes the stage's output with its input and the codebooks'.
"""

from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor, nn

from arbcli.config.layer_spec import LayerSpec
from arbcli.families.graph.codebook import Codebook
from arbcli.families.graph.config import MemoriesConfig
from arbcli.families.graph.moe_graph import MoEGraph
from arbcli.families.graph.quantiser import Quantiser
from arbcli.families.graph.router import Router
from arbcli.model.parts.base import (
    BlockInputs,
    BlockOutput,
    Losses,
    build_part,
    map_texts,
    merge_losses,
    split_texts,
)


class Memories(nn.Module):
    """Codebooks, iterated experts and a router around the blocks of a stage.

    Args:
        config: the memories; None for a router alone.
        spec: storage settings and width of the stage.
        router: whether there is a router.
    """

    draws = ("codebook", "knowledge", "moe_graph", "router")
    codebook: Codebook | Quantiser | None
    knowledge: Codebook | Quantiser | None

    def __init__(self, config: MemoriesConfig | None, spec: LayerSpec, router: bool) -> None:
        super().__init__()
        self.config = config
        codebooks, inner_spec = (config.codebooks, config.part_spec(spec)) if config else ({}, spec)
        for name in ("codebook", "knowledge"):
            codebook = build_part(codebooks[name], inner_spec, name) if name in codebooks else None
            self.register_module(name, codebook)
        self.moe_graph = None
        if config and config.iterated:
            width = config.codebook.width if config.codebook else 0
            self.moe_graph = MoEGraph(config.iterated, config.iterated.part_spec(inner_spec), width)
        self.router = Router(2 + len(codebooks), spec) if router else None

    def forward(
        self,
        run: Callable[[Tensor, slice], BlockOutput],
        x: Tensor,
        inputs: BlockInputs,
        *,
        batched: bool = False,
    ) -> BlockOutput:
        """Run the blocks of the stage, with the memories between them.

        Args:
            run: runs the stream (B, T, D) through a slice of the blocks.
            x: the stream.
            inputs: additional inputs.
            batched: whether x has one position of each text of a batch, (B, 1, D), which are
                computed separately.
        """
        taps = [x]
        if self.config is None:
            output = run(x, slice(None))
        else:
            lower = run(x, slice(0, self.config.place))
            add_memories = self._add_memories_by_text if batched else self._add_memories
            x, losses = add_memories(lower.total(), taps, inputs)
            output = run(x, slice(self.config.place, None))
            output = output._replace(losses=merge_losses(lower.losses, losses, output.losses))
        if self.router:
            route = partial(map_texts, self.router) if batched else self.router
            output = BlockOutput(route(output.total(), *taps), None, output.losses)
        return output

    def _add_memories(
        self, x: Tensor, taps: list[Tensor], inputs: BlockInputs
    ) -> tuple[Tensor, Losses]:
        """Add the outputs of codebooks and graph to the stream; append codebooks' to `taps`."""
        outputs = [book(x) for book in (self.codebook, self.knowledge) if book]
        taps += [output.y for output in outputs]
        for output in outputs:
            x = x + output.y
        costs = [output.cost for output in outputs if output.cost is not None]
        losses = {"commitment": costs} if costs else {}
        if self.moe_graph is None:
            return x, losses
        lookup = outputs[0] if self.codebook else None
        iterated = self.moe_graph(x, self.codebook, lookup, inputs)
        # only training needs the cost
        ponder = {"ponder": [iterated.ponder_cost()]} if torch.is_grad_enabled() else {}
        return iterated.x, losses | ponder

    def _add_memories_by_text(
        self, x: Tensor, taps: list[Tensor], inputs: BlockInputs
    ) -> tuple[Tensor, Losses]:
        """Run `_add_memories` for one position of each text of a batch, separately."""
        results = []
        for text, row in enumerate(split_texts(x)):
            outputs: list[Tensor] = []
            x, _ = self._add_memories(row, outputs, inputs.select_text(text))
            results.append((x, *outputs))
        x, *outputs = (torch.cat(parts) for parts in zip(*results, strict=True))
        taps += outputs
        return x, {}
