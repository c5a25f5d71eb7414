"""`LanguageModel`: embedding, stages of blocks, norm and head, built from a configuration.

bytes -> embedding, n-grams -> [encoder -> chunks ->] blocks, memories [-> decoder] -> norm -> head

`stages` has the outer stages, and `blocks` the blocks of the innermost one. Optional parts that the
configuration omits are None.
"""

from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.nn import functional

from arbcli.config.kinds import BESIDE
from arbcli.config.model import VOCABULARY, ModelConfig
from arbcli.families.ahead.head import Ahead
from arbcli.families.graph.codebook import Codebook
from arbcli.families.graph.moe_graph import MoEGraph
from arbcli.families.graph.quantiser import Quantiser
from arbcli.families.graph.router import Router
from arbcli.families.hnet.stage import Chunked, Stage
from arbcli.families.media.head import CompositeHead
from arbcli.model.cache import BatchCache, Cache
from arbcli.model.decoding import forward_with_cache
from arbcli.model.flow import Documents, Flow, Losses, Reading, merge, rows_of
from arbcli.model.layers.kinds import layers_for, stream_norm, symbol_embedding, symbol_head
from arbcli.model.layers.linear import TernaryLinear, decode_in_groups
from arbcli.model.layers.loss import divergence
from arbcli.model.layers.symbols import Predictions, in_chunks
from arbcli.model.packed_model import PackedModel
from arbcli.model.parts.mlp import MLP
from arbcli.model.registry import build_part
from arbcli.model.stack import Stack
from arbcli.model.state import Track

LOSS_WEIGHTS = {"ponder": 0.01, "ratio": 0.3, "indexer": 1.0, "teacher": 1.0, "commitment": 0.25}
"""Weights of the auxiliary losses, relative to the loss of the text.

H-Net uses 0.03 for `ratio`; with ten times that, chunks keep their target length. The weight of
`indexer` is arbitrary, as the indexers' parameters have no other loss.
"""


