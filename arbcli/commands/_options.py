"""Options that several commands share."""

import dataclasses
import inspect
import os
import re
from collections.abc import Callable, Collection, Iterable, Sequence
from itertools import pairwise
from pathlib import Path
from types import UnionType
from typing import TYPE_CHECKING, Annotated, Any, get_args

import typer

from arbcli.base import run_files
from arbcli.base.environment import may_have_gpu, no_cuda_device
from arbcli.base.errors import ArbError, quoted
from arbcli.base.lazy import imported
from arbcli.base.output import note
from arbcli.base.reading import MAX_FILE_BYTES, check_regular, open_regular, parse_json
from arbcli.commands._help import show_all
from arbcli.config.file import read_assignments, read_model
from arbcli.config.model import CACHE_DTYPES, ModelConfig
from arbcli.config.presets import ATTENTIONS, check_preset, config_from_dict
from arbcli.config.settings import (
    MODEL,
    OUTPUT,
    RUN,
    Setting,
    check_choice,
    check_setting,
    replaced,
)
from arbcli.config.short_forms import ARGUMENTS, MODEL_SETTINGS
from arbcli.config.training import FIELDS, SETTINGS, option_words, resolve_names, train_config
from arbcli.data import files
from arbcli.data.conversion import check_records
from arbcli.data.text import check_is_bytes
from arbcli.families import MEDIA, medium_of
from arbcli.families.graph.presets import ATTENTIONS as GRAPH_ATTENTIONS
from arbcli.model.rules import FADING

if TYPE_CHECKING:
    import torch

    from arbcli.model.language_model import LanguageModel

MANUAL_NAMES = {"model_file": "--model", "fields": "--set"}
"""Options that set no field of their own name."""


def option_of(field: str) -> str:
    """Return the option that sets a field, with its negation after a `/` if it has one."""
    if field in SETTINGS:
        return SETTINGS[field].option
    return MANUAL_NAMES.get(field, f"--{field.replace('_', '-')}")


def quoted_options(fields: Iterable[str]) -> str:
    """Return the options that set some fields, each once, for a message."""
    return quoted(dict.fromkeys(map(option_of, fields)))


def refuse_kept(names: Collection[str], otherwise: str) -> None:
    """Refuse settings that a saved model keeps.

    Args:
        names: settings that were given, of those that it keeps.
        otherwise: alternative to leaving them out, for the hint.

    Raises:
        ArbError: there are any.
    """
    if names:
        options = quoted_options(names)
        raise ArbError(
            f"a saved model keeps its own settings, so {options} cannot be changed",
            f"leave {options} out, or {otherwise}",
        )


def replace_fields(text: str, fields: Iterable[str]) -> str:
    """Replace quoted fields of an error, `name` or `name=value`, by command-line options."""
    for field in fields:
        text = re.sub(rf"`{field}=(\w+)`", lambda match: _quoted_option(field, match[1]), text)  # noqa: B023
        has_option = field in ("attention", *SETTINGS) or field not in {*ARGUMENTS, *FIELDS}
        option = option_of(field) if has_option else f"--set {field}"
        # only the first one: a later one may be a value of the same spelling
        text = text.replace(f"`{field}`", f"`{option}`", 1)
    return text


def _quoted_option(field: str, value: str) -> str:
    option, _, off = option_of(field).partition("/")
    if value == "True":
        return f"`{option}`"
    words = option_words(option) if field in SETTINGS and SETTINGS[field].setting.words else {}
    word = next((word for word, sets in words.items() if sets.get(field) == value), value)
    return f"`{off or f'{option} {word}'}`"


def given_options(**values: Any) -> dict[str, Any]:
    """Return the options that were given (not None), by the fields that they set."""
    values = {field: value for field, value in values.items() if value is not None}
    assigned, fields = read_assignments(values.pop("assignments", ()))
    settings = resolve_names(values)
    for name, value in resolve_names(assigned).items():
        if name in ("device", "backend") or settings.get(name, value) != value:
            raise ArbError(
                f"`--set {name}` does not combine with {quoted_options([name])}",
                f"give {quoted_options([name])} alone",
            )
        settings[name] = value
    return settings | ({"fields": fields} if fields else {})


