"""What a run computes, from the preset of its model to its seed."""

import dataclasses
from dataclasses import dataclass
from typing import Any

from arbcli.config.checks import check_at_least, check_at_most, check_choice, check_fields
from arbcli.config.model import ModelConfig
from arbcli.config.presets import assembled, config_from_dict
from arbcli.config.short_forms import ARGUMENTS
from arbcli.errors import ArbError
from arbcli.media import pictures, sound
from arbcli.plain_text import Conversion
from arbcli.rules import FADED, LR, LR_OF_DIGITS

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
COMPUTES = ("bf16", "fp8", "nvfp4", "fp32")
"""Choices of `compute`."""
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
DECISIVE = (
    "steps", "batch", "accum", "lr", "warmup", "schedule", "final_lr", "seed", "optimizer",
    "compute",
)  # fmt: skip
"""Settings of a run that its weights depend on, besides the model's."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainConfig:
    """Everything that decides what a run computes; `config.json` holds it."""

    model: ModelConfig
    data: tuple[str, ...] = ()
    """Files, folders or globs; none is the standard library's source."""
    val: tuple[str, ...] = ()
    """Held-out text; none splits it off the data."""
    field: str | None = None
    """Which field of files of records has the text."""
    sound: str | None = None
    """Form of the samples of sounds; None is `mulaw`, and leaves sounds in folders out."""
    picture: str | None = None
    """Mode of pictures, and one size for all if it has one, as in `rgb:64x64`; None is `rgb`, and
    leaves pictures in folders out."""
    tokenizer: str | None = None
    """A `tokenizer.json` that makes tokens of the text; None is bytes."""
    steps: int = 400
    batch: int = 16
    """Windows of a micro-batch."""
    accum: int = 1
    """Micro-batches of a step."""
    lr: float = 1.0
    warmup: int = 100
    """Steps; at most half of the run."""
    schedule: str = "cosine"
    """How the learning rate falls; `wsd` stays, and falls in the last fifth."""
    final_lr: float | None = None
    """Where it falls to; None is a twentieth of `lr`."""
    seed: int = 0
    save_every: int = 500
    """Steps."""
    eval_every: int | None = None
    """Steps; 0 never evaluates, and None is a quarter of the run, within `EVAL_EVERY`."""
    log_every: int | None = None
    """Steps between records, up to `LONGEST_LOG`; None is `arbcli.train.run.LOG_EVERY`."""
    sample_every: int | None = None
    """Steps; None is a sample of text at the end alone."""
    keep: int = 2
    """Checkpoints, the newest ones."""
    keep_best: bool = False
    """Whether the checkpoint of the lowest held-out loss is kept besides."""
    optimizer: str = "rule"
    """`rule` for ternary weights; `adamw` or `muon` for float ones."""
    scale_losses: tuple[str, ...] = ()
    """Parts of the loss that move the scales of an area of the model, `area=loss` or
    `area=loss+loss`; those of other areas move by all of it."""
    recompute: bool = False
    """Whether a backward computes the inside of a block again, to keep less for it."""
    wire: str | None = None
    """How gradients travel between processes, one of `WIRES`; None steps by each at once."""
    compute: str = "bf16"
    """Dtype of activations: `bf16` or `fp32`; or `fp8`: bf16, multiplied in eight bits; or `nvfp4`:
    the same in four bits, emulated."""
    device: str = "cpu"
    backend: str = "torch"

    def __post_init__(self) -> None:
        """Refuse what cannot be run.

        Raises:
            ArbError: a number is out of range.
        """
        check_fields(self)
        check_choice("optimizer", self.optimizer, OPTIMIZERS[self.model.weights])
        check_choice("compute", self.compute, COMPUTES)
        check_choice("schedule", self.schedule, SCHEDULES)
        if self.scale_losses:
            self._check_scale_losses()
        self._check_media()
        if self.wire is not None:
            check_choice("wire", self.wire, WIRES)
            if self.model.weights != "ternary":
                raise ArbError(
                    "gradients of a float twin travel as they are",
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
                "a float twin is multiplied in bf16",
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
                "no checkpoint is the best of a run that is never evaluated",
                hint="leave `keep_best=True` out, or use `eval_every` of 1 or more",
                fields=("keep_best", "eval_every"),
            )
        if self.model.digits == "fade" and self.keep_best:
            raise ArbError(
                "the best checkpoint is one of before the weights have faded to the trit",
                hint="leave `keep_best=True` out, or use `digits=all` or `trit`",
                fields=("keep_best", "digits"),
            )
        if self.model.digits in FADED:
            raise ArbError(
                "the checkpoint is of the middle of a run whose weights fade",
                hint="choose what they are to be: `digits` of all, fade or trit",
                fields=("digits",),
            )
        for name in ("steps", "batch", "accum", "save_every", "keep"):
            check_at_least(name, getattr(self, name))
            check_at_most(name, getattr(self, name), MOST)
        check_at_least("eval_every", self.eval_interval, 0)
        if self.log_every is not None:
            check_at_least("log_every", self.log_every)
            check_at_most("log_every", self.log_every, LONGEST_LOG)
        if self.sample_every is not None:
            check_at_least("sample_every", self.sample_every)
        check_at_most("warmup", self.warmup, MOST)
        if self.steps * self.accum > MOST:  # each of a run's micro-batches has an int32 number
            raise ArbError(
                f"{self.steps:,} steps of {self.accum:,} batches are too many to number",
                hint="use fewer `steps`, or less `accum`",
                fields=("steps", "accum"),
            )
        if self.warmup < 0:
            raise ArbError(f"`warmup` is {self.warmup}", hint="use 0 or more", fields=("warmup",))
        if not 0 < self.lr <= 64:
            raise ArbError(
                f"`lr` is {self.lr}", hint="use a number above 0 and at most 64", fields=("lr",)
            )
        if self.final_lr is not None and not 0 <= self.final_lr <= self.lr:
            raise ArbError(
                f"`final_lr` is {self.final_lr}",
                hint=f"use 0 to {self.lr}, the learning rate",
                fields=("final_lr",),
            )
        if self.final_lr is not None and self.schedule == "constant":
            raise ArbError(
                "a constant learning rate has no other at the end",
                hint="leave `final_lr` out, or choose another `schedule`",
                fields=("final_lr", "schedule"),
            )
        if not 0 <= self.seed <= MOST:
            raise ArbError(f"`seed` is {self.seed}", hint=f"use 0 to {MOST}", fields=("seed",))

    def _check_media(self) -> None:
        """Check the forms of sounds and pictures, which are read as bytes alone."""
        if self.sound is not None:
            check_choice("sound", self.sound, sound.FORMS)
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
    def eval_interval(self) -> int:
        """Steps between evaluations; 0 if there are none."""
        if self.eval_every is not None:
            return self.eval_every
        least, most = EVAL_EVERY
        return min(max(self.steps // 4, least), most)

    def decisive(self) -> dict[str, Any]:
        """List the settings that the weights depend on, besides the model's."""
        found = {name: getattr(self, name) for name in DECISIVE}
        return found | {"scale_losses": list(self.scale_losses)}  # as JSON has it


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
    shape = {name: given.pop(name) for name in list(given) if name in ARGUMENTS}
    model = assembled(preset, **shape)
    ternary = model.weights == "ternary"
    if ternary and "optimizer" in given:
        raise ArbError(
            "ternary weights are stepped by a rule, not by an optimizer",
            hint="use `rule`, or `weights=float` or `ste`",
            fields=("rule", "weights"),
        )
    stepped = [name for name in ("rule", "direction") if shape.get(name) is not None]
    if not ternary and stepped:
        names = ", ".join(f"`{name}`" for name in stepped)
        raise ArbError(
            f"a float twin is stepped by an optimizer, so {names} cannot be given to it",
            hint="leave them out, or use `weights=ternary`",
            fields=(*stepped, "weights"),
        )
    optimizer = given.pop("optimizer", "rule" if ternary else "adamw")
    given.setdefault("lr", default_lr(model, optimizer))
    data, val = (tuple(map(str, given.pop(name, ()))) for name in ("data", "val"))
    given["scale_losses"] = tuple(given.pop("scale_losses", ()))
    if given.get("tokenizer") is not None:
        given["tokenizer"] = str(given["tokenizer"])
    return TrainConfig(
        model=model, optimizer=optimizer, data=data, val=val,
        device=device, backend=backend, compute=compute, **given,
    )  # fmt: skip


def default_lr(model: ModelConfig, optimizer: str) -> float:
    """Find the learning rate of a model for which none is given."""
    if model.weights != "ternary":
        return FLOAT_LR.get((model.weights, optimizer), 1e-3)
    return (LR if model.digits == "trit" else LR_OF_DIGITS)[model.rule]


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
