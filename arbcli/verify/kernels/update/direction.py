"""References and random inputs for `arbcli.kernels.update.direction`."""

import torch
from torch import Tensor

from arbcli.verify.case_generator import CaseGenerator


def fixed_point_reference(
    values: Tensor, row_gain: Tensor | None, column_gain: Tensor | None, limit: int
) -> Tensor:
    """Compute u as int64.

    Args:
        values: (N, K).
        row_gain: (N,) float32; None takes the sign of the values.
        column_gain: (K,) float32; None is ones.
        limit: largest magnitude of u before it is rounded.
    """
    if row_gain is None:
        return torch.sign(values).to(torch.int64) * 2**16
    u = values.to(torch.float32) * row_gain[:, None]
    if column_gain is not None:
        u = u * column_gain[None, :]
    return torch.round(u.clamp(-limit, limit)).to(torch.int64)


def draw_gains(rng: CaseGenerator, n: int, k: int, size: float) -> tuple:
    """Draw gains of rows and of columns, of the rows only, or none."""
    rows, columns = (rng.reals(length, dtype=torch.float32).exp() for length in (n, k))
    both = rows * size, columns
    return both if rng.plain else rng.pick((both, (rows * size, None), (None, None)))
