"""Kernels that begin before the last one has ended: the same results, and only where they may."""

from contextlib import nullcontext
from functools import partial
from types import SimpleNamespace

import pytest
import torch
from marks import needs_triton

from arbcli.kernels.codec.packed import random_packed
from arbcli.kernels.matmul.digits_matmul import prepack_digits
from arbcli.kernels.matmul.prepacked import prepack
from arbcli.kernels.runtime.backend import compile_for, use_backend
from arbcli.kernels.runtime.overlap import overlap_options, overlapping, wait_for_last


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


@needs_triton
@pytest.mark.parametrize(("early", "order"), [(False, "wait start"), (True, "start wait")])
def test_next_kernel_starts_before_the_wait_of_early_ones_only(early, order, monkeypatch):
    done = []
    told = {"gdc_launch_dependents": "start", "gdc_wait": "wait"}
    cuda = SimpleNamespace(**{name: partial(done.append, word) for name, word in told.items()})
    language = SimpleNamespace(extra=SimpleNamespace(cuda=cuda))
    monkeypatch.setitem(wait_for_last.fn.__globals__, "tl", language)
    wait_for_last.fn(True, early)
    assert " ".join(done) == order
    wait_for_last.fn(False, early)
    assert len(done) == 2


def test_weights_are_written_before_they_may_be_read_without_a_wait(monkeypatch):
    waits, generator = [], torch.Generator().manual_seed(0)
    packed = random_packed(16, 64, 32, generator)
    digits = packed._replace(remainder=torch.zeros(16, 64, dtype=torch.int8), radix=64)
    monkeypatch.setattr(torch.Tensor, "is_cuda", True, raising=False)
    monkeypatch.setattr(torch.cuda, "synchronize", waits.append)
    with use_backend("torch"):
        prepack(packed)
        prepack_digits(digits)
    assert len(waits) == 2
