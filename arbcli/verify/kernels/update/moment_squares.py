"""Verification of `arbcli.kernels.update.moment_squares`."""

from collections.abc import Iterator

import torch
from torch import Tensor

from arbcli.kernels.update.moment_squares import moment_squares
from arbcli.verify.timed import MATRIX_SIZES, Timed
from arbcli.verify.verification import Case, Verification


def moment_squares_reference(moment: Tensor, squares: Tensor, nibble: bool) -> Tensor:
    """Compute the new sum, in int64."""
    m = moment.to(torch.int64)
    if nibble:
        m = torch.div(m, 16, rounding_mode="floor")
    return squares + (m * m).sum()


def _cases(device: torch.device, _group_size: int) -> Iterator[Case]:
    generator = torch.Generator().manual_seed(0)
    squares = torch.tensor(3, dtype=torch.int64, device=device)
    for nibble in (False, True):
        name = " nibble" * nibble
        for shape in ((1, 1), (17, 521)):
            moment = torch.randint(-128, 128, shape, generator=generator).to(torch.int8).to(device)
            yield Case(f"{shape[0]}x{shape[1]}{name}", (moment, squares, nibble))
        yield Case(f"6x174 strided{name}", (moment[1::3, ::3], squares, nibble))
        yield Case(f"17x521 largest{name}", (torch.full_like(moment, -128), squares, nibble))


moment_squares_verification = Verification(
    moment_squares, moment_squares_reference, _cases, compared=("squares",),
    timed=[Timed("11264x2048", **MATRIX_SIZES, moment=(-112, 112), squares=0, nibble=False)],
    values={"moment": (-128, 127), "squares": (0, 1000), "nibble": (False, True)},
)  # fmt: skip
