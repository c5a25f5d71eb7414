"""Verification of `arbcli.kernels.rows.dropout`."""

from collections.abc import Iterator

import torch
from torch import Tensor
from torch.nn import functional

from arbcli.kernels.rows.dropout import dropout
from arbcli.kernels.runtime.arguments import normals
from arbcli.verify.case_generator import CaseGenerator
from arbcli.verify.kernels.update.random_bits import random_bits_reference
from arbcli.verify.timed import Timed
from arbcli.verify.verification import Case, Verification


def dropout_reference(x: Tensor, key: Tensor, rate: float) -> Tensor:
    """Compute the reference result of `dropout`, rounded once to float32, then to its dtype."""
    words = random_bits_reference(int(key), *x.shape).to(x.device)
    factor = float(torch.tensor(1 / (1 - rate), dtype=torch.float32))
    scaled = (x.double() * factor).float().to(x.dtype)
    return torch.where(words >= round(rate * 2**32), scaled, torch.zeros_like(scaled))


def _cases(device: torch.device, _group_size: int) -> Iterator[Case]:
    draw = normals(torch.Generator().manual_seed(0), device)

    def key(value: int) -> Tensor:
        return torch.tensor(value, dtype=torch.int32, device=device)

    for rows, columns in ((1, 1), (3, 33), (17, 129), (2, 1311)):
        for rate in (0.0, 0.2, 0.75):
            yield Case(f"{rows}x{columns} rate {rate}", (draw(rows, columns), key(-77), rate))
    yield Case("17x129 rate 0.999999", (draw(17, 129), key(5), 0.999999))
    unbounded = draw(5, 40).masked_fill(draw(5, 40) > 1, torch.inf)
    yield Case("5x40 infinite", (unbounded, key(2**31 - 1), 0.5))
    yield Case("7x165 strided", (draw(330, 14).T[::2, 1::2], key(-(2**31)), 0.5))
    yield Case("0x7 empty", (draw(0, 7), key(1), 0.5))
    if device.type == "cuda":  # the interpreter's bf16 arithmetic is wrong
        yield Case("300x776 bf16", (draw(300, 776).bfloat16(), key(9), 0.1))


def _draw(rng: CaseGenerator, group_size: int, m: int, n: int, k: int) -> tuple:
    return rng.reals(m, k), rng.key(), rng.pick((0.0, 0.1, 0.2, 0.5, 0.9))


dropout_verification = Verification(
    dropout, dropout_reference, _cases, draw=_draw, needs_rows=True,
    timed=[
        Timed("16384x2048 bf16", lambda x, key, rate: functional.dropout(x, rate),
              M=16384, D=2048, key=5, rate=0.2)
    ],
)  # fmt: skip
