"""Verification of `arbcli.families.streams.kernels.stream_weights`."""

from functools import partial
from typing import Any

import torch
from torch import Tensor

from arbcli.families.streams.kernels.stream_weights import (
    ROUNDS,
    STREAMS,
    count_streams,
    stream_weights,
    stream_weights_backward,
)
from arbcli.verify.verification import Gate, Verification, gradients_of


def stream_weights_reference(
    raw: Tensor, bias: Tensor, rounds: int
) -> tuple[Tensor, Tensor, Tensor]:
    """Compute the reference result of `stream_weights`, one position at a time, in float64."""
    n = count_streams(raw.shape[1])
    if not len(raw):
        none = raw.new_zeros(0, n, dtype=torch.float64)
        return none, none.new_zeros(0, n, n), none.clone()
    return torch.vmap(partial(_stream_weights, n=n, rounds=rounds))(raw.double() + bias.double())


def _stream_weights(z: Tensor, n: int, rounds: int) -> tuple[Tensor, Tensor, Tensor]:
    a, c = 1 / (1 + torch.exp(-z[:n])), 2 / (1 + torch.exp(2 - z[n : 2 * n]))
    p = torch.exp(z[2 * n :].view(n, n).clamp(-16, 16))
    for _ in range(rounds):
        p = torch.stack([row / row.sum() for row in p])
        p = torch.stack([column / column.sum() for column in p.T]).T
    p = torch.stack([row / row.sum().clamp(min=1) for row in p])
    row_lacks, column_lacks = ((1 - p.sum(dim)).clamp(min=0) for dim in (1, 0))
    return a, p + torch.outer(row_lacks, column_lacks) / (row_lacks.sum() + 2**-21), c


_GATE = Gate(
    relative=1e-4,
    reason="where sums are 1 but for a rounding, float32 cannot tell which rows are above",
)

_CHANGED: dict[str, dict[str, Any]] = {
    "far from even": {"raw": lambda x: 6 * x, "rounds": 3},
    "beyond the limit": {"raw": lambda x: 30 * x, "rounds": 4},
    "many rounds": {"rounds": ROUNDS},
}
stream_weights_verification = Verification(
    stream_weights, stream_weights_reference, gate=_GATE, shapes=((0, 1, 1),), changed=_CHANGED,
    sizes={"S": STREAMS, "W": "S * (S + 2)"},
    values={"rounds": (1, 3, 7)},
)  # fmt: skip
stream_weights_backward_verification = Verification(
    stream_weights_backward, gradients_of(stream_weights_reference, (0,), 3),
    gate=_GATE, shapes=((0, 1, 1),), changed=_CHANGED, sizes={"S": STREAMS},
    values={"rounds": (1, 3, 7)},
)  # fmt: skip
