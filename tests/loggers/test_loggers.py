"""Loggers are told the figures of a run; a failure of one is told, and the run goes on."""

import importlib.util
import json
import sqlite3
import sys
from pathlib import Path
from unittest.mock import MagicMock

import pytest

from arbcli.base.errors import ArbError
from arbcli.loggers import LOGGERS, base, check_logger, find_logger
from arbcli.training.configure import new_config
from arbcli.training.observer import Observer, Observers
from arbcli.training.resume import resume_run
from arbcli.training.run import start_run

SIZES = {"dim": 32, "layers": 1, "heads": 2, "ffn": 48, "ctx": 16, "batch": 2}


class Listening(base.Logger):
    name = "listening"

    def __init__(self, tell=print):
        super().__init__(tell)
        self.heard: list[tuple] = []

    def open(self, run, step, facts):
        self.heard.append(("open", step, base.flat_settings(facts)["model.rule"]))
        sys.stdout.write("chatter of the package")

    def scalars(self, step, values):
        self.heard.append(("scalars", step, values))

    def histograms(self, step, values):
        self.heard.append(("histograms", step, values))

    def text(self, step, text):
        self.heard.append(("text", step, text))

    def close(self):
        self.heard.append(("close",))


def train(text: str, run: Path, observer: Observer, **options):
    given = {"steps": 3, **SIZES, **options}
    return start_run(new_config(**given, data=[text], device="cpu"), run, observer)


def test_logger_gets_the_whole_run(text, tmp_path, capsys):
    logger = Listening()
    train(text, tmp_path / "run", logger)
    opened, scalars, histograms, sample, closed = logger.heard
    assert opened == ("open", 0, "moment")
    assert scalars[1] == histograms[1] == sample[1] == 3
    assert {"loss", "val_loss", "lr", "flip_share"} <= scalars[2].keys()
    assert all(isinstance(value, int | float) for value in scalars[2].values())
    head = histograms[2]["trits/head"]
    assert (head.edges, sum(head.counts)) == ([-1.5, -0.5, 0.5, 1.5], 256 * 32)
    areas = {name.partition("/")[2] for name in histograms[2]}
    assert areas == {"embedding", "attention", "mlp", "head"}  # norms never change
    octaves = histograms[2]["octaves/mlp"]
    assert len(octaves.edges) == len(octaves.counts) + 1
    assert closed == ("close",)
    assert capsys.readouterr().out == ""


def test_failure_of_a_logger_is_reported_and_the_run_continues(text, tmp_path):
    told = []
    failing, sound = Listening(told.append), Listening()
    failing.scalars = lambda step, values: 1 / 0
    report = train(text, tmp_path / "run", Observers([failing, sound]))
    assert report.steps == 3
    (message,) = told
    assert "`--log listening` failed" in message
    assert "ZeroDivisionError" in message
    assert failing.heard == [("open", 0, "moment")]
    assert sound.heard[-1] == ("close",)


@pytest.mark.parametrize("name", LOGGERS)
def test_missing_package_is_one_clear_line(name, monkeypatch):
    monkeypatch.setattr("importlib.util.find_spec", lambda package: None)
    with pytest.raises(ArbError, match=f"`--log {name}` needs the package {name}") as caught:
        check_logger(name)
    assert f"pip install {name}" in caught.value.hint


def _tensorboard(run: Path) -> set[str]:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    events = EventAccumulator(str(run / "tensorboard")).Reload()
    tags = events.Tags()
    assert [event.step for event in events.Scalars("val_loss")] == [3]
    assert {"sample/text_summary", "settings/text_summary"} <= set(tags["tensors"])
    return {*tags["scalars"], *tags["histograms"]}


def _wandb(run: Path) -> set[str]:
    import wandb

    wandb.teardown()  # its own process has written all of it then
    (file,) = run.glob("wandb/offline-run-*/*.wandb")
    data = file.read_bytes()
    return {name for name in ("val_loss", "trits/head", "sample") if name.encode() in data}


def _trackio(run: Path) -> set[str]:
    (file,) = run.parent.glob("trackio/arb.db")
    rows = sqlite3.connect(file).execute("select metrics from metrics").fetchall()
    return set().union(*(json.loads(row[0]) for row in rows))


def _mlflow(run: Path) -> set[str]:
    import mlflow

    (logged_run,) = mlflow.search_runs(experiment_names=["arb"], output_format="list")
    assert logged_run.data.params["model.rule"] == "moment"
    assert logged_run.info.status == "FINISHED"
    files = mlflow.MlflowClient().list_artifacts(logged_run.info.run_id)
    assert {file.path for file in files} == {"histograms", "samples"}
    return {*logged_run.data.metrics, "trits/head"}


READERS = {"tensorboard": _tensorboard, "wandb": _wandb, "trackio": _trackio, "mlflow": _mlflow}


@pytest.fixture
def logged_here(tmp_path, monkeypatch):
    """Keep what packages write in the folder of a test."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("WANDB_MODE", "offline")
    monkeypatch.setenv("TRACKIO_DIR", str(tmp_path / "trackio"))
    monkeypatch.setenv("MLFLOW_TRACKING_URI", f"sqlite:///{tmp_path}/mlflow.db")
    for module in [name for name in sys.modules if "trackio" in name]:  # which reads its own once
        monkeypatch.delitem(sys.modules, module)


@pytest.mark.slow
@pytest.mark.usefixtures("logged_here")
@pytest.mark.parametrize("name", LOGGERS)
def test_package_has_the_logged_values_also_of_a_resumed_run(name, text, tmp_path):
    if importlib.util.find_spec(LOGGERS[name]) is None:
        pytest.skip(f"needs the package of `--log {name}`")
    told = []
    train(text, tmp_path / "run", find_logger(name, told.append))
    assert {"val_loss", "trits/head"} <= READERS[name](tmp_path / "run")
    (tmp_path / "run" / "step-000003.safetensors").unlink()
    resume_run(tmp_path / "run", find_logger(name, told.append))
    assert told == []


FACTS = {"config": {"steps": 5, "model": {"dim": 32}}, "started": "2026-01-02"}


def stand_in(name: str, monkeypatch) -> tuple[base.Logger, MagicMock]:
    """Make a logger whose package only remembers what it was told."""
    package, module = MagicMock(), f"arbcli.loggers.{name}_log"
    where = {"tensorboard": "torch.utils.tensorboard"}.get(name, name)
    monkeypatch.setitem(sys.modules, where, package)
    monkeypatch.delitem(sys.modules, module, raising=False)
    logger = importlib.import_module(module).Logger()
    del sys.modules[module]  # made of no real package, so that nobody else is to find it
    return logger, package


def test_wandb_resumes_no_other_run(tmp_path, monkeypatch):
    logger, package = stand_in("wandb", monkeypatch)
    started = FACTS | {"started": "2026-01-03"}  # a new run in the place of one that was removed
    for run, facts in (("a", FACTS), ("a", FACTS), ("b", FACTS), ("a", started)):
        logger.open(tmp_path / run, 0, facts)
    ids = [opened.kwargs["id"] for opened in package.init.call_args_list]
    assert ids[0] == ids[1]
    assert len({*ids}) == 3
