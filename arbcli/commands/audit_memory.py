"""`arb audit-memory`: predicted and measured memory of training steps."""

import dataclasses
import re
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Group, RenderableType
from rich.table import Table

from arbcli.base.errors import ArbError
from arbcli.base.output import LiveLine, bytes_text, emit, table
from arbcli.base.run_files import CONFIG, run_of
from arbcli.commands import _options as opt
from arbcli.commands._help import combining
from arbcli.commands._outputs import check_file
from arbcli.commands._processes import start_processes, this_process
from arbcli.commands.count_params import state_table
from arbcli.config.file import read_model, read_settings
from arbcli.config.training import trains_ternary

if TYPE_CHECKING:
    from arbcli.config.training import TrainConfig
    from arbcli.inspect.audit import AuditReport, Check, FitReport, Level
    from arbcli.inspect.decoding import DecodingAudit
    from arbcli.inspect.floats import FloatTensor
    from arbcli.inspect.memory import WhatIfReport
    from arbcli.inspect.peak import PeakReport
    from arbcli.inspect.ranks import RanksReport

MAX_ROWS = 10
"""Maximum number of rows of a table of tensors."""
STAGES = {
    "load": "loading",
    "forward": "forward",
    "backward": "backward and update",
    "end": "the step",
    "prepare": "preparing weights and cache",
    "prefill": "prefill",
}


EXCLUDED = {
    "--decode": ("--budget", "--what-if", "--ranks", "--floats", "--snapshot"),
    "--floats": ("--budget", "--what-if", "--ranks"),
    "--snapshot": ("--budget", "--what-if", "--ranks"),
    "--what-if": ("--budget", "--ranks"),
}
"""Options that cannot be combined with another one."""
OPTIONS = ("batch", "accum", "compute", "recompute", "pack", "weight_average", "teacher", "seed")
AUDITED = {*OPTIONS, "dropout", "attention_dropout", "embedding_dropout", "reduce_dtype"}
"""Settings that are taken from an audited run, besides its model."""


_RUN = typer.Argument(
    metavar=opt.NAMED, help=f"Run whose settings are the defaults: {opt.NAMES_RUN}"
)
_BUDGET = typer.Option(
    metavar="SIZE",
    help="Only predict whether a step fits: 6GiB, 500MiB, 4GB.",
    parser=opt.read_budget,
)
_WHAT_IF = typer.Option("--what-if", help="Only predict the state of all rules and scale types.")
_RANKS = typer.Option(min=2, help="Number of processes; --budget only predicts them. [default: 1]")
_SNAPSHOT = typer.Option(help="Write torch's own memory snapshot; CUDA only.")
_FLOATS = typer.Option("--floats", help="List all float tensors of the first step.")
_DECODE = typer.Option(
    min=2,
    metavar="POSITIONS",
    help="Instead of training, measure a prefill of so many positions, and decoding steps.",
)


