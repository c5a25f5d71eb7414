"""Verification of `arbcli.kernels.norm.norm_e4m3`."""

from collections.abc import Iterator
from functools import partial

import torch
from torch import Tensor

from arbcli.kernels.matmul.quantise_rows import quantise_rows
from arbcli.kernels.norm.norm_e4m3 import (
    add_rms_norm_e4m3,
    compose,
    gated_rms_norm_e4m3,
    rms_norm_e4m3,
)
from arbcli.verify.kernels.matmul.quantise_rows import quantise_rows_reference
from arbcli.verify.kernels.norm.gated_rms_norm import (
    GATED_VALUES,
    gated_rms_norm_reference,
    gated_rms_norm_verification,
)
from arbcli.verify.kernels.norm.rms_norm import (
    NORM_VALUES,
    add_rms_norm_reference,
    add_rms_norm_verification,
    rms_norm_reference,
    rms_norm_verification,
)
from arbcli.verify.verification import Gate, MakeTimings, Timing, Verification


def _timings_of(spec: Verification) -> MakeTimings:
    """Use the timings of a norm, with the separate norm and quantisation as the peer."""

    def timings(device: torch.device, group_size: int) -> Iterator[Timing]:
        for timing in spec.draw_timings(device, group_size):
            peer = partial(compose(spec.triton, quantise_rows), *timing.inputs)
            yield Timing(timing.label, timing.inputs, peer=peer, peer_name="apart")

    return timings


def _as_product(_inputs: tuple, results: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
    """Return q * scale, which a different rounding of a tie changes little."""
    *before, q, scale = results
    return *before, q.float() * scale


def _rounded_reference(y: Tensor) -> tuple[Tensor, ...]:
    return _as_product((), quantise_rows_reference(y))


_GATE = Gate(relative=3e-3, reason="where a sum's last bit decides, rounding differs")

rms_norm_e4m3_verification = Verification(
    rms_norm_e4m3, compose(rms_norm_reference, _rounded_reference),
    gate=_GATE, compared=_as_product,
    timings=_timings_of(rms_norm_verification), values=NORM_VALUES,
)  # fmt: skip
add_rms_norm_e4m3_verification = Verification(
    add_rms_norm_e4m3, compose(add_rms_norm_reference, _rounded_reference),
    gate=_GATE, compared=_as_product,
    timings=_timings_of(add_rms_norm_verification), values=NORM_VALUES,
)  # fmt: skip
gated_rms_norm_e4m3_verification = Verification(
    gated_rms_norm_e4m3, compose(gated_rms_norm_reference, _rounded_reference),
    gate=_GATE, compared=_as_product, sizes={"W": "2 * k"},
    timings=_timings_of(gated_rms_norm_verification),
    values=GATED_VALUES,
)  # fmt: skip
