"""Options that several commands share."""

from pathlib import Path
from typing import Annotated

import typer

Preset = Annotated[
    str | None, typer.Option(help="Size of the model: tiny, small, base or 1b. [default: tiny]")
]
Ctx = Annotated[int | None, typer.Option(min=1, help="Context in bytes. [default: the preset's]")]
TScaleType = Annotated[
    str | None,
    typer.Option(
        "--tscale-type",
        help="How many weights share a scale: T4, T6, T8, T16, T32, T64, T96 or T128."
        " [default: T32]",
    ),
]
Rule = Annotated[
    str | None,
    typer.Option(help="Update rule: moment, nibble, carry or votes. [default: moment]"),
]
Direction = Annotated[
    str | None,
    typer.Option(help="Of a step: orthogonal, factored or sign. [default: the rule's]"),
]
Backend = Annotated[
    str | None,
    typer.Option(help="triton, torch or interpreter. [default: triton on a GPU, else torch]"),
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
