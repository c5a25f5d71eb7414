"""A model again, in float64 and plain torch, assembled from the references of its parts.

Written from the equations, a text at a time: no kernel is called and no layer of the model, chunks
have no spare slots, hashes are Python's integers, and all rows of a codebook are scored.
"""

from collections.abc import Callable, Iterator, Mapping
from functools import partial
from itertools import accumulate
from typing import NamedTuple

import torch
from torch import Tensor

from arbcli.base.lazy import imported
from arbcli.config.model import BlockConfig, Blocks, ModelConfig
from arbcli.config.parts.base import PartConfig
from arbcli.families.ahead.reference import ahead
from arbcli.families.graph.reference import memories
from arbcli.families.graph.router_reference import router
from arbcli.families.hnet.reference import boundaries, ratio_loss, spread
from arbcli.families.media.config import BYTES, KINDS
from arbcli.families.streams.reference import hyper_connection
from arbcli.verify.kernels.rows.dropout import dropout_reference
from arbcli.verify.parts.base import Choices, Reading, Weights, norm, under
from arbcli.verify.parts.mlp import mlp


class Branch(NamedTuple):
    """A mixer or a channel mixer."""

    name: str
    """Name of the part in its block."""
    norm: str
    """Name of the norm before it."""
    part: Callable[[Weights, Tensor, Tensor, Reading], Tensor]
    """Compute the output to be added, from weights, stream (T, D), normalised stream and inputs."""

    def apply(self, w: Weights, weight: Tensor | None, reading: Reading, x: Tensor) -> Tensor:
        """Normalise the stream (T, D), by weights that the norm may have, and run the part."""
        return self.part(w, x, norm(x, weight, reading.site.norm_eps), reading)


class Masks(NamedTuple):
    """Dropout of the branches of a model."""

    keys: list[int]
    """Key of the mask of each branch, in the order of a forward."""
    rate: float
    """Probability that an element is dropped."""

    def factors(self, branch: int, first: int, positions: int, width: int) -> Tensor:
        """Compute what the output of a branch is multiplied by, (positions, width) float64.

        Args:
            branch: number of the branch.
            first: row of the first position in the mask.
            positions: number of positions.
            width: width of the stream.
        """
        ones = torch.ones(first + positions, width, dtype=torch.float64)
        kept = dropout_reference(ones, torch.tensor(self.keys[branch]), self.rate)[first:] > 0
        return kept / (1 - self.rate)


def branch_of(config: PartConfig) -> Branch:
    """Return the reference of a mixer or a channel mixer, with the names of its tensors."""
    part = imported(config.module)
    norm_name = part.norm_name or f"{part.name}_norm"
    return Branch(part.name, norm_name, imported(config.reference))


def _scaled(factor: Tensor | float, branch: Callable[[Tensor], Tensor], x: Tensor) -> Tensor:
    return factor * branch(x)


def reference_model(
    weights: Weights,
    config: ModelConfig,
    ids: Tensor,
    *,
    memories: Mapping[str, Tensor] | None = None,
    choices: Choices | None = None,
    endless: bool = False,
    masks: Masks | None = None,
) -> tuple[Tensor, dict[str, Tensor]]:
    """Compute logits and losses of bytes or tokens.

    Args:
        weights: decoded, float64, by their names in the model.
        config: configuration of the model.
        ids: (B, T) bytes.
        memories: integer buffers of the model by name, others may be among them.
        choices: choices of the model, which are adopted and judged; None chooses the best.
        endless: whether chunks have as many slots as they need, as in generation.
        masks: dropout of the branches; None drops nothing.

    Returns:
        (B, T, V) logits, and losses besides that of the text: `ponder`, `ratio`, `indexer`, and
        `next_2` and so on, where there are any.
    """
    model = Reference(
        weights, config, memories=memories, choices=choices, endless=endless, masks=masks
    )
    return model(ids)


