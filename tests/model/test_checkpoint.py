"""Checkpoints against a hostile disk: a file comes back to the last bit, or is refused by name."""

import errno
import multiprocessing
import os
import re
import shutil
import stat
import time
import tracemalloc
from dataclasses import replace
from multiprocessing.synchronize import Event
from pathlib import Path

import pytest
import torch

from arbcli.base.atomic_files import write_json
from arbcli.base.errors import ArbError
from arbcli.base.reading import read_json
from arbcli.base.run_files import best_checkpoints, checkpoints
from arbcli.model import checkpoint as module
from arbcli.model.checkpoint import (
    Checkpoint,
    check_layout,
    keep_best,
    latest_checkpoint,
    load_checkpoint,
    run_lock,
    save_checkpoint,
)


def example(step: int = 200, size: int = 5, backwards: bool = False) -> Checkpoint:
    """Make the same checkpoint in every process, its tensors in either order."""
    generator = torch.Generator().manual_seed(step)

    def draw(low, high, *shape):
        return torch.randint(low, high, shape, generator=generator)

    tensors = {
        "head.trits": draw(0, 243, size, 7).to(torch.uint8),
        "head.remainder": draw(-128, 128, size, 33).to(torch.int8),
        "blocks.0.norm.trits": draw(0, 243, 1, 3).to(torch.uint8),
        "blocks.0.octave": draw(-96, 32, 3).to(torch.int8),
        "empty": torch.zeros(0, 4, dtype=torch.int8),
        "one": torch.tensor(-128, dtype=torch.int8),
        "edges.source": draw(-(2**31), 2**31, size, 2).to(torch.int32),
        "edges.target": torch.tensor(-(2**31), dtype=torch.int32),
    }
    return Checkpoint(
        step=step,
        config={"preset": "tiny", "lr": 0.6, "note": "\u03c0", "ffn": None},
        counters={"skipped": 3},
        data={"digest": "ab12", "position": 2**40},
        tensors={name: tensors[name] for name in sorted(tensors, reverse=backwards)},
    )


def refusal(path: Path) -> str:
    """Load a file that must be refused by its name and with a hint, and return why it is."""
    with pytest.raises(ArbError) as caught:
        load_checkpoint(path)
    assert f"`{path}`" in str(caught.value)
    assert caught.value.hint
    return str(caught.value)


def assert_same(loaded: Checkpoint, saved: Checkpoint) -> None:
    for field in ("step", "config", "counters", "data"):
        assert getattr(loaded, field) == getattr(saved, field)
    assert loaded.tensors.keys() == saved.tensors.keys()
    for name, tensor in saved.tensors.items():
        assert loaded.tensors[name].dtype == tensor.dtype
        assert torch.equal(loaded.tensors[name], tensor)


@pytest.fixture
def saved(tmp_path) -> Path:
    return save_checkpoint(tmp_path, example())


def test_save_reads_strides(tmp_path):
    wide = torch.arange(-60, 60, dtype=torch.int8).view(10, 12)
    views = {"transposed": wide.T, "offset": wide[1::3, 2:9:2], "source": wide.int()[:, ::5]}
    loaded = load_checkpoint(save_checkpoint(tmp_path, replace(example(), tensors=views)))
    assert torch.equal(loaded.tensors["transposed"], wide.T)
    assert torch.equal(loaded.tensors["offset"], wide[1::3, 2:9:2])
    assert torch.equal(loaded.tensors["source"], wide.int()[:, ::5])


@pytest.mark.gpu
def test_save_of_gpu_tensors_equals_save_of_cpu_tensors(tmp_path):
    on_cpu = save_checkpoint(tmp_path, example()).read_bytes()
    on_gpu = {name: tensor.cuda() for name, tensor in example().tensors.items()}
    path = save_checkpoint(tmp_path, replace(example(), tensors=on_gpu))
    assert path.read_bytes() == on_cpu
    assert all(tensor.is_cpu for tensor in load_checkpoint(path).tensors.values())


def test_loaded_tensors_own_their_memory(saved):
    loaded = load_checkpoint(saved)
    saved.write_bytes(bytes(saved.stat().st_size))  # in place, under any mapping of it
    assert_same(loaded, example())
    for tensor in loaded.tensors.values():
        tensor.fill_(1)


@pytest.mark.parametrize("in_hand", [1, 400])
def test_file_is_a_function_of_the_state(tmp_path, saved, monkeypatch, in_hand):
    """Neither memory in use nor the order of a dict nor time is in the file."""
    before = saved.read_bytes()
    assert save_checkpoint(tmp_path, example(backwards=True)).read_bytes() == before
    monkeypatch.setattr(module, "PENDING_BYTES", in_hand)
    monkeypatch.setattr(module, "SMALL_BYTES", 0)
    assert save_checkpoint(tmp_path, example()).read_bytes() == before
    assert_same(load_checkpoint(saved), example())


