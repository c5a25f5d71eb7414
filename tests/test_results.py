"""Results are files of one form, and every table in the documents is what they say."""

import re

import pytest

from benchmarks.results import FOLDER, KEYS, load
from benchmarks.tables import pages

DATE = re.compile(r"\b20\d\d-\d\d-\d\d\b|\d\d:\d\d:\d\d")


@pytest.mark.parametrize("path", sorted(FOLDER.glob("*.json")), ids=lambda path: path.stem)
def test_file_has_runs_with_their_source_and_rows_named_once(path):
    runs = load(path.stem)
    names = [tuple(row[field] for field in KEYS[path.stem]) for run in runs for row in run["rows"]]
    assert names
    assert len(names) == len(set(names))
    assert all(re.fullmatch(r"[0-9a-f]{7,40}", run["commit"]) for run in runs)
    assert not DATE.search(path.read_text())


@pytest.mark.parametrize("path", pages.paths(), ids=lambda path: path.name)
def test_tables_follow_from_the_results(path):
    """After a change of either: `python -m benchmarks.tables`."""
    assert pages.with_tables(path) == path.read_text()


@pytest.mark.parametrize(
    "path", [pages.ROOT / "README.md", *(pages.ROOT / "docs").glob("*.md")], ids=lambda p: p.name
)
def test_module_of_a_page_has_its_tables_in_their_order(path):
    text = path.read_text()
    names = [name for _, name, _ in pages.MARKED.findall(text)]
    module = pages.PAGES.get(path.relative_to(pages.ROOT).as_posix())
    assert names == list(module.TABLES if module else ())
    assert text.count("<!-- table: ") - text.count("<!-- table: ...") == len(names)


def test_every_figure_has_the_runs_that_it_names():
    plots = pytest.importorskip("benchmarks.plots")
    for file, draw in plots.FIGURES.values():
        plots.pyplot.close(draw(load(file)))


def test_every_result_is_shown_by_a_page():
    shown = {file for module in pages.PAGES.values() for file, _ in module.TABLES.values()}
    assert {path.stem for path in FOLDER.glob("*.json")} == shown
    assert shown <= set(KEYS)
