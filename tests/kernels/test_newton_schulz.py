"""Symmetric products against float64, and shared among any number of programs."""

import pytest
import torch

from arbcli.kernels import newton_schulz
from arbcli.kernels.backend import compile_for, use_backend
from arbcli.kernels.compare import compare
from arbcli.kernels.newton_schulz import (
    FEWEST_ROWS,
    GRAM,
    GRAM_POLYNOMIAL,
    HOPPER,
    gram,
    gram_polynomial,
    gram_polynomial_reference,
    gram_reference,
)

COEFFICIENTS = (3.4445, -4.775, 2.0315)

each_spec = pytest.mark.parametrize("spec", [GRAM, GRAM_POLYNOMIAL], ids=lambda spec: spec.name)


def randn(*shape, device, seed=0):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(device)


@each_spec
def test_kernel_results_are_exactly_symmetric(spec, device):
    for case in spec.cases(device, 32):
        result = spec.triton(*case.inputs)
        assert torch.equal(result, result.mT), case.label


@pytest.mark.parametrize("num_programs", [1, 2, 3, 7, 30, 72])
def test_steps_are_shared_among_any_number_of_programs(num_programs, monkeypatch, device):
    monkeypatch.setattr(newton_schulz, "_num_processors", lambda _: num_programs)
    x = randn(2, 70, 160, device=device)  # 12 tiles of 5 steps
    found = compare(GRAM, "", GRAM.triton(x), gram_reference(x))
    assert found.passed, found
    a = gram_reference(x / 160).float()
    expected = gram_polynomial_reference(a, *COEFFICIENTS)
    found = compare(GRAM_POLYNOMIAL, "", GRAM_POLYNOMIAL.triton(a, *COEFFICIENTS), expected)
    assert found.passed, found


@pytest.mark.parametrize("tiles", [1, 2, 3, 4, 15, 16, 17, 18])
def test_every_tile_of_the_triangle_is_computed(tiles, device):
    rows = tiles * newton_schulz.SMALL_TILES.block
    x = torch.arange(rows, device=device).remainder(29).float()[:, None] - 7
    assert torch.equal(GRAM.triton(x), x * x.T)


def test_gram_reads_every_row_and_column(device):
    x = torch.zeros(67, 101, device=device)
    x[66, 100], x[0, 0] = 3, 2
    expected = torch.zeros(67, 67, device=device)
    expected[66, 66], expected[0, 0] = 9, 4
    assert torch.equal(GRAM.triton(x), expected)
    turned = GRAM_POLYNOMIAL.triton(expected, 1.0, 2.0, 3.0)
    assert torch.equal(turned.diagonal().unique(), torch.tensor([1.0, 57.0, 262.0], device=device))


def test_the_kernel_takes_what_it_is_faster_on():
    def takes(rows, dtype=torch.bfloat16, capability=HOPPER):
        with compile_for(capability), use_backend("interpreter"):
            return newton_schulz._pays(torch.empty(rows, 8, dtype=dtype))

    assert takes(FEWEST_ROWS)
    assert not takes(FEWEST_ROWS - 1)
    assert not takes(FEWEST_ROWS, torch.float32)
    assert not takes(FEWEST_ROWS, capability=(8, 0))
    with compile_for(HOPPER), use_backend("torch"):
        assert not newton_schulz._pays(torch.empty(FEWEST_ROWS, 8, dtype=torch.bfloat16))


@pytest.mark.gpu
@pytest.mark.parametrize("rows", [FEWEST_ROWS - 8, FEWEST_ROWS, 2048])
def test_public_products_in_bf16_are_as_close_as_the_library(rows, device):
    x = randn(rows, 3000, device=device).bfloat16() / 55
    a = gram(x)
    found = compare(GRAM, "gram", a, gram_reference(x), x @ x.T)
    assert found.passed, found
    p = gram_polynomial(a, *COEFFICIENTS)
    expected = gram_polynomial_reference(a, *COEFFICIENTS)
    found = compare(GRAM_POLYNOMIAL, "", p, expected, GRAM_POLYNOMIAL.torch(a, *COEFFICIENTS))
    assert found.passed, found


def test_products_reject_what_does_not_fit(device):
    x = torch.zeros(3, 4, device=device)
    for wrong in (x.double(), x.to(torch.int8), x[0], x[None, None]):
        with pytest.raises(ValueError, match="bfloat16 or float32 matrix, or a stack"):
            gram(wrong)
        with pytest.raises(ValueError, match="bfloat16 or float32 matrix, or a stack"):
            gram_polynomial(wrong, *COEFFICIENTS)
    with pytest.raises(ValueError, match=r"square matrices, got \(3, 4\)"):
        gram_polynomial(x, *COEFFICIENTS)
