"""Pictures are PNG files with the recorded curves and words, and errors come before the work."""

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


RECORDED = Path(__file__).with_name("plots.txt").read_text(encoding="utf-8")
FIGURES = dict(part.split("\n", 1) for part in RECORDED.rstrip().split("\n\n"))
"""Curves, columns and words of figures, as `described` lists them."""


def described(figure) -> str:
    """List the content of each panel: curves with their points, columns, marks and the legend."""
    lines = [figure.get_suptitle()] if figure.get_suptitle() else []
    for axes in figure.axes:
        lines.append(f"{axes.get_title(loc='left')} | {axes.get_xlabel()} | {axes.get_ylabel()}")
        for line in axes.get_lines():
            points = " ".join(f"{x:.5g},{y:.5g}" for x, y in line.get_xydata())
            name = "" if line.get_label().startswith("_") else line.get_label()
            lines.append(f"  {line.get_color()} {line.get_linestyle()} {name}: {points}")
        bars = [(bar.get_x() + bar.get_width() / 2, bar.get_height()) for bar in axes.patches]
        marks = [mark.get_text().replace("\n", " ") for mark in axes.texts]
        legend = [text.get_text() for text in axes.get_legend().texts] if axes.get_legend() else []
        lines += [f"  column {x:.5g},{height:.5g}" for x, height in bars]
        lines += [f"  mark {mark}" for mark in marks] + [f"  legend {name}" for name in legend]
    return "\n".join(lines)


@pytest.fixture
def run(tmp_path) -> Path:
    records = [
        record(step, 6 / math.sqrt(step), 3 - step / 100 if step % 50 == 0 else None)
        for step in range(10, 110, 10)
    ]
    return make_run(tmp_path / r"001-$\x$", records, text={"entropy": 3.2})


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
        "readings": [reading(step) for step in range(4)], "uniform_loss": 5.545,
        "text_entropy": 3.2, "chunks": None, "num_weights": 3_342_336,
        "config": {"model": asdict(preset("tiny", ctx=64))},
        "verdicts": [{"name": "ok", "evidence": ""}],
    }  # fmt: skip


@pytest.fixture
def figures(monkeypatch) -> list:
    """Keep the figures that are drawn."""
    kept, save = [], plots._save
    monkeypatch.setattr(plots, "_save", lambda *args: kept.append(args[0]) or save(*args))
    return kept


def test_plot_training_draws_a_curve(run, figures, tmp_path):
    plot_training(run, tmp_path / "curve.png")
    assert (tmp_path / "curve.png").read_bytes().startswith(b"\x89PNG")
    assert described(figures[0]) == FIGURES["training"]
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
    assert described(figures[0]) == FIGURES["runs"]


def test_plot_probe_draws_four_panels(report, figures, tmp_path):
    plot_probe(report, tmp_path / "probe.png")
    assert described(figures[0]) == FIGURES["probe"]


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
    assert described(figures[0]) == FIGURES["probe of chunks, with gaps"]


def test_missing_matplotlib_and_unwritable_pictures_are_errors(report, run, monkeypatch, tmp_path):
    for draw, subject in ((plot_probe, report), (plot_training, run)):
        with pytest.raises(ArbError, match="cannot write"):
            draw(subject, tmp_path / "no-such-folder" / "picture.png")
    monkeypatch.setattr(plots, "find_spec", lambda _: None)
    for ask in (require_matplotlib, lambda: plot_probe(report, tmp_path / "probe.png")):
        with pytest.raises(ArbError) as caught:
            ask()
        assert "pip install" in caught.value.hint
