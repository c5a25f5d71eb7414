"""Weighted sums of rows of a packed table and their gradients: every slot counts, and once."""

import pytest
import torch
from torch.nn.functional import embedding_bag

from arbcli.config.site import SCALE_TYPES
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
def test_gradient_of_the_weights_by_hand(backend, device):
    ids = torch.tensor([[0, 1, -1], [2, 7, 0]], device=device)
    grad_y = torch.tensor([[1.0, 10.0, 100.0], [2.0, 3.0, 5.0]], device=device)
    with use_backend(backend):
        grad = weighted_rows_grad_weights(grad_y, ids, small_table(device))
    wanted = torch.tensor([[-99.0, 22.0, 0.0], [8.0, 0.0, -3.0]], device=device)
    assert torch.equal(grad, wanted)


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
def test_weights_that_are_not_finite_reach_their_own_token_only(backend, device):
    ids = torch.tensor([[0, 1], [1, 2]], device=device)
    weights = torch.tensor([[torch.nan, 1.0], [1.0, 1.0]], device=device)
    with use_backend(backend):
        y = weighted_rows(ids, weights, small_table(device), dtype=torch.float32)
    assert y[0].isnan().all()
    assert y[1].isfinite().all()


@each_backend
def test_rows_are_added_in_the_order_of_the_slots(backend, device):
    # 2**24 + 1 is not a float32, so the order shows
    ids = torch.zeros(1, 4, dtype=torch.int64, device=device)
    weights = torch.tensor([[2.0**24, 1.0, -(2.0**24), 1.0]], device=device)
    with use_backend(backend):
        y = weighted_rows(ids, weights, small_table(device), dtype=torch.float32)
    assert y.tolist() == [[1.0, 0.0, -1.0]]


@pytest.mark.parametrize("group_size", SCALE_TYPES.values(), ids=SCALE_TYPES)
@pytest.mark.parametrize("dim", [5, 331])
@each_backend
def test_one_slot_of_weight_one_is_its_row_exactly(backend, dim, group_size, device):
    packed = table(7, dim, device, group_size, spread=127)
    ids = torch.tensor([[6], [0], [3]], device=device)
    with use_backend(backend):
        y = weighted_rows(ids, torch.ones(3, 1, device=device), packed, dtype=torch.float32)
    assert torch.equal(y.double(), decoded(packed)[ids[:, 0]])


@each_backend
def test_bf16_is_the_rounded_sum(backend, device):
    if backend == "interpreter":
        pytest.skip("the interpreter rounds bf16 wrongly")
    packed = table(7, 70, device)
    ids = torch.tensor([[6, 6, 2], [1, -1, 0]], device=device)
    inputs = (ids, drawn(2, 3, device=device), packed)
    with use_backend(backend):
        y, exact = weighted_rows(*inputs), weighted_rows(*inputs, dtype=torch.float32)
    assert y.dtype == torch.bfloat16
    assert torch.equal(y, exact.to(torch.bfloat16))


def test_torch_backend_decodes_a_few_tokens_at_a_time(monkeypatch, device):
    ids = torch.randint(-1, 6, (23, 3), generator=torch.Generator().manual_seed(0)).to(device)
    packed, weights = table(5, 40, device), drawn(23, 3, device=device)
    grad_y = drawn(23, 40, device=device, seed=1)
    with use_backend("torch"):
        whole = weighted_rows(ids, weights, packed, dtype=torch.float32)
        whole_grad = weighted_rows_grad_weights(grad_y, ids, packed)
        monkeypatch.setattr("arbcli.kernels.rows.weighted_rows.CHUNK_ELEMENTS", 5 * 3 * 40)
        parts = weighted_rows(ids, weights, packed, dtype=torch.float32)
        parts_grad = weighted_rows_grad_weights(grad_y, ids, packed)
    assert torch.equal(parts, whole)
    assert torch.equal(parts_grad, whole_grad)


def test_touched_rows_by_hand(device):
    ids = torch.tensor([4, -1, 2, 4, 9, 2, 4, 6], device=device)
    touched = touched_rows(ids, 6)
    assert touched.rows.tolist() == [2, 4, 6, 6, 6, 6]
    assert touched.order.tolist() == [2, 5, 0, 3, 6, 1, 4, 7]
    assert touched.bounds.tolist() == [0, 2, 5, 5, 5, 5, 5]
    assert int(touched.count) == 2
    assert {t.dtype for t in touched} == {torch.int64}
    assert touched.count.dim() == 0


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


@each_backend
def test_gradient_of_the_rows_counts_every_slot_once(backend, device):
    # sums of small integers are exact in any order
    for size in (1, 8, 9, 128, 129, 300):
        generator = torch.Generator().manual_seed(size)
        ids = torch.full((size,), 2)
        ids[torch.rand(size, generator=generator) < 0.05] = 5
        ids = ids.to(device)
        weights = torch.randint(-9, 10, (size,), generator=generator).float().to(device)
        tokens = torch.randint(0, 4, (size,), generator=generator).to(device)
        grad_y = torch.randint(-9, 10, (4, 33), generator=generator).float().to(device)
        touched = touched_rows(ids, 7)
        with use_backend(backend):
            grad = weighted_rows_grad(grad_y, weights, tokens, touched)
        products = weights[:, None] * grad_y[tokens]
        for r, v in enumerate(touched.rows.tolist()):
            assert torch.equal(grad[r], products[ids == v].sum(dim=0)), (size, v)


@each_backend
def test_gradient_of_the_rows_has_the_type_that_is_asked_for(backend, device):
    touched = touched_rows(torch.tensor([1, 1, 0], device=device), 3)
    grad_y = torch.ones(1, 4, device=device)
    slots = (torch.ones(3, device=device), torch.zeros(3, dtype=torch.int64, device=device))
    with use_backend(backend):
        assert weighted_rows_grad(grad_y, *slots, touched).dtype == torch.float32
        if backend != "interpreter":  # it rounds bf16 wrongly
            half = grad_y.to(torch.bfloat16)
            grad = weighted_rows_grad(half, *slots, touched)
            assert (grad.dtype, grad[1, 0].item()) == (torch.bfloat16, 2.0)
            assert weighted_rows_grad(half, *slots, touched, torch.float32).dtype == torch.float32


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
