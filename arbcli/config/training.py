"""Configuration of training runs."""

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any

from arbcli.base.environment import BACKENDS
from arbcli.base.errors import ArbError, quoted, setting_error
from arbcli.base.lazy import ExtendedMapping
from arbcli.config.model import ModelConfig
from arbcli.config.presets import assembled, config_from_dict, reset_symbol_directions
from arbcli.config.settings import (
    OPTIMISATION,
    RUN,
    TEXT,
    Declared,
    check_choice,
    check_fields,
    decisive,
    setting,
    settings_of,
)
from arbcli.config.short_forms import ARGUMENTS, MODEL_SETTINGS, PART_RULES
from arbcli.data.text import TOKEN_BYTES
from arbcli.families import FAMILIES, SOUND_FORMS
from arbcli.model.rules import FADED, LR, LR_OF_DIGITS, LR_OF_FADING

if TYPE_CHECKING:
    from arbcli.data.files import Conversion


EVAL_EVERY = (50, 500)
"""Minimum and maximum of the default number of steps between evaluations."""
MAX_LOG_EVERY = 1000
"""Maximum number of steps between records; a checkpoint has the loss of each of them."""
MAX_COUNT = 2**31 - 1
"""Maximum of counts."""
LOSSES = ("text", *(loss for family in FAMILIES.values() for loss in family.losses))
"""Parts of a loss: see `LanguageModel.losses`."""
SCHEDULES = ("cosine", "linear", "wsd", "constant")
"""Choices of `schedule`."""
FADE_FROM = 0.4
"""Default share of a run's steps after which weights begin to fade from all digits to trits."""
FADING_SHARE = 0.5
"""Default share of a run's steps during which weights fade."""
FADE_LEARNT_TO = 0.1
"""Default share of the steps after which weights are trits, in a run that starts from weights of
all digits."""
COMPUTES = ("bf16", "fp8", "fp8-backward", "nvfp4", "fp32")
"""Choices of `compute`."""
REDUCE_DTYPES = ("int12", "int8", "int16")
"""Choices of `reduce_dtype`: integers to which gradients of matrices are rounded."""
MAX_UNSUMMED = 4
"""Default maximum number of micro-batches per step whose gradients are not summed, but each rounded
into the moment. The loss of precision grows with their number: see docs/rules.md."""
MAX_INT16_SUMMED = 16
"""Maximum number of micro-batches that `int16` sums in 16 bits; `int12` sums 64."""
MAX_ACCUM = {"int8": 2**20, "int12": 2**16, "int16": 2**12}
"""Maximum number of micro-batches per step whose sum cannot overflow, by `reduce_dtype`."""
CHANGEABLE = (
    "steps", "save_every", "eval_every", "log_every", "sample_every", "keep", "keep_best",
    "patience", "recompute",
)  # fmt: skip
"""Settings that a resume may change; only `steps` affects the weights, of later steps."""
OPTIMIZERS = {"ternary": ("rule",), "float": ("adamw", "muon"), "ste": ("adamw", "muon")}
"""Choices of `optimizer` by the kind of weights."""
FLOAT_WEIGHT_DECAY = 0.1
"""Default `weight_decay` of float baselines."""
TERNARY_ONLY = {
    "scale_losses": "scales", "teacher": "teacher", "reduce_dtype": "rounded gradients",
    "compute=fp8": "products in eight bits", "compute=fp8-backward": "products in eight bits",
    "compute=nvfp4": "products in four bits", "pack": "packed gates",
}  # fmt: skip
"""Settings that float baselines refuse, with the property that they lack."""
REMAINDER_ONLY = {"weight_average": "average", "weight_decay": "remainder that could decay"}
"""Settings that weights without remainders refuse, with the property that they lack."""
DROPOUTS = ("dropout", "attention_dropout", "embedding_dropout")
"""Settings that are dropout probabilities."""
MAX_DECAY = 8
"""Maximum product of `weight_decay` and `lr`; `fade` doubles the rate of digits."""
FLOAT_LR = {
    ("float", "adamw"): 1e-3,
    ("float", "muon"): 3e-3,
    ("ste", "adamw"): 3e-3,
    ("ste", "muon"): 3e-3,
}
"""Default `lr` of float baselines, by weights and optimizer."""
text_field, train_field, run_field = (partial(setting, group=g) for g in (TEXT, OPTIMISATION, RUN))
"""Declare a field in one of the groups of options."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainConfig:
    """Complete configuration of a run, as saved in `config.json`."""

    model: ModelConfig
    data: tuple[str, ...] = text_field(
        (),
        "Training text: a file, folder or glob, - for stdin, or hf:NAME:SPLIT for a dataset of"
        " the hub. Repeat it for several, all with weights as in a.txt:0.7 or none. Compressed,"
        " Parquet, Arrow and tar files are unpacked.",
        default="Python's standard library",
        metavar="PATH",
        common=True,
    )
    val: tuple[str, ...] = text_field(
        (),
        "Held-out text.",
        default="the last tenth of one file, or a tenth of the files",
        metavar="PATH",
        common=True,
    )
    field: str | None = text_field(
        None,
        "Field of records, such as .jsonl or .parquet files, that holds the text; for chats"
        " messages, or the names of two fields as QUESTION+ANSWER.",
        metavar="FIELD",
        common=True,
    )
    data_format: str | None = text_field(
        None,
        "Format of .bin files: text as bytes, or tokens of the tokenizer as integers of 16 or"
        " 32 bits.",
        choices=tuple(TOKEN_BYTES),
        default="that of llm.c's header",
    )
    sound: str | None = text_field(
        None,
        "Format of sounds: mulaw, one byte per sample, or pcm16, two.",
        choices=SOUND_FORMS,
        default="mulaw, and sounds in folders are left out",
    )
    picture: str | None = text_field(
        None,
        "Format of pictures: rgb or grey, optionally with a size, as in rgb:64x48.",
        metavar="FORM",
        default="rgb, and pictures in folders are left out",
    )
    tokenizer: str | None = text_field(
        None,
        "A tokenizer.json. The model then reads its tokens instead of bytes.",
        metavar="FILE",
        common=True,
    )
    steps: int = train_field(400, "Training steps.", minimum=1, common=True)
    batch: int = train_field(16, "Windows in a batch.", minimum=1, common=True)
    accum: int = train_field(
        1, "Gradient accumulation: micro-batches of a step.", minimum=1, common=True
    )
    lr: float = train_field(1.0, "Learning rate.", default="that of the rule", common=True)
    warmup: int = train_field(
        100, "Steps of linear warm-up, at most half of the run.", minimum=0, common=True
    )
    schedule: str = train_field(
        "cosine",
        "Learning rate after the warm-up: cosine, linear or constant, or wsd, which is"
        " constant and falls in the last fifth.",
        choices=SCHEDULES,
        common=True,
    )
    final_lr: float | None = train_field(
        None, "Learning rate at the end.", minimum=0, default="lr / 20"
    )
    fade_from: float | None = train_field(
        None,
        "Share of the steps after which weights begin to anneal.",
        minimum=0,
        default="half of the steps before the end of the fade, so 0.4; 0 for a run that starts"
        " from weights of all digits",
    )
    fade_to: float | None = train_field(
        None,
        "Share of the steps after which annealed weights are ternary.",
        minimum=0,
        default="half of the steps after the beginning of the fade, so 0.9; 0.1 for a run that"
        " starts from weights of all digits",
    )
    dropout: float = train_field(
        0.0,
        "Probability with which each output of a mixer or an MLP is dropped in training, for"
        " texts that are read several times.",
        minimum=0,
        metavar="P",
    )
    attention_dropout: float = train_field(
        0.0,
        "Probability with which each attention weight is dropped in training.",
        minimum=0,
        metavar="P",
    )
    embedding_dropout: float = train_field(
        0.0,
        "Probability with which each number of the embedding's output is dropped in training.",
        minimum=0,
        metavar="P",
    )
    weight_decay: float | None = train_field(
        None,
        "Share by which weights shrink in a step, relative to the learning rate: as AdamW's.",
        minimum=0,
        default="0; 0.1 for the baselines float and ste",
    )
    weight_average: int = train_field(
        0,
        "Evaluate, sample and export an average of the weights over about so many steps, in"
        " int8, or float32 for baselines; 0 averages nothing.",
        minimum=0,
        decisive=False,
    )
    seed: int = run_field(
        0, "Random seed.", minimum=0, maximum=MAX_COUNT, metavar="N", common=True, decisive=True
    )
    save_every: int = run_field(
        500,
        "Steps between checkpoints. One is also saved at the start and every 5 minutes.",
        minimum=1,
        common=True,
    )
    eval_every: int | None = run_field(
        None,
        "Steps between evaluations; 0 is never.",
        minimum=0,
        default=f"a quarter of the run, {EVAL_EVERY[0]} to {EVAL_EVERY[1]}",
        common=True,
    )
    log_every: int | None = run_field(
        None, "Steps between records.", minimum=1, maximum=MAX_LOG_EVERY, default="10"
    )
    """Steps between records; None is `arbcli.training.schedule.LOG_EVERY`."""
    sample_every: int | None = run_field(
        None, "Steps between samples of text.", minimum=1, default="only at the end"
    )
    keep: int = run_field(2, "Newest checkpoints to keep.", minimum=1)
    keep_best: bool = run_field(
        False, "Also keep the checkpoint of the lowest held-out loss.", negatable=False
    )
    patience: int | None = run_field(
        None,
        "Stop after so many evaluations without a lower held-out loss, and keep the checkpoint"
        " of the lowest.",
        minimum=1,
        default="all steps are done",
    )
    optimizer: str = train_field(
        "rule",
        "For the baselines float and ste: adamw, their default, or muon.",
        choices=OPTIMIZERS["float"],
        also=OPTIMIZERS["ternary"],
        words={"adamw": {"optimizer": "adamw"}},
        default="adamw",
    )
    """Optimizer of float baselines; `rule` for ternary weights."""
    teacher: str | None = train_field(
        None,
        "Run or checkpoint to distil from: its predictions are learnt in addition to the text.",
        metavar="PATH",
        decisive=False,
    )
    scale_losses: tuple[str, ...] = ()
    """Parts of the loss that train the scales of an area of the model, as `area=loss` or
    `area=loss+loss`; scales of other areas are trained by the complete loss."""
    recompute: bool = train_field(
        False,
        "Recompute activations in the backward pass, to save memory.",
        negatable=False,
        common=True,
        decisive=False,
    )
    pack: bool = train_field(
        False,
        "Keep the gates of MLPs in 12 bits per number for the backward pass, to save memory.",
        negatable=False,
    )
    reduce_dtype: str | None = run_field(
        None,
        "Integer type in which gradients of micro-batches and processes are summed. none"
        " averages each as it is computed, in less memory.",
        choices=(*REDUCE_DTYPES, "none"),
        default=f"int16, and int12 over {MAX_INT16_SUMMED} batches; none for one process of up to"
        f" {MAX_UNSUMMED}",
    )
    """Integers of gradients in sums and in the all-reduce; None updates each matrix as soon as its
    gradient is computed, without accumulating gradients. `none` becomes None."""
    compute: str = train_field(
        "bf16",
        "Activations: bf16 or fp32; or bf16 with matrix products in fp8, with those of the backward"
        " pass in fp8, or in nvfp4, which is emulated.",
        choices=COMPUTES,
        default="bf16 where it is fast",
        common=True,
    )
    device: str = run_field(
        "cpu", "Device.", metavar="cpu|cuda|mps", default="cuda if there is one", common=True
    )
    backend: str = run_field(
        "torch",
        "Implementation of the kernels.",
        choices=BACKENDS,
        default="triton on a GPU, native on a CPU with a C compiler, else torch",
    )

    def __post_init__(self) -> None:
        """Check values and combinations of settings.

        Raises:
            ArbError: a value is invalid, or settings contradict each other.
        """
        check_fields(self, MAX_COUNT)
        if self.reduce_dtype == "none":
            object.__setattr__(self, "reduce_dtype", None)
        check_choice("optimizer", self.optimizer, OPTIMIZERS[self.model.weights])
        if self.model.weights != "ternary":
            self._refuse(TERNARY_ONLY, "a float baseline has no", "weights")
        if "votes" in self.model.rules:
            self._refuse(REMAINDER_ONLY, "weights of the rule `votes` have no", "rule")
        if self.scale_losses:
            self._check_scale_losses()
        self._check_media()
        if self.reduce_dtype is not None and self.accum > MAX_ACCUM[self.reduce_dtype]:
            raise ArbError(
                f"sums of {self.accum:,} parts of {self.reduce_dtype} could wrap",
                f"use `accum` of up to {MAX_ACCUM[self.reduce_dtype]:,}, or narrower integers",
                fields=("accum", "reduce_dtype"),
            )
        for problem, name in self.packing_problems() if self.pack else ():
            raise ArbError(problem, "leave `pack=True` out", fields=("pack", name))
        for name, chosen in (("keep_best=True", self.keep_best), ("patience", self.patience)):
            field = name.partition("=")[0]
            if chosen and self.eval_interval == 0:
                raise ArbError(
                    "a run that is never evaluated has no best checkpoint",
                    f"leave `{name}` out, or use `eval_every` of 1 or more",
                    fields=(field, "eval_every"),
                )
            if chosen and self.model.digits == "fade":
                raise ArbError(
                    "the best checkpoint would be from before the weights are ternary",
                    f"leave `{name}` out, or use `digits=all` or `digits=trit`",
                    fields=(field, "digits"),
                )
        if self.model.digits in FADED:
            raise setting_error(
                "the checkpoint is from the middle of a run that anneals its weights",
                "choose `digits=all`, `digits=fade` or `digits=trit`",
            )
        if self.steps * self.accum > MAX_COUNT:  # micro-batches are numbered by int32
            raise setting_error(
                f"{self.steps:,} steps of {self.accum:,} batches are too many to number",
                "use fewer `steps`, or less `accum`",
            )
        if not 0 < self.lr <= 64:
            raise setting_error(f"`lr` is {self.lr}", "use a number above 0 and at most 64")
        ends = [name for name in ("fade_from", "fade_to") if getattr(self, name) is not None]
        if ends and self.model.digits != "fade":
            raise ArbError(
                f"`{ends[0]}` only applies to weights that fade",
                f"leave `{ends[0]}` out, or use `digits=fade`",
                fields=(*ends, "digits"),
            )
        begin, end = self.fades
        if not 0 <= begin < end <= 1:
            raise setting_error(
                f"weights would fade from {begin:g} to {end:g} of the steps",
                "use `fade_from` of 0 or more, and a larger `fade_to` of at most 1",
            )
        if self.decay * self.lr > MAX_DECAY:
            raise setting_error(
                f"`weight_decay` is {self.decay:g}, and `lr` is {self.lr:g}",
                f"use numbers whose product is at most {MAX_DECAY}",
            )
        for name in DROPOUTS:
            if (rate := getattr(self, name)) >= 1:
                raise setting_error(f"`{name}` is {rate:g}", "use a number below 1")
        self._check_attention_dropout()
        if self.final_lr is not None and not 0 <= self.final_lr <= self.lr:
            raise setting_error(
                f"`final_lr` is {self.final_lr}", f"use 0 to {self.lr}, the learning rate"
            )
        if self.final_lr is not None and self.schedule == "constant":
            raise setting_error(
                "a constant learning rate does not change at the end",
                "leave `final_lr` out, or choose another `schedule`",
            )

    def _refuse(self, settings: Mapping[str, str], has_no: str, cause: str) -> None:
        """Refuse settings that other fields make meaningless.

        Args:
            settings: missing property of each setting, by name; `name=value` is one of its values.
            has_no: beginning of the message, before the property.
            cause: field that makes them meaningless.
        """
        for refused, missing in settings.items():
            name, _, value = refused.partition("=")
            if getattr(self, name) == value if value else getattr(self, name):
                raise ArbError(
                    f"{has_no} {missing}",
                    f"leave `{refused}` out, or choose other `{cause}`",
                    fields=(name, cause),
                )

    def _check_attention_dropout(self) -> None:
        """Check that `attention_dropout` applies to the mixers, and that all support it."""
        if not self.attention_dropout:
            return
        drops = {part.kind: part.drops_attention for _, part in self.model.specs_and_parts()}
        problem = "this model has no attention weights that could be dropped"
        if kind := next((kind for kind, supported in drops.items() if supported is False), None):
            problem = f"attention weights of the mixer `{kind}` cannot be dropped"
        elif any(drops.values()):
            return
        raise ArbError(problem, "leave `attention_dropout` out", fields=("attention_dropout",))

    @property
    def drops(self) -> bool:
        """Whether steps drop outputs of branches, attention weights or embeddings."""
        return any(getattr(self, name) for name in DROPOUTS)

    @property
    def keeps_best(self) -> bool:
        """Whether the checkpoint of the lowest held-out loss is kept."""
        return self.keep_best or self.patience is not None

    @property
    def decay(self) -> float:
        """Weight decay, with the default of the kind of weights."""
        if self.weight_decay is not None:
            return self.weight_decay
        return 0.0 if self.model.weights == "ternary" else FLOAT_WEIGHT_DECAY

    def packing_problems(self) -> list[tuple[str, str]]:
        """Return reasons why gates cannot be packed, each with the field that causes it.

        Packing needs gates in bfloat16, and blocks that do not recompute them.
        """
        problems = {
            "layers": (
                "no block before the last one has a gated MLP",
                not any(True for _ in self.model.gates_to_pack()),
            ),
            "compute": ("gates in fp32 cannot be packed", self.compute == "fp32"),
            "recompute": ("recomputed blocks keep no gates", self.recompute),
        }
        return [(problem, name) for name, (problem, applies) in problems.items() if applies]

    def _check_media(self) -> None:
        """Check the formats of sounds and pictures, which need a model of bytes."""
        if self.picture is not None:
            import_module("arbcli.families.media.pictures").check_form(self.picture)
        formats = [name for name in ("sound", "picture") if getattr(self, name) is not None]
        if formats and self.tokenizer is not None:
            raise setting_error(
                f"`{formats[0]}` needs a model of bytes, and the tokenizer reads text",
                f"leave `{formats[0]}` or `tokenizer` out",
            )

    def _check_scale_losses(self) -> None:
        """Check the syntax of `scale_losses`, and that it can be combined with other settings."""
        for entry in self.scale_losses:
            area, _, losses = entry.partition("=")
            if not area or not losses:
                raise ArbError(
                    f"`scale_losses` has `{entry}`",
                    "write an area and its losses, as in `moe_graph=text+ponder`",
                    fields=("scale_losses",),
                )
            for loss in losses.split("+"):
                check_choice("scale_losses", loss, LOSSES)
        conflicts = {
            "`reduce_dtype`": self.reduce_dtype is not None,
            "several batches per step": self.accum > 1,
            "the fix `order` of votes": "order" in self.model.votes_fixes,
        }
        if conflict := next((name for name, applies in conflicts.items() if applies), None):
            raise ArbError(
                f"`scale_losses` does not combine with {conflict}",
                "leave one of them out",
                fields=("scale_losses",),
            )

    @property
    def conversion(self) -> "Conversion":
        """Conversion of files that are not plain text to bytes."""
        from arbcli.data.files import Conversion  # a trainer takes texts that are open

        return Conversion(self.field, self.sound, self.picture, data_format=self.data_format)

    @property
    def scale_routes(self) -> dict[tuple[str, ...], frozenset[str]]:
        """Areas of the model by the parts of the loss that train their scales."""
        routes: dict[tuple[str, ...], frozenset[str]] = {}
        for entry in self.scale_losses:
            area, _, losses = entry.partition("=")
            key = tuple(sorted(set(losses.split("+"))))
            routes[key] = routes.get(key, frozenset()) | {area}
        return routes

    @property
    def fades(self) -> tuple[float, float]:
        """Shares of the steps at which fading begins, and at which it ends with trits."""
        begin, end = self.fade_from, self.fade_to
        if begin is None:
            begin = FADE_FROM if end is None else max(0.0, end - FADING_SHARE)
        return begin, begin + FADING_SHARE if end is None else end

    @property
    def eval_interval(self) -> int:
        """Number of steps between evaluations; 0 for no evaluations."""
        if self.eval_every is not None:
            return self.eval_every
        minimum, maximum = EVAL_EVERY
        return min(max(self.steps // 4, minimum), maximum)

    def decisive(self) -> dict[str, Any]:
        """Return the settings that determine the weights, without those of the model, by name."""
        return decisive(self) | {"scale_losses": list(self.scale_losses)}  # a list, as in JSON


RUN_SETTINGS = settings_of(TrainConfig)
"""Settings of a run without those of its model, by the name of the field."""
CORE_SETTINGS = {**MODEL_SETTINGS.first, **RUN_SETTINGS}
"""Settings of the core, by the name of the field."""
SETTINGS = ExtendedMapping(CORE_SETTINGS, MODEL_SETTINGS.extend)
"""Settings of a run and of all models, by the name of the field."""
OLD_FIELDS = {"wire": "reduce_dtype"}
"""Current names of fields that were renamed, by their old names in `config.json` and settings."""
FIELDS = tuple(field.name for field in dataclasses.fields(TrainConfig))
"""Fields of a run's configuration."""


