"""The pictures are real PNG files with something on them, and errors come before the work."""

import math
from dataclasses import asdict
from pathlib import Path

import pytest
from made_runs import make_run, record

from arbcli.base.errors import ArbError
from arbcli.config.presets import preset
from arbcli.inspect import plots
from arbcli.inspect.plots import plot_probe, plot_runs, plot_training, require_matplotlib
from arbcli.inspect.runs import compare_runs

pytest.importorskip("matplotlib")


def words_on(figure) -> list:
    """List what is written on each panel: title, axes, marks and legend."""
    return [
        (
            axes.get_title(loc="left"),
            axes.get_xlabel(),
            axes.get_ylabel(),
            [mark.get_text().replace("\n", " ") for mark in axes.texts],
            [text.get_text() for text in axes.get_legend().texts] if axes.get_legend() else [],
        )
        for axes in figure.axes
    ]


@pytest.fixture
def run(tmp_path) -> Path:
    records = [
        record(step, 6 / math.sqrt(step), 3 - step / 100 if step % 50 == 0 else None)
        for step in range(10, 110, 10)
    ]
    return make_run(tmp_path / "001-256x4-moment", records, text={"entropy": 3.2})


@pytest.fixture
def report() -> dict:
    def reading(step: int) -> dict:
        return {
            "step": step, "loss": None if step == 0 else 5.0 - step, "val_loss": 5.5 - step,
            "flip_share": None if step == 0 else 0.02, "residual_rms": (1.0, 1.2, 1.4 + step),
            "mixer_rms": (0.4, 0.4), "channel_rms": (0.3, 0.5),
            "residual_most": (1.5, 1.75, 2.0 + step), "stream_ranges": (),
            "logit_spread": 1.0 + step,
        }  # fmt: skip

    return {
        "readings": [reading(step) for step in range(4)],
        "uniform_loss": 5.545,
        "text_entropy": 3.2,
        "chunks": None,
        "num_weights": 3_342_336,
        "config": {"model": asdict(preset("tiny", ctx=64))},
        "verdicts": [{"name": "ok", "evidence": ""}],
    }


@pytest.fixture
def figures(monkeypatch) -> list:
    """Keep the figures that are drawn."""
    kept, save = [], plots._save
    monkeypatch.setattr(plots, "_save", lambda *args: kept.append(args[0]) or save(*args))
    return kept


def lines_of(axes) -> dict:
    """Find the points of the curves that a legend names; None where there is a gap."""
    return {
        line.get_label(): [
            (float(x), None if math.isnan(y) else float(y)) for x, y in line.get_xydata()
        ]
        for line in axes.get_lines()
        if not line.get_label().startswith("_")
    }


def test_plot_training_draws_a_curve(run, figures, tmp_path):
    plot_training(run, tmp_path / "curve.png")
    assert (tmp_path / "curve.png").read_bytes().startswith(b"\x89PNG")
    (axes,) = figures[0].axes
    assert lines_of(axes) == {
        "training": [(step, 6 / math.sqrt(step)) for step in range(10, 110, 10)],
        "held out": [(50, 2.5), (100, 2.0)],
    }
    marks = {line.get_ydata()[0] for line in axes.get_lines() if line.get_linestyle() == ":"}
    assert marks == {math.log(256), 3.2}
    marked = ["2.000", "uniform 5.545", "order 0 3.200"]
    about = ("001-256x4-moment: loss", "step", "nats a byte", marked, ["training", "held out"])
    assert words_on(figures[0]) == [about]
    for name in ("metrics.jsonl", "config.json"):
        (run / name).unlink()
        with pytest.raises(ArbError, match=r"cannot read .*config.json|has no records"):
            plot_training(run, tmp_path / "curve.png")


