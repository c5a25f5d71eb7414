"""Tests of models also hold that no position is stored where another one is in the same call."""

import pytest
import torch

INDEX_COPY = torch.Tensor.index_copy_


def copied_once(x: torch.Tensor, dim: int, index: torch.Tensor, source: torch.Tensor):
    """Do as `index_copy_`; a GPU takes any of two sources of one place, a CPU the last."""
    if index.device.type == "cpu":
        places = index.tolist()
        assert len({*places}) == len(places), f"several sources of one place: {places}"
    return INDEX_COPY(x, dim, index, source)


@pytest.fixture(autouse=True)
def _places_are_written_once(monkeypatch):
    monkeypatch.setattr(torch.Tensor, "index_copy_", copied_once)
