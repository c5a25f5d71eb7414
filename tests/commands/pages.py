"""Output of commands as plain text, from reports in which no two values are equal.

`python tests/commands/pages.py` writes it to the folder of this name, where it is read before it is
committed; `test_options.py` compares. A figure in the wrong place, or in another unit, changes it.
"""

import contextlib
import io
import itertools
import sys
import typing
from collections.abc import Callable, Iterator
from dataclasses import asdict, is_dataclass, replace
from pathlib import Path
from types import SimpleNamespace, UnionType
from unittest import mock

from rich.console import Group
from rich.table import Table

from arbcli.commands import (
    _run_display,
    audit_memory,
    check,
    compare,
    count_params,
    evaluate,
    export,
    import_model,
    inspect,
    probe_loss,
    verify_kernels,
)
from arbcli.config.model import ModelConfig
from arbcli.config.presets import preset
from arbcli.generation.evaluation import EvaluateReport
from arbcli.inspect.audit import AuditReport, FitReport
from arbcli.inspect.decoding import DecodingAudit, DecodingProbe
from arbcli.inspect.memory import StateReport, WhatIfReport
from arbcli.inspect.parts import PartReport
from arbcli.inspect.ranks import RanksReport
from arbcli.inspect.runs import RunComparison
from arbcli.inspect.saved import Difference, DifferenceReport, SavedReport
from arbcli.inspect.verdicts import Histogram, ProbeReport
from arbcli.interop.exporting import ExportReport
from arbcli.interop.importing import ImportReport
from arbcli.kernels.runtime import native
from arbcli.training.check import CheckReport
from arbcli.training.record import FirstStep, Record, TrainReport
from arbcli.verify.check_kernels import KernelResult
from arbcli.verify.ledger import Failure, Ledger, ledger_page
from arbcli.verify.subjects import ParityResult

FOLDER = Path(__file__).with_suffix("")


def filled(kind: typing.Any, /, **fields: typing.Any) -> typing.Any:
    """Make a report of which each number and each word is another; `fields` are as they are given.

    Numbers grow with the order of the fields. Of every list and dictionary there are two entries.
    """
    return _filled(kind, itertools.count(1), fields)


def _filled(kind: typing.Any, numbers: Iterator[int], fields: dict[str, typing.Any]) -> typing.Any:
    if typing.get_origin(kind) is UnionType:
        kind = typing.get_args(kind)[0]
    origin, inner = typing.get_origin(kind), typing.get_args(kind)
    if origin is tuple and inner[-1] is not ...:
        return tuple(_filled(each, numbers, fields) for each in inner)
    if origin in (tuple, list):
        return origin(_filled(inner[0], numbers, fields) for _ in range(2))
    if origin is dict:
        pairs = (tuple(_filled(each, numbers, fields) for each in inner) for _ in range(2))
        return dict(pairs)
    if kind is ModelConfig:
        return preset("tiny")
    if is_dataclass(kind):
        hints = typing.get_type_hints(kind)
        given = {name: fields[name] for name in hints if name in fields}
        made = {name: _filled(hints[name], numbers, fields) for name in hints if name not in given}
        return kind(**given | made)
    number = next(numbers)
    if kind is bool:
        return number % 2 == 0
    makes = {int: lambda n: n * 1_234_567, float: lambda n: n * 31.415926}
    return makes.get(kind, lambda n: f"word {n}")(number)


def plain(shown: typing.Any) -> str:
    """Write what a person is shown, cell by cell, without the frames of tables."""
    if isinstance(shown, Group):
        return "\n".join(plain(part) for part in shown.renderables)
    if not isinstance(shown, Table):
        return str(shown)
    heads = [f"{column.header} [{column.justify}]" for column in shown.columns]
    rows = zip(*(map(str, column.cells) for column in shown.columns), strict=True)
    return "\n".join(["", str(shown.title), *(" | ".join(row) for row in (heads, *rows)), ""])


