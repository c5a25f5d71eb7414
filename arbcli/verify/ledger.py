"""Ledger of a verification: comparisons, methods, errors, and gaps."""

import dataclasses
import datetime
import platform
import subprocess
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from arbcli.base.atomic_files import write_json, write_text
from arbcli.base.errors import os_errors
from arbcli.verify.check_kernels import METHODS, KernelResult
from arbcli.verify.compare import worst
from arbcli.verify.parity import CHECKS
from arbcli.verify.subjects import ParityResult
from arbcli.verify.timing import Roofline, TimingReport
from arbcli.version import __version__

FILES = ("ledger.json", "ledger.md")


@dataclass(frozen=True, slots=True)
class Failure:
    """A failed check, and the command that reproduces it."""

    item: str
    label: str
    error: str
    command: str


@dataclass(frozen=True, slots=True)
class Ledger:
    """Report that `arb verify-kernels` prints and writes."""

    date: str
    device: str
    versions: dict[str, str]
    commit: str | None
    """Commit of the program's checkout, with `-dirty` if it was changed; None without one."""
    scale_types: tuple[str, ...]
    kernels: tuple[KernelResult, ...]
    parity: tuple[ParityResult, ...]
    failures: tuple[Failure, ...]
    ruled_out: tuple[str, ...]
    not_verified: tuple[str, ...]
    seconds: float
    passed: bool
    timing: TimingReport | None
    """Results of the timing; None without it."""
    interrupted: str | None
    """Name of the signal that ended the checks early; `not_verified` lists the missing ones."""
    sampled: tuple[str, ...]
    """Descriptions of the samples that were checked."""


def new_ledger(
    *,
    device: torch.device,
    kernels: tuple[KernelResult, ...],
    parity: tuple[ParityResult, ...],
    interrupted: str | None,
    **fields: Any,
) -> Ledger:
    """Build the ledger from results and machine, with its conclusions."""
    failures = (
        *(failure for result in kernels for failure in _kernel_failures(result)),
        *(_parity_failure(result) for result in parity if not result.passed),
    )
    uses_gpu = device.type == "cuda"
    return Ledger(
        date=datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        device=torch.cuda.get_device_name(device) if uses_gpu else f"cpu ({platform.machine()})",
        versions=_versions(),
        commit=_commit(),
        kernels=kernels,
        parity=parity,
        failures=failures,
        ruled_out=tuple(_ruled_out(kernels, parity)),
        passed=not failures and interrupted is None,
        interrupted=interrupted,
        **fields,
    )


def _kernel_failures(result: KernelResult) -> Iterable[Failure]:
    command = f"arb verify-kernels {result.kernel}"
    scale_type = f" --tscale-type {result.scale_type}" if result.scale_type else ""
    for case in result.failures:
        fuzz = ""
        if result.kind == "fuzz":
            fuzz = f" --fuzz 1 --seed {case.label.split(':')[0].removeprefix('seed ')}"
        error = case.error or _figures(case.unequal, case.max_error, case.relative_error)
        item = " ".join(filter(None, (result.kernel, result.backend, result.scale_type)))
        yield Failure(item, case.label, error, f"{command}{fuzz}{scale_type}")


def _parity_failure(result: ParityResult) -> Failure:
    error = _figures(None, result.max_error, result.relative_error)
    item = f"{result.check} of {result.item}"
    command = f"arb verify-kernels --tscale-type {result.scale_type}"
    return Failure(item, f"{result.model} {result.backend}", error, command)


def _figures(unequal: int | None, max_error: float | None, relative: float | None) -> str:
    count = "" if unequal is None else f"{unequal} unequal, "
    return f"{count}largest error {number(max_error)}, relative {number(relative)}"


def number(value: float | None) -> str:
    """Format a figure in few characters; None is one that is not finite."""
    if value is None:
        return "not finite"
    return "0" if value == 0 else f"{value:.1e}"