class Reference:
    """A model in float64; the arguments are those of `reference_model`."""

    def __init__(
        self,
        weights: Weights,
        config: ModelConfig,
        *,
        memories: Mapping[str, Tensor] | None = None,
        choices: Choices | None = None,
        endless: bool = False,
        masks: Masks | None = None,
    ) -> None:
        self.masks = masks
        counts = [len(block.parts) for _, _, block in named_blocks(config)]
        firsts = accumulate(counts, initial=0)
        self.branches = {
            name: first for (name, *_), first in zip(named_blocks(config), firsts, strict=False)
        }
        """Number of the first branch of each block, by its name."""
        self.weights = {name.removesuffix(".weight"): weights[name] for name in weights}
        self.config, self.endless = config, endless
        self.memories, self.choices = memories or {}, choices
        self.terms: dict[str, dict[str, list[Tensor]]] = {}
        """Terms of the losses, which are their averages, by loss and by part."""
        self.log_probabilities: dict[int, Tensor] = {}
        """Log-probabilities of each head of a composite head, by the row of a text."""
        self.places: dict[tuple[int, int], list[int]] = {}
        """The bytes that positions stand for, by stage and text."""
        self.text: list[list[int]] = []
        self.slots: list[int] = []
        """Positions that each stage has room for."""

    def __call__(self, ids: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
        """Compute logits and losses of (B, T) bytes."""
        self.terms, self.places, self.text = {}, {}, ids.tolist()
        lengths = (self.config.ctx if self.endless else ids.shape[1], *self.config.slots[1:])
        self.slots = list(accumulate(lengths, min))
        logits = torch.stack([self._logits(row) for row in range(len(ids))])
        return logits, self.losses()

    def losses(self) -> dict[str, Tensor]:
        """Average the terms of losses; parts count equally, and ratios of stages are added up."""
        means = {
            loss: torch.stack([_mean(torch.cat(terms)) for terms in parts.values()]).mean()
            for loss, parts in self.terms.items()
            if loss != "ratio"
        }
        ratios = self.terms.get("ratio", {})
        ratio_losses = []
        for index, chunking in enumerate(self.config.chunkings):
            if pairs := ratios.get(f"stages.{index}"):
                p, begins = torch.cat(pairs).T
                ratio_losses.append(ratio_loss(p, begins, chunking.length))
        return means | ({"ratio": torch.stack(ratio_losses).sum()} if ratio_losses else {})

    def block(self, name: str, stage: int, config: BlockConfig, x: Tensor, row: int) -> Tensor:
        """Pass the stream of one text, (T, D), or streams, (T, n, D), through a block."""
        reading, w = self._reading(name, stage, row), under(self.weights, name)
        share = self.config.stages[stage].contribution
        for number, part in enumerate(config.parts, self.branches[name]):
            factor: Tensor | float = share
            if self.masks:
                drawn = self.masks.factors(number, row * self.slots[stage], len(x), x.shape[-1])
                factor = share * drawn.to(x.device)
            known = branch_of(part)
            branch = partial(
                known.apply,
                under(w, known.name),
                w.get(known.norm),
                reading.within(known.name, part),
            )
            if x.dim() == 3:
                connection = under(w, f"{known.name}_streams")
                x = hyper_connection(connection, x, partial(_scaled, factor, branch))
            else:
                x = x + factor * branch(x)
        return self.bounded(x, self.config.stages[stage].bound)

    @staticmethod
    def bounded(x: Tensor, limit: float | None) -> Tensor:
        """Scale streams down whose root-mean-square is above `limit`."""
        if limit is None:
            return x
        size = (x.square().mean(dim=-1, keepdim=True) + 1e-6).sqrt()
        return torch.where(size > limit, x * (limit / size), x)

    def head(self, x: Tensor, row: int) -> Tensor:
        """Compute (T, V) logits of one text from the outermost stage's result, (T, D)."""
        w = self.weights
        if self.config.head:
            reading = self._reading("", 0, row).within("byte_mlp", self.config.head)
            x = x + mlp(under(w, "byte_mlp"), x, norm(x, w.get("byte_norm")), reading)
        x = norm(x, w.get("norm"), self.config.norm_eps)
        if self.config.composite:
            self.log_probabilities[row] = (
                (x @ w["head.heads"].T).view(len(x), len(KINDS), -1).log_softmax(-1)
            )
            shares = (x @ w["head.gate"].T).log_softmax(-1)
            return torch.logsumexp(self.log_probabilities[row] + shares[..., None], dim=1)
        return x @ w["embedding" if self.config.tied else "head"].T

    def kind_losses(self, targets: Tensor) -> dict[str, Tensor]:
        """Average the loss of each head of a composite head over the bytes of its kind.

        Args:
            targets: (B, T), with 256 added for each number of a kind.
        """
        if not self.config.composite:
            return {}
        log_probabilities = torch.stack(
            [self.log_probabilities[row] for row in range(len(targets))]
        )
        losses = {}
        for number, name in enumerate(KINDS):
            kind_mask = targets // BYTES == number
            logs = log_probabilities[:, :, number][kind_mask]
            losses[f"of_{name}"] = -_mean(logs.gather(1, targets[kind_mask][:, None] % BYTES))
        return losses

    def ahead(self, x: Tensor, row: int) -> None:
        """Note the losses of the bytes beyond the next one of one text, if they are predicted."""
        if self.config.ahead:
            reading = self._reading("", 0, row).within("ahead", self.config.ahead)
            ahead(under(self.weights, "ahead"), x, reading)

    def _logits(self, row: int) -> Tensor:
        ids = torch.tensor(self.text[row], device=self.weights["embedding"].device)
        self.places[0, row] = list(range(len(ids)))
        x = self.weights["embedding"][ids]
        for part in self.config.beside:
            reading = self._reading("", 0, row).within(part.kind, part)
            x = x + imported(part.reference)(under(self.weights, part.kind), reading)
        x = self._through(0, x, row)
        self.ahead(x, row)
        return self.head(x, row)

    def _through(self, index: int, x: Tensor, row: int) -> Tensor:
        """Pass the stream of one text, (T, D), through a stage and all inside it."""
        stage = self.config.stages[index]
        if not stage.chunking:
            return self._innermost(x, row)
        name = f"stages.{index}"
        w, reading = under(self.weights, name), self._reading(name, index, row, stage.chunking)
        x = norm(self._list(f"{name}.encoder", index, stage.before, x, row))
        p, begins = boundaries(w, x, reading)
        if stage.chunking.boundaries == "learned":
            reading.note("ratio", torch.stack([p, p.new_tensor(begins)], dim=1))
        starts = [t for t, begin in enumerate(begins) if begin]
        if not self.endless:
            starts = starts[: self.slots[index + 1]]
        self.places[index + 1, row] = [self.places[index, row][t] for t in starts]
        z = self._through(index + 1, x[starts] @ w["inward"].T, row)
        z = norm(z, w.get("outward_norm")) @ w["outward"].T
        x = spread(z, p, starts, x @ w["residual"].T)
        return self._list(f"{name}.decoder", index, stage.after, x, row)

    def _innermost(self, x: Tensor, row: int) -> Tensor:
        stage, index = self.config.main, len(self.config.stages) - 1
        if not stage.memories and not stage.router:
            return self._list("blocks", index, stage.blocks, x, row)
        place, taps = stage.memories.place if stage.memories else 0, [x]
        x = self._list("blocks", index, stage.blocks[:place], x, row)
        if stage.memories:
            reading = self._reading("", index, row, stage.memories)
            x, outputs = memories(self.weights, x, reading)
            taps += outputs
        x = self._list("blocks", index, stage.blocks[place:], x, row, place)
        return router(under(self.weights, "router"), [x, *taps]) if stage.router else x

    def _list(
        self, prefix: str, stage: int, blocks: Blocks, x: Tensor, row: int, first: int = 0
    ) -> Tensor:
        """Pass (T, D) through blocks; several streams begin as copies, and are averaged."""
        streams = self.config.stages[stage].streams
        if streams > 1:
            x = torch.stack([x] * streams, dim=1)
        for number, block in enumerate(blocks, first):
            x = self.block(f"{prefix}.{number}", stage, block, x, row)
        return x.mean(dim=1) if streams > 1 else x

    def _reading(
        self, name: str, stage: int, row: int, config: PartConfig | None = None
    ) -> Reading:
        return Reading(
            config=config,
            site=self.config.site(stage),
            name=name,
            text=self.text[row],
            places=self.places[stage, row],
            row=row,
            slots=self.slots[stage],
            memories=self.memories,
            choices=self.choices,
            terms=self.terms,
        )


def _mean(terms: Tensor) -> Tensor:
    return terms.sum() / max(1, len(terms))


def named_blocks(config: ModelConfig) -> Iterator[tuple[str, int, BlockConfig]]:
    """Yield (name, number of the stage, block) of a model, in the order of a forward."""
    outer, main = list(enumerate(config.outer)), len(config.outer)
    lists = [(f"stages.{index}.encoder", index, stage.before) for index, stage in outer]
    lists.append(("blocks", main, config.main.blocks))
    lists += [(f"stages.{index}.decoder", index, stage.after) for index, stage in outer[::-1]]
    for prefix, stage, blocks in lists:
        yield from ((f"{prefix}.{index}", stage, block) for index, block in enumerate(blocks))


def masked_reference_loss(logits: Tensor, targets: Tensor) -> Tensor:
    """Average the cross-entropy of hidden bytes of each text, those that are not -1, over texts."""
    rows = zip(logits, targets, strict=True)
    hidden = [(row[of >= 0], of[of >= 0]) for row, of in rows]
    return torch.stack([reference_loss(row, of) for row, of in hidden]).mean()


def reference_loss(logits: Tensor, targets: Tensor) -> Tensor:
    """Average the cross-entropy in nats a byte over the targets that are not negative."""
    logits, targets = logits[targets >= 0], targets[targets >= 0]
    target_logits = logits.gather(-1, targets[..., None])[..., 0]
    return (torch.logsumexp(logits, dim=-1) - target_logits).mean()
