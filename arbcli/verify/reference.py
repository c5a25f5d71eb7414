"""A model again, in float64 and plain torch: the code of exports, with decoded weights.

This code is written from the equations: no kernel is called and no layer of the model, a text is
read by itself, and chunks have no spare slots. Hooks add the parts of training:
terms of losses, dropout, and choices of the model, which are adopted and judged.
"""

from collections.abc import Callable, Iterator, Mapping
from functools import partial
from itertools import accumulate
from types import SimpleNamespace
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from arbcli.base.lazy import imported
from arbcli.config.model import BlockConfig, ModelConfig
from arbcli.families.ahead.reference import ahead
from arbcli.families.compressed import modeling as compressed
from arbcli.families.compressed.reference import choose_entries, limit, note_divergences
from arbcli.families.experts import modeling as experts
from arbcli.families.experts.reference import choose_experts
from arbcli.families.graph import modeling as graph
from arbcli.families.graph.reference import choose_code, choose_rows, halt
from arbcli.families.hnet import modeling as hnet
from arbcli.families.hnet.reference import find_starts, ratio_loss
from arbcli.families.media import modeling as media
from arbcli.families.media.config import BYTES, KINDS
from arbcli.interop.huggingface.modeling_core import Packed, PlainModel, Reading
from arbcli.interop.huggingface.remote import part_classes, remote_config
from arbcli.verify.kernels.rows.dropout import dropout_reference

Weights = Mapping[str, Tensor]
Choices = dict[str, list[Tensor]]
"""Choices of a model by the name of the part, (B, ...) each, in order."""


class Masks(NamedTuple):
    """Dropout of the branches of a model."""

    keys: list[int]
    """Key of the mask of each branch, in the order of a forward."""
    rate: float
    """Probability that an element is dropped."""

    def factors(self, branch: int, first: int, positions: int, width: int) -> Tensor:
        """Compute the factors of the output of a branch, (positions, width) float64.

        Args:
            branch: number of the branch.
            first: row of the first position in the mask.
            positions: number of positions.
            width: width of the stream.
        """
        ones = torch.ones(first + positions, width, dtype=torch.float64)
        mask = dropout_reference(ones, torch.tensor(self.keys[branch]), self.rate)[first:] > 0
        return mask / (1 - self.rate)


def _keep_probabilities(model: "Reference", _name: str, head: Any, x: Tensor) -> Tensor:
    log_probabilities = media.CompositeHead.kind_log_probabilities(head, x)
    model.log_probabilities[model.row] = log_probabilities
    return log_probabilities


HOOKS: dict[type[nn.Module], dict[str, Callable]] = {
    compressed.CompressedAttention: {"shares": note_divergences},
    compressed.Indexer: {"limit": limit, "choose": choose_entries},
    experts.Gate: {"choose": choose_experts},
    graph.Codebook: {"choose": choose_rows},
    graph.Iterated: {"halt": halt},
    graph.Quantiser: {"choose": choose_code},
    hnet.Stage: {"starts": find_starts},
    media.CompositeHead: {"kind_log_probabilities": _keep_probabilities},
}
"""Functions by the methods of parts that they replace. They take the reference, the name of the
part in the model and the part, and then the arguments of the method."""


