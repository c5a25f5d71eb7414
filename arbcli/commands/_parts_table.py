"""The table of a model's parts, indented like a tree."""

from collections.abc import Iterable
from typing import TYPE_CHECKING

from rich.table import Table

from arbcli.base.output import table

if TYPE_CHECKING:
    from arbcli.inspect.parts import PartReport

COLUMNS = ["part", "kind", "shape", "weights", "MB", "lr"]


def parts_table(parts: Iterable["PartReport"]) -> Table:
    """Lay out the parts of a model in tree order; `lr` is the factor of the learning rate."""
    rows = [
        [
            _name(part),
            part.kind if part.kind != "block" or part.count == 1 else f"{part.count} blocks",
            part.shape,
            f"{part.weights / 1e6:,.2f} M" if part.weights >= 1e6 else f"{part.weights:,}",
            f"{part.bytes / 1e6:,.2f}",
            ", ".join(f"{factor:.3g}" for factor in part.lr_factors),
        ]
        for part in parts
    ]
    result = table(
        "Parts: sizes of equal blocks are added up; lr multiplies the learning rate",
        COLUMNS,
        rows,
        left=3,
    )
    for name, column in zip(COLUMNS, result.columns, strict=True):
        column.no_wrap = name != "shape"
    return result


def _name(part: "PartReport") -> str:
    names = part.path.split(".")
    name = ".".join(names[-2:]) if names[-1][0].isdigit() else names[-1]
    return f"{'  ' * part.depth}{name.replace('.', ' ')}"
