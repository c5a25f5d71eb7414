"""A pass is remembered as long as everything that it follows from is the same."""

import json
import os
import shutil
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from unittest.mock import MagicMock

import pytest
import torch

import arbcli
from arbcli.base import caches as cached_files
from arbcli.base.caches import write_cached
from arbcli.verify import memory as memories
from arbcli.verify.check_kernels import Checks, KernelResult, verify_kernels
from arbcli.verify.kernels.matmul.ternary_matmul import ternary_matmul_verification
from arbcli.verify.kernels.update.step_scales import step_scales_verification
from arbcli.verify.memory import Memory, all_sources, describe_machine, kernel_sources
from arbcli.verify.subjects import ParityResult
from arbcli.verify.workers import Workers

CPU = torch.device("cpu")
PASSED = ParityResult(
    "update", "z", "moment", "T32", "torch", (3, 5), "equal", "", 0.0, 0.0, 1.0, passed=True
)
JOB = ("moment", "torch")


@pytest.fixture(autouse=True)
def folder(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    return memories.memory_folder()


@pytest.fixture
def source(tmp_path, monkeypatch):
    """A source that results follow from."""
    monkeypatch.setattr(memories, "ROOT", tmp_path)
    path = tmp_path / "kernel.py"
    path.write_text("right = True\n")
    return path


def run(source, machine="this one", job=JOB, *, results=None, **options):
    """Check what is not remembered: what was found, whether it was known, and what was told."""
    told, seen = [], []

    def called(*arguments):
        seen.append(arguments)
        return results or [PASSED, replace(PASSED, item="v")]

    called.__name__ = "check"
    memory = Memory(machine, show=told.append, **options)
    (found,) = memory.begin(
        Workers(), called, [job], lambda _: None, ParityResult, lambda _: frozenset({source})
    )()
    assert all(result.remembered == (not seen) for result in found)
    return found, not seen, told


def file_in(folder: Path) -> Path:
    """Find the one file that was remembered; its digest is another."""
    (file,) = folder.glob("*.json")
    return file


def test_passed_results_are_recalled_unchanged(source, folder):
    first, known, _ = run(source)
    assert not known
    again, known, told = run(source)
    assert (known, told) == (True, [])
    assert again == [replace(result, remembered=True) for result in first]
    file = file_in(folder)
    assert folder.stat().st_mode & 0o777 == 0o700
    assert file.stat().st_mode & 0o777 == 0o600


def test_other_sources_machines_and_checks_are_verified(source):
    run(source)
    assert not run(source, "another one")[1]
    assert not run(source, job=("moment", "native"))[1]
    assert not run(source, fresh=True)[1]
    assert run(source)[1]
    source.write_text("right = not True\n")
    assert not run(source)[1]
    assert run(source)[1]


def test_failures_are_never_remembered(source, folder):
    failed = [PASSED, replace(PASSED, passed=False)]
    run(source, results=failed)
    assert not [*folder.glob("*")]
    assert not run(source, results=failed)[1]
    run(source)  # a pass, and then a failure of the same
    run(source, results=failed, fresh=True)
    assert not [*folder.glob("*")]
    assert not run(source)[1]


def test_a_failure_in_a_file_is_not_a_pass(source, folder):
    run(source)
    file = file_in(folder)
    saved = json.loads(file.read_text())
    for rows in (
        [],
        [saved["results"][0] | {"passed": False}],
        [saved["results"][0] | {"passed": 1}],
    ):
        write_cached(file, [json.dumps(saved | {"results": rows}).encode()])
        _, known, told = run(source, results=[replace(PASSED, passed=False)])
        assert (known, told) == (False, [])


@pytest.mark.parametrize("damage", [
    lambda data: b"", lambda data: data[:-9], lambda data: data.replace(b"moment", b"nibble"),
    lambda data: b"\xff" * 99,
], ids=["empty", "cut off", "changed", "bytes"])  # fmt: skip
def test_damaged_file_is_ignored_with_a_line(damage, source, folder):
    run(source)
    file = file_in(folder)
    file.write_bytes(damage(file.read_bytes()))
    _, known, told = run(source)
    assert (known, told) == (False, [f"ignored `{file}`: it is damaged"])
    assert run(source)[1:] == (True, [])


@pytest.mark.parametrize("wrong", [
    lambda data: b"", lambda data: b"\xff" * 99, lambda data: b"{}", lambda data: b"[" * 99999,
    lambda data: data.replace(b'"item"', b'"thing"'),
], ids=["empty", "bytes", "empty object", "nested", "field"])  # fmt: skip
def test_file_of_other_contents_is_ignored_with_a_line(wrong, source, folder):
    run(source)
    file = file_in(folder)
    write_cached(file, [wrong(file.read_bytes())])
    _, known, told = run(source)
    assert not known
    assert len(told) == 1
    assert told[0].startswith(f"ignored `{file}`")
    assert run(source)[1:] == (True, [])


@pytest.mark.skipif(not hasattr(os, "geteuid"), reason="Windows has no such modes")
def test_results_that_others_can_write_are_not_used(source, folder, monkeypatch):
    run(source)
    file = file_in(folder)
    file.chmod(0o620)
    _, known, (line,) = run(source)
    assert not known
    assert line == f"ignored `{file}`: it is not a file to which only this user can write"
    folder.chmod(0o777)
    _, known, (line,) = run(source)
    assert not known
    assert line.startswith(f"ignored `{file}`")
    assert folder.stat().st_mode & 0o777 == 0o700  # it was this user's, and can be mended
    assert run(source)[1]
    monkeypatch.setattr(cached_files, "_is_own", lambda _: False)  # but another one's
    monkeypatch.setattr(Path, "chmod", MagicMock(side_effect=PermissionError(1, "not permitted")))
    _, known, told = run(source)
    assert not known
    assert [line.split()[0] for line in told] == ["ignored", "nothing"]


def test_link_is_not_followed(source, folder, tmp_path):
    run(source)
    file = file_in(folder)
    file.rename(tmp_path / "elsewhere")
    file.symlink_to(tmp_path / "elsewhere")
    _, known, told = run(source)
    assert not known
    assert len(told) == 1
    assert run(source)[1]
    assert not file.is_symlink()


def test_failing_writes_are_reported_once(source, folder):
    folder.parent.mkdir()
    folder.write_text("a file")
    _, known, told = run(source)
    assert not known
    assert any("nothing is remembered" in line for line in told)


def test_source_that_changes_meanwhile_is_not_remembered(source, folder):
    memory = Memory("this one")

    def edited(*_):
        source.write_text("right = 'not at all'\n")
        return [PASSED]

    args = lambda _: None, ParityResult, lambda _: frozenset({source})
    memory.begin(Workers(), edited, [JOB], *args)()
    assert not [*folder.glob("*")]


def test_known_results_start_no_calls_ahead(source):
    done = []

    class Two(Workers):
        def finish(self, batch):
            done.append([job for each, index in self._waiting for job in [each.jobs[index]]])
            self._waiting = []
            return [[PASSED] for _ in batch.jobs]

    def begin(memory):
        about = (lambda _: None, ParityResult, lambda _: frozenset({source}))
        return memory.begin(Two(2), run, [JOB], *about, ahead=lambda job: [(print, *job)])

    begin(Memory("this one"))()
    assert done == [[JOB, JOB]]
    memory = Memory("this one")
    memory._recall = lambda *_: [PASSED]
    begin(memory)()
    assert done[1:] == [[]]


def test_results_of_a_kernel_depend_on_its_imports_and_on_the_verifier():
    package = Path(arbcli.__file__).parent
    found = {str(path.relative_to(package)) for path in kernel_sources(ternary_matmul_verification)}
    assert found >= {
        "kernels/matmul/ternary_matmul.py", "kernels/matmul/few_rows.py", "verify/compare.py",
        "kernels/codec/decode_digits.py", "kernels/codec/packing.py", "kernels/runtime/native.c",
        "kernels/runtime/native.py", "verify/fuzz.py", "verify/check_kernels.py",
        "verify/kernels/matmul/ternary_matmul.py",
    }  # fmt: skip
    assert found.isdisjoint(
        {"kernels/update/step_scales.py", "verify/kernels/update/step_scales.py", "model/build.py"}
    )
    assert kernel_sources(ternary_matmul_verification) <= kernel_sources(
        ternary_matmul_verification, drawn=True
    )
    assert kernel_sources(ternary_matmul_verification, drawn=True) < all_sources()
    assert kernel_sources(replace(step_scales_verification, triton=print)) is None


def test_random_cases_are_not_remembered(folder):
    told = []
    for _ in range(2):
        args = ["step_scales"], {"T6": 6}, CPU, ["torch"]
        memory = Memory("this one")
        verify_kernels(*args, Checks(fuzz=2), None, told.append, memory)
    assert [job.remembered for job in told] == [False, False]


def test_a_kernel_is_remembered_whole():
    args = ["step_scales", "rms_norm"], {"T6": 6, "T32": 32}, CPU, ["torch"]
    first = verify_kernels(*args, memory=Memory("this one"))
    again = verify_kernels(*args, memory=Memory("this one"))
    assert again.kernels == tuple(replace(result, remembered=True) for result in first.kernels)
    assert isinstance(again.kernels[0], KernelResult)


def test_machine_is_described_by_its_libraries_and_settings(monkeypatch):
    before = describe_machine(CPU)
    monkeypatch.setenv("ATEN_CPU_CAPABILITY", "default")
    assert describe_machine(CPU) != before
    monkeypatch.delenv("ATEN_CPU_CAPABILITY")
    monkeypatch.setattr(torch, "__version__", "0.0")
    assert describe_machine(CPU) != before


def test_results_depend_on_each_fact_of_a_gpu(monkeypatch):
    about = SimpleNamespace(name="a GPU", major=9, minor=0, total_memory=80 << 30)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda _: about)
    before = describe_machine(torch.device("cuda"))
    for name, value in {"name": "B", "major": 8, "minor": 6, "total_memory": 1 << 34}.items():
        with monkeypatch.context() as patch:
            patch.setattr(about, name, value)
            assert describe_machine(torch.device("cuda")) != before, name


@pytest.mark.slow
def test_an_edited_kernel_is_verified_again_and_its_fault_found(tmp_path):
    """A copy of the program, as a user has it: a fault is written into the source of a kernel."""
    copied = shutil.copytree(
        Path(arbcli.__file__).parent,
        tmp_path / "arbcli",
        ignore=shutil.ignore_patterns("__pycache__"),
    )
    environment = os.environ | {"XDG_CACHE_HOME": str(tmp_path), "PYTHONPATH": str(tmp_path)}
    words = ["verify-kernels", "step_scales", "pack_trits", "--backend", "torch", "--json"]

    def arb() -> tuple[int, list[bool]]:
        command = [sys.executable, "-m", "arbcli", *words]
        done = subprocess.run(
            command, capture_output=True, env=environment, cwd=tmp_path, check=False
        )
        kernels = json.loads(done.stdout)["kernels"]
        return done.returncode, [result["remembered"] for result in kernels]

    assert arb() == (0, [False, False])
    source = copied / "kernels" / "update" / "step_scales.py"
    right = source.read_text()
    source.write_text(right.replace("fraction.copy_(v & 127)", "fraction.copy_(v & 63)"))
    assert source.read_text() != right
    assert arb() == (1, [False, True])
