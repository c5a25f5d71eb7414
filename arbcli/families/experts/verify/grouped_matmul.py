"""Verification of `arbcli.families.experts.kernels.grouped_matmul`."""

import torch
from torch import Tensor

from arbcli.families.experts.kernels.grouped_matmul import grouped_grad_w, grouped_matmul
from arbcli.verify.verification import CaseGenerator, Verification, float32_sums


def grouped_matmul_reference(
    x: Tensor, w: Tensor, bounds: Tensor, out: Tensor | None = None, apart: bool = False
) -> Tensor:
    """Compute `grouped_matmul` in float64, from the products of all rows and experts."""
    row = torch.arange(len(x), device=x.device)[:, None]
    y = torch.zeros(len(x), w.shape[1], dtype=torch.float64, device=x.device)
    y = y if out is None else y + out
    for e in range(len(w)):
        y = torch.where((bounds[e] <= row) & (row < bounds[e + 1]), x.double() @ w[e].double().T, y)
    return y


def grouped_grad_w_reference(grad_y: Tensor, x: Tensor, bounds: Tensor) -> Tensor:
    """Compute `grouped_grad_w` in float64."""
    row = torch.arange(len(x), device=x.device)[:, None]
    grad_w = []
    for e in range(len(bounds) - 1):
        owned = (bounds[e] <= row) & (row < bounds[e + 1])
        masked_grad, masked_x = (torch.where(owned, values.double(), 0.0) for values in (grad_y, x))
        grad_w.append(torch.einsum("sn,sk->nk", masked_grad, masked_x))
    return torch.stack(grad_w)


_GATE = float32_sums("of hundreds of products", "no worse than torch's product by 10 %")


def _bounds(rng: CaseGenerator, slots: int) -> Tensor:
    """Draw bounds of experts; in some cases half of the rows have no expert."""
    experts = rng.pick((1, 2, 4, 9))
    spare = slots // 4 if rng.chance(0.3) else 0
    inner = rng.integers(spare, slots - spare, experts - 1, dtype=torch.int64)
    ends = [spare, *sorted(inner.tolist()), slots - spare]
    return rng.view(torch.tensor(ends, dtype=torch.int64, device=rng.device))


def _draw_product(rng: CaseGenerator, group_size: int, m: int, n: int, k: int) -> tuple:
    bounds = _bounds(rng, m)
    w = rng.reals(len(bounds) - 1, n, k)
    if rng.chance(0.3):
        w = w.mT.contiguous().mT
    out = rng.reals(m, n) if rng.chance(0.5) else None
    return _draw_rows(rng, m, k, bounds), w, bounds, out, out is None and rng.chance(0.4)


def _draw_rows(rng: CaseGenerator, m: int, k: int, bounds: Tensor) -> Tensor:
    """Draw rows; a NaN in those that have no expert must not spread to others."""
    x = rng.reals(m, k)
    x[: int(bounds[0])] = x[int(bounds[-1]) :] = torch.nan
    return x


def _draw_grad_w(rng: CaseGenerator, group_size: int, m: int, n: int, k: int) -> tuple:
    bounds = _bounds(rng, m)
    return rng.reals(m, n), _draw_rows(rng, m, k, bounds), bounds


grouped_matmul_verification = Verification(
    grouped_matmul, grouped_matmul_reference, gate=_GATE, shapes=((0, 5, 7),), draw=_draw_product,
    torch_is_peer=True, needs_rows=True,
)  # fmt: skip
grouped_grad_w_verification = Verification(
    grouped_grad_w, grouped_grad_w_reference, gate=_GATE, shapes=((0, 5, 7),), draw=_draw_grad_w,
    torch_is_peer=True, needs_rows=True,
)  # fmt: skip