def _ruled_out(
    kernels: tuple[KernelResult, ...], parity: tuple[ParityResult, ...]
) -> Iterable[str]:
    """Return statements on what the passed checks rule out as the cause of a fault."""
    exact = [result for result in kernels if result.unequal is not None]
    if exact and not any(result.unequal for result in exact):
        total = sum(result.elements for result in exact)
        yield f"integer state that differs from its reference: 0 of {total:,} elements"
    if kernels and not any(result.unwritten for result in kernels):
        total = sum(result.elements for result in kernels)
        yield f"results left unwritten: 0 of {total:,} elements, over poisoned memory"
    for check, text in CHECKS.items():
        results = [result for result in parity if result.check == check]
        if results and all(result.passed for result in results):
            yield f"failures of `{check}` ({text}): 0 of {len(results)} comparisons"


def _versions() -> dict[str, str]:
    from importlib.metadata import PackageNotFoundError, version

    versions = {"arb": __version__, "python": platform.python_version(), "torch": torch.__version__}
    try:
        return versions | {"triton": version("triton")}
    except PackageNotFoundError:
        return versions | {"triton": "not installed"}


def _commit() -> str | None:
    """Return the commit of the checkout that tracks this file; None without one."""
    git = ["git", "--no-optional-locks", "-C", str(Path(__file__).parent)]
    tracked = [*git, "ls-files", "--error-unmatch", "__init__.py"]
    describe = [*git, "describe", "--always", "--dirty", "--abbrev=40", "--exclude=*"]
    try:
        subprocess.run(tracked, check=True, capture_output=True, timeout=10)
        described = subprocess.run(describe, check=True, capture_output=True, text=True, timeout=10)
    except (OSError, subprocess.SubprocessError):
        return None
    return described.stdout.strip()


def write_ledger(ledger: Ledger, directory: Path) -> list[Path]:
    """Write a ledger as JSON and as Markdown.

    Raises:
        ArbError: it cannot be written.
    """
    data, page = (directory / name for name in FILES)
    with os_errors("write", directory, "choose another `--ledger`"):
        directory.mkdir(parents=True, exist_ok=True)
    write_text(page, ledger_page(ledger))
    write_json(data, dataclasses.asdict(ledger))
    return [data, page]


@dataclass(frozen=True, slots=True)
class Section:
    """A table of a ledger."""

    title: str
    columns: tuple[str, ...]
    rows: list[list[str]]
    words: int = 2
    """Number of first columns that are words."""


def sections(ledger: Ledger) -> list[Section]:
    """Lay out the results for kernels, models and speed."""
    kernels = []
    for (kernel, backend), group in grouped(ledger.kernels, "kernel", "backend"):
        cases = sum(len(result.shapes) for result in group)
        every = cases + sum(result.left_out for result in group)
        unequal = [result.unequal for result in group if result.unequal is not None]
        relative = number(worst(result.relative_error for result in group))
        error = f"{sum(unequal)} unequal" if unequal else relative
        counted = f"{cases} of {every}" if every > cases else f"{cases}"
        seconds = f"{sum(result.seconds for result in group):.1f}"
        kernels.append([kernel, backend, counted, error, seconds, verdict(group)])
    models = [
        [check, backend, str(len(group)), *_worst_figures(group), verdict(group)]
        for (check, backend), group in grouped(ledger.parity, "check", "backend")
    ]
    types = dict.fromkeys((ledger.scale_types[0], ledger.scale_types[-1]))
    title = f"{ledger.device}, {' to '.join(types)}"
    errors = ("largest error", "relative")
    laid_out = [
        Section(f"kernels on {title}", ("kernel", "backend", "cases", "error", "s", ""), kernels),
        Section(f"model on {title}", ("model", "backend", "compared", *errors, ""), models),
    ]
    if ledger.timing:
        speed = f"speed on {ledger.device}: {_roofline(ledger.timing.roofline)}"
        columns = ("kernel", "shape", "us", "library us", "speedup", "roofline", "bound")
        laid_out.append(Section(speed, columns, list(_speed_rows(ledger.timing))))
    return [section for section in laid_out if section.rows]