@combining(EXCLUDED)
@opt.takes_settings(*OPTIONS)
def audit_memory(
    run: Annotated[Path | None, _RUN] = None,
    steps: Annotated[int, typer.Option(min=2, help="Number of steps to measure.")] = 3,
    budget: Annotated[int | None, _BUDGET] = None,
    what_if: Annotated[bool, _WHAT_IF] = False,
    ranks: Annotated[int | None, _RANKS] = None,
    snapshot: Annotated[Path | None, _SNAPSHOT] = None,
    floats: Annotated[bool, _FLOATS] = False,
    decode: Annotated[int | None, _DECODE] = None,
    device: opt.PredictedDevice = None,
    backend: opt.Backend = None,
    as_json: opt.Json = False,
    **settings: Any,
) -> None:
    """Measure memory of steps: `arb audit-memory --preset small`; exit 1 on floats or growth."""
    if snapshot is not None:
        check_file(snapshot, "--snapshot", (".pickle", ".pkl"))
    rank, processes, *_ = this_process()
    if ranks is not None:
        _check_ranks(ranks, processes)
        if budget is None and processes == 1:
            start_processes(ranks)
    if budget is None and device is not None:
        opt.check_device(device)
    settings = opt.given_options(**settings, steps=steps)
    settings = opt.expand_model_file(settings)
    if run is not None:
        settings = _settings_of_run(run, settings)
    if not trains_ternary(settings.get("preset", "tiny"), settings.get("weights")):
        raise ArbError("a float baseline has no integers to audit", "name a run of packed weights")
    if ranks is not None:
        settings = {"accum": ranks, "processes": ranks} | settings
    opt.check_settings(settings)
    report: DecodingAudit | WhatIfReport | RanksReport | FitReport | AuditReport
    tables: RenderableType
    with LiveLine("loading") as line:
        # slow to import, and not needed for `arb --help`
        from arbcli.inspect import audit, memory
        from arbcli.training.configure import new_config

        if budget is not None and (device or "").startswith("cuda"):
            config = audit.config_of_any_gpu(**settings)
        else:
            config = new_config(**settings, device=device, backend=backend)
        if snapshot is not None and config.device == "cpu":
            raise ArbError(
                "`--snapshot` records the CUDA allocator, and this run is on the CPU",
                "leave it out, or use `--device cuda`",
            )
        if decode is not None:
            from arbcli.inspect.decoding import audit_decoding

            report = audit_decoding(config, decode)
            tables = _decoding_tables(report)
        elif what_if:
            report = memory.what_if(config.model)
            tables = _what_if_table(report)
        elif ranks is not None and budget is not None:
            from arbcli.inspect.ranks import predict_ranks

            report = predict_ranks(config, ranks, budget, line.show_wait)
            tables = _ranks_table(report)
        elif ranks is not None:
            report = _audit_ranks(config)
            tables = _ranks_table(report)
        elif budget is not None:
            report = audit.check_fit(config, budget, line.show_wait)
            tables = _fit_table(report)
        else:
            line.show_wait("predicting")
            predicted = partial(_show_prediction, line, steps)
            report = audit.audit(config, snapshot, predicted, line.show_wait, floats=floats)
            tables = _audit_tables(report)
    if rank == 0:
        emit(report, tables, as_json=as_json)
    raise typer.Exit(0 if report.passed else 1)


def _show_prediction(line: LiveLine, steps: int, predicted: "PeakReport") -> None:
    state, peak = bytes_text(predicted.state_bytes), bytes_text(predicted.peak_bytes)
    text = f"predicted: {state} of state, a peak of {peak}; measuring {steps} steps"
    line.show(text, keep=True)


def _settings_of_run(run: Path, changes: dict[str, Any]) -> dict[str, Any]:
    """Return the settings of a run, updated by `changes`."""
    if "preset" in changes:
        raise ArbError(f"`{run}` and `--preset` or `--model` both name a model", "give one of them")
    checkpoint = opt.find_run(run)
    path = run_of(checkpoint) / CONFIG
    if not path.exists() and (model := opt.config_in_header(checkpoint)):  # imported
        from arbcli.inspect.recipe import tuning_context

        return {"preset": model, "ctx": tuning_context(model)} | changes
    settings = {name: value for name, value in read_settings(path).items() if name in AUDITED}
    return settings | {"preset": read_model(path)} | changes


def _audit_ranks(config: "TrainConfig") -> "RanksReport":
    """Join the process group and audit all processes."""
    import torch  # takes seconds to import

    from arbcli.inspect.ranks import audit_ranks
    from arbcli.training.parallel.group import joined, own_device

    device = own_device(torch.device(config.device))
    with joined(device, "audit-memory") as group:
        return audit_ranks(dataclasses.replace(config, device=str(device)), group)


def _check_ranks(ranks: int, processes: int) -> None:
    if processes not in (1, ranks):
        raise ArbError(
            f"`--ranks` is {ranks}, and `torchrun` has started {processes} processes",
            "start the command without `torchrun`",
        )


def _mib(size: int | None) -> str:
    return "-" if size is None else f"{size / 2**20:,.2f}"


