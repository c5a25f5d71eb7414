"""What products in eight bits lose, and what they refuse."""

import pytest
import torch

from arbcli.kernels.codec.decode_weight import decode_weight
from arbcli.kernels.codec.packed import Packed, random_packed
from arbcli.kernels.matmul.fp8_matmul import fp8_matmul
from arbcli.kernels.matmul.quantise_rows import quantise_rows


def matrix(outputs: int, inputs: int, device: torch.device | str = "cpu") -> Packed:
    generator = torch.Generator().manual_seed(0)
    return random_packed(outputs, inputs, 32, generator, spread=2).to(device)


def product(x: torch.Tensor, packed: Packed, **options) -> torch.Tensor:
    return fp8_matmul(*quantise_rows(x), packed, dtype=x.dtype, **options)


@pytest.mark.parametrize("transposed", [False, True])
def test_product_is_near_the_exact_one(transposed, device):
    packed = matrix(96, 160, device)
    weight = decode_weight(packed, torch.float32)
    x = torch.randn(80, 96 if transposed else 160).to(device)
    exact = x @ (weight if transposed else weight.T)
    y = product(x, packed, transposed=transposed)
    assert 0.01 < float((y - exact).norm() / exact.norm()) < 0.06


def test_numbers_that_eight_bits_hold_are_multiplied_exactly(device):
    packed = matrix(32, 64, device)._replace(fraction=None)
    x = torch.randint(-8, 9, (70, 64)).float().to(device)
    weight = decode_weight(packed, torch.float32)
    assert torch.equal(product(x, packed), x @ weight.T)


def test_row_that_is_not_finite_gives_nan(device):
    packed = matrix(32, 64, device)
    x = torch.ones(70, 64, device=device)
    x[3, 5] = torch.inf
    finite = product(x, packed).isfinite().all(dim=1)
    assert finite.tolist() == [row != 3 for row in range(70)]
