"""Verification of `arbcli.kernels.matmul.ternary_matmul`."""

from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor

from arbcli.kernels.codec.decode_weight import decode_weight
from arbcli.kernels.codec.packed import Packed
from arbcli.kernels.codec.packing import has_planes
from arbcli.kernels.matmul.ternary_matmul import ternary_matmul, ternary_matmul_grad_x
from arbcli.verify.kernels.codec.decode_digits import decode_digits_reference, decode_large
from arbcli.verify.kernels.codec.packed import SPECIAL_WEIGHTS
from arbcli.verify.verification import Verification, float32_sums, no_rows


def ternary_matmul_reference(
    x: Tensor, packed: Packed, *, decode: Callable = decode_digits_reference
) -> Tensor:
    """Compute the reference result of `ternary_matmul`, in float64."""
    return x.double() @ decode(packed).double().T


def ternary_matmul_grad_x_reference(
    grad_y: Tensor, packed: Packed, *, decode: Callable = decode_digits_reference
) -> Tensor:
    """Compute the reference result of `ternary_matmul_grad_x`, in float64."""
    return grad_y.double() @ decode(packed).double()


GATE = float32_sums("of up to 1311 products", "no worse than torch's product by 10 %")

ternary_matmul_verification = Verification(
    ternary_matmul, ternary_matmul_reference, gate=GATE,
    changed=SPECIAL_WEIGHTS | {"empty": {"x": no_rows}},
    large_reference=partial(ternary_matmul_reference, decode=decode_large), torch_is_peer=True,
    scale_path=has_planes,
    library=lambda x, packed: partial(torch.matmul, x, decode_weight(packed).T),
)  # fmt: skip
ternary_matmul_grad_x_verification = Verification(
    ternary_matmul_grad_x, ternary_matmul_grad_x_reference, gate=GATE,
    changed=SPECIAL_WEIGHTS | {"empty": {"grad_y": no_rows}},
    large_reference=partial(ternary_matmul_grad_x_reference, decode=decode_large),
    torch_is_peer=True, scale_path=has_planes,
    library=lambda grad_y, packed: partial(torch.matmul, grad_y, decode_weight(packed)),
)  # fmt: skip
