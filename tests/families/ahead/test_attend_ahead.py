"""Bytes that may be taken back attend with the bits that they have one by one."""

import pytest
import torch

from arbcli.families.ahead.kernels import attend_ahead as of_several
from arbcli.families.ahead.kernels.attend_ahead import attend_ahead, attend_in_turn
from arbcli.kernels.attention.attend_parts import attend_parts
from arbcli.kernels.attention.decode_attention import decode_attention
from arbcli.kernels.matmul.prepacked import prepack
from arbcli.kernels.matmul.row_matmul import row_matmul
from arbcli.kernels.runtime.backend import use_backend
from arbcli.verify.case_generator import CaseGenerator

KERNELS = "triton" if torch.cuda.is_available() else "interpreter"


def drawn(rows, window, position, device, dtype=torch.bfloat16):
    """Draw queries and so on of heads of 64, rings, room for new vectors, and a table."""
    generator = torch.Generator().manual_seed(position)
    sizes = (rows, 3, 2, 64), (2, window, 64), (2, window, 64)
    parts = [torch.randn(size, generator=generator).to(device, dtype) for size in sizes]
    angle = torch.randn(position + rows, 32, generator=generator).to(device)
    at = torch.tensor(position, dtype=torch.int32, device=device)
    new = torch.zeros(2, rows, 2, 64, dtype=dtype, device=device)
    return *parts, new, at, angle.cos(), angle.sin()


@pytest.mark.parametrize(
    ("rows", "window", "position", "backend", "rows_of_program"),
    [(3, 20, 5, KERNELS, 1), (4, 40, 71, KERNELS, 3), (4, 40, 71, "torch", None)],
)
def test_each_byte_has_the_bits_that_it_has_alone(
    rows, window, position, backend, rows_of_program, monkeypatch, device
):
    """A product makes the average of a single byte, so products are compared."""
    qkv, keys, values, new, at, *table = drawn(rows, window, position, device)
    before, others = (keys.clone(), values.clone()), (*table, 1e-6, 16)
    packed = CaseGenerator(0, device, torch.float32).packed(12, 128, 32, digits="trit")
    weight = prepack(packed, gated=False)
    if rows_of_program is not None:
        monkeypatch.setattr(
            of_several, "rows_of_program", lambda *_, **__: min(rows_of_program, rows)
        )
    with use_backend(backend):
        attended = attend_ahead(qkv, keys, values, new, at, *others)
        assert torch.equal(keys, before[0])
        assert torch.equal(values, before[1])
        for row in range(rows):
            alone = attend_parts(qkv[row], *before, at + row, *others)
            assert torch.equal(
                row_matmul(attended[row : row + 1], weight), row_matmul(alone, weight)
            )
    slots = (position + torch.arange(rows, device=device)) % window
    for ring, stored in zip(before, new, strict=True):
        assert torch.equal(ring[:, slots].transpose(0, 1), stored)


@pytest.mark.parametrize("backend", ["torch", "native"])
def test_in_turn_has_the_same_bits_too(backend):
    device = torch.device("cpu")
    qkv, keys, values, new, at, *table = drawn(3, 6, 10, device, torch.float32)
    before, semaphores = (keys.clone(), values.clone()), torch.zeros(2, dtype=torch.int32)
    with use_backend(backend):
        y = attend_in_turn(qkv, keys, values, new, at, *table, semaphores, 1e-6)
        assert torch.equal(keys, before[0])
        assert torch.equal(values, before[1])
        with pytest.raises(ValueError, match="new"):
            attend_in_turn(qkv, keys, values, new[:, 1:], at, *table, semaphores, 1e-6)
        for row in range(3):
            alone = decode_attention(qkv[row], *before, at + row, *table, semaphores, 1e-6)
            assert torch.equal(y[row], alone)