def _spellings(settings: Mapping[str, Declared], arguments: Mapping[str, Any]) -> dict[str, str]:
    """Return the names of fields and arguments by their own and by their options' spelling."""
    options = {}
    for name, declared in settings.items():
        option = declared.option.partition("/")[0].removeprefix("--")
        options[option.replace("-", "_")] = name
    return options | {name: name for name in arguments}


NAMES = ExtendedMapping(
    OLD_FIELDS
    | _spellings(CORE_SETTINGS, ARGUMENTS.first)
    | {name: name for name in (*FIELDS, "preset")},
    lambda: _spellings(MODEL_SETTINGS.extend(), ARGUMENTS.extend()),
)
"""Names of fields and arguments by all of their spellings."""


def canonical_name(name: str) -> str:
    """Return the name of a field or argument, given any of its spellings."""
    return NAMES.get(name, name)


def option_words(option: str) -> dict[str, Mapping[str, str]]:
    """Return the fields that each word of an option sets."""
    words: dict[str, Mapping[str, str]] = {}
    for declared in CORE_SETTINGS.values():
        if declared.option == option:
            words |= declared.setting.words
    return words


def option_word(option: str, config: TrainConfig) -> str | None:
    """Return the word of `--weights` or `--optimizer` for a configuration.

    None for a model whose rule has no direction.
    """
    if option == "--optimizer" and config.model.weights != "ternary":
        return config.optimizer
    return model_word(option, config.model)


