"""One kernel gives the bits of two: the norm, then the rounding."""

import pytest
import torch
from marks import mostly_slow

from arbcli.kernels.codec.packed import random_packed
from arbcli.kernels.matmul.quantise_rows import quantise_rows
from arbcli.kernels.norm.gated_rms_norm import gated_rms_norm
from arbcli.kernels.norm.norm_e4m3 import (
    add_rms_norm_e4m3,
    gated_rms_norm_e4m3,
    rms_norm_e4m3,
)
from arbcli.kernels.norm.rms_norm import WHOLE_ROW, add_rms_norm, rms_norm
from arbcli.verify.compare import as_tuple
from arbcli.verify.kernels import use_backend

KERNELS = "triton" if torch.cuda.is_available() else "interpreter"


@pytest.mark.parametrize("backend", [KERNELS, "torch"])
@pytest.mark.parametrize(
    ("rows", "width"),
    mostly_slow(
        [(5, 33), (9, 160), (70, 256), (1, WHOLE_ROW + 1)], lambda rows, width: width <= WHOLE_ROW
    ),
)
def test_bits_are_those_of_norm_and_rounding(rows, width, backend, device):
    generator = torch.Generator().manual_seed(0)
    weight = random_packed(1, width, 32, generator, spread=2).to(device)
    x = torch.randn(rows, 2 * width, generator=generator).to(device)
    kind = "torch" if backend == "torch" else "triton"
    for run, spec, *sources in (
        (rms_norm_e4m3, rms_norm, x[:, :width]),
        (add_rms_norm_e4m3, add_rms_norm, x[:, :width], x[:, width:]),
        (gated_rms_norm_e4m3, gated_rms_norm, x),
    ):
        with use_backend(backend):
            *total, q, scale = run(*sources, weight, 1e-6)
            *expected, y = as_tuple(getattr(spec, kind)(*sources, weight, 1e-6))
            expected += getattr(quantise_rows, kind)(y)
        for part, other in zip((*total, q.float(), scale), expected, strict=True):
            assert torch.equal(part, other)