def test_save_keeps_the_newest_two_and_removes_the_file_of_a_killed_save(tmp_path):
    (tmp_path / ".step-000090.safetensors.0123abcd.tmp").write_bytes(b"half")
    for step in (5, 90, 900_000, 1_000_000):
        save_checkpoint(tmp_path, example(step))
    names = [path.name for path in checkpoints(tmp_path)]
    assert names == ["step-1000000.safetensors", "step-900000.safetensors"]
    assert len(list(tmp_path.iterdir())) == 2


def test_save_keeps_itself_next_to_later_steps(tmp_path):
    for step in (100, 200, 300, 150):
        save_checkpoint(tmp_path, example(step), keep=4 if step > 150 else 1)
    assert [load_checkpoint(path).step for path in checkpoints(tmp_path)] == [300, 200, 150]


@pytest.mark.parametrize(("name", "tensor"), [
    ("head.trits", torch.tensor([0, 243], dtype=torch.uint8)),
    *((name, torch.zeros(3, dtype=dtype)) for name, dtype in (
        ("head.weight", torch.float32), ("head.index", torch.int16), ("head.mask", torch.bool),
        ("head.trits", torch.int8), ("head.octave", torch.uint8), ("head.octave", torch.int32),
        ("edges.source", torch.int8), ("edges.target", torch.int64), ("__metadata__", torch.int8),
        ("", torch.int8),
    )),
], ids=str)  # fmt: skip
def test_save_rejects_tensors_that_are_not_state(tmp_path, name, tensor):
    with pytest.raises(ValueError, match=f"`{name}`"):
        save_checkpoint(tmp_path, replace(example(), tensors={name: tensor}))
    assert not list(tmp_path.iterdir())


def test_load_refuses_files_that_cannot_be_read(tmp_path, saved):
    os.mkfifo(tmp_path / "pipe")
    (tmp_path / "locked").touch(mode=0)
    assert "not a regular file" in refusal(tmp_path)
    assert "not a regular file" in refusal(tmp_path / "pipe")
    assert "No such file" in refusal(tmp_path / "missing")
    assert "Not a directory" in refusal(saved / "below")
    if os.geteuid():  # root reads everything
        assert "Permission denied" in refusal(tmp_path / "locked")


def test_load_refuses_illegal_values_with_a_correct_digest(tmp_path, monkeypatch):
    values = {"head.trits": [[0, 242, 243]], "exponent": -97, "head.latent": [torch.inf]}
    for name, value in values.items():
        kind = {"head.trits": torch.uint8, "exponent": torch.int8}.get(name)
        illegal = replace(example(), tensors={name: torch.tensor(value, dtype=kind)})
        with monkeypatch.context() as patch:
            patch.setattr(module, "_is_legal", lambda name, tensor: True)
            path = save_checkpoint(tmp_path, illegal)
            load_checkpoint(path)
        assert f"`{name}` has an invalid value" in refusal(path)


@pytest.mark.parametrize("length", [2**22 + 1, 100_000_000, 2**63, 2**64 - 1])
def test_load_refuses_a_huge_header_unread(tmp_path, length):
    path = tmp_path / "step-000001.safetensors"
    with path.open("wb") as file:
        file.write(length.to_bytes(8, "little"))
        file.truncate(200_000_000)  # sparse
    tracemalloc.start()
    assert "header cannot have" in refusal(path)
    path.write_bytes(b"GGUF" + bytes(60))
    assert "GGUF file, which arb only writes" in refusal(path)
    assert tracemalloc.get_traced_memory()[1] < 1_000_000
    tracemalloc.stop()


def test_latest_is_of_the_step_and_the_weights_that_its_name_says(tmp_path):
    """A run would neither go on from a renamed file nor find it again; a folder is none."""
    for step in (50, 400):
        (tmp_path / f"step-000{step:03d}.safetensors").mkdir()
    path, notes = save_checkpoint(tmp_path, example(100), keep=1), []
    assert checkpoints(tmp_path) == [path]
    for name in ("step-000300.safetensors", "step-000200.float.safetensors"):
        shutil.copy(path, path.with_name(name))
    assert latest_checkpoint(tmp_path, notes.append).step == 100
    for note, name in zip(notes, ("300", "200.float"), strict=True):
        said = f"step-000{name}.safetensors`: refused: it was written as `{path.name}`; using"
        assert said in note


def test_failed_copy_keeps_the_previous_best(tmp_path, monkeypatch):
    first, second = (save_checkpoint(tmp_path, example(step)) for step in (100, 200))
    best, whole = keep_best(first), first.read_bytes()

    def refuse(*_, **__):
        raise OSError(errno.ENOSPC, "no space")

    monkeypatch.setattr(module.os, "link", refuse)
    monkeypatch.setattr(module, "_copy", refuse)
    with pytest.raises(ArbError, match="cannot write"):
        keep_best(second)
    assert best_checkpoints(tmp_path) == [best]
    assert best.read_bytes() == whole