def _shown_by_train(*, quiet: bool = False) -> str:
    said: list[str] = []
    record = filled(Record)
    gauges = {name: 0.0711 * n for n, name in enumerate(
        ("alive_codes", "alive_knowledge", "fullest_expert", "edges", "chunk_length",
         "chunk_length_2", "joined", "wire", "another"), 1,
    )}  # fmt: skip
    evaluated = replace(record, gauges=gauges)
    on_the_way = replace(
        record, val_loss=None, sample=None, mfu=None, flip_share=None, gauges={"edges": 0.5}
    )
    report = replace(filled(TrainReport), stopped_by=None)
    twin = replace(report, checkpoint=None)
    stopped = filled(TrainReport)
    text = {"description": "book.txt", "train_bytes": 9_000_000, "val_bytes": 1_000_000,
            "entropy": 3.14159}  # fmt: skip
    config = SimpleNamespace(
        steps=4321, model=preset("tiny", ctx=96, scale_type="T6", rule="nibble"), accum=6,
        device="cuda:0", backend="triton", compute="fp8", eval_interval=1000,
        log_every=None, batch=8, lr=0.625, seed=11, optimizer="muon",
    )  # fmt: skip
    trainer = SimpleNamespace(
        config=config,
        num_weights=7_654_321,
        num_floats=(12_345, 6_789),
        group=SimpleNamespace(size=2),
        step=17,
    )

    def line(text: str, *, keep: bool = False) -> None:
        said.append(f"{'kept' if keep else 'line'}    {text}")

    on_cpu = {"device": "cpu", "backend": "torch", "compute": "bf16", "log_every": 1}
    on_cpu = SimpleNamespace(**vars(config) | on_cpu | {"model": preset("tiny", weights="ste")})
    about = {"config": on_cpu, "group": SimpleNamespace(size=1), "step": 0}
    alone = SimpleNamespace(**vars(trainer) | about)
    clock = [5000.0]
    absent = {"available": lambda: False, "why_not": lambda: "there is no C compiler"}
    with (
        mock.patch.object(_run_display, "note", said.append),
        mock.patch.object(_run_display, "note_text", said.append),
        mock.patch.multiple(native, **absent),
        mock.patch.object(_run_display, "Timer"),
        mock.patch.object(_run_display.time, "perf_counter", side_effect=lambda: clock[0]),
    ):
        _run_display.RunDisplay(quiet=quiet, as_json=True, is_first=False).noted(
            "of another process"
        )
        display = _run_display.RunDisplay(quiet=quiet, as_json=False, advises=True)
        display.line = SimpleNamespace(
            show=line, show_wait=line, follow=lambda make: None, is_live=False
        )
        display.wait("loading")
        for run in (None, Path("runs/006")):
            display.started(run, alone, {"text": text})
        display.recorded(on_the_way)
        display.started(Path("runs/007"), trainer, {"text": text})
        clock[0] += 2
        display.stepped(18)
        if not quiet:
            display.print_estimate()
        first = filled(FirstStep)
        display.first_step(first)
        display.first_step(replace(first, kernels_compiled=0, kernels_loaded=0))
        display.first_step(replace(first, compile_seconds=None))
        untimed = replace(on_the_way, bytes_per_second=None, seconds_left=None)
        for told in (on_the_way, evaluated, untimed):
            display.recorded(told)
            clock[0] += 20
        if not quiet:
            said.extend(f"width {width:3}  {display._progress(width)}" for width in (40, 80, 200))
        display.noted("a note")
        smoke = replace(
            report, run=None, checkpoint=None, val_loss=None, bits_per_byte=None, sample=""
        )
        for told in (report, twin, stopped, smoke):
            display.ended(told)
            display.finished(told)
    return "\n".join(said)


def _shown_by_evaluate() -> str:
    report = filled(EvaluateReport)
    said: list[str] = []
    for is_live in (False, True):
        show = SimpleNamespace(is_live=is_live, show=said.append)
        progress = evaluate._Progress(show)
        for done in (0, 1000, 1999, 2000, 2020, 20_000):
            progress(done, 20_000, 0.0314159 + done / 1e4)
    short = replace(report, by_position=report.by_position[:1])
    return "\n".join([plain(evaluate._table(report)), plain(evaluate._table(short)), *said])


