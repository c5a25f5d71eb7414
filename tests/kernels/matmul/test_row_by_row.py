"""Rows of a product have the bits that each has by itself."""

import pytest
import torch

from arbcli.kernels.codec.packed import random_packed
from arbcli.kernels.matmul import row_matmul as of_row
from arbcli.kernels.matmul.prepacked import prepack
from arbcli.kernels.matmul.row_by_row import row_by_row
from arbcli.kernels.matmul.row_matmul import Tiling, row_matmul
from arbcli.kernels.runtime.backend import use_backend

KERNELS = "triton" if torch.cuda.is_available() else "interpreter"
TILINGS = [
    ((34, 200), (1, 1, 4)), ((50, 1096), (4, 3, 4)), ((34, 640), (4, 4, 8, 96)),
    ((18, 1960), (1, 1, 16, 64)),
]  # fmt: skip


def slow(*values):
    return pytest.param(*values, marks=pytest.mark.slow)


def matrix(rows, in_features, device, *, gated=False):
    generator = torch.Generator().manual_seed(0)
    return prepack(random_packed(rows, in_features, 32, generator, spread=8).to(device), gated)


def draw(*shape, device):
    x = torch.randn(*shape, generator=torch.Generator().manual_seed(1))
    return x.to(device, torch.bfloat16)


def check_bits(backend, x, weight, eps, added):
    with use_backend(backend):
        got = row_by_row(x, weight, eps, added)
        for row in range(len(got)):
            of_row = None if added is None else added[row : row + 1]
            assert torch.equal(got[row], row_matmul(x[row : row + 1], weight, eps, of_row)[0])


@pytest.mark.parametrize("rows", [2, slow(5), slow(8)])
@pytest.mark.parametrize("backend", [KERNELS, "torch", "native"])
@pytest.mark.parametrize(("gated", "eps", "adds"), [(True, 1e-6, False), (False, None, True)])
def test_each_row_has_the_bits_that_it_has_alone(rows, backend, gated, eps, adds, device):
    if backend == "native" and device.type == "cuda":
        pytest.skip("the native backend is for a CPU")
    weight = matrix(50, 328, device, gated=gated)
    x = draw(rows, 328, device=device)
    added = draw(rows, weight.out_features, device=device) if adds else None
    check_bits(backend, x, weight, eps, added)


@pytest.mark.parametrize(("shape", "tiling"), [slow(*each) for each in TILINGS])
def test_bits_are_the_same_however_work_is_shared_out(shape, tiling, monkeypatch, device):
    weight, x = matrix(*shape, device), draw(5, shape[1], device=device)
    monkeypatch.setattr(of_row, "tiling_of", lambda *_: Tiling(*tiling))
    check_bits(KERNELS, x, weight, 1e-6, None)
