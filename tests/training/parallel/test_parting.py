"""How processes part, and which ones are refused before anything is written."""

import dataclasses
import os
from contextlib import nullcontext
from pathlib import Path
from threading import Event
from types import SimpleNamespace
from unittest import mock

import pytest
import torch
from made_runs import observer_with, train
from processes import environment, run_processes

from arbcli.base.errors import ArbError
from arbcli.generation.load import read_saved
from arbcli.training import run as runs
from arbcli.training.configure import new_config
from arbcli.training.observer import Observer
from arbcli.training.parallel import group as group_module
from arbcli.training.parallel import rendezvous
from arbcli.training.parallel.group import joined
from arbcli.training.run import start_run


@pytest.fixture
def order(monkeypatch):
    """List what happens in a group of imagined processes."""
    happened = []
    imagined = SimpleNamespace(
        init_process_group=lambda **about: happened.append("joined"),
        destroy_process_group=lambda: happened.append("parted"),
        group=SimpleNamespace(WORLD=SimpleNamespace(abort=lambda: happened.append("aborted"))),
    )
    monkeypatch.setattr(group_module, "dist", imagined)
    monkeypatch.setattr(rendezvous, "dist", imagined)
    beats = SimpleNamespace(start=lambda: None, stop=lambda: None, leave=lambda error: None)
    monkeypatch.setattr(rendezvous, "wait_for_all", lambda *_: (mock.Mock(), ["a", "b"]))
    monkeypatch.setattr(rendezvous, "Heartbeat", lambda *_: beats)
    with mock.patch.dict(os.environ, environment(0, 2, 1)):
        yield happened


class Graph:
    def __init__(self, happened):
        self.reset = lambda: happened.append("freed")


@pytest.mark.parametrize(("error", "end"), [(False, "parted"), (True, "aborted")])
def test_captured_step_is_freed_before_processes_part(error, end, order):
    graph = Graph(order)
    expected = pytest.raises(RuntimeError) if error else nullcontext()
    with expected, joined(torch.device("cpu"), "train") as group:
        group.register_graph(graph)
        if error:
            raise RuntimeError("any")
    group.free_graphs()  # there is none any more
    assert order == ["joined", "freed", end]


@pytest.mark.parametrize(
    ("about", "bound"), [({"LOCAL_WORLD_SIZE": "2"}, True), ({"LOCAL_WORLD_SIZE": "1"}, False)]
)
def test_processes_of_one_machine_use_its_loopback_interface(about, bound, order, monkeypatch):
    """On several machines the interface is the user's choice."""
    chosen = {"GLOO_SOCKET_IFNAME": "eth7", "NCCL_SOCKET_IFNAME": "eth7"}
    for name, value in ({"MASTER_ADDR": "10.0.0.1"} | about | chosen).items():
        monkeypatch.setenv(name, value)
    with joined(torch.device("cpu"), "train"):
        interfaces = {name: os.environ[name] for name in chosen}
    assert interfaces == (rendezvous.INTERFACES if bound else chosen)
    assert rendezvous.INTERFACES.keys() == chosen.keys()


ABOUT = {
    "dim": 32, "layers": 1, "heads": 2, "ffn": 48, "ctx": 16, "batch": 2, "accum": 2, "steps": 2,
    "reduce_dtype": "int12", "device": "cpu", "compute": "fp32",
}  # fmt: skip


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    return train(tmp_path_factory.mktemp("runs"), b"ternary weights learn to read. " * 100, **ABOUT)


@pytest.fixture
def config(run):
    return new_config(**ABOUT, data=(str(run.with_name("text.txt")),))


def refusal(rank, run, config):
    """Return what a process is told; one that is not refused stops before it trains."""
    initial = read_saved(run, print) if rank else None
    trains = mock.patch.object(runs, "Trainer", side_effect=ArbError("it trains"))
    with trains, pytest.raises(ArbError) as refused:
        start_run(config, run.with_name("other"), Observer(), initial=initial)
    return str(refused.value)


def chosen_step(rank, config):
    """Return what a process trains with, each of which would choose another step."""
    trains = mock.patch.object(runs, "Trainer", side_effect=ArbError("it trains"))
    choose = lambda config, texts, size: {"batch": 3 + rank, "accum": 4 * size}  # noqa: E731
    with trains as trainer, pytest.raises(ArbError, match="it trains"):
        start_run(config, None, Observer(), choose=choose, save=False)
    chosen = trainer.call_args.args[0]
    return chosen.batch, chosen.accum


def test_processes_take_the_step_that_the_first_one_chooses(config):
    assert run_processes(2, chosen_step, config, join=False) == [(3, 8), (3, 8)]


def refused_step(rank, config):
    def choose(*_):
        raise ArbError("no window fits", hint="use a smaller `ctx`", fields=("ctx",))

    with pytest.raises(ArbError) as caught:
        start_run(config, None, Observer(), choose=choose, save=False)
    return str(caught.value), caught.value.hint, caught.value.fields


def test_error_of_the_choice_is_that_of_all_processes(config):
    """Otherwise the others report a lost process."""
    wanted = "no window fits", "use a smaller `ctx`", ("ctx",)
    assert run_processes(2, refused_step, config, join=False) == [wanted] * 2


def test_processes_that_begin_with_other_weights_are_refused(run, config):
    before = {path: path.read_bytes() for path in run.iterdir()}
    told = run_processes(2, refusal, run, config, join=False)
    assert told == ["process 1 has another setting than process 0: `init_from`"] * 2
    assert {path: path.read_bytes() for path in run.iterdir()} == before
    assert not run.with_name("other").exists()


def trains_while_one_changes_the_text(rank, config, out):
    """Each process returns what it is told, whichever of them saw that something is wrong."""

    def stepped(step):
        if rank == 0 and step == 1:
            text = Path(config.data[0])
            text.write_bytes(text.read_bytes()[::-1])

    with pytest.raises(ArbError) as refused:
        start_run(config, out, observer_with(stepped=stepped))
    return str(refused.value)


def test_all_processes_end_if_the_text_was_changed(run, config, tmp_path):
    text = tmp_path / "text.txt"
    text.write_bytes(run.with_name("text.txt").read_bytes())
    config = dataclasses.replace(config, data=(str(text),), save_every=1)
    told = run_processes(2, trains_while_one_changes_the_text, config, tmp_path / "run", join=False)
    assert told == ["the text was changed while the run read it"] * 2


def test_end_that_hangs_does_not_hide_the_error(order, monkeypatch):
    never = Event()
    monkeypatch.setattr(rendezvous, "ABORT_SECONDS", 0.01)
    monkeypatch.setattr(rendezvous.dist.group.WORLD, "abort", never.wait)
    with pytest.raises(RuntimeError, match="first"), joined(torch.device("cpu"), "train"):
        raise RuntimeError("first")
    never.set()
