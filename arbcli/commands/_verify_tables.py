"""Tables of `arb verify-kernels`."""

from dataclasses import asdict
from typing import TYPE_CHECKING

from arbcli.base.output import emit, emit_json, table

if TYPE_CHECKING:
    from rich.console import Group

    from arbcli.verify.ledger import Ledger


def ledger_tables(ledger: "Ledger") -> "Group":
    """Lay out results for kernels and models, and the failures."""
    from rich.console import Group, RenderableType
    from rich.text import Text

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
