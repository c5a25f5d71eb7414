"""Weighted sums of rows of a packed table and their gradients: every slot counts, and once."""

import pytest
import torch
from torch.nn.functional import embedding_bag

from arbcli.kernels.codec.decode_digits import decode_digits_reference
from arbcli.kernels.codec.packed import Packed, random_packed
from arbcli.kernels.codec.packing import pack_trits_reference
from arbcli.kernels.rows.weighted_rows import (
    WEIGHTED_ROWS_GRAD,
    touched_rows,
    weighted_rows,
    weighted_rows_grad,
    weighted_rows_grad_weights,
)
from arbcli.kernels.runtime.backend import use_backend

KERNEL_BACKEND = "triton" if torch.cuda.is_available() else "interpreter"

each_backend = pytest.mark.parametrize("backend", [KERNEL_BACKEND, "torch"])


def small_table(device):
    """Rows [1, 0, -1], [2, 2, 0] and [0, -4, 4] in two groups of two columns."""
    trits = torch.tensor([[1, 0, -1], [1, 1, 0], [0, -1, 1]], dtype=torch.int8)
    exponent = torch.tensor([[0, 0], [1, 5], [2, 2]], dtype=torch.int8)
    return Packed(pack_trits_reference(trits), exponent, None, 3, 2).to(device)


def table(rows, dim, device, group_size=32, spread=4):
    generator = torch.Generator().manual_seed(0)
    return random_packed(rows, dim, group_size, generator, spread=spread).to(device)


def decoded(packed):
    return decode_digits_reference(packed).double()


def drawn(*shape, device, seed=0):
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(shape, generator=generator).to(device)


@each_backend
def test_weighted_rows_by_hand(backend, device):
    ids = torch.tensor([[0, 1], [2, 2], [-1, 0], [3, -1]], device=device)
    nan = torch.nan
    weights = torch.tensor([[3.0, 0.5], [1.0, -0.25], [nan, 2.0], [nan, 1.0]], device=device)
    with use_backend(backend):
        y = weighted_rows(ids, weights, small_table(device), dtype=torch.float32)
    wanted = [[4.0, 1.0, -3.0], [0.0, -3.0, 3.0], [2.0, 0.0, -2.0], [0.0, 0.0, 0.0]]
    assert torch.equal(y, torch.tensor(wanted, device=device))


@each_backend
def test_gradient_of_the_rows_by_hand(backend, device):
    touched = touched_rows(torch.tensor([7, 2, -1, 7], device=device), 9)
    grad_y = torch.tensor([[1.0, 2.0], [10.0, 20.0]], device=device)
    weights = torch.tensor([3.0, 5.0, torch.nan, -1.0], device=device)
    tokens = torch.tensor([0, 0, 1, 1], device=device)
    with use_backend(backend):
        grad = weighted_rows_grad(grad_y, weights, tokens, touched)
    wanted = [[5.0, 10.0], [-7.0, -14.0], [0.0, 0.0], [0.0, 0.0]]
    assert torch.equal(grad, torch.tensor(wanted, device=device))


@each_backend
def test_rows_are_added_in_the_order_of_the_slots(backend, device):
    # 2**24 + 1 is not a float32, so the order shows
    ids = torch.zeros(1, 4, dtype=torch.int64, device=device)
    weights = torch.tensor([[2.0**24, 1.0, -(2.0**24), 1.0]], device=device)
    with use_backend(backend):
        y = weighted_rows(ids, weights, small_table(device), dtype=torch.float32)
    assert y.tolist() == [[1.0, 0.0, -1.0]]


