"""Results are files of one form, and every table in the documents is what they say."""

import re
from importlib import import_module
from pathlib import Path

import pytest

from benchmarks import results
from benchmarks.results import FOLDER, KEYS, add_runs, load, options
from benchmarks.tables import pages
from benchmarks.tables.steps import faster, speed_ratio

DATE = re.compile(r"\b20\d\d-\d\d-\d\d\b|\d\d:\d\d:\d\d")


def run(rows, commit="abc1234", **given):
    return {
        "command": "python -m benchmarks.training_step",
        "commit": commit,
        "dirty": False,
        "hardware": dict.fromkeys(results.HARDWARE_FIELDS) | {"gpu": "a GPU"},
        "versions": dict.fromkeys(results.VERSION_FIELDS) | {"torch": "2.11"},
        "rows": rows,
    } | given


def step(preset, kind, ms, **given):
    shape = {"weights": 1_000_000, "ctx": 64, "batch": 16, "bytes_per_second": round(1e6 / ms)}
    return {"preset": preset, "kind": kind, "ms": ms} | shape | given


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


def test_row_measured_again_leaves_its_old_run(tmp_path):
    first = [step("tiny", "factored", 2.0), step("tiny", "AdamW", 1.0)]
    add_runs("training_step", [run(first)], tmp_path)
    add_runs("training_step", [run([step("tiny", "AdamW", 0.5)], "def5678")], tmp_path)
    old, new = load("training_step", tmp_path)
    assert [row["kind"] for row in old["rows"]] == ["factored"]
    assert (new["commit"], new["rows"][0]["ms"]) == ("def5678", 0.5)
    add_runs("training_step", [run([step("tiny", "factored", 1.0)], "def5678")], tmp_path)
    assert [entry["commit"] for entry in load("training_step", tmp_path)] == ["def5678"] * 2


def test_saved_run_has_its_source(tmp_path, monkeypatch):
    monkeypatch.setenv("ARB_COMMIT", "abc1234+")
    rows = [step("tiny", "AdamW", 1.0)]
    results.save("training_step", rows, command="python -m benchmarks.training_step tiny",
                 folder=tmp_path)  # fmt: skip
    (saved,) = load("training_step", tmp_path)
    assert (saved["commit"], saved["dirty"]) == ("abc1234", True)
    assert saved["versions"]["torch"]
    assert saved["hardware"]["cpu"]
    assert saved["rows"] == rows


def test_ratio_of_turns_is_the_median_over_rounds():
    ours = step("tiny", "factored", 2.0, in_turns=True, rounds_ms=[2.0, 4.0, 2.0])
    peer = step("tiny", "AdamW", 1.0, in_turns=True, rounds_ms=[1.0, 8.0, 1.0])
    assert speed_ratio([run([ours, peer])], ours, peer) == 0.5
    peer["ms"] = 3.0
    assert speed_ratio([run([ours]), run([peer])], ours, peer) == 1.5
    other = run([peer], hardware=dict.fromkeys(results.HARDWARE_FIELDS) | {"gpu": "another"})
    assert speed_ratio([run([ours]), other], ours, peer) is None
    assert faster([run([ours]), other], ours, "AdamW") is None
    ours["in_turns"] = False
    assert speed_ratio([run([ours, peer])], ours, peer) == 1.5
    assert speed_ratio([], ours, None) is None


@pytest.mark.parametrize("name", ["loss-against-memory", "speed", "step-budget"])
def test_figures_are_drawn_from_the_results(name):
    pytest.importorskip("matplotlib")
    from benchmarks import plots

    file, draw = plots.FIGURES[name]
    assert draw(load(file)).axes
    assert (pages.ROOT / "docs" / f"{name}.svg").exists()


def test_benchmark_without_a_commit_ends_before_it_measures(monkeypatch):
    monkeypatch.delenv("ARB_COMMIT", raising=False)
    monkeypatch.setenv("PATH", "")  # no git
    with pytest.raises(SystemExit, match="set ARB_COMMIT"):
        options("frontier", "").parse_args([])
    monkeypatch.setenv("ARB_COMMIT", "abc")
    assert options("frontier", "").parse_args([]).out == FOLDER


def test_list_says_what_every_benchmark_shows(capsys):
    runner = import_module("benchmarks.__main__")
    folder = Path(results.__file__).parent
    programs = {p.stem for p in folder.glob("[!_]*.py") if "__main__" in p.read_text()}
    parts = runner.GPU_PARTS | runner.CPU_PARTS
    assert {name.split(".")[0] for name in parts} | set(runner.OTHERS) <= programs
    runner.print_list()
    printed = capsys.readouterr().out
    listed = dict(re.findall(r"^(\w+): (.+\.)$", printed, re.MULTILINE))
    assert set(listed) == programs
    assert all(f"    {part}: about {seconds} s" in printed for part, seconds in parts.items())
    assert all(time in printed for time in runner.OTHERS.values())


def test_every_result_is_shown_by_a_page_or_a_figure():
    shown = {file for module in pages.PAGES.values() for file, _ in module.TABLES.values()}
    assert {path.stem for path in FOLDER.glob("*.json")} == shown
    assert shown <= set(KEYS)
