"""A kernel that another process compiles is waited for."""

import fcntl
from types import SimpleNamespace

import pytest

from arbcli.kernels.runtime import compile_once

compiler = pytest.importorskip("triton").compiler


def test_compiler_is_called_while_a_lock_is_held(monkeypatch, tmp_path):
    held = []

    def compile_alone(source, target=None, options=None):
        (path,) = tmp_path.iterdir()
        with path.open("w") as lock, pytest.raises(BlockingIOError):
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        held.append((source, target, options))
        return "compiled"

    monkeypatch.setattr(compile_once, "INTERPRETED", False)
    monkeypatch.setattr(compiler, "compile", compile_alone)
    compile_once.compile_each_once(str(tmp_path))
    source = SimpleNamespace(hash=lambda: "abc")
    assert compiler.compile(source, target="sm_90", options={"num_warps": 4}) == "compiled"
    assert held == [(source, "sm_90", {"num_warps": 4})]
    with next(tmp_path.iterdir()).open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)  # it was let go


def test_interpreter_has_nothing_to_wait_for(monkeypatch, tmp_path):
    monkeypatch.setattr(compile_once, "INTERPRETED", True)
    before = compiler.compile
    compile_once.compile_each_once(str(tmp_path))
    assert compiler.compile is before