def expand_model_file(settings: dict[str, Any]) -> dict[str, Any]:
    """Replace `model_file`, the path of `--model`, by `preset` with the model that it describes.

    Raises:
        ArbError: `--preset` is given too, or the file does not describe a model.
    """
    settings = dict(settings)
    path = settings.pop("model_file", None)
    if path is None:
        return settings
    if settings.get("preset") is not None:
        raise ArbError("`--model` and `--preset` both name a model", "give one of them")
    return settings | {"preset": read_model(path)}


REPEATED = ("--data", "--val")
"""Options that accept several values in a row, as a shell expands `*.txt` to."""
OPTIONAL = {"--profile": "3", "--attention": "latent"}
"""Options whose value may be omitted, with its default."""
VALUE_OF = {"--profile": "-?[0-9]+", "--attention": "[a-z]+"}
"""Patterns of the values of `OPTIONAL`."""
SHORT = {"--no-attention": ("--attention", "none")}
"""Abbreviations, with the arguments that they expand to."""
RENAMED: dict[str, tuple[str, dict[str, str]]] = {
    "--digits": ("--weights", {"trit": "ternary", "all": "int8", "fade": "anneal"}),
    "--direction": ("--optimizer", {"orthogonal": "muon", "factored": "adafactor"}),
    "--wire": ("--reduce-dtype", {}),
}
"""Options of version 0.1, each with its new name and new values; to be removed in version 0.3."""


def rename_options(words: list[str]) -> list[str]:
    """Replace options of version 0.1 by the present ones, with a note on stderr."""
    if words[:1] == ["generate"]:  # it never had them, and a prompt may be such a word
        return words
    renamed_words: list[str] = []
    if {"--digits", "--weights"} <= {*words}:
        place = words.index("--weights")
        if words[place + 1 : place + 2] != ["ternary"]:
            raise ArbError("`--digits` is part of `--weights` now", "give `--weights` alone")
        words = words[:place] + words[place + 2 :]
    for number, word in enumerate(words):
        if renamed_words[-1:] and (renamed := RENAMED.get(words[number - 1])):
            word = renamed[1].get(word, word)
            note(f"`{words[number - 1]} {words[number]}` is now `{renamed[0]} {word}`")
        option, equals, value = word.partition("=")
        if option in RENAMED:
            now, values = RENAMED[option]
            word = f"{now}{equals}{values.get(value, value)}"
            if equals:
                note(f"`{option}={value}` is now `{word}`")
        renamed_words.append(word)
    return renamed_words


def fill_options(words: list[str]) -> list[str]:
    """Expand `SHORT`, and add omitted values, as Typer does not support optional ones.

    Raises:
        ArbError: `--bytes` of `arb generate` is followed by a number.
    """
    expanded: list[str] = []
    takes_text = words[:1] == ["generate"]  # it has none of them, and a prompt may be such a word
    for word, following in pairwise([*words, ""]):
        if word == "--bytes" and following.isdecimal() and not Path(following).exists():
            raise ArbError("`--bytes` takes no number", f"use `--length {following}`")
        expanded += (word,) if takes_text else SHORT.get(word, (word,))
        if word in OPTIONAL and not takes_text and not re.fullmatch(VALUE_OF[word], following):
            expanded.append(OPTIONAL[word])
    return expanded


