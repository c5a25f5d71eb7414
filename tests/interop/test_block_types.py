"""Blocks of weights, byte for byte as ggml reads them."""

import ctypes

import pytest
import torch

from arbcli.base.errors import ArbError
from arbcli.interop.gguf.block_types import (
    BF16,
    F16,
    Q2_0,
    Q4_0,
    Q8_0,
    encode_digits,
    encode_numbers,
)


def trits_and_scales(rows: int, columns: int, group: int) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(rows)
    trits = torch.randint(-1, 2, (rows, columns), generator=generator, dtype=torch.int8)
    shape = (rows, -(-columns // group))
    return trits, 2.0 ** torch.randint(-9, 2, shape, generator=generator) * 1.4140625


def weights(trits, scales, group: int) -> torch.Tensor:
    return trits * scales.repeat_interleave(group, dim=1)[:, : trits.shape[1]]


@pytest.mark.parametrize(
    ("kind", "group", "columns"),
    [(Q4_0, 32, 32), (Q4_0, 96, 704), (Q2_0, 64, 704), (Q2_0, 128, 704), (Q8_0, 32, 96)],
)
def test_blocks_of_trits_decode_to_the_same_weights_also_in_llama_cpp(kind, group, columns):
    trits, scales = trits_and_scales(3, columns, group)
    data = encode_digits("w", trits, scales, group, kind).contiguous()
    assert data.nbytes == kind.num_bytes(trits.numel())
    assert torch.equal(kind.decode(data.flatten(), trits.shape), weights(trits, scales, group))
    xllamacpp = pytest.importorskip("xllamacpp", reason="the rest needs the extra `export-test`")
    library = ctypes.CDLL(xllamacpp.xllamacpp.__file__)
    read = torch.empty(trits.shape)
    count = ctypes.c_int64(trits.numel())
    pointers = ctypes.c_void_p(data.data_ptr()), ctypes.c_void_p(read.data_ptr())
    getattr(library, f"dequantize_row_{kind.name.lower()}")(*pointers, count)
    assert torch.equal(read, weights(trits, scales, group))


def test_digits_scales_and_blocks_that_a_type_does_not_hold_are_refused():
    z = torch.tensor([[-127, 127, 21] + [0] * 29], dtype=torch.int8)
    scale = torch.tensor([[0.75]])
    read = Q8_0.decode(encode_digits("w", z, scale, 32, Q8_0).flatten(), (1, 32))
    assert torch.equal(read, z * 0.75)
    for too_large in (z, z.clamp(max=7), z.clamp(min=-7)):  # at either end
        with pytest.raises(ArbError, match="integers above 7, the maximum of Q4_0"):
            encode_digits("w", too_large, scale, 32, Q4_0)
    ones, scales = torch.ones(1, 64, dtype=torch.int8), torch.tensor([[2.0**-25 * 1.5]])
    with pytest.raises(ArbError, match="`w` has a scale that is not exact in fp16") as caught:
        encode_digits("w", ones[:, :32], scales, 32, Q4_0)
    assert "--type bf16" in caught.value.hint
    with pytest.raises(ArbError, match="not exact in fp16"):
        encode_numbers("w", scales, F16)
    assert encode_numbers("w", scales, BF16).nbytes == 2
    for group, columns in ((16, 64), (32, 33)):
        with pytest.raises(ArbError, match="not multiples of the 32 weights"):
            encode_digits("w", ones[:, :columns], scales.expand(1, 4), group, Q4_0)


def test_tiny_scales_of_all_digits_are_rounded():
    z = torch.arange(-127, 129, dtype=torch.int16).clamp(max=127).to(torch.int8).view(8, 32)
    scales = 2.0 ** -torch.arange(14.0, 30.0, 2)[:, None] * 1.40625
    read = Q8_0.decode(encode_digits("w", z, scales, 32, Q8_0).flatten(), (8, 32))
    assert (read - z * scales).abs().max() <= 127 * 2.0**-25
    assert torch.equal(read[:2], (z * scales)[:2])
    with pytest.raises(ArbError, match="`w` has a scale that is not exact in fp16"):
        encode_digits("w", z, scales * 2.0**32, 32, Q8_0)


@pytest.mark.parametrize("kind", [Q4_0, Q2_0, Q8_0])
def test_scale_of_a_block_of_zeros_is_written_as_zero(kind):
    """Whatever it is: fp16 need not hold it."""
    scales = torch.tensor([[1e9, 0.5, 2.0**-40]])
    digits = torch.zeros(1, 3 * kind.block_size, dtype=torch.int8)
    digits[0, kind.block_size] = 1
    blocks = encode_digits("w", digits, scales, kind.block_size, kind).view(3, kind.block_bytes)
    assert blocks[:, :2].view(torch.float16).flatten().tolist() == [0.0, 0.5, 0.0]
