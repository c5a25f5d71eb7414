"""Configuration of a run, from the preset of its model to its seed."""

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Annotated, Any

from arbcli.config.checks import check_choice, check_fields
from arbcli.config.model import ModelConfig
from arbcli.config.presets import assembled, config_from_dict
from arbcli.config.settings import OPTIMISATION, RUN, TEXT, Setting, decisive, settings_of
from arbcli.config.short_forms import ARGUMENTS, MODEL_SETTINGS
from arbcli.errors import ArbError
from arbcli.media import pictures
from arbcli.media.sound import FORMS as SOUND_FORMS
from arbcli.plain_text import Conversion
from arbcli.rules import FADED, LR, LR_OF_DIGITS, LR_OF_FADING

EVAL_EVERY = (50, 500)
"""Least and most steps between evaluations where no number is given."""
LONGEST_LOG = 1000
"""Most steps between records: a checkpoint holds the loss of each of them."""
MOST = 2**31 - 1
"""Of a count."""
LOSSES = ("text", "ponder", "ratio", "indexer")
"""Parts of a loss: see `LanguageModel.losses`."""
SCHEDULES = ("cosine", "linear", "wsd", "constant")
"""Choices of `schedule`."""
FADE_FROM = 0.4
"""Share of a run after which weights fade from all digits to the trit, if it does not say so."""
FADING_SHARE = 0.5
"""Of a run, in which they fade, if it does not say how long."""
FADE_LEARNT_TO = 0.1
"""Share of a run after which weights are trits that begin it with all digits of another."""
COMPUTES = ("bf16", "fp8", "nvfp4", "fp32")
"""Choices of `compute`."""
BACKENDS = ("triton", "native", "torch", "interpreter")
"""Choices of `backend`; `arbcli.kernels.runtime.backend` has them too, and imports torch."""
WIRES = ("int12", "int8", "int16")
"""Choices of `wire`: what each part of a gradient of a matrix is rounded to."""
MOST_PARTS = {"int8": 2**20, "int12": 2**16, "int16": 2**12}
"""Micro-batches of a step whose parts add up without wrapping, by `wire`."""
OPTIMIZERS = {"ternary": ("rule",), "float": ("adamw", "muon"), "ste": ("adamw", "muon")}
"""By the kind of weights."""
FLOAT_LR = {
    ("float", "adamw"): 1e-3,
    ("float", "muon"): 3e-3,
    ("ste", "adamw"): 3e-3,
    ("ste", "muon"): 3e-3,
}
"""Default `lr` of the twins, by weights and optimizer."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainConfig:
    """Everything that decides what a run computes; `config.json` holds it."""

    model: ModelConfig
    data: Annotated[
        tuple[str, ...],
        Setting(
            "Training text: a file, folder or glob. Repeat it for several, all with weights as in"
            " a.txt:0.7 or none. .gz, .zst and .parquet files are unpacked.",
            TEXT,
            default="Python's standard library",
            metavar="PATH",
        ),
    ] = ()
    val: Annotated[
        tuple[str, ...],
        Setting(
            "Held-out text.",
            TEXT,
            default="the last tenth of one file, or a tenth of the files",
            metavar="PATH",
        ),
    ] = ()
    field: Annotated[
        str | None,
        Setting(
            "Field of .jsonl or .parquet files that holds the text; for chats messages, or"
            " QUESTION+ANSWER, two fields by their names.",
            TEXT,
            metavar="FIELD",
        ),
    ] = None
    sound: Annotated[
        str | None,
        Setting(
            "Bytes of the samples of sounds: mulaw, one each, or pcm16, two.",
            TEXT,
            choices=SOUND_FORMS,
            default="mulaw, and sounds in folders are left out",
        ),
    ] = None
    picture: Annotated[
        str | None,
        Setting(
            "Mode of pictures, rgb or grey, and a size for all if wanted, as in rgb:64x48.",
            TEXT,
            metavar="FORM",
            default="rgb, and pictures in folders are left out",
        ),
    ] = None
    tokenizer: Annotated[
        str | None,
        Setting(
            "A tokenizer.json. The model then reads its tokens instead of bytes.",
            TEXT,
            metavar="FILE",
        ),
    ] = None
    steps: Annotated[
        int, Setting("Training steps.", OPTIMISATION, least=1, most=MOST, decisive=True)
    ] = 400
    batch: Annotated[
        int, Setting("Windows in a batch.", OPTIMISATION, least=1, most=MOST, decisive=True)
    ] = 16
    accum: Annotated[
        int,
        Setting(
            "Batches whose gradients are summed for one step.",
            OPTIMISATION,
            least=1,
            most=MOST,
            decisive=True,
        ),
    ] = 1
    lr: Annotated[
        float,
        Setting("Learning rate.", OPTIMISATION, default="depends on the rule", decisive=True),
    ] = 1.0
    warmup: Annotated[
        int,
        Setting(
            "Steps of linear warm-up, at most half of the run.",
            OPTIMISATION,
            least=0,
            most=MOST,
            decisive=True,
        ),
    ] = 100
    schedule: Annotated[
        str,
        Setting(
            "Learning rate after the warm-up: cosine, linear or constant, or wsd, which is"
            " constant and falls in the last fifth.",
            OPTIMISATION,
            choices=SCHEDULES,
            decisive=True,
        ),
    ] = "cosine"
    final_lr: Annotated[
        float | None,
        Setting(
            "Learning rate at the end.", OPTIMISATION, least=0, default="lr / 20", decisive=True
        ),
    ] = None
    fade_from: Annotated[
        float | None,
        Setting(
            "Share of the steps after which weights anneal.",
            OPTIMISATION,
            least=0,
            default="0.4, or 0 for a run that begins with weights of all digits",
            decisive=True,
        ),
    ] = None
    fade_to: Annotated[
        float | None,
        Setting(
            "Share of the steps after which annealed weights are trits.",
            OPTIMISATION,
            least=0,
            default="half of the steps after they begin to, or 0.1 for a run that begins with"
            " weights of all digits",
            decisive=True,
        ),
    ] = None
    seed: Annotated[
        int, Setting("Random seed.", RUN, least=0, most=MOST, metavar="N", decisive=True)
    ] = 0
    save_every: Annotated[
        int,
        Setting(
            "Steps between checkpoints. One is also saved at the start and every 5 minutes.",
            RUN,
            least=1,
            most=MOST,
        ),
    ] = 500
    eval_every: Annotated[
        int | None,
        Setting(
            "Steps between evaluations; 0 is never.",
            RUN,
            least=0,
            default=f"a quarter of the run, {EVAL_EVERY[0]} to {EVAL_EVERY[1]}",
        ),
    ] = None
    log_every: Annotated[
        int | None,
        Setting("Steps between records.", RUN, least=1, most=LONGEST_LOG, default="10"),
    ] = None
    """None is `arbcli.train.run.LOG_EVERY`."""
    sample_every: Annotated[
        int | None,
        Setting("Steps between samples of text.", RUN, least=1, default="only at the end"),
    ] = None
    keep: Annotated[int, Setting("Newest checkpoints to keep.", RUN, least=1, most=MOST)] = 2
    keep_best: Annotated[
        bool,
        Setting("Also keep the checkpoint of the lowest held-out loss.", RUN, negatable=False),
    ] = False
    optimizer: Annotated[
        str,
        Setting(
            "For the baselines float and ste: adamw, their default, or muon.",
            OPTIMISATION,
            choices=OPTIMIZERS["float"],
            also=OPTIMIZERS["ternary"],
            words={"adamw": {"optimizer": "adamw"}},
            default="adamw",
            decisive=True,
        ),
    ] = "rule"
    """`rule` for ternary weights."""
    teacher: Annotated[
        str | None,
        Setting(
            "Run or checkpoint whose predictions are learnt besides the text.",
            OPTIMISATION,
            metavar="PATH",
        ),
    ] = None
    scale_losses: tuple[str, ...] = ()
    """Parts of the loss that move the scales of an area of the model, `area=loss` or
    `area=loss+loss`; those of other areas move by all of it."""
    recompute: Annotated[
        bool,
        Setting(
            "Recompute activations in the backward pass, which takes less memory.",
            OPTIMISATION,
            negatable=False,
        ),
    ] = False
    wire: Annotated[
        str | None,
        Setting(
            "Integers that gradients are rounded to when several processes sum them.",
            RUN,
            choices=WIRES,
            option="reduce-dtype",
            default="int12 with several processes",
        ),
    ] = None
    """None steps by the gradient of each matrix as soon as it is there."""
    compute: Annotated[
        str,
        Setting(
            "Activations: bf16 or fp32; or bf16 with matrix products in fp8, or in nvfp4, which is"
            " emulated.",
            OPTIMISATION,
            choices=COMPUTES,
            default="bf16 where it is fast",
            decisive=True,
        ),
    ] = "bf16"
    device: Annotated[
        str,
        Setting("Where to compute.", RUN, metavar="cpu|cuda|mps", default="cuda if there is one"),
    ] = "cpu"
    backend: Annotated[
        str,
        Setting(
            "Implementation of the kernels.",
            RUN,
            choices=BACKENDS,
            default="triton on a GPU, native on a CPU with a C compiler, else torch",
        ),
    ] = "torch"

    def __post_init__(self) -> None:
        """Refuse what cannot be run.

        Raises:
            ArbError: a number is out of range.
        """
        check_fields(self)
        check_choice("optimizer", self.optimizer, OPTIMIZERS[self.model.weights])
        if self.scale_losses:
            self._check_scale_losses()
        self._check_media()
        if self.teacher is not None and self.model.weights != "ternary":
            raise ArbError(
                "a float twin cannot have a teacher",
                hint="leave `teacher` out, or use `weights=ternary`",
                fields=("teacher", "weights"),
            )
        if self.wire is not None:
            if self.model.weights != "ternary":
                raise ArbError(
                    "gradients of a float twin are not rounded",
                    hint="leave `wire` out",
                    fields=("wire",),
                )
            if self.accum > MOST_PARTS[self.wire]:
                raise ArbError(
                    f"sums of {self.accum:,} parts of {self.wire} could wrap",
                    hint=f"use `accum` of up to {MOST_PARTS[self.wire]:,}, or narrower integers",
                    fields=("accum", "wire"),
                )
        if self.compute in ("fp8", "nvfp4") and self.model.weights != "ternary":
            raise ArbError(
                "the products of a float twin are in bf16",
                hint=f"leave `compute={self.compute}` out",
                fields=("compute",),
            )
        if self.keep_best and self.model.weights != "ternary":
            raise ArbError(
                "a float twin keeps no checkpoint",
                hint="leave `keep_best=True` out",
                fields=("keep_best",),
            )
        if self.keep_best and self.eval_interval == 0:
            raise ArbError(
                "a run that is never evaluated has no best checkpoint",
                hint="leave `keep_best=True` out, or use `eval_every` of 1 or more",
                fields=("keep_best", "eval_every"),
            )
        if self.model.digits == "fade" and self.keep_best:
            raise ArbError(
                "the best checkpoint would be from before the weights are ternary",
                hint="leave `keep_best=True` out, or use `digits=all` or `digits=trit`",
                fields=("keep_best", "digits"),
            )
        if self.model.digits in FADED:
            raise ArbError(
                "the checkpoint is from the middle of a run that anneals its weights",
                hint="choose `digits=all`, `digits=fade` or `digits=trit`",
                fields=("digits",),
            )
        if self.steps * self.accum > MOST:  # each of a run's micro-batches has an int32 number
            raise ArbError(
                f"{self.steps:,} steps of {self.accum:,} batches are too many to number",
                hint="use fewer `steps`, or less `accum`",
                fields=("steps", "accum"),
            )
        if not 0 < self.lr <= 64:
            raise ArbError(
                f"`lr` is {self.lr}", hint="use a number above 0 and at most 64", fields=("lr",)
            )
        given = [name for name in ("fade_from", "fade_to") if getattr(self, name) is not None]
        if given and self.model.digits != "fade":
            raise ArbError(
                "weights that do not fade have no steps in which they do",
                hint=f"leave `{given[0]}` out, or use `digits=fade`",
                fields=(*given, "digits"),
            )
        begin, end = self.fades
        if not 0 <= begin < end <= 1:
            raise ArbError(
                f"weights are to fade from {begin:g} to {end:g} of the steps",
                hint="use `fade_from` of 0 or more, and a larger `fade_to` of at most 1",
                fields=("fade_from", "fade_to"),
            )
        if self.final_lr is not None and not 0 <= self.final_lr <= self.lr:
            raise ArbError(
                f"`final_lr` is {self.final_lr}",
                hint=f"use 0 to {self.lr}, the learning rate",
                fields=("final_lr",),
            )
        if self.final_lr is not None and self.schedule == "constant":
            raise ArbError(
                "a constant learning rate does not change at the end",
                hint="leave `final_lr` out, or choose another `schedule`",
                fields=("final_lr", "schedule"),
            )

    def _check_media(self) -> None:
        """Check the forms of sounds and pictures, which are read as bytes alone."""
        if self.picture is not None:
            pictures.check_form(self.picture)
        given = [name for name in ("sound", "picture") if getattr(self, name) is not None]
        if given and self.tokenizer is not None:
            raise ArbError(
                f"a tokenizer reads text, and `{given[0]}` asks for bytes of other kinds",
                hint=f"leave `{given[0]}` or `tokenizer` out",
                fields=(given[0], "tokenizer"),
            )

    def _check_scale_losses(self) -> None:
        """Check what moves scales: its spelling, and that the run has nothing that it bars."""
        for entry in self.scale_losses:
            area, _, losses = entry.partition("=")
            if not area or not losses:
                raise ArbError(
                    f"`scale_losses` has `{entry}`",
                    hint="write an area and its losses, as in `moe_graph=text+ponder`",
                    fields=("scale_losses",),
                )
            for loss in losses.split("+"):
                check_choice("scale_losses", loss, LOSSES)
        barred = {
            "a float twin, which has no scales": self.model.weights != "ternary",
            "gradients that travel": self.wire is not None,
            "several batches a step": self.accum > 1,
            "the fix `order` of votes": "order" in self.model.votes_fixes,
        }
        if found := [name for name, is_so in barred.items() if is_so]:
            raise ArbError(
                f"`scale_losses` is not for {found[0]}",
                hint="leave it out, or change that",
                fields=("scale_losses",),
            )

    @property
    def conversion(self) -> Conversion:
        """Conversion of files that are not plain text to bytes."""
        return Conversion(self.field, self.sound, self.picture)

    @property
    def scale_routes(self) -> dict[tuple[str, ...], frozenset[str]]:
        """Areas by the parts of the loss that move their scales."""
        routes: dict[tuple[str, ...], frozenset[str]] = {}
        for entry in self.scale_losses:
            area, _, losses = entry.partition("=")
            key = tuple(sorted(set(losses.split("+"))))
            routes[key] = routes.get(key, frozenset()) | {area}
        return routes

    @property
    def fades(self) -> tuple[float, float]:
        """Shares of the steps after which weights begin to fade, and are trits, if they fade."""
        begin = FADE_FROM if self.fade_from is None else self.fade_from
        return begin, begin + FADING_SHARE if self.fade_to is None else self.fade_to

    @property
    def eval_interval(self) -> int:
        """Steps between evaluations; 0 if there are none."""
        if self.eval_every is not None:
            return self.eval_every
        least, most = EVAL_EVERY
        return min(max(self.steps // 4, least), most)

    def decisive(self) -> dict[str, Any]:
        """List the settings that the weights depend on, besides the model's."""
        return decisive(self) | {"scale_losses": list(self.scale_losses)}  # as JSON has it


