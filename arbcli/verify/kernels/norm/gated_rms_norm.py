"""Verification of `arbcli.kernels.norm.gated_rms_norm`."""

from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from arbcli.kernels.norm.gated_rms_norm import (
    gated_rms_norm,
    gated_rms_norm_backward,
    packed_gates_backward,
)
from arbcli.kernels.norm.pack_gates import pack_gates_torch, unpack_gates
from arbcli.verify.kernels.norm import rms_norm
from arbcli.verify.kernels.norm.pack_gates import unpack_gates_reference
from arbcli.verify.verification import CaseGenerator, Verification, float32_sums, same_inputs


def gated_rms_norm_reference(gate_up: Tensor, eps: float | None) -> Tensor:
    """Compute the reference result of `gated_rms_norm`, in float64."""
    gate, up = gate_up.to(torch.float64).chunk(2, dim=-1)
    product = gate / (1 + torch.exp(-gate)) * up
    return product if eps is None else rms_norm.rms_norm_reference(product, None, eps)


def gated_rms_norm_backward_reference(
    grad_y: Tensor, gate_up: Tensor, eps: float | None,
    _overwrite: bool = False,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """Compute the reference result of `gated_rms_norm_backward`: autograd through the reference."""
    return rms_norm.gradient_and_output(
        gated_rms_norm_reference, grad_y.double(), gate_up.double(), eps
    )


def packed_gates_backward_reference(
    grad_y: Tensor, codes: Tensor, bases: Tensor, eps: float | None,
    _overwrite: bool = False,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """Compute the reference result of `packed_gates_backward`, in float64."""
    return gated_rms_norm_backward_reference(grad_y, unpack_gates_reference(codes, bases), eps)


def gated_rms_norm_in_its_dtype(gate_up: Tensor, eps: float | None) -> Tensor:
    """Compute with torch operations, each rounded, as the peer for bf16."""
    gate, up = gate_up.chunk(2, dim=-1)
    product = functional.silu(gate) * up
    return product if eps is None else rms_norm.rms_norm_in_its_dtype(product, None, eps)


def _draw_packed(rng: CaseGenerator, group_size: int, m: int, _n: int, k: int) -> tuple:
    """Draw a case of `packed_gates_backward`; of random codes few numbers would decide all sums."""
    grad_y, gate_up = rng.reals(m, k), 3 * rng.reals(m, 2 * k)
    eps = rng.pick((1e-6 if k > 4 else 0.1, None))
    return grad_y, *pack_gates_torch(gate_up), eps, rng.chance(0.5)


def _packed_backward_in_its_dtype(
    grad_y: Tensor, codes: Tensor, bases: Tensor, *others: Any
) -> tuple[Tensor, Tensor]:
    return backward_in_its_dtype(grad_y, unpack_gates(codes, bases).to(grad_y.dtype), *others)


def backward_in_its_dtype(*inputs: Any) -> tuple[Tensor, Tensor]:
    """Compute with torch operations, in the dtype of `gate_up`, out of place."""
    return rms_norm.gradient_and_output(gated_rms_norm_in_its_dtype, *inputs[:3])


_GATE = float32_sums("of up to 8192 squares", "one rounding, where torch has several")
GATED_SIZES = rms_norm.ROW_SIZES | {"W": "2 * k"}


_CHANGED: dict[str, dict[str, Any]] = {
    "saturated": {"gate_up": lambda x: 40 * x},
    "wide": {
        "gate_up": lambda x: torch.cat((rms_norm.widened(x), rms_norm.widened(x.flip(0))), dim=1)
    },
}
GATED_VALUES = {"eps": (*rms_norm.EPS_VALUES, *rms_norm.EPS_VALUES, None)}
gated_rms_norm_verification = Verification(
    gated_rms_norm, gated_rms_norm_reference, gate=_GATE, sizes=GATED_SIZES,
    shapes=rms_norm.ROW_SHAPES, changed=_CHANGED,
    peer=gated_rms_norm_in_its_dtype, library=same_inputs(gated_rms_norm_in_its_dtype),
    values=GATED_VALUES,
)  # fmt: skip
gated_rms_norm_backward_verification = Verification(
    gated_rms_norm_backward, gated_rms_norm_backward_reference, gate=_GATE,
    sizes=GATED_SIZES, shapes=rms_norm.ROW_SHAPES,
    changed=_CHANGED | {"wide": {"grad_y": rms_norm.widened, **_CHANGED["wide"]}},
    peer=backward_in_its_dtype,
    values=GATED_VALUES | {"overwrite": (False, True)},
)  # fmt: skip
packed_gates_backward_verification = Verification(
    packed_gates_backward, packed_gates_backward_reference, gate=_GATE, shapes=((0, 1, 40),),
    draw=_draw_packed, peer=_packed_backward_in_its_dtype, needs_rows=True,
)  # fmt: skip