def _shown_by_probe() -> str:
    model = preset("tiny", rule="nibble", scale_type="T6")
    config = {"model": asdict(model), "device": "cpu", "backend": "torch",
              "compute": "fp32"}  # fmt: skip
    scales = [filled(Histogram, low=low, high=high) for low, high in ((-700, -90), (-800, -100))]
    report = filled(
        ProbeReport, config=config, takeoff_layer=1, position_starts=(0, 16),
        residual_rms=(0.111, 0.222, 0.333), residual_most=(0.444, 0.555, 0.666),
        stream_ranges=tuple(tuple(n + 0.11 * i for i in range(8)) for n in (1.0, 2.0)),
    )  # fmt: skip
    last = replace(report.readings[1], residual_rms=(0.5, 0.625, 0.75), mixer_rms=(0.8, None))
    tensors = [
        replace(
            tensor,
            name=f"blocks.{index}.mlp.up.weight",
            update_size=(None, 1.25)[index],
            digits=tensor.digits | {"scale": scale},
        )
        for index, (tensor, scale) in enumerate(zip(report.tensors, scales, strict=True))
    ]
    chunks = replace(report.chunks, sample_bytes=tuple(b"abcdef"), sample_depths=(0, 1, 0, 2, 0, 0))
    report = replace(
        report, readings=(report.readings[0], last), tensors=tuple(tensors), chunks=chunks
    )
    decoding = filled(DecodingProbe)
    tables = probe_loss._tables(report), probe_loss._decoding_tables(decoding)
    return "\n".join(map(plain, tables))


def _shown_by_count() -> str:
    configs = (preset("tiny"), preset("tiny", rule="votes", scale_type="T8"))
    reports = (filled(StateReport, config=config) for config in configs)
    parts = [filled(PartReport, kind=kind, path=path, depth=depth) for kind, path, depth in (
        ("block", "stages.0.encoder.0-3", 1), ("attention", "blocks.0-3.attention", 2),
        ("stage", "stages.0", 0), ("head", "head", 0),
    )]  # fmt: skip
    parts.append(replace(parts[0], count=1, path="blocks.7"))
    shown = [*map(count_params.state_table, reports), count_params.parts_table(parts)]
    return "\n".join(map(plain, shown))


def _shown_by_inspect() -> str:
    report = filled(
        SavedReport, octaves={"word 14": {-3: 979, 2: 1000, 5: 1, 7: 20}, "word 18": {0: 3}},
        trits={"word 14": [0.125, 0.5, 0.375], "word 18": [0.25, 0.3125, 0.4375]},
        run={"text": {"bytes": 12, "names": ["a", "b"]}, "empty": None, "none": 0}, depth=1,
    )  # fmt: skip
    tensors = [filled(Difference, name=f"tensor {n}", elements=9000 + n) for n in range(4)]
    tensors[1] = replace(tensors[1], relative=None)
    values = {"config": {"dim": [1, 2]}, "settings": {"lr": [3, 4]}}
    few = filled(DifferenceReport, **values)
    many = replace(few, tensors=tensors)
    as_many = replace(few, tensors=tensors[:3])
    with mock.patch.object(inspect, "SHOWN", 3):
        pages = [inspect._tables(report), *map(inspect._differences, (few, as_many, many))]
    return "\n".join(map(plain, pages))


def _shown_by_check() -> str:
    report = filled(CheckReport, steps=5_000_000, steps_before=None, has_ended=False)
    goes_on = replace(report, stops=None)
    nothing = replace(goes_on, drops_records=0, sets_aside=(), removes=())
    steps = nothing.resumes_at + 2
    evaluates = replace(nothing, evaluates_first=True, steps=steps)
    reports = (
        goes_on,
        evaluates,
        replace(evaluates, steps=evaluates.resumes_at),
        replace(nothing, evaluates_first=False, steps=steps, has_ended=True),
        replace(goes_on, steps=goes_on.resumes_at + 1, steps_before=7_000_000),
        replace(report, resumes_at=None),
    )
    return "\n".join(plain(check._tables(each)) for each in reports)


def _shown_by_compare() -> str:
    report = filled(RunComparison, settings=("lr", "data"))
    first, second = report.groups
    first = replace(first, settings={"lr": 0.5, "data": ["a", "b"]})
    alone = {name: replace(getattr(second, name), deviation=None)
             for name in ("loss", "val_loss", "seconds")}  # fmt: skip
    second = replace(
        second, settings={"lr": None, "data": []}, best_val_loss=None, steps=(7, 7), **alone
    )
    report = replace(report, groups=(first, second))
    equal = replace(report, settings=(), groups=(first,))
    return "\n".join(plain(compare._tables(each)) for each in (report, equal))


