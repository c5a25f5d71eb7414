"""Rows of tables and slots of experts: what the cases of their specs do not say."""

import pytest
import torch

from arbcli.families.experts.kernels.expert_combine import expert_combine, expert_combine_backward
from arbcli.kernels.codec.packed import Packed
from arbcli.kernels.rows.table_rows import scatter_rows_
from arbcli.kernels.rows.ternary_embedding import embedding_rows
from arbcli.kernels.rows.weighted_rows import (
    touched_rows,
    weighted_rows,
    weighted_rows_grad,
    weighted_rows_grad_weights,
)
from arbcli.kernels.runtime.backend import use_backend
from arbcli.verify.case_generator import CaseGenerator
from arbcli.verify.kernels.codec.packing import pack_trits_reference

KERNEL_BACKEND = "triton" if torch.cuda.is_available() else "interpreter"

each_backend = pytest.mark.parametrize("backend", [KERNEL_BACKEND, "torch"])


def small_table(device):
    """Rows [1, 0, -1], [2, 2, 0] and [0, -4, 4] in two groups of two columns."""
    trits = torch.tensor([[1, 0, -1], [1, 1, 0], [0, -1, 1]], dtype=torch.int8)
    exponent = torch.tensor([[0, 0], [1, 5], [2, 2]], dtype=torch.int8)
    return Packed(pack_trits_reference(trits), exponent, None, 3, 2).to(device)


def table(rows, dim, device, group_size=32, spread=4):
    return CaseGenerator(0, device, torch.float32).packed(rows, dim, group_size, spread, "trit")


def drawn(*shape, device, seed=0):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(device)


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
        ([], 5, []), ([-1, -1], 5, [5, 5]), ([0, 1], 0, []), ([3, 3, 3], 5, [3, 5, 5]),
        ([1, 0, 1, 0, 1], 2, [0, 1]),
        ([(1 << 40) + 1, 1, 1 << 40], 1 << 41, [1, 1 << 40, (1 << 40) + 1]),
    ],
)  # fmt: skip
def test_touched_rows_of_awkward_ids(ids, num_rows, rows, device):
    touched = touched_rows(torch.tensor(ids, dtype=torch.int64, device=device), num_rows)
    assert touched.rows.tolist() == rows
    assert int(touched.count) == sum(row < num_rows for row in rows)
    assert len(touched.order) == len(ids)
    for r, row in enumerate(rows):
        slots = touched.order[touched.bounds[r] : touched.bounds[r + 1]].tolist()
        assert slots == [s for s, v in enumerate(ids) if v == row and v < num_rows]


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
        captured = step()
    graph.replay()
    for got, expected in zip(captured, wanted, strict=True):
        assert torch.equal(got, expected)


@pytest.mark.parametrize("ids", [[1, 5, -1, 0], [1, 5, -1, 0, 1 << 40, 4, 2, -5, 3]])
def test_embedding_rows_of_ids_outside_the_table_are_nan_in_the_kernel(ids, device):
    """Few rows are decoded as they are read, of many ids the whole table is, before."""
    ids = torch.tensor(ids, device=device)
    with use_backend(KERNEL_BACKEND):
        rows = embedding_rows(ids, table(5, 33, device), torch.float32)
    outside = (ids < 0) | (ids >= 5)
    assert torch.equal(rows.isnan().all(dim=1), outside)
    assert not rows[~outside].isnan().any()


def test_embedding_rows_of_ids_outside_the_table_are_an_error_on_a_cpu():
    with use_backend("torch"), pytest.raises(IndexError):
        embedding_rows(torch.tensor([5]), table(5, 33, "cpu"))


@each_backend
def test_sums_are_taken_in_the_order_of_the_slots(backend, device):
    values = torch.tensor([[1e30], [1.0], [-1e30], [3.0]], device=device)
    with use_backend(backend):
        for order in ([0, 1, 2, 3], [0, 2, 1, 3], [1, 0, 3, 2]):
            total = 0.0
            for slot in order:
                total = total + values[slot]
            combined = expert_combine(values, torch.tensor([order], device=device), None)
            assert torch.equal(combined[0], total)


def test_positions_outside_are_nan_in_the_kernel(device):
    values, gates = drawn(8, 40, device=device), drawn(4, 2, device=device)
    positions = torch.tensor([[0, 1], [2, 8], [-1, 3], [4, 1 << 40]], device=device)
    with use_backend(KERNEL_BACKEND):
        y = expert_combine(values, positions, gates)
        grad_values, _ = expert_combine_backward(y[:1].expand(4, 40), values, positions, gates)
    assert torch.equal(y.isnan().all(dim=1), torch.tensor([False, True, True, True]).to(device))
    assert not y[0].isnan().any()
    assert grad_values[:5].isfinite().all()


def test_positions_outside_are_an_error_on_a_cpu():
    with use_backend("torch"), pytest.raises(IndexError):
        expert_combine(torch.zeros(2, 3), torch.tensor([[0, 2]]), None)


@each_backend
def test_neighbours_of_a_strided_buffer_are_left(backend, device):
    whole = torch.zeros(6, 9, dtype=torch.int8, device=device)
    values = torch.ones(2, 3, dtype=torch.int8, device=device)
    with use_backend(backend):
        scatter_rows_(whole[1::2, 2:5], torch.tensor([2, 0], device=device), values)
    wanted = torch.zeros_like(whole)
    wanted[1, 2:5] = wanted[5, 2:5] = 1
    assert torch.equal(whole, wanted)