def repeat_options(words: list[str]) -> list[str]:
    """Expand `--data a.txt b.txt` to `--data a.txt --data b.txt`, the form that Typer parses.

    Raises:
        ArbError: there are several `--plot`, of which Typer would take the last.
    """
    if sum(word.partition("=")[0] == "--plot" for word in words) > 1:
        raise ArbError("`--plot` is given twice", "name one file")
    expanded: list[str] = []
    option, values = None, 0
    for word in words:
        if word.startswith("-") and word != "-":
            option, values = (word if word in REPEATED else None), 0
        elif option is not None:
            values += 1
            if values > 1:
                expanded.append(option)
        expanded.append(word)
    return expanded


def one_path(run: Path | None, checkpoint: Path | None) -> Path:
    """Return the path that either the argument or `--checkpoint` gives.

    Raises:
        ArbError: neither or both were given.
    """
    if run is not None and checkpoint is not None:
        raise ArbError(f"`{run}` and `--checkpoint` both name a model", "give one of them")
    if path := run or checkpoint:
        return path
    raise ArbError(
        "no saved model is named",
        "name a run or a checkpoint, or `auto` for the run that was started last",
    )


def find_run(path: Path, root: Path | None = None, *, loads: bool = False) -> Path:
    """Resolve `auto` to the latest run, and check that any other path exists.

    The check needs no torch, whose import takes seconds.

    Args:
        path: `auto`, a run or a saved file.
        root: directory of the runs; None is `runs`.
        loads: whether a checkpoint is to be loaded, so that a directory must have one.

    Raises:
        ArbError: the path does not exist, or has no checkpoint.
    """
    if str(path) == "auto":
        path = run_files.latest_run(root or run_files.RUNS)
        note(f"auto is `{path}`")
    elif not path.exists():
        raise ArbError(f"there is no run at `{path}`", "name a run, or a file that was saved")
    elif loads and path.is_dir() and not run_files.checkpoints(path):
        raise run_files.missing_checkpoint(path)
    elif loads and not path.is_dir():
        check_is_model(path)
    return path


def config_in_header(path: Path) -> ModelConfig | None:
    """Read a model's configuration from the header of its checkpoint, without a checksum.

    Args:
        path: a checkpoint, or a run, whose newest checkpoint is read.

    Returns:
        The configuration; None if it cannot be read, as loading the model reports the reason.
    """
    try:
        file = run_files.checkpoints(path)[0] if path.is_dir() else path
        with open_regular(file) as source:
            size = int.from_bytes(source.read(8), "little")
            header = parse_json(source.read(min(size, MAX_FILE_BYTES)))
        return config_from_dict(parse_json(header["__metadata__"]["arb"].encode())["config"])
    except (ArbError, ValueError, TypeError, LookupError, AttributeError):
        return None


def open_model(
    path: Path, device: str | None, backend: str | None, compute: str | None
) -> "tuple[LanguageModel, str, torch.device, str]":
    """Load the model of a run or a checkpoint for the options of a command.

    Returns:
        The model, the path of its checkpoint, its device and the backend.

    Raises:
        ArbError: the checkpoint is missing or damaged, or this machine lacks the device or backend.
    """
    from arbcli.generation.load import load_named_model  # torch takes seconds to import
    from arbcli.kernels.runtime.device import resolve_backend, resolve_device

    torch_device = resolve_device(device)
    backend = resolve_backend(backend, torch_device)
    return *load_named_model(path, torch_device, note, compute), torch_device, backend


def check_is_model(path: Path) -> None:
    """Check that a folder has a checkpoint, or that a file has the header of a saved model.

    Raises:
        ArbError: `path` is neither a run nor a checkpoint nor an export.
    """
    if path.is_dir():
        if not any(path.glob("*.safetensors*")):
            raise run_files.missing_checkpoint(path)
        return
    with open_regular(path) as file:
        head = file.read(9)
    # the JSON header of a safetensors file follows its 8-byte length
    if not head.startswith(b"GGUF") and head[8:] != b"{":
        raise ArbError(f"`{path}` is not a saved model", "name a run, a checkpoint or an export")


