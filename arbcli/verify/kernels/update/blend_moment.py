"""Verification of `arbcli.kernels.update.blend_moment`."""

from collections.abc import Iterator

import torch
from torch import Tensor

from arbcli.kernels.update.blend_moment import (
    blend_moment,
    moment_max,
)
from arbcli.verify.case_generator import CaseGenerator
from arbcli.verify.kernels.update.direction import draw_gains, fixed_point_reference
from arbcli.verify.kernels.update.random_bits import random_halves_reference
from arbcli.verify.timed import MATRIX_SIZES, Timed
from arbcli.verify.verification import Case, Verification


def blend_moment_reference(
    moment: Tensor, values: Tensor, row_gain: Tensor | None, column_gain: Tensor | None,
    key: Tensor, ok: Tensor, squares: Tensor, decay: int, gain: Tensor, shift: Tensor,
    nibble: bool,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """Compute the reference result of `blend_moment` in `moment` and in `squares`, in int64."""
    if not ok:
        return moment, squares
    state = moment.to(torch.int64)
    old = torch.div(state, 16, rounding_mode="floor") if nibble else state
    u = fixed_point_reference(values, row_gain, column_gain, 2**21)
    added = torch.div(u * gain.to(torch.int64), 2 ** int(shift), rounding_mode="floor")
    blended = old * decay + added
    random = random_halves_reference(int(key), *moment.shape).to(moment.device)
    new = torch.div(blended + random, 2**16, rounding_mode="floor")
    largest = 7 if nibble else 127
    new = new.clamp(-largest, largest)
    total = squares + (new * new).sum()
    return (new * 16 + state % 16 if nibble else new).to(torch.int8), total


def _cases(device: torch.device, _group_size: int) -> Iterator[Case]:
    generator = torch.Generator().manual_seed(0)

    def scalar(value: int, dtype: torch.dtype = torch.int32) -> Tensor:
        return torch.tensor(value, dtype=dtype, device=device)

    for nibble in (False, True):
        name = " nibble" if nibble else ""
        largest = moment_max(nibble)
        for rows, columns in ((1, 1), (3, 33), (2, 521), (17, 259)):
            moment = torch.randint(-largest, largest + 1, (rows, columns), generator=generator)
            if nibble:
                remainder = torch.randint(0, 16, (rows, columns), generator=generator)
                moment = moment * 16 + remainder
            moment = moment.to(torch.int8).to(device)
            values = torch.randn(rows, columns, generator=generator).to(device)
            gains = [torch.rand(n, generator=generator).to(device) * 400 for n in values.shape]
            shape = f"{rows}x{columns}{name}"
            control = (58982, scalar(813), scalar(7), nibble)
            scalars = (scalar(-123456789), scalar(1), scalar(7, torch.int64), *control)
            yield Case(shape, (moment, values, *gains, *scalars))
        yield Case(f"{shape} rows only", (moment, values, gains[0], None, *scalars))
        yield Case(f"{shape} sign", (moment, values, None, None, *scalars))
        huge = values.sign() * 1e30
        yield Case(f"{shape} saturated", (moment, huge, *gains, *scalars))
        halves = torch.randint(-9, 10, values.shape, generator=generator).to(device) / 2
        one = torch.ones(1, device=device).expand(rows)
        yield Case(f"{shape} halfway", (moment, halves, one, None, *scalars))
        yield Case(f"{shape} zero direction", (moment, values * 0, *gains, *scalars))
        yield Case(f"{shape} refused", (moment, values, *gains, scalar(7), scalar(0), *scalars[2:]))
        control = (65536, scalar(597), scalar(9), nibble)
        undecayed = (scalar(7), scalar(1), scalar(0, torch.int64), *control)
        yield Case(f"{shape} no decay", (moment, values, *gains, *undecayed))
    strided = (moment[1::3, ::3], values.T.contiguous().T[1::3, ::3], gains[0][1::3])
    yield Case("6x87 strided", (*strided, gains[1][:87].contiguous(), *scalars))


def _draw(rng: CaseGenerator, group_size: int, m: int, n: int, k: int) -> tuple:
    nibble = rng.below(2) == 1
    largest = moment_max(nibble)
    moment = rng.integers(-largest, largest, n, k)
    if nibble:
        moment = rng.view(moment * 16 + rng.integers(0, 15, n, k))
    gains = draw_gains(rng, n, k, rng.pick((2.0**14, 2.0**16, 2.0**22)))
    squares = torch.tensor(rng.below(1000), device=rng.device)
    return (
        moment, rng.reals(n, k), *gains, rng.key(), rng.scalar(not rng.chance(0.1)), squares,
        rng.pick((0, 58982, 65536)), rng.scalar(rng.below(1024)),
        rng.scalar(4 + rng.below(12)), nibble,
    )  # fmt: skip


blend_moment_verification = Verification(
    blend_moment, blend_moment_reference, _cases, compared=("moment", "squares"), draw=_draw,
    needs_rows=False,
    timed=[
        Timed(f"11264x2048 bf16{' nibble' * nibble}", **MATRIX_SIZES, moment=(-112, 112),
              row_gain=2.0**8, column_gain=2.0**8, squares=0, decay=58982, gain=813, shift=7,
              nibble=nibble)
        for nibble in (False, True)
    ],
    values={"ok": CaseGenerator.ok},
)  # fmt: skip
