"""Run kernels on the GPU if there is one, else in Triton's interpreter."""

import os

import pytest
import torch

# the tests' tensors are too small to share among threads, which would wait for each other
os.environ["OMP_NUM_THREADS"] = "1"
torch.set_num_threads(1)

# triton reads this when a kernel is defined, so it is set before any import of one
if not torch.cuda.is_available():
    os.environ["TRITON_INTERPRET"] = "1"


def pytest_collection_modifyitems(items):
    if torch.cuda.is_available():
        return
    for item in items:
        if item.get_closest_marker("gpu"):
            item.add_marker(pytest.mark.skip(reason="needs a CUDA device"))


@pytest.fixture
def device() -> torch.device:
    return torch.device("cuda" if torch.cuda.is_available() else "cpu")


@pytest.fixture(autouse=True)
def poison_uninitialised_memory():
    """Make `torch.empty` return NaN, or the largest integer, instead of leftovers."""
    torch.use_deterministic_algorithms(True, warn_only=True)
    torch.utils.deterministic.fill_uninitialized_memory = True
    yield
    torch.use_deterministic_algorithms(False)
