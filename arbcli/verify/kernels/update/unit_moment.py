"""Verification of `arbcli.kernels.update.unit_moment`."""

import math
from collections.abc import Iterator

import torch
from torch import Tensor

from arbcli.kernels.update.unit_moment import (
    unit_moment,
)
from arbcli.verify.case_generator import CaseGenerator
from arbcli.verify.timed import MATRIX_SIZES, Timed
from arbcli.verify.verification import Case, Verification


def unit_moment_reference(moment: Tensor, squares: Tensor, out: Tensor) -> Tensor:
    """Compute the reference result of `unit_moment` in `out`, in float64 rounded twice."""
    norm = torch.tensor(math.sqrt(squares.to(torch.float32))).to(out.device, out.dtype)
    if not squares:
        return torch.zeros_like(out)
    return (moment.double() / norm.double()).to(torch.float32).to(out.dtype)


def _cases(device: torch.device, _group_size: int) -> Iterator[Case]:
    generator = torch.Generator().manual_seed(0)

    def case(label: str, moment: Tensor, dtype: torch.dtype = torch.float32) -> Case:
        squares = moment.long().square().sum()
        out = torch.full(moment.shape, torch.nan, dtype=dtype, device=moment.device)
        return Case(label, (moment, squares, out))

    for rows, columns in ((1, 1), (3, 33), (17, 1059)):
        moment = torch.randint(-127, 128, (rows, columns), generator=generator, dtype=torch.int8)
        moment = moment.to(device)
        yield case(f"{rows}x{columns}", moment)
    if device.type == "cuda":  # the interpreter's bf16 arithmetic is wrong
        yield case(f"{rows}x{columns} bf16", moment, torch.bfloat16)
    yield case(f"{rows}x{columns} zero", moment * 0)
    refused = (
        moment,
        torch.zeros((), dtype=torch.int64, device=device),
        case("", moment).inputs[2],
    )
    yield Case(f"{rows}x{columns} refused", refused)
    strided, squares, out = case("", moment[1::3, ::3]).inputs
    out = torch.full((out.shape[1], 2 * out.shape[0]), torch.nan, device=device).T[::2]
    yield Case("6x353 strided", (strided, squares, out))


def _draw(rng: CaseGenerator, group_size: int, m: int, n: int, k: int) -> tuple:
    moment = rng.integers(-127, 127, n, k)
    return moment, moment.long().square().sum() * (not rng.chance(0.1)), rng.reals(n, k)


unit_moment_verification = Verification(
    unit_moment, unit_moment_reference, _cases, compared=("out",), draw=_draw, needs_rows=False,
    timed=[Timed("11264x2048 bf16", **MATRIX_SIZES, moment=(-112, 112), squares=2**36)],
)  # fmt: skip