def test_plot_runs_draws_each_group_in_a_colour(figures, tmp_path):
    runs = [
        make_run(tmp_path / f"{lr}-{seed}", [record(10, 3.0), record(20, 2.0 + seed, lr)],
                 lr=lr, seed=seed)
        for lr, seed in ((0.5, 0), (0.25, 0), (0.5, 1))
    ]  # fmt: skip
    plot_runs(compare_runs(runs), tmp_path / "runs.png")
    assert words_on(figures[0]) == [
        ("held-out loss", "step", "nats a byte", [], ["lr 0.5", "lr 0.25"]),
        ("training loss", "step", "nats a byte", [], []),
    ]
    held_out, training = (axes.get_lines() for axes in figures[0].axes)
    assert [line.get_color() for line in training] == ["C0", "C0", "C1"]
    assert [line.get_xydata().tolist() for line in held_out] == [
        [[20, 0.5]], [[20, 0.5]], [[20, 0.25]],
    ]  # fmt: skip
    assert training[1].get_xydata().tolist() == [[10, 3.0], [20, 3.0]]


def test_plot_probe_draws_four_panels(report, figures, tmp_path):
    plot_probe(report, tmp_path / "probe.png")
    stream, flips, loss, logits = figures[0].axes
    assert lines_of(stream) == {
        "after step 0": [(0, 1.0), (1, 1.2), (2, 1.4)],
        "after step 3": [(0, 1.0), (1, 1.2), (2, 4.4)],
        "mixer": [(1, 0.4), (2, 0.4)],
        "channel mixer": [(1, 0.3), (2, 0.5)],
        "largest of a byte": [(0, 1.5), (1, 1.75), (2, 5.0)],
    }
    spread, line = logits.get_lines()
    assert spread.get_xydata().tolist() == [[0, 1], [1, 2], [2, 3], [3, 4]]
    assert line.get_ydata()[0] == 0.25
    bars = [(bar.get_x() + bar.get_width() / 2, bar.get_height()) for bar in flips.patches]
    assert bars == [pytest.approx((step, 2.0)) for step in (1, 2, 3)]
    assert lines_of(loss) == {
        "held out": [(0, 5.5), (1, 4.5), (2, 3.5), (3, 2.5)],
        "training": [(0, 4.0), (1, 3.0), (2, 2.0)],
    }
    branches = ["after step 0", "after step 3", "largest of a byte", "mixer"]
    branches.append("channel mixer")
    marked = ["uniform 5.545", "order 0 3.200"]
    assert words_on(figures[0]) == [
        ("residual stream", "blocks passed", "root-mean-square", [], branches),
        ("trits flipped by a step", "step", "% of all", [], []),
        ("loss", "steps done", "nats a symbol", marked, ["held out", "training"]),
        ("spread of logits", "steps done", "standard deviation", [], []),
    ]
    assert figures[0].get_suptitle() == "moment: ok   (3.34 M weights, T32, ctx 64)"


def test_plot_probe_draws_lengths_of_chunks_leaves_gaps_and_no_figure_open(
    report, figures, tmp_path
):
    """Gaps for what is not finite."""
    from matplotlib import pyplot

    before = pyplot.get_fignums()  # of other tests
    for reading in report["readings"][2:]:
        reading |= {"loss": None, "val_loss": None, "residual_rms": (None, None, None)}
    report["chunks"] = {"lengths": (5, 3, 0, 1), "mean_lengths": (1.7, 2.5), "sample_bytes": (97,)}
    plot_probe(report, tmp_path / "probe.png")
    assert (tmp_path / "probe.png").read_bytes().startswith(b"\x89PNG")
    assert pyplot.get_fignums() == before
    *_, chunks = figures[0].axes
    columns = [(bar.get_x() + bar.get_width() / 2, bar.get_height()) for bar in chunks.patches]
    assert columns == [pytest.approx(bar) for bar in ((1, 5), (2, 3), (3, 0), (4, 1))]
    assert [line.get_xdata()[0] for line in chunks.get_lines()] == [1.7]
    words = ("chunks of the held-out text", "bytes of a chunk", "chunks", [], ["mean 1.70"])
    assert words_on(figures[0])[-1] == words


def test_missing_matplotlib_and_an_unwritable_picture_are_errors(
    report, run, monkeypatch, tmp_path
):
    for draw, subject in ((plot_probe, report), (plot_training, run)):
        with pytest.raises(ArbError, match="cannot write"):
            draw(subject, tmp_path / "no-such-folder" / "picture.png")
    monkeypatch.setattr(plots, "find_spec", lambda _: None)
    for ask in (require_matplotlib, lambda: plot_probe(report, tmp_path / "probe.png")):
        with pytest.raises(ArbError) as caught:
            ask()
        assert "pip install" in caught.value.hint
