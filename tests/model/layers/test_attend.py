"""When cuDNN attends: where it was measured to be faster, and nowhere else."""

from types import SimpleNamespace

import pytest
import torch

from arbcli.model.layers import attend


@pytest.fixture
def gpu(monkeypatch):
    monkeypatch.setattr(attend, "capability", lambda q: q.capability)
    monkeypatch.setattr(attend, "_has_cudnn", lambda: True)


FASTER = {
    "shape": (2, 3, 128, 64), "is_cuda": True, "dtype": torch.bfloat16, "capability": (9, 0),
}  # fmt: skip


@pytest.mark.parametrize(
    ("change", "taken"),
    [
        ({}, True),
        ({"shape": (2, 3, 64, 128)}, True),
        ({"shape": (2, 64, 128, 96)}, False),
        ({"shape": (64, 128, 96, 64)}, False),
        ({"is_cuda": False}, False),
        ({"dtype": torch.float32}, False),
        ({"capability": (8, 0)}, False),
        ({"capability": (10, 0)}, False),
    ],
    ids=str,
)
def test_cudnn_attends_where_it_was_faster(change, taken, gpu):
    assert attend._takes_cudnn(SimpleNamespace(**FASTER | change)) == taken


@pytest.mark.parametrize(
    ("gpu_there", "cudnn_there", "has"),
    [(True, True, True), (True, False, False), (False, False, True), (False, True, True)],
)
def test_cudnn_is_looked_for_where_there_is_a_gpu(gpu_there, cudnn_there, has, monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: gpu_there)
    monkeypatch.setattr(torch.backends.cudnn, "is_available", lambda: cudnn_there)
    assert attend._has_cudnn.__wrapped__() == has


def test_what_cudnn_attends_to_is_what_was_given(gpu, monkeypatch):
    monkeypatch.setattr(attend, "_takes_cudnn", lambda q: q == "q")
    monkeypatch.setattr(attend, "_CausalAttention", SimpleNamespace(apply=lambda *given: given))
    assert attend.attend_causally("q", "k", "v") == ("q", "k", "v")


def test_without_cudnn_torch_attends(gpu, monkeypatch):
    q = SimpleNamespace(**FASTER)
    monkeypatch.setattr(attend, "_has_cudnn", lambda: False)
    assert not attend._takes_cudnn(q)
