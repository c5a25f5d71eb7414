"""How processes part: what NCCL would wait for goes first, and nobody waits for those that hang."""

import os
from contextlib import nullcontext
from threading import Event
from types import SimpleNamespace
from unittest import mock

import pytest
import torch
from processes import environment

from arbcli.train.parallel import group as group_module
from arbcli.train.parallel.group import joined


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
    monkeypatch.setattr(group_module, "meet", lambda *_: None)
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
        group.remember(graph)
        if error:
            raise RuntimeError("any")
    group.forget_graphs()  # there is none any more
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
        found = {name: os.environ[name] for name in chosen}
    assert found == (group_module.INTERFACES if bound else chosen)
    assert group_module.INTERFACES.keys() == chosen.keys()


def test_captured_step_that_nobody_holds_is_forgotten(order):
    with joined(torch.device("cpu"), "train") as group:
        group.remember(Graph(order))
    assert order == ["joined", "parted"]


def test_end_that_hangs_does_not_hide_the_error(order, monkeypatch):
    never = Event()
    monkeypatch.setattr(group_module, "ABORT_SECONDS", 0.01)
    monkeypatch.setattr(group_module.dist.group.WORLD, "abort", never.wait)
    with pytest.raises(RuntimeError, match="first"), joined(torch.device("cpu"), "train"):
        raise RuntimeError("first")
    never.set()
