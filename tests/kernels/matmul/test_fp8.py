"""Properties of products in eight bits that the cases of their verification do not cover."""

import pytest
import torch

from arbcli.kernels.codec.decode_weight import decode_weight
from arbcli.kernels.codec.packed import Packed
from arbcli.kernels.matmul.fp8_grad_w import fp8_grad_w
from arbcli.kernels.matmul.fp8_matmul import fp8_matmul
from arbcli.kernels.matmul.quantise_rows import quantise_rows
from arbcli.verify.case_generator import CaseGenerator
from arbcli.verify.kernels.matmul.quantise_rows import quantise_rows_verification


def matrix(outputs: int, inputs: int, device: torch.device | str = "cpu") -> Packed:
    return CaseGenerator(0, device, torch.float32).packed(outputs, inputs, 32, 2, "trit")


def product(x: torch.Tensor, packed: Packed, **options) -> torch.Tensor:
    return fp8_matmul(*quantise_rows(x), packed, dtype=x.dtype, **options)


def test_numbers_that_eight_bits_hold_are_multiplied_exactly(device):
    packed = matrix(32, 64, device)._replace(fraction=None)
    x = torch.randint(-8, 9, (70, 64)).float().to(device)
    assert torch.equal(product(x, packed), x @ decode_weight(packed, torch.float32).T)


@pytest.mark.parametrize(
    "run",
    [quantise_rows_verification.triton, quantise_rows_verification.torch],
    ids=["triton", "torch"],
)
@pytest.mark.parametrize(
    ("width", "place", "value"),
    [(40, 7, torch.inf), (2100, 7, -torch.inf), (2100, 1500, torch.nan), (2100, 2099, torch.inf)],
)
def test_non_finite_row_stays_non_finite_and_changes_no_other(
    run, value, width, place, device, monkeypatch
):
    """Rows that are read in turns, of 1024 here, keep what any of the turns has seen."""
    monkeypatch.setattr("arbcli.kernels.matmul.quantise_rows.WHOLE_ROW", 64)
    x = torch.randn(3, width, generator=torch.Generator().manual_seed(0)).to(device)
    whole = run(x)
    x[1, place] = value
    q, scale = run(x)
    assert scale.isfinite().flatten().tolist() == [True, False, True]
    for got, expected in zip((q, scale), whole, strict=True):
        assert torch.equal(got[::2], expected[::2])


def test_gradient_of_numbers_that_eight_bits_hold_is_exact(device):
    """Rows whose scales differ, and a number of rows that is no multiple of 16."""
    generator = torch.Generator().manual_seed(0)
    grad_y, x = (torch.randint(-8, 9, (70, n), generator=generator).float() for n in (32, 64))
    grad_y *= torch.exp2(torch.arange(70) % 4)[:, None]
    grad_y, x = grad_y.to(device), x.to(device)
    gradient = fp8_grad_w(*quantise_rows(grad_y), *quantise_rows(x), torch.float32)
    assert torch.equal(gradient, grad_y.T @ x)


@pytest.mark.parametrize("value", [torch.inf, torch.nan])
@pytest.mark.parametrize("operand", [0, 1])
def test_non_finite_row_makes_the_gradient_nan(operand, value, device):
    operands = torch.ones(70, 32, device=device), torch.ones(70, 64, device=device)
    operands[operand][3, 5] = value
    (grad_q, grad_scale), (q, scale) = map(quantise_rows, operands)
    assert fp8_grad_w(grad_q, grad_scale, q, scale, torch.float32).isnan().all()
