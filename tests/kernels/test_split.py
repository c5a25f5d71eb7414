"""Launchers that divide large inputs among launches, or give a program several tiles, divide small
ones alike where their limits are small."""

import inspect
import sys

import pytest
import torch
from checked import assert_as_wanted

from arbcli.kernels.runtime import backend
from arbcli.kernels.runtime.backend import chunks_of, use_backend
from arbcli.verify.check_kernels import copies
from arbcli.verify.compare import poisoned
from arbcli.verify.registry import KERNELS

CPU = torch.device("cpu")
ASKED = ("chunk_elements(", "tiles_of_a_program(")
SPLIT = [
    spec
    for spec in KERNELS
    if any(name in inspect.getsource(sys.modules[spec.triton.__module__]) for name in ASKED)
]
CASES = 3
"""Of a kernel, those of the smallest inputs that have two texts or rows."""


def size(case) -> int:
    return sum(x.numel() for x in case.inputs if isinstance(x, torch.Tensor))


@pytest.mark.skipif(torch.cuda.is_available(), reason="what is divided is the same on a GPU")
@pytest.mark.parametrize("spec", SPLIT, ids=lambda spec: spec.name)
def test_small_inputs_are_divided_as_large_inputs(spec, monkeypatch):
    monkeypatch.setattr(backend, "LARGE_ELEMENTS", 1)
    cases = [case for case in spec.cases(CPU, 32) if len(case.inputs[0]) > 1]
    assert cases
    with poisoned():
        for case in sorted(cases, key=size)[:CASES]:
            wanted = spec.reference(*copies(case.inputs))
            with use_backend("interpreter"), chunks_of(1):
                got = spec.triton(*copies(case.inputs))
            assert_as_wanted(spec, case.label, got, wanted)
