"""Slots of a ring that no byte has written may hold anything, and so may the one that is next."""

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
PAIR = {"keys": 1, "values": 1}
RINGS = {
    "attend_parts": PAIR, "attend_ahead": PAIR, "decode_attention": PAIR,
    "decode_attention_8bit": PAIR | {"exponents": 2},
    "decode_latent": {"latent": 0, "rotated": 0, "lengths": 0},
}  # fmt: skip
"""By kernel: its rings, with their dimension of slots."""
RUBBISH = ((0.0, 0), (torch.nan, 99))
"""Numbers and codes of eight bits."""


def window_of(spec, given: dict) -> int:
    ring, axis = next(iter(RINGS[spec.name].items()))
    return given[ring].shape[axis]


def attended(spec, given: dict, rubbish: tuple[float, int]) -> torch.Tensor:
    """Attend with rubbish in the slots that are free."""
    given = dict(zip(given, copies(tuple(given.values())), strict=True))
    position, window = int(given["position"]), window_of(spec, given)
    free = [*range(position, window)] or [position % window]
    for name, axis in RINGS[spec.name].items():
        ring = given[name]
        slots = ring.view(torch.int8) if ring.itemsize == 1 else ring
        slots.index_fill_(axis, torch.tensor(free), rubbish[ring.itemsize == 1])
    result = spec.operation(*given.values())
    # parts that no byte reaches have nothing in them
    return result.combine() if isinstance(result, AttentionParts) else as_tuple(result)[0]


@pytest.mark.parametrize("backend", [KERNELS, "native"])
@pytest.mark.parametrize("name", RINGS)
def test_slots_that_were_never_written_may_hold_no_number(name, backend):
    spec = BY_NAME[name]
    if backend == "native" and not (native.available() and spec.native):
        pytest.skip("has no loop in C here")
    cases = [
        dict(zip(spec.arguments, case.inputs, strict=True))
        for case in spec.cases(torch.device("cpu"), 32)
    ]
    cases = [given for given in cases if not given["position"].ndim]  # of a single text
    # new bytes that may be taken back are not written into a full ring
    for is_full in (False,) if name == "attend_ahead" else (False, True):
        some = [x for x in cases if (int(x["position"]) >= window_of(spec, x)) == is_full]
        assert some
        for given in some[:2]:
            with use_backend(backend):
                outputs = [attended(spec, given, rubbish) for rubbish in RUBBISH]
            assert outputs[0].isfinite().all()
            assert torch.equal(*outputs)
