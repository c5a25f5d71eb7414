"""Configuration of a language model: stages of blocks, heads, and storage of weights.

A stage is a list of blocks on a stream of one width. An outer stage splits its positions into
chunks, which are the positions of the next stage; its blocks are `before`, which encode positions,
and `after`, which decode them. The last stage is the innermost, and has `blocks`.
"""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Annotated, Any

from arbcli.base.environment import BASELINES
from arbcli.base.errors import ArbError, setting_error
from arbcli.base.lazy import imported
from arbcli.config import settings
from arbcli.config.kinds import SLOTS
from arbcli.config.layer_spec import NORM_EPS, SCALE_TYPES, VOCABULARY, LayerSpec
from arbcli.config.parts.base import BetweenConfig, PartConfig, SplitConfig, every_part
from arbcli.config.parts.mlp import MLPConfig
from arbcli.families import CHECKS_OF_OBJECTIVES
from arbcli.model.optimizers import DIRECTIONS
from arbcli.model.rules import DIGITS, DIRECTION, FADED, FADING, RULES, VOTES_FIXES, WITH_DIGITS

WEIGHTS = ("ternary", *BASELINES)
OBJECTIVES = ("next", "masked", "fill")
FILL_SYMBOLS = 3
"""Number of marks in windows with a hole, for `objective=fill`: see
`arbcli.families.masked.filling`."""
STREAMS = (1, 2, 4, 8)
LISTS = ("blocks", "before", "after")
"""Fields of a stage that are lists of blocks."""
MAX_BLOCKS = 1024
"""Maximum length of a list of blocks."""
MAX_OUTER_STAGES = 8
MAX_SIZE = 2**20
"""Maximum width, context and vocabulary."""
OF_LAYERS = (
    "scale_type", "rule", "digits", "votes_fixes", "direction", "weights", "norm_gain", "norm_eps",
)  # fmt: skip
"""Fields of a model that each `LayerSpec` has."""
CACHE_DTYPES = ("bf16", "fp8", "int8", "fp8-mixed", "int8-mixed", "fp8-queries", "int8-queries")
"""Choices of `--kv`."""
MAX_EPS = 0.01
"""Maximum of `norm_eps`."""
EPS_KINDS = ("attention", "mlp")
"""Kinds of parts whose norms support any `norm_eps`."""
Context = Annotated[
    int,
    settings.Setting(
        "Context length in bytes or tokens.",
        minimum=1,
        maximum=MAX_SIZE,
        default=settings.PRESETS_OWN,
        common=True,
    ),
]


def _check_fields(config: Any) -> None:
    """Check all fields, and that their parts are of the kinds of their slots."""
    settings.check_fields(config)
    for name, known in SLOTS.items():
        value = getattr(config, name, None)
        for part in value if isinstance(value, tuple) else (value,):
            if part is not None:
                settings.check_choice(name, part.kind, known)


@dataclass(frozen=True, slots=True, kw_only=True)
class BlockConfig:
    """A token mixer, then a channel mixer, each after a norm and added to the stream.

    One of them may be None.
    """

    mixer: PartConfig | None = None
    """Token mixer, one of `arbcli.config.kinds.MIXERS`."""
    channel: PartConfig | None = None
    """Channel mixer, one of `arbcli.config.kinds.CHANNELS`."""

    def __post_init__(self) -> None:
        """Check that the block has a part.

        Raises:
            ArbError: it has none, or one of the wrong kind.
        """
        _check_fields(self)
        if not self.parts:
            raise ArbError("a block has neither mixer nor channel mixer", "leave the block out")

    @property
    def parts(self) -> tuple[PartConfig, ...]:
        """The block's parts in their order."""
        return tuple(part for part in (self.mixer, self.channel) if part)


Blocks = tuple[BlockConfig, ...]


def gates_to_pack(blocks: Blocks) -> dict[int, MLPConfig]:
    """Return the MLPs whose gates `pack` packs, by the index of their block in a list.

    The last block is left out: its backward is first and takes its gates' memory for gradients.
    """
    parts = {index: block.channel for index, block in enumerate(blocks[:-1])}
    return {
        index: part
        for index, part in parts.items()
        if isinstance(part, MLPConfig) and not part.bitnet
    }