def check_settings(settings: dict[str, Any]) -> None:
    """Check that the settings of a run are consistent, before torch is imported.

    Args:
        settings: fields of `TrainConfig` and of the preset's model, without device and backend.

    Raises:
        ArbError: settings are incompatible, or a file does not exist.
    """
    machine = {"device": "cpu", "backend": "torch"}
    train_config(**{"preset": "tiny", "compute": "bf16"} | settings | machine)
    if settings.get("tokenizer"):
        check_regular(Path(settings["tokenizer"]))
    if settings.get("teacher"):
        find_run(Path(settings["teacher"]), loads=True)
    files.check_weights(settings.get("data", ()))
    check_texts(settings)


def check_texts(settings: dict[str, Any]) -> None:
    """Check that the files of `data` and `val` exist, and that other settings suit them."""
    entries = [*settings.get("data", ()), *settings.get("val", ())]
    check_entries(
        entries,
        settings.get("field"),
        settings.get("data_format"),
        has_tokenizer=settings.get("tokenizer") is not None,
    )
    media = {kind: settings[kind] for kind in MEDIA if settings.get(kind)}
    names = [files.weight_of(entry)[0] for entry in entries]
    if not media or any(name == files.STDIN or name.startswith(files.HUB) for name in names):
        return
    paths = files.find_files(names, [], files.Conversion(**media)) if names else []
    if any(map(files.may_have_records, paths)):
        return
    for kind in media.keys() - {medium_of(path.name) for path in paths}:
        raise ArbError(f"`--{kind}` only applies to {kind}s, and the data has none", "leave it out")


def check_entries(
    entries: Sequence[str],
    field: str | None,
    data_format: str | None,
    *,
    has_tokenizer: bool = True,
) -> None:
    """Check that texts exist, that options suit them, and that their packages are installed.

    Raises:
        ArbError: a file is missing or empty, has records whose fields `field` does not name, or is
            a shard that cannot be read.
    """
    files.check_packages(field)
    files.check_named(entries, None if files.has_documents(field) else field)
    if field is None:
        check_records(entries)
    named = [Path(os.path.expanduser(files.weight_of(entry)[0])) for entry in entries]
    if data_format and not any(
        files.may_be_shard(path, None) or not path.is_file() for path in named
    ):
        raise ArbError("`--data-format` only applies to .bin files", "leave it out")
    for path in named:
        if files.may_be_shard(path, data_format) and path.is_file():
            _, width = imported("arbcli.data.shards:shard_layout")(path, data_format)
            if not has_tokenizer:
                check_is_bytes(width)


UNITS = {"": 1, "b": 1} | {
    f"{prefix}{infix}b": (1024 if infix else 1000) ** power
    for power, prefix in enumerate("kmgt", 1)
    for infix in ("", "i")
}
UNITS |= {prefix: 1024**power for power, prefix in enumerate("kmgt", 1)}


def read_budget(budget: str) -> int:
    """Read a number of bytes: `6GiB`, `6G`, `4GB`.

    Raises:
        ArbError: it is none.
    """
    match = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([a-z]*)\s*", budget.lower())
    unit = UNITS.get(match[2]) if match else None
    if match is None or not unit:
        raise ArbError(f"`--budget` is `{budget}`", "use a number and a unit, such as `6GiB`")
    return int(float(match[1]) * unit)


MAX_METAVAR = 32
"""Maximum length of a value's placeholder in a help page."""


def _if_given(check: Callable[[str], None]) -> Callable[[str | None], str | None]:
    """Return a callback that checks the value of an option, unless it was left out."""

    def callback(value: str | None) -> str | None:
        if value is not None:
            check(value)
        return value

    return callback


def one_of(field: str, known: Iterable[str]) -> Callable[[str | None], str | None]:
    """Return a callback that refuses unknown names before torch is imported."""
    return _if_given(lambda value: check_choice(field, value, known))