def _worst_figures(group: list[ParityResult]) -> list[str]:
    names = ("max_error", "relative_error")
    return [number(worst(getattr(result, name) for result in group)) for name in names]


def _speed_rows(timing: TimingReport) -> Iterable[list[str]]:
    """Return a table of speeds, with a row for each kernel that was not timed."""
    for r in timing.timings:
        library = ["", ""] if r.library_us is None else [f"{r.library_us:.1f}", f"{r.ratio:.2f}"]
        yield [r.kernel, r.shape, f"{r.us:.1f}", *library, f"{r.share:.0%}", r.bound]
    for kernel, reason in timing.not_timed.items():
        yield [kernel, f"not timed: {reason}", *[""] * 5]


def _roofline(roofline: Roofline) -> str:
    return (
        f"copy {roofline.bytes_per_second / 1e12:.2f} TB/s,"
        f" bf16 product {roofline.flops_per_second / 1e12:.0f} TFLOP/s,"
        f" empty call {roofline.launch_us:.1f} us"
    )


def ledger_page(ledger: Ledger) -> str:
    """Write a ledger as Markdown."""
    versions = ", ".join(f"{name} {version}" for name, version in ledger.versions.items())
    outcome = f"{len(ledger.failures)} checks FAILED" if ledger.failures else "Everything passed"
    if ledger.interrupted:
        failed = len(ledger.failures) or "no"
        outcome = f"Stopped by {ledger.interrupted}; {failed} checks failed until then"
    lines = [
        "# What was verified",
        "",
        f"{outcome}, on {ledger.date}, in {ledger.seconds} s.",
        "",
        f"- device: {ledger.device}",
        f"- versions: {versions}",
        f"- commit: {ledger.commit or 'not in a checkout'}",
        f"- scale types: {', '.join(ledger.scale_types)}",
        *(f"- sampled: {item}" for item in ledger.sampled),
    ]
    failures = [[f.item, f.label, f.error, f"`{f.command}`"] for f in ledger.failures]
    columns = ("item", "where", "error", "command")
    tables = [Section("failures", columns, failures), *sections(ledger)]
    for table in (table for table in tables if table.rows):
        rows = [[cell.replace("|", "\\|") for cell in row] for row in table.rows]
        rows = [list(table.columns), ["---"] * len(table.columns), *rows]
        lines += ["", f"## {table.title}", "", *(f"| {' | '.join(row)} |" for row in rows)]
    gated: tuple[Any, ...] = (*ledger.kernels, *ledger.parity)
    gates = dict.fromkeys((result.gate, result.reason) for result in gated)
    shapes = {
        f"{kernel}, {kind}": "; ".join(dict.fromkeys(s for result in group for s in result.shapes))
        for (kernel, kind), group in grouped(ledger.kernels, "kernel", "kind")
    }
    lists = {
        "methods": [f"{kind}: {text}" for kind, text in (METHODS | CHECKS).items()],
        "gates": [f"`{gate}`: {reason}" for gate, reason in gates],
        "shapes": [f"{name}: {labels}" for name, labels in shapes.items() if labels],
        "ruled out": ledger.ruled_out,
        "not verified here": ledger.not_verified,
    }
    for title, items in lists.items():
        lines += ["", f"## {title}", "", *(f"- {item}" for item in items)]
    return "\n".join(lines) + "\n"


def verdict(results: list[Any]) -> str:
    """Return `pass` if all results passed, else `FAIL`."""
    return "pass" if all(result.passed for result in results) else "FAIL"


def grouped(results: Iterable[Any], *names: str) -> list[tuple[tuple, list[Any]]]:
    """Group results by some of their fields, in the order of first occurrence."""
    groups: dict[tuple, list[Any]] = {}
    for result in results:
        groups.setdefault(tuple(getattr(result, name) for name in names), []).append(result)
    return list(groups.items())
