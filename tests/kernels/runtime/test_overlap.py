"""Kernels that begin before the last one has ended: the same results, and only where they may."""

from contextlib import nullcontext

import pytest
import torch

from arbcli.kernels.runtime.backend import compile_for
from arbcli.kernels.runtime.overlap import overlap_options, overlapping


@pytest.mark.skipif(torch.cuda.is_available(), reason="compiles for a GPU that is not there")
def test_only_when_asked_for_and_on_a_gpu_that_can(monkeypatch):
    monkeypatch.setattr("arbcli.kernels.runtime.overlap.INTERPRETED", False)
    x = torch.zeros(1)
    for context, capability, expected in (
        (overlapping, (9, 0), True), (overlapping, (8, 9), False), (nullcontext, (9, 0), False)
    ):  # fmt: skip
        with compile_for(capability), context():
            options = overlap_options(x)
        assert options["OVERLAP"] == options.get("launch_pdl", False) == expected