def _check_device_name(name: str) -> None:
    if not re.fullmatch(r"cpu|mps|cuda(:[0-9]{1,3})?", name):
        raise ArbError(f"no device is named `{name}`", "use `cpu`, `cuda`, or `mps` on a Mac")


def check_device(name: str) -> None:
    """Check the name of a device, and that a GPU's driver is installed, without torch.

    Raises:
        ArbError: the name is unknown, or there is no GPU driver.
    """
    _check_device_name(name)
    if name.startswith("cuda") and not may_have_gpu():
        raise no_cuda_device(name)


def _checked(name: str, setting: Setting, *, splits: bool) -> Callable[[Any], Any]:
    """Return a callback that validates a value while options are parsed."""

    def check(value: Any) -> Any:
        if splits and value is not None:
            value = tuple(value.split(","))
        check_setting(name, value, setting)
        return value

    return check


def option_for(*names: str, callback: Callable | None = None, **changes: Any) -> Any:
    """Return the annotation of a parameter that is the option of a setting.

    Args:
        names: field of the setting; several if fields share the option.
        callback: validates the value; None checks choices and bounds of the setting.
        changes: fields of `Setting` to replace for this command.
    """
    first, *others = (replaced(SETTINGS[name], **changes) for name in names)
    setting = first.setting
    kinds = get_args(first.kind) if isinstance(first.kind, UnionType) else (first.kind,)
    kind: Any = next((type_ for type_ in (bool, int, float, str) if type_ in kinds), list[str])
    splits = kind == list[str] and bool(setting.choices)
    words = [word for setting_field in (first, *others) for word in setting_field.setting.words]
    if words:
        setting = dataclasses.replace(setting, choices=tuple(words), also=())
    metavar = setting.metavar
    if setting.choices and metavar is None:
        metavar = "|".join(setting.choices)
        metavar = metavar if len(metavar) <= MAX_METAVAR else first.option[2:].upper()
    text = " ".join(setting_field.setting.help for setting_field in (first, *others))
    text = replace_fields(text, SETTINGS).replace("`", "")
    return Annotated[
        (str if splits else kind) | None,
        typer.Option(
            first.option,
            help=f"{text} [default: {first.default}]" if first.default else text,
            metavar=metavar,
            callback=callback or _checked(first.name, setting, splits=splits),
            rich_help_panel=setting.group,
        ),
    ]


