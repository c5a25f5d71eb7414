"""Verification of `arbcli.kernels.update.moment_squares`."""

import torch
from torch import Tensor

from arbcli.kernels.update.moment_squares import moment_squares
from arbcli.verify.verification import Verification, filled


def moment_squares_reference(moment: Tensor, squares: Tensor, nibble: bool) -> Tensor:
    """Compute the new sum, in int64."""
    m = moment.to(torch.int64)
    if nibble:
        m = torch.div(m, 16, rounding_mode="floor")
    return squares + (m * m).sum()


moment_squares_verification = Verification(
    moment_squares, moment_squares_reference, compared=("squares",),
    changed={"largest": {"moment": filled(-128)}},
    values={"moment": (-128, 127), "squares": (0, 1000), "nibble": (False, True)},
)  # fmt: skip
