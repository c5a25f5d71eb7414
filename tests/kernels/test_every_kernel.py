"""Every kernel, in both implementations, against its reference on all the cases of its spec."""

import pytest
import torch

from arbcli.config.dense import SCALE_TYPES
from arbcli.kernels.runtime.backend import use_backend
from arbcli.verify.kernels import KERNELS, compare, copies

BACKENDS = ("torch", "triton" if torch.cuda.is_available() else "interpreter")
CASES = [
    pytest.param(spec, scale_type, id=f"{spec.name}-{scale_type}")
    for spec in KERNELS
    for scale_type in (("T4", "T6", "T32", "T96") if spec.uses_scales else ("T32",))
]


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize(("spec", "scale_type"), CASES)
def test_kernel_equals_reference(spec, scale_type, backend, device):
    implementation = spec.torch if backend == "torch" else spec.triton
    for case in spec.cases(device, SCALE_TYPES[scale_type]):
        wanted = spec.reference(*copies(case.inputs))
        with use_backend(backend):
            got = implementation(*copies(case.inputs))
        peer = case.peer(*copies(case.inputs)) if case.peer else None
        if isinstance(wanted, torch.Tensor):
            wanted, got, peer = (wanted,), (got,), (peer,)
        for result, expected, other in zip(got, wanted, peer or (None,) * len(got), strict=True):
            found = compare(spec, case.label, result, expected, other)
            assert found.passed, found


@pytest.mark.parametrize("spec", KERNELS, ids=lambda spec: spec.name)
def test_kernel_is_deterministic(spec, device):
    *_, case = spec.cases(device, 32)
    first, second = (spec.triton(*copies(case.inputs)) for _ in range(2))
    if isinstance(first, torch.Tensor):
        first, second = (first,), (second,)
    for a, b in zip(first, second, strict=True):
        assert torch.equal(a, b)
