"""The sum of a token's slots and its backward, against autograd: no slot lost, none twice."""

import pytest
import torch

from arbcli.kernels.rows.expert_combine import expert_combine, expert_combine_backward
from arbcli.kernels.runtime.backend import use_backend

KERNEL_BACKEND = "triton" if torch.cuda.is_available() else "interpreter"

each_backend = pytest.mark.parametrize("backend", [KERNEL_BACKEND, "torch"])


def draw(*shape, device, seed=0):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(device)


def places(tokens, slots, device):
    order = torch.randperm(tokens * slots, generator=torch.Generator().manual_seed(7))
    return order.view(tokens, slots).to(device)


@each_backend
@pytest.mark.parametrize("gated", [True, False])
def test_backward_is_what_autograd_finds(backend, gated, device):
    values, positions = draw(27, 70, device=device), places(9, 3, device)
    gates, grad_y = draw(9, 3, device=device, seed=1), draw(9, 70, device=device, seed=2)
    gates = gates if gated else torch.ones_like(gates)
    leaves = [leaf.double().requires_grad_() for leaf in (values, gates)]
    y = (leaves[0][positions] * leaves[1][..., None]).sum(dim=1)
    y.backward(grad_y.double())
    inputs = values, positions, gates if gated else None
    with use_backend(backend):
        found = expert_combine(*inputs), *expert_combine_backward(grad_y, *inputs)
    for got, wanted in zip(found, (y.detach(), *(leaf.grad for leaf in leaves)), strict=True):
        assert got.dtype == torch.float32
        torch.testing.assert_close(got.double(), wanted, rtol=1e-5, atol=1e-5)


@each_backend
def test_sums_are_taken_in_the_order_of_the_slots(backend, device):
    values = torch.tensor([[1e30], [1.0], [-1e30], [3.0]], device=device)
    with use_backend(backend):
        for order in ([0, 1, 2, 3], [0, 2, 1, 3], [1, 0, 3, 2]):
            total = 0.0
            for slot in order:
                total = total + values[slot]
            found = expert_combine(values, torch.tensor([order], device=device), None)
            assert torch.equal(found[0], total)


def test_positions_outside_are_nan_in_the_kernel(device):
    values, gates = draw(8, 40, device=device), draw(4, 2, device=device)
    positions = torch.tensor([[0, 1], [2, 8], [-1, 3], [4, 1 << 40]], device=device)
    with use_backend(KERNEL_BACKEND):
        y = expert_combine(values, positions, gates)
        grad_values, _ = expert_combine_backward(y[:1].expand(4, 40), values, positions, gates)
    assert torch.equal(y.isnan().all(dim=1), torch.tensor([False, True, True, True]).to(device))
    assert not y[0].isnan().any()
    assert grad_values[:5].isfinite().all()


def test_positions_outside_are_an_error_on_a_cpu():
    with use_backend("torch"), pytest.raises(IndexError):
        expert_combine(torch.zeros(2, 3), torch.tensor([[0, 2]]), None)
