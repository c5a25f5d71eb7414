"""`arb verify-kernels`: compare kernels, and the model made of them, with their references."""

import os
import sys
import time
from collections.abc import Callable, Iterable
from dataclasses import asdict, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from arbcli.commands._options import Backend, Device, Json, Seed, TScaleType
from arbcli.errors import ArbError
from arbcli.output import LiveLine, emit, emit_json, note, table

if TYPE_CHECKING:
    import torch
    from rich.console import Group

    from arbcli.verify.ledger import Ledger


def verify_kernels(
    names: Annotated[
        list[str] | None,
        typer.Argument(metavar="[KERNEL]...", help="[default: every kernel, and the model]"),
    ] = None,
    tscale_type: TScaleType = None,
    all_tscale_types: Annotated[
        bool, typer.Option("--all-tscale-types", help="Check every one of them.")
    ] = False,
    fuzz: Annotated[
        int, typer.Option(min=0, help="Check this many random cases a kernel, and nothing else.")
    ] = 0,
    seed: Seed = None,
    targets: Annotated[
        str | None,
        typer.Option(
            metavar="all|NAME,...",
            help="Also compile for GPUs that need not be here: sm_80, sm_89, sm_90, sm_100,"
            " sm_120, gfx942.",
        ),
    ] = None,
    timed: Annotated[
        bool,
        typer.Option(
            "--time",
            help="Also time the kernels that pass, beside torch and against the GPU's roofline.",
        ),
    ] = False,
    ledger: Annotated[
        Path | None, typer.Option(metavar="DIR", help="Write what was verified to this folder.")
    ] = None,
    compare: Annotated[
        Path | None,
        typer.Option(metavar="OLD.json", help="Show what changed since that ledger."),
    ] = None,
    list_only: Annotated[
        bool, typer.Option("--list", help="List the kernels and their gates, and check nothing.")
    ] = False,
    device: Device = None,
    backend: Backend = None,
    as_json: Json = False,
) -> None:
    """Compare kernels with their references: `arb verify-kernels --all-tscale-types`."""
    _interpret_without_gpu(device)
    from arbcli.verify import (
        ledger as ledgers,  # torch takes seconds to import, so not for `arb --help`
    )

    if list_only:
        _list(as_json)
        return
    if all_tscale_types and tscale_type:
        raise ArbError(
            "`--tscale-type` and `--all-tscale-types` exclude each other", hint="give one of them"
        )
    old = ledgers.read_ledger(compare) if compare else None
    with LiveLine() as line:
        show = line.show if sys.stderr.isatty() else lambda _: None
        types = None if all_tscale_types else tscale_type or "T32"
        found = _check(names or [], types, fuzz, seed or 0, targets, timed, device, backend, show)
    if old:
        found = replace(found, changes=ledgers.compare_ledgers(old, found))
    emit(found, _tables(found), as_json=as_json)
    if ledger:
        note(f"ledger  {' and '.join(map(str, ledgers.write_ledger(found, ledger)))}")
    raise typer.Exit(0 if found.passed else 1)


def _interpret_without_gpu(device: str | None) -> None:
    """Have kernels defined for Triton's interpreter where they cannot run; before their import."""
    import torch

    if not torch.cuda.is_available() or (device or "").startswith("cpu"):
        os.environ["TRITON_INTERPRET"] = "1"


def _check(
    names: list[str],
    scale_type: str | None,
    fuzz: int,
    seed: int,
    targets: str | None,
    timed: bool,
    device_name: str | None,
    backend: str | None,
    show: Callable[[str], None],
) -> "Ledger":
    """Make the checks that were asked for."""
    from arbcli.config.model import SCALE_TYPES
    from arbcli.device import resolve_device
    from arbcli.verify.compile_ahead import compile_kernels, find_targets
    from arbcli.verify.kernels import Checks, verify_kernels
    from arbcli.verify.ledger import new_ledger
    from arbcli.verify.parity import check_parity, matrix_shapes
    from arbcli.verify.timing import Stopwatch, check_timeable, time_kernels
    from arbcli.verify.workers import Workers

    if scale_type is not None and scale_type not in SCALE_TYPES:
        known = ", ".join(f"`{name}`" for name in SCALE_TYPES)
        raise ArbError(f"`--tscale-type` is `{scale_type}`", hint=f"choose one of: {known}")
    wanted = find_targets(targets) if targets else []
    sizes = SCALE_TYPES if scale_type is None else {scale_type: SCALE_TYPES[scale_type]}
    place = resolve_device(device_name)
    backends = (backend,) if backend else _backends(place)
    if timed:
        check_timeable(place, backends)
    checks = Checks(real_shapes=matrix_shapes(), fuzz=fuzz, seed=seed)
    started, parity, compiled, timing = time.perf_counter(), (), (), None
    size = SCALE_TYPES[scale_type or "T32"]  # of what is compiled ahead and timed
    with Workers(1 if names else _workers(place)) as workers:
        report = verify_kernels(names, sizes, place, backends, checks, workers, show)
        if not names and not fuzz:
            parity = check_parity(place, backends, sizes, workers, show)
    if timed:  # when the other processes are gone
        timing = time_kernels(report.kernels, Stopwatch(place), size, show)
    if wanted:
        compiled = compile_kernels(names, wanted, size, os.cpu_count() or 1, show)
    missing = [name for name in SCALE_TYPES if name not in sizes]
    left_out = _left_out(place, backends, names, fuzz, missing, wanted, timed)
    left_out = (*report.not_verified, *left_out)
    seconds = time.perf_counter() - started
    return new_ledger(place, sizes, report.kernels, parity, compiled, left_out, seconds, timing)


