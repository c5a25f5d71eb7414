"""Rows of a byte table, copied out and written back: every byte, and no other."""

import pytest
import torch

from arbcli.kernels.rows.table_rows import scatter_rows_
from arbcli.kernels.runtime.backend import use_backend

KERNEL_BACKEND = "triton" if torch.cuda.is_available() else "interpreter"

each_backend = pytest.mark.parametrize("backend", [KERNEL_BACKEND, "torch"])


@each_backend
def test_neighbours_of_a_strided_buffer_are_left(backend, device):
    whole = torch.zeros(6, 9, dtype=torch.int8, device=device)
    values = torch.ones(2, 3, dtype=torch.int8, device=device)
    with use_backend(backend):
        scatter_rows_(whole[1::2, 2:5], torch.tensor([2, 0], device=device), values)
    wanted = torch.zeros_like(whole)
    wanted[1, 2:5] = wanted[5, 2:5] = 1
    assert torch.equal(whole, wanted)
