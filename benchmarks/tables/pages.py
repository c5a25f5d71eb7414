"""The pages that have tables, and the module of each page."""

import re
from pathlib import Path
from types import ModuleType

from benchmarks.results import FOLDER, load
from benchmarks.tables import (
    hnet,
    imports,
    many_gpus,
    models,
    performance,
    readme,
    results,
)

ROOT = FOLDER.parents[1]
PAGES: dict[str, ModuleType] = {
    "README.md": readme,
    "docs/hnet.md": hnet,
    "docs/import.md": imports,
    "docs/many-gpus.md": many_gpus,
    "docs/models.md": models,
    "docs/performance.md": performance,
    "docs/results.md": results,
}
"""Module of each page; its `TABLES` has the tables of that page by name."""
MARKED = re.compile(r"(<!-- table: ([\w-]+) -->\n).*?(<!-- end -->)", re.DOTALL)


def paths() -> list[Path]:
    """List the files of all pages."""
    return [ROOT / page for page in PAGES]


def with_tables(path: Path) -> str:
    """Return the text of a page with every marked table written anew.

    Raises:
        KeyError: the page has no module, or its module has no such table.
    """
    tables = PAGES[path.relative_to(ROOT).as_posix()].TABLES

    def write(match: re.Match) -> str:
        file, table = tables[match[2]]
        return match[1] + table(load(file)) + match[3]

    return MARKED.sub(write, path.read_text())