def _backends(device: "torch.device") -> tuple[str, ...]:
    from arbcli.kernels.runtime._triton import HAS_TRITON

    if not HAS_TRITON:
        return ("torch",)
    return ("triton" if device.type == "cuda" else "interpreter", "torch")


def _workers(device: "torch.device") -> int:
    """Choose a number of processes; each takes memory of a GPU, too."""
    import torch

    cores = os.cpu_count() or 1
    if device.type != "cuda":
        return cores
    return max(1, min(cores, 12, torch.cuda.mem_get_info(device)[0] >> 32))


def _left_out(
    device: "torch.device",
    backends: tuple[str, ...],
    names: list[str],
    fuzz: int,
    missing: list[str],
    targets: list[str],
    timed: bool,
) -> Iterable[str]:
    """List what this run did not verify, and why."""
    if "triton" not in backends:
        yield f"the compiled kernels: nothing ran on a GPU, but on {device.type}"
        yield "bfloat16 in the kernels: Triton's interpreter computes it wrongly"
        yield "the real sizes of the presets: they need a GPU"
    if "torch" not in backends:
        yield "the torch backend: another one was asked for"
    if names:
        yield "other kernels, and the whole model: kernels were named"
    elif fuzz:
        yield "the fixed cases, and the whole model: random cases were asked for"
    else:
        yield "blocks of a preset after its fourth: all are alike"
        yield "causality and determinism of the ragged models in more than one scale type"
        yield "the graph model at the sizes of its presets: a small one stands for them"
        yield (
            "the graph model in bf16 against float64: another expert or code may be chosen there,"
            " and all else follows"
        )
        if "interpreter" in backends:
            yield (
                "causality and determinism of the graph model in the interpreter, and more than two"
                " scale types: they take minutes"
            )
    if missing:
        yield f"scale types {', '.join(missing)}: `--all-tscale-types` was not given"
    if targets:
        yield "whether kernels run on the GPUs that they were only compiled for"
    else:
        yield "compilation for other GPUs: `--targets` was not given"
    yield "logits and loss in bf16 from the bytes on: layers are compared one by one there"
    yield "float twins and their optimizers: they are torch's own"
    if not timed:
        yield "speed: `--time` was not given"


def _tables(found: "Ledger") -> "Group":
    """Lay out what was found: kernels, model, compilation, and what failed."""
    from rich.console import Group
    from rich.text import Text

    from arbcli.verify.ledger import (
        SPEED_COLUMNS,
        grouped,
        number,
        roofline_text,
        speed_rows,
        verdict,
        worst,
    )

    kernels, checks = [], []
    for key, group in grouped(found.kernels, "kernel", "backend"):
        cases = str(sum(len(result.shapes) for result in group))
        unequal = [result.unequal for result in group if result.unequal is not None]
        relative = number(worst(result.relative_error for result in group))
        error = f"{sum(unequal)} unequal" if unequal else relative
        seconds = f"{sum(result.seconds for result in group):.1f}"
        kernels.append([*key, cases, error, seconds, verdict(group)])
    for key, group in grouped(found.parity, "check", "backend"):
        largest = number(worst(result.max_error for result in group))
        relative = number(worst(result.relative_error for result in group))
        checks.append([*key, str(len(group)), largest, relative, verdict(group)])
    compiled = [
        [*key, f"{r.registers}", f"{r.spill_bytes}", f"{r.shared_bytes:,}", verdict([r])]
        for key, (r,) in grouped(found.compiled, "kernel", "target")
    ]
    title = f"{found.device}, {found.scale_types[0]}"
    if len(found.scale_types) > 1:
        title += f" to {found.scale_types[-1]}"
    columns = ["kernel", "backend", "cases", "error", "s", ""]
    parts = [table(f"kernels on {title}", columns, kernels, left=2)]
    if checks:
        columns = ["model", "backend", "compared", "largest error", "relative", ""]
        parts.append(table(f"model on {title}", columns, checks, left=2))
    if compiled:
        columns = ["kernel", "target", "registers", "spilled", "shared bytes", ""]
        parts.append(table("compiled ahead", columns, compiled, left=2))
    if found.timing:
        title = f"speed on {found.device}: {roofline_text(found.timing.roofline)}"
        parts.append(table(title, SPEED_COLUMNS, list(speed_rows(found.timing)), left=2))
    parts += [
        Text(f"FAIL  {failure.item}  {failure.label}: {failure.found}\n      {failure.command}")
        for failure in found.failures
    ]
    parts += [Text(f"changed  {change}") for change in found.changes]
    elements = sum(result.elements for result in found.kernels)
    unwritten = sum(result.unwritten for result in found.kernels)
    outputs = sum(result.outputs for result in found.kernels)
    parts.append(
        Text(
            f"{outputs:,} outputs of {elements:,} elements in poisoned memory,"
            f" {unwritten:,} elements left unwritten; {found.seconds:.0f} s"
        )
    )
    return Group(*parts)


def _list(as_json: bool) -> None:
    from arbcli.verify.kernels import KERNELS

    if as_json:
        emit_json({spec.name: asdict(spec.gate) for spec in KERNELS})
        return
    rows = [[spec.name, spec.gate.text, spec.gate.reason] for spec in KERNELS]
    emit(None, table("kernels", ["kernel", "gate", "reason"], rows, left=3), as_json=False)
