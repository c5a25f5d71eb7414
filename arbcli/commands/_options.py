"""Options that several commands share."""

import inspect
import re
from collections.abc import Callable, Iterable
from itertools import pairwise
from pathlib import Path
from typing import Annotated, Any

import typer

from arbcli import run_files
from arbcli.config.checks import check_choice
from arbcli.config.file import read_model
from arbcli.config.parts.chunking import BOUNDARIES
from arbcli.config.parts.experts import GATES
from arbcli.config.presets import ATTENTIONS, GRAPH_ATTENTIONS, check_preset
from arbcli.config.short_forms import OUTER_BLOCKS
from arbcli.config.site import SCALE_TYPES
from arbcli.config.training import COMPUTES, train_config
from arbcli.data import check_named
from arbcli.directions import DIRECTIONS
from arbcli.environment import may_have_gpu, no_cuda_device
from arbcli.errors import ArbError
from arbcli.output import note
from arbcli.rules import DIGITS, RULES, VOTES_FIXES

OPTION_OF_FIELD = {
    "model_file": "--model",
    "scale_type": "--tscale-type",
    "sequencer": "--sequencer/--no-sequencer",
    "codebook": "--codebook/--no-codebook",
    "knowledge_codebook": "--knowledge/--no-knowledge",
    "moe": "--moe/--no-moe",
    "graph": "--graph/--no-graph",
    "router": "--router/--no-router",
    "memgram": "--memgram/--no-memgram",
    "shared_expert": "--shared-expert/--no-shared-expert",
    "moe_clamp": "--moe-clamp/--no-moe-clamp",
}
"""Options that are not called as the field of a configuration that they set."""


def option_of(field: str) -> str:
    """Name the option that sets a field of a configuration."""
    return OPTION_OF_FIELD.get(field, f"--{field.replace('_', '-')}")


def in_options(text: str, fields: Iterable[str]) -> str:
    """Rewrite what an error says of fields, `name` or `name=value`, as a command line has it."""
    for field in fields:
        found = re.search(rf"`{field}(?:=(\w+))?`", text)  # the first: a value may be called so
        if found:
            text = f"{text[: found.start()]}`{_with_value(field, found[1])}`{text[found.end() :]}"
    return text


def _with_value(field: str, value: str | None) -> str:
    option, _, off = option_of(field).partition("/")
    if value is None:
        return option_of(field)
    if value == "True":
        return option
    return off or f"{option} {value}"


def given_options(**values: Any) -> dict[str, Any]:
    """Keep the options that were given, by the fields that they set; the others are None."""
    return {field: value for field, value in values.items() if value is not None}


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
"""What keys and values can be kept in."""
BACKENDS = ("triton", "native", "torch", "interpreter")
"""What runs kernels; `arbcli.kernels` has them too, and imports torch."""
REPEATED = ("--data", "--val")
"""Options of several values, which may follow one another: a shell makes them of `*.txt`."""


OPTIONAL = {"--profile": "3", "--attention": "latent"}
"""Options that may stand without a value, which is then this."""
VALUE_OF = {"--profile": "-?[0-9]+", "--attention": "[a-z]+"}
"""What a value of such an option looks like."""
SHORT = {"--no-attention": ("--attention", "none")}
"""Words that stand for others."""


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
    check_named([*given.get("data", ()), *given.get("val", ())])


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


def _split_fixes(names: str | None) -> tuple[str, ...] | None:
    if names is None:
        return None
    fixes = tuple(names.split(","))
    for name in fixes:
        check_choice("votes_fixes", name, VOTES_FIXES)
    return fixes


def _name(field: str, known: Iterable[str], what: str) -> Any:
    """Declare an option that is one of some names, which stand for its value where they are few."""
    choices = "|".join(known)
    metavar = choices if len(choices) <= MOST_METAVAR else field.rpartition("_")[2].upper()
    return Annotated[
        str | None,
        typer.Option(option_of(field), help=what, callback=one_of(field, known), metavar=metavar),
    ]


def _part(field: str, what: str) -> Any:
    """Declare the switch of a part."""
    return Annotated[bool | None, typer.Option(option_of(field), help=what)]


def _number(what: str, min: int) -> Any:
    return Annotated[int | None, typer.Option(help=what, min=min)]


def _size(what: str) -> Any:
    return _number(f"Override the preset's {what}.", min=1)


