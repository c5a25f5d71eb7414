"""Runs that differ only in their seed are one row; settings that differ are named."""

import json
from functools import partial

import pytest
from made_runs import make_run, record

from arbcli.base.errors import ArbError
from arbcli.commands.compare import short_names
from arbcli.inspect.runs import Spread, compare_runs, list_runs, read_run


def test_summary_has_the_last_and_the_lowest_values(tmp_path):
    run = make_run(
        tmp_path / "run",
        [record(10, 4.0), record(20, 3.0, 2.0, peak_bytes=99 << 20), record(30, 2.5, 2.25),
         record(40, 2.0)],
        seed=7,
    )  # fmt: skip
    summary = read_run(run)
    assert (summary.seed, summary.step, summary.steps) == (7, 40, 100)
    assert (summary.loss, summary.val_loss, summary.best_val_loss) == (2.0, 2.25, 2.0)
    assert summary.best_step == 20
    assert (summary.state_bytes, summary.peak_bytes) == (3 << 20, 99 << 20)
    assert (summary.seconds, summary.bytes_per_second) == (4.0, 625.0)
    assert "seed" not in summary.settings
    shown = {"lr": 1.0, "ctx": 64, "mixer.kind": "attention", "blocks": 4, "text": "0" * 12}
    assert summary.settings == summary.settings | shown


def test_long_names_are_shortened_as_far_as_they_differ():
    end = "-ternary-moment-muon-lr0.7"
    names = [f"001-32x1{end}-seed0", f"002-32x1{end}-seed0", f"sweep-a{end}", f"sweep-b{end}"]
    short = ["001", "002", "sweep-a", "sweep-b", "book-tuned", f"a{end}-seed1", f"a{end}-seed2"]
    names += short[4:]
    assert short_names(names) == dict(zip(names, short, strict=True))


def test_runs_that_differ_in_their_seed_are_grouped(tmp_path):
    losses = {"a": (0, 0.5, 2.0), "b": (1, 0.5, 2.5), "c": (2, 0.5, 3.0), "d": (0, 0.25, 4.0)}
    runs = [
        make_run(tmp_path / name, [record(10 + seed, loss, loss)], seed=seed, lr=lr)
        for name, (seed, lr, loss) in losses.items()
    ]
    report = compare_runs(runs)
    assert report.settings == ("lr",)
    first, second = report.groups
    assert first.runs == tuple(map(str, runs[:3]))
    assert (first.seeds, first.settings, first.steps) == ((0, 1, 2), {"lr": 0.5}, (10, 12))
    assert first.val_loss == Spread(mean=2.5, deviation=0.5)
    assert first.best_val_loss == first.loss == first.val_loss
    assert first.peak_bytes == 13 << 20
    assert second.loss == Spread(mean=4.0, deviation=None)


@pytest.mark.parametrize(("changes", "differing"), [
    ({"model": {"layers": 3}}, {"blocks": (4, 3)}),
    ({"model": {"mlp_rule": "nibble"}}, {"channel.rule": (None, "nibble")}),
    ({"text": {"digest": "1" * 128}}, {"text": ("0" * 12, "1" * 12)}),
    ({"text": {"digest": "1" * 128, "split": "within"}}, {"text": ("0" * 12, "1" * 12)}),
    ({"data": ("a.txt",)}, {"data": ([], ["a.txt"])}),
    ({"seed": 3}, {}),
])  # fmt: skip
def test_settings_that_differ_are_named_without_nesting(changes, differing, tmp_path):
    runs = [
        make_run(tmp_path / "a", [record(1, 2.0)]),
        make_run(tmp_path / "b", [record(1, 2.0)], **changes),
    ]
    report = compare_runs(runs)
    assert {*report.settings} == {*differing}
    assert len(report.groups) == (2 if differing else 1)
    for name, values in differing.items():
        assert tuple(group.settings[name] for group in report.groups) == values


def test_seed_that_splits_the_files_is_no_other_text(tmp_path):
    texts = [{"digest": number * 128, "split": "files"} for number in "12"]
    make = partial(make_run, records=[record(1, 2.0)])
    runs = [make(tmp_path / f"{n}", seed=n, text=text) for n, text in enumerate(texts)]
    assert len(compare_runs(runs).groups) == 1


def test_unequal_blocks_are_numbered(tmp_path):
    run = make_run(tmp_path / "run", [])
    facts = json.loads((run / "config.json").read_text())
    facts["config"]["model"]["stages"][0]["blocks"][1]["mixer"]["heads"] = 77
    (run / "config.json").write_text(json.dumps(facts))
    settings = read_run(run).settings
    assert (settings["blocks"], settings["blocks.1.mixer.heads"]) == (4, 77)


def test_runs_of_a_folder_have_no_links(tmp_path):
    real = make_run(tmp_path / "elsewhere" / "run", [record(1, 2.0)])
    folder = tmp_path / "runs"
    runs = [make_run(folder / name, []) for name in ("b", "a", "linked", "c\x1b")]
    (folder / "link").symlink_to(real)
    (folder / "nothing").mkdir()
    (folder / "file").write_text("")
    (runs[2] / "metrics.jsonl").unlink()
    (runs[2] / "metrics.jsonl").symlink_to(real / "metrics.jsonl")
    assert list_runs(folder) == [folder / "a", folder / "b"]
    with pytest.raises(ArbError, match="cannot read"):
        list_runs(tmp_path / "nowhere")


def test_unfit_paths_are_one_line(tmp_path, arb_error):
    empty, run = make_run(tmp_path / "empty", []), make_run(tmp_path / "run", [record(1, 2.0)])
    damaged = make_run(tmp_path / "damaged", [record(1, 2.0)])
    (damaged / "config.json").write_text("{cut off")
    cases = ([empty], "has no records"), ([damaged], "is not JSON"), ([run, tmp_path], "no run at")
    for words, message in cases:
        assert message in arb_error("compare", *map(str, words))


def test_runs_of_one_name_are_named_with_their_folders(tmp_path, arb_done, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for folder in "ab":
        make_run(tmp_path / folder / "run", [record(1, 2.0)])
    assert "│ a/run" in arb_done("compare", "a/run", "b/run").stdout
