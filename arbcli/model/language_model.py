"""`LanguageModel`: embedding, stages of blocks, norm and head, built from a configuration.

bytes -> embedding, n-grams -> [encoder -> chunks ->] blocks, memories [-> decoder] -> norm -> head

`stages` has the outer stages, and `blocks` the blocks of the innermost one. Optional parts that the
configuration omits are None.
"""

import itertools
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor, nn
from torch.nn import functional

from arbcli.config.model import VOCABULARY, ModelConfig
from arbcli.errors import ArbError
from arbcli.kernels.attention.eight_bits import KeptIn
from arbcli.kernels.matmul.swizzled import fits_prepacked
from arbcli.model.baselines import FloatWeight
from arbcli.model.cache import Cache, SeveralCache
from arbcli.model.flow import Documents, Flow, Losses, Reading, each_text, merge, rows_of
from arbcli.model.layers.kinds import layers_for, stream_norm, symbol_embedding, symbol_head
from arbcli.model.layers.linear import LinearWeight, TernaryLinear, decode_in_groups
from arbcli.model.layers.loss import divergence
from arbcli.model.layers.norm import TernaryRMSNorm
from arbcli.model.layers.streamed import StreamedTensor
from arbcli.model.layers.symbols import Predictions, in_chunks
from arbcli.model.layers.vector import TernaryTaps, TernaryVector
from arbcli.model.packed import StateModule, TernaryTensor
from arbcli.model.parts.ahead import Ahead
from arbcli.model.parts.base import CachedAttention
from arbcli.model.parts.codebook import Codebook
from arbcli.model.parts.composite import CompositeHead
from arbcli.model.parts.mlp import MLP
from arbcli.model.parts.moe_graph import MoEGraph
from arbcli.model.parts.quantiser import Quantiser
from arbcli.model.parts.router import Router
from arbcli.model.registry import BESIDE, build_book
from arbcli.model.stack import Stack
from arbcli.model.stage import Chunked, Stage, pass_one
from arbcli.model.state import Track
from arbcli.model.step_memory import StepMemory

LOSS_WEIGHTS = {"ponder": 0.01, "ratio": 0.3, "indexer": 1.0, "teacher": 1.0, "commitment": 0.25}
"""Weights of the auxiliary losses, relative to the loss of the text.

H-Net uses 0.03 for `ratio`; with ten times that, chunks keep their target length. The weight of
`indexer` is arbitrary, as the indexers' parameters have no other loss.
"""


class Phase(NamedTuple):
    """A part of a decoding step with fixed shapes, which can be captured as a CUDA graph."""

    depth: int
    """Nesting depth; phases of depth 0 always run, deeper ones if `leads_deeper` says so."""
    run: Callable[[], Tensor | None]
    """Run the phase; the last one returns the logits, (1, 1, V)."""
    leads_deeper: Callable[[], Tensor] | None = None
    """Return a bool tensor of one element, true if the phases one level deeper run; None: never."""
    handle: Tensor | None = None
    """Handle of the conditional node for deeper phases, int64 of one element, 0 for no node; None
    if conditional nodes are not supported."""