Backend = _name(
    "backend",
    BACKENDS,
    "triton, native, torch or interpreter. [default: triton on a GPU, native on a CPU with a C"
    " compiler, else torch]",
)
Compute = _name(
    "compute",
    COMPUTES,
    "Activations: bf16 or fp32; or fp8, which is bf16 with products in eight bits; or nvfp4, the"
    " same in four bits, emulated."
    " [default: bf16 where it is fast]",
)
ComputeOfRun = _name(
    "compute",
    ("bf16", "fp32"),
    "Activations: bf16 or fp32. [default: as the run was trained]",
)
KeptIn = _name(
    "kv",
    KEPT_IN,
    "Keys and values: bf16, or in eight bits fp8 or int8; with -mixed, numbers of keys that turn by"
    " position stay as activations. [default: as activations]",
)
Recompute = Annotated[
    bool | None,
    typer.Option("--recompute", help="Compute activations again in the backward: less memory."),
]


def _device(callback: Callable[[str | None], str | None]) -> Any:
    return Annotated[
        str | None,
        typer.Option(
            metavar="cpu|cuda|mps", help="[default: cuda if there is one]", callback=callback
        ),
    ]


Device = _device(check_device)
PredictedDevice = _device(_check_device_name)
"""One that need not be here."""
Seed = Annotated[int | None, typer.Option(min=0, max=2**31 - 1, help="[default: 0]")]
Checkpoint = Annotated[
    Path,
    typer.Option(
        metavar="auto|RUN|FILE",
        help="A run, or one of its checkpoints; auto is the run that was started last.",
    ),
]
Json = Annotated[bool, typer.Option("--json", help="Print JSON on stdout and no table.")]
Data = Annotated[
    list[str] | None,
    typer.Option(
        help="File, folder or glob; may be given again, and all with weights, as a.txt:0.7."
        " .gz, .zst and .parquet are unpacked. [default: Python's own source]"
    ),
]
Field = Annotated[
    str | None,
    typer.Option(metavar="FIELD", help="Field of .jsonl or .parquet files that has the text."),
]
Tokens = Annotated[
    str | None,
    typer.Option(
        "--tokenizer", metavar="FILE", help="A tokenizer.json: read tokens, and not bytes."
    ),
]
Val = Annotated[
    list[str] | None,
    typer.Option(help="Held-out text. [default: the last tenth of one file, or a tenth of files]"),
]
Batch = Annotated[int | None, typer.Option(min=1, help="Windows a batch. [default: 16]")]
Accum = Annotated[int | None, typer.Option(min=1, help="Batches a step. [default: 1]")]
ScaleType = _name(
    "scale_type",
    SCALE_TYPES,
    "How many weights share a scale: T4, T6, T8, T16, T32, T64, T96 or T128."
    " [default: the preset's]",
)

