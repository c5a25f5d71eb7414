"""`LanguageModel`: embedding, stages of blocks, norm and head, built from a configuration.

bytes -> embedding, n-grams -> [encoder -> chunks ->] blocks, memories [-> decoder] -> norm -> head

`stages` has the outer stages, and `blocks` the blocks of the innermost one. Optional parts that the
configuration omits are None.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any, cast

import torch
from torch import Tensor, nn
from torch.nn import functional

from arbcli.base.lazy import imported
from arbcli.config.kinds import BESIDE
from arbcli.config.layer_spec import is_chunked
from arbcli.config.model import ModelConfig
from arbcli.families import BETWEEN, OBJECTIVES
from arbcli.model.layers.decoded_groups import decode_in_groups
from arbcli.model.layers.kinds import layers_for, stream_norm, symbol_embedding, symbol_head
from arbcli.model.layers.linear import TernaryLinear
from arbcli.model.layers.loss import divergence
from arbcli.model.packed_model import JoinedStatistics, PackedModel
from arbcli.model.parts.base import BlockInputs, BlockOutput, Documents, build_part
from arbcli.model.stack import Stack

if TYPE_CHECKING:
    from arbcli.model.cache import Cache
    from arbcli.model.layers.dropout import Dropout
    from arbcli.model.layers.symbols import Predictions
    from arbcli.model.state import Track

NGRAM_KEYS = "arbcli.model.ngrams:ngram_keys"
TEACHER_WEIGHT = 1.0
"""Weight of the divergence from a teacher in the training loss."""


class LanguageModel(PackedModel):
    """A language model over bytes or tokens, whose weights are uninitialised.

    `arbcli.model.build.build_model` also initialises them, and `arbcli.training.trainer.Trainer`
    sets the `sink` of each weight to its updater.

    Args:
        config: configuration of the parts and of weight storage.
        compute_dtype: dtype of activations, bfloat16 or float32.
        recompute: whether to use activation checkpointing, which only saves the inputs of blocks.
    """

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
        outermost, spec = config.layer_spec(), config.layer_spec(-1)
        main, memories = config.main, config.main.memories
        self.cross_entropy = layers_for(outermost).cross_entropy
        # random bits of updates depend on the order of modules: never change it
        self.embedding = symbol_embedding(config)
        beside = {part.kind: part for part in config.beside}
        for name in BESIDE:
            setattr(self, name, build_part(beside[name], outermost) if name in beside else None)
        self.stages: Any  # a `ModuleList` of outer stages
        if config.outer:
            outer = enumerate(config.chunkings)
            self.stages = nn.ModuleList(
                imported(chunking.module)(config, index) for index, chunking in outer
            )
        else:
            self.stages = ()
        self.blocks = Stack(main.blocks, main, spec)
        self._between: tuple[Any, ...] = ()  # whose children are those of the model
        if memories or main.router:
            between = imported(BETWEEN)(memories, spec, main.router)
            self._between = (between,)
            for name, module in between.named_children():
                self.add_module(name, module)
        if config.head:
            self.byte_norm = stream_norm(outermost, rounded=config.head.is_bitnet)
            self.byte_mlp = build_part(config.head, outermost, "head")
        self.norm = stream_norm(outermost)
        if config.composite:
            self.head: Any = build_part(config.composite, outermost)
        else:
            self.head = symbol_head(config, self.embedding)
        self.ahead = build_part(config.ahead, outermost) if config.ahead else None
        self.num_branches = 0
        """Number of mixers and channel mixers of all blocks."""
        for stack in self.stacks():
            stack.first_branch = self.num_branches
            self.num_branches += stack.num_branches
        if memories is None:
            decodes_whole = isinstance(self.head, TernaryLinear) and not self.scores_in_chunks
            follows = decodes_whole and not self.ahead and not config.outer
            head = self.head.weight if follows else None
            for stack in self.stacks():
                after = head if stack is self.blocks else None
                decode_in_groups(stack.weights_of_blocks(), after, across=not recompute)
        self._gauged_parts: list[Any] | None = None
        """Parts with `gauges`; None before they are first read."""

    @property
    def draws(self) -> tuple[str, ...]:
        """See `DrawOrder`."""
        between = (name for module in self._between for name in module.draws)
        last = "byte_norm", "byte_mlp", "norm", "head", "ahead"
        return ("embedding", *BESIDE, "stages", "blocks", *between, *last)

    def forward(self, ids: Tensor, cache: "Cache | None" = None) -> Tensor:
        """Compute logits, (B, T, V) in `compute_dtype`, from bytes or tokens, (B, T) int64.

        With a `Cache`, B is 1, and the symbols continue the text of the cache. With a
        `BatchCache`, T is 1: one symbol of each text is read, and the logits of a text do not
        depend on the others.
        """
        if cache is not None:
            return cache.forward(self, ids)
        return self.logits(self._hidden(ids))

    def new_cache(
        self, positions: int, texts: int = 1, *, first: int = 0, device: torch.device | None = None
    ) -> "Cache":
        """Create the decoding cache of texts of at most `positions` bytes.

        See `Cache`; for several texts it is a `BatchCache`.
        """
        from arbcli.model.cache import BatchCache, Cache  # training needs no cache

        if texts > 1:
            return BatchCache(self, texts, positions, first=first, device=device)
        return Cache(self, positions, first=first, device=device)

    def loss(self, ids: Tensor, targets: Tensor, documents: Tensor | None = None) -> Tensor:
        """Compute the mean cross-entropy in nats per symbol, a float32 scalar: see `losses`."""
        return self.losses(ids, targets, documents)["text"]

    def losses(
        self,
        ids: Tensor,
        targets: Tensor,
        documents: Tensor | None = None,
        *,
        teacher: "LanguageModel | None" = None,
        dropout: "Dropout | None" = None,
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
            dropout: dropout of the `num_branches` branches of this model, numbered in the order of
                a forward; None drops nothing. A row of a mask is a position of the flattened batch.

        Returns:
            Float32 scalars by name:
            `text`, the cross-entropy in nats per symbol, or the bound of a masked model;
            the auxiliary losses of parts, each the mean over the parts that have it, and those of
            heads;
            `teacher`, the mean divergence from the teacher's predictions in nats per symbol.
        """
        hidden = self._hidden(ids, documents, dropout)
        if self.config.composite:
            head_input = self._head_input(hidden)
            losses = self.head.next_losses(head_input, self.norm, targets, self.cross_entropy)
        elif self.config.is_masked:
            losses = {"text": self._masked_losses(hidden, targets).mean()}
        elif self.config.fills or documents is not None:
            losses = {"text": self._mean_loss(hidden, targets)}
        else:
            losses = {"text": self._text_loss(hidden, targets)}
        for name, terms in hidden.losses.items():
            losses[name] = cast(Tensor, sum(terms)) / len(terms) if len(terms) > 1 else terms[0]
        if self.ahead:
            losses |= self.ahead.losses(hidden.total(), ids)
        if teacher is not None:
            divergences = self._divergences(hidden, teacher, ids, documents)
            learnt = torch.ones_like(targets) if documents is None else targets >= 0
            losses["teacher"] = (divergences * learnt).sum() / learnt.sum().clamp(min=1)
        return losses

    @property
    def loss_weights(self) -> dict[str, float]:
        """Weight of each term of `losses`; that of the text is 1."""
        return self.config.loss_weights | {"teacher": TEACHER_WEIGHT}

    def _text_loss(self, hidden: BlockOutput, targets: Tensor) -> Tensor:
        if self.scores_in_chunks:
            return self._score(hidden, targets).mean()
        return self.cross_entropy(self.logits(hidden).flatten(0, 1), targets.flatten())

    def _mean_loss(self, hidden: BlockOutput, targets: Tensor) -> Tensor:
        """Compute the mean loss over the targets that are not negative."""
        learnt = targets >= 0
        return self._symbol_losses(hidden, targets).sum() / learnt.sum().clamp(min=1)

    def _masked_losses(self, hidden: BlockOutput, targets: Tensor) -> Tensor:
        """Compute (B, T) float32 losses, whose mean is `arbcli.families.masked.masking`'s bound.

        The cross-entropy of each of a window's k hidden symbols is weighted by T / k; the loss of
        visible symbols is 0.
        """
        weights = import_module(OBJECTIVES["masked"]).bound_weights(targets)
        return self._symbol_losses(hidden, targets) * weights

    def _symbol_losses(self, hidden: BlockOutput, targets: Tensor) -> Tensor:
        """Compute the cross-entropy of each target, (B, T) float32; 0 for negative targets."""
        if self.scores_in_chunks:
            return self._score(hidden, targets) * (targets >= 0)
        logits, numbers = self.logits(hidden).float().flatten(0, 1), targets.clamp(min=-1).flatten()
        losses = functional.cross_entropy(logits, numbers, ignore_index=-1, reduction="none")
        return losses.view(targets.shape)

    @property
    def scores_in_chunks(self) -> bool:
        """Whether losses are computed in chunks of the vocabulary, without storing all logits."""
        return self.config.weights == "ternary" and is_chunked(self.config.vocabulary)

    def _score(self, hidden: BlockOutput, targets: "Tensor | Predictions") -> Tensor:
        x = self._head_input(hidden)
        return self.head.losses(x, targets, self.norm, recompute=self.recompute)

    def _head_input(self, hidden: BlockOutput) -> Tensor:
        x = hidden.total()
        return x + self.byte_mlp(x, self.byte_norm).added if self.config.head else x

    def _divergences(
        self, hidden: BlockOutput, teacher: "LanguageModel", ids: Tensor, documents: Tensor | None
    ) -> Tensor:
        """Compute the KL divergence from the teacher's predictions, (B, T) float32, in nats."""
        with torch.no_grad():
            teacher_hidden = teacher._hidden(ids, documents)
            if self.scores_in_chunks:
                inputs = teacher._head_input(teacher_hidden)
                predictions = teacher.head.predictions(inputs, teacher.norm)
            else:
                logits = teacher.logits(teacher_hidden).flatten(0, 1)
        if self.scores_in_chunks:
            return self._score(hidden, predictions)
        return divergence(self.logits(hidden).flatten(0, 1), logits).view(ids.shape)

    def position_losses(self, ids: Tensor, targets: Tensor) -> Tensor:
        """Compute the cross-entropy of each target, (B, T) int64: (B, T) float32, in nats.

        For a masked model these are the terms of its bound, with ids and targets from `hide`.
        """
        symbol_losses = self._masked_losses if self.config.is_masked else self._symbol_losses
        return symbol_losses(self._hidden(ids), targets)

    def embed(self, text: Tensor, length: int) -> Tensor:
        """Embed the last T symbols of (B, history + T), with all added parts: (B, T, D)."""
        x = self.embedding(text[:, -length:], self.compute_dtype)
        for name in BESIDE:
            part = getattr(self, name)
            if part is not None:
                x = x + part(text, length, self.compute_dtype)
        return x

    def block_inputs(self, text: Tensor, length: int) -> BlockInputs:
        """Return the inputs of the last T symbols other than the stream, from (B, history + T)."""
        if not self.config.reads_text:
            return BlockInputs()
        return BlockInputs(grams=imported(NGRAM_KEYS)(text)[:, -length:])

    def _hidden(
        self, ids: Tensor, documents: Tensor | None = None, dropout: "Dropout | None" = None
    ) -> BlockOutput:
        """Compute the stream before the head."""
        length = ids.shape[1]
        x, inputs = self.embed(ids, length), self.block_inputs(ids, length)
        if documents is not None:
            inputs = inputs._replace(documents=Documents.from_numbers(documents))
        if dropout is not None:
            inputs = inputs._replace(dropout=dropout)
            x = dropout.drop_embedding(x)
        return self.run_stages(0, x, ids, inputs)

    def run_stages(
        self,
        index: int,
        x: Tensor,
        ids: Tensor,
        inputs: BlockInputs,
        cache: "Cache | None" = None,
        *,
        fused: bool = False,
    ) -> BlockOutput:
        """Run the stream through stage `index` and all inner ones, down to the blocks.

        Args:
            index: index of the stage, outermost first.
            x: the stream, (B, T, D).
            ids: (B, bytes) int64.
            inputs: additional inputs.
            cache: states of the texts, which the positions continue; None for complete windows.
            fused: see `run_innermost`.
        """
        if index == len(self.stages):
            if cache is None:
                return self.run_innermost(x, inputs)
            with cache.main.clock.reading(x.shape[1]):
                return self.run_innermost(x, inputs, cache.main, fused=fused)

        def inner(x: Tensor, inside: BlockInputs) -> BlockOutput:
            return self.run_stages(index + 1, x, ids, inside, cache)

        if cache is None:
            return self.stages[index](x, ids, inputs, inner, recompute=self.recompute)
        return self.stages[index].follow(x, ids, inputs, cache.stages[index], inner)

    def run_innermost(
        self, x: Tensor, inputs: BlockInputs, track: "Track | None" = None, *, fused: bool = False
    ) -> BlockOutput:
        """Run the stream through the innermost stage.

        Args:
            x: the stream, (B, T, D).
            inputs: additional inputs.
            track: decoding states; None for complete windows.
            fused: whether to use the fused kernels for one position of each text.
        """

        def run(x: Tensor, span: slice) -> BlockOutput:
            if track is not None and fused:
                return BlockOutput(self.blocks.step(x, track, inputs, span))
            return self.blocks(x, inputs, track, recompute=self.recompute, span=span)

        if not self._between:
            return run(x, slice(None))
        (between,) = self._between
        return between(run, x, inputs, batched=bool(track and track.text_views))

    def logits(self, hidden: BlockOutput) -> Tensor:
        """Compute logits, (B, T, V) in `compute_dtype`, from the stream before the final norm."""
        if self.config.composite:
            return self.head(self._head_input(hidden), self.norm).logits
        if self.config.head:
            return self.head(self._head_input(hidden), self.norm)
        if hidden.added is None:
            return self.head(hidden.x, self.norm)
        return self.head(hidden.x, self.norm, hidden.added)[0]

    def stacks(self) -> list[Stack]:
        """Return the stacks of blocks in the order of a forward."""
        before = [stage.encoder for stage in self.stages]
        return [*before, self.blocks, *[stage.decoder for stage in reversed(self.stages)]]

    def finish_step(self) -> None:
        """Update the parts that learn without gradients, after a step; does not synchronise."""
        for part in self._memories():
            part.finish_step()

    def join(self, group: Any) -> None:
        """Combine the statistics of all processes, before `finish_step`.

        Args:
            group: the `arbcli.training.parallel.group.Group` of the run.
        """
        for part in self.modules():
            if isinstance(part, JoinedStatistics):
                part.join(group)

    def gauges(self) -> dict[str, float]:
        """Return metrics for the log; synchronises with the device.

        Returns:
            `gauges` of all parts; the maximum if several have the same name.
        """
        gauges: dict[str, float] = {}
        if self._gauged_parts is None:
            others = [part for part in self.modules() if part is not self]
            self._gauged_parts = [part for part in others if hasattr(part, "gauges")]
        for part in self._gauged_parts:
            for name, value in part.gauges().items():
                gauges[name] = max(value, gauges.get(name, value))
        return gauges
