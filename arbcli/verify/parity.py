"""Comparison of models with their references: blocks, gradients, updates, forbidden effects.

A block is compared on the very input and output gradient that the kernels gave it, so an error is
found where it is made, and a rounding in one block does not count in the next. A model is compared
from the bytes on besides, with the gradient of every weight. Where scores are close a rounding
chooses another code, expert, entry or chunk, and all else follows: the reference takes the choices
that were made, and judges them by its own scores.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager, nullcontext, suppress
from dataclasses import dataclass, field, fields, replace
from functools import cache, partial
from math import prod
from typing import Any

import torch
from torch import Tensor, nn

from arbcli.config.model import VOCABULARY, BlockConfig, ModelConfig, StageConfig
from arbcli.config.parts import (
    AttentionConfig,
    CompressedAttentionConfig,
    ExpertsConfig,
    LatentAttentionConfig,
    MambaConfig,
    MLPConfig,
)
from arbcli.config.parts.ahead import AheadConfig
from arbcli.config.parts.chunking import ChunkingConfig
from arbcli.config.parts.composite import KINDS, CompositeConfig
from arbcli.config.parts.rotary import RotaryConfig
from arbcli.config.presets import PRESETS, preset
from arbcli.config.short_forms import compressed, dense, graph, hnet
from arbcli.device import deterministic
from arbcli.directions import DIRECTIONS
from arbcli.filling import cut
from arbcli.inspect.trace import without_memory
from arbcli.kernels.attention.rotation import rotate
from arbcli.kernels.rows.weighted_rows import TouchedRows
from arbcli.kernels.runtime.backend import compile_for, use_backend
from arbcli.kernels.runtime.operation import EXACT, Gate
from arbcli.kernels.update.cast_votes import cast_scale_votes_reference, cast_trit_votes_reference
from arbcli.kernels.update.gradient_statistics import gradient_statistics_reference
from arbcli.masking import hide
from arbcli.model.build import build_model
from arbcli.model.language_model import LanguageModel
from arbcli.model.layers.expert_weight import ExpertWeight
from arbcli.model.layers.linear import LinearWeight
from arbcli.model.layers.rotary import rotary_table
from arbcli.model.layers.streamed import StreamedTensor
from arbcli.model.layers.vector import VectorWeight
from arbcli.model.packed import GradientSink, TernaryTensor
from arbcli.model.parts import (
    chunking,
    codebook,
    compressed_attention,
    experts,
    moe_graph,
    quantiser,
)
from arbcli.rules import DIRECTION, RULES, WITH_DIGITS, find_rule
from arbcli.train.updater import Updater
from arbcli.verify.compare import errors, poisoned
from arbcli.verify.memory import Memory, all_sources
from arbcli.verify.parts.base import Choices, rotary_angles
from arbcli.verify.reference import (
    Reference,
    masked_reference_loss,
    named_blocks,
    reference_loss,
)
from arbcli.verify.sample import ALWAYS, DEFAULT_SCALE_TYPE, IN_TRITON
from arbcli.verify.update_reference import (
    reference_direction,
    reference_slope,
    reference_step,
    reference_weight,
    state_values,
    unit_gradient,
)
from arbcli.verify.variants import compiled_share, general_launches
from arbcli.verify.workers import JobDone, Workers

CHECKS = {
    "output": "every block's output, on the input that the kernels gave it, against float64; that"
    " of the embedding and of the head likewise",
    "gradient": "gradients of every block's input and weights, for the same gradient of its"
    " output, against float64 autograd",
    "end to end": "logits and losses from the bytes on, and the scores of what was chosen, against"
    " float64",
    "whole gradient": "of all losses, added up, by every weight as its sink is handed it, against"
    " float64 autograd from the bytes on",
    "causality": "a byte is changed: no earlier logit may differ in a bit, and its own must; where"
    " positions share the products of an expert, earlier ones may by a rounding",
    "determinism": "a training step, twice from the same state, compared bit for bit",
    "rotary": "cos**2 + sin**2 = 1, turning back undoes turning, angles against float64",
    "update": "every stored number within one unit of the formula in float64, rounding unbiased",
}
"""Description of each check."""

RAGGED = dense(dim=36, layers=2, heads=2, ffn=50, ctx=6)
"""Sizes that fit neither 5 nor 32 nor 160, and small enough for the interpreter."""
GRAPH: dict[str, Any] = {
    "dim": 24, "layers": 2, "heads": 2, "ffn": 13, "ctx": 6, "latent": 10, "rotary": 4,
    "ngram_rows": 61, "ngram_dim": 11, "key_dim": 4, "codes": (5, 7), "code_dim": 17,
    "code_heads": 2, "knowledge": (6, 4), "knowledge_dim": 7, "knowledge_heads": 3, "top_k": 3,
    "experts": 3, "expert_dim": 7, "expert_ffn": 5, "gate_dim": 5, "adapter_rank": 3,
    "edges": (17, 2), "head_ffn": 11, "memory_rows": 59, "max_moe_iters": 2, "memgram": True,
}  # fmt: skip
"""All parts of an `arb` preset; a context has a 6-gram, which can be recalled."""
HNET: dict[str, Any] = {
    "dim": 24, "layers": 2, "heads": 2, "ffn": 13, "ctx": 17, "outer_dim": 20, "outer_layers": 1,
    "outer_heads": 2, "outer_ffn": 11, "chunk_length": 4, "window": 5,
}  # fmt: skip
TWO_STAGES = HNET | {
    "outer_dim": (20, 28), "outer_layers": (1, 1), "outer_heads": (2, 1), "outer_ffn": (11, 9),
    "chunk_length": (4, 2),
}  # fmt: skip
"""One text has too many chunks for its slots, one too few."""
COMPRESSED: dict[str, Any] = {
    "dim": 24, "layers": 3, "heads": 4, "ffn": 13, "ctx": 19, "head_width": 10, "kv_heads": 2,
    "rotary": 6, "window": 5, "ratios": (3, 7), "indexed_ratio": 3, "top_k": 2, "index_heads": 3,
    "index_width": 8,
}  # fmt: skip
"""Groups and windows are cut off, and not all entries are chosen."""


def mixed() -> ModelConfig:
    """Assemble blocks of several kinds, on several streams, around chunks and on them."""
    wide, mlp = AttentionConfig(heads=2), MLPConfig(width=13)
    near = CompressedAttentionConfig(heads=2, ratio=2, top_k=2, window=3, index_width=8)
    chosen = ExpertsConfig(experts=3, width=7, gate="softplus", shared=True, clamp=True)
    hashed = ExpertsConfig(experts=4, width=5, gate="hash")
    state_space = BlockConfig(mixer=MambaConfig(heads=2, states=7))
    outer = StageConfig(
        dim=20,
        streams=2,
        before=(state_space, BlockConfig(mixer=replace(wide, window=5), channel=hashed)),
        after=(BlockConfig(channel=mlp), state_space),
        chunking=ChunkingConfig(length=4),
    )
    inner = StageConfig(
        dim=24,
        streams=4,
        blocks=(
            BlockConfig(mixer=near, channel=chosen),
            BlockConfig(mixer=wide),
            BlockConfig(mixer=wide, channel=hashed),
        ),
    )
    return ModelConfig(ctx=17, stages=(outer, inner))


def bounded() -> ModelConfig:
    """Assemble blocks that add a share, to a stream that is bounded, and to several.

    Some positions are within the bound. Were all beyond it, lengths of streams would not matter,
    and gradients of what several are written by would be differences that bfloat16 rounds away.
    """
    block = BlockConfig(mixer=AttentionConfig(heads=2), channel=MLPConfig(width=13))
    outer = StageConfig(
        dim=20,
        bound=2.0,
        contribution=0.5,
        before=(block,),
        after=(block,),
        chunking=ChunkingConfig(length=3),
    )
    inner = StageConfig(dim=24, streams=2, contribution=0.75, bound=0.7, blocks=(block, block))
    return ModelConfig(ctx=11, stages=(outer, inner))


def grouped() -> ModelConfig:
    """Assemble blocks of attention with all that kernels have not."""
    longer = RotaryConfig(base=50.0, share=0.5, scaling="llama3", factor=8.0, original_ctx=40)
    attention = AttentionConfig(
        heads=4,
        kv_heads=2,
        head_width=12,
        rotary=longer,
        query_key_norm="gain",
        bias=True,
        output_bias=True,
        sink=True,
    )
    sharpened = replace(longer, share=1.0, scaling="yarn")
    near = AttentionConfig(heads=4, window=5, rotary=sharpened, query_key_norm="none")
    channel = MLPConfig(width=13)
    blocks = tuple(BlockConfig(mixer=mixer, channel=channel) for mixer in (attention, near))
    return ModelConfig(ctx=11, stages=(StageConfig(dim=24, blocks=blocks),), norm_gain=True)


def masked() -> ModelConfig:
    """Assemble attention to both sides: to all, in a window, with sinks, and latent."""
    wide, longer = AttentionConfig(heads=2), grouped().main.blocks[0].mixer
    latent = LatentAttentionConfig(heads=2, latent=10, rotary=4)
    assert isinstance(longer, AttentionConfig)
    mixers = wide, replace(wide, window=5), replace(longer, window=4), latent
    blocks = tuple(BlockConfig(mixer=mixer, channel=MLPConfig(width=13)) for mixer in mixers)
    return ModelConfig(ctx=11, stages=(StageConfig(dim=24, blocks=blocks),), objective="masked")


MODELS = {
    "graph": graph(**GRAPH),
    "graph softplus": graph(**GRAPH, moe_gate="softplus", shared_expert=True, moe_clamp=True),
    "graph hash": graph(**GRAPH, moe_gate="hash"),
    "graph nearest": graph(**GRAPH, code_search="nearest"),
    "hnet": hnet(**TWO_STAGES),
    "hnet words": hnet(**HNET | {"chunk_length": 8}, boundaries="space"),
    "hnet every": hnet(**TWO_STAGES, boundaries="every"),
    "hnet mamba": hnet(**HNET | {"chunk_length": 5}, outer_blocks="mamba", states=7),
    "compressed": compressed(**COMPRESSED),
    "compressed of all": compressed(**COMPRESSED | {"top_k": 99}),
    "4 streams": dense(dim=36, layers=2, heads=2, ffn=50, ctx=6, streams=4),
    "2 streams": dense(dim=36, layers=2, heads=2, ffn=50, ctx=6, streams=2, digits="all"),
    "mixed": mixed(),
    "bounded": bounded(),
    "grouped": grouped(),
    "masked": masked(),
    "fill": replace(dense(dim=36, layers=1, heads=2, ffn=50, ctx=11), objective="fill"),
    "composite": replace(
        dense(dim=36, layers=1, heads=2, ffn=50, ctx=11), composite=CompositeConfig()
    ),
    "ahead": replace(
        dense(dim=36, layers=1, heads=2, ffn=50, ctx=11), ahead=AheadConfig(positions=4, width=13)
    ),
}
"""Small models that have all parts between them, compared from the bytes on."""
INTERPRETED = ("graph", "hnet", "compressed")
"""Those of `FEW_MODELS` that take 10 s each in the interpreter."""
FEW_MODELS = ("ragged", *INTERPRETED)
"""Models that run in torch on a GPU by default."""
FULL_SIZE = {name: preset(name) for name in PRESETS} | {
    "arb-tiny with all parts": preset("arb-tiny", moe=True, graph=True, memgram=True)
}
"""Models that are compared on a GPU besides, at the widths that it has."""
LARGEST = ("1b", "arb-deep", "arb-tiny with all parts", "hnet-two-stage")
"""One model of each family, compared on a GPU by default, with contexts up to `SAMPLED_CTX`."""
SAMPLED_CTX = 512
"""Maximum context of these, as the time of a reference grows with its positions."""
OF_MANY_KERNELS = ("arb-deep", "mixed", "graph", "hnet-two-stage", "arb-tiny with all parts", "1b")
"""Models for which several processes compile before any is compared, the longest first."""
SHARES = 4
"""Number of processes that share this compilation."""
AHEAD, LAST = 1, 3
"""The turns of what is compiled for models, and of models, after those of kernels."""
BYTES_OF_REFERENCE = 48
"""Memory per weight: weight and gradient in float64, the kernels' gradient, and temporaries."""
LAYERS = 2
"""Blocks of a list that are compared at full size, and later ones that are unlike all of these."""
LONGEST, SHORTEST = 2048, 8
"""Contexts at full size; the shorter one where all rows of a codebook are scored."""
LARGE = 2**14
MULTIPLIED = ("blocks.", "byte_mlp.", "head.")
"""Minimum size and parts of the matrices whose shapes kernels are checked with."""
FEW = 32
"""Maximum number of positions of which each is changed to test causality; of more, two are."""
LR = 2.0
"""Learning rate of compared updates, large enough to change trits, scales and clips."""


