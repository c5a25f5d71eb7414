"""Verification of `arbcli.families.experts.kernels.grouped_matmul`."""

from collections.abc import Iterator
from functools import partial

import torch
from torch import Tensor

from arbcli.families.experts.kernels.grouped_matmul import (
    grouped_grad_w,
    grouped_matmul,
)
from arbcli.kernels.runtime.arguments import dtype_name, real_dtypes
from arbcli.verify.case_generator import CaseGenerator
from arbcli.verify.verification import Case, Gate, Timing, Verification


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


SHAPES = (
    (1, 1, 1, (0, 1)),
    (9, 33, 40, (0, 9)),
    (40, 33, 45, (0, 17, 17, 40)),
    (150, 70, 33, (0, 0, 99, 131, 150)),
    (299, 65, 136, (0, 298, 299)),
    (70, 129, 64, (13, 13, 40, 57)),
    (50, 24, 16, (0, 0, 50, 50)),
    (64, 40, 72, (0, 32, 64)),
    (20, 16, 24, (7,) * 6),
    (90, 8, 300, (*range(0, 50, 7), 50, *(50,) * 30, 90)),
)
"""(S, N, K, bounds): experts without rows, one with all, rows of none; short, full blocks."""


def _draw(device: torch.device) -> Iterator[tuple[str, Tensor, Tensor, Tensor, Tensor]]:
    """Draw (label, x, w, bounds, grad_y)."""
    generator = torch.Generator().manual_seed(0)
    for slots, n, k, ends in (*SHAPES, (0, 5, 7, (0, 0, 0))):
        bounds, experts = torch.tensor(ends, device=device), len(ends) - 1
        shapes = ((slots, k), (experts, n, k), (slots, n))
        drawn = [torch.randn(shape, generator=generator).to(device) for shape in shapes]
        label = f"{slots}x{n}x{k} of {experts}" + " in part" * (ends[-1] - ends[0] < slots)
        for dtype in real_dtypes(device):
            x, w, grad_y = (values.to(dtype) for values in drawn)
            yield f"{label} {dtype_name(dtype)}", x, w, bounds, grad_y


def _matmul_cases(device: torch.device, _group_size: int) -> Iterator[Case]:
    def case(label: str, x: Tensor, w: Tensor, bounds: Tensor, out: Tensor | None = None) -> Case:
        return Case(label, (x, w, bounds, out))

    for label, x, w, bounds, grad_y in _draw(device):
        yield case(label, x, w, bounds)
        yield case(label + " transposed", grad_y, w.mT, bounds)
        if len(x) in (40, 150):
            yield Case(label + " apart", (x, w, bounds, None, True))
        if "in part" in label:
            yield case(label + " into", x, w, bounds, grad_y)
            # a NaN in one row or expert must not spread to another
            infected = x.clone()
            infected[: int(bounds[0])] = infected[int(bounds[-1]) :] = torch.nan
            yield case(label + " NaN elsewhere", infected, w, bounds)
        elif len(x) in (40, 150):
            wide, out = (torch.stack([v, v], dim=-1).flatten(-2) for v in (x, grad_y))
            inputs = (wide[:, ::2], w.flip(1)[:, ::2], bounds[:, None].expand(-1, 2)[:, 0])
            yield case(label + " strided", *inputs, out[:, ::4])


def _grad_w_cases(device: torch.device, _group_size: int) -> Iterator[Case]:
    def case(label: str, grad_y: Tensor, x: Tensor, bounds: Tensor) -> Case:
        return Case(label, (grad_y, x, bounds))

    for label, x, _, bounds, grad_y in _draw(device):
        yield case(label, grad_y, x, bounds)
        if "in part" in label:
            infected = x.clone()
            infected[: int(bounds[0])] = infected[int(bounds[-1]) :] = torch.nan
            yield case(label + " NaN elsewhere", grad_y, infected, bounds)
        elif len(x) in (40, 150):
            x = x.T.contiguous().T
            bounds = bounds[:, None].expand(-1, 2)[:, 0]
            yield case(label + " strided", grad_y[:, ::2], x, bounds)


TIMED = ((16384, 40, 5120, 1280), (128, 64, 5120, 1280))
"""(S, E, N, K): a batch of training, and one token at a time with eight experts for each of 16."""


def _sorted_slots(slots: int, experts: int, device: torch.device) -> Tensor:
    """Draw bounds of a router with uniform probabilities."""
    owners = torch.randint(experts, (slots,), device=device).sort().values
    return torch.searchsorted(owners, torch.arange(experts + 1, device=device))


def _timed(device: torch.device) -> Iterator[tuple[str, int, Tensor, Tensor, Tensor, Tensor]]:
    draw = partial(torch.randn, device=device, dtype=torch.bfloat16)
    for slots, experts, n, k in TIMED:
        bounds = _sorted_slots(slots, experts, device)
        label, flops = f"{slots}x{n}x{k} of {experts}", 2 * slots * n * k
        yield label, flops, draw(slots, k), draw(experts, n, k), bounds, draw(slots, n)


def _matmul_timings(device: torch.device, _group_size: int) -> Iterator[Timing]:
    """Time it against a batched cuBLAS product with equal, rounded up, rows per expert.

    Its sizes are known from shapes; with ragged rows cuBLAS would have to wait for the device.
    """
    for label, flops, x, w, bounds, grad_y in _timed(device):
        for kind, source, matrices in (("", x, w), (" grad_x", grad_y, w.mT)):
            equal = source.new_ones(len(w), -(-len(x) // len(w)), source.shape[1])
            yield Timing(
                label + kind,
                (source, matrices, bounds, None),
                peer=partial(torch.bmm, equal.normal_(), matrices.mT),
                peer_name="cuBLAS, equal rows",
                flops=flops,
            )


def _grad_w_timings(device: torch.device, _group_size: int) -> Iterator[Timing]:
    for label, flops, x, w, bounds, grad_y in _timed(device):
        rows = -(-len(x) // len(w))
        left, right = (v.new_ones(len(w), rows, v.shape[1]).normal_() for v in (grad_y, x))
        yield Timing(
            label,
            (grad_y, x, bounds),
            peer=partial(torch.bmm, left.mT, right),
            peer_name="cuBLAS, equal rows",
            flops=flops,
        )


_GATE = Gate(
    relative=1e-5, peer_slack=0.1,
    reason="float32 sums of hundreds of products; in bf16 no worse than torch's product by 10 %",
)  # fmt: skip


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
    return rng.reals(m, k), w, bounds, rng.reals(m, n) if rng.chance(0.5) else None


def _draw_grad_w(rng: CaseGenerator, group_size: int, m: int, n: int, k: int) -> tuple:
    return rng.reals(m, n), rng.reals(m, k), _bounds(rng, m)


grouped_matmul_verification = Verification(
    grouped_matmul, grouped_matmul_reference, _matmul_cases, _GATE, draw=_draw_product,
    torch_is_peer=True, needs_rows=True, timings=_matmul_timings,
    long=("299x65x136*transposed", "90x8x300*"),
)  # fmt: skip
grouped_grad_w_verification = Verification(
    grouped_grad_w, grouped_grad_w_reference, _grad_w_cases, _GATE, draw=_draw_grad_w,
    torch_is_peer=True, needs_rows=True, timings=_grad_w_timings,
    long=("90x8x300*",),
)  # fmt: skip
