"""`arb verify-kernels`: comparison of kernels and models with their references."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Group, RenderableType
from rich.text import Text

from arbcli.base.environment import interpret_kernels_without_gpu
from arbcli.base.output import LiveLine, emit, emit_json, note, table
from arbcli.base.signals import Interrupted, exit_code
from arbcli.commands._help import combining
from arbcli.commands._options import Backend, Device, Json, ScaleType, Seed
from arbcli.commands._outputs import check_folder
from arbcli.verify.names import check_kernel_names

if TYPE_CHECKING:
    from arbcli.verify.ledger import Ledger


_NAMES = typer.Argument(metavar="KERNEL", help="[default: every kernel, and the model]")
_ALL_TSCALE_TYPES = typer.Option("--all-tscale-types", help="Check every scale type.")
_FUZZ = typer.Option(min=0, help="Only check this many random cases for each kernel.")
_TIMED = typer.Option(
    "--time", help="Also time the kernels that pass, next to torch and the GPU's roofline."
)
_LEDGER = typer.Option(metavar="DIR", help="Write the results to this folder.")
_LIST_ONLY = typer.Option("--list", help="List the kernels and their gates, without checking.")


@combining({"--all-tscale-types": ("--tscale-type",)})
def verify_kernels(
    names: Annotated[list[str] | None, _NAMES] = None,
    scale_type: ScaleType = None,
    all_tscale_types: Annotated[bool, _ALL_TSCALE_TYPES] = False,
    exhaustive: Annotated[
        bool,
        typer.Option("--exhaustive", help="Run Triton's kernels on all cases, in all scale types."),
    ] = False,
    fuzz: Annotated[int, _FUZZ] = 0,
    seed: Seed = None,
    timed: Annotated[bool, _TIMED] = False,
    ledger: Annotated[Path | None, _LEDGER] = None,
    list_only: Annotated[bool, _LIST_ONLY] = False,
    device: Device = None,
    backend: Backend = None,
    as_json: Json = False,
) -> None:
    """Compare kernels with their references: `arb verify-kernels --all-tscale-types`."""
    check_kernel_names(names or ())
    if ledger is not None:
        check_folder(ledger, "--ledger")
    with _stopped_before_any(), LiveLine("loading") as line:
        interpret_kernels_without_gpu(device)
        # slow to import, and not needed for `arb --help`
        from arbcli.verify.ledger import write_ledger
        from arbcli.verify.run import VerifyRequest, verify
        from arbcli.verify.scale_types import DEFAULT_SCALE_TYPE

    if list_only:
        emit_gates(as_json=as_json)
        return
    request = VerifyRequest(
        names=tuple(names or ()),
        scale_type=None if all_tscale_types else scale_type or DEFAULT_SCALE_TYPE,
        fuzz=fuzz,
        seed=seed or 0,
        timed=timed,
        device=device,
        backend=backend,
        exhaustive=exhaustive,
    )
    with _stopped_before_any(), LiveLine() as line:
        report = verify(request, partial(line.show, keep=True))
    try:
        if ledger:
            note(f"ledger  {' and '.join(map(str, write_ledger(report, ledger)))}")
    finally:  # what took long to find is shown, also where it cannot be written
        emit(report, ledger_tables(report), as_json=as_json)
    if report.interrupted:
        note(f"stopped by {report.interrupted}: the remaining checks were not run")
        raise typer.Exit(exit_code(report.interrupted))
    raise typer.Exit(0 if report.passed else 1)


def ledger_tables(ledger: "Ledger") -> Group:
    """Lay out results for kernels and models, and the failures."""
    from arbcli.verify.ledger import sections

    blocks: list[RenderableType] = [
        table(section.title, list(section.columns), section.rows, left=section.words)
        for section in sections(ledger)
    ]
    blocks += [
        Text(f"FAIL  {failure.item}  {failure.label}: {failure.error}\n      {failure.command}")
        for failure in ledger.failures
    ]
    outputs, elements, unwritten = (
        sum(getattr(result, name) for result in ledger.kernels)
        for name in ("outputs", "elements", "unwritten")
    )
    blocks.append(
        Text(
            f"{outputs:,} outputs of {elements:,} elements in poisoned memory,"
            f" {unwritten:,} elements left unwritten; {ledger.seconds:.0f} s"
        )
    )
    blocks += [Text(f"sampled: {item}") for item in ledger.sampled]
    return Group(*blocks)


def emit_gates(*, as_json: bool) -> None:
    """Print each kernel with its tolerance and the reason for it."""
    from arbcli.verify.registry import KERNELS

    if as_json:
        emit_json({spec.name: asdict(spec.gate) for spec in KERNELS})
        return
    rows = [[spec.name, spec.gate.text, spec.gate.reason] for spec in KERNELS]
    emit(None, table("kernels", ["kernel", "gate", "reason"], rows, left=3), as_json=False)


@contextmanager
def _stopped_before_any() -> Iterator[None]:
    """Exit with the code of a signal that arrives before anything is verified."""
    try:
        yield
    except Interrupted as stopped:
        note(f"stopped by {stopped.name}: nothing was verified")
        raise typer.Exit(exit_code(stopped.name)) from None
