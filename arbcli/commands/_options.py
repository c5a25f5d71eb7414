"""Options that several commands share."""

import inspect
from collections.abc import Callable
from functools import wraps
from pathlib import Path
from typing import Annotated, Any

import typer

from arbcli.config.model import PART_OPTIONS

Preset = Annotated[
    str | None,
    typer.Option(
        help="Kind and size of the model: tiny, small, base or 1b, of dense blocks; arb-tiny or"
        " arb-3b, of n-grams, codebooks, experts and a graph. [default: tiny]"
    ),
]
Ctx = Annotated[int | None, typer.Option(min=1, help="Context in bytes. [default: the preset's]")]
TScaleType = Annotated[
    str | None,
    typer.Option(
        "--tscale-type",
        help="How many weights share a scale: T4, T6, T8, T16, T32, T64, T96 or T128."
        " [default: the preset's]",
    ),
]
Rule = Annotated[
    str | None,
    typer.Option(help="Update rule: moment, nibble, carry or votes. [default: the preset's]"),
]
Direction = Annotated[
    str | None,
    typer.Option(help="Of a step: orthogonal, factored or sign. [default: the rule's]"),
]
Backend = Annotated[
    str | None,
    typer.Option(help="triton, torch or interpreter. [default: triton on a GPU, else torch]"),
]
Compute = Annotated[
    str | None,
    typer.Option(
        help="Activations: bf16 or fp32; or fp8, which is bf16 with products in eight bits."
        " [default: bf16 where it is fast]"
    ),
]
Recompute = Annotated[
    bool | None,
    typer.Option("--recompute", help="Compute activations again in the backward: less memory."),
]
Device = Annotated[str | None, typer.Option(help="cpu or cuda. [default: cuda if there is one]")]
Seed = Annotated[int | None, typer.Option(min=0, max=2**31 - 1, help="[default: 0]")]
Checkpoint = Annotated[
    Path, typer.Option(metavar="RUN|FILE", help="A run, or one of its checkpoints.")
]
Json = Annotated[bool, typer.Option("--json", help="Print JSON on stdout and no table.")]
Data = Annotated[
    list[str] | None,
    typer.Option(help="File, folder or glob; may be given again. [default: Python's own source]"),
]
Val = Annotated[
    list[str] | None,
    typer.Option(help="Held-out text. [default: the last tenth of one file, or a tenth of files]"),
]
Dim = Annotated[int | None, typer.Option(min=1, help="Override the preset's width.")]
Layers = Annotated[int | None, typer.Option(min=1, help="Override the preset's blocks.")]
Heads = Annotated[int | None, typer.Option(min=1, help="Override the preset's attention heads.")]
Ffn = Annotated[int | None, typer.Option(min=1, help="Override the preset's MLP width.")]

_PARTS = {
    "attention": (bool, "latent attention in the blocks."),
    "sequencer": (bool, "n-grams beside the embedding."),
    "codebook": (bool, "the shared codebook, which the graph needs."),
    "knowledge_codebook": (bool, "the knowledge codebook."),
    "moe": (bool, "experts that are iterated."),
    "graph": (bool, "the graph of codes."),
    "router": (bool, "the router before the byte head."),
    "memgram": (bool, "a memory of what followed the text's n-grams."),
    "moe_top_k": (int, "experts a position. [default: the preset's]"),
    "max_moe_iters": (int, "iterations over the experts. [default: the preset's]"),
}
"""Fields of a `GraphConfig`: what an option takes, and what it does."""


def takes_parts(command: Callable[..., None]) -> Callable[..., None]:
    """Give a command the options of the parts of `arb-tiny` and `arb-3b`.

    It is called with those that were given as `parts`, a dict of fields of a `GraphConfig`.
    """
    own = [p for p in inspect.signature(command).parameters.values() if p.name != "parts"]
    options = [_part(name, *about) for name, about in _PARTS.items()]

    @wraps(command)
    def with_parts(**given: Any) -> None:
        parts = {name: given.pop(name, None) for name in _PARTS}
        command(**given, parts={k: value for k, value in parts.items() if value is not None})

    every = [*own, *options]
    with_parts.__signature__ = inspect.Signature(every)
    with_parts.__annotations__ = {parameter.name: parameter.annotation for parameter in every}
    return with_parts


def option_of(name: str) -> str:
    """Name the option that a parameter of a command stands for."""
    return PART_OPTIONS.get(name, f"--{name.replace('_', '-')}")


def _part(name: str, kind: type, text: str) -> inspect.Parameter:
    number = {"min": 1} if kind is int else {}
    option = typer.Option(
        PART_OPTIONS[name], help=f"Only with arb-tiny and arb-3b: {text}", **number
    )
    keyword = inspect.Parameter.KEYWORD_ONLY
    return inspect.Parameter(name, keyword, default=None, annotation=Annotated[kind | None, option])