def _shown_by_audit() -> str:
    small = filled(FitReport, fits=False)
    fits = replace(small, fits=True, budget_bytes=10**9)
    level = {"stage": "backward"}
    audited = filled(AuditReport, **level)
    first, second = audited.levels
    audited = replace(
        audited,
        levels=(
            replace(first, step=0, stage="load", reserved_bytes=None),
            replace(first, step=1, stage="forward"),
            second,
            replace(second, step=3, stage="end"),
        ),
    )
    ranks = filled(RanksReport, passed=True, **level)
    unmeasured = tuple(replace(each, measured=None) for each in ranks.ranks)
    choices = filled(WhatIfReport)
    first, second = choices.choices
    others = (
        replace(first, scale_type=second.scale_type, bytes_per_weight=1.25),
        replace(second, scale_type=first.scale_type, direction=None),
    )
    choices = replace(choices, choices=(first, others[1], others[0], second))
    tables = [
        audit_memory._what_if_table(choices),
        audit_memory._fit_table(small),
        audit_memory._fit_table(fits),
        audit_memory._ranks_table(ranks),
        audit_memory._ranks_table(replace(ranks, ranks=unmeasured, passed=False)),
        audit_memory._ranks_table(replace(ranks, ranks=unmeasured, budget_bytes=None)),
        audit_memory._audit_tables(audited),
        audit_memory._decoding_tables(filled(DecodingAudit, levels=audited.levels)),
    ]
    return "\n".join(map(plain, tables))


def _shown_by_verify() -> str:
    kinds = {"kind": "cases", "check": "update", "target": "sm_90",
             "bytes_per_second": 3.35e12, "flops_per_second": 7.89e14}  # fmt: skip
    report = filled(Ledger, kernels=(), parity=(), **kinds)
    kernel, check = filled(KernelResult, **kinds), filled(ParityResult, **kinds)
    kernels = (
        kernel,
        replace(kernel, scale_type="T8", passed=False, relative_error=None),
        replace(kernel, kind="fuzz", unequal=7, cosine=0.5),
        replace(kernel, kernel="other", unequal=None, relative_error=0.25, seconds=9),
        replace(kernel, kernel="third", unequal=0, left_out=0, max_error=0.0),
    )
    parity = (
        check,
        replace(check, item="another", max_error=7.5, cosine=0.25, passed=True),
        replace(check, check="causality", relative_error=None),
    )
    report = replace(report, kernels=kernels, parity=parity)
    few = replace(
        report, scale_types=("T8",), kernels=(), parity=(), timing=None, commit=None,
        failures=(), interrupted=None, sampled=(),
    )  # fmt: skip
    untimed = replace(
        few, failures=(filled(Failure),),
        timing=replace(report.timing, timings=tuple(
            replace(each, library_us=None, ratio=None)
            for each in report.timing.timings
        )),
    )  # fmt: skip
    stopped = replace(few, interrupted="SIGINT")
    tables = [plain(verify_kernels.ledger_tables(each)) for each in (report, few)]
    return "\n".join([*tables, *map(ledger_page, (report, few, untimed, stopped))])


PAGES: dict[str, Callable[[], str]] = {
    "train": _shown_by_train, "train_quietly": lambda: _shown_by_train(quiet=True),
    "evaluate": _shown_by_evaluate, "probe-loss": _shown_by_probe, "inspect": _shown_by_inspect,
    "check": _shown_by_check, "compare": _shown_by_compare, "count-params": _shown_by_count,
    "audit-memory": _shown_by_audit, "verify-kernels": _shown_by_verify,
    "export": lambda: plain(export._table(filled(ExportReport))),
    "import": lambda: plain(import_model._tables(filled(ImportReport))),
}  # fmt: skip
"""Output of each command, by its name."""


def page(name: str) -> str:
    """Make one of `PAGES`, without what ends a line."""
    with contextlib.redirect_stdout(io.StringIO()):
        text = PAGES[name]()
    return "\n".join(line.rstrip() for line in text.splitlines()) + "\n"


if __name__ == "__main__":
    FOLDER.mkdir(exist_ok=True)
    for name in sys.argv[1:] or PAGES:
        (FOLDER / f"{name}.txt").write_text(page(name), encoding="utf-8")