RUN_SETTINGS = settings_of(TrainConfig)
"""Settings of a run besides those of its model, by the name of the field."""
SETTINGS = MODEL_SETTINGS | RUN_SETTINGS


OF_OPTIONS = {
    one.option.partition("/")[0][2:].replace("-", "_"): name for name, one in SETTINGS.items()
}
"""Names of settings by those of their options, with `_` for `-`."""


def field_of(name: str) -> str:
    """Find the field or argument that a name, or that of an option, sets."""
    return name if name in ARGUMENTS else OF_OPTIONS.get(name, name)


def words_of(option: str) -> dict[str, Mapping[str, str]]:
    """List the words of an option, with the fields that each sets."""
    shared = (one.setting.words for one in SETTINGS.values() if one.option == option)
    return {word: fields for words in shared for word, fields in words.items()}


def spelled_out(given: dict[str, Any]) -> dict[str, Any]:
    """Replace names and words of options by the fields that they set, and the values of these.

    Raises:
        ArbError: two of them set a field to different values.
    """
    found: dict[str, Any] = {}
    givers: dict[str, str] = {}
    for spelling, value in given.items():
        name = field_of(spelling)
        known = SETTINGS.get(name)
        fields: Mapping[str, Any] = {name: value}
        if known is not None and value not in (*known.setting.choices, *known.setting.also):
            words = words_of(known.option)
            fields = words.get(value, fields) if isinstance(value, str) else fields
        for field, setting in fields.items():
            giver = givers.setdefault(field, spelling)
            if giver != spelling and found[field] != setting:
                raise ArbError(
                    f"`{giver}={given[giver]}` and `{spelling}={value}` contradict each other",
                    hint="give one of them",
                )
            found[field] = setting
    return found