class LanguageModel(nn.Module):
    """A language model over bytes or tokens.

    Args:
        config: configuration of the parts and of weight storage.
        compute_dtype: dtype of activations, bfloat16 or float32.
        recompute: whether to use activation checkpointing, which only saves the inputs of blocks.
    """

    codebook: Codebook | Quantiser | None
    knowledge: Codebook | Quantiser | None

    def __init__(
        self,
        config: ModelConfig,
        compute_dtype: torch.dtype = torch.bfloat16,
        *,
        recompute: bool = False,
    ) -> None:
        super().__init__()
        self.config, self.compute_dtype, self.recompute = config, compute_dtype, recompute
        outermost, site = config.site(), config.site(-1)
        main, memories = config.main, config.main.memories
        parts = layers_for(outermost)
        self.cross_entropy = parts.cross_entropy
        # initialisation and random bits depend on the order of modules: never change it
        self.embedding = symbol_embedding(config)
        beside = {BESIDE[type(part)][0]: part for part in config.beside}
        for name, kind in BESIDE.values():
            part = beside.get(name)
            setattr(self, name, kind(part, outermost) if part else None)
        self.stages: Any  # a `ModuleList` of `Stage`
        if config.outer:
            self.stages = nn.ModuleList(Stage(config, index) for index in range(len(config.outer)))
        else:
            self.stages = ()
        self.blocks = Stack(main.blocks, main, site)
        books = memories.codebooks if memories else {}
        for name in ("codebook", "knowledge"):
            setattr(self, name, build_book(books[name], site, name) if name in books else None)
        self.moe_graph = None
        if memories and memories.iterated:
            width = memories.codebook.width if memories.codebook else None
            self.moe_graph = MoEGraph(memories.iterated, site, width)
        self.router = Router(2 + len(books), site) if main.router else None
        if config.head:
            self.byte_norm = stream_norm(outermost)
            self.byte_mlp = MLP(config.head, outermost, area="head")
        self.norm = stream_norm(outermost)
        if config.composite:
            self.head: Any = CompositeHead(outermost)
        else:
            self.head = symbol_head(config, self.embedding)
        self.ahead = Ahead(config.ahead, outermost) if config.ahead else None
        if not config.outer and memories is None:
            used_once = isinstance(self.head, TernaryLinear) and not self.ahead
            head = self.head.weight if used_once else None
            decode_in_groups(self.blocks.weights_of_blocks(), head, across=not recompute)
        self._counts: Tensor | None = None

    def forward(self, ids: Tensor, cache: Cache | SeveralCache | None = None) -> Tensor:
        """Compute logits, (B, T, V) in `compute_dtype`, from bytes or tokens, (B, T) int64.

        With a `Cache`, B is 1, and the symbols continue the text of the cache. With a
        `SeveralCache`, T is 1: one symbol of each text is read, and the logits of a text do not
        depend on the others.
        """
        if cache is None:
            return self._logits(self._hidden(ids, []))
        if cache.is_marked and not cache.reads_at_once and ids.shape[1] > 1:
            return torch.cat([self(part, cache) for part in ids.split(1, dim=1)], dim=1)
        if self.stages and isinstance(
            cache, SeveralCache
        ):  # some text nearly always begins a chunk
            *_, logits = [phase.run() for phase in self.step_phases(ids, cache)]
            assert logits is not None  # the last phase returns them
            return logits
        with cache.reading(ids) as text:
            x, reading = self._embed_continuation(text, ids.shape[1])
            if self.stages:
                return self._logits(self._continue_stages(0, x, ids, reading, cache))
            fused = self._fuses(x)
            with cache.main.clock.reading(ids.shape[1]):
                flow = self._run_innermost(x, reading, cache.main, fused=fused)
            if fused:
                return self._fused_logits(flow.x)
            if len(x) > 1:
                return each_text(lambda row: self._logits(Flow(row)), flow.total())
            return self._logits(flow)

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
        logits = self._logits(flow)
        return self.cross_entropy(logits.flatten(0, 1), targets.flatten())

    def _mean_loss(self, flow: Flow, targets: Tensor) -> Tensor:
        """Compute the mean loss over the targets that are not negative."""
        learnt = targets >= 0
        return self._symbol_losses(flow, targets).sum() / learnt.sum().clamp(min=1)

    def _masked_losses(self, flow: Flow, targets: Tensor) -> Tensor:
        """Compute (B, T) float32 losses, whose mean is the bound of `arbcli.masking`.

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
        logits, numbers = self._logits(flow).float().flatten(0, 1), targets.clamp(min=-1).flatten()
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
                logits = teacher._logits(known).flatten(0, 1)
        if self.scores_in_chunks:
            return self._score(flow, theirs)
        return divergence(self._logits(flow).flatten(0, 1), logits).view(ids.shape)

    def position_losses(self, ids: Tensor, targets: Tensor) -> Tensor:
        """Compute the cross-entropy of each target, (B, T) int64: (B, T) float32, in nats.

        For a masked model these are the terms of its bound, with ids and targets from `hide`.
        """
        of_symbols = self._masked_losses if self.config.is_masked else self._symbol_losses
        return of_symbols(self._hidden(ids, []), targets)

    def _embed(self, text: Tensor, length: int) -> Tensor:
        """Embed the last T symbols of (B, history + T), with all added parts: (B, T, D)."""
        x = self.embedding(text[:, -length:], self.compute_dtype)
        for name, _ in BESIDE.values():
            part = getattr(self, name)
            if part is not None:
                x = x + part(text, length, self.compute_dtype)
        return x

    def _embed_continuation(self, text: Tensor, length: int) -> tuple[Tensor, Reading]:
        """Embed while decoding, each text separately; also return the additional inputs."""
        if self.config.beside:
            x = each_text(lambda row: self._embed(row, length), text)
        else:
            x = self._embed(text, length)
        return x, self._reading(text, length)

    def _reading(self, text: Tensor, length: int) -> Reading:
        return Reading.of_text(text, length) if self.config.reads_text else Reading()

    def _hidden(self, ids: Tensor, seen: list[Chunked], documents: Tensor | None = None) -> Flow:
        """Compute the stream before the head; the chunks of each stage are appended to `seen`."""
        length = ids.shape[1]
        x, reading = self._embed(ids, length), self._reading(ids, length)
        if documents is not None:
            reading = reading._replace(documents=Documents.of(documents))
        return self._run_stages(0, x, ids, seen, reading)

    def _run_stages(
        self, index: int, x: Tensor, ids: Tensor, seen: list[Chunked], reading: Reading
    ) -> Flow:
        """Run the stream through stage `index` and all inner ones, down to the blocks."""
        if index == len(self.stages):
            return self._run_innermost(x, reading)

        def inner(x: Tensor, inside: Reading) -> Flow:
            return self._run_stages(index + 1, x, ids, seen, inside)

        return self.stages[index](x, ids, reading, inner, seen, recompute=self.recompute)

    def _run_innermost(
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

    def _logits(self, flow: Flow) -> Tensor:
        """Compute logits from the stream."""
        if self.config.composite:
            return self.head(self._before_head(flow), self.norm).logits
        if self.config.head:
            return self.head(self._before_head(flow), self.norm)
        if flow.added is None:
            return self.head(flow.x, self.norm)
        return self.head(flow.x, self.norm, flow.added)[0]

    def _fused_logits(self, x: Tensor) -> Tensor:
        """Compute logits of one position of each text with fused kernels."""
        if self.config.composite:
            return each_text(lambda row: self._logits(Flow(row)), x)
        if self.config.head:
            if self.byte_mlp.steps_fused:
                x = self.byte_mlp.step(x)
            else:
                x = each_text(lambda row: self.byte_mlp(row, self.byte_norm).total(), x)
        return self.head.fused(x, normalise=True)

    def check(self, ids: Tensor, cache: Cache) -> tuple[Tensor, Tensor]:
        """Compute logits of speculative bytes, bitwise equal to those of single steps.

        The cache does not advance: `keep_accepted_` stores the accepted positions from the buffers
        that `Cache.kept` returns, and the caller counts them. For models that `can_check`.

        Args:
            ids: (1, M) int64, at most as many bytes as a ring has slots.
            cache: from `new_cache`.

        Returns:
            Logits, (1, M, 256), and the stream after the last block, (1, M, D).
        """
        with cache.main.clock.checking():
            x = self.blocks.step(self.embedding(ids, self.compute_dtype), cache.main)
        return self._fused_logits(x), x

    @torch.no_grad()
    def can_check(self) -> bool:
        """Return whether `check` is supported; call it within `prepared_weights`.

        It needs fused steps, a single stage and stream whose parts all have `steps_ahead`, no other
        part that reads the text, no holes, and unquantised keys and values.
        """
        main, config = self.config.main, self.config
        others = config.outer, config.beside, config.reads_text, config.composite, config.fills
        if any((*others, main.memories, main.router)) or main.streams > 1 or self.kept.stored:
            return False
        parts = [branch.part for block in self.blocks for branch in block.branches]
        if config.head:
            parts.append(self.byte_mlp)
        x = torch.empty(1, 1, main.dim, dtype=self.compute_dtype, device=self.device)
        return self._fuses(x) and all(part.steps_ahead and part.steps_fused for part in parts)

    def propose(self, x: Tensor, byte: Tensor) -> tuple[Tensor, Tensor]:
        """Predict the byte after `byte` with the multi-byte prediction head.

        Args:
            x: (1, 1, D), stream of the position before `byte`, or the x of the last call.
            byte: (1, 1) int64.

        Returns:
            x for the next call, (1, 1, D), and logits, (256,).
        """
        assert self.ahead is not None
        fused = self._fuses(x) and self.ahead.mlp.steps_fused
        x, logits = self.ahead.step(x, byte) if fused else self.ahead(x, byte)
        return x, logits[0, 0]

    def boundaries(self, ids: Tensor) -> list[Tensor]:
        """Return the chunk boundaries of (B, T) bytes: for each stage a (B, T) bool mask."""
        seen: list[Chunked] = []
        with torch.no_grad():
            self._hidden(ids, seen)
        # empty slots mark the first byte, which always begins a chunk
        marks = torch.zeros_like(ids, dtype=torch.bool)
        return [marks.scatter(1, stage.first.clamp(min=0), True) for stage in seen]

    def step_phases(self, ids: Tensor, cache: Cache) -> list[Phase]:
        """Return the phases of a decoding step, in order.

        A byte that does not begin a chunk only needs the outer stages.

        Args:
            ids: (1, 1) int64, or (B, 1) for a batch; read by each run of the phases.
            cache: from `new_cache` or `new_several_cache`; updated in place.
        """
        last = len(self.stages)
        if not last:
            return [Phase(0, lambda: self(ids, cache))]
        reading, is_fused = Reading(), False

        def down(index: int) -> None:
            nonlocal reading, is_fused
            if index == 0:
                with cache.reading(ids) as text:
                    x, reading = self._embed_continuation(text, 1)
                is_fused = self._fuses(x)
            else:
                x = self.stages[index - 1].step_inward(cache.stages[index - 1], fused=is_fused)
            past = cache.stages[index]
            self.stages[index].step_down(x, ids, reading, past, fused=is_fused)

        def main() -> None:
            stage, past = self.stages[last - 1], cache.stages[last - 1]
            x = stage.step_inward(past, fused=is_fused)
            x = pass_one(self.blocks, x, cache.main, reading, fused=is_fused)
            stage.step_outward(x, past, cache.main.position, fused=is_fused)

        def up(index: int) -> Tensor | None:
            past = cache.stages[index]
            x = self.stages[index].step_up(reading, past, fused=is_fused)
            if index:  # stages count their own positions
                before = cache.stages[index - 1]
                return self.stages[index - 1].step_outward(x, before, None, fused=is_fused)
            if is_fused:
                return self._fused_logits(x)
            return each_text(lambda row: self._logits(Flow(row)), x)

        phases = []
        for index, past in enumerate(cache.stages):
            begins = partial(getattr, past, "begins")
            phases.append(Phase(index, partial(down, index), begins, past.handle))
        phases.append(Phase(last, main))
        return phases + [Phase(index, partial(up, index)) for index in reversed(range(last))]

    def _continue_stages(
        self, index: int, x: Tensor, ids: Tensor, reading: Reading, cache: Cache
    ) -> Flow:
        """Run stage `index` and all inner ones for new positions of a text, like `_run_stages`."""
        if index == len(self.stages):
            with cache.main.clock.reading(x.shape[1]):
                return self._run_innermost(x, reading, cache.main)

        def inner(x: Tensor, inside: Reading) -> Flow:
            return self._continue_stages(index + 1, x, ids, inside, cache)

        return self.stages[index].follow(x, ids, reading, cache.stages[index], inner)

    def _fuses(self, x: Tensor) -> bool:
        """Return whether decoding steps use the fused kernels.

        Args:
            x: the stream, (B, 1, D).
        """
        fits = self.weights_are_prepared and fits_prepacked(x, self.config.site().group_size)
        stages = self.config.stages  # kernels read rows in vectors of eight elements
        plain = all(stage.dim % 8 == 0 and stage.adds_plainly for stage in stages)
        return fits and plain and self.plain_norms and self.fits_bytes

    def new_cache(self, positions: int, first: int = 0) -> Cache:
        """Create the decoding cache of a text of at most `positions` bytes.

        Positions before `first` are counted but never read.

        Raises:
            ArbError: the model is masked, and does not generate from left to right.
        """
        self._check_causal()
        return Cache(self, positions, first=first)

    def new_several_cache(
        self, texts: int, positions: int, device: torch.device | None = None
    ) -> SeveralCache:
        """Create the decoding cache of a batch of texts of at most `positions` bytes each."""
        self._check_causal()
        return SeveralCache(self, texts, positions, device=device)

    def _check_causal(self) -> None:
        if self.config.is_masked:
            raise ArbError(
                "this model is masked and cannot generate text from left to right",
                hint="fill holes: `arb generate RUN --infill TEXT`",
            )

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
            group: the `arbcli.train.parallel.group.Group` of the run.
        """
        if self._counts is not None:  # the last micro-batch, which one process has computed
            self._counts = group.in_order([self._counts])[-1]
        for part in self._memories():
            part.join(group)

    def forget_uses(self) -> None:
        """Discard forward passes whose backward was not run, as after an error."""
        for part in self.modules():
            if isinstance(part, StreamedTensor | StepMemory):
                part.forget()

    def _memories(self) -> list[StepMemory]:
        return [part for part in self.modules() if isinstance(part, StepMemory)]

    def gauges(self) -> dict[str, float]:
        """Return metrics for the log; synchronises with the device.

        Returns:
            `gauges` of all parts, the maximum if several have the same name, and for stages
            chunk_length: mean length of a chunk in bytes; chunk_length_2 and so on, in positions of
                the stage around.
            joined: share of the boundaries without a slot, whose chunks were merged.
        """
        found: dict[str, float] = {}
        for part in self.modules():
            gauges: Callable[[], dict[str, float]] | None = getattr(part, "gauges", None)
            for name, value in gauges().items() if gauges and part is not self else ():
                found[name] = max(value, found.get(name, value))
        if self._counts is None:
            return found
        joined, begun = 0, 0
        for index, (positions, chunks, overflow) in enumerate(self._counts.tolist()):
            found[f"chunk_length_{index + 1}" if index else "chunk_length"] = positions / chunks
            joined, begun = joined + overflow, begun + chunks + overflow
        return found | {"joined": joined / begun}

    @property
    def device(self) -> torch.device:
        """Device of the weights."""
        return next(itertools.chain(self.buffers(), self.parameters())).device

    @property
    def plain_norms(self) -> bool:
        """Whether there are norms, and the weights of all of them are known to be 1."""
        norms = [part for part in self.modules() if isinstance(part, TernaryRMSNorm)]
        return bool(norms) and all(norm.plain for norm in norms)

    @property
    def fits_bytes(self) -> bool:
        """Whether the integer values of all linear layers' weights fit in int8."""
        return all(matrix.rule.fits_a_byte for matrix in self._matrices())

    tokenizer: Any = None
    """The `arbcli.tokens.Tokenizer`; None for a model of bytes, or if it is unknown."""
    weights_are_prepared = False
    """Whether the model is within `prepared_weights`."""

    @contextmanager
    def prepared_weights(self, spare_bytes: int = 0) -> Iterator[None]:
        """Cache tensors derived from the weights, which must not change within the block.

        Float weights are cast once. Packed matrices are prepacked for decoding steps.

        Args:
            spare_bytes: memory for decoded matrices, which the torch backend keeps if all fit.
        """
        with ExitStack() as stack:
            if self.decoded_bytes <= spare_bytes:
                for weight in self._matrices():
                    stack.enter_context(weight.decoded_once())
            for part in self.modules():
                if isinstance(part, FloatWeight):
                    stack.enter_context(part.cast_once(self.compute_dtype))
                elif isinstance(part, TernaryLinear | TernaryTaps | TernaryVector):
                    stack.enter_context(part.prepacked_once())
            before, self.weights_are_prepared = self.weights_are_prepared, True
            try:
                yield
            finally:
                self.weights_are_prepared = before

    @property
    def decoded_bytes(self) -> int:
        """Size of all linear layers' matrices, decoded to the dtype of activations, in bytes."""
        return sum(weight.num_weights for weight in self._matrices()) * self.compute_dtype.itemsize

    def _matrices(self) -> list[LinearWeight]:
        return [part for part in self.modules() if isinstance(part, LinearWeight)]

    kept = KeptIn()
    """Storage format of keys and values in caches."""

    @contextmanager
    def keeping(self, kv: str | None) -> Iterator[None]:
        """Set the storage format of keys and values for caches created within the block.

        A forward without a cache rounds keys and values likewise, so that its losses equal those of
        decoding. For inference only.

        Args:
            kv: `fp8`, `int8`, `bf16` if activations are bfloat16, or None for the dtype of
                activations. With `-mixed`, elements of keys that RoPE rotates are not quantised;
                with `-queries`, queries are quantised too.

        Raises:
            ArbError: the model has no keys and values, or does not support the format.
        """
        if kv == "bf16" and self.compute_dtype != torch.bfloat16:
            raise ArbError(
                "`--kv bf16` needs activations in bf16, and they are float32",
                hint="leave `--kv` out, or add `--compute bf16`",
            )
        kept, before = KeptIn.named(kv), self.kept
        attentions = [part for part in self.modules() if isinstance(part, CachedAttention)]
        if kept.stored and not attentions:
            raise ArbError("this model has no keys and values", hint="leave `--kv` out")
        if kept.queries and not all(part.rounds_queries for part in attentions):
            raise ArbError(
                "queries of latent attention cannot be stored in eight bits",
                hint=f"use `--kv {kept._replace(queries=False).name('')}`",
            )
        keeping: list[LanguageModel | CachedAttention] = [self, *attentions]
        for part in keeping:
            part.kept = kept
        try:
            yield
        finally:
            for part in keeping:
                part.kept = before

    @property
    def kept_in(self) -> str:
        """Name of the storage format of keys and values."""
        return self.kept.name("bf16" if self.compute_dtype == torch.bfloat16 else "fp32")

    def initialise(self, seed: int) -> None:
        """Initialise all weights from a seed: see `arbcli.model.initial`."""
        for index, weight in enumerate(self.weights().values()):
            weight.initialise(seed, index)

    def drop_training_state(self) -> None:
        """Delete the buffers that only training needs: see `TernaryTensor.drop_training_state`."""
        for weight in self.packed_tensors().values():
            weight.drop_training_state()

    def declare_wire(self) -> None:
        """Declare the buffers for several processes: see `TernaryTensor.declare_wire`."""
        for weight in self.packed_tensors().values():
            weight.declare_wire()

    def state_modules(self) -> Iterator[StateModule]:
        """Yield all modules with persistent buffers, in the order of the model."""
        return (part for part in self.modules() if isinstance(part, StateModule))

    def packed_tensors(self) -> dict[str, TernaryTensor]:
        """Return all packed tensors by name, in the order of the model; none for a baseline."""
        tensors = self.weights().items()
        return {name: part for name, part in tensors if isinstance(part, TernaryTensor)}

    def weights(self) -> dict[str, TernaryTensor | FloatWeight]:
        """Return all weights by name, in the order of the model."""
        kinds = (TernaryTensor, FloatWeight)
        return {name: part for name, part in self.named_modules() if isinstance(part, kinds)}
