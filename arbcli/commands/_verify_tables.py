"""Tables of `arb verify-kernels`."""

from dataclasses import asdict
from typing import TYPE_CHECKING

from arbcli.base.output import emit, emit_json, table

if TYPE_CHECKING:
    from rich.console import Group

    from arbcli.verify.ledger import Ledger


def ledger_tables(found: "Ledger") -> "Group":
    """Lay out results for kernels, models and compilation, and the failures."""
    from rich.console import Group, RenderableType
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
        cases = sum(len(result.shapes) for result in group)
        every = cases + sum(result.left_out for result in group)
        counted = f"{cases} of {every}" if every > cases else f"{cases}"
        unequal = [result.unequal for result in group if result.unequal is not None]
        relative = number(worst(result.relative_error for result in group))
        error = f"{sum(unequal)} unequal" if unequal else relative
        seconds = f"{sum(result.seconds for result in group):.1f}"
        kernels.append([*key, counted, error, seconds, verdict(group)])
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
    parts: list[RenderableType] = [table(f"kernels on {title}", columns, kernels, left=2)]
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
    parts += [Text(f"sampled: {item}") for item in found.sampled]
    return Group(*parts)


def emit_gates(*, as_json: bool) -> None:
    """Print each kernel with its tolerance and the reason for it."""
    from arbcli.verify.check_kernels import KERNELS

    if as_json:
        emit_json({spec.name: asdict(spec.gate) for spec in KERNELS})
        return
    rows = [[spec.name, spec.gate.text, spec.gate.reason] for spec in KERNELS]
    emit(None, table("kernels", ["kernel", "gate", "reason"], rows, left=3), as_json=False)
