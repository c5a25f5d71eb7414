"""Variables of `make test-portable` are known to their readers; its plugin moves last bits."""

import portable
import pytest
import torch
from shaken import Shaken

from arbcli.kernels.runtime import native


@pytest.mark.parametrize(
    "product",
    [
        lambda x, w: x @ w,
        lambda x, w: torch.addmm(torch.ones(9), x, w),
        lambda x, w: torch.bmm(x[None], w[None])[0],
        lambda x, w: (x[:, :, None] * w).sum(dim=1),
        lambda x, w: (x[:, :, None] * w).mean(1),
    ],
    ids=["mm", "addmm", "bmm", "sum", "mean"],
)
def test_products_of_other_shapes_differ_in_their_last_bits(product):
    generator = torch.Generator().manual_seed(0)
    x, w = (torch.randn(shape, generator=generator) for shape in ((5, 300), (300, 9)))
    plain = product(x, w)
    with Shaken():
        whole, again, part = product(x, w), product(x, w), product(x[1:], w)
    assert torch.equal(whole, again)
    assert not torch.equal(whole[1:], part)
    torch.testing.assert_close(whole, plain, rtol=1e-5, atol=1e-4)
    x, w = x.sign(), w.sign()
    plain = product(x, w)
    with Shaken():
        assert product(x, w).sub(plain).abs().max() < 1e-6  # sums of integers stay what they are


def test_levels_are_those_that_the_loops_can_be_compiled_for():
    assert set(portable.LEVELS) <= {name for names in native.LEVELS.values() for name in names}
    assert set(native.levels_here()[:1]) <= set(portable.LEVELS)
