"""Kernels that Triton compiles or loads are counted, with their time."""

from types import SimpleNamespace

import pytest

from arbcli.kernels.runtime.compiling import counted_compiling

triton = pytest.importorskip("triton")


def compile_one(microseconds: int, *, cache_hit: bool) -> None:
    """Tell listeners, as Triton does once it has a kernel."""
    times = SimpleNamespace(total=microseconds)
    rest = {"src": None, "metadata": {}, "metadata_group": {}}
    triton.knobs.compilation.listener(times=times, cache_hit=cache_hit, **rest)


def test_compiled_and_loaded_kernels_are_told_apart(monkeypatch):
    heard = []
    monkeypatch.setattr(triton.knobs.compilation, "listener", lambda **about: heard.append(about))
    with counted_compiling() as outer:
        compile_one(1_500_000, cache_hit=False)
        with counted_compiling() as inner:
            compile_one(250_000, cache_hit=True)
        compile_one(500_000, cache_hit=False)
    compile_one(1, cache_hit=False)
    assert (outer.compiled, outer.loaded, outer.seconds) == (2, 1, 2.25)
    assert (inner.compiled, inner.loaded, inner.seconds) == (0, 1, 0.25)
    assert [about["cache_hit"] for about in heard] == [False, True, False, False]
