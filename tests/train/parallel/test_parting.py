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
    with mock.patch.dict(os.environ, environment(0, 2, 1)):
        yield happened


class Graph:
    def __init__(self, happened):
        self.reset = lambda: happened.append("freed")


@pytest.mark.parametrize(("error", "end"), [(False, "parted"), (True, "aborted")])
def test_captured_step_is_freed_before_processes_part(error, end, order):
    graph = Graph(order)
    expected = pytest.raises(RuntimeError) if error else nullcontext()
    with expected, joined(torch.device("cpu")) as group:
        group.remember(graph)
        if error:
            raise RuntimeError("any")
    group.forget_graphs()  # there is none any more
    assert order == ["joined", "freed", end]


def test_captured_step_that_nobody_holds_is_forgotten(order):
    with joined(torch.device("cpu")) as group:
        group.remember(Graph(order))
    assert order == ["joined", "parted"]


def test_end_that_hangs_does_not_hide_the_error(order, monkeypatch):
    never = Event()
    monkeypatch.setattr(group_module, "ABORT_SECONDS", 0.01)
    monkeypatch.setattr(group_module.dist.group.WORLD, "abort", never.wait)
    with pytest.raises(RuntimeError, match="first"), joined(torch.device("cpu")):
        raise RuntimeError("first")
    never.set()