MODEL = {
    "preset": Annotated[
        str | None,
        typer.Option(
            metavar="PRESET",
            help="Kind and size of the model: tiny, small, base or 1b, of dense blocks; arb-long,"
            " of these with compressed attention; arb-deep-small or arb-deep, of compressed"
            " attention and experts on four streams; arb-tiny or arb-3b, of n-grams, codebooks,"
            " experts and a graph; hnet-tiny, hnet-small, hnet-base"
            " or hnet-two-stage, which find chunks of their own; hnet-every, of chunks of 16 bytes."
            " [default: tiny]",
            callback=_check_preset,
        ),
    ],
    "model_file": Annotated[
        Path | None,
        typer.Option(
            "--model",
            metavar="FILE",
            help="Instead of a preset: the whole model of a file, as --print-config writes it."
            " Only --ctx and how weights are stored can be given with it.",
        ),
    ],
    "ctx": Annotated[
        int | None, typer.Option(min=1, help="Context in bytes. [default: the preset's]")
    ],
    "scale_type": ScaleType,
    "rule": _name("rule", RULES, f"Update rule: {', '.join(RULES)}. [default: the preset's]"),
    "digits": _name(
        "digits",
        DIGITS,
        "What a weight is: the trit, or all digits that the rule stores, which learns better in the"
        " same memory; or fade: all at first and the trit at the end. [default: trit]",
    ),
    "votes_fixes": Annotated[
        str | None,
        typer.Option(
            help=f"Of the rule votes, with commas between them: {', '.join(VOTES_FIXES)}."
            " [default: none]",
            callback=_split_fixes,
            metavar="FIXES",
        ),
    ],
    "direction": _name(
        "direction", DIRECTIONS, f"Of a step: {', '.join(DIRECTIONS)}. [default: the rule's]"
    ),
    "dim": _size("width"),
    "layers": _size("blocks"),
    "heads": _size("attention heads"),
    "key_heads": _number(
        "Only with tiny, small, base and 1b: heads of keys and values, each of which serves as many"
        " heads of queries. [default: as many as heads]",
        min=1,
    ),
    "ffn": _size("MLP width"),
    "streams": _number(
        "Residual streams of the innermost stage, mixed by hyper-connections: 1, 2, 4 or 8;"
        " codebooks and routers read one. [default: 1]",
        min=1,
    ),
    "experts": _number(
        "Experts of a block of the innermost stage, each as wide as --ffn, instead of its MLP; of"
        " presets with a graph, experts that are iterated. [default: the preset's]",
        min=1,
    ),
    "top_k_experts": _number(
        "Experts that a position uses; of presets with a graph the same as --moe-top-k."
        " [default: the preset's, or 2]",
        min=1,
    ),
    "moe_gate": _name(
        "moe_gate",
        GATES,
        "How experts are chosen: softmax or softplus, by scores of what they are weighed by; hash,"
        " by the last three bytes. [default: softmax]",
    ),
    "hash_layers": _number(
        "First blocks of the innermost stage that choose experts by a hash. [default: the"
        " preset's]",
        min=0,
    ),
    "shared_expert": _part("shared_expert", "One more expert, which every position goes to."),
    "moe_clamp": _part("moe_clamp", "Bounds of 10 on what the experts' gates let in."),
    "attention": _name(
        "attention",
        ATTENTIONS + GRAPH_ATTENTIONS,
        "Of dense blocks: dense, or compressed, to entries of several bytes; of arb-tiny and"
        " arb-3b: latent or none (--no-attention). [default: the preset's]",
    ),
    "window": _number(
        "Last bytes that compressed attention sees as they are, or that outer blocks of hnet"
        " presets see. [default: the preset's]",
        min=1,
    ),
    "top_k": _number(
        "Entries that compressed attention chooses, or rows that a codebook's head reads."
        " [default: the preset's]",
        min=1,
    ),
}
"""Options of every model, by the fields that they set."""
GRAPH_PARTS = {
    "sequencer": _part("sequencer", "N-grams beside the embedding."),
    "codebook": _part("codebook", "The shared codebook, which the graph needs."),
    "knowledge_codebook": _part("knowledge_codebook", "The knowledge codebook."),
    "moe": _part("moe", "Experts that are iterated."),
    "graph": _part("graph", "The graph of codes."),
    "router": _part("router", "The router before the byte head."),
    "memgram": _part("memgram", "A memory of what followed the text's n-grams."),
    "moe_top_k": _number("Experts a position. [default: the preset's]", min=1),
    "max_moe_iters": _number("Iterations over the experts. [default: the preset's]", min=1),
}
"""Options that only the presets with a graph have."""
HNET_PARTS = {
    "boundaries": _name(
        "boundaries",
        BOUNDARIES,
        "Where chunks begin: learned, every (so many bytes) or space (after one)."
        " [default: learned]",
    ),
    "chunk_length": _number(
        "Positions of a chunk on average, at every stage. [default: the preset's]", min=2
    ),
    "outer_blocks": _name(
        "outer_blocks",
        OUTER_BLOCKS,
        "Only with hnet presets: what encoders and decoders are made of, attention (in a window) or"
        " mamba (Mamba-2). [default: attention]",
    ),
}
"""Options that only the presets with chunks have."""


def takes_model(first: str = "") -> Callable[[Callable], Callable]:
    """Give a command the options of a model, in place of its `**model`, which they are handed to.

    Args:
        first: names of parameters that pages of help show before others, in this order.
    """

    def add(command: Callable) -> Callable:
        signature = inspect.signature(command)
        *own, _ = signature.parameters.values()
        added = [
            inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=None, annotation=kind)
            for name, kind in (MODEL | GRAPH_PARTS | HNET_PARTS).items()
        ]
        named = {param.name: param.replace(kind=added[0].kind) for param in (*added, *own)}
        order = dict.fromkeys((*first.split(), *named))
        added_to: Any = command
        added_to.__signature__ = signature.replace(parameters=[named[name] for name in order])
        return command

    return add
