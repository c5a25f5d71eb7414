"""Files are written completely or not at all, and never through a link that somebody else made."""

import os
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from arbcli.base import atomic_files
from arbcli.base.atomic_files import new_folder, open_to_append, sweep, write_file
from arbcli.base.errors import ArbError
from arbcli.interop.exporting import export
from arbcli.model.checkpoint import run_lock
from arbcli.training.observer import Observer
from arbcli.training.profiling import StepTrace
from arbcli.training.record import METRICS, RunRecords
from arbcli.training.resume import resume_run

PRECIOUS = b"precious"


@pytest.fixture
def home(tmp_path) -> Path:
    """Make a folder outside of the run, with a file that links lead to."""
    folder = tmp_path / "home"
    folder.mkdir()
    (folder / "precious").write_bytes(PRECIOUS)
    return folder


def assert_untouched(home: Path) -> None:
    assert {path.name: path.read_bytes() for path in home.iterdir()} == {"precious": PRECIOUS}


@pytest.mark.parametrize(
    ("name", "target", "start"),
    [(METRICS, "precious", 2), (METRICS, "missing", 3), (".lock", "precious", 3),
     (".lock", "missing", 3)],
)  # fmt: skip
def test_nothing_is_written_through_links_in_a_run(start, name, target, own_run, home):
    for late in own_run.glob("*-000004*"):
        late.unlink()
    (own_run / name).unlink()
    (own_run / name).symlink_to(home / target)
    files = {*own_run.iterdir()}
    with pytest.raises(ArbError, match="is a link"):
        resume_run(own_run / f"step-{start:06d}.safetensors", Observer())
    assert {*own_run.iterdir()} == files  # and no step was trained
    assert_untouched(home)


def test_links_at_the_names_of_checkpoints_are_replaced(own_run, home):
    names = [path.name for path in own_run.iterdir() if path.name > "step-000002.z"]
    names += [f"best-{step:06d}.safetensors" for step in range(1, 6)]
    names += ["step-000005.safetensors", "step-000004.safetensors.aside"]
    for name in names:
        (own_run / name).unlink(missing_ok=True)
        (own_run / name).symlink_to(home / "missing")
    resume_run(own_run / "step-000002.safetensors", Observer(), steps=5)
    assert_untouched(home)
    assert not [path for path in own_run.glob("step-*[0-9].safetensors") if path.is_symlink()]


def test_temporary_file_is_never_one_that_exists(home, tmp_path, monkeypatch):
    """Even if its name could be guessed."""
    monkeypatch.setattr(atomic_files.secrets, "token_hex", lambda _: "guessed!")
    path = tmp_path / "config.json"
    (tmp_path / ".config.json.guessed!.tmp").symlink_to(home / "precious")
    with pytest.raises(ArbError, match=r"cannot write .*: File exists"):
        write_file(path, lambda file: file.write(b"new"))
    (tmp_path / ".folder.guessed!.tmp").symlink_to(home)
    with pytest.raises(FileExistsError), new_folder(tmp_path / "folder"):
        pytest.fail("it is not to be entered")
    assert_untouched(home)


def test_link_at_the_name_of_an_output_is_replaced(home, tmp_path):
    path = tmp_path / "plot.png"
    path.symlink_to(home / "precious")
    write_file(path, lambda file: file.write(b"new"))
    assert (path.is_symlink(), path.read_bytes()) == (False, b"new")
    assert_untouched(home)


@pytest.mark.parametrize("form", ["safetensors", "hf"])
def test_export_into_a_folder_with_links_writes_nothing_through_them(
    form, finished_run, home, tmp_path
):
    shared = tmp_path / "shared"
    shared.mkdir()
    for name in (".model.tmp", ".model.0123abcd.tmp"):
        (shared / name).symlink_to(home if form == "hf" else home / "precious")
    export(finished_run, form, out=shared / "model")
    assert (shared / "model").exists()
    assert_untouched(home)


def test_trace_is_written_to_no_link(home, tmp_path):
    trainer = type("Trainer", (), {"captures": False, "step": 0, "device": torch.device("cpu")})
    trace = StepTrace(tmp_path, trainer, 1, lambda _: None)
    trace._steps_to_skip = -1
    trace.path.symlink_to(home / "precious")
    profiler = type("Profiler", (), {"events": list})
    profiler.export_chrome_trace = lambda path: Path(path).write_bytes(b"trace")
    trace._write(profiler)
    assert trace.path.read_bytes() == b"trace"
    assert_untouched(home)


def test_temporary_files_of_living_processes_stay(tmp_path):
    """They are locked; those of killed processes are not, and are removed."""
    file, folder = tmp_path / ".a.txt.0123abcd.tmp", tmp_path / ".b.0123abcd.tmp"
    others = [tmp_path / ".c.tmp", tmp_path / "d.0123abcd.tmp"]

    def look(_) -> None:
        (living,) = tmp_path.glob(".living.*")
        file.touch()
        folder.mkdir()
        (folder / "part").touch()
        sweep(tmp_path)
        assert {*tmp_path.iterdir()} == {living, *others}

    for other in others:
        other.touch()
    write_file(tmp_path / "living", look)
    with new_folder(tmp_path / "living folder") as living:
        sweep(tmp_path)
        assert living.is_dir()
    assert (tmp_path / "living folder").is_dir()


@pytest.mark.parametrize("target", ["precious", "missing"])
def test_lock_and_records_of_a_run_are_appended_to_regular_files_only(target, home, tmp_path):
    (tmp_path / METRICS).symlink_to(home / target)
    with pytest.raises(ArbError, match=r"metrics\.jsonl` is a link"):
        RunRecords(tmp_path).append(SimpleNamespace(as_json=dict))
    (tmp_path / ".lock").symlink_to(home / target)
    with pytest.raises(ArbError, match="lock` is a link"), run_lock(tmp_path):
        pytest.fail("it is not locked")
    assert_untouched(home)
    with pytest.raises(OSError, match="not a regular file"):
        open_to_append(Path(os.devnull))
