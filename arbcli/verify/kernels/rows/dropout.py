"""Verification of `arbcli.kernels.rows.dropout`."""

from functools import partial

import torch
from torch import Tensor
from torch.nn import functional

from arbcli.kernels.rows.dropout import dropout
from arbcli.verify.kernels.update.random_bits import random_bits_reference
from arbcli.verify.verification import CaseGenerator, Verification, filled, with_one


def dropout_reference(x: Tensor, key: Tensor, rate: float) -> Tensor:
    """Compute the reference result of `dropout`, rounded once to float32, then to its dtype."""
    words = random_bits_reference(int(key), *x.shape).to(x.device)
    factor = float(torch.tensor(1 / (1 - rate), dtype=torch.float32))
    scaled = (x.double() * factor).float().to(x.dtype)
    return torch.where(words >= round(rate * 2**32), scaled, torch.zeros_like(scaled))


def _draw(rng: CaseGenerator, group_size: int, m: int, n: int, k: int) -> tuple:
    return rng.reals(m, k), rng.key(), rng.pick((0.0, 0.1, 0.2, 0.5, 0.9))


dropout_verification = Verification(
    dropout, dropout_reference,
    shapes=((0, 1, 7),),
    changed={
        "infinite": {"x": with_one(torch.inf)}, "almost all": {"rate": 0.999999},
        "last key": {"key": filled(2**31 - 1)}, "first key": {"key": filled(-(2**31))},
    },
    draw=_draw, needs_rows=True, library=lambda x, _key, rate: partial(functional.dropout, x, rate),
)  # fmt: skip