class LanguageModel(PackedModel):
    """A language model over bytes or tokens.

    Args:
        config: configuration of the parts and of weight storage.
        compute_dtype: dtype of activations, bfloat16 or float32.
        recompute: whether to use activation checkpointing, which only saves the inputs of blocks.
    """

    codebook: Codebook | Quantiser | None
    knowledge: Codebook | Quantiser | None
    tokenizer: Any = None
    """The `arbcli.data.tokens.Tokenizer`; None for a model of bytes, or if it is unknown."""

    def __init__(
        self,
        config: ModelConfig,
        compute_dtype: torch.dtype = torch.bfloat16,
        *,
        recompute: bool = False,
    ) -> None:
        super().__init__(config, compute_dtype)
        self.recompute = recompute
        outermost, site = config.site(), config.site(-1)
        main, memories = config.main, config.main.memories
        parts = layers_for(outermost)
        self.cross_entropy = parts.cross_entropy
        # initialisation and random bits depend on the order of modules: never change it
        self.embedding = symbol_embedding(config)
        beside = {part.kind: part for part in config.beside}
        for name in BESIDE:
            setattr(self, name, build_part(beside[name], outermost) if name in beside else None)
        self.stages: Any  # a `ModuleList` of `Stage`
        if config.outer:
            self.stages = nn.ModuleList(Stage(config, index) for index in range(len(config.outer)))
        else:
            self.stages = ()
        self.blocks = Stack(main.blocks, main, site)
        books, between = (memories.codebooks, memories.own_site(site)) if memories else ({}, site)
        for name in ("codebook", "knowledge"):
            setattr(self, name, build_part(books[name], between, name) if name in books else None)
        self.moe_graph = None
        if memories and memories.iterated:
            width = memories.codebook.width if memories.codebook else None
            own_site = memories.iterated.own_site(between)
            self.moe_graph = MoEGraph(memories.iterated, own_site, width)
        self.router = Router(2 + len(books), site) if main.router else None
        if config.head:
            self.byte_norm = stream_norm(outermost)
            self.byte_mlp = MLP(config.head, config.head.own_site(outermost), area="head")
        self.norm = stream_norm(outermost)
        if config.composite:
            self.head: Any = CompositeHead(config.composite.own_site(outermost))
        else:
            self.head = symbol_head(config, self.embedding)
        ahead = config.ahead
        self.ahead = Ahead(ahead, ahead.own_site(outermost)) if ahead else None
        if memories is None:
            decodes_whole = isinstance(self.head, TernaryLinear) and not self.scores_in_chunks
            follows = decodes_whole and not self.ahead and not config.outer
            head = self.head.weight if follows else None
            decode_in_groups(self.blocks.weights_of_blocks(), head, across=not recompute)
            for stack in [stack for each in self.stages for stack in (each.encoder, each.decoder)]:
                decode_in_groups(stack.weights_of_blocks(), None, across=not recompute)
        self._counts: Tensor | None = None
        self._with_gauges: list[Any] | None = None
        """Parts with `gauges`; None before they are first read."""

    def forward(self, ids: Tensor, cache: Cache | None = None) -> Tensor:
        """Compute logits, (B, T, V) in `compute_dtype`, from bytes or tokens, (B, T) int64.

        With a `Cache`, B is 1, and the symbols continue the text of the cache. With a
        `BatchCache`, T is 1: one symbol of each text is read, and the logits of a text do not
        depend on the others.
        """
        if cache is not None:
            return forward_with_cache(self, ids, cache)
        return self.logits(self._hidden(ids, []))

    def new_cache(
        self,
        positions: int,
        texts: int = 1,
        *,
        first: int = 0,
        device: torch.device | None = None,
    ) -> Cache:
        """Create the decoding cache of texts of at most `positions` bytes.

        See `Cache`; for several texts it is a `BatchCache`.
        """
        if texts > 1:
            return BatchCache(self, texts, positions, first=first, device=device)
        return Cache(self, positions, first=first, device=device)

    def loss(self, ids: Tensor, targets: Tensor, documents: Tensor | None = None) -> Tensor:
        """Compute the mean cross-entropy in nats per symbol: see `losses`."""
        return self.losses(ids, targets, documents)["text"]

    def losses(
        self,
        ids: Tensor,
        targets: Tensor,
        documents: Tensor | None = None,
        *,
        teacher: "LanguageModel | None" = None,
    ) -> dict[str, Tensor]:
        """Compute the terms of the training loss, which is their sum weighted by `loss_weights`.

        Args:
            ids: (B, T) int64.
            targets: (B, T) int64. With `documents`, negative ones are ignored. For models that fill
                holes they come from `hide` or `cut`. With a composite head, 256 is added to bytes
                of sounds, and 512 to those of pictures.
            documents: (B, T) int64, number of each position's document in its window; attention
                stays within a document. None if each window is one text.
            teacher: a model with the same vocabulary, for knowledge distillation.

        Returns:
            Float32 scalars by name:
            `text`, the cross-entropy in nats per symbol, or the bound of a masked model;
            `ponder`, see `Iterated.ponder_cost`;
            `ratio`, the sum over the stages with learned boundaries;
            `indexer`, the mean over the blocks with an indexer;
            `commitment`, the mean over quantisers, see `Found.cost`;
            `of_text`, `of_sound` and `of_picture`, see `CompositeHead`;
            `next_2` and so on, see `Ahead`;
            `teacher`, the mean divergence from the teacher's predictions in nats per symbol.
        """
        seen: list[Chunked] = []
        flow = self._hidden(ids, seen, documents)
        if seen and torch.is_grad_enabled():
            self._counts = torch.stack([stage.counts for stage in seen])
        if self.config.composite:
            losses = self._composite_losses(flow, targets)
        elif self.config.is_masked:
            losses = {"text": self._masked_losses(flow, targets).mean()}
        elif self.config.fills or documents is not None:
            losses = {"text": self._mean_loss(flow, targets)}
        else:
            losses = {"text": self._text_loss(flow, targets)}
        for name in ("ponder", "indexer", "commitment"):
            if found := flow.losses.get(name):
                losses[name] = cast(Tensor, sum(found)) / len(found) if len(found) > 1 else found[0]
        ratios = [stage.ratio for stage in seen if stage.ratio is not None]
        if self.ahead:
            losses |= self.ahead.losses(flow.total(), ids)
        if teacher is not None:
            apart = self._divergences(flow, teacher, ids, documents)
            learnt = torch.ones_like(targets) if documents is None else targets >= 0
            losses["teacher"] = (apart * learnt).sum() / learnt.sum().clamp(min=1)
        return losses | ({"ratio": cast(Tensor, sum(ratios))} if ratios else {})

    @property
    def loss_weights(self) -> dict[str, float]:
        """Weight of each term of `losses`; that of the text is 1."""
        ahead = self.config.ahead
        if self.config.composite:
            return LOSS_WEIGHTS | self.config.composite.loss_weights
        if ahead is None:
            return LOSS_WEIGHTS
        return LOSS_WEIGHTS | dict.fromkeys(ahead.losses, ahead.weight / len(ahead.losses))

    def _composite_losses(self, flow: Flow, targets: Tensor) -> dict[str, Tensor]:
        """Compute the loss of the next byte, and of each head over the bytes of its kind."""
        kinds, targets = targets // VOCABULARY, targets % VOCABULARY
        logits, each = self.head(self._before_head(flow), self.norm)
        of_text = self.cross_entropy(logits.flatten(0, 1), targets.flatten())
        return {"text": of_text} | self.head.losses(each, targets, kinds)

    def _text_loss(self, flow: Flow, targets: Tensor) -> Tensor:
        if self.scores_in_chunks:
            return self._score(flow, targets).mean()
        logits = self.logits(flow)
        return self.cross_entropy(logits.flatten(0, 1), targets.flatten())

    def _mean_loss(self, flow: Flow, targets: Tensor) -> Tensor:
        """Compute the mean loss over the targets that are not negative."""
        learnt = targets >= 0
        return self._symbol_losses(flow, targets).sum() / learnt.sum().clamp(min=1)

    def _masked_losses(self, flow: Flow, targets: Tensor) -> Tensor:
        """Compute (B, T) float32 losses, whose mean is `arbcli.families.masked.masking`'s bound.

        The cross-entropy of each of a window's k hidden symbols is weighted by T / k; the loss of
        visible symbols is 0.
        """
        hidden = targets >= 0
        weights = targets.shape[1] / hidden.sum(dim=1, keepdim=True)
        return self._symbol_losses(flow, targets) * weights

    def _symbol_losses(self, flow: Flow, targets: Tensor) -> Tensor:
        """Compute the cross-entropy of each target, (B, T) float32; 0 for negative targets."""
        if self.scores_in_chunks:
            return self._score(flow, targets) * (targets >= 0)
        logits, numbers = self.logits(flow).float().flatten(0, 1), targets.clamp(min=-1).flatten()
        losses = functional.cross_entropy(logits, numbers, ignore_index=-1, reduction="none")
        return losses.view(targets.shape)

    @property
    def scores_in_chunks(self) -> bool:
        """Whether losses are computed in chunks of the vocabulary, without storing all logits."""
        return self.config.weights == "ternary" and in_chunks(self.config.vocabulary)

    def _score(self, flow: Flow, targets: Tensor | Predictions) -> Tensor:
        return self.head.losses(self._before_head(flow), targets, self.norm)

    def _before_head(self, flow: Flow) -> Tensor:
        x = flow.total()
        return x + self.byte_mlp(x, self.byte_norm).added if self.config.head else x

    def _divergences(
        self, flow: Flow, teacher: "LanguageModel", ids: Tensor, documents: Tensor | None
    ) -> Tensor:
        """Compute the KL divergence from the teacher's predictions, (B, T) float32, in nats."""
        with torch.no_grad():
            known = teacher._hidden(ids, [], documents)
            if self.scores_in_chunks:
                theirs = teacher.head.predictions(teacher._before_head(known), teacher.norm)
            else:
                logits = teacher.logits(known).flatten(0, 1)
        if self.scores_in_chunks:
            return self._score(flow, theirs)
        return divergence(self.logits(flow).flatten(0, 1), logits).view(ids.shape)

    def position_losses(self, ids: Tensor, targets: Tensor) -> Tensor:
        """Compute the cross-entropy of each target, (B, T) int64: (B, T) float32, in nats.

        For a masked model these are the terms of its bound, with ids and targets from `hide`.
        """
        of_symbols = self._masked_losses if self.config.is_masked else self._symbol_losses
        return of_symbols(self._hidden(ids, []), targets)

    def embed(self, text: Tensor, length: int) -> Tensor:
        """Embed the last T symbols of (B, history + T), with all added parts: (B, T, D)."""
        x = self.embedding(text[:, -length:], self.compute_dtype)
        for name in BESIDE:
            part = getattr(self, name)
            if part is not None:
                x = x + part(text, length, self.compute_dtype)
        return x

    def reading(self, text: Tensor, length: int) -> Reading:
        """Return the inputs of the last T symbols other than the stream, from (B, history + T)."""
        return Reading.of_text(text, length) if self.config.reads_text else Reading()

    def _hidden(self, ids: Tensor, seen: list[Chunked], documents: Tensor | None = None) -> Flow:
        """Compute the stream before the head; the chunks of each stage are appended to `seen`."""
        length = ids.shape[1]
        x, reading = self.embed(ids, length), self.reading(ids, length)
        if documents is not None:
            reading = reading._replace(documents=Documents.of(documents))
        return self._run_stages(0, x, ids, seen, reading)

    def _run_stages(
        self, index: int, x: Tensor, ids: Tensor, seen: list[Chunked], reading: Reading
    ) -> Flow:
        """Run the stream through stage `index` and all inner ones, down to the blocks."""
        if index == len(self.stages):
            return self.run_innermost(x, reading)

        def inner(x: Tensor, inside: Reading) -> Flow:
            return self._run_stages(index + 1, x, ids, seen, inside)

        return self.stages[index](x, ids, reading, inner, seen, recompute=self.recompute)

    def run_innermost(
        self, x: Tensor, reading: Reading, track: Track | None = None, *, fused: bool = False
    ) -> Flow:
        """Run the stream through the innermost stage.

        Args:
            x: the stream.
            reading: additional inputs.
            track: decoding states; None for complete windows.
            fused: whether to use the fused kernels for one position of each text.
        """

        def run(x: Tensor, span: slice) -> Flow:
            if track is not None and fused:
                return Flow(self.blocks.step(x, track, reading, span))
            return self.blocks(x, reading, track, recompute=self.recompute, span=span)

        memories, taps = self.config.main.memories, [x]
        if memories is None:
            flow = run(x, slice(None))
        else:
            before = run(x, slice(0, memories.place))
            remember = self._run_memories_by_text if track and track.each else self._run_memories
            x, losses = remember(before.total(), taps, reading)
            flow = run(x, slice(memories.place, None))
            flow = flow._replace(losses=merge(before.losses, losses, flow.losses))
        if self.router:
            route = self._route_by_text if track and track.each else self.router
            flow = Flow(route([flow.total(), *taps]), None, flow.losses)
        return flow

    def _run_memories(
        self, x: Tensor, taps: list[Tensor], reading: Reading
    ) -> tuple[Tensor, Losses]:
        """Add the outputs of codebooks and graph to the stream; append the former to `taps`."""
        found = [book(x) for book in (self.codebook, self.knowledge) if book]
        taps += [each.y for each in found]
        for each in found:
            x = x + each.y
        costs = [each.cost for each in found if each.cost is not None]
        losses = {"commitment": costs} if costs else {}
        if self.moe_graph is None:
            return x, losses
        first = found[0] if self.codebook else None
        iterated = self.moe_graph(x, self.codebook, first, reading)
        # only training needs the cost
        ponder = {"ponder": [iterated.ponder_cost()]} if torch.is_grad_enabled() else {}
        return iterated.x, losses | ponder

    def _run_memories_by_text(
        self, x: Tensor, taps: list[Tensor], reading: Reading
    ) -> tuple[Tensor, Losses]:
        """Run `_run_memories` for one position of each text of a batch, separately."""
        found = []
        for text, row in enumerate(rows_of(x)):
            own: list[Tensor] = []
            found.append((self._run_memories(row, own, reading.of(text))[0], *own))
        x, *books = (torch.cat(parts) for parts in zip(*found, strict=True))
        taps += books
        return x, {}

    def _route_by_text(self, streams: list[Tensor]) -> Tensor:
        """Run the router for one position of each text of a batch, separately."""
        assert self.router is not None
        route, rows = self.router, zip(*map(rows_of, streams), strict=True)
        return torch.cat([route([*row]) for row in rows])

    def logits(self, flow: Flow) -> Tensor:
        """Compute logits from the stream."""
        if self.config.composite:
            return self.head(self._before_head(flow), self.norm).logits
        if self.config.head:
            return self.head(self._before_head(flow), self.norm)
        if flow.added is None:
            return self.head(flow.x, self.norm)
        return self.head(flow.x, self.norm, flow.added)[0]

    def boundaries(self, ids: Tensor) -> list[Tensor]:
        """Return the chunk boundaries of (B, T) bytes: for each stage a (B, T) bool mask."""
        seen: list[Chunked] = []
        with torch.no_grad():
            self._hidden(ids, seen)
        # empty slots mark the first byte, which always begins a chunk
        marks = torch.zeros_like(ids, dtype=torch.bool)
        return [marks.scatter(1, stage.first.clamp(min=0), True) for stage in seen]

    def stacks(self) -> list[Stack]:
        """Return the stacks of blocks, outermost first."""
        outer = [stack for stage in self.stages for stack in (stage.encoder, stage.decoder)]
        return [*outer, self.blocks]

    def after_step(self) -> None:
        """Update the parts that learn without gradients, after a step; does not synchronise."""
        for part in self._memories():
            part.after_step()

    def join(self, group: Any) -> None:
        """Combine the statistics of all processes, before `after_step`.

        Args:
            group: the `arbcli.training.parallel.group.Group` of the run.
        """
        if self._counts is not None:  # the last micro-batch, which one process has computed
            self._counts = group.in_order([self._counts])[-1]
        for part in self._memories():
            part.join(group)

    def gauges(self) -> dict[str, float]:
        """Return metrics for the log; synchronises with the device.

        Returns:
            `gauges` of all parts, the maximum if several have the same name, and for stages
            chunk_length: mean length of a chunk in bytes; chunk_length_2 and so on, in positions of
                the stage around.
            joined: share of the boundaries without a slot, whose chunks were merged.
        """
        found: dict[str, float] = {}
        if self._with_gauges is None:
            others = [part for part in self.modules() if part is not self]
            self._with_gauges = [part for part in others if hasattr(part, "gauges")]
        for part in self._with_gauges:
            for name, value in part.gauges().items():
                found[name] = max(value, found.get(name, value))
        if self._counts is None:
            return found
        joined, begun = 0, 0
        for index, (positions, chunks, overflow) in enumerate(self._counts.tolist()):
            found[f"chunk_length_{index + 1}" if index else "chunk_length"] = positions / chunks
            joined, begun = joined + overflow, begun + chunks + overflow
        return found | {"joined": joined / begun}
