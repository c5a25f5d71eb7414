"""`arb import`: conversion of a Hugging Face model to quantised weights that can be trained."""

import re
import shlex
from collections.abc import Callable, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Group
from rich.table import Table

from arbcli.base.environment import may_have_gpu
from arbcli.base.errors import ArbError
from arbcli.base.output import LiveLine, bytes_text, emit, emit_json, note, table, write_bytes
from arbcli.base.run_files import RUNS, TOKENIZER
from arbcli.commands import _options as opt
from arbcli.commands._outputs import check_folder
from arbcli.config.model import VOCABULARY, ModelConfig
from arbcli.config.model_file import model_lines
from arbcli.config.training import resolve_names
from arbcli.interop.huggingface.config_json import model_name, read_folder_config
from arbcli.model.rules import FADING

if TYPE_CHECKING:
    from arbcli.inspect.recipe import Recipe
    from arbcli.interop.importing import ImportReport, TensorReport

TEXT = "text.txt"
"""Name of the text in the command that tunes the model."""


_FOLDER = typer.Argument(
    metavar="DIR", help="Model folder of Transformers: config.json, safetensors, tokenizer.json."
)
_OUT = typer.Option(help="Run to create. [default: runs/imported-NAME]")
_IGNORE_FIELD = typer.Option(
    metavar="NAME",
    help="Field of config.json that arb does not know and that decides nothing. Repeat it"
    " for several.",
)
_BUDGET = typer.Option(
    metavar="SIZE",
    help="Memory of the GPU that is to train, such as 24GiB: the last line is the command"
    " that fits. [default: that of this machine's GPU]",
    parser=opt.read_budget,
)


def import_model(
    folder: Annotated[Path, _FOLDER],
    out: Annotated[Path | None, _OUT] = None,
    rule: opt.RuleToCome = None,
    attention_rule: opt.AttentionRuleToCome = None,
    mlp_rule: opt.MLPRuleToCome = None,
    scale_type: opt.ScaleTypeToCome = None,
    direction: opt.DirectionToCome = "adafactor",
    ignore_field: Annotated[list[str] | None, _IGNORE_FIELD] = None,
    budget: Annotated[int | None, _BUDGET] = None,
    print_config: Annotated[
        bool,
        typer.Option("--print-config", help="Print the model as TOML without reading weights."),
    ] = False,
    as_json: opt.Json = False,
) -> None:
    """Convert a Llama, Mistral, Qwen 2, Qwen 3 or BitNet model to a run: `arb import DIR`.

    Weights are quantised to int8, unless they are trits; `arb train --init-from` trains them
    further.
    """
    if not folder.is_dir():
        raise ArbError(f"`{folder}` is not a folder", "name a folder with `config.json` in it")
    if budget is not None and budget < 2**20:
        raise ArbError(f"`--budget` is {budget:,} bytes", "add the unit, such as `--budget 24GiB`")
    storage = resolve_names({"scale_type": scale_type, "direction": direction})
    storage |= {"attention_rule": attention_rule, "mlp_rule": mlp_rule}
    ignored = ignore_field or ()
    rules = [rule or FADING[0]] if rule or attention_rule or mlp_rule else FADING
    configs = [
        read_folder_config(folder, ignored, rule=name, **storage, digits="all") for name in rules
    ]
    if out is not None:
        check_folder(out, "--out")
    run = out or RUNS / f"imported-{model_name(folder).rpartition('/')[2]}"
    config, recipe, summary = configs[0], None, ""
    if budget is not None or (may_have_gpu() and not print_config):
        with LiveLine("loading") as line:
            config, recipe, summary = _choose(configs, budget, line.show_wait)
    options = recipe.options.split() if recipe else ()
    command = shlex.join(["arb", "train", "--init-from", str(run), *options, "--data", TEXT])
    if print_config:
        write_bytes("".join(f"{line}\n" for line in model_lines(config)).encode())
    else:
        from arbcli.interop import importing

        with LiveLine() as line:
            report = importing.import_folder(
                folder, run, rule=config.rule, **storage, ignored=ignored, on_read=line.show_wait
            )
        if as_json:
            emit_json(asdict(report) | {"command": command, "recipe": recipe and asdict(recipe)})
        else:
            emit(report, _tables(report), as_json=False)
        if report.vocabulary != VOCABULARY and not (run / TOKENIZER).exists():
            note(f"`{folder}` has no `{TOKENIZER}`: copy one to `{report.run}` to read text")
    if summary and not as_json:
        note(summary)
    if recipe or not (print_config or as_json):
        note(command)


def _choose(
    configs: Sequence[ModelConfig], budget: int | None, progress: Callable[[str], None]
) -> tuple[ModelConfig, "Recipe | None", str]:
    """Choose the first of several models of which a step fits into the memory of a GPU.

    Args:
        configs: the model with each rule, the preferred one first.
        budget: memory in bytes; None is this machine's GPU.
        progress: called with what is predicted.

    Returns:
        The model, its recipe and a summary; the first model and None if no step fits.
    """
    import torch

    from arbcli.inspect.audit import config_of_any_gpu
    from arbcli.inspect.recipe import USABLE, choose_step, tuning_context

    if budget is None and not torch.cuda.is_available():
        return configs[0], None, ""
    if budget is None:
        budget = int(USABLE * torch.cuda.get_device_properties(0).total_memory)
    for config in configs:
        tuned = config_of_any_gpu(preset=config, ctx=tuning_context(config))
        if recipe := choose_step(tuned, budget, progress=progress):
            return config, recipe, f"with rule {recipe.rule}, {recipe.summary}:"
    return configs[0], None, f"no training step fits into {budget / 2**30:.2f} GiB"


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
    return table("Rounded", ["tensor", "number", "off by", "largest, in rms", "outliers"], rows)
