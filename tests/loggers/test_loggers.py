"""Loggers are told the figures of a run; a failure of one is told, and the run goes on."""

import importlib.util
import sys
from importlib.machinery import ModuleSpec
from pathlib import Path
from unittest.mock import MagicMock

import pytest

from arbcli.base.errors import ArbError
from arbcli.loggers import LOGGERS, base, check_logger, create_logger
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
    assert train(text, tmp_path / "run", Observers([failing, sound])).steps == 3
    (message,) = told
    assert "`--log listening` failed" in message
    assert "ZeroDivisionError" in message
    assert failing.heard == [("open", 0, "moment")]
    assert sound.heard[-1] == ("close",)


@pytest.mark.parametrize("name", LOGGERS)
@pytest.mark.parametrize("found", [None, ModuleSpec("folder", None)])
def test_missing_or_damaged_package_is_one_clear_line(name, found, monkeypatch):
    monkeypatch.setattr("importlib.util.find_spec", lambda package: found)
    with pytest.raises(ArbError, match=f"`--log {name}` needs the package {name}") as caught:
        check_logger(name)
    assert f"pip install {name}" in caught.value.hint
    monkeypatch.setattr("importlib.util.find_spec", MagicMock())
    broken = MagicMock(side_effect=AttributeError("np.float_ was\nremoved"))
    monkeypatch.setattr(importlib, "import_module", broken)
    with pytest.raises(ArbError, match=f"`--log {name}` cannot be used: np.float_ was removed"):
        create_logger(name, print)


KEPT = {
    "tensorboard": ("settings/text_summary", "sample/text_summary"), "wandb": ("sample",),
    "trackio": ("trackio.markdown",),
    "mlflow": ("model.rule", "histograms/step-000003.json", "samples/step-000003.txt"),
}  # fmt: skip
"""Words in the files of each package, and in their paths, besides names of numbers."""


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """Return a folder for files that packages do not write to the run."""
    folder = tmp_path / "kept"
    folder.mkdir()
    monkeypatch.chdir(folder)
    monkeypatch.setenv("WANDB_MODE", "offline")
    monkeypatch.setenv("TRACKIO_DIR", str(folder))
    monkeypatch.setenv("MLFLOW_TRACKING_URI", f"sqlite:///{folder}/mlflow.db")
    for module in [name for name in sys.modules if "trackio" in name]:  # which reads its own once
        monkeypatch.delitem(sys.modules, module)
    return folder


@pytest.mark.slow
@pytest.mark.parametrize("name", LOGGERS)
def test_package_has_the_logged_values_also_of_a_resumed_run(name, text, tmp_path, folder):
    package = pytest.importorskip(LOGGERS[name], reason=f"needs the package of `--log {name}`")
    told = []
    train(text, tmp_path / "run", create_logger(name, told.append))
    if name == "wandb":
        package.teardown()  # its own process has written all of it then
    if name == "mlflow":
        (logged,) = package.search_runs(experiment_names=["arb"], output_format="list")
        assert logged.info.status == "FINISHED"
    files = [*folder.rglob("*"), *(tmp_path / "run").glob(f"{name}/**/*")]
    kept = b"".join(str(file).encode() + file.read_bytes() for file in files if file.is_file())
    words = ("val_loss", "trits/head", *KEPT[name])
    assert [word for word in words if word.encode() not in kept] == []
    (tmp_path / "run" / "step-000003.safetensors").unlink()
    resume_run(tmp_path / "run", create_logger(name, told.append))
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


def test_mlflow_is_sent_the_numbers_of_a_step_at_once(tmp_path, monkeypatch):
    logger, package = stand_in("mlflow", monkeypatch)
    logger.open(tmp_path, 0, FACTS)
    logger.scalars(1, {"loss": 3.0, "lr": 0.5})
    assert package.MlflowClient().log_batch.call_count == 2  # settings are sent at once, too