def model_word(option: str, model: ModelConfig) -> str | None:
    """Return the word of `--weights` or `--optimizer` for the fields of a model.

    None for a model in the middle of a fade, or one whose rule has no direction.
    """
    for word, fields in option_words(option).items():
        if all(getattr(model, name, None) == value for name, value in fields.items()):
            return word
    return None


def resolve_names(values: dict[str, Any]) -> dict[str, Any]:
    """Replace names and words of options by fields and their values.

    Raises:
        ArbError: two of them set a field to different values.
    """
    settings: dict[str, Any] = {}
    sources: dict[str, str] = {}
    for spelling, value in values.items():
        name = canonical_name(spelling)
        known = CORE_SETTINGS.get(name)  # settings of families have no words
        fields: Mapping[str, Any] = {name: value}
        if known is not None and value not in (*known.setting.choices, *known.setting.also):
            words = option_words(known.option)
            fields = words.get(value, fields) if isinstance(value, str) else fields
        for field, field_value in fields.items():
            source = sources.setdefault(field, spelling)
            if source != spelling and settings[field] != field_value:
                raise ArbError(
                    f"`{source}={values[source]}` and `{spelling}={value}` contradict each other",
                    "give one of them",
                )
            settings[field] = field_value
    return settings


def trains_ternary(preset: str | ModelConfig, weights: str | None) -> bool:
    """Return whether a model trains packed ternary weights instead of a float baseline.

    Args:
        preset: name of a preset, or the configuration of a model.
        weights: value of the setting `weights`; None for the model's own.
    """
    default = "ternary" if isinstance(preset, str) else preset.weights
    return (weights or default) == "ternary"


