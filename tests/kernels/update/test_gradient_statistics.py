"""One pass over a gradient: every element is counted once, and what does not fit is refused."""

import pytest
import torch

from arbcli.kernels.codec.packed import random_packed
from arbcli.kernels.runtime import native
from arbcli.kernels.runtime.backend import use_backend
from arbcli.kernels.update.gradient_statistics import gradient_statistics

KERNEL_BACKEND = "triton" if torch.cuda.is_available() else "interpreter"

each_backend = pytest.mark.parametrize("backend", [KERNEL_BACKEND, "torch"])


def matrix(rows, columns, group_size, device):
    generator = torch.Generator().manual_seed(rows)
    packed = random_packed(rows, columns, group_size, generator, spread=1)
    return packed._replace(fraction=None).to(device)


@each_backend
@pytest.mark.parametrize("bad", [torch.nan, torch.inf, -torch.inf])
def test_one_bad_element_shows_in_the_sum(backend, bad, device):
    grad, packed = torch.ones(70, 140, device=device), matrix(70, 140, 32, device)
    grad[69, 139] = bad
    with use_backend(backend):
        assert not gradient_statistics(grad, packed).squares.sum().isfinite()


@pytest.mark.skipif(not native.available(), reason=native.why_not())
def test_columns_are_the_same_by_any_number_of_threads():
    """No part of their sums is two threads'; 16 rows lie beyond the last whole part.

    Rows are so many that all threads have begun when the first ends.
    """
    grad = torch.randint(-3, 4, (4048, 200), generator=torch.Generator().manual_seed(0)).float()
    packed, before, found = matrix(4048, 200, 32, "cpu"), torch.get_num_threads(), []
    try:
        for threads in (1, 3):
            torch.set_num_threads(threads)
            with use_backend("native"):
                found.append(gradient_statistics(grad, packed, factored=True).columns)
    finally:
        torch.set_num_threads(before)
    assert torch.equal(*found)
    assert torch.equal(found[0].sum(dim=0), grad.square().sum(dim=0))
