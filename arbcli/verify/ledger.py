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
from arbcli.base.errors import ArbError, os_errors
from arbcli.base.reading import read_json
from arbcli.verify.check_kernels import METHODS, KernelResult
from arbcli.verify.compare import worst
from arbcli.verify.compile_ahead import PARKED_BYTES, CompileResult
from arbcli.verify.parity import CHECKS
from arbcli.verify.subjects import ParityResult
from arbcli.verify.timing import Roofline, TimingReport
from arbcli.version import __version__

FORMAT = 1
FILES = ("ledger.json", "ledger.md")


@dataclass(frozen=True, slots=True)
class Failure:
    """A failed check, and the command that reproduces it."""

    item: str
    label: str
    found: str
    command: str


@dataclass(frozen=True, slots=True)
class Ledger:
    """Report that `arb verify-kernels` prints and writes."""

    format: int
    date: str
    device: str
    versions: dict[str, str]
    commit: str | None
    """Commit of the program's checkout, with `-dirty` if it was changed; None without one."""
    scale_types: tuple[str, ...]
    kernels: tuple[KernelResult, ...]
    parity: tuple[ParityResult, ...]
    compiled: tuple[CompileResult, ...]
    failures: tuple[Failure, ...]
    ruled_out: tuple[str, ...]
    not_verified: tuple[str, ...]
    seconds: float
    passed: bool
    changes: tuple[str, ...] = ()
    """Changes since the ledger of the comparison."""
    timing: TimingReport | None = None
    """Results of the timing; None without it."""
    interrupted: str | None = None
    """Name of the signal that ended the checks early; `not_verified` lists the missing ones."""
    sampled: tuple[str, ...] = ()
    """Descriptions of the samples that were checked."""


def new_ledger(
    device: torch.device,
    scale_types: Iterable[str],
    kernels: tuple[KernelResult, ...],
    parity: tuple[ParityResult, ...],
    compiled: tuple[CompileResult, ...],
    not_verified: Iterable[str],
    seconds: float,
    timing: TimingReport | None = None,
    interrupted: str | None = None,
    sampled: tuple[str, ...] = (),
) -> Ledger:
    """Build the ledger from results and machine, with its conclusions."""
    failures = (
        *(failure for result in kernels for failure in _kernel_failures(result)),
        *(_parity_failure(result) for result in parity if not result.passed),
        *(_compile_failure(result) for result in compiled if not result.passed),
    )
    return Ledger(
        format=FORMAT,
        date=datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        device=_device_name(device),
        versions=_versions(),
        commit=_commit(),
        scale_types=tuple(scale_types),
        kernels=kernels,
        parity=parity,
        compiled=compiled,
        failures=failures,
        ruled_out=tuple(_ruled_out(kernels, parity, compiled)),
        not_verified=tuple(not_verified),
        seconds=round(seconds, 1),
        passed=not failures and interrupted is None,
        timing=timing,
        interrupted=interrupted,
        sampled=sampled,
    )


def _kernel_failures(result: KernelResult) -> Iterable[Failure]:
    command = f"arb verify-kernels {result.kernel}"
    scale_type = f" --tscale-type {result.scale_type}" if result.scale_type else ""
    for case in result.failures:
        fuzz = ""
        if result.kind == "fuzz":
            fuzz = f" --fuzz 1 --seed {case.label.split(':')[0].removeprefix('seed ')}"
        found = case.error or _figures(case.unequal, case.max_error, case.relative_error)
        item = f"{result.kernel} {result.backend}{' ' if result.scale_type else ''}"
        item += result.scale_type or ""
        yield Failure(item, case.label, found, f"{command}{fuzz}{scale_type}")


def _parity_failure(result: ParityResult) -> Failure:
    found = _figures(None, result.max_error, result.relative_error)
    item = f"{result.check} of {result.item}"
    command = f"arb verify-kernels --tscale-type {result.scale_type}"
    return Failure(item, f"{result.model} {result.backend}", found, command)


def _compile_failure(result: CompileResult) -> Failure:
    command = f"arb verify-kernels {result.kernel} --targets {result.target}"
    return Failure(result.kernel, result.target, result.error or "", command)


def _figures(unequal: int | None, max_error: float | None, relative: float | None) -> str:
    count = "" if unequal is None else f"{unequal} unequal, "
    return f"{count}largest error {number(max_error)}, relative {number(relative)}"


def number(value: float | None) -> str:
    """Format a figure in few characters; None is one that is not finite."""
    if value is None:
        return "not finite"
    return "0" if value == 0 else f"{value:.1e}"


