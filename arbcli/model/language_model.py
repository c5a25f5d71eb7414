"""`LanguageModel`: embedding, stages of blocks, norm and head, assembled from a configuration.

bytes -> embedding, n-grams -> [encoder -> chunks ->] blocks, memories [-> decoder] -> norm -> head

The outer stages are `stages`, and the blocks of the innermost one are `blocks`. A part that the
configuration leaves out is None and has no weights.
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
from arbcli.model.layers.linear import LinearWeight, TernaryLinear
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

LOSS_WEIGHTS = {
    "ponder": 0.01, "ratio": 0.3, "indexer": 1.0, "teacher": 1.0, "commitment": 0.25,
}  # fmt: skip
"""Weight of each part of the loss, that of the text being 1.

The source of `ratio` has 0.03. With ten times that chunks keep to the length that was asked for.
Weights that learn by `indexer` learn by nothing else.
"""


class Phase(NamedTuple):
    """A part of reading one byte of a text, with the same shapes every time."""

    depth: int
    """It runs if the phases before it have led so deep; the first ones, of depth 0, always do."""
    run: Callable[[], Tensor | None]
    """Do it; that of the last phase returns the logits, (1, 1, V)."""
    leads_deeper: Callable[[], Tensor] | None = None
    """Afterwards, a tensor of one bool: whether phases that are one deeper run; None: no."""
    handle: Tensor | None = None
    """Int64 of one element: that of the conditional node that is told so, 0 being none; None where
    there can be none."""


class LanguageModel(nn.Module):
    """A language model over bytes or tokens.

    Args:
        config: its parts, and how its weights are stored.
        compute_dtype: of activations; bfloat16, or float32.
        recompute: whether a backward computes what is inside a block again, so that only the
            blocks' inputs are kept for it.
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
        # the order of modules is that of first values and of random bits: it never changes
        self.embedding = symbol_embedding(config)
        beside = {BESIDE[type(part)][0]: part for part in config.beside}
        for name, kind in BESIDE.values():
            part = beside.get(name)
            setattr(self, name, kind(part, outermost) if part else None)
        self.stages: Any  # a `ModuleList` does not say that it has each a `Stage`
        if config.outer:
            self.stages = nn.ModuleList(Stage(config, index) for index in range(len(config.outer)))
        else:
            self.stages = ()
        grouped = not config.outer and memories is None
        self.blocks = Stack(main.blocks, main, site, grouped=grouped)
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
        self._counts: Tensor | None = None

    def forward(self, ids: Tensor, cache: Cache | SeveralCache | None = None) -> Tensor:
        """Compute (B, T, V) logits, in `compute_dtype`, from (B, T) int64 bytes or tokens.

        With a cache B is 1: they follow on those that it has seen, and are added to it. With one of
        several texts T is 1, and a byte of each is read; what a text gives does not depend on the
        others.
        """
        if cache is None:
            return self._logits(self._whole(ids, []))
        if cache.is_marked and not cache.reads_at_once and ids.shape[1] > 1:
            return torch.cat([self(part, cache) for part in ids.split(1, dim=1)], dim=1)
        if self.stages and isinstance(cache, SeveralCache):  # almost every time some chunk begins
            *_, logits = [phase.run() for phase in self.step_phases(ids, cache)]
            assert logits is not None  # the last phase makes them
            return logits
        with cache.reading(ids) as text:
            x, reading = self._embed_after(text, ids.shape[1])
            if self.stages:
                return self._logits(self._follow(0, x, ids, reading, cache))
            fused = self._fuses(x)
            with cache.main.clock.reading(ids.shape[1]):
                flow = self._inside(x, reading, cache.main, fused=fused)
            if fused:
                return self._fused_logits(flow.x)
            if len(x) > 1:
                return each_text(lambda row: self._logits(Flow(row)), flow.whole())
            return self._logits(flow)

    def loss(self, ids: Tensor, targets: Tensor, documents: Tensor | None = None) -> Tensor:
        """Average the cross-entropy, in nats a symbol: see `losses`."""
        return self.losses(ids, targets, documents)["text"]

    def losses(
        self,
        ids: Tensor,
        targets: Tensor,
        documents: Tensor | None = None,
        *,
        teacher: "LanguageModel | None" = None,
    ) -> dict[str, Tensor]:
        """Compute the parts of the loss that a step minimises, each times its `loss_weights`.

        Args:
            ids: (B, T) int64.
            targets: (B, T) int64. With `documents` those that are negative count for nothing, and
                the mean is over the others. Those of a model that fills holes are of `hide` or
                `cut`. With a composite head 256 is added to bytes of sounds, and 512 to pictures'.
            documents: (B, T) int64, numbers of the documents of each window, which know nothing of
                each other; None is windows of one text.
            teacher: a model of the same symbols, whose predictions are learnt besides.

        Returns:
            Float32 scalars by name: `text`, the cross-entropy in nats a symbol, or the bound of a
            masked model; `ponder`, see
            `Iterated.ponder_cost`; `ratio`, the sum over the stages that learn where chunks begin;
            `indexer`, the mean over the blocks with an indexer; `commitment`, over quantisers, see
            `Found.cost`; `of_text`, `of_sound` and `of_picture`, see `CompositeHead`; `next_2` and
            so on, see `Ahead`;
            `teacher`, the mean divergence from the teacher's predictions, in nats a symbol.
        """
        seen: list[Chunked] = []
        flow = self._whole(ids, seen, documents)
        if seen and torch.is_grad_enabled():
            self._counts = torch.stack([stage.counts for stage in seen])
        if self.config.composite:
            losses = self._composite_losses(flow, targets)
        elif self.config.is_masked:
            losses = {"text": self._masked_losses(flow, targets).mean()}
        elif self.config.fills or documents is not None:
            losses = {"text": self._learnt_loss(flow, targets)}
        else:
            losses = {"text": self._text_loss(flow, targets)}
        for name in ("ponder", "indexer", "commitment"):
            if found := flow.losses.get(name):
                losses[name] = cast(Tensor, sum(found)) / len(found) if len(found) > 1 else found[0]
        ratios = [stage.ratio for stage in seen if stage.ratio is not None]
        if self.ahead:
            losses |= self.ahead.losses(flow.whole(), ids)
        if teacher is not None:
            apart = self._divergences(flow, teacher, ids, documents)
            learnt = torch.ones_like(targets) if documents is None else targets >= 0
            losses["teacher"] = (apart * learnt).sum() / learnt.sum().clamp(min=1)
        return losses | ({"ratio": cast(Tensor, sum(ratios))} if ratios else {})

    @property
    def loss_weights(self) -> dict[str, float]:
        """Weight of each part of the loss, that of the text being 1."""
        ahead = self.config.ahead
        if self.config.composite:
            return LOSS_WEIGHTS | self.config.composite.loss_weights
        if ahead is None:
            return LOSS_WEIGHTS
        return LOSS_WEIGHTS | dict.fromkeys(ahead.losses, ahead.weight / len(ahead.losses))

    def _composite_losses(self, flow: Flow, targets: Tensor) -> dict[str, Tensor]:
        """Compute the loss of the next byte, and that of each head over the bytes of its kind."""
        kinds, targets = targets // VOCABULARY, targets % VOCABULARY
        logits, each = self.head(self._before_head(flow), self.norm)
        of_text = self.cross_entropy(logits.flatten(0, 1), targets.flatten())
        return {"text": of_text} | self.head.losses(each, targets, kinds)

    def _text_loss(self, flow: Flow, targets: Tensor) -> Tensor:
        if self.scores_in_chunks:
            return self._score(flow, targets).mean()
        logits = self._logits(flow)
        return self.cross_entropy(logits.flatten(0, 1), targets.flatten())

    def _learnt_loss(self, flow: Flow, targets: Tensor) -> Tensor:
        """Average over the targets that are not negative."""
        learnt = targets >= 0
        return self._symbol_losses(flow, targets).sum() / learnt.sum().clamp(min=1)

    def _masked_losses(self, flow: Flow, targets: Tensor) -> Tensor:
        """Compute (B, T) float32, whose mean is the bound of `arbcli.masking`: 0 at what is seen.

        The cross-entropy of each of the k hidden symbols of a window counts T / k times.
        """
        hidden = targets >= 0
        weights = targets.shape[1] / hidden.sum(dim=1, keepdim=True)
        return self._symbol_losses(flow, targets) * weights

    def _symbol_losses(self, flow: Flow, targets: Tensor) -> Tensor:
        """Compute the cross-entropy of each of (B, T) targets, in float32; 0 of negative ones."""
        if self.scores_in_chunks:
            return self._score(flow, targets) * (targets >= 0)
        logits, numbers = self._logits(flow).float().flatten(0, 1), targets.clamp(min=-1).flatten()
        losses = functional.cross_entropy(logits, numbers, ignore_index=-1, reduction="none")
        return losses.view(targets.shape)

    @property
    def scores_in_chunks(self) -> bool:
        """Whether losses are computed a chunk of symbols at a time, and logits never are."""
        return self.config.weights == "ternary" and in_chunks(self.config.vocabulary)

    def _score(self, flow: Flow, targets: Tensor | Predictions) -> Tensor:
        return self.head.losses(self._before_head(flow), targets, self.norm)

    def _before_head(self, flow: Flow) -> Tensor:
        x = flow.whole()
        return x + self.byte_mlp(x, self.byte_norm).added if self.config.head else x

    def _divergences(
        self, flow: Flow, teacher: "LanguageModel", ids: Tensor, documents: Tensor | None
    ) -> Tensor:
        """Compute the divergence of each position from a teacher's predictions, (B, T) float32."""
        with torch.no_grad():
            known = teacher._whole(ids, [], documents)
            if self.scores_in_chunks:
                theirs = teacher.head.predictions(teacher._before_head(known), teacher.norm)
            else:
                logits = teacher._logits(known).flatten(0, 1)
        if self.scores_in_chunks:
            return self._score(flow, theirs)
        return divergence(self._logits(flow).flatten(0, 1), logits).view(ids.shape)

    def position_losses(self, ids: Tensor, targets: Tensor) -> Tensor:
        """Compute the cross-entropy of each of (B, T) int64 targets: (B, T) float32, in nats.

        Of a masked model they are the terms of its bound, for ids and targets of `hide`.
        """
        of_symbols = self._masked_losses if self.config.is_masked else self._symbol_losses
        return of_symbols(self._whole(ids, []), targets)

    def _embed(self, text: Tensor, length: int) -> Tensor:
        """Look up the last bytes of (B, history + T), and what is added to them: (B, T, D)."""
        x = self.embedding(text[:, -length:], self.compute_dtype)
        for name, _ in BESIDE.values():
            part = getattr(self, name)
            if part is not None:
                x = x + part(text, length, self.compute_dtype)
        return x

    def _embed_after(self, text: Tensor, length: int) -> tuple[Tensor, Reading]:
        """Do the same after a past, each text by itself, and tell what is read besides."""
        if self.config.beside:
            x = each_text(lambda row: self._embed(row, length), text)
        else:
            x = self._embed(text, length)
        return x, self._reading(text, length)

    def _reading(self, text: Tensor, length: int) -> Reading:
        return Reading.of_text(text, length) if self.config.reads_text else Reading()

    def _whole(self, ids: Tensor, seen: list[Chunked], documents: Tensor | None = None) -> Flow:
        """Compute the stream before the head; what the stages make of the batch is `seen`."""
        length = ids.shape[1]
        x, reading = self._embed(ids, length), self._reading(ids, length)
        if documents is not None:
            reading = reading._replace(documents=Documents.of(documents))
        return self._through(0, x, ids, seen, reading)

    def _through(
        self, index: int, x: Tensor, ids: Tensor, seen: list[Chunked], reading: Reading
    ) -> Flow:
        """Pass the stream through a stage and all inside it; after the last come the blocks."""
        if index == len(self.stages):
            return self._inside(x, reading)

        def inner(x: Tensor, inside: Reading) -> Flow:
            return self._through(index + 1, x, ids, seen, inside)

        return self.stages[index](x, ids, reading, inner, seen, recompute=self.recompute)

    def _inside(
        self, x: Tensor, reading: Reading, track: Track | None = None, *, fused: bool = False
    ) -> Flow:
        """Pass the stream through the innermost stage.

        Args:
            x: the stream.
            reading: what is read besides.
            track: of the text before; None is whole windows.
            fused: whether the positions are one of each text, computed by kernels for that.
        """

        def run(x: Tensor, some: slice) -> Flow:
            if track is not None and fused:
                return Flow(self.blocks.step(x, track, reading, some))
            return self.blocks(x, reading, track, recompute=self.recompute, some=some)

        memories, taps = self.config.main.memories, [x]
        if memories is None:
            flow = run(x, slice(None))
        else:
            before = run(x, slice(0, memories.place))
            remember = self._remember_each if track and track.each else self._remember
            x, losses = remember(before.whole(), taps, reading)
            flow = run(x, slice(memories.place, None))
            flow = flow._replace(losses=merge(before.losses, losses, flow.losses))
        if self.router:
            route = self._route_each if track and track.each else self.router
            flow = Flow(route([flow.whole(), *taps]), None, flow.losses)
        return flow

    def _remember(self, x: Tensor, taps: list[Tensor], reading: Reading) -> tuple[Tensor, Losses]:
        """Add what codebooks find for the stream, and iterate; `taps` gets what each found."""
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
        # a cost of what nobody asks for would be computed in vain
        ponder = {"ponder": [iterated.ponder_cost()]} if torch.is_grad_enabled() else {}
        return iterated.x, losses | ponder

    def _remember_each(
        self, x: Tensor, taps: list[Tensor], reading: Reading
    ) -> tuple[Tensor, Losses]:
        """Do the same for a position of each of several texts, one after another."""
        found = []
        for text, row in enumerate(rows_of(x)):
            own: list[Tensor] = []
            found.append((self._remember(row, own, reading.of(text))[0], *own))
        x, *books = (torch.cat(parts) for parts in zip(*found, strict=True))
        taps += books
        return x, {}

    def _route_each(self, streams: list[Tensor]) -> Tensor:
        """Weigh streams of a position of each of several texts, one after another."""
        assert self.router is not None
        route, rows = self.router, zip(*map(rows_of, streams), strict=True)
        return torch.cat([route([*row]) for row in rows])

    def _logits(self, flow: Flow) -> Tensor:
        """Compute logits of what the stages give."""
        if self.config.composite:
            return self.head(self._before_head(flow), self.norm).logits
        if self.config.head:
            return self.head(self._before_head(flow), self.norm)
        if flow.added is None:
            return self.head(flow.x, self.norm)
        return self.head(flow.x, self.norm, flow.added)[0]

    def _fused_logits(self, x: Tensor) -> Tensor:
        """Do the same of one position of each text, by kernels for that."""
        if self.config.composite:
            return each_text(lambda row: self._logits(Flow(row)), x)
        if self.config.head:
            if self.byte_mlp.steps_fused:
                x = self.byte_mlp.step(x)
            else:
                x = each_text(lambda row: self.byte_mlp(row, self.byte_norm).whole(), x)
        return self.head.fused(x, normalise=True)

    def check(self, ids: Tensor, cache: Cache) -> tuple[Tensor, Tensor]:
        """Read bytes of a text that may be taken back, each with the bits that it has by itself.

        The cache is left as it is, but for what `Cache.kept` names: `keep_accepted_` stores those
        that stay, and the caller counts them. It is for models that `can_check`.

        Args:
            ids: (1, M) int64, at most as many bytes as a ring has slots.
            cache: of `new_cache`.

        Returns:
            (1, M, 256) logits, and the stream after the last block, (1, M, D).
        """
        with cache.main.clock.checking():
            x = self.blocks.step(self.embedding(ids, self.compute_dtype), cache.main)
        return self._fused_logits(x), x

    @torch.no_grad()
    def can_check(self) -> bool:
        """Return whether there is a `check`, inside of `prepared_weights`.

        It needs fused steps, a single stage and stream of blocks whose parts `steps_ahead`, nothing
        that reads the text besides, no holes, and keys and values as they are.
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
        """Predict the byte after one that follows, by the head beyond the next byte.

        Args:
            x: (1, 1, D), of the position before `byte`: its stream, or what this returned.
            byte: (1, 1) int64.

        Returns:
            What to go on with, like x, and (256,) logits.
        """
        assert self.ahead is not None
        fused = self._fuses(x) and self.ahead.mlp.steps_fused
        x, logits = self.ahead.step(x, byte) if fused else self.ahead(x, byte)
        return x, logits[0, 0]

    def boundaries(self, ids: Tensor) -> list[Tensor]:
        """Find where chunks begin in (B, T) bytes: for each stage (B, T) bool, at bytes."""
        seen: list[Chunked] = []
        with torch.no_grad():
            self._whole(ids, seen)
        # slots without a chunk mark the first byte, which begins one anyway
        marks = torch.zeros_like(ids, dtype=torch.bool)
        return [marks.scatter(1, stage.first.clamp(min=0), True) for stage in seen]

    def step_phases(self, ids: Tensor, cache: Cache) -> list[Phase]:
        """List what reading one byte takes, in order.

        A byte that begins no chunk needs but the outer stages.

        Args:
            ids: (1, 1) int64, read anew in every step; (B, 1) of several texts.
            cache: of `new_cache`, or `new_several_cache`; read and written in place.
        """
        last = len(self.stages)
        if not last:
            return [Phase(0, lambda: self(ids, cache))]
        reading, is_fused = Reading(), False

        def down(index: int) -> None:
            nonlocal reading, is_fused
            if index == 0:
                with cache.reading(ids) as text:
                    x, reading = self._embed_after(text, 1)
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
            if index:  # stages count their positions themselves
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

    def _follow(self, index: int, x: Tensor, ids: Tensor, reading: Reading, cache: Cache) -> Flow:
        """Do as `_through` does, after a past."""
        if index == len(self.stages):
            with cache.main.clock.reading(x.shape[1]):
                return self._inside(x, reading, cache.main)

        def inner(x: Tensor, inside: Reading) -> Flow:
            return self._follow(index + 1, x, ids, inside, cache)

        return self.stages[index].follow(x, ids, reading, cache.stages[index], inner)

    def _fuses(self, x: Tensor) -> bool:
        """Return whether steps multiply in kernels that do what is around the products, too.

        Args:
            x: the stream, (B, 1, D) of one position of each text.
        """
        fits = self.weights_are_prepared and fits_prepacked(x, self.config.site().group_size)
        stages = self.config.stages  # kernels of a row read eight numbers at once
        plain = all(stage.dim % 8 == 0 and stage.adds_plainly for stage in stages)
        return fits and plain and self.plain_norms and self.fits_bytes

    def new_cache(self, positions: int, first: int = 0) -> Cache:
        """Make a cache for a text of at most `positions` bytes; no gradient passes through it.

        Those before `first` will be counted and not read.

        Raises:
            ArbError: the model makes no text from left to right.
        """
        self._check_causal()
        return Cache(self, positions, first=first)

    def new_several_cache(
        self, texts: int, positions: int, device: torch.device | None = None
    ) -> SeveralCache:
        """Make a cache for several texts of at most `positions` bytes each: see `new_cache`."""
        self._check_causal()
        return SeveralCache(self, texts, positions, device=device)

    def _check_causal(self) -> None:
        if self.config.is_masked:
            raise ArbError(
                "the model predicts hidden symbols, and cannot generate from left to right",
                hint="fill holes: `arb generate RUN --infill TEXT`",
            )

    def stacks(self) -> list[Stack]:
        """List the lists of blocks, the outermost first."""
        outer = [stack for stage in self.stages for stack in (stage.encoder, stage.decoder)]
        return [*outer, self.blocks]

    def after_step(self) -> None:
        """Let integer memories take in what a step has seen; all of it on the device."""
        for part in self._memories():
            part.after_step()

    def join(self, group: Any) -> None:
        """Bring together what each process has seen of a step, before `after_step`.

        Args:
            group: `arbcli.train.parallel.group.Group`.
        """
        if self._counts is not None:  # of the last micro-batch, which one process has seen
            self._counts = group.in_order([self._counts])[-1]
        for part in self._memories():
            part.join(group)

    def forget_uses(self) -> None:
        """Forget forwards whose backward never came, as after an error."""
        for part in self.modules():
            if isinstance(part, StreamedTensor | StepMemory):
                part.forget()

    def _memories(self) -> list[StepMemory]:
        return [part for part in self.modules() if isinstance(part, StepMemory)]

    def gauges(self) -> dict[str, float]:
        """Measure what is worth a line in the log with the loss; waits for the device.

        Returns:
            What `gauges` of the parts say, the largest where several say it; and of stages
            chunk_length: bytes of a chunk on average; chunk_length_2 and so on, positions of a
                chunk of the stages inside.
            joined: share of the boundaries that found no slot, so that chunks were joined.
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
        """Where the weights are."""
        return next(itertools.chain(self.buffers(), self.parameters())).device

    @property
    def plain_norms(self) -> bool:
        """Whether there are norms, and the weights of all of them are known to be ones."""
        norms = [part for part in self.modules() if isinstance(part, TernaryRMSNorm)]
        return bool(norms) and all(norm.plain for norm in norms)

    @property
    def fits_bytes(self) -> bool:
        """Whether what each weight of its linear layers is made of is within a byte."""
        return all(matrix.rule.fits_a_byte for matrix in self._matrices())

    tokenizer: Any = None
    """The `arbcli.tokens.Tokenizer` of the symbols; None if these are bytes, or it is not known."""
    weights_are_prepared = False
    """Whether this is inside `prepared_weights`."""

    @contextmanager
    def prepared_weights(self, spare_bytes: int = 0) -> Iterator[None]:
        """Make what follows from the weights once, not in every forward.

        Those of a float twin are cast; matrices stay packed, but steps of a text prepack them anew.
        Meanwhile no weight must change.

        Args:
            spare_bytes: where products are torch's, matrices are decoded once and kept if all of
                them take no more.
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
        """Bytes of all matrices of linear layers, decoded to the dtype of activations."""
        return sum(weight.num_weights for weight in self._matrices()) * self.compute_dtype.itemsize

    def _matrices(self) -> list[LinearWeight]:
        return [part for part in self.modules() if isinstance(part, LinearWeight)]

    kept = KeptIn()
    """Format of keys and values in a cache."""

    @contextmanager
    def keeping(self, kv: str | None) -> Iterator[None]:
        """Keep keys and values in another type in caches that are made here.

        A forward without a cache rounds them as such a cache does, so that its losses are those of
        a text that is read byte by byte. It is for reading only: no gradient is promised.

        Args:
            kv: `bf16`, which activations must be too, `fp8` or `int8`; None is the dtype of
                activations. With `-mixed`, elements of keys that are rotated stay in it; with
                `-queries` queries are rounded likewise.

        Raises:
            ArbError: the model keeps none, or not so.
        """
        if kv == "bf16" and self.compute_dtype != torch.bfloat16:
            raise ArbError(
                "keys and values are kept in the dtype of activations, which is float32",
                hint="leave `--kv` out, or give `--compute bf16` too",
            )
        kept, before = KeptIn.named(kv), self.kept
        attentions = [part for part in self.modules() if isinstance(part, CachedAttention)]
        if kept.stored and not attentions:
            raise ArbError("this model keeps no keys and values", hint="leave `--kv` out")
        if kept.queries and not all(part.rounds_queries for part in attentions):
            raise ArbError(
                "queries of latent attention cannot be kept in eight bits",
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
        """Name the type that keys and values are kept in."""
        return self.kept.name("bf16" if self.compute_dtype == torch.bfloat16 else "fp32")

    def initialise(self, seed: int) -> None:
        """Draw all weights anew, as each layer declares: see `initial`."""
        for index, weight in enumerate(self.weights().values()):
            weight.initialise(seed, index)

    def drop_training_state(self) -> None:
        """Forget what only a step needs, for good: see `TernaryTensor.drop_training_state`."""
        for weight in self.packed_tensors().values():
            weight.drop_training_state()

    def declare_wire(self) -> None:
        """Declare what a run that is shared out keeps besides: `TernaryTensor.declare_wire`."""
        for weight in self.packed_tensors().values():
            weight.declare_wire()

    def state_modules(self) -> Iterator[StateModule]:
        """Go through everything that declares buffers, in the order of the model."""
        return (part for part in self.modules() if isinstance(part, StateModule))

    def packed_tensors(self) -> dict[str, TernaryTensor]:
        """Name every packed tensor, in the order of the model; a float twin has none."""
        tensors = self.weights().items()
        return {name: part for name, part in tensors if isinstance(part, TernaryTensor)}

    def weights(self) -> dict[str, TernaryTensor | FloatWeight]:
        """Name every weight, in the order of the model."""
        kinds = (TernaryTensor, FloatWeight)
        return {name: part for name, part in self.named_modules() if isinstance(part, kinds)}
