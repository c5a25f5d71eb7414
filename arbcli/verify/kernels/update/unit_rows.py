"""Verification of `arbcli.kernels.update.unit_rows`."""

from collections.abc import Iterator

import torch
from torch import Tensor

from arbcli.kernels.runtime.arguments import normals
from arbcli.kernels.update.unit_rows import (
    unit_rows,
)
from arbcli.verify.case_generator import CaseGenerator
from arbcli.verify.timed import MATRIX
from arbcli.verify.verification import Case, Gate, Timing, Verification


def unit_rows_reference(values: Tensor, ok: Tensor) -> tuple[Tensor, Tensor]:
    """Compute the result of `unit_rows` and its `ok`, in float64."""
    gain = torch.zeros(len(values), dtype=torch.float64, device=values.device)
    for n, row in enumerate(values.double()):
        mean_square = float((row * row).mean())
        if not mean_square < float("inf"):
            ok = ok * 0
        elif mean_square > 0:
            gain[n] = 2**16 / mean_square**0.5
    rows = int((gain > 0).sum())
    return gain * (len(gain) / max(rows, 1)) ** 0.5, ok


def _cases(device: torch.device, _group_size: int) -> Iterator[Case]:
    generator = torch.Generator().manual_seed(0)

    def case(label: str, values: Tensor) -> Case:
        return Case(label, (values, torch.ones((), dtype=torch.int32, device=device)))

    normal = normals(generator, device)
    for rows, columns in ((1, 1), (3, 33), (17, 1059)):
        yield case(f"{rows}x{columns}", normal(rows, columns) * 1e-9)
    yield case("259x67 transposed", normal(67, 259).T)
    yield case("17x129 strided", normal(17, 259)[:, 1::2])
    yield case("2311x3", normal(2311, 3))
    zero = normal(2311, 3)
    zero[::3] = 0
    yield case("2311x3 rows of zeros", zero)
    yield case("9x40 zero", normal(9, 40) * 0)
    for value in (torch.inf, torch.nan):
        bad = normal(9, 40)
        bad[7, 5] = value
        yield case(f"9x40 {value}", bad)
    if device.type == "cuda":  # the interpreter's bf16 is wrong, and slow
        yield case("2049x2080 bf16", normal(2049, 2080).bfloat16())


def _timings(device: torch.device, _group_size: int) -> Iterator[Timing]:
    values = torch.randn(MATRIX, dtype=torch.bfloat16, device=device)
    ok = torch.ones((), dtype=torch.int32, device=device)
    yield Timing("11264x2048 bf16", (values, ok))
    yield Timing("2048x11264 bf16 transposed", (values.T, ok))


def _draw_values(rng: CaseGenerator, rows: int, columns: int) -> Tensor:
    values = rng.reals(rows, columns)
    if rng.chance(0.3):
        values[:: 1 + rng.below(3)] = 0
    return values


unit_rows_verification = Verification(
    unit_rows, unit_rows_reference, _cases,
    Gate(relative=1e-5, reason="float32 sums of thousands of squares"), compared=("ok",),
    timings=_timings, values={"values": _draw_values, "ok": lambda rng: rng.scalar(1)},
    long=("2311x3",),
)  # fmt: skip