def _size(size: int | None) -> str:
    """Format a size in bytes in the largest unit that it reaches, at least KiB; None as `-`."""
    if size is None:
        return "-"
    units = (("GiB", 2**30), ("MiB", 2**20), ("KiB", 2**10))
    unit, factor = next((pair for pair in units if size >= pair[1]), units[-1])
    return f"{size / factor:,.2f} {unit}"


def _module_name(function: str) -> str:
    """Return the module of a qualified function: `data` for `data.batch`."""
    name = function.rpartition(" in ")[2]  # drops `OPERATION in `
    return name.split(".")[-2].replace("_", " ") if "." in name else name


def _what_if_table(report: "WhatIfReport") -> Table:
    rules = {choice.rule: choice.direction or "-" for choice in report.choices}
    rows: dict[str, list[str]] = {}
    for choice in report.choices:
        cell = f"{_mib(choice.state_bytes)} ({choice.bytes_per_weight:.2f})"
        rows.setdefault(choice.scale_type, [choice.scale_type]).append(cell)
    adamw = report.adamw_bytes / report.trained_weights
    rows["AdamW"] = ["AdamW", f"{_mib(report.adamw_bytes)} ({adamw:.2f})"]
    title = f"State of {report.trained_weights:,} weights: MiB (bytes/weight)"
    columns = ["", *(f"{rule}\n{direction}" for rule, direction in rules.items())]
    return table(title, columns, list(rows.values()))


def _fit_table(report: "FitReport") -> Group:
    needed, budget = report.predicted_peak.evaluated_bytes, report.budget_bytes
    verdict = f"fits, {_size(budget - needed)} to spare"
    if not report.fits:
        verdict = f"does not fit, {_size(needed - budget)} short; {report.advice}"
    headline = f"On {report.predicted_peak.device}: {verdict} (predicted in {report.seconds:.0f} s)"
    rows = [*_peak_rows(report.predicted_peak), ["budget", _size(budget)]]
    return Group(headline, table("Peak", ["", "size"], rows), _live_table(report.predicted_peak))


def _live_table(peak: "PeakReport") -> Table:
    """Lay out the tensors at the predicted peak."""
    rows = [
        [row.part, row.tensor, _module_name(row.made_in), f"{row.number:,}", _size(row.bytes)]
        for row in peak.live[:MAX_ROWS]
    ]
    if others := peak.live[MAX_ROWS:]:
        number, size = sum(row.number for row in others), sum(row.bytes for row in others)
        rows.append(["others", "", "", f"{number:,}", _size(size)])
    columns = ["", "tensor", "made in", "number", "size"]
    return table("At the predicted peak, besides the state", columns, rows, left=3)


def _peak_rows(peak: "PeakReport") -> list[list[str]]:
    bits = 8 * peak.compute_bytes
    return [
        ["state", _size(peak.state_bytes)],
        [f"activations of batch {peak.batch}, {bits} bits", _size(peak.saved_bytes)],
        [f"transient, at {_module_name(peak.at)}", _size(peak.transient_bytes)],
        ["constants, workspaces", _size(peak.constant_bytes)],
        [f"predicted peak of a step on {peak.device}", _size(peak.peak_bytes)],
        ["reserved by the allocator", _size(peak.reserved_bytes)],
        ["with evaluations", _size(peak.evaluated_bytes)],
    ]


def _ranks_table(report: "RanksReport") -> Table:
    rows = []
    for process in report.ranks:
        share, peak, measured = process.share, process.predicted_peak, process.measured
        row = [f"{share.rank}", f"{share.weights / 1e6:,.2f}"]
        row += map(_mib, (share.kept_bytes, share.state_bytes, peak.peak_bytes))
        if measured is None:
            row.append(_mib(peak.evaluated_bytes))
        else:
            failed = [check.name for check in measured.checks if not check.passed]
            row += [_mib(measured.measured.state_bytes), _mib(measured.peak_bytes)]
            row.append(", ".join(failed) or "ok")
        rows.append(row)
    columns = ["process", "owns, M", "alone", "state", "peak"]
    was_measured = report.ranks[0].measured is not None
    columns += (
        ["state measured", "peak measured", "checks"] if was_measured else ["with evaluations"]
    )
    title = (
        f"{len(report.ranks)} processes on {report.device}, {report.reduce_dtype} between them, MiB"
    )
    title += f": one alone has {_mib(report.state_bytes)} of state"
    if report.budget_bytes is not None:
        title += f"; each {'fits' if report.passed else 'does not fit'} {_mib(report.budget_bytes)}"
    return table(title, columns, rows)


