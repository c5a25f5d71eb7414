"""Levels of `make test-portable` are known to their readers; the plugin `noise` moves last bits."""

import portable
import pytest
import torch
from noise import noisy

from arbcli.kernels.runtime import native_library

OPERATIONS = {
    "mm": lambda x, w: x @ w,
    "addmm": lambda x, w: torch.addmm(torch.ones(9), x, w),
    "bmm": lambda x, w: torch.bmm(x[None], w[None])[0],
    "mv": lambda x, w: x @ w[:, 0],
    "sum": lambda x, w: (x[:, :, None] * w).sum(dim=1),
    "mean": lambda x, w: (x[:, :, None] * w).mean(1),
    "cumsum": lambda x, w: (x[:, :, None] * w).cumsum(1)[:, -1],
    "tanh": lambda x, _: (x / 100).tanh(),
    "softmax": lambda x, _: (x / 100).softmax(-1),
}


@pytest.mark.parametrize("name", OPERATIONS)
def test_noise_moves_the_last_bits_by_its_seed(name):
    generator, compute = torch.Generator().manual_seed(0), OPERATIONS[name]
    x, w = (torch.randn(shape, generator=generator) for shape in ((5, 300), (300, 9)))
    plain, eps = compute(x, w), torch.finfo(torch.float32).eps
    with noisy(1):
        first, again = compute(x, w), compute(x, w)
    with noisy(2):
        second = compute(x, w)
    assert torch.equal(first, again)
    assert not torch.equal(first, plain)
    assert not torch.equal(first, second)
    torch.testing.assert_close(first, plain, rtol=20 * eps, atol=500 * eps)
    assert torch.equal(compute(x, w), plain)


def test_four_seeds_find_a_choice_between_equal_sums_in_another_order():
    def choose(x: torch.Tensor) -> int:
        return int(torch.stack([x, x.flip(0)]).sum(dim=1).argmax())

    texts = torch.randn(30, 300, generator=torch.Generator().manual_seed(0))
    plain, moved = [choose(terms) for terms in texts], set()
    for seed in range(1, 5):
        with noisy(seed):
            noised = [choose(terms) for terms in texts]
        moved |= {i for i, pair in enumerate(zip(plain, noised, strict=True)) if len({*pair}) > 1}
    assert len(moved) >= 27


def test_levels_are_those_that_the_loops_can_be_compiled_for():
    assert set(portable.LEVELS) <= {
        name for names in native_library.LEVELS.values() for name in names
    }
    assert set(native_library.levels_here()[:1]) <= set(portable.LEVELS)
