"""Run kernels on the GPU if there is one, else in Triton's interpreter."""

import atexit
import gc
import json
import os
import shutil
import signal
import sys
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from functools import cache
from importlib.util import find_spec
from pathlib import Path
from subprocess import CompletedProcess
from types import ModuleType
from typing import Any
from unittest import mock

import pytest
import torch
import typer.testing

gc.disable()  # nothing that is imported and collected here is ever garbage

# the tests' tensors are too small to share among threads, which would wait for each other
os.environ["OMP_NUM_THREADS"] = "1"
torch.set_num_threads(1)

if hasattr(signal, "SIGHUP"):  # ignored under nohup
    signal.signal(signal.SIGHUP, signal.SIG_DFL)

# triton reads this when a kernel is defined, so it is set before any import of one
if not torch.cuda.is_available():
    os.environ["TRITON_INTERPRET"] = "1"
    if find_spec("triton"):
        from apparatus.interpreter import quicken

        quicken()


def pytest_collection_finish():
    collect_and_freeze()
    gc.set_threshold(20_000, 20, 20)
    gc.enable()


def collect_and_freeze():
    """Let no later collection, and no search for live tensors, go through what is alive now."""
    gc.collect()
    gc.freeze()


@pytest.hookimpl(trylast=True)
def pytest_runtest_teardown(item, nextitem):
    if nextitem is None or nextitem.path != item.path:
        collect_and_freeze()  # libraries that the module imported


@pytest.hookimpl(trylast=True)
def pytest_unconfigure(config):
    """End the process without freeing a million objects one by one, which takes seconds."""
    if (session := config.pluginmanager.getplugin("session")) is None:
        return  # the options were refused
    config.get_terminal_writer().flush()
    atexit._run_exitfuncs()
    os._exit(session.exitstatus)


def pytest_collection_modifyitems(items):
    if torch.cuda.is_available():
        return
    for item in items:
        if item.get_closest_marker("gpu"):
            item.add_marker(pytest.mark.skip(reason="needs a CUDA device"))


@pytest.hookimpl(wrapper=True)
def pytest_pyfunc_call():
    """Skip what needs Triton where it is not installed."""
    from arbcli.kernels.runtime._triton import TritonMissing

    try:
        return (yield)
    except TritonMissing as missing:
        pytest.skip(str(missing))


@pytest.fixture
def device() -> torch.device:
    return torch.device("cuda" if torch.cuda.is_available() else "cpu")


@pytest.fixture
def text(tmp_path) -> str:
    """Path of a short text; a module whose tests need another has a fixture of its own."""
    path = tmp_path / "text.txt"
    path.write_bytes(b"ternary weights learn to read. " * 100)
    return str(path)


