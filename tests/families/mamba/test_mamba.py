"""A Mamba-2 block: where its numbers begin, and what its backward copies."""

import math

import pytest
import torch
from graph_parts import normal
from operations import NotedOperations

from arbcli.families.mamba import mixer as module
from arbcli.families.mamba.mixer import mamba_values


def test_backward_casts_the_gradients_of_b_and_c_once_for_all_heads(monkeypatch):
    """Not those of each head, of (B, T, H, S)."""
    c, b = (normal(2, 17, 96, seed=n).bfloat16().requires_grad_() for n in (0, 1))
    v = normal(2, 17, 3, 5).bfloat16().requires_grad_()
    y = module._scan(c, b, v, -normal(2, 17, 3).abs())
    of_head = normal(2, 17, 3, 96, seed=2)

    def stand_in(q, k, v, g, reverse=False):
        return of_head if v.shape[-1] == 96 else v.float()

    monkeypatch.setattr(module, "decay_scan", stand_in)
    made = []
    with NotedOperations(lambda name, x: made.append((name, x.numel()))):
        grads = torch.autograd.grad(y, (c, b), torch.ones_like(y))
    large = {name for name, size in made if size >= of_head.numel()}
    assert not {"_to_copy", "clone", "copy_", "cat"} & large
    assert all(torch.equal(grad, of_head.sum(dim=2).bfloat16()) for grad in grads)


@pytest.mark.parametrize("heads", [1, 2, 16])
def test_heads_begin_with_different_steps_and_rates(heads):
    rates, biases = mamba_values(heads)
    assert len(set(rates)) == len(set(biases)) == heads
    assert 0 not in (*rates, *biases)
    steps = torch.nn.functional.softplus(torch.tensor(biases))
    assert steps[0].item() == pytest.approx(1e-3)
    if heads > 1:
        assert steps[-1].item() == pytest.approx(0.1)
        assert rates[-1] == pytest.approx(math.log(16))