def train_config(
    preset: str | ModelConfig,
    *,
    device: str,
    backend: str,
    compute: str,
    fields: Mapping[str, Any] | None = None,
    processes: int = 1,
    **settings: Any,
) -> TrainConfig:
    """Build a configuration from settings, with defaults for all others.

    Args:
        preset: name of a preset, or the configuration of a model.
        device: name of the device in torch.
        backend: backend of the kernels.
        compute: one of `COMPUTES`.
        fields: further fields of the model by path: see `arbcli.config.fields.change_fields`.
        processes: number of processes of the run, on which the default of `reduce_dtype` depends.
        settings: fields of `TrainConfig` and arguments of the preset's short form.

    Raises:
        ArbError: settings are invalid or contradict each other.
    """
    settings = resolve_names(settings)
    shape = {n: settings.pop(n) for n in [*settings] if n not in FIELDS and n in ARGUMENTS}
    if unknown := [name for name in settings if name not in FIELDS]:
        raise ArbError(
            f"no setting is named `{unknown[0]}`",
            "docs/settings.md lists all settings; False turns one off",
        )
    ternary = trains_ternary(preset, shape.get("weights"))
    if ternary and settings.get("optimizer") == "muon":  # valid for both kinds of weights
        direction = shape.get("direction")
        if direction not in (None, "orthogonal"):
            raise setting_error(
                f"`direction={direction}` and `optimizer=muon` contradict each other",
                "give one of them",
            )
        shape["direction"] = "orthogonal"
        del settings["optimizer"]
    if not ternary and shape.get("direction") == "orthogonal":
        settings.setdefault("optimizer", "muon")
        del shape["direction"]
    model = assembled(preset, fields=fields, **shape)
    if isinstance(preset, ModelConfig) and model.direction != preset.direction:
        model = reset_symbol_directions(model, fields or {})
    if ternary and "optimizer" in settings:
        raise ArbError(
            f"`optimizer={settings['optimizer']}` only works with float weights",
            "use `muon`, `adafactor` or `sign`, or `weights=float`",
            fields=("optimizer", "weights"),
        )
    refused = [name for name in ("rule", *PART_RULES, "direction") if shape.get(name) is not None]
    if not ternary and refused:
        raise ArbError(
            f"float weights are trained by AdamW or Muon, so {quoted(refused)} cannot be given with"
            " them",
            "use `adamw` or `muon` and no rule, or `weights=ternary`",
            fields=(*refused, "weights"),
        )
    optimizer = settings.pop("optimizer", "rule" if ternary else "adamw")
    rate = default_lr(model, optimizer)
    if ternary and "votes" in model.rules and settings.get("lr", rate) != rate:
        raise ArbError(
            "the rule `votes` has no learning rate",
            "leave `lr` out, or use `rule=moment`",
            fields=("lr", "rule"),
        )
    settings.setdefault("lr", rate)
    if ternary:
        settings.setdefault("reduce_dtype", default_reduction(settings.get("accum", 1), processes))
    for name in ("data", "val", "scale_losses"):
        entries = settings.get(name, ())
        settings[name] = tuple(map(str, [entries] if isinstance(entries, Path | str) else entries))
    for name in ("tokenizer", "teacher"):
        if settings.get(name) is not None:
            settings[name] = str(settings[name])
    return TrainConfig(
        model=model, optimizer=optimizer, device=device, backend=backend, compute=compute,
        **settings,
    )  # fmt: skip


