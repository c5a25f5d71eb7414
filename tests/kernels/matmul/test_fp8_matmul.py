"""What products in eight bits lose, and what they refuse."""

import pytest
import torch

from arbcli.kernels.codec.decode_weight import decode_weight, random_packed
from arbcli.kernels.matmul.fp8_matmul import fp8_matmul
from arbcli.kernels.matmul.quantise_rows import quantise_rows


def matrix(outputs: int, inputs: int, spread: int = 2) -> list[torch.Tensor]:
    return list(random_packed(outputs, inputs, 32, torch.Generator().manual_seed(0), spread))


def product(x: torch.Tensor, *state, **options) -> torch.Tensor:
    return fp8_matmul(*quantise_rows(x), *state, dtype=x.dtype, **options)


@pytest.mark.parametrize("transposed", [False, True])
def test_product_is_near_the_exact_one(transposed, device):
    state = [digits.to(device) for digits in matrix(96, 160)]
    weight = decode_weight(*state, 160, 32, torch.float32)
    x = torch.randn(80, 96 if transposed else 160).to(device)
    exact = x @ (weight if transposed else weight.T)
    y = product(x, *state, 160, 32, transposed=transposed)
    assert 0.01 < float((y - exact).norm() / exact.norm()) < 0.06


def test_numbers_that_eight_bits_hold_are_multiplied_exactly(device):
    packed, exponent, _ = (digits.to(device) for digits in matrix(32, 64))
    state = packed, exponent, None
    x = torch.randint(-8, 9, (70, 64)).float().to(device)
    weight = decode_weight(*state, 64, 32, torch.float32)
    assert torch.equal(product(x, *state, 64, 32), x @ weight.T)


def test_row_that_is_not_finite_gives_nan(device):
    state = [digits.to(device) for digits in matrix(32, 64)]
    x = torch.ones(70, 64, device=device)
    x[3, 5] = torch.inf
    finite = product(x, *state, 64, 32).isfinite().all(dim=1)
    assert finite.tolist() == [row != 3 for row in range(70)]


def test_sizes_that_do_not_fit_are_refused():
    state = matrix(32, 64)
    with pytest.raises(ValueError, match="multiples of 16"):
        product(torch.zeros(70, 40), *matrix(32, 40), 40, 32)
    with pytest.raises(ValueError, match="does not fit"):
        product(torch.zeros(70, 32), *state, 64, 32)
    with pytest.raises(ValueError, match="does not fit"):
        product(torch.zeros(70, 64), *state, 64, 32, transposed=True)
