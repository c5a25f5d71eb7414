"""Rows of a packed table, exactly, and the gradient of a table: no token lost, none twice."""

import pytest
import torch

from arbcli.config.site import SCALE_TYPES
from arbcli.kernels.codec.decode_digits import decode_digits_reference
from arbcli.kernels.codec.packed import random_packed
from arbcli.kernels.rows.ternary_embedding import (
    embedding_grad,
    embedding_rows,
)
from arbcli.kernels.runtime.backend import use_backend

KERNEL_BACKEND = "triton" if torch.cuda.is_available() else "interpreter"

each_implementation = pytest.mark.parametrize("implementation", ["triton", "torch"])
each_backend = pytest.mark.parametrize("backend", [KERNEL_BACKEND, "torch"])


def table(rows, dim, device, group_size=32):
    generator = torch.Generator().manual_seed(0)
    return random_packed(rows, dim, group_size, generator).to(device)


@each_implementation
def test_embedding_rows_equals_reference(implementation, device):
    for case in embedding_rows.cases(device, 32):
        result = getattr(embedding_rows, implementation)(*case.inputs)
        assert torch.equal(result, embedding_rows.reference(*case.inputs)), case.label


@pytest.mark.parametrize("group_size", SCALE_TYPES.values(), ids=SCALE_TYPES)
@each_implementation
def test_embedding_rows_reads_every_scale_type(implementation, group_size, device):
    inputs = (torch.tensor([4, 0, 4, 3], device=device), table(5, 331, device, group_size))
    result = getattr(embedding_rows, implementation)(*inputs)
    assert torch.equal(result, embedding_rows.reference(*inputs))


@each_backend
def test_embedding_rows_equals_rows_of_the_decoded_table_in_bf16(backend, device):
    if backend == "interpreter":
        pytest.skip("the interpreter rounds bf16 wrongly")
    packed = table(7, 70, device)
    ids = torch.tensor([6, 6, 2], device=device)
    with use_backend(backend):
        rows = embedding_rows(ids, packed)
    assert torch.equal(rows, decode_digits_reference(packed)[ids])


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


@each_implementation
def test_embedding_grad_is_as_close_to_the_reference_as_its_gate_asks(implementation, device):
    for case in embedding_grad.cases(device, 0):
        result = getattr(embedding_grad, implementation)(*case.inputs)
        reference = embedding_grad.reference(*case.inputs)
        assert result.dtype == torch.float32
        assert result.shape == reference.shape, case.label
        error = (result.double() - reference).norm()
        assert error <= embedding_grad.gate.relative * reference.norm(), case.label


@each_backend
def test_embedding_grad_counts_every_token_once(backend, device):
    # sums of small integers are exact in any order
    for num_tokens in (1, 63, 64, 65, 200):
        generator = torch.Generator().manual_seed(num_tokens)
        ids = torch.randint(0, 3, (num_tokens,), generator=generator).to(device) * 2
        grad_y = torch.randint(-9, 10, (num_tokens, 33), generator=generator).float().to(device)
        with use_backend(backend):
            grad = embedding_grad(grad_y, ids, 6)
        for v in range(6):
            assert torch.equal(grad[v], grad_y[ids == v].sum(dim=0)), (num_tokens, v)


@each_backend
def test_embedding_grad_is_zero_for_ids_without_tokens(backend, device):
    with use_backend(backend):
        grad = embedding_grad(torch.ones(2, 5, device=device), torch.tensor([3, 3]).to(device), 6)
        assert torch.equal(grad.any(dim=1), torch.arange(6, device=device) == 3)
        none = torch.zeros(0, 5, device=device)
        grad = embedding_grad(none, torch.zeros(0, dtype=torch.int64, device=device), 6)
    assert torch.equal(grad, torch.zeros(6, 5, device=device))


@each_implementation
def test_embedding_grad_is_deterministic(implementation, device):
    run = getattr(embedding_grad, implementation)
    for case in embedding_grad.cases(device, 0):
        assert torch.equal(run(*case.inputs), run(*case.inputs)), case.label


@each_backend
def test_embedding_grad_sums_bf16_in_float32(backend, device):
    if backend == "interpreter":
        pytest.skip("the interpreter computes wrongly in bf16")
    grad_y = torch.full((300, 2), 1.0, dtype=torch.bfloat16, device=device)
    with use_backend(backend):
        grad = embedding_grad(grad_y, torch.zeros(300, dtype=torch.int64, device=device), 1)
    assert torch.equal(grad, torch.full((1, 2), 300.0, device=device))
