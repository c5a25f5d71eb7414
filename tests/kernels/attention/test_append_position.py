"""A position is appended whatever lies in the slots that no position of its block has filled."""

import pytest
import torch

from arbcli.kernels.attention.append_position import APPEND_POSITION
from arbcli.kernels.runtime.backend import use_backend
from arbcli.verify.kernels import copies

BACKENDS = ("torch", "triton" if torch.cuda.is_available() else "interpreter")


@pytest.mark.parametrize("backend", BACKENDS)
def test_slots_that_are_not_filled_may_hold_no_numbers(backend, device):
    for case in APPEND_POSITION.cases(device, 32):
        inputs = [*copies(case.inputs)]
        opened, position = inputs[3], inputs[5]
        texts = position.dim() > 0
        for each, at in zip(opened if texts else opened[None], position.reshape(-1), strict=True):
            each[:, int(at) % each.shape[1] + 1 :] = torch.nan
        with use_backend(backend):
            wanted = APPEND_POSITION.run(backend)(*copies(case.inputs))
            found = APPEND_POSITION.run(backend)(*inputs)
        for got, expected in zip(found[:3], wanted[:3], strict=True):
            assert torch.equal(got, expected)
