"""Batched `choose_byte`: each text has its own position, key and sampling options."""

from torch import Tensor

from arbcli.kernels.output import choose_byte
from arbcli.kernels.runtime.operation import Operation, tl, triton
from arbcli.kernels.runtime.overlap import overlap_options, wait_for_last


def _choose_bytes_torch(
    byte: Tensor, text: Tensor, logits: Tensor, position: Tensor, key: Tensor, temperature: Tensor,
    top_k: Tensor, top_p: Tensor,
) -> None:  # fmt: skip
    sampling = temperature, top_k, top_p
    if logits.shape[1] > choose_byte.MAX_SYMBOLS:
        for row in zip(byte, text, logits, position, key, *sampling, strict=True):
            choose_byte.choose_among_many(*row)
        return
    numbers = (part.tolist() for part in sampling)
    for arguments in zip(byte, text, logits, position, key, *numbers, strict=True):
        choose_byte.choose_byte_torch(*arguments)


@triton.jit
def _choose_bytes_kernel(
    byte_ptr, text_ptr, logits_ptr, position_ptr, key_ptr,
    temperature_ptr, top_k_ptr, top_p_ptr,
    P, V, BLOCK_V: tl.constexpr, BLOCK_J: tl.constexpr, OVERLAP: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    temperature = tl.load(temperature_ptr + row)
    top_k, top_p = tl.load(top_k_ptr + row), tl.load(top_p_ptr + row)
    wait_for_last(OVERLAP)
    position = tl.load(position_ptr + row)
    choice = choose_byte.choose_symbol(
        logits_ptr + row * V, position, tl.load(key_ptr + row), temperature, top_k, top_p, V,
        temperature > 0, (top_k < V) | (top_p < 1), BLOCK_V, BLOCK_J,
    )  # fmt: skip
    tl.store(byte_ptr + row, choice.to(tl.int64))
    tl.store(text_ptr + row * P + position, choice.to(tl.uint8))


def _choose_bytes_triton(
    byte: Tensor, text: Tensor, logits: Tensor, position: Tensor, key: Tensor, temperature: Tensor,
    top_k: Tensor, top_p: Tensor,
) -> None:  # fmt: skip
    texts, symbols = logits.shape
    if symbols > choose_byte.MAX_SYMBOLS:
        return _choose_bytes_torch(byte, text, logits, position, key, temperature, top_k, top_p)
    _choose_bytes_kernel[(texts,)](
        byte, text, logits, position, key, temperature, top_k, top_p, text.shape[1], symbols,
        BLOCK_V=triton.next_power_of_2(symbols), BLOCK_J=32, num_warps=8,
        **overlap_options(logits),
    )  # fmt: skip
    return None


choose_bytes_ = Operation(
    "choose_bytes", _choose_bytes_triton, _choose_bytes_torch,
    "byte: int64[B, 1] dense; text: uint8|int32[B, P] dense; logits: real[B, V] dense; "
    "position, key: int32[B] dense; temperature: float32[B] dense; top_k: int32[B] dense; "
    "top_p: float32[B] dense",
    where=("V > 0", choose_byte.TEXT_FITS),
)  # fmt: skip
"""Sample the byte or token at `position` of each text from its logits, in place.

With more than 256 symbols, texts are processed one by one with torch operations.

Args:
    byte: (B, 1) int64: set to the samples.
    text: (B, P) uint8, or int32 of more than 256 symbols; in each row the element at its
        position is set.
    logits: (B, V) float32 or bfloat16; finite, or -inf.
    position: (B,) int32 below P. It is read on the device, as are those that follow.
    key: (B,) int32: keys of the random streams.
    temperature: (B,) float32: see `choose_byte_` for this and the following arguments.
    top_k: (B,) int32.
    top_p: (B,) float32.

All are contiguous.
"""
