"""Options that several commands share."""

import dataclasses
import inspect
import os
import re
from collections.abc import Callable, Iterable
from importlib.util import find_spec
from itertools import pairwise
from pathlib import Path
from types import UnionType
from typing import Annotated, Any, get_args

import typer

from arbcli import run_files
from arbcli.chats import has_documents
from arbcli.commands._saved import check_saved
from arbcli.config.checks import check_choice, check_setting
from arbcli.config.file import read_model
from arbcli.config.presets import ATTENTIONS, GRAPH_ATTENTIONS, check_preset
from arbcli.config.settings import MODEL, OUTPUT, RUN, Setting, replaced
from arbcli.config.short_forms import MODEL_SETTINGS
from arbcli.config.training import BACKENDS, SETTINGS, spelled_out, train_config, words_of
from arbcli.data import check_named, check_weights
from arbcli.environment import (
    INTERPRET,
    interpreter_not_asked_for,
    may_have_gpu,
    no_cuda_device,
    no_gpu_for_triton,
)
from arbcli.errors import ArbError
from arbcli.output import note
from arbcli.reading import check_regular
from arbcli.rules import FADING


def option_of(field: str) -> str:
    """Return the name of the option that sets a field, and of its negation after a `/`."""
    if field in SETTINGS:
        return SETTINGS[field].option
    return "--model" if field == "model_file" else f"--{field.replace('_', '-')}"


def in_options(text: str, fields: Iterable[str]) -> str:
    """Rewrite what an error says of fields, `name` or `name=value`, as a command line has it."""
    for field in fields:
        text = re.sub(rf"`{field}=(\w+)`", lambda found: _with_value(field, found[1]), text)  # noqa: B023
        # the first: a value may be called so
        text = text.replace(f"`{field}`", f"`{option_of(field)}`", 1)
    return text


def _with_value(field: str, value: str) -> str:
    option, _, off = option_of(field).partition("/")
    if value == "True":
        return f"`{option}`"
    words = words_of(option) if field in SETTINGS and SETTINGS[field].setting.words else {}
    word = next((word for word, sets in words.items() if sets.get(field) == value), value)
    return f"`{off or f'{option} {word}'}`"


def given_options(**values: Any) -> dict[str, Any]:
    """List the options that were given by the fields that they set; the others are None."""
    return spelled_out({field: value for field, value in values.items() if value is not None})


def with_model_file(given: dict[str, Any]) -> dict[str, Any]:
    """Read the file of `--model`, and put its model in the place of a preset's name.

    Raises:
        ArbError: a preset is named, too, or the file has no model.
    """
    given = dict(given)
    path = given.pop("model_file", None)
    if path is None:
        return given
    if given.get("preset") is not None:
        raise ArbError("`--model` and `--preset` both name a model", hint="give one of them")
    return given | {"preset": read_model(path)}


KEPT_IN = ("bf16", "fp8", "int8", "fp8-mixed", "int8-mixed", "fp8-queries", "int8-queries")
"""Choices of `--kv`."""
REPEATED = ("--data", "--val")
"""Options of several values, which may follow one another: a shell makes them of `*.txt`."""


OPTIONAL = {"--profile": "3", "--attention": "latent"}
"""Options that may stand without a value, which is then this."""
VALUE_OF = {"--profile": "-?[0-9]+", "--attention": "[a-z]+"}
"""Pattern of a value of such an option."""
SHORT = {"--no-attention": ("--attention", "none")}
"""Words that stand for others."""


RENAMED: dict[str, tuple[str, dict[str, str]]] = {
    "--digits": ("--weights", {"trit": "ternary", "all": "int8", "fade": "anneal"}),
    "--direction": ("--optimizer", {"orthogonal": "muon", "factored": "adafactor"}),
    "--wire": ("--reduce-dtype", {}),
}
"""Options of version 0.1, with the present ones and their words; to be removed in version 0.3."""


