"""Verification of `arbcli.kernels.norm.norm_e4m3`."""

from torch import Tensor

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
)
from arbcli.verify.kernels.norm.rms_norm import (
    NORM_VALUES,
    add_rms_norm_reference,
    rms_norm_reference,
)
from arbcli.verify.verification import Gate, Verification


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
    values=NORM_VALUES,
)  # fmt: skip
add_rms_norm_e4m3_verification = Verification(
    add_rms_norm_e4m3, compose(add_rms_norm_reference, _rounded_reference),
    gate=_GATE, compared=_as_product,
    values=NORM_VALUES,
)  # fmt: skip
gated_rms_norm_e4m3_verification = Verification(
    gated_rms_norm_e4m3, compose(gated_rms_norm_reference, _rounded_reference),
    gate=_GATE, compared=_as_product, sizes={"W": "2 * k"},
    values=GATED_VALUES,
)  # fmt: skip
