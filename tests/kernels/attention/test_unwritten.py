"""Slots of a ring that no byte has written may hold anything: no kernel reads them."""

import inspect

import pytest
import torch

from arbcli.kernels.attention.attend_parts import AttentionParts
from arbcli.kernels.runtime import native
from arbcli.kernels.runtime.backend import use_backend
from arbcli.verify.check_kernels import copies
from arbcli.verify.compare import as_tuple
from arbcli.verify.registry import BY_NAME

pytestmark = pytest.mark.filterwarnings("ignore:invalid value:RuntimeWarning")
KERNELS = "triton" if torch.cuda.is_available() else "interpreter"
RINGS = {
    "attend_parts": (("keys", "values"), 1),
    "attend_ahead": (("keys", "values"), 1),
    "decode_attention": (("keys", "values"), 1),
    "decode_latent": (("latent", "rotated", "lengths"), 0),
}
"""By kernel: its rings, and their dimension of slots."""


def fill_with_rubbish(name: str, inputs: tuple, rubbish: float) -> tuple:
    names = [*inspect.signature(inspect.unwrap(BY_NAME[name].reference)).parameters]
    given, (rings, axis) = dict(zip(names, copies(inputs), strict=False)), RINGS[name]
    for ring in rings:
        window = given[ring].shape[axis]
        free = range(int(given["position"]), window)
        given[ring].index_fill_(axis, torch.tensor([*free], dtype=torch.int64), rubbish)
    return tuple(given.values())


def compare(name: str, inputs: tuple, backend: str) -> None:
    """Run a kernel with zeros and with no numbers in the slots that are free."""
    outputs = []
    for rubbish in (0.0, torch.nan):
        with use_backend(backend):
            result = BY_NAME[name].operation(*fill_with_rubbish(name, inputs, rubbish))
        # parts that no byte reaches have nothing in them
        whole = result.combine() if isinstance(result, AttentionParts) else as_tuple(result)[0]
        outputs.append(whole)
    assert outputs[0].isfinite().all()
    assert torch.equal(*outputs)


@pytest.mark.parametrize("backend", [KERNELS, "native"])
@pytest.mark.parametrize("name", RINGS)
def test_slots_that_were_never_written_may_hold_no_number(name, backend):
    spec = BY_NAME[name]
    if backend == "native" and not (native.available() and spec.native):
        pytest.skip("has no loop in C here")
    rings, axis = RINGS[name]
    at = [*inspect.signature(inspect.unwrap(spec.reference)).parameters]
    tried = 0
    for case in spec.cases(torch.device("cpu"), 32):
        position, ring = (case.inputs[at.index(argument)] for argument in ("position", rings[0]))
        if position.ndim == 0 and ring.ndim == 3 - (axis == 0) and position < ring.shape[axis]:
            compare(name, case.inputs, backend)
            tried += 1
        if tried == 2:
            return
    assert tried