@dataclass(frozen=True, slots=True)
class ParityResult:
    """How one thing in the model compares with its reference."""

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
    remembered: bool = False
    """Whether this was found before, by the same code on the same machine."""


@dataclass(frozen=True, slots=True)
class Subject:
    """Subject of a comparison: a model on a device, of a type, with a batch."""

    name: str
    config: ModelConfig
    batch: int
    dtype: torch.dtype
    device: torch.device
    backend: str
    parts: tuple[str, ...] = ("blocks", "bits")
    """Part of it: `blocks`, the `whole` gradient, `bits` of causality and determinism, `update`."""
    generally: bool = False
    """Whether kernels are compiled for any number, and not anew for 1 and for multiples of 16."""

    def build(self) -> LanguageModel:
        """Make the model, with scales that differ from group to group, and memories that hold some.

        It is the same on every device: all is drawn on the CPU.
        """
        generator = torch.Generator().manual_seed(1)
        with torch.device(self.device):
            model = build_model(self.config, self.dtype)
        for tensor in model.packed_tensors().values():
            tensor.spread = 1.0  # of tables too: rows of zeros would hide a lot
            if isinstance(tensor, VectorWeight) and set(tensor.values) != {1.0}:
                # steps and decays of a size at which no gradient is what large sums differ by
                tensor.values = tuple(0.1 + 0.4 / (i + 1) for i in range(tensor.out_features))
        with use_backend("torch"):
            model.initialise(0)
        for tensor in model.packed_tensors().values():
            if isinstance(tensor, VectorWeight):  # its scales differ, and say what its numbers are
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
        book = self.config.main.memories and self.config.main.memories.codebook
        fill_memories(model, book.rows if book else 1)
        return model

    def bytes(self) -> tuple[Tensor, Tensor]:
        """Draw (B, T) inputs and targets."""
        generator = torch.Generator().manual_seed(2)
        shape = (self.batch, self.config.ctx + 1)
        ids = torch.randint(VOCABULARY, shape, generator=generator)
        ids = torch.where(ids < VOCABULARY // 3, ord(" "), ids)  # between words
        if self.config.is_masked:
            numbers = range(self.batch)
            ids, targets = hide(
                ids[:, 1:], VOCABULARY, seed=2, step=0, numbers=numbers, of=self.batch
            )
            return ids.to(self.device), targets.to(self.device)
        if self.config.fills:
            ids, targets = cut(ids, VOCABULARY, seed=2, step=1, numbers=range(self.batch))
            return ids.to(self.device), targets.to(self.device)
        ids = ids.to(self.device)
        targets = ids[:, 1:]
        if self.config.composite:
            kinds = torch.randint(len(KINDS), targets.shape, generator=generator)
            targets = targets + VOCABULARY * kinds.to(self.device)
        return ids[:, :-1], targets

    def result(
        self, check: str, item: str, got: Tensor, wanted: Tensor, gate: Gate
    ) -> ParityResult:
        """Compare two tensors by a gate."""
        largest, relative, cosine = errors(got, wanted)
        close = relative is not None and relative <= gate.relative
        return ParityResult(
            check=check,
            item=item,
            model=f"{self.name} {'bf16' if self.dtype == torch.bfloat16 else 'fp32'}",
            scale_type=self.config.scale_type,
            backend=self.backend,
            shape=tuple(wanted.shape),
            gate=gate.text,
            reason=gate.reason,
            max_error=largest,
            relative_error=relative,
            cosine=cosine,
            passed=torch.equal(got, wanted) if gate.exact else close,
        )

    @property
    def gate(self) -> Gate:
        """How closely a block must agree."""
        if self.dtype == torch.bfloat16:
            return Gate(
                relative=0.03,
                reason="a dozen roundings to bf16, of 2**-9 each, in a layer",
            )
        relative = max(1e-5, self.config.ctx * 2.0**-24)
        reason = "float32 sums; float32 angles of late positions"
        if has_mamba(self.config):
            # 12 of them were seen in the gradient of four rates, on a GPU
            relative, reason = 20 * relative, f"{reason}; gradients of decays are what these leave"
        return Gate(relative=relative, reason=reason)

    @property
    def gate_of_depth(self) -> Gate:
        """How closely a whole model must agree."""
        reason = f"{self.gate.reason}, over the whole depth of the model"
        return replace(self.gate, relative=10 * self.gate.relative, reason=reason)


def check_parity(*args: Any, **kwargs: Any) -> tuple[ParityResult, ...]:
    """Compare the model with its reference, and wait for what is found; see `begin_parity`."""
    return begin_parity(*args, **kwargs)()


def begin_parity(
    device: torch.device,
    backends: Iterable[str],
    group_sizes: Mapping[str, int],
    workers: Workers | None = None,
    progress: Callable[[JobDone], None] = lambda _: None,
    memory: Memory | None = None,
    *,
    sampled: bool = False,
) -> Callable[[], tuple[ParityResult, ...]]:
    """Begin to compare the model with its reference, in poisoned memory.

    Args:
        device: where to run. On a GPU the presets are compared too, in bf16 and in float32.
        backends: of the kernel path.
        group_sizes: scale types of the ragged model; presets have their own. Causality and
            determinism are checked with the default one, if it is among them, or the first.
        workers: processes that share the work; None is this one.
        progress: is told each part that is done, and what it found.
        memory: of what passed before; None remembers nothing.
        sampled: whether there is a sample: on a GPU the presets `LARGEST` in bf16, and small models
            in float32 and the scale types `ALWAYS`, of which torch runs `FEW_MODELS` in one; on a
            CPU the scale types `ALWAYS`; in the interpreter one scale type, in which models are
            compared from the bytes on alone, and the updates of each rule in one direction.

    Returns:
        Waits, and returns what was found.
    """
    scale_types = sorted(group_sizes, key=lambda name: name != DEFAULT_SCALE_TYPE)
    subjects = _subjects(device, tuple(backends), scale_types)
    if sampled:
        subjects = _sample(subjects, scale_types)
    jobs = [(s.name, s.backend, s) for s in subjects]
    memory, workers = memory or Memory(), workers or Workers()
    finish = memory.begin(
        workers, _check, jobs, progress, kind=ParityResult, sources=lambda _: all_sources(),
        turn=lambda _: LAST, ahead=_ahead, turn_ahead=AHEAD,
    )  # fmt: skip
    return lambda: (*_rotary(device), *(result for results in finish() for result in results))


def _sample(subjects: Iterable[Subject], scale_types: list[str]) -> Iterator[Subject]:
    """Choose what is compared: of torch and C on a CPU all models, in the types `ALWAYS`."""
    always = [name for name in ALWAYS if name in scale_types] or scale_types[:1]
    for subject in subjects:
        config = subject.config
        if subject.device.type == "cpu" and subject.backend not in IN_TRITON:
            if config.scale_type in always or subject.parts == ("update",):
                yield subject
        elif subject.name in FULL_SIZE:  # as it is trained
            if subject.name in LARGEST and subject.dtype == torch.bfloat16:
                yield replace(subject, config=replace(config, ctx=min(config.ctx, SAMPLED_CTX)))
        elif subject.parts == ("update",):
            usual = config.digits != "all" and config.direction == DIRECTION[config.rule]
            if subject.backend != "interpreter" or usual:
                yield replace(subject, generally=subject.backend == "triton")
        elif subject.backend == "torch":
            few = subject.name.startswith(tuple(f"{name} {always[0]}" for name in FEW_MODELS))
            if few and subject.dtype == torch.float32:
                yield subject
        elif subject.backend != "interpreter" and config.scale_type in always:
            if subject.dtype == torch.float32:  # whose gates are the closer ones
                yield replace(subject, generally=True)
        elif config.scale_type == always[0] and subject.backend == "interpreter":
            yield replace(subject, parts=("whole",))


def _ahead(job: tuple) -> Iterator[tuple]:
    """Share out what is compiled for a model of many kernels."""
    _, backend, subject = job
    if backend == "triton" and subject.name.split(" T")[0] in OF_MANY_KERNELS:
        for index in range(SHARES):
            yield _compile_share, subject.name, index, subject


def _compile_share(_name: str, index: int, subject: Subject) -> None:
    """Compile a share of what a model needs, by a step on tensors without memory."""
    device, about = subject.device, torch.cuda.get_device_properties(subject.device)
    with ExitStack() as stack:
        stack.enter_context(suppress(Exception))  # checks will tell what is wrong
        stack.enter_context(compile_for((about.major, about.minor), about.multi_processor_count))
        stack.enter_context(without_memory(device))
        stack.enter_context(compiled_share(index, SHARES, generally=subject.generally))
        stack.enter_context(use_backend(subject.backend))
        with torch.device(device):
            model = build_model(subject.config, subject.dtype)
        updater = Updater(model.packed_tensors().values(), 3, subject.dtype)
        # those that are compared make no step
        _hand_gradients(updater.tensors, updater if "bits" in subject.parts else _ignore)
        updater.begin(0, LR)
        ids = torch.zeros((subject.batch, subject.config.ctx), dtype=torch.int64, device=device)
        _total(model.losses(ids, ids)).backward()


def _hand_gradients(tensors: Iterable[TernaryTensor], sink: GradientSink) -> None:
    """Pass the gradients of packed tensors to a sink."""
    for tensor in tensors:
        if isinstance(tensor, StreamedTensor):
            tensor.sink = sink


def _ignore(*_: object) -> None: ...


def _check(_name: str, _backend: str, subject: Subject) -> list[ParityResult]:
    """Make all checks of one subject."""
    launches = general_launches() if subject.generally else nullcontext()
    with deterministic(), poisoned(warn_only=False), launches:
        if "update" in subject.parts:
            return list(_votes(subject) if subject.config.rule == "votes" else _update(subject))
        results = list(_compare(subject))
        if "bits" in subject.parts:
            if not subject.config.is_masked:
                results += _causality(subject)
            results += _determinism(subject)
        return results


@cache
def matrix_shapes() -> tuple[tuple[int, int], ...]:
    """List the (N, K) of larger matrices of presets: of innermost blocks, of experts, of heads."""
    shapes: dict[tuple[int, int], None] = {}
    for config in FULL_SIZE.values():
        with torch.device("meta"):
            weights = build_model(config).packed_tensors()
        for name, weight in weights.items():
            shape = weight.out_features // weight.matrices, weight.in_features
            linear = isinstance(weight, LinearWeight) and name.startswith(MULTIPLIED)
            if prod(shape) >= LARGE and (linear or isinstance(weight, ExpertWeight)):
                shapes[shape] = None
    return tuple(shapes)


def has_mamba(config: ModelConfig) -> bool:
    """Return whether a model has Mamba blocks.

    In bf16 they are not compared: their gated outputs are normalised, and where one is nearly 0,
    what was rounded before is most of it.
    """
    return any(part.kind == "mamba" for _, part in config.sited_parts())


def shortened(config: ModelConfig) -> ModelConfig:
    """Make a model as short as its reference is slow, with blocks of all kinds that it has."""
    stages = []
    for stage in config.stages:
        kept = {
            name: [
                index
                for index, block in enumerate(blocks)
                if index < LAYERS or block not in blocks[:index]
            ]
            for name in ("blocks", "before", "after")
            for blocks in (getattr(stage, name),)
        }
        memories = stage.memories
        if memories:
            place = sum(index < memories.place for index in kept["blocks"])
            memories = replace(memories, place=place)
        lists: dict[str, Any] = {
            name: tuple(getattr(stage, name)[i] for i in kept[name]) for name in kept
        }
        stages.append(replace(stage, memories=memories, **lists))
    longest = SHORTEST if config.main.memories else LONGEST
    return replace(config, ctx=min(config.ctx, longest), stages=tuple(stages))


def fitting_dtypes(config: ModelConfig, device: torch.device) -> tuple[torch.dtype, ...]:
    """List in which dtypes a GPU has memory for the reference of a model.

    Other processes share it: where it is not small, it is compared once, as it is trained.
    """
    with torch.device("meta"):
        model = build_model(config)
    needed = BYTES_OF_REFERENCE * sum(
        tensor.num_weights for tensor in model.packed_tensors().values()
    )
    memory = torch.cuda.get_device_properties(device).total_memory
    if 10 * needed < memory:
        return torch.float32, torch.bfloat16
    return (torch.bfloat16,) if 2 * needed < memory else ()


def _subjects(
    device: torch.device, backends: tuple[str, ...], scale_types: Iterable[str]
) -> Iterator[Subject]:
    for backend in backends:
        interpreted = backend == "interpreter"
        # the interpreter computes wrongly in bf16
        half = () if interpreted else (torch.bfloat16,)
        first, *others = scale_types
        if backend == "native":  # its loops know groups by their size alone
            others = []
        for dtype in (torch.float32, *half):
            place = (dtype, device, backend)
            if backend == "triton":
                for name, config in FULL_SIZE.items():
                    config = shortened(config)
                    if dtype in fitting_dtypes(config, device):
                        # a codebook has experts after it, which let a rounding pass on
                        parts = ("blocks", "whole" if config.main.memories else "bits")
                        yield Subject(name, config, 1, *place, parts)
            # few rows go through the fused products, many do not
            for batch in (1,) if interpreted else (1, 12):
                for scale_type in (first, *others):
                    config = replace(RAGGED, scale_type=scale_type)
                    bits = ("bits",) if scale_type == first else ()
                    title = f"ragged {scale_type} batch {batch}"
                    yield Subject(title, config, batch, *place, ("blocks", *bits))
        place = (torch.float32, device, backend)
        for name in () if interpreted else WITH_DIGITS:  # its kernels run above
            config = replace(RAGGED, rule=name, digits="all", scale_type=first)
            yield Subject(f"all digits of {name} {first}", config, 1, *place, ("blocks",))
        for name, config in MODELS.items():
            if interpreted and name not in INTERPRETED:
                continue
            config = replace(config, scale_type=first)
            bits = () if interpreted else ("bits",)
            yield Subject(f"{name} {first}", config, 2, *place, ("blocks", "whole", *bits))
            if half and not has_mamba(config):
                subject = Subject(f"{name} {first}", config, 2, *half, device, backend)
                yield replace(subject, parts=("blocks", "whole"))
        for scale_type in others[:1] if interpreted else others:
            for name in ("graph",) if interpreted else ("graph", "compressed"):
                config = replace(MODELS[name], scale_type=scale_type)
                yield Subject(f"{name} {scale_type}", config, 2, *place, ("blocks", "whole"))
        for name in RULES:
            directions: Iterable[str | None] = DIRECTIONS if DIRECTION[name] else (None,)
            for direction in directions:
                config = replace(RAGGED, rule=name, direction=direction)
                title = f"{name} {direction}" if direction else name
                yield Subject(title, config, 1, *place, ("update",))
            if name in WITH_DIGITS:
                direction = DIRECTION[name]
                config = replace(RAGGED, rule=name, digits="all", direction=direction)
                yield Subject(f"{name} {direction} all digits", config, 1, *place, ("update",))


def _total(losses: Mapping[str, Tensor]) -> Tensor:
    """Add up the losses of a model."""
    first, *others = losses.values()
    return sum(others, first)


def _gradient(tensor: Tensor) -> Tensor:
    """Return the gradient of a watched tensor after the backward."""
    assert tensor.grad is not None
    return tensor.grad


def fill_memories(part: nn.Module, codes: int) -> None:
    """Fill a graph of so many codes, the balance of experts and n-grams with random integers."""
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


def dense_gradient(
    tensor: TernaryTensor, grad: Tensor, where: range | TouchedRows | None = None
) -> Tensor:
    """Expand a gradient that a sink received to (N, K), with zeros elsewhere."""
    if where is None:
        return grad
    dense = grad.new_zeros(tensor.out_features, tensor.in_features)
    if isinstance(where, TouchedRows):
        count = int(where.count)
        dense[where.rows[:count]] = grad[:count]
    else:
        dense.view(tensor.matrices, -1, tensor.in_features)[where.start : where.stop] = grad
    return dense


@dataclass(slots=True)
class Trace:
    """A forward of the real model, and a backward from the sum of its losses."""

    inputs: dict[str, Tensor] = field(default_factory=dict)
    """Streams as blocks were given them, by name; `grad` is by the block alone."""
    outputs: dict[str, Tensor] = field(default_factory=dict)
    """Outputs of `embedding`, of blocks by name, and of `head`, with gradients in `grad`."""
    gradients: dict[str, Tensor] = field(default_factory=dict)
    """Gradients of weights by name, as passed to their sinks."""
    losses: dict[str, Tensor] = field(default_factory=dict)
    choices: Choices = field(default_factory=Choices)

    def moved(self, device: torch.device) -> "Trace":
        """Copy all of it to a device, gradients too."""

        def move(tensor: Tensor) -> Tensor:
            copy = tensor.detach().to(device)
            copy.grad = None if tensor.grad is None else tensor.grad.to(device)
            return copy

        parts = {f.name: getattr(self, f.name) for f in fields(self) if f.name != "choices"}
        every = {name: {key: move(x) for key, x in part.items()} for name, part in parts.items()}
        made = {name: [x.to(device) for x in xs] for name, xs in self.choices.made.items()}
        return Trace(**every, choices=Choices(made))


def trace(subject: Subject, model: LanguageModel, *, watched: bool = False) -> Trace:
    """Run the real model forward and backward, and note what passes through it.

    Args:
        subject: says on what.
        model: of the subject.
        watched: whether inputs and outputs of blocks are noted; a block whose output is watched
            leaves nothing to be added by the next one.
    """
    found, handles = Trace(), []

    def enter(name: str, _module: nn.Module, given: tuple) -> tuple:
        found.inputs[name] = given[0].view_as(given[0])
        found.inputs[name].retain_grad()
        return found.inputs[name], *given[1:]

    def leave(
        name: str, _module: nn.Module, _given: tuple, output: Tensor | tuple[Tensor, ...]
    ) -> None:
        found.outputs[name] = output if isinstance(output, Tensor) else output[0]
        found.outputs[name].retain_grad()

    def add(tensor: TernaryTensor, *handed: Any) -> None:
        name, dense = names[id(tensor)], dense_gradient(tensor, *handed)
        found.gradients[name] = found.gradients.get(name, 0) + dense

    weights = model.packed_tensors()
    names = {id(tensor): name for name, tensor in weights.items()}
    _hand_gradients(weights.values(), add)
    parts = dict(model.named_modules())
    blocks = [name for name, *_ in named_blocks(subject.config)] if watched else []
    for name in blocks:
        handles.append(parts[name].register_forward_pre_hook(partial(enter, name)))
    for name in ("embedding", *blocks, "head"):
        handles.append(parts[name].register_forward_hook(partial(leave, name)))
    with use_backend(subject.backend), _noted(model, subject.batch) as found.choices:
        losses = model.losses(*subject.bytes())
        _total(losses).backward()
    for handle in handles:
        handle.remove()
    found.losses = {name: loss.detach() for name, loss in losses.items()}
    return found


@contextmanager
def _noted(model: LanguageModel, batch: int) -> Iterator[Choices]:
    """Note what the parts of a model choose in a forward of so many texts."""
    found, handles, indexers = Choices(), [], []

    def note(name: str, choose: Callable[..., Tensor], *given: Any) -> None:
        chosen = choose(*given)
        found.made.setdefault(name, []).append(chosen.view(batch, -1, *chosen.shape[1:]))

    def note_rows(name: str, heads: int, _table: nn.Module, given: tuple) -> None:
        if name not in found.made:  # a graph reads rows, too, after its codebook
            note(name, lambda: given[0].view(-1, heads, given[0].shape[1]))

    def note_entries(
        name: str, choose: Callable[..., Tensor], *given: Any, **options: Any
    ) -> Tensor:
        q, _, keys = (part.double() for part in given[:3])
        entries = choose(*given, **options)
        found.made[name] = [entries, torch.einsum("bnhd,bjd->bnhj", q, keys) > 0]
        return entries

    of_outputs = {
        experts.Gate: lambda _gate, _given, output: output[0],
        quantiser.Quantiser: lambda _part, _given, output: output.codes.flatten(),
        moe_graph.MoEGraph: lambda _part, _given, output: (output.shares > 0).sum(dim=0) - 1,
        chunking.BoundaryRouter: lambda _router, _given, output: output.begins.flatten(),
    }
    for name, part in model.named_modules():
        if choose := of_outputs.get(type(part)):
            handles.append(part.register_forward_hook(partial(note, name, choose)))
        elif type(part) is codebook.Codebook:
            own = partial(note_rows, name, part.heads)
            handles.append(part.table.register_forward_pre_hook(own))
        elif type(part) is compressed_attention.Indexer:
            part.choose = partial(  # type: ignore[method-assign]
                note_entries, name, part.choose
            )
            indexers.append(part)
    try:
        yield found
    finally:
        for handle in handles:
            handle.remove()
        for part in indexers:
            del part.choose


def _compare(subject: Subject) -> Iterator[ParityResult]:
    """Compare a model from the bytes on, and block by block, as far as that is asked for.

    The reference of a small model runs on the host: processes that share a GPU wait for one another
    at each of its many small operations.
    """
    model = subject.build()
    tensors = model.packed_tensors()
    home = subject.device if subject.name in FULL_SIZE else torch.device("cpu")
    weights = {name: reference_weight(tensor).to(home) for name, tensor in tensors.items()}
    leaves = {name: w.requires_grad_() for name, w in weights.items() if not tensors[name].frozen}
    memories = {name: buffer.to(home) for name, buffer in model.named_buffers()}
    reference = Reference(weights, subject.config, memories=memories)
    at_home, in_blocks = replace(subject, device=home), "blocks" in subject.parts
    if "whole" in subject.parts or (in_blocks and subject.dtype == torch.float32):
        yield from _end_to_end(at_home, trace(subject, model).moved(home), reference, leaves)
    if in_blocks:
        found = trace(subject, model, watched=True).moved(home)
        yield from _blocks(at_home, found, reference, leaves)


def _end_to_end(
    subject: Subject, found: Trace, reference: Reference, leaves: dict[str, Tensor]
) -> Iterator[ParityResult]:
    """Compare logits, losses, choices, and the gradients of the weights that are trained.

    Args:
        subject: what is compared.
        found: what passed through the real model.
        reference: of the model.
        leaves: its weights that are trained, by name.
    """
    whole, gate = "whole" in subject.parts, subject.gate_of_depth
    ids, targets = subject.bytes()
    reference.choices = choices = found.choices
    with torch.set_grad_enabled(whole):
        logits, losses = reference(ids)
        of_text = masked_reference_loss if subject.config.is_masked else reference_loss
        losses = losses | reference.kind_losses(targets)
        bytes_alone = targets % VOCABULARY if subject.config.composite else targets
        losses = {"text": of_text(logits, bytes_alone)} | losses
    of_losses = replace(gate, relative=0.05) if subject.dtype == torch.bfloat16 else gate
    pairs = {
        "scores of choices": choices.scores,
        "products above 0": choices.products,
        "logits": [(found.outputs["head"], logits)],
    } | {f"{name} loss": [(found.losses[name], losses[name])] for name in losses | found.losses}
    for name, every in pairs.items():
        if every:
            got, wanted = (torch.cat([x.flatten() for x in xs]) for xs in zip(*every, strict=True))
            yield subject.result("end to end", name, got, wanted, of_losses)
    if whole:
        grads = torch.autograd.grad(_total(losses), [*leaves.values()])
        for name, grad in zip(leaves, grads, strict=True):
            yield subject.result("whole gradient", name, found.gradients[name], grad, gate)


def _blocks(
    subject: Subject, found: Trace, reference: Reference, leaves: dict[str, Tensor]
) -> Iterator[ParityResult]:
    """Compare embedding, blocks and head, each on what the kernels gave it.

    Args:
        subject: what is compared.
        found: what passed through the real model, watched.
        reference: of the model.
        leaves: its weights that are trained, by name.
    """
    config, rows = subject.config, range(subject.batch)
    reference.choices = found.choices
    with torch.no_grad():  # where chunks begin, and how many parts have a loss
        reference(subject.bytes()[0])

    def compare(
        name: str, got: Tensor, grad: Tensor, wanted: Tensor, own: dict, besides: Tensor | float = 0
    ) -> Iterator[ParityResult]:
        """Compare an output; and for its gradient, those of leaves with their references."""
        yield subject.result("output", name, got, wanted, subject.gate)
        objective = (wanted * grad.double()).sum() + besides
        grads = torch.autograd.grad(objective, [leaf for leaf, _ in own.values()])
        for (key, (_, of_kernels)), exact in zip(own.items(), grads, strict=True):
            yield subject.result("gradient", key, of_kernels, exact, subject.gate)

    def within(*prefixes: str) -> dict[str, tuple[Tensor, Tensor]]:
        chosen = (name for name in leaves if name.startswith(prefixes))
        return {name: (leaves[name], found.gradients[name]) for name in chosen}

    got = found.outputs["embedding"]
    wanted = leaves["embedding.weight"][subject.bytes()[0]]
    yield from compare("embedding", got, _gradient(got), wanted, within("embedding."))
    terms, last = reference.terms, None
    for name, stage, block in named_blocks(config):
        counts = [len(reference.places[stage, row]) for row in rows]
        x, y = found.inputs[name], found.outputs[name]
        # slots without a chunk are left out
        source, of_x, got, grad = (
            torch.cat([part[row, :count] for row, count in enumerate(counts)])
            for part in (x, _gradient(x), y, _gradient(y))
        )
        source, reference.terms = source.detach().double().requires_grad_(), {}
        texts = zip(rows, source.split(counts), strict=True)
        wanted = torch.cat([reference.block(name, stage, block, part, row) for row, part in texts])
        besides = sum(loss / len(terms[key]) for key, loss in reference.losses().items())
        own = within(f"{name}.") | {f"input of {name}": (source, of_x)}
        yield from compare(name, got, grad, wanted, own, besides)
        last = (y, stage)
    memories = config.main.memories
    after_blocks = config.main.router or (memories and memories.place == config.layers)
    if last and last[1] == 0 and not after_blocks:  # what the head reads is the last block's
        y, got = last[0], found.outputs["head"]
        source = y.detach().double().requires_grad_()
        x = source.mean(dim=2) if source.dim() == 4 else source
        wanted = torch.stack([reference.head(x[row], row) for row in rows])
        reference.terms = {}
        for row in rows:
            reference.ahead(x[row], row)
        of_kinds = reference.kind_losses(subject.bytes()[1])
        besides = sum([*reference.losses().values(), *of_kinds.values()])
        own = within("byte_mlp.", "head.", "ahead.") | {"input of head": (source, _gradient(y))}
        yield from compare("head", got, _gradient(got), wanted, own, besides)


@torch.no_grad()
def _causality(subject: Subject) -> Iterator[ParityResult]:
    model, (ids, _) = subject.build(), subject.bytes()
    kinds = {part.kind for _, part in subject.config.sited_parts()}
    gate = subject.gate if kinds & {"experts", "memories"} else EXACT
    length = ids.shape[1]
    # what begins a chunk, or completes an entry, may see too much, and elsewhere nothing shows it
    positions = range(1, length) if length <= FEW else (length // 2, length - 1)
    with use_backend(subject.backend):
        logits = model(ids)
        for position in positions:
            other = ids.clone()
            other[:, position] = (other[:, position] + 100) % VOCABULARY
            changed = model(other)
            same = changed[:, :position], logits[:, :position]
            yield subject.result("causality", f"before byte {position}", *same, gate)
            moved = (changed != logits)[:, position].any(dim=-1)
            wanted = torch.ones_like(moved)
            yield subject.result("causality", f"at byte {position}", moved, wanted, EXACT)


def _determinism(subject: Subject) -> Iterator[ParityResult]:
    runs = []
    for _ in range(2):
        model = subject.build()
        updater = Updater(model.packed_tensors().values(), 3, subject.dtype)
        _hand_gradients(updater.tensors, updater)
        updater.begin(0, LR)
        with use_backend(subject.backend):
            losses = model.losses(*subject.bytes())
            _total(losses).backward()
            model.after_step()
        found = [loss.detach() for loss in losses.values()]
        runs.append([*found, *model.state_dict().values()])
    differing = torch.stack([(a != b).sum() for a, b in zip(*runs, strict=True)])
    zeros = torch.zeros_like(differing)
    yield subject.result("determinism", "loss and state", differing, zeros, EXACT)


def _rotary(device: torch.device) -> Iterator[ParityResult]:
    generator = torch.Generator(device).manual_seed(5)
    bits = Gate(relative=1e-6, reason="float32; in bf16 it would be off by 0.4 %")
    for name, config in {"ragged": RAGGED, **FULL_SIZE}.items():
        sites = [(site.ctx, site.dim, part) for site, part in config.sited_parts()]
        widths = {(ctx, dim // part.heads) for ctx, dim, part in sites if hasattr(part, "heads")}
        for length, width in sorted(widths):
            subject = Subject(name, config, 1, torch.float32, device, "torch")
            cos, sin = rotary_table(length, width, device)
            square = cos.double() ** 2 + sin.double() ** 2
            ones = torch.ones_like(square)
            item = f"of {length} positions and {width} numbers"
            one = subject.result("rotary", f"cos**2 + sin**2 {item}", square, ones, bits)
            yield replace(one, gate="each within 1e-06", passed=(one.max_error or 0.0) <= 1e-6)
            x = torch.randn(length, width, generator=generator, device=device)
            back = rotate(rotate(x, cos, sin), cos, -sin)
            yield subject.result("rotary", f"inverse {item}", back, x, bits)
            angle = rotary_angles(torch.arange(length, device=device), width)
            reason = "the angle of the last position, rounded to float32"
            gate = Gate(relative=length * 2.0**-23, reason=reason)
            table, wanted = torch.cat([cos, sin]), torch.cat([angle.cos(), angle.sin()])
            yield subject.result("rotary", f"angles {item}", table, wanted, gate)


def _tensor(subject: Subject) -> tuple[TernaryTensor, list[Tensor]]:
    """Make a packed tensor, and two gradients of long tails, whose rows and columns differ."""
    generator = torch.Generator(subject.device).manual_seed(4)

    def normal(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator, device=subject.device)

    with torch.device(subject.device), use_backend("torch"):
        tensor = TernaryTensor(37, 165, subject.config.site(), area="mlp", std=0.1)
        tensor.initialise(0, 0)
    return tensor, [
        normal(37, 165) ** 3 * normal(37, 1).exp() * normal(165).exp() for _ in range(2)
    ]


def _update(subject: Subject) -> Iterator[ParityResult]:
    """Compare one step with the formulas, of one micro-batch and of two, and a refused one."""
    config, unit = subject.config, {"z": 1.0, "v": 1.0}
    assert config.direction is not None
    rule = find_rule(config.rule, config.digits)
    if rule.moment_range:
        alone = "moment" in rule.buffers(1, 1, 1)  # else it has four bits of a byte
        unit["m"] = rule.moment_range / (127 if alone else 7)
    for micros in (1, 2):
        tensor, grads = _tensor(subject)
        updater = Updater([tensor], 3, torch.float32)
        for micro, grad in enumerate(grads[:micros]):
            before = state_values(tensor)
            slope = reference_slope(grad, reference_weight(tensor), tensor.group_size)
            with use_backend(subject.backend):
                updater.begin(0, LR, micro, micros)
                updater(tensor, grad)
            after = state_values(tensor)
            direction, of_moment = reference_direction(grad, config.direction, before), None
            if tensor.averages_gradients:
                of_moment = reference_direction(after["m"], config.direction, before)
                direction = unit_gradient(grad)
            wanted = reference_step(
                tensor, before, after["m"], direction, slope, LR, micro, micros, of_moment
            )
            for name, size in unit.items():
                got = (after[name] / size, wanted[name] / size)
                # of statistics that are stored to 0.54 % a moment is as far off, of 127 units
                within = 1.7 if name == "m" and config.direction == "factored" else 1.1
                item = f"{name} of micro-batch {micro + 1}/{micros}"
                yield _rounded(subject, item, *got, within)
    before = {name: buffer.clone() for name, buffer in tensor.named_buffers()}
    grad[3, 5] = torch.nan
    with use_backend(subject.backend):
        updater(tensor, grad)
    for name, buffer in tensor.named_buffers():
        yield subject.result("update", f"{name} given NaN", buffer, before[name], EXACT)


def _rounded(
    subject: Subject, item: str, got: Tensor, wanted: Tensor, within: float
) -> ParityResult:
    """Compare numbers that were rounded stochastically to integers, first each, then the mean."""
    error, bias = got - wanted, 5 * 0.5 / got.numel() ** 0.5
    gate = Gate(reason="rounding moves by less than 1; statistics are stored to 0.5 %")
    result = subject.result("update", item, got, wanted, gate)
    passed = bool((error.abs() <= within).all()) and abs(float(error.mean())) <= bias
    return replace(result, gate=f"each within {within}, mean within {bias:.2f}", passed=passed)


def _votes(subject: Subject) -> Iterator[ParityResult]:
    tensor, (grad, _) = _tensor(subject)
    buffers = dict(tensor.named_buffers())
    ok, threshold = torch.tensor(1, dtype=torch.int32), torch.tensor(3, dtype=torch.int32)
    slope, *_ = gradient_statistics_reference(grad, tensor.packed, factored=False, signs=True)
    wanted = (
        *cast_trit_votes_reference(tensor.trits, buffers["votes"], grad, ok, threshold)[1:],
        *cast_scale_votes_reference(tensor.exponent, buffers["scale_votes"], slope, ok),
    )
    updater = Updater([tensor], 3, torch.float32)
    with use_backend(subject.backend):
        updater.begin(0, LR)
        updater(tensor, grad)
    for name, expected in zip(("trits", "votes", "exponent", "scale_votes"), wanted, strict=True):
        yield subject.result("update", name, getattr(tensor, name), expected, EXACT)
