"""Every kernel, in both implementations, against its reference on all the cases of its spec."""

import pytest
import torch

from arbcli.config.dense import SCALE_TYPES
from arbcli.kernels.rows import weighted_rows
from arbcli.kernels.runtime.backend import row_chunks, use_backend
from arbcli.verify.compare import as_tuple
from arbcli.verify.kernels import KERNELS, compare, copies

BACKENDS = ("torch", "triton" if torch.cuda.is_available() else "interpreter")
PLANES = {"decode_weight", "decode_e4m3", "ternary_matmul", "gradient_statistics"}
"""Kernels with code of its own for groups that are planes of a block, as those of T32 are."""


def cases() -> list:
    """List kernels, scale types and backends; interpreted, those that tell most are not slow.

    In T6 groups straddle everything. A norm decodes its weights with another kernel, for which T6
    takes long and is checked by itself. Other group sizes than these two run no other code.
    """
    found = []
    for spec in KERNELS:
        quick = {"T32"} if "norm" in spec.name else {"T6"}
        quick |= {"T32"} if spec.name in PLANES or not spec.uses_scales else set()
        for scale_type in ("T4", "T6", "T32", "T96") if spec.uses_scales else ("T32",):
            for backend in BACKENDS:
                slow = backend != "torch" and scale_type not in quick
                marks = [pytest.mark.slow] if slow else []
                name = f"{spec.name}-{scale_type}-{backend}"
                found.append(pytest.param(spec, scale_type, backend, marks=marks, id=name))
    return found


@pytest.mark.parametrize(("spec", "scale_type", "backend"), cases())
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
def test_torch_backend_gives_the_same_in_chunks_of_two_rows(spec, monkeypatch):
    """Matrices of real sizes are worked on in parts, and no case of a test is that large."""
    for case in spec.cases(torch.device("cpu"), SCALE_TYPES["T6"]):
        found = []
        for elements in (1 << 18, 1):
            monkeypatch.setattr(row_chunks, "__defaults__", (elements,))
            monkeypatch.setattr(weighted_rows, "CHUNK_ELEMENTS", elements)
            with use_backend("torch"):
                found.append(as_tuple(spec.torch(*copies(case.inputs))))
        for whole, parts in zip(*found, strict=True):
            # as close as is asked for, though a peer would allow for more
            assert compare(spec, case.label, parts, whole, None).passed, case.label


@pytest.mark.slow  # the interpreter runs programs in order: what may differ does on a GPU
@pytest.mark.parametrize("spec", KERNELS, ids=lambda spec: spec.name)
def test_kernel_is_deterministic(spec, device):
    *_, case = spec.cases(device, 32)
    first, second = (spec.triton(*copies(case.inputs)) for _ in range(2))
    if isinstance(first, torch.Tensor):
        first, second = (first,), (second,)
    for a, b in zip(first, second, strict=True):
        assert torch.equal(a, b)