@pytest.mark.parametrize(
    ("ids", "num_rows", "rows"),
    [
        ([], 5, []),
        ([-1, -1], 5, [5, 5]),
        ([0, 1], 0, []),
        ([3, 3, 3], 5, [3, 5, 5]),
        ([1, 0, 1, 0, 1], 2, [0, 1]),
        ([(1 << 40) + 1, 1, 1 << 40], 1 << 41, [1, 1 << 40, (1 << 40) + 1]),
    ],
)
def test_touched_rows_of_awkward_ids(ids, num_rows, rows, device):
    touched = touched_rows(torch.tensor(ids, dtype=torch.int64, device=device), num_rows)
    assert touched.rows.tolist() == rows
    assert int(touched.count) == sum(row < num_rows for row in rows)
    assert len(touched.order) == len(ids)
    for r, row in enumerate(rows):
        slots = touched.order[touched.bounds[r] : touched.bounds[r + 1]].tolist()
        assert slots == [s for s, v in enumerate(ids) if v == row and v < num_rows]


@pytest.mark.parametrize("seed", range(4))
@each_backend
def test_gradients_equal_those_of_autograd(backend, seed, device):
    generator = torch.Generator().manual_seed(seed)
    num_rows, dim, tokens, slots = (31, 40, 9, 7) if seed % 2 else (6, 33, 20, 5)
    packed = table(num_rows, dim, device, 8)
    ids = torch.randint(-1, num_rows, (tokens, slots), generator=generator).to(device)
    inside = ids >= 0
    dense = decoded(packed).requires_grad_()
    weights = drawn(tokens, slots, device=device, seed=seed)
    w = (weights.double() * inside).requires_grad_()
    grad_y = drawn(tokens, dim, device=device, seed=seed + 100)
    y = embedding_bag(ids.clamp(min=0), dense, mode="sum", per_sample_weights=w)
    y.backward(grad_y.double())
    with use_backend(backend):
        found = weighted_rows(ids, weights, packed, dtype=torch.float32)
        of_weights = weighted_rows_grad_weights(grad_y, ids, packed)
        touched = touched_rows(ids.flatten(), num_rows)
        of_slot = torch.arange(ids.numel(), device=device) // slots
        of_rows = weighted_rows_grad(grad_y, weights.flatten(), of_slot, touched)
    count = int(touched.count)
    grad = torch.zeros_like(dense).index_copy_(0, touched.rows[:count], of_rows[:count].double())
    for got, wanted in (
        (found, y.detach()),
        (of_weights, w.grad * inside),
        (grad, dense.grad),
        (of_rows[count:], torch.zeros_like(dense)[: len(of_rows) - count]),
    ):
        torch.testing.assert_close(got.double(), wanted, rtol=1e-5, atol=1e-5)


def test_nothing_is_as_large_as_the_table_or_its_slots(monkeypatch, device):
    made = []
    for name in ("empty", "zeros"):
        make = getattr(torch, name)

        def recorded(*args, make=make, **kwargs):
            made.append(make(*args, **kwargs))
            return made[-1]

        monkeypatch.setattr(torch, name, recorded)
    inputs = next(c.inputs for c in weighted_rows.cases(device, 32) if "duplicates" in c.label)
    made.clear()
    weighted_rows.triton(*inputs)
    assert sum(t.numel() for t in made) == inputs[0].shape[0] * 64
    grad_inputs = next(iter(WEIGHTED_ROWS_GRAD.cases(device, 32))).inputs
    made.clear()
    WEIGHTED_ROWS_GRAD.triton(*grad_inputs)
    assert [tuple(t.shape) for t in made] == [(len(grad_inputs[-1]) - 1, 64)]


@pytest.mark.gpu
def test_a_step_is_captured_without_waiting_for_the_host(device):
    packed = table(50, 70, device)
    ids = torch.randint(-1, 50, (8, 5), device=device)
    weights, grad_y = drawn(8, 5, device=device), drawn(8, 70, device=device)
    of_slot = torch.arange(40, device=device) // 5

    def step():
        y = weighted_rows(ids, weights, packed)
        touched = touched_rows(ids.flatten(), 50)
        grad = weighted_rows_grad(grad_y, weights.flatten(), of_slot, touched)
        return y, weighted_rows_grad_weights(grad_y, ids, packed), grad, *touched

    wanted = step()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        found = step()
    graph.replay()
    for got, expected in zip(found, wanted, strict=True):
        assert torch.equal(got, expected)