def default_reduction(accum: int, processes: int = 1) -> str | None:
    """Return the default `reduce_dtype` for micro-batches per step and processes."""
    if processes == 1 and not MAX_UNSUMMED < accum <= MAX_ACCUM["int12"]:
        return None
    return "int16" if accum <= MAX_INT16_SUMMED else "int12"


def default_lr(model: ModelConfig, optimizer: str) -> float:
    """Return the default learning rate of a model."""
    if model.weights != "ternary":
        return FLOAT_LR.get((model.weights, optimizer), 1e-3)
    tables = {"trit": LR, "all": LR_OF_DIGITS}
    return tables.get(model.digits, LR_OF_FADING)[model.rule]


def train_config_from(facts: dict[str, Any]) -> TrainConfig:
    """Build a configuration from the content of `config.json`.

    Raises:
        ArbError: the file is damaged, or of a version with other settings.
    """
    try:
        values = {OLD_FIELDS.get(name, name): value for name, value in facts["config"].items()}
        model = config_from_dict(values["model"])
        lists = {name: tuple(values[name]) for name in ("data", "val")}
        lists["scale_losses"] = tuple(values.get("scale_losses", ()))
        if "data_format" not in values and ".bin" in " ".join(lists["data"] + lists["val"]):
            values["data_format"] = "bytes"  # the only format of earlier versions
        return TrainConfig(**(values | lists | {"model": model}))
    except (TypeError, KeyError, ValueError, AttributeError) as error:
        raise ArbError(
            f"the run's configuration does not fit this version of arb: {error}",
            "use the version that `config.json` names",
        ) from None


def train_config_dict(config: TrainConfig) -> dict[str, Any]:
    """Return the fields of a configuration for `config.json`."""
    return dataclasses.asdict(config)