Device = option_for("device", callback=_if_given(check_device))
PredictedDevice = option_for("device", callback=_if_given(_check_device_name))
"""A device that need not exist on this machine."""
Backend = option_for("backend")
Seed = option_for("seed")
Field = option_for("field")
DataFormat = option_for("data_format")
ScaleType = option_for("scale_type", default="T32")
ComputeOfRun = option_for(
    "compute",
    choices=("bf16", "fp32"),
    help="Dtype of activations.",
    group=RUN,
    default="as the run was trained",
)
HalfWarmup = option_for("warmup", default="half of --steps")
RuleToCome = option_for(
    "rule",
    choices=FADING,
    help="Update rule for later training. It sets the number of levels: 255 with moment, 43 with"
    " nibble.",
    default="moment, or nibble if only that fits --budget",
)
AttentionRuleToCome = option_for("attention_rule", choices=FADING, help="Rule of attention.")
MLPRuleToCome = option_for(
    "mlp_rule",
    choices=FADING,
    help="Rule of MLPs. With nibble they take 1.26 bytes per weight, with moment 2.26.",
)
ScaleTypeToCome = option_for("scale_type", default="T128 for trits, T32 for int8")
DirectionToCome = option_for("direction", help="Default optimizer for later training.", default="")
CacheDtype = Annotated[
    str | None,
    typer.Option(
        "--kv",
        help="Storage of keys and values: bf16, or eight bits as fp8 or int8. With -mixed, the"
        " elements of keys that rotary embedding rotates keep the dtype of activations. [default:"
        " that of activations]",
        metavar="|".join(CACHE_DTYPES),
        callback=one_of("kv", CACHE_DTYPES),
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
    bool, typer.Option("--json", help="Print JSON on stdout, and no table.", rich_help_panel=OUTPUT)
]
Quiet = Annotated[bool, typer.Option("--quiet", help="Hide progress.", rich_help_panel=OUTPUT)]
MANUAL_OPTIONS = {
    "preset": Annotated[
        str | None,
        typer.Option(
            "--preset",
            metavar="PRESET",
            help="Model: tiny (3 million weights), small (11), base (85), 1b, or of another kind,"
            " such as arb-long or hnet-base. Dense blocks: tiny, small, base or 1b. Compressed"
            " attention: arb-long; with experts and four residual streams: arb-deep-small or"
            " arb-deep. N-grams, codebooks, experts and a graph: arb-tiny or arb-3b. Dynamic"
            " chunks: hnet-tiny, hnet-small, hnet-base or hnet-two-stage; chunks of 32 bytes:"
            " hnet-every or hnet-long, of 128: hnet-code. [default: tiny]",
            callback=_if_given(check_preset),
            rich_help_panel=MODEL,
        ),
    ],
    "model_file": Annotated[
        Path | None,
        typer.Option(
            "--model",
            metavar="FILE",
            help="TOML file of the model, as --print-config writes it, instead of a"
            " preset. Only --ctx and options for the storage of weights can be combined with it.",
            rich_help_panel=MODEL,
        ),
    ],
    "assignments": Annotated[
        list[str] | None,
        typer.Option(
            "--set",
            metavar="FIELD=VALUE",
            help="Set any setting, or a field of the model by path: bound=10. Repeat it for"
            " several. A field is set in all parts that have it: attention.window=64 in those of"
            " one kind, stages.0.contribution=0.5 in the outermost stage.",
            rich_help_panel=MODEL,
        ),
    ],
    "help_all": Annotated[
        bool | None,
        typer.Option(
            "--help-all", is_eager=True, callback=show_all, help="Show all options and exit."
        ),
    ],
    "attention": Annotated[
        str | None,
        typer.Option(
            help="Kind of attention. Dense blocks: dense, or compressed, to entries of several"
            " bytes. arb-tiny, arb-3b: latent, or none (--no-attention). [default: the preset's]",
            metavar="|".join(ATTENTIONS + GRAPH_ATTENTIONS),
            callback=one_of("attention", ATTENTIONS + GRAPH_ATTENTIONS),
            rich_help_panel=MODEL,
        ),
    ],
}
"""Options of a model that set more than one field."""


def takes_settings(
    *names: str, rare: Collection[str] = (), heading: str = "Options"
) -> Callable[[Callable], Callable]:
    """Return a decorator that gives a command one option for each setting.

    The command receives their values in its `**settings`.

    Args:
        names: settings of a run to add; those of a model are always added, but for `weights`.
        rare: parameters of the command that only the complete help page shows, besides settings
            that are not common.
        heading: heading of the command's own options that name none.
    """
    sharing: dict[str, list[str]] = {}
    for name in (*(name for name in MODEL_SETTINGS if name != "weights"), *names):
        sharing.setdefault(SETTINGS[name].option, []).append(name)
    rare = {"attention", *rare}
    rare |= {f[0] for f in sharing.values() if not any(SETTINGS[n].setting.common for n in f)}
    options = MANUAL_OPTIONS | {fields[0]: option_for(*fields) for fields in sharing.values()}

    def add(command: Callable) -> Callable:
        signature = inspect.signature(command)
        *parameters, _ = signature.parameters.values()
        names_of_command = {parameter.name for parameter in parameters}
        added = [
            inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=None, annotation=kind)
            for name, kind in options.items()
            if name not in names_of_command
        ]
        result: Any = command
        result.rare_options, result.heading = frozenset(rare), heading
        result.__signature__ = signature.replace(parameters=[*parameters, *added])
        return command

    return add