@pytest.mark.parametrize(("changes", "message"), [
    ({"a.octave": None}, "`a.octave` is torch.int8 [3] in the checkpoint and missing"),
    ({"b.trits": (1,)}, "`b.trits` is missing in the checkpoint and torch.uint8 [1] in"),
    ({"a.trits": (5, 2)}, "`a.trits` is torch.uint8 [2, 5] in the checkpoint and"),
], ids=["extra", "missing", "shape"])  # fmt: skip
def test_check_layout_names_the_first_difference(changes, message):
    def build(shapes):
        dtypes = {name: torch.uint8 if "trits" in name else torch.int8 for name in shapes}
        return {n: torch.zeros(s, dtype=dtypes[n]) for n, s in shapes.items() if s is not None}

    layout = {"z.octave": (2,), "a.octave": (3,), "a.trits": (2, 5)}
    with pytest.raises(ArbError, match=re.escape(message)) as caught:
        check_layout(build(layout), build(layout | changes | {"z.octave": (9,)}))
    assert "preset" in caught.value.hint


def test_full_disk_keeps_the_previous_file(tmp_path, full_disk):
    save_checkpoint(tmp_path, example(100))
    write_json(tmp_path / "config.json", {"seed": 1})
    refused = r"cannot write `.*/step-000200\.safetensors`: File too lar"
    with full_disk(20_000):
        with pytest.raises(ArbError, match=refused):
            save_checkpoint(tmp_path, example(200, size=100_000), keep=1)
        with pytest.raises(ArbError, match=r"cannot write `.*/config\.json`: File too large"):
            write_json(tmp_path / "config.json", {"seed": "2" * 30_000})
    assert {path.name for path in tmp_path.iterdir()} == {"config.json", "step-000100.safetensors"}
    assert_same(latest_checkpoint(tmp_path, pytest.fail), example(100))
    assert read_json(tmp_path / "config.json") == {"seed": 1}


def test_save_where_a_directory_cannot_be_synced(tmp_path, monkeypatch):
    sync = os.fsync

    def refuse(descriptor):
        if stat.S_ISDIR(os.fstat(descriptor).st_mode):
            raise OSError(errno.EINVAL, "Invalid argument")
        sync(descriptor)

    monkeypatch.setattr(os, "fsync", refuse)
    assert_same(load_checkpoint(save_checkpoint(tmp_path, example())), example())


def test_save_syncs_the_whole_file_then_renames_then_syncs_the_directory(tmp_path, monkeypatch):
    events = []

    def record_sync(descriptor):
        status = os.fstat(descriptor)
        events.append("directory" if stat.S_ISDIR(status.st_mode) else status.st_size)

    def record_rename(source, target):
        events.append("rename")
        os.rename(source, target)

    monkeypatch.setattr(os, "fsync", record_sync)
    monkeypatch.setattr(Path, "replace", record_rename)
    path = save_checkpoint(tmp_path, example())
    assert events == [path.stat().st_size, "rename", "directory"]


@pytest.mark.parametrize("leave", [False, True])
def test_file_set_aside_takes_a_free_name(leave, tmp_path):
    path, names = tmp_path / "step-000100.safetensors", []
    for content in ("first", "second", "third"):
        path.unlink(missing_ok=True)
        path.write_text(content)
        names.append(module.set_aside(path, leave=leave))
        assert path.exists() == leave
    assert [name.name.removeprefix(path.name) for name in names] == [".aside", ".aside1", ".aside2"]
    assert [name.read_text() for name in names] == ["first", "second", "third"]
    assert checkpoints(tmp_path) == [path] * leave


def hold_the_lock(directory: Path, locked: Event) -> None:
    with run_lock(directory):
        locked.set()
        time.sleep(60)


def test_run_lock_is_released_by_sigkill(tmp_path):
    forking = multiprocessing.get_context("fork")
    locked = forking.Event()
    holder = forking.Process(target=hold_the_lock, args=(tmp_path, locked))
    holder.start()
    try:
        assert locked.wait(timeout=60)
        with pytest.raises(ArbError, match="in use by another process"), run_lock(tmp_path):
            pytest.fail("locked twice")
    finally:
        holder.kill()
    holder.join()
    with run_lock(tmp_path):
        pass


def test_run_lock_warns_where_there_is_none(tmp_path, monkeypatch):
    monkeypatch.setattr(module, "fcntl", None)
    with pytest.warns(UserWarning, match="is not locked"), run_lock(tmp_path):
        pass


RANGES = {
    "exponent": (-96, 31), "fraction": (0, 127), "score": (0, 127), "strength": (0, 127),
    "usage": (0, 127), "remainder": (-128, 127), "moment": (-128, 127),
}  # fmt: skip


@pytest.mark.parametrize("name", RANGES)
def test_state_is_legal_up_to_its_limits_and_no_further(name):
    least, most = RANGES[name]
    for value in range(-128, 128):
        tensor = torch.full((2, 3), value, dtype=torch.int8)
        tensor[0, 1] = least
        assert module._is_legal(f"a.{name}", tensor) == (least <= value <= most)
    assert module._is_legal(f"a.{name}", tensor[:0])
