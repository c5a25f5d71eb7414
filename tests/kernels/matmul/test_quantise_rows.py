"""Rows that are not finite, and every number of e4m3."""

import pytest
import torch

from arbcli.kernels.matmul.quantise_rows import (
    E4M3,
    quantise_rows,
    round_e4m3_reference,
)


@pytest.mark.parametrize(
    "run", [quantise_rows.triton, quantise_rows.torch], ids=["triton", "torch"]
)
@pytest.mark.parametrize("value", [torch.inf, -torch.inf, torch.nan])
@pytest.mark.parametrize(("width", "place"), [(40, 7), (2100, 7), (2100, 1500), (2100, 2099)])
def test_row_that_is_not_finite_stays_so_and_leaves_others_alone(
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


def test_reference_rounds_as_the_format_says():
    every = torch.arange(127, dtype=torch.uint8).view(E4M3).float()  # 0 to 448
    assert torch.equal(round_e4m3_reference(every[:-1].double()), every[:-1])
    middle = (every[1:-1].double() + every[:-2].double()) / 2
    even = every[:-1].view(-1, 2)[:, 0]  # the last bit of each is 0
    assert torch.equal(round_e4m3_reference(middle), even.repeat_interleave(2)[1:])


def test_largest_of_a_row_uses_the_range():
    q, scale = quantise_rows(torch.tensor([[3.0, -5.0], [2.0**-9, 0.0], [0.0, 0.0]]))
    assert q.float().tolist() == [[96.0, -160.0], [128.0, 0.0], [0.0, 0.0]]
    assert scale[:2].flatten().tolist() == [2.0**-5, 2.0**-16]