def _ruled_out(
    kernels: tuple[KernelResult, ...],
    parity: tuple[ParityResult, ...],
    compiled: tuple[CompileResult, ...],
) -> Iterable[str]:
    """Return statements on what the passed checks rule out as the cause of a fault."""
    exact = [result for result in kernels if result.unequal is not None]
    if exact and not any(result.unequal for result in exact):
        total = sum(result.elements for result in exact)
        yield f"integer state that differs from its reference: 0 of {total:,} elements"
    outputs, elements = (sum(getattr(r, f) for r in kernels) for f in ("outputs", "elements"))
    if kernels and not any(result.unwritten for result in kernels):
        yield (
            f"results left unwritten: {outputs:,} outputs were written whole, {elements:,}"
            " elements, over poisoned memory"
        )
    drawn = [r.drawn for r in kernels if r.drawn]
    seen = drawn and not any({"strided", "offset"} & {*d.never} for d in drawn)
    if seen and all(r.passed for r in kernels):
        yield "results that depend on strides or offsets, in the random cases listed"
    excluded = {
        "output": "a layer's forward that departs from float64 on the same input",
        "gradient": "a layer's backward, or a weight's gradient, that departs from float64",
        "end to end": "an error that builds up over the layers in float32",
        "whole gradient": "a weight's gradient in the graph model that departs from float64",
        "causality": "a later byte that moves an earlier logit",
        "determinism": "two equal steps that differ in a bit",
        "rotary": "rotary tables of too few bits, or an inverse that is none",
        "update": "a step that is biased, or off by more than its rounding",
    }
    for check, text in excluded.items():
        results = [result for result in parity if result.check == check]
        if results and all(result.passed for result in results):
            yield f"{text}: {len(results)} comparisons"
    if compiled and all(result.passed for result in compiled):
        targets = ", ".join(dict.fromkeys(result.target for result in compiled))
        spill = f"spill more than {PARKED_BYTES} bytes"
        yield f"kernels that do not compile, {spill} or overflow shared memory: {targets}"


def _device_name(device: torch.device) -> str:
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    return f"cpu ({platform.machine()})"


def _versions() -> dict[str, str]:
    versions = {"arb": __version__, "python": platform.python_version(), "torch": torch.__version__}
    return versions | {"triton": _triton_version() or "not installed"}


def _triton_version() -> str | None:
    from importlib.metadata import PackageNotFoundError, version

    try:
        return version("triton")
    except PackageNotFoundError:
        return None


def _commit() -> str | None:
    """Return the commit of the checkout that tracks this file; None without one."""
    package = Path(__file__).parent
    git = ["git", "--no-optional-locks", "-C", str(package)]
    tracked = [*git, "ls-files", "--error-unmatch", "__init__.py"]
    describe = [*git, "describe", "--always", "--dirty", "--abbrev=40", "--exclude=*"]
    try:
        subprocess.run(tracked, check=True, capture_output=True, timeout=10)
        found = subprocess.run(describe, check=True, capture_output=True, text=True, timeout=10)
    except (OSError, subprocess.SubprocessError):
        return None
    return found.stdout.strip()


def write_ledger(ledger: Ledger, directory: Path) -> list[Path]:
    """Write a ledger as JSON, for `compare_ledgers`, and as Markdown.

    Raises:
        ArbError: it cannot be written.
    """
    data, page = (directory / name for name in FILES)
    with os_errors("write", directory, "choose another `--ledger`"):
        directory.mkdir(parents=True, exist_ok=True)
    write_text(page, ledger_page(ledger))
    write_json(data, dataclasses.asdict(ledger))
    return [data, page]


def read_ledger(path: Path) -> dict[str, Any]:
    """Read a ledger that `write_ledger` wrote.

    Raises:
        ArbError: the file is not a ledger of this format.
    """
    old = read_json(path)
    if not isinstance(old, dict) or old.get("format") != FORMAT:
        raise ArbError(
            f"`{path}` is not a ledger of format {FORMAT}",
            hint=f"give the `{FILES[0]}` that `--ledger` wrote",
        )
    return old


