"""A row times an arranged matrix: how it is arranged, and what the cases of the spec do not say."""

import pytest
import torch

from arbcli.kernels.arranged_matmul import (
    arrange,
    arranged_matmul,
    arranged_matmul_reference,
    takes,
)
from arbcli.kernels.backend import use_backend
from arbcli.kernels.decode_weight import decode_weight_reference, random_packed

KERNELS = "triton" if torch.cuda.is_available() else "interpreter"


def matrix(device, rows=20, in_features=328, group_size=32) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    state = random_packed(rows, in_features, group_size, generator, spread=8)
    return [digits.to(device) for digits in state]


@pytest.mark.parametrize("in_features", [8, 160, 328])
@pytest.mark.parametrize("group_size", [32, 96])
def test_arranged_weights_are_the_packed_ones(group_size, in_features, device):
    state = matrix(device, in_features=in_features, group_size=group_size)
    expected = decode_weight_reference(*state, in_features, group_size).double()
    weight = arrange(*state, in_features, group_size)
    for k in {0, in_features // 2, in_features - 1}:
        x = torch.zeros(in_features, device=device)
        x[k] = 1
        column = arranged_matmul_reference(x, *weight, None, None, torch.float32)
        assert torch.equal(column, expected[:, k])


def test_a_gated_matrix_is_arranged_by_halves(device):
    state = matrix(device, rows=22)
    weight, halves = arrange(*state, 328, 32, gated=True), decode_weight_reference(*state, 328, 32)
    x = torch.randn(328, generator=torch.Generator().manual_seed(1)).to(device)
    gate, up = (halves.double() @ x.double()).chunk(2)
    got = arranged_matmul_reference(x, *weight, None, None, torch.float32)
    torch.testing.assert_close(got, gate * torch.sigmoid(gate) * up)


def test_power_of_two_in_front_of_a_row_does_not_matter(device):
    weight = arrange(*matrix(device), 328, 32)
    x = torch.randn(328, generator=torch.Generator().manual_seed(1)).to(device, torch.bfloat16)
    with use_backend(KERNELS):
        y, scaled = (
            arranged_matmul(part, weight, 0.0, dtype=torch.float32) for part in (x, 2.0**40 * x)
        )
    assert torch.equal(y, scaled)


@pytest.mark.parametrize("value", [float("inf"), float("nan")])
def test_what_is_not_finite_is_not_hidden(value, device):
    weight = arrange(*matrix(device, rows=5), 328, 32)
    for k in (0, 171, 327):
        x = torch.ones(328, device=device, dtype=torch.bfloat16)
        x[k] = value
        with use_backend(KERNELS):
            y = arranged_matmul(x, weight, 1e-6, dtype=torch.float32)
        assert not y.isfinite().any()


def test_only_one_row_of_bf16_is_taken(device):
    x = torch.zeros(1, 1, 328, device=device, dtype=torch.bfloat16)
    with use_backend(KERNELS):
        assert takes(x, 32)
        assert not takes(x, 6)
        assert not takes(x.float(), 32)
        assert not takes(x[..., 1:], 32)
        assert not takes(x.expand(1, 2, 328), 32)
    with use_backend("torch"):
        assert not takes(x, 32)


def test_rejects_what_does_not_fit(device):
    state, x = matrix(device), torch.zeros(328, device=device, dtype=torch.bfloat16)
    with pytest.raises(ValueError, match="19 rows are not two halves"):
        arrange(*(digits[:19] for digits in state), 328, 32, gated=True)
    with pytest.raises(ValueError, match="need groups of whole planes of 32 weights, got 6"):
        arrange(*matrix(device, group_size=6), 328, 6)
    weight = arrange(*state, 328, 32)
    for wrong in (x.float(), x[:320], x[None], torch.zeros(656, device=device).bfloat16()[::2]):
        with pytest.raises(ValueError, match="need 328 contiguous bfloat16 elements"):
            arranged_matmul(wrong, weight)
    with pytest.raises(ValueError, match="need a multiple of 8"):
        arranged_matmul(x[:325], arrange(*matrix(device, in_features=325), 325, 32))
    for added in (x, x[:20].float(), x[None, :20]):
        with pytest.raises(ValueError, match=r"need torch.bfloat16 \(20,\) to add to"):
            arranged_matmul(x, weight, added=added)