def rename_options(words: list[str]) -> list[str]:
    """Write options of version 0.1 as the present ones, and say so."""
    found: list[str] = []
    if {"--digits", "--weights"} <= {*words}:
        place = words.index("--weights")
        if words[place + 1 : place + 2] != ["ternary"]:
            raise ArbError("`--digits` is part of `--weights` now", hint="give `--weights` alone")
        words = words[:place] + words[place + 2 :]
    for number, word in enumerate(words):
        if found[-1:] and (renamed := RENAMED.get(words[number - 1])):
            word = renamed[1].get(word, word)
            note(f"`{words[number - 1]} {words[number]}` is now `{renamed[0]} {word}`")
        option, equals, value = word.partition("=")
        if option in RENAMED:
            now, values = RENAMED[option]
            word = f"{now}{equals}{values.get(value, value)}"
            if equals:
                note(f"`{option}={value}` is now `{word}`")
        found.append(word)
    return found


def fill_options(words: list[str]) -> list[str]:
    """Write `--profile` as `--profile 3`, as Typer reads no option whose value may be left out."""
    found: list[str] = []
    for word, following in pairwise([*words, ""]):
        found += SHORT.get(word, (word,))
        if word in OPTIONAL and not re.fullmatch(VALUE_OF[word], following):
            found.append(OPTIONAL[word])
    return found


def repeat_options(words: list[str]) -> list[str]:
    """Write `--data a.txt b.txt` as `--data a.txt --data b.txt`, which is all that Typer reads."""
    found: list[str] = []
    option, values = None, 0
    for word in words:
        if word.startswith("-") and word != "-":
            option, values = (word if word in REPEATED else None), 0
        elif option is not None:
            values += 1
            if values > 1:
                found.append(option)
        found.append(word)
    return found


def the_one(run: Path | None, checkpoint: Path | None) -> Path:
    """Return the model that an argument or `--checkpoint` names.

    Raises:
        ArbError: neither does, or both do.
    """
    if run is not None and checkpoint is not None:
        raise ArbError(f"`{run}` and `--checkpoint` both name a model", hint="give one of them")
    if found := run or checkpoint:
        return found
    raise ArbError(
        "no saved model is named",
        hint="name a run or a checkpoint, or `auto` for the run that was started last",
    )


def find_run(path: Path, root: Path | None = None, *, loads: bool = False) -> Path:
    """Find the run that `auto` stands for: the last one in `root`, or in `runs`.

    Any other path is what it is. It is refused before torch is imported, which takes seconds.

    Args:
        path: `auto`, or what there is.
        root: of the runs.
        loads: whether a checkpoint is to be loaded, which a directory must have.

    Raises:
        ArbError: there is no such file, or no checkpoint.
    """
    if str(path) == "auto":
        path = run_files.latest_run(root or run_files.RUNS)
        note(f"auto is `{path}`")
    elif not path.exists():
        raise ArbError(f"there is no run at `{path}`", hint="name a run, or a file that was saved")
    elif loads and path.is_dir() and not run_files.checkpoints(path):
        raise run_files.without_checkpoint(path)
    elif loads and not path.is_dir():
        check_saved(path)
    return path


def check_settings(given: dict[str, Any]) -> None:
    """Refuse settings that do not fit each other, before torch is imported.

    Args:
        given: fields of `TrainConfig` and of the preset's model, without the place to compute.

    Raises:
        ArbError: they do not, or a text is not there.
    """
    place = {"device": "cpu", "backend": "torch"}
    train_config(**{"preset": "tiny", "compute": "fp32"} | given | place)
    if given.get("tokenizer"):
        check_regular(Path(given["tokenizer"]))
    if given.get("teacher"):
        find_run(Path(given["teacher"]), loads=True)
    check_weights(given.get("data", ()))
    check_texts(given)


def check_texts(given: dict[str, Any]) -> None:
    """Refuse texts of a run that are not there, or have no field; documents have other files."""
    field = given.get("field")
    named = [*given.get("data", ()), *given.get("val", ())]
    check_named(named, None if has_documents(field) else field)