def trains_ternary(preset: str | ModelConfig, weights: str | None) -> bool:
    """Return whether a model is trained as packed trits, and not as a float twin.

    Args:
        preset: name of a preset, or a model with weights of its own.
        weights: that were asked for; None are the model's.
    """
    own = "ternary" if isinstance(preset, str) else preset.weights
    return (weights or own) == "ternary"


def train_config(
    preset: str | ModelConfig, *, device: str, backend: str, compute: str, **given: Any
) -> TrainConfig:
    """Build a configuration from the settings that were given, and defaults for the rest.

    Args:
        preset: name of a preset, or a model as it is saved.
        device: where to compute, as torch names it.
        backend: what runs the kernels.
        compute: one of `COMPUTES`.
        given: fields of `TrainConfig` and arguments of the preset's short form.

    Raises:
        ArbError: they do not fit each other.
    """
    given = spelled_out(given)
    shape = {name: given.pop(name) for name in list(given) if name in ARGUMENTS}
    ternary = trains_ternary(preset, shape.get("weights"))
    if ternary and given.get("optimizer") == "muon":  # one word, which both kinds of weights know
        shape.setdefault("direction", "orthogonal")
        del given["optimizer"]
    if not ternary and shape.get("direction") == "orthogonal":
        given.setdefault("optimizer", "muon")
        del shape["direction"]
    model = assembled(preset, **shape)
    if ternary and "optimizer" in given:
        raise ArbError(
            f"`optimizer={given['optimizer']}` only works with float weights",
            hint="use `muon`, `adafactor` or `sign`, or `weights=float`",
            fields=("optimizer", "weights"),
        )
    stepped = [name for name in ("rule", "direction") if shape.get(name) is not None]
    if not ternary and stepped:
        names = ", ".join(f"`{name}`" for name in stepped)
        raise ArbError(
            f"float weights are trained by AdamW or Muon, so {names} cannot be given with them",
            hint="use `adamw` or `muon` and no rule, or `weights=ternary`",
            fields=(*stepped, "weights"),
        )
    optimizer = given.pop("optimizer", "rule" if ternary else "adamw")
    given.setdefault("lr", default_lr(model, optimizer))
    data, val = (tuple(map(str, given.pop(name, ()))) for name in ("data", "val"))
    given["scale_losses"] = tuple(given.pop("scale_losses", ()))
    if given.get("tokenizer") is not None:
        given["tokenizer"] = str(given["tokenizer"])
    if given.get("teacher") is not None:
        given["teacher"] = str(given["teacher"])
    return TrainConfig(
        model=model, optimizer=optimizer, data=data, val=val,
        device=device, backend=backend, compute=compute, **given,
    )  # fmt: skip


def default_lr(model: ModelConfig, optimizer: str) -> float:
    """Find the learning rate of a model for which none is given."""
    if model.weights != "ternary":
        return FLOAT_LR.get((model.weights, optimizer), 1e-3)
    of_digits = {"trit": LR, "all": LR_OF_DIGITS}
    return of_digits.get(model.digits, LR_OF_FADING)[model.rule]


def train_config_from(facts: dict[str, Any]) -> TrainConfig:
    """Rebuild a configuration from what `config.json` holds.

    Raises:
        ArbError: it was written by a version with other settings, or damaged.
    """
    try:
        values = facts["config"]
        model = config_from_dict(values["model"])
        lists = {name: tuple(values[name]) for name in ("data", "val")}
        lists["scale_losses"] = tuple(values.get("scale_losses", ()))
        return TrainConfig(**(values | lists | {"model": model}))
    except (TypeError, KeyError, ValueError, AttributeError) as error:
        raise ArbError(
            f"the run's configuration does not fit this version of arb: {error}",
            hint="use the version that `config.json` names",
        ) from None


def train_config_dict(config: TrainConfig) -> dict[str, Any]:
    """List the fields of a configuration for `config.json`."""
    return dataclasses.asdict(config)
