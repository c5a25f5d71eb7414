"""Subjects of a comparison: a model on a device, in a dtype, by a backend, with a batch."""

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from arbcli.config.model import VOCABULARY, ModelConfig
from arbcli.config.short_forms import set_part_rules
from arbcli.families.masked.filling import cut
from arbcli.families.masked.masking import hide
from arbcli.families.media.config import KINDS
from arbcli.kernels.runtime.backend import use_backend
from arbcli.model.build import build_model
from arbcli.model.language_model import LanguageModel
from arbcli.model.layers.vector import VectorWeight
from arbcli.model.optimizers import DIRECTIONS
from arbcli.model.rules import DIRECTION, RULES, WITH_DIGITS
from arbcli.verify.compare import errors
from arbcli.verify.models import FULL_SIZE, LARGEST, MODELS, RAGGED, fits, has_mamba, shortened
from arbcli.verify.reference import Masks, named_blocks
from arbcli.verify.scale_types import ALWAYS
from arbcli.verify.verification import Gate

FEW_MODELS = ("graph", "hnet", "compressed")
"""Models that the interpreter compares, besides `RAGGED`; each takes it 10 s."""
TRAINED_MODEL = "1b"
"""The model whose kernels a GPU compiles for its sizes, as a training does."""
DROPOUT = 0.25
"""Probability with which outputs are dropped in a compared model."""


@dataclass(frozen=True, slots=True)
class ParityResult:
    """Result of comparing a tensor or property of a model with its reference."""

    check: str
    """A key of `CHECKS`."""
    item: str
    model: str
    scale_type: str
    backend: str
    shape: tuple[int, ...]
    gate: str
    reason: str
    """Reason for the gate."""
    max_error: float | None
    relative_error: float | None
    """Relative error of the norms; None if it is not finite, like the largest error."""
    cosine: float
    passed: bool