MOST_METAVAR = 32
"""Letters of what stands for a value in a page of help."""


def one_of(field: str, known: Iterable[str]) -> Callable[[str | None], str | None]:
    """Make a callback that refuses a name before torch is imported, which takes seconds."""

    def check(value: str | None) -> str | None:
        if value is not None:
            check_choice(field, value, known)
        return value

    return check


def _check_preset(name: str | None) -> str | None:
    if name is not None:
        check_preset(name)
    return name


def _check_device_name(name: str | None) -> str | None:
    if name is not None and not re.fullmatch(r"cpu|mps|cuda(:[0-9]{1,3})?", name):
        raise ArbError(f"no device is named `{name}`", hint="use `cpu`, `cuda`, or `mps` on a Mac")
    return name


def check_device(name: str | None) -> str | None:
    """Refuse a device before torch is imported, as far as that can be told without it.

    Raises:
        ArbError: no device has this name, or there is no driver of a GPU.
    """
    _check_device_name(name)
    if name is not None and name.startswith("cuda") and not may_have_gpu():
        raise no_cuda_device(name)
    return name


def _check_backend(name: str | None) -> str | None:
    one_of("backend", BACKENDS)(name)
    if name == "triton" and not may_have_gpu():
        raise no_gpu_for_triton("cpu")
    return name


def _check_run_backend(name: str | None) -> str | None:
    _check_backend(name)
    if name == "interpreter" and find_spec("triton") and os.environ.get(INTERPRET) != "1":
        raise interpreter_not_asked_for()
    return name


def _checked(name: str, setting: Setting, *, splits: bool) -> Callable[[Any], Any]:
    """Make a callback that refuses a value while options are read, before torch is imported."""

    def check(value: Any) -> Any:
        if splits and value is not None:
            value = tuple(value.split(","))
        check_setting(name, value, setting)
        return value

    return check


def option_for(*names: str, callback: Callable | None = None, **changes: Any) -> Any:
    """Make the option of a setting, as the annotation of a parameter.

    Args:
        names: of the field; several where fields share the option.
        callback: checks the value; None checks the choices and the bounds.
        changes: fields of `Setting` that differ for this command.
    """
    first, *others = (replaced(SETTINGS[name], **changes) for name in names)
    setting = first.setting
    kinds = get_args(first.kind) if isinstance(first.kind, UnionType) else (first.kind,)
    kind: Any = next((one for one in (bool, int, float, str) if one in kinds), list[str])
    splits = kind == list[str] and bool(setting.choices)
    words = [word for one in (first, *others) for word in one.setting.words]
    if words:
        setting = dataclasses.replace(setting, choices=tuple(words), also=())
    metavar = setting.metavar
    if setting.choices and metavar is None:
        metavar = "|".join(setting.choices)
        metavar = metavar if len(metavar) <= MOST_METAVAR else first.option[2:].upper()
    said = " ".join(one.setting.help for one in (first, *others))
    said = in_options(said, SETTINGS).replace("`", "")
    return Annotated[
        (str if splits else kind) | None,
        typer.Option(
            first.option,
            help=f"{said} [default: {first.default}]" if first.default else said,
            metavar=metavar,
            callback=callback or _checked(first.name, setting, splits=splits),
            rich_help_panel=setting.group,
        ),
    ]


def _device(callback: Callable[[str | None], str | None]) -> Any:
    return option_for("device", callback=callback)


