"""Products of a mixture of experts: every row by its expert's matrix, whatever lies around it."""

import pytest
import torch
from checked import assert_as_wanted

from arbcli.families.experts.kernels import grouped_matmul as module
from arbcli.families.experts.kernels.grouped_matmul import grouped_grad_w, grouped_matmul
from arbcli.families.experts.verify.grouped_matmul import (
    grouped_grad_w_verification,
    grouped_matmul_verification,
)
from arbcli.kernels.runtime.backend import compile_for, use_backend
from arbcli.verify.check_kernels import copies

KERNEL_BACKEND = "triton" if torch.cuda.is_available() else "interpreter"

each_backend = pytest.mark.parametrize("backend", [KERNEL_BACKEND, "torch"])


def integers(*shape, device, seed=0):
    """Draw small integers: their sums are exact in any order."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(-5, 6, shape, generator=generator).float().to(device)


def bounds_of(*ends, device):
    return torch.tensor(ends, device=device)


@each_backend
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_bits_of_a_row_apart_depend_on_no_other(backend, dtype, device):
    """One row an expert has small tiles, and 130 have large ones, unless they are apart."""
    generator = torch.Generator().manual_seed(0)
    x, w = (
        torch.randn(shape, generator=generator).to(device, dtype)
        for shape in ((260, 160), (2, 24, 160))
    )
    rows = torch.tensor([129, 130], device=device)
    with use_backend(backend):
        many = grouped_matmul(x, w, bounds_of(0, 130, 260, device=device), apart=True)
        few = grouped_matmul(x[rows], w, bounds_of(0, 1, 2, device=device), apart=True)
    assert torch.equal(many[rows], few)


def test_bounds_beyond_the_rows_harm_nothing_in_the_kernel(device):
    x, w = integers(20, 8, device=device), integers(3, 5, 8, device=device)
    memory = torch.zeros(60, 5, device=device)
    with use_backend(KERNEL_BACKEND):
        for ends in ((-30, 10, 20, 50), (0, 15, 5, 20), (30, 40, 50, 60)):
            grouped_matmul(x, w, bounds_of(*ends, device=device), memory[20:40])
            grouped_grad_w(x[:, :5], x, bounds_of(*ends, device=device))
    assert not memory[:20].any()
    assert not memory[40:].any()


@pytest.mark.parametrize(
    "spec", [grouped_matmul_verification, grouped_grad_w_verification], ids=lambda spec: spec.name
)
def test_copy_engine_loads_the_same(spec, device):
    if device.type == "cuda":
        pytest.skip("the GPU decides")
    for case in [*spec.cases(device, 32)][::3]:
        with compile_for((9, 0)):
            product = spec.triton(*copies(case.inputs))
        assert_as_wanted(spec, case.label, product, spec.reference(*copies(case.inputs)))


@pytest.mark.parametrize(
    ("chooser", "tiling"),
    [("_tiling", tiling) for tiling in (*module.HOPPER_TILES, *module.OTHER_TILES)[::2]]
    + [("_grad_tiling", t) for t in (*module.HOPPER_GRAD_TILES, *module.OTHER_GRAD_TILES)],
    ids=lambda value: value if isinstance(value, str) else f"{value[:3]}",
)
def test_every_tiling_computes_the_same(chooser, tiling, monkeypatch, device):
    if device.type == "cuda":
        pytest.skip("the tiles are for bf16, and float32 of their size is slow to compile")
    x, grad_y = integers(300, 136, device=device), integers(300, 72, device=device)
    w, bounds = integers(3, 72, 136, device=device), bounds_of(2, 150, 151, 299, device=device)
    monkeypatch.setattr(module, chooser, lambda *_: tiling)
    products = [(grouped_matmul_verification, x, w), (grouped_matmul_verification, grad_y, w.mT)]
    for spec, *given in (
        products if chooser == "_tiling" else [(grouped_grad_w_verification, grad_y, x)]
    ):
        wanted = spec.reference(*given, bounds)
        assert torch.equal(spec.triton(*given, bounds).double(), wanted)