def _floats_table(floats: "tuple[FloatTensor, ...]") -> Table:
    """Lay out the largest float tensors of a step; corresponding tensors of blocks share a row."""
    rows: dict[tuple[str, str, str, str, str], list[FloatTensor]] = {}
    for tensor in floats:
        module = re.sub(r"\b[0-9]+\b", "*", tensor.module)
        survives = "yes" if tensor.survives else "no"
        key = (module, tensor.stage, tensor.made_in, tensor.dtype, survives)
        rows.setdefault(key, []).append(tensor)
    totals = {key: sum(t.count * t.bytes for t in tensors) for key, tensors in rows.items()}
    largest = sorted(rows, key=lambda key: -totals[key])[:MAX_ROWS]
    cells = []
    for key in largest:
        module, stage, function, dtype, survives = key
        count, function = sum(t.count for t in rows[key]), function.rpartition(".")[2]
        cells.append([function, module, stage, dtype, f"{count:,}", _size(totals[key]), survives])
    title = "Float tensors of the first step"
    if len(rows) > MAX_ROWS:
        number, size = len(rows) - MAX_ROWS, sum(totals.values()) - sum(totals[k] for k in largest)
        title += f": the largest, and {number} rows of {_size(size)} more in `--json`"
    columns = ["made in", "module", "stage", "dtype", "number", "together", "survives"]
    return table(title, columns, cells, left=4)


def _decoding_tables(report: "DecodingAudit") -> Group:
    hardware = f"{report.device}, backend {report.backend}, {report.compute}"
    headline = (
        f"On {hardware}: {_verdict(report.passed)}, a prefill of {report.prefill:,}, cache of"
        f" {_size(report.cache_bytes)}"
    )
    return Group(headline, _levels_table(report.levels), _checks_table(report.checks))


def _verdict(passed: bool) -> str:
    return "passed" if passed else "FAILED"


def _levels_table(levels: "tuple[Level, ...]") -> Table:
    rows = [
        [
            f"step {level.step}" if level.step else "",
            STAGES[level.stage],
            *map(_size, (level.live_bytes, level.reserved_bytes, level.peak_bytes)),
            "" if level.loss is None else f"{level.loss:.4f}",
        ]
        for level in levels
    ]
    columns = ["", "after", "live", "reserved", "peak", "loss"]
    if not any(row[-1] for row in rows):  # decoding steps have no loss
        columns, rows = columns[:-1], [row[:-1] for row in rows]
    return table("Measured", columns, rows, left=2)


def _checks_table(checks: "tuple[Check, ...]") -> Table:
    rows = [[check.name, "ok" if check.passed else "FAILED", check.detail] for check in checks]
    return table("Checks", ["", "", ""], rows, left=3)


def _audit_tables(report: "AuditReport") -> Group:
    hardware = f"{report.device}, backend {report.backend}, {report.compute}"
    headline = (
        f"On {hardware}, batch {report.batch} x {report.predicted.config.ctx}:"
        f" {_verdict(report.passed)}, a peak of"
        f" {_size(report.peak_bytes)} in {report.steps} steps ({report.seconds:.1f} s)"
    )
    measured = f"measured, prediction off by {report.peak_error:+.1%}"
    peak = [*_peak_rows(report.predicted_peak), [measured, _size(report.peak_bytes)]]
    floats = [] if report.floats is None else [_floats_table(report.floats)]
    return Group(
        headline,
        *floats,
        state_table(report.predicted),
        table("Peak", ["", "size"], peak),
        _live_table(report.predicted_peak),
        _levels_table(report.levels),
        _checks_table(report.checks),
    )
