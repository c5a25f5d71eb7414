"""Results are files of one form, and every table in the documents is what they say."""

import json
import re
from importlib import import_module
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from benchmarks import measuring, results, training_step
from benchmarks.results import FOLDER, KEYS, add_runs, load, options
from benchmarks.tables import imports, many_gpus, models, pages, performance
from benchmarks.tables.cells import source
from benchmarks.tables.readme import speed
from benchmarks.tables.steps import faster, speed_ratio
from benchmarks.training_step import Subject

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


@pytest.mark.parametrize(
    "path", sorted(Path(results.__file__).parent.glob("[!_]*.py")), ids=lambda path: path.stem
)
def test_benchmark_imports_names_that_exist(path):
    try:
        import_module(f"benchmarks.{path.stem}")
    except ModuleNotFoundError as error:
        if (error.name or "").split(".")[0] in ("arbcli", "benchmarks"):
            raise
        pytest.skip(f"{error.name} is not installed")


def test_row_measured_again_leaves_its_old_run(tmp_path):
    first = [step("tiny", "factored", 2.0), step("tiny", "AdamW", 1.0)]
    add_runs("training_step", [run(first)], tmp_path)
    add_runs("training_step", [run([step("tiny", "AdamW", 0.5)], "def5678")], tmp_path)
    old, new = load("training_step", tmp_path)
    assert [row["kind"] for row in old["rows"]] == ["factored"]
    assert (new["commit"], new["rows"][0]["ms"]) == ("def5678", 0.5)
    add_runs("training_step", [run([step("tiny", "factored", 1.0)], "def5678")], tmp_path)
    assert [found["commit"] for found in load("training_step", tmp_path)] == ["def5678"] * 2


def test_file_without_the_fields_is_refused(tmp_path):
    path = tmp_path / "products.json"
    path.write_text(json.dumps({"name": "products", "runs": [{"rows": []}]}))
    with pytest.raises(ValueError, match="fields"):
        load("products", tmp_path)
    path.write_text(json.dumps({"name": "other", "runs": []}))
    with pytest.raises(ValueError, match="not the results of products"):
        load("products", tmp_path)


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


def test_speed_is_compared_with_the_faster_twin():
    rows = [
        step("tiny", "factored", 2.0),
        step("tiny", "AdamW", 1.5),
        step("tiny", "AdamW, no sub-norms", 1.0),
    ]
    found = [run(rows)]
    assert faster(found, rows[0], "AdamW")["ms"] == 1.0
    assert faster(found, rows[0], "Muon") is None
    line = next(line for line in speed(found).splitlines() if "`tiny`" in line)
    assert line == "| `tiny` | 1.0 M | 500,000 | 1,000,000 | 0.50 | |"


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


def test_rows_are_saved_after_each_kind_and_failures_are_left_out(monkeypatch, capsys):
    def prepare(kind, maker):
        if kind == "large" and len(timed) < 3:
            raise torch.OutOfMemoryError
        if kind == "broken":
            raise ValueError
        trainer = SimpleNamespace(num_weights=1, state_bytes=lambda: 2)
        return Subject(kind, trainer, 3, 4, [], {})

    def time_in_turns(subjects, rounds):
        timed.append(([subject.kind for subject in subjects], rounds))
        for subject in subjects:
            subject.seconds[:] = [0.5] * rounds

    timed, saved = [], []
    monkeypatch.setattr(training_step, "prepare", prepare)
    monkeypatch.setattr(training_step, "time_in_turns", time_in_turns)
    makers = dict.fromkeys(("large", "factored", "broken", "AdamW"))
    training_step.measure("tiny", (64, 16), makers, saved.append)
    assert timed == [
        (["factored"], 1), (["factored"], 1), (["factored", "AdamW"], 5), (["large"], 5),
    ]  # fmt: skip
    assert [[row["kind"] for row in rows] for rows in saved] == [kinds for kinds, _ in timed]
    assert [row["in_turns"] for row in saved[-2]] == [True, True]
    assert "ValueError" in capsys.readouterr().err


def test_family_is_compared_with_the_fastest_plain_baseline():
    kinds = {"factored": 2.0, "AdamW, bare": 8.0, "AdamW, bare, flex": 4.0}
    rows = [
        step("arb-long", kind, ms, allocated_bytes=1, in_turns=False) for kind, ms in kinds.items()
    ]
    cells = [cell.strip() for cell in performance.families([run(rows)]).splitlines()[2].split("|")]
    assert cells[3:7] == ["500,000", "250,000", "2.00", ""]


