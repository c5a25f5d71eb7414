"""Rows of a packed table, exactly, and the gradient of a table: no token lost, none twice."""

import pytest
import torch

from arbcli.kernels.codec.packed import random_packed
from arbcli.kernels.rows.ternary_embedding import (
    embedding_rows,
)
from arbcli.kernels.runtime.backend import use_backend

KERNEL_BACKEND = "triton" if torch.cuda.is_available() else "interpreter"


def table(rows, dim, device, group_size=32):
    generator = torch.Generator().manual_seed(0)
    return random_packed(rows, dim, group_size, generator).to(device)


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