@pytest.fixture
def own_cache(monkeypatch, tmp_path) -> None:
    """Use a cache in the folder of the test."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))


@pytest.fixture(scope="session")
def finished_run(tmp_path_factory) -> Path:
    """Directory of a run of four steps, all of which are saved, next to its text; for reading."""
    from made_runs import train

    saves = {"steps": 4, "save_every": 1, "eval_every": 1, "keep": 9, "keep_best": True}
    text = b"ternary weights learn to read. " * 100
    return train(tmp_path_factory.mktemp("finished"), text, **saves)


@pytest.fixture
def own_run(finished_run, tmp_path) -> Path:
    """Directory of a copy of `finished_run`, which may be changed."""
    return shutil.copytree(finished_run, tmp_path / "run")


@pytest.fixture(scope="session")
def transformers() -> ModuleType:
    """Transformers, which prints nothing."""
    module = pytest.importorskip("transformers", reason="needs the extra `trainers`")
    module.logging.set_verbosity_error()
    module.logging.disable_progress_bar()
    return module


@pytest.fixture(scope="session")
def byte_tokenizer(tmp_path_factory) -> Path:
    """File of a tokenizer of bytes and of some words, with two tokens of chats."""
    pytest.importorskip("tokenizers", reason="needs the package tokenizers")
    from apparatus.killing import write_tokenizer

    path = tmp_path_factory.mktemp("tokenizer") / "tokenizer.json"
    write_tokenizer(path, ("<|im_start|>", "<|im_end|>"), "how are you, I am fine")
    return path


@pytest.fixture(scope="session")
def small_graph() -> dict:
    """Options of an `arb-tiny` with all of its parts whose steps take no time."""
    return {
        "preset": "arb-tiny", "dim": 32, "layers": 2, "heads": 2, "ffn": 48, "ctx": 16, "batch": 4,
        "latent": 16, "rotary": 4, "ngram_rows": 200, "ngram_dim": 8, "key_dim": 8,
        "codes": (8, 8), "code_dim": 16, "knowledge": (16, 8), "knowledge_dim": 8,
        "knowledge_heads": 2, "experts": 4, "expert_dim": 20, "expert_ffn": 24, "gate_dim": 8,
        "adapter_rank": 4, "edges": (32, 2), "head_ffn": 24, "memory_rows": 256,
        "max_moe_iters": 3, "moe": True, "graph": True,
    }  # fmt: skip


@pytest.fixture(scope="session")
def small_hnet() -> dict:
    """Options of an `hnet-tiny` of two stages whose steps take no time."""
    return {
        "preset": "hnet-tiny", "dim": 32, "layers": 1, "heads": 2, "ffn": 48, "ctx": 24,
        "batch": 4, "outer_dim": (24, 32), "outer_layers": (1, 1), "outer_heads": (2, 2),
        "outer_ffn": (40, 40), "chunk_length": (3, 2), "window": 8,
    }  # fmt: skip


@pytest.fixture(scope="session")
def small_compressed() -> dict:
    """Options of a `tiny` with compressed attention whose steps take no time."""
    return {
        "preset": "tiny", "attention": "compressed", "dim": 32, "layers": 2, "heads": 2, "ffn": 48,
        "ctx": 24, "batch": 4, "kv_heads": 1, "window": 5, "ratios": (3, 6), "indexed_ratio": 3,
        "top_k": 2, "index_heads": 2, "index_width": 8,
    }  # fmt: skip


@pytest.fixture(scope="session", autouse=True)
def short_samples_and_evaluations():
    """Of two batches and four symbols: forty and 256 take most of the time of a small run."""
    from arbcli.training import sample  # not before the variable is set
    from arbcli.training.trainer import Trainer

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sample, "SAMPLE_BYTES", 4)
        patch.setattr(Trainer.evaluate.__wrapped__, "__defaults__", (2,))
        yield


@pytest.fixture(scope="session", autouse=True)
def no_estimate_of_slow_runs():
    """The line that a run prints after ten seconds depends on the load of the machine."""
    from arbcli.commands import _run_display

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(_run_display, "ESTIMATE_AFTER", 3600.0)
        yield


@pytest.fixture(scope="session", autouse=True)
def commands_made_once():
    """Typer reads the signatures of all commands at each call, which takes longer than most do."""
    get_command = cache(typer.main.get_command)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(typer.main, "get_command", get_command)
        patch.setattr(typer.testing, "_get_command", get_command)
        yield


@pytest.fixture(autouse=True)
def poison_uninitialised_memory():
    """Make `torch.empty` return NaN, or the largest integer, instead of leftovers."""
    torch.set_deterministic_debug_mode("warn")
    torch.utils.deterministic.fill_uninitialized_memory = True
    yield
    torch.set_deterministic_debug_mode("default")


@pytest.fixture
def saved(tmp_path) -> Callable[..., Path]:
    """Save a model whose scales differ from group to group, as after training."""

    from made_runs import checkpoint_of

    from arbcli.config.presets import assembled
    from arbcli.model.build import build_model
    from arbcli.model.checkpoint import save_checkpoint  # not before the variable is set

    sizes = {"dim": 64, "layers": 2, "heads": 2, "ffn": 192, "ctx": 32}

    def save(name="tiny", **options) -> Path:
        config = assembled(name, **{**(sizes if name == "tiny" else {}), **options})
        model = build_model(config, torch.float32, seed=3)
        generator = torch.Generator().manual_seed(0)
        for weight in model.weights().values():
            if not weight.frozen and weight.scales[1] is not None:
                shape = weight.fraction.shape
                weight.fraction.copy_(torch.randint(0, 128, shape, generator=generator))
        return save_checkpoint(tmp_path, checkpoint_of(model))

    return save


@contextmanager
def _files_no_longer_than(size: int) -> Iterator[None]:
    import resource  # Windows has none

    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    handler = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
        signal.signal(signal.SIGXFSZ, handler)


@pytest.fixture
def full_disk() -> Callable[[int], AbstractContextManager]:
    """Stop a write half-way, as a full disk does: by a limit on the size of files, in bytes."""
    return _files_no_longer_than


@pytest.fixture
def arb_here(capfd, monkeypatch):
    """Run `arb` in this process: to load torch once more takes seconds of each mistake."""
    from arbcli.cli import main

    monkeypatch.setenv("COLUMNS", "160")

    def run(*arguments: str) -> CompletedProcess:
        monkeypatch.setattr(sys, "argv", ["arb", *arguments])
        with mock.patch.dict(os.environ), pytest.raises(SystemExit) as stopped:
            main()
        stdout, stderr = capfd.readouterr()
        return CompletedProcess(arguments, stopped.value.code, stdout, stderr)

    return run


@pytest.fixture
def arb_done(arb_here) -> Callable[..., CompletedProcess]:
    """Run a command of `arb` that succeeds."""

    def run(*arguments: str) -> CompletedProcess:
        done = arb_here(*arguments)
        assert done.returncode == 0, done.stderr
        return done

    return run


@pytest.fixture
def arb_json(arb_done) -> Callable[..., Any]:
    """Run a command of `arb` that succeeds, and return what it writes as JSON."""
    return lambda *arguments: json.loads(arb_done(*arguments, "--json").stdout)


@pytest.fixture
def arb_error(arb_here) -> Callable[..., str]:
    """Run a command of `arb` that is refused; return the lines of its error and of its hint."""

    def run(*arguments: str) -> str:
        done = arb_here(*arguments)
        assert (done.returncode, done.stdout) == (2, "")
        error, hint = done.stderr.splitlines()
        assert (error[:7], hint[:6]) == ("error: ", "hint: ")
        return done.stderr

    return run