Device = _device(check_device)
PredictedDevice = _device(_check_device_name)
"""One that need not be here."""
Backend = option_for("backend", callback=_check_run_backend)
VerifiedBackend = option_for("backend", callback=_check_backend)
"""One for whose sake kernels are defined anew."""
PredictedBackend = option_for("backend")
"""One whose device need not be here."""
Seed = option_for("seed")
Field = option_for("field")
ScaleType = option_for("scale_type", default="T32")
ComputeOfRun = option_for(
    "compute",
    choices=("bf16", "fp32"),
    help="Activations.",
    group=RUN,
    default="as the run was trained",
)
HalfWarmup = option_for("warmup", default="half of them")
RuleToCome = option_for(
    "rule",
    choices=FADING,
    help="Rule of later training, which sets the number of levels: 255 with moment, 43 with"
    " nibble.",
    default="",
)
ScaleTypeToCome = option_for("scale_type", default="")
DirectionToCome = option_for(
    "direction", help="Direction of later training, which the state is made for.", default=""
)
KeptIn = Annotated[
    str | None,
    typer.Option(
        "--kv",
        help="Keys and values: bf16, or eight bits as fp8 or int8. With -mixed, the elements of"
        " keys that rotary embedding rotates stay as activations. [default: as activations]",
        metavar="|".join(KEPT_IN),
        callback=one_of("kv", KEPT_IN),
        rich_help_panel=RUN,
    ),
]
NAMED = "auto|RUN|FILE"


NAMES_RUN = "a run, or one of its checkpoints; auto is the run that was started last."
Run = Annotated[
    Path | None, typer.Argument(metavar=NAMED, help=NAMES_RUN[0].upper() + NAMES_RUN[1:])
]
Checkpoint = Annotated[
    Path | None, typer.Option("--checkpoint", metavar=NAMED, help="The same, as an option.")
]
Json = Annotated[
    bool,
    typer.Option("--json", help="Print JSON on stdout, and no table.", rich_help_panel=OUTPUT),
]
Quiet = Annotated[bool, typer.Option("--quiet", help="No progress.", rich_help_panel=OUTPUT)]
BY_HAND = {
    "preset": Annotated[
        str | None,
        typer.Option(
            "--preset",
            metavar="PRESET",
            help="Kind and size of the model. Dense blocks: tiny, small, base or 1b. Compressed"
            " attention: arb-long; with experts and four residual streams: arb-deep-small or"
            " arb-deep. N-grams, codebooks, experts and a graph: arb-tiny or arb-3b. Chunks that"
            " the model finds: hnet-tiny, hnet-small, hnet-base or hnet-two-stage; chunks of 16"
            " bytes: hnet-every, of 32: hnet-long. [default: tiny]",
            callback=_check_preset,
            rich_help_panel=MODEL,
        ),
    ],
    "model_file": Annotated[
        Path | None,
        typer.Option(
            "--model",
            metavar="FILE",
            help="A file with a whole model, as --print-config writes it, instead of a preset."
            " Only --ctx and options of how weights are stored can be combined with it.",
            rich_help_panel=MODEL,
        ),
    ],
    "attention": Annotated[
        str | None,
        typer.Option(
            help="Of dense blocks: dense, or compressed, to entries of several bytes. Of arb-tiny"
            " and arb-3b: latent, or none (--no-attention). [default: the preset's]",
            metavar="|".join(ATTENTIONS + GRAPH_ATTENTIONS),
            callback=one_of("attention", ATTENTIONS + GRAPH_ATTENTIONS),
            rich_help_panel=MODEL,
        ),
    ],
}
"""Options of a model that choose between several fields."""


def takes_settings(*names: str) -> Callable[[Callable], Callable]:
    """Give a command options that set fields, in place of its `**given`, which gets their values.

    Args:
        names: of settings of a run, besides all settings of a model but `weights`.
    """
    sharing: dict[str, list[str]] = {}
    for name in (*(name for name in MODEL_SETTINGS if name != "weights"), *names):
        sharing.setdefault(SETTINGS[name].option, []).append(name)
    options = BY_HAND | {shared[0]: option_for(*shared) for shared in sharing.values()}

    def add(command: Callable) -> Callable:
        signature = inspect.signature(command)
        *own, _ = signature.parameters.values()
        taken = {one.name for one in own}
        added = [
            inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=None, annotation=kind)
            for name, kind in options.items()
            if name not in taken
        ]
        added_to: Any = command
        added_to.__signature__ = signature.replace(parameters=[*own, *added])
        return command

    return add