@dataclass(frozen=True, slots=True, kw_only=True)
class StageConfig:
    """Blocks on a stream of one width."""

    dim: int
    """Width of the stream."""
    streams: int = 1
    """Residual streams, one of `STREAMS`; several are mixed by hyper-connections."""
    contribution: float = 1.0
    """Factor of each part's output before it is added to the stream, in (0, 1]."""
    bound: float | None = None
    """Maximum root-mean-square of the stream after a block, which is scaled down to it; None for
    no limit."""
    blocks: Blocks = ()
    """Blocks of the innermost stage."""
    before: Blocks = ()
    """Encoder blocks of an outer stage."""
    after: Blocks = ()
    """Decoder blocks of an outer stage."""
    chunking: SplitConfig | None = None
    """Chunking of an outer stage."""
    memories: BetweenConfig | None = None
    """Memories of the innermost stage, between two of its blocks."""
    router: bool = False
    """Whether the output is mixed with the stage's input and each codebook's output."""

    def __post_init__(self) -> None:
        """Check sizes, and that the fields match the kind of stage, outer or innermost.

        Raises:
            ArbError: a value is invalid.
        """
        _check_fields(self)
        settings.check_choice("streams", self.streams, STREAMS)
        if not 0 < self.contribution <= 1:
            raise setting_error(
                f"`contribution` is {self.contribution}", "use a number above 0 and at most 1"
            )
        if self.bound is not None and not self.bound > 0:
            raise setting_error(f"`bound` is {self.bound}", "use a number above 0")
        for name in LISTS:
            settings.check_bounds("layers", len(getattr(self, name)), 0, MAX_BLOCKS)
        if self.chunking and (self.blocks or self.memories or self.router):
            raise ArbError(
                "a stage with chunking has `blocks`, `memories` or a `router`",
                "move them to the innermost stage; this one has `before` and `after`",
            )
        if not self.chunking and (self.before or self.after):
            raise ArbError(
                "a stage without chunking has blocks `before` or `after`",
                "add `chunking`, or name the blocks `blocks`",
            )
        if self.streams > 1 and (self.memories or self.router):
            raise ArbError(
                "codebooks, iterated experts and the router read one residual stream",
                "use `streams = 1` in their stage",
                fields=("streams",),
            )
        if self.memories and self.memories.place > len(self.blocks):
            raise setting_error(
                f"`place` of the memories is {self.memories.place}, of {len(self.blocks)} blocks",
                "use at most the number of blocks",
            )

    @property
    def adds_plainly(self) -> bool:
        """Whether the outputs of parts are added without a factor and a bound."""
        return self.contribution == 1 and self.bound is None

    @property
    def lists(self) -> tuple[Blocks, ...]:
        """The stage's lists of blocks."""
        return (self.before, self.after) if self.chunking else (self.blocks,)


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelConfig:
    """Configuration of a language model over bytes or tokens, and of its weights' storage."""

    ctx: Context
    """Context length in symbols, which are bytes or tokens."""
    stages: tuple[StageConfig, ...]
    """Stages, the outermost first; all but the last have `chunking`."""
    beside: tuple[PartConfig, ...] = ()
    """Parts whose outputs are added to the embedding, of `arbcli.config.kinds.BESIDE`."""
    head: MLPConfig | None = None
    """Gated MLP before the linear head; None for no MLP."""
    ahead: PartConfig | None = None
    """Second head, which predicts bytes after the next one; None for no such head."""
    composite: PartConfig | None = None
    """Heads for text, sounds and pictures that replace the linear head; None keeps it."""
    scale_type: str = settings.setting(
        "T32",
        "Number of weights that share a scale.",
        choices=tuple(SCALE_TYPES),
        default=settings.PRESETS_OWN,
        option="tscale-type",
    )
    rule: str = settings.setting(
        "moment",
        "Update rule: moment for the lowest loss, nibble for 56 % of its state; its loss is 2 %"
        " higher. carry and votes are worse.",
        choices=RULES,
        default=settings.PRESETS_OWN,
        common=True,
    )
    digits: str = settings.setting(
        "trit",
        "Weights to multiply by: int8 for the lowest loss, anneal for a model that ends"
        " ternary. ternary is -1, 0 and 1; int8 is all digits that the rule stores, in the same"
        " memory; anneal is int8 first and ternary at the end.",
        choices=DIGITS,
        also=FADED,
        option="weights",
        words={
            "ternary": {"weights": "ternary", "digits": "trit"},
            "int8": {"weights": "ternary", "digits": "all"},
            "anneal": {"weights": "ternary", "digits": "fade"},
        },
        default="ternary",
        common=True,
    )
    """Digits of the weights; a checkpoint from the middle of a run with `fade` has one of
    `FADED`."""
    votes_fixes: tuple[str, ...] = settings.setting(
        (),
        f"Only with `rule=votes`: its changes, separated by commas: {', '.join(VOTES_FIXES)}.",
        choices=VOTES_FIXES,
        default="none",
        metavar="FIXES",
    )
    direction: str | None = settings.setting(
        "orthogonal",
        "Direction of a step: muon for the lowest loss, adafactor for the fastest step. muon"
        " orthogonalises the gradient, adafactor scales it by factored second moments, sign"
        " takes its sign.",
        choices=DIRECTIONS,
        option="optimizer",
        words={
            "muon": {"direction": "orthogonal"},
            "adafactor": {"direction": "factored"},
            "sign": {"direction": "sign"},
        },
        default="depends on preset and rule, mostly muon",
        common=True,
    )
    weights: str = settings.setting(
        "ternary",
        "Baselines to compare with: float, or ste (float weights that are rounded to ternary in"
        " the forward pass).",
        choices=WEIGHTS,
        words={
            "float": {"weights": "float", "digits": "trit"},
            "ste": {"weights": "ste", "digits": "trit"},
        },
    )
    objective: str = settings.setting(
        "next",
        "Training objective: next predicts the next byte, masked predicts masked bytes from"
        " both sides, and fill predicts the next byte of a text, or of a hole that comes after"
        " both of its sides.",
        choices=OBJECTIVES,
    )
    norm_gain: bool = False
    """Whether the norms before parts and before the head have trained gains."""
    vocabulary: int = settings.setting(VOCABULARY, minimum=2)
    """Vocabulary size: 256 for bytes, else the number of tokens of a tokenizer."""
    norm_eps: float = NORM_EPS
    """Epsilon of all norms; values other than 1e-6 need gains in all norms."""
    tied: bool = False
    """Whether the head shares the weight of the embedding."""
    embedding_direction: str | None = settings.setting(None, choices=DIRECTIONS)
    """Direction of the embedding; None is `direction`."""
    head_direction: str | None = settings.setting(None, choices=DIRECTIONS)
    """Direction of the linear head; None is `direction`."""
    symbol_digits: str | None = settings.setting(None, choices=("all",))
    """`all` to multiply by all digits of the embedding and the head, when other weights are
    ternary; None is `digits`."""

    def __post_init__(self) -> None:
        """Check types, sizes and names, and that each part is valid for its spec.

        Raises:
            ArbError: a value is invalid.
        """
        _check_fields(self)
        self._check_storage()
        for part in self.beside:
            if sum(other.kind == part.kind for other in self.beside) > 1:
                raise ArbError(
                    f"`beside` has several parts of the kind `{part.kind}`",
                    "leave all but one of them out",
                    fields=("beside",),
                )
        if not 1 <= len(self.stages) <= MAX_OUTER_STAGES + 1:
            raise ArbError(
                f"a model has {len(self.stages)} stages",
                f"use 1 to {MAX_OUTER_STAGES + 1} of them",
                fields=("outer_dim",),
            )
        for index, stage in enumerate(self.stages):
            inner = index + 1 == len(self.stages)
            if inner == bool(stage.chunking):
                raise ArbError(
                    f"stage {index + 1} of {len(self.stages)} has"
                    f" {'chunking and nothing inside' if inner else 'no chunking'}",
                    "give `chunking` to all stages but the last",
                )
        if self.outer and (self.main.memories or self.main.router):
            raise ArbError(
                "codebooks, iterated experts and the router read bytes, and not chunks of them",
                "leave them out, or use a single stage",
                fields=("boundaries",),
            )
        for spec, part in self.specs_and_parts():
            part.check_at(spec)
        if self.norm_eps != NORM_EPS:
            self._check_norm_eps()
        if self.vocabulary != VOCABULARY:
            self._check_tokens()
        if self.objective in CHECKS_OF_OBJECTIVES:
            imported(CHECKS_OF_OBJECTIVES[self.objective])(self)
        for part in self.chunkings:
            part.check_model(self)
        for _, part in self.specs_and_parts():
            part.check_model(self)

    def check_documents(self) -> None:
        """Check that the model can process packed documents independently.

        Raises:
            ArbError: a part carries state from one document to the next.
        """
        reasons = {
            f"`{part.kind}`": part.across for _, part in self.specs_and_parts() if part.across
        }
        main = self.main
        for name, present in (
            ("chunks", bool(self.outer)), ("memories", main.memories is not None),
            ("the head of later bytes", self.ahead is not None),
            (f"`objective={self.objective}`", self.fills),
        ):  # fmt: skip
            if present:
                reasons[name] = "documents begin anywhere in what it reads"
        if reasons:
            name, why = next(iter(reasons.items()))
            raise ArbError(
                f"the model cannot keep the documents of a window apart: {name}, {why}",
                "train on plain text, or use blocks of `attention`",
            )

    def _check_storage(self) -> None:
        able = WITH_DIGITS if self.digits in ("all", "trit") else FADING
        rules = self.rules if self.weights == "ternary" else ()
        unable = next((rule for rule in rules if rule not in able), None)
        if self.digits != "trit" and (unable or not rules):
            storage = f"the rule `{unable}`" if unable else "a float baseline"
            reason = "does not fade to" if unable in WITH_DIGITS else "stores no digits below"
            raise ArbError(
                f"{storage} {reason} the trit",
                f"leave `digits={self.digits}` out, or use one of: {', '.join(able)}",
                fields=("digits",),
            )
        if self.direction is None and DIRECTION[self.rule] and self.weights == "ternary":
            raise ArbError(
                f"the rule `{self.rule}` has no `direction`",
                f"choose one of: {', '.join(DIRECTIONS)}",
                fields=("direction",),
            )
        for field in ("embedding_direction", "head_direction"):
            unused = self.weights != "ternary" or DIRECTION[self.rule] is None
            if unused and getattr(self, field) is not None:
                storage = "a float baseline" if self.weights != "ternary" else "the rule `votes`"
                raise ArbError(f"{storage} takes no direction", f"leave `{field}` out")
        if self.head_direction and (self.tied or self.composite):
            raise ArbError("the model has no linear head", "leave `head_direction` out")
        if len(rules) > 1 and "votes" in rules:
            raise ArbError(
                "the rule `votes` has no learning rate, and cannot be combined with another rule",
                f"use it for the whole model, or choose among: {', '.join(WITH_DIGITS)}",
            )
        stores_none = self.rule not in WITH_DIGITS or not rules or self.composite
        if self.symbol_digits is not None and stores_none:
            raise setting_error(
                "`symbol_digits` needs an embedding and a linear head that store digits below"
                " the trit",
                f"leave it out, or use a rule of: {', '.join(WITH_DIGITS)}",
            )
        if len({*self.votes_fixes}) < len(self.votes_fixes):
            raise setting_error("`votes_fixes` names a fix twice", "name it once")
        if self.votes_fixes and (self.rule != "votes" or self.weights != "ternary"):
            raise ArbError(
                "`votes_fixes` only applies to the rule `votes`",
                "leave it out, or use `rule=votes`",
                fields=("votes_fixes", "rule"),
            )

    def _check_norm_eps(self) -> None:
        """Check `norm_eps`, and that no norm's kernel is limited to `NORM_EPS`."""
        if not 0 < self.norm_eps <= MAX_EPS:
            raise setting_error(
                f"`norm_eps` is {self.norm_eps}", f"use more than 0, and at most {MAX_EPS}"
            )
        parts = [part for _, part in self.specs_and_parts()]
        main = self.main
        plain = main.streams == 1 and main.adds_plainly and not main.router
        plain = plain and not (self.outer or self.head or self.ahead)
        gained = self.norm_gain and plain and all(part.kind in EPS_KINDS for part in parts)
        unit = any(getattr(part, "query_key_norm", None) == "unit" for part in parts)
        subs = (getattr(part, "sub_norm", False) and not part.is_bitnet for part in parts)
        if not gained or unit or any(subs):
            raise ArbError(
                f"`norm_eps` is {self.norm_eps}, and a norm without gains has {NORM_EPS}",
                "use `norm_gain`, attention and MLPs without `sub_norm`, and `query_key_norm`"
                " of `gain` or `none`",
                fields=("norm_eps",),
            )

    @property
    def byte_readers(self) -> list[str]:
        """Kinds of the parts that read bytes and no other symbols, in back quotes."""
        parts = [part for _, part in self.specs_and_parts() if part.reads_text]
        return [f"`{part.kind}`" for part in (*parts, *self.beside, self.ahead) if part]

    def _check_tokens(self) -> None:
        if readers := self.byte_readers:
            raise ArbError(
                f"{readers[0]} reads bytes, and the model has {self.vocabulary:,} symbols",
                f"leave it out, or the tokenizer: bytes are {VOCABULARY} symbols",
                fields=("vocabulary",),
            )

    @property
    def is_masked(self) -> bool:
        """Whether the model predicts hidden symbols from both sides."""
        return self.objective == "masked"

    @property
    def fills(self) -> bool:
        """Whether the model fills holes, by either objective."""
        return self.objective != "next"

    @property
    def symbols(self) -> int:
        """Number of input symbols: the vocabulary, then masks or marks."""
        return self.vocabulary + {"next": 0, "masked": 1, "fill": FILL_SYMBOLS}[self.objective]

    @property
    def main(self) -> StageConfig:
        """The innermost stage."""
        return self.stages[-1]

    @property
    def outer(self) -> tuple[StageConfig, ...]:
        """All stages but the innermost."""
        return self.stages[:-1]

    @property
    def dim(self) -> int:
        """Width of the innermost stage's stream."""
        return self.main.dim

    @property
    def layers(self) -> int:
        """Number of blocks of the innermost stage."""
        return len(self.main.blocks)

    @property
    def rules(self) -> tuple[str, ...]:
        """The rules of all weights, each once, beginning with the model's."""
        part_rules = (part.rule for part in every_part(self))
        return (*dict.fromkeys((self.rule, *filter(None, part_rules))),)

    @property
    def loss_weights(self) -> dict[str, float]:
        """Weights of the auxiliary losses of all parts in the training loss, by name."""
        parts = every_part(self)
        return {name: weight for part in parts for name, weight in part.loss_weights.items()}

    @property
    def rule_text(self) -> str:
        """The rules as text, such as `moment+nibble`."""
        return "+".join(self.rules)

    @property
    def head_parts(self) -> tuple[PartConfig, ...]:
        """The parts around or instead of the linear head."""
        return tuple(part for part in (self.head, self.ahead, self.composite) if part)

    @property
    def group_size(self) -> int:
        """Number of weights that share a scale."""
        return SCALE_TYPES[self.scale_type]

    @property
    def chunkings(self) -> tuple[SplitConfig, ...]:
        """The chunking of each outer stage."""
        return tuple(stage.chunking for stage in self.outer if stage.chunking)

    @property
    def slots(self) -> tuple[int, ...]:
        """Maximum number of positions of each stage in a window of `ctx` symbols."""
        slots = [self.ctx]
        for chunking in self.chunkings:
            slots.append(chunking.slots(slots[-1]))
        return tuple(slots)

    @property
    def lengths(self) -> tuple[float, ...]:
        """Number of positions of each stage at the target length of chunks."""
        lengths: list[float] = [self.ctx]
        for chunking in self.chunkings:
            lengths.append(lengths[-1] / chunking.length)
        return tuple(lengths)

    def capacity(self, stage: int, length: int) -> int:
        """Return the maximum number of chunks of a stage for a window of `length` positions."""
        return min(length, self.slots[stage + 1])

    @property
    def reach(self) -> int | None:
        """Number of earlier positions that the output at a position depends on; None: unlimited."""
        main = self.main
        if self.outer or self.beside or self.reads_text or main.memories or main.router:
            return None
        total, spec = 0, self.layer_spec()
        for part in (part for block in main.blocks for part in block.parts):
            reach = part.reach(spec)
            if reach is None:
                return None
            total += reach
        return total

    def layer_spec(self, stage: int = 0, depth: int | None = None) -> LayerSpec:
        """Return the spec of parts of a stage.

        Args:
            stage: index of the stage.
            depth: length of the list of blocks; None for the stage's first list.
        """
        stage_config = self.stages[stage]
        return LayerSpec(
            dim=stage_config.dim,
            depth=len(stage_config.lists[0]) if depth is None else depth,
            ctx=self.slots[stage],
            causal=not self.is_masked,
            **{name: getattr(self, name) for name in OF_LAYERS},
        )

    def symbol_spec(self, direction: str | None) -> LayerSpec:
        """Return the spec of the embedding or the head.

        Args:
            direction: direction of its steps; None is that of the model.
        """
        spec = self.layer_spec()
        digits = self.symbol_digits or spec.digits
        return replace(spec, direction=direction or spec.direction, digits=digits)

    def blocks(self) -> Iterator[tuple[LayerSpec, BlockConfig]]:
        """Yield the blocks of all stages with their specs."""
        for index, stage in enumerate(self.stages):
            for blocks in stage.lists:
                spec = self.layer_spec(index, len(blocks))
                yield from ((spec, block) for block in blocks)

    def gates_to_pack(self) -> Iterator[MLPConfig]:
        """Yield the MLPs whose gates `pack` packs."""
        for stage in self.stages:
            for blocks in stage.lists:
                yield from gates_to_pack(blocks).values()

    def specs_and_parts(self) -> Iterator[tuple[LayerSpec, PartConfig]]:
        """Yield all parts with their specs."""
        yield from ((self.layer_spec(), part) for part in self.beside)
        for spec, block in self.blocks():
            yield from ((spec, part) for part in block.parts)
        if self.main.memories:
            yield self.layer_spec(-1), self.main.memories
        yield from ((self.layer_spec(), part) for part in self.head_parts)

    @property
    def reads_text(self) -> bool:
        """Whether a part also reads the bytes of the text."""
        return any(part.reads_text for _, part in self.specs_and_parts())