@dataclass(frozen=True, slots=True)
class Subject:
    """Subject of a comparison: a model on a device, of a type, with a batch."""

    name: str
    config: ModelConfig
    batch: int
    dtype: torch.dtype
    device: torch.device
    backend: str
    checks: tuple[str, ...] = ("blocks", "bits")
    """Kinds of checks: `blocks`, `whole` (gradient), `bits` (causality, determinism), `update`."""
    generally: bool = False
    """Whether to run the `general` kernels, see `arbcli.verify.variants`."""
    dropout: float = 0.0
    """Probability with which outputs of branches are dropped."""

    @property
    def title(self) -> str:
        """Name of the subject in progress lines."""
        return f"{self.name} {self.backend}"

    def build(self) -> LanguageModel:
        """Build the model, with random scales and filled memories.

        It is the same on all devices, as random numbers are drawn on the CPU.
        """
        generator = torch.Generator().manual_seed(1)
        with torch.device(self.device):
            model = build_model(self.config, self.dtype, seed=None)
        for tensor in model.packed_tensors().values():
            tensor.spread = 1.0  # of tables too: rows of zeros would hide a lot
            if isinstance(tensor, VectorWeight) and set(tensor.values) != {1.0}:
                # steps and decays of a size at which no gradient is what large sums differ by
                tensor.values = tuple(0.1 + 0.4 / (i + 1) for i in range(tensor.out_features))
        with use_backend("torch"):
            model.initialise(0)
        for tensor in model.packed_tensors().values():
            # scales of a vector differ, and say what its numbers are; frozen weights are ones
            if isinstance(tensor, VectorWeight) or tensor.frozen:
                continue
            for digits, spread in ((tensor.exponent, 2), (tensor.scales[1], 128)):
                if digits is not None:
                    drawn = torch.randint(
                        spread, digits.shape, generator=generator, dtype=torch.int8
                    )
                    digits += drawn.to(self.device)
                    digits.clamp_(max=127)
            if tensor.scales[1] is not None:
                tensor.fraction.bitwise_and_(127)
        memories: Any = self.config.main.memories
        book = memories and memories.codebook
        fill_memories(model, book.rows if book else 1)
        return model

    @property
    def masks(self) -> Masks | None:
        """Dropout of the branches of the model, with arbitrary keys; None without dropout."""
        branches = sum(len(block.parts) for _, _, block in named_blocks(self.config))
        keys = [(0x9E3779B9 * (7 + branch)) % 2**32 - 2**31 for branch in range(branches)]
        return Masks(keys, self.dropout) if self.dropout else None

    def bytes(self) -> tuple[Tensor, Tensor]:
        """Draw (B, T) inputs and targets."""
        generator = torch.Generator().manual_seed(2)
        shape = (self.batch, self.config.ctx + 1)
        ids = torch.randint(VOCABULARY, shape, generator=generator)
        ids = torch.where(ids < VOCABULARY // 3, ord(" "), ids)  # between words
        if self.config.is_masked:
            ids, targets = hide(
                ids[:, 1:], VOCABULARY, seed=2, step=0, numbers=range(self.batch), of=self.batch
            )
        elif self.config.fills:
            ids, targets = cut(ids, VOCABULARY, seed=2, step=1, numbers=range(self.batch))
        else:
            ids, targets = ids[:, :-1], ids[:, 1:]
        if self.config.composite:
            kinds = torch.randint(len(KINDS), targets.shape, generator=generator)
            targets = targets + VOCABULARY * kinds
        return ids.to(self.device), targets.to(self.device)

    def result(
        self, check: str, item: str, got: Tensor, expected: Tensor, gate: Gate
    ) -> ParityResult:
        """Compare a result with the expected one, of the same shape, by a gate."""
        largest, relative, cosine = errors(got, expected)
        close = relative is not None and relative <= gate.relative
        return ParityResult(
            check=check,
            item=item,
            model=f"{self.name} {'bf16' if self.dtype == torch.bfloat16 else 'fp32'}",
            scale_type=self.config.scale_type,
            backend=self.backend,
            shape=tuple(expected.shape),
            gate=gate.text,
            reason=gate.reason,
            max_error=largest,
            relative_error=relative,
            cosine=cosine,
            passed=torch.equal(got, expected) if gate.exact else close,
        )

    @property
    def gate(self) -> Gate:
        """Tolerance for a block."""
        if self.dtype == torch.bfloat16:
            return Gate(
                relative=0.03, reason="a dozen roundings to bf16, of 2**-9 each, in a layer"
            )
        relative = max(1e-5, self.config.ctx * 2.0**-24)
        reason = "float32 sums; float32 angles of late positions"
        if has_mamba(self.config):
            # 12 of them were seen in the gradient of four rates, on a GPU
            relative, reason = 20 * relative, f"{reason}; gradients of decays are what these leave"
        return Gate(relative=relative, reason=reason)

    @property
    def gate_of_depth(self) -> Gate:
        """Tolerance for a whole model."""
        reason = f"{self.gate.reason}, over the whole depth of the model"
        return replace(self.gate, relative=10 * self.gate.relative, reason=reason)


def fill_memories(part: nn.Module, codes: int) -> None:
    """Fill graph, expert balance and n-gram memory of a part with random integers."""
    generator = torch.Generator().manual_seed(1)
    for name, buffer in part.named_buffers():
        kind = name.rpartition(".")[2]
        low, high = {
            "source": (0, codes // len(buffer)), "target": (0, codes), "sign": (-127, 128),
            "score": (0, 128), "symbol": (-128, 128), "strength": (0, 128), "balance": (-3, 4),
            "codes": (-50, 51),
        }.get(kind, (0, 0))  # fmt: skip
        if high:
            drawn = torch.randint(low, high, buffer.shape, generator=generator)
            if kind == "source":  # a code of the bucket
                drawn = drawn * len(buffer) + torch.arange(len(buffer))[:, None]
            buffer.copy_(drawn)


def several_rules(digits: str) -> ModelConfig:
    """Return `RAGGED` with a rule for attention, one for MLPs, and one for all other weights."""
    return set_part_rules(replace(RAGGED, digits=digits), attention_rule="nibble", mlp_rule="carry")


def all_subjects(
    device: torch.device, backends: Iterable[str], scale_types: Iterable[str]
) -> Iterator[Subject]:
    """Yield the subjects on a device.

    Compiling and interpreting take long. So the interpreter compares `FEW_MODELS` from the bytes
    on. A GPU compiles all models but `TRAINED_MODEL` for any number, and small ones in float32,
    whose gates are the closer ones; torch, which a GPU uses on request, compares `FEW_MODELS`
    there.

    Args:
        device: the device; on a GPU the presets `LARGEST` are among the subjects.
        backends: backends of the kernels.
        scale_types: scale types of the small models: those of `ALWAYS`, or the first.
    """
    scale_types = list(scale_types)
    first, *others = [name for name in ALWAYS if name in scale_types] or scale_types[:1]
    for backend in backends:
        if backend == "triton":
            for name in LARGEST:
                config = shortened(FULL_SIZE[name])
                if fits(config, device):
                    # a codebook has experts after it, which let a rounding pass on
                    checks = ("blocks", "whole" if config.main.memories else "bits")
                    yield Subject(
                        name, config, 1, torch.bfloat16, device, backend, checks,
                        generally=name != TRAINED_MODEL,
                    )  # fmt: skip
        new = partial(
            Subject,
            dtype=torch.float32,
            device=device,
            backend=backend,
            generally=backend == "triton",
        )
        few = backend == "interpreter" or (backend == "torch" and device.type == "cuda")
        if few:
            whole_only = backend == "interpreter"
            for name in ("ragged", *FEW_MODELS):
                config = replace(MODELS.get(name, RAGGED), scale_type=first)
                yield new(
                    f"{name} {first}",
                    config,
                    2,
                    checks=("whole",) if whole_only else ("blocks", "whole"),
                )
        else:
            # native loops know groups by their size alone
            yield from _small_models(new, first, () if backend == "native" else others)
        yield from _updates(new, usual=few)


New = Callable[..., Subject]
"""(title, configuration, batch, ...) to a subject."""


def _small_models(new: New, first: str, others: Iterable[str]) -> Iterator[Subject]:
    dtypes = [torch.float32]
    if not new("", RAGGED, 1).generally:
        dtypes.append(torch.bfloat16)
    for scale_type in (first, *others):
        config = replace(RAGGED, scale_type=scale_type)
        checks: tuple[str, ...] = ("blocks", "bits") if scale_type == first else ("blocks",)
        for batch in (1, 12):  # few rows go through the fused products, many do not
            for dtype in dtypes:
                title = f"ragged {scale_type} batch {batch}"
                yield new(title, config, batch, dtype=dtype, checks=checks)
    full_digits = (replace(RAGGED, rule=name, digits="all") for name in WITH_DIGITS)
    for config in (*full_digits, several_rules("all")):
        config = replace(config, scale_type=first)
        yield new(f"all digits of {config.rule_text} {first}", config, 1, checks=("blocks",))
    for name, config in MODELS.items():
        config = replace(config, scale_type=first)
        yield new(f"{name} {first}", config, 2, checks=("blocks", "whole", "bits"))
        if len(dtypes) > 1 and not has_mamba(config):
            checks = ("blocks", "whole")
            yield new(f"{name} {first}", config, 2, dtype=torch.bfloat16, checks=checks)
    # stages with chunks, one stream and several, scaled contributions
    bounded, checks = replace(MODELS["bounded"], scale_type=first), ("blocks", "whole")
    yield new(f"bounded with dropout {first}", bounded, 2, checks=checks, dropout=DROPOUT)
    for scale_type in others:
        for name in ("graph", "compressed"):
            config = replace(MODELS[name], scale_type=scale_type)
            yield new(f"{name} {scale_type}", config, 2, checks=checks)


def _updates(new: New, *, usual: bool) -> Iterator[Subject]:
    """Yield the rules with every direction, or only with their usual ones and trits."""
    mixed = several_rules("trit")
    for name in RULES:
        every: Iterable[str | None] = DIRECTIONS if DIRECTION[name] else (None,)
        for direction in (DIRECTION[name],) if usual else every:
            if usual and name in mixed.rules and direction == mixed.direction:
                continue  # the model of several rules takes the same step of the same tensor
            config = replace(RAGGED, rule=name, direction=direction)
            title = f"{name} {direction}" if direction else name
            yield new(title, config, 1, checks=("update",))
        if name in WITH_DIGITS and not usual:
            direction = DIRECTION[name]
            config = replace(RAGGED, rule=name, digits="all", direction=direction)
            yield new(f"{name} {direction} all digits", config, 1, checks=("update",))
    for digits in ("trit",) if usual else ("trit", "all"):
        config = mixed if digits == "trit" else several_rules(digits)
        title = f"{config.rule_text} {config.direction}{' all digits' * (digits == 'all')}"
        yield new(title, config, 1, checks=("update",))