def compare_ledgers(old: dict[str, Any], ledger: Ledger) -> tuple[str, ...]:
    """Return the differences between an older ledger and this one as lines."""
    new = dataclasses.asdict(ledger)
    lines = [
        f"{name}: {old.get(name)} -> {new[name]}"
        for name in ("device", "versions", "commit")
        if old.get(name) != new[name]
    ]
    for part, names in _KEYS.items():
        rows = [{tuple(r[name] for name in names): r for r in side[part]} for side in (old, new)]
        for key in dict.fromkeys([*rows[0], *rows[1]]):
            title = " ".join(str(word) for word in key if word is not None)
            before, after = (side.get(key) for side in rows)
            lines += [f"{title}: {change}" for change in _changes(before, after)]
    if old.get("timing") and new["timing"]:
        lines += _speed_changes(old["timing"]["timings"], new["timing"]["timings"])
    return tuple(lines)


_KEYS = {
    "kernels": ("kernel", "backend", "scale_type", "kind"),
    "parity": ("check", "item", "model", "backend"),
    "compiled": ("kernel", "target"),
}
"""Fields that name a row in each part of a ledger."""


def _changes(before: dict[str, Any] | None, after: dict[str, Any] | None) -> Iterable[str]:
    if before is None or after is None:
        yield "not compared before" if before is None else "not compared now"
        return
    for name in ("passed", "gate", "unequal", "error", "registers", "spill_bytes", "shared_bytes"):
        if before.get(name) != after.get(name):
            yield f"{name} {before.get(name)} -> {after.get(name)}"
    if "shapes" in after and before["shapes"] != [*after["shapes"]]:
        yield f"other shapes: {len(before['shapes'])} -> {len(after['shapes'])}"
    old, new = (side.get("relative_error") or 0.0 for side in (before, after))
    if max(old, new) > 4 * min(old, new) and max(old, new) > 1e-6:
        yield f"relative error {number(old)} -> {number(new)}"


def _speed_changes(before: Iterable[dict], after: Iterable[dict]) -> Iterable[str]:
    """Return lines on kernels that are faster or slower by more than a tenth."""
    old = {(result["kernel"], result["shape"]): result["us"] for result in before}
    for result in after:
        us = old.get((result["kernel"], result["shape"]), result["us"])
        if max(us, result["us"]) > 1.1 * min(us, result["us"]):
            yield f"{result['kernel']} {result['shape']}: {us:.1f} us -> {result['us']:.1f} us"


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
    lines += _section("Failures", ["item", "where", "found", "command"], _failure_rows(ledger))
    figures = ["largest error", "relative", "cosine", "gate", ""]
    columns = ["kernel", "backend", "method", "cases", "elements", *figures]
    lines += _section("Kernels", columns, _kernel_rows(ledger))
    lines += _notes(METHODS, ledger.kernels, "kind")
    lines += _section("What random cases were", DRAWN_COLUMNS, _drawn_rows(ledger))
    columns = ["check", "model", "backend", "comparisons", *figures]
    lines += _section("The whole model", columns, _parity_rows(ledger))
    lines += _notes(CHECKS, ledger.parity, "check")
    columns = ["kernel", "target", "variants", "registers", "spilled bytes", "shared bytes", ""]
    lines += _section("Compiled ahead, not run", columns, _compile_rows(ledger))
    if ledger.timing:
        lines += _section("Speed", SPEED_COLUMNS, speed_rows(ledger.timing))
        notes = {"measured": roofline_text(ledger.timing.roofline)} | SPEED_NOTES
        lines += [f"- {key}: {text}" for key, text in notes.items()]
    if ledger.changes:
        lines += ["", "## Changed", "", *(f"- {change}" for change in ledger.changes)]
    lines += ["", "## Ruled out", "", *(f"- {item}" for item in ledger.ruled_out)]
    lines += ["", "## Not verified here", "", *(f"- {item}" for item in ledger.not_verified)]
    lines += ["", "## Shapes", "", *_shape_lines(ledger)]
    return "\n".join(lines) + "\n"


def _kernel_rows(ledger: Ledger) -> Iterable[list[str]]:
    for (kernel, backend, kind), group in grouped(ledger.kernels, "kernel", "backend", "kind"):
        cases, elements = sum(len(r.shapes) for r in group), sum(r.elements for r in group)
        figures = [str(cases), f"{elements:,}", *_worst_figures(group), group[0].gate]
        yield [kernel, backend, kind, *figures, verdict(group)]


DRAWN_COLUMNS = [
    "kernel", "scales", "cases", "elements", "types", "strided", "offset", "saturated", "in parts",
]  # fmt: skip


