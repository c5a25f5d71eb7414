"""A plugin of pytest, under which torch adds in another order for tensors of every shape.

    PYTHONPATH=tests python -m pytest -p shaken TESTS

On a CPU the order in which a product adds, and so its last bits, depends on the instruction set and
on the shapes. A test that compares floats of two shapes to the bit, or with numbers that were
written down, may pass on one CPU and fail on another. With this plugin it fails on all of them.
Tests of `torch.compile`, which refuses such a mode, fail too.
"""

import zlib
from collections.abc import Iterator

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

aten = torch.ops.aten
PRODUCTS = {aten.mm.default: 0, aten.bmm.default: 0, aten.addmm.default: 1, aten.baddbmm.default: 1}
"""Products, and the index of the first factor among their arguments."""
SUMS = {aten.sum.default, aten.sum.dim_IntList, aten.mean.default, aten.mean.dim}


class Shaken(TorchDispatchMode):
    """Permute what is added, by the shapes alone: the same operation gives the same bits twice."""

    def __torch_dispatch__(self, operation, types, args=(), kwargs=None):
        if operation in PRODUCTS:
            first = PRODUCTS[operation]
            before, (a, b), others = args[:first], args[first : first + 2], args[first + 2 :]
            if is_shaken(a):
                order = order_of(a.shape[-1], *a.shape, *b.shape)
                args = *before, a.index_select(-1, order), b.index_select(-2, order), *others
        elif operation in SUMS and is_shaken(args[0]):
            x, *others = args
            for dim in (others and others[0]) or range(x.dim()):
                x = x.index_select(dim, order_of(x.shape[dim], *x.shape))
            args = x, *others
        return operation(*args, **(kwargs or {}))


def is_shaken(x: Tensor) -> bool:
    """Whether a tensor is of floats in a CPU's memory."""
    return (
        type(x) in (Tensor, torch.nn.Parameter) and x.device.type == "cpu" and x.is_floating_point()
    )


def order_of(size: int, *about: int) -> Tensor:
    generator = torch.Generator().manual_seed(zlib.crc32(repr(about).encode()))
    return torch.randperm(size, generator=generator)


@pytest.hookimpl(wrapper=True)
def pytest_runtestloop() -> Iterator[None]:
    with Shaken():
        return (yield)
