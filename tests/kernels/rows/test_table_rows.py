"""Rows of a byte table, copied out and written back: every byte, and no other."""

import pytest
import torch

from arbcli.kernels.rows.table_rows import gather_rows, scatter_rows_
from arbcli.kernels.runtime.backend import use_backend

KERNEL_BACKEND = "triton" if torch.cuda.is_available() else "interpreter"

each_backend = pytest.mark.parametrize("backend", [KERNEL_BACKEND, "torch"])
each_dtype = pytest.mark.parametrize("dtype", [torch.int8, torch.uint8])


def numbered(rows, columns, device, dtype=torch.int8):
    return torch.arange(rows * columns, device=device).reshape(rows, columns).to(dtype)


@each_dtype
@each_backend
def test_rows_are_copied_and_rows_outside_are_zeros(backend, dtype, device):
    buffer = numbered(5, 3, device, dtype)
    rows = torch.tensor([4, 5, 0, -1, 4, 1 << 40], device=device)
    with use_backend(backend):
        found = gather_rows(buffer, rows)
    wanted = [[12, 13, 14], [0, 0, 0], [0, 1, 2], [0, 0, 0], [12, 13, 14], [0, 0, 0]]
    assert found.dtype == dtype
    assert torch.equal(found, torch.tensor(wanted, device=device, dtype=dtype))


@each_dtype
@each_backend
def test_rows_are_written_in_place_and_others_are_left(backend, dtype, device):
    buffer = numbered(5, 2, device, dtype)
    rows = torch.tensor([3, 5, -1, 0], device=device)
    values = torch.tensor([[50, 51], [99, 99], [98, 98], [60, 61]], device=device, dtype=dtype)
    with use_backend(backend):
        assert scatter_rows_(buffer, rows, values) is buffer
    wanted = [[60, 61], [2, 3], [4, 5], [50, 51], [8, 9]]
    assert torch.equal(buffer, torch.tensor(wanted, device=device, dtype=dtype))


@pytest.mark.parametrize("width", [1, 2, 13, 64, 300])
@each_backend
def test_what_is_gathered_can_be_scattered(backend, width, device):
    buffer = numbered(140, width, device)
    rows = torch.cat([torch.arange(139, -1, -1), torch.full((9,), 140)]).to(device)
    with use_backend(backend):
        found = gather_rows(buffer, rows)
        copy = scatter_rows_(torch.full_like(buffer, 7), rows, found)
    assert torch.equal(copy, buffer)


@each_backend
def test_neighbours_of_a_strided_buffer_are_left(backend, device):
    whole = torch.zeros(6, 9, dtype=torch.int8, device=device)
    values = torch.ones(2, 3, dtype=torch.int8, device=device)
    with use_backend(backend):
        scatter_rows_(whole[1::2, 2:5], torch.tensor([2, 0], device=device), values)
    wanted = torch.zeros_like(whole)
    wanted[1, 2:5] = wanted[5, 2:5] = 1
    assert torch.equal(whole, wanted)
