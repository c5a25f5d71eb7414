"""`arb import`: conversion of a Hugging Face model to quantised weights that can be trained."""

import re
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Group
from rich.table import Table

from arbcli.base.errors import ArbError
from arbcli.base.output import LiveLine, bytes_text, emit, note, table, write_bytes
from arbcli.base.run_files import RUNS, TOKENIZER
from arbcli.commands._options import (
    AttentionRuleToCome,
    DirectionToCome,
    Json,
    MLPRuleToCome,
    RuleToCome,
    ScaleTypeToCome,
)
from arbcli.commands._outputs import check_folder
from arbcli.config.model import VOCABULARY
from arbcli.config.model_file import model_lines
from arbcli.config.training import spelled_out
from arbcli.interop.huggingface.config_json import model_name, read_folder_config

if TYPE_CHECKING:
    from arbcli.interop.importing import ImportReport, TensorReport


def import_model(
    folder: Annotated[
        Path,
        typer.Argument(
            metavar="DIR",
            help="Model folder of Transformers: config.json, safetensors, tokenizer.json.",
        ),
    ],
    out: Annotated[
        Path | None, typer.Option(help="Run to create. [default: runs/imported-NAME]")
    ] = None,
    rule: RuleToCome = "moment",
    attention_rule: AttentionRuleToCome = None,
    mlp_rule: MLPRuleToCome = None,
    scale_type: ScaleTypeToCome = None,
    direction: DirectionToCome = "muon",
    ignore_field: Annotated[
        list[str] | None,
        typer.Option(
            metavar="NAME",
            help="Field of config.json that arb does not know and that decides nothing. Repeat it"
            " for several.",
        ),
    ] = None,
    print_config: Annotated[
        bool,
        typer.Option("--print-config", help="Print the model as TOML without reading weights."),
    ] = False,
    as_json: Json = False,
) -> None:
    """Convert a Llama, Mistral, Qwen 2, Qwen 3 or BitNet model to a run: `arb import DIR`.

    Weights are quantised to int8, unless they are trits; `arb train --init-from` trains them
    further.
    """
    if not folder.is_dir():
        raise ArbError(f"`{folder}` is not a folder", hint="name a folder with `config.json` in it")
    storage = spelled_out({"rule": rule, "scale_type": scale_type, "direction": direction})
    storage |= {"attention_rule": attention_rule, "mlp_rule": mlp_rule}
    ignored = ignore_field or ()
    config = read_folder_config(folder, ignored, **storage, digits="all")
    if print_config:
        write_bytes("".join(f"{line}\n" for line in model_lines(config)).encode())
        return
    if out is not None:
        check_folder(out, "--out")
    run = out or RUNS / f"imported-{model_name(folder).rpartition('/')[2]}"
    from arbcli.interop import importing

    with LiveLine() as line:
        report = importing.import_folder(
            folder, run, **storage, ignored=ignored, on_read=line.show_wait
        )
    emit(report, _tables(report), as_json=as_json)
    if report.vocabulary != VOCABULARY and not (run / TOKENIZER).exists():
        note(f"`{folder}` has no `{TOKENIZER}`: copy one to `{report.run}` to read text")
    if not as_json:
        note(f"continue with `arb train --init-from {report.run}`")


def _tables(report: "ImportReport") -> Group:
    shown = asdict(report) | {
        "bytes": bytes_text(report.bytes),
        "ctx": f"{report.ctx:,}",
        "num_weights": f"{report.num_weights:,}",
        "vocabulary": f"{report.vocabulary:,}",
        "relative_error": f"{report.relative_error:.3%}",
        "seconds": f"{report.seconds:.1f}",
    }
    del shown["tensors"]
    rows = [[key.replace("num_", "").replace("_", " "), str(v)] for key, v in shown.items()]
    return Group(_tensor_table(report), table(f"Imported {report.model_type}", ["", ""], rows))


def _tensor_table(report: "ImportReport") -> Table:
    """Lay out the tensors; those of equal layers share a row."""
    alike: dict[str, list[TensorReport]] = {}
    for tensor in report.tensors:
        alike.setdefault(re.sub(r"\b[0-9]+\b", "*", tensor.name), []).append(tensor)
    rows = [
        [
            name,
            f"{len(tensors):,}",
            f"{max(tensor.relative_error for tensor in tensors):.3%}",
            f"{max(tensor.largest for tensor in tensors):.1f}",
            f"{sum(tensor.outliers for tensor in tensors):,}",
        ]
        for name, tensors in alike.items()
    ]
    columns = ["tensor", "number", "off by", "largest, in rms", "outliers"]
    return table("Rounded", columns, rows)