def _drawn_rows(ledger: Ledger) -> Iterable[list[str]]:
    """Return a table of the random cases of each kernel, which are equal for all backends."""
    for (kernel, scale_type), (r, *_) in grouped(ledger.kernels, "kernel", "scale_type"):
        if d := r.drawn:
            sizes = f"{d.elements[0]:,} to {d.elements[1]:,}"
            types = ", ".join(f"{name} {count}" for name, count in d.dtypes.items())
            counts = map(str, (d.strided, d.offset, d.saturated, d.in_parts))
            yield [kernel, scale_type or "", str(d.cases), sizes, types, *counts]


def _parity_rows(ledger: Ledger) -> Iterable[list[str]]:
    names = ("check", "model", "backend", "gate")
    for (*key, gate), group in grouped(ledger.parity, *names):
        yield [*key, str(len(group)), *_worst_figures(group), gate, verdict(group)]


def _compile_rows(ledger: Ledger) -> Iterable[list[str]]:
    for r in ledger.compiled:
        figures = (r.variants, r.registers, r.spill_bytes, r.shared_bytes)
        yield [r.kernel, r.target, *map(str, figures), verdict([r])]


SPEED_COLUMNS = ["kernel", "shape", "us", "peer", "peer us", "speedup", "roofline", "bound"]
SPEED_NOTES = {
    "us": "medians of replays of a CUDA graph, from a cold L2 cache, in turns with the peer",
    "speedup": "the peer's time over the kernel's, in the median turn",
    "roofline": "the least time that the copy (of inputs read once and results written once) and"
    " the product allow, over the time taken; a few us are mostly the empty call, and results that"
    " stay in the cache can take less",
}


def speed_rows(timing: TimingReport) -> Iterable[list[str]]:
    """Return a table of speeds, with a row for each kernel that was not timed."""
    for r in timing.timings:
        against = [r.peer, f"{r.peer_us:.1f}", f"{r.ratio:.2f}"] if r.peer else [""] * 3
        yield [r.kernel, r.shape, f"{r.us:.1f}", *against, f"{r.share:.0%}", r.bound]
    for kernel, reason in timing.not_timed.items():
        yield [kernel, f"not timed: {reason}", *[""] * 6]


def roofline_text(roofline: Roofline) -> str:
    """Format the measured bandwidth and throughput of the machine as one line."""
    return (
        f"copy {roofline.bytes_per_second / 1e12:.2f} TB/s,"
        f" bf16 product {roofline.flops_per_second / 1e12:.0f} TFLOP/s,"
        f" empty call {roofline.launch_us:.1f} us"
    )


def _worst_figures(group: list[Any]) -> list[str]:
    largest, relative = (
        worst(getattr(result, name) for result in group) for name in ("max_error", "relative_error")
    )
    return [number(largest), number(relative), f"{min(result.cosine for result in group):.9f}"]


def verdict(results: list[Any]) -> str:
    """Return `pass` if all results passed, else `FAIL`."""
    return "pass" if all(result.passed for result in results) else "FAIL"


def _failure_rows(ledger: Ledger) -> list[list[str]]:
    return [[f.item, f.label, f.found, f"`{f.command}`"] for f in ledger.failures]


def _shape_lines(ledger: Ledger) -> Iterable[str]:
    for (kernel, kind), group in grouped(ledger.kernels, "kernel", "kind"):
        shapes = dict.fromkeys(shape for result in group for shape in result.shapes)
        if not shapes:  # all of them are left out
            continue
        yield f"- {kernel}, {kind}: {'; '.join(shapes)}"


def grouped(results: Iterable[Any], *names: str) -> list[tuple[tuple, list[Any]]]:
    """Group results by some of their fields, in the order of first occurrence."""
    groups: dict[tuple, list[Any]] = {}
    for result in results:
        groups.setdefault(tuple(getattr(result, name) for name in names), []).append(result)
    return list(groups.items())


def _notes(methods: dict[str, str], results: tuple[Any, ...], name: str) -> list[str]:
    """Explain the methods and the gates that occur in some results."""
    used = dict.fromkeys(getattr(result, name) for result in results)
    gates = dict.fromkeys((result.gate, result.reason) for result in results)
    return [
        *(f"- {key}: {methods[key]}" for key in used),
        *(f"- gate `{gate}`: {reason}" for gate, reason in gates),
    ]


def _section(title: str, columns: list[str], rows: Iterable[list[str]]) -> list[str]:
    rows = list(rows)
    if not rows:
        return []
    rows = [[cell.replace("|", "\\|") for cell in row] for row in rows]
    table = [columns, ["---"] * len(columns), *rows]
    return ["", f"## {title}", "", *(f"| {' | '.join(row)} |" for row in table), ""]