class Reference(PlainModel):
    """A model in float64.

    Args:
        weights: decoded, float64, by their names in the model.
        config: configuration of the model.
        memories: integer buffers of the model by name, others may be among them.
        choices: choices of the model, which are adopted and judged; None chooses the best.
        endless: whether chunks have as many slots as they need, as in generation.
        masks: dropout of the branches; None drops nothing.
    """

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
        super().__init__()
        self.weights = {name.removesuffix(".weight"): weights[name] for name in weights}
        self.config, self.endless, self.choices = config, endless, choices
        self.terms: dict[str, dict[str, list[Tensor]]] = {}
        """Terms of the losses, which are their averages, by loss and by part."""
        self.log_probabilities: dict[int, Tensor] = {}
        """Log-probabilities of each head of a composite head, by the row of a text."""
        self.position_ids: dict[tuple[int, int], Tensor] = {}
        """The bytes that positions stand for, by stage and text."""
        self.text = torch.empty(0)
        """(B, T) int64, the bytes."""
        self.slots: list[int] = []
        """Positions that each stage has room for."""
        self.row = 0
        """Number of the text that is read."""
        self.scores: list[tuple[Tensor, Tensor]] = []
        """Scores of the model's choices, and the best ones, sorted."""
        self.products: list[tuple[Tensor, Tensor]] = []
        """Products of indexers that the model has above 0, others 0, and those that are above 0."""
        self.notes: dict[str, Any] = {}
        """State that hooks keep until the end of a text, by part."""
        parts = {kind: imported(code) for kind, code in part_classes(config).items()}
        with torch.device("meta"):
            self.build(SimpleNamespace(**remote_config(config)), parts, causal=not config.is_masked)
        attach(self, self.weights | dict(memories or {}))
        for name, part in self.named_modules():
            for method, hook in HOOKS.get(type(part), {}).items():
                setattr(part, method, partial(hook, self, name_in_model(name), part))
        if masks:
            self._drop_by(masks)

    def _drop_by(self, masks: Masks) -> None:
        branches = [
            (getattr(self.get_submodule(name), branch), stage)
            for name, stage, _ in named_blocks(self.config)
            for branch, _ in self.get_submodule(name).branches  # type: ignore[union-attr]
        ]
        for number, (part, stage) in enumerate(branches):

            def drop(
                _part: nn.Module, _inputs: Any, y: Tensor, n: int = number, s: int = stage
            ) -> Tensor:
                return y * masks.factors(n, self.row * self.slots[s], *y.shape).to(y.device)

            part.register_forward_hook(drop)

    def forward(self, ids: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
        """Compute logits and losses of (B, T) bytes or tokens.

        Returns:
            (B, T, V) logits, and losses besides that of the text: `ponder`, `ratio`, `indexer`, and
            `next_2` and so on, where there are any.
        """
        self.scores, self.products = [], []
        self.terms, self.position_ids, self.text = {}, {}, ids.to(self.weights["embedding"].device)
        lengths = (self.config.ctx if self.endless else ids.shape[1], *self.config.slots[1:])
        self.slots = list(accumulate(lengths, min))
        rows = []
        for row, text in enumerate(self.text):
            self._begin(row)
            self.position_ids[0, row] = torch.arange(len(text), device=text.device)
            rows.append(self.read(text, torch.float64))
        return torch.stack(rows), self.losses()

    def losses(self) -> dict[str, Tensor]:
        """Average the terms of losses to float64 scalars by name.

        Parts count equally, and ratios of stages are added up.
        """
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

    def block(self, name: str, stage: int, x: Tensor, row: int) -> Tensor:
        """Pass the stream of one text, (T, D), or streams, (T, n, D), through a block."""
        self._begin(row)
        return self.get_submodule(name)(x, Reading(self.text[row], self.position_ids[stage, row]))

    def head_of(self, x: Tensor, row: int) -> Tensor:
        """Compute (T, V) logits of one text from the outermost stage's result, (T, D).

        Besides, note the losses of the bytes beyond the next one, if they are predicted.
        """
        self._begin(row)
        if self.config.ahead:
            ahead(self, x)
        return PlainModel.logits(self, x)

    def logits(self, x: Tensor) -> Tensor:
        """Compute (T, V) logits of the text that is read."""
        return self.head_of(x, self.row)

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

    def model_choice(self, name: str) -> list[Tensor] | None:
        """Return the model's choices for the text in a part; None: choose."""
        if self.choices is None:
            return None
        return [choice[self.row] for choice in self.choices[name]]

    def judge(self, chosen: Tensor, all_scores: Tensor) -> None:
        """Note the scores (..., k) of the model's choices, and the best k of all (..., n)."""
        best = all_scores.detach().sort(dim=-1, descending=True).values[..., : chosen.shape[-1]]
        chosen_scores = chosen.detach().sort(dim=-1, descending=True).values
        self.scores.append((chosen_scores.flatten(), best.flatten()))

    def note(self, loss: str, name: str, terms: Tensor) -> None:
        """Note (n, ...) terms of a loss in a part."""
        self.terms.setdefault(loss, {}).setdefault(name, []).append(terms)

    def stage_of(self, name: str) -> int:
        """Return the number of the stage of a part."""
        return int(name.split(".")[1]) if name.startswith("stages.") else len(self.config.outer)

    def _begin(self, row: int) -> None:
        self.row, self.notes = row, {}


def name_in_model(name: str) -> str:
    """Return the name in the model of a module of the plain one."""
    return name.removeprefix("between.")


def attach(model: nn.Module, values: Weights) -> None:
    """Give modules of plain code their weights, which are not parameters, and integers, by name."""
    for name, part in [*model.named_modules()]:
        prefix = f"{name_in_model(name)}." if name else ""
        if isinstance(part, Packed):
            setattr(part, "rows", partial(_rows, values[prefix.removesuffix(".")]))  # noqa: B010
            continue
        for key, parameter in [*part.named_parameters(recurse=False)]:
            delattr(part, key)
            setattr(part, key, values[prefix + key].view(parameter.shape))
        for key, _ in [*part.named_buffers(recurse=False)]:
            setattr(part, key, values[prefix + key])


def _rows(weight: Tensor, index: Tensor | slice, _dtype: torch.dtype) -> Tensor:
    return weight[index]


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
    """Average the cross-entropy of hidden bytes of each text, those that are not -1, over texts.

    Args:
        logits: (B, T, V) float64.
        targets: (B, T) int64.

    Returns:
        A scalar in nats per byte.
    """
    hidden = [(row[of >= 0], of[of >= 0]) for row, of in zip(logits, targets, strict=True)]
    return torch.stack([reference_loss(row, of) for row, of in hidden]).mean()


def reference_loss(logits: Tensor, targets: Tensor) -> Tensor:
    """Average the cross-entropy over the targets that are not negative.

    Args:
        logits: (..., V) float64.
        targets: (...) int64.

    Returns:
        A scalar in nats per byte.
    """
    logits, targets = logits[targets >= 0], targets[targets >= 0]
    target_logits = logits.gather(-1, targets[..., None])[..., 0]
    return (torch.logsumexp(logits, dim=-1) - target_logits).mean()