def test_run_without_a_title_has_its_own_name():
    shared = {"preset": "mine", "way": "greedy", "has_head": True, "favour": 0.4, "times": 1.5}
    shared |= {"bytes_per_second": [10, 20], "bytes_per_check": [2.0], "same": True}
    lines = models.checked_texts([run([shared | {"size": size} for size in (1, 4)])])
    assert lines.splitlines()[2].startswith("| `mine` | greedy | 4 |")


def test_speed_of_several_gpus_is_relative_to_the_same_kind_on_a_single_gpu():
    shared = {"part": "speed", "preset": "1b", "seed": None, "captured": True}
    shared |= {"bytes_per_second": 1e5, "state_bytes": [10**9], "peak_bytes": [2 * 10**9]}
    rows = [
        shared | {"kind": kind, "gpus": gpus, "ms": ms, "wire_bytes_a_weight": 0.75 * (gpus > 1)}
        for kind, gpus, ms in (("wire", 1, 20.0), ("wire", 4, 21.0), ("twin", 1, 10.0))
    ]
    lines = many_gpus.speed_of_many([run(rows)]).splitlines()[2:5]
    cells = [[cell.strip() for cell in line.strip("|").split("|")] for line in lines]
    assert [line[5] for line in cells] == ["", "95 %", ""]
    assert cells[1] == [
        "`1b`", "wire, captured", "4", "21.00", "100,000", "95 %", "0.750", "1.000", "2.00"
    ]  # fmt: skip
    assert many_gpus.quality_of_many([run(rows)]) == "Not measured yet.\n"


def test_losses_of_several_gpus_are_next_to_the_first_kind():
    shared = {"part": "quality", "preset": "small", "gpus": 1}
    rows = [
        shared | {"kind": kind, "seed": seed, "val_loss": loss}
        for kind, seed, loss in (("rule", 0, 1.0), ("rule", 1, 3.0), ("wire", 0, 2.001))
    ]
    lines = many_gpus.quality_of_many([run(rows)]).splitlines()[2:4]
    assert lines == [
        "| rule | 1.0000, 3.0000 | 2.0000 | +0.00 % |",
        "| wire | 2.0010 | 2.0010 | +0.05 % |",
    ]


def test_losses_of_several_seeds_are_one_row_in_the_order_of_seeds():
    way = {"kind": "moment", "lr": 0.2, "taught": False, "fade_from": 0.0, "fade_to": 0.1}
    rows = [
        way | {"seed": seed, "new": new, "old": 0.75, "state_bytes": 2_000_000} | peak
        for seed, new, peak in ((1, 1.25, {"peak_bytes": 3_000_000}), (0, 1.5, {}))
    ]
    lines = imports.ways_to_trits([run(rows)]).splitlines()[2:4]
    assert lines == ["| `moment` | 0% to 10% | 0.2 | 1.5000, 1.2500 | 0.7500, 0.7500 | 2 | 3 |", ""]


def test_table_has_hardware_versions_commit_and_command():
    text = source([run([]), run([], "def5678", dirty=True)])
    assert "a GPU" in text
    assert "torch 2.11" in text
    assert "commits `abc1234`, `def5678` with changes" in text
    assert "`python -m benchmarks.training_step`" in text


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
    assert set(runner.SHOWN) == programs - {"plots", "code_text"}
    parts = {name.split(".")[0] for name in runner.GPU_PARTS | runner.CPU_PARTS}
    assert parts | set(runner.OTHERS) == set(runner.SHOWN)
    runner.print_list()
    printed = capsys.readouterr().out
    assert all(f"{name}: {shown}" in printed for name, shown in runner.SHOWN.items())


def test_every_result_is_shown_by_a_page_or_a_figure():
    shown = {file for module in pages.PAGES.values() for file, _ in module.TABLES.values()}
    assert {path.stem for path in FOLDER.glob("*.json")} == shown
    assert shown <= set(KEYS)


def test_functions_are_called_in_turns():
    called = []
    found = measuring.in_turns(
        2, lambda: called.append("a") or 1.0, lambda: called.append("b") or 2.0
    )
    assert called == ["a", "b", "a", "b"]
    assert found == [[1.0, 1.0], [2.0, 2.0]]
