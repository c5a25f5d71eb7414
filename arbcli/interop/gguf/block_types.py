"""Weight types of GGUF: plain numbers, or blocks of small integers with an fp16 scale.

A block of a row holds a scale d and integers q; a weight is q * d. For trits, q is the trit and d
the scale of its group, so that nothing is rounded. For weights of all digits, q is z and d the
scale divided by U. llama.cpp does not round the product to bf16 as arb does: the relative
difference of a weight is at most 2**-8.

    F32, BF16, F16  a number each
    Q4_0            32 weights in 18 bytes: d, then byte j has q + 8 of weight j in its low half and
                    of weight j + 16 in its high half
    Q2_0            64 weights in 18 bytes: d, then byte j has q + 1 of weights 4 j to 4 j + 3, two
                    bits each, the lowest first
    Q8_0            32 weights in 34 bytes: d, then q of each, int8

Source: ggml-common.h and ggml-quants.c of llama.cpp.
"""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from arbcli.base.errors import ArbError


@dataclass(frozen=True)
class BlockType:
    """A type of GGUF tensors."""

    name: str
    type_id: int
    """Identifier of the type in a file."""
    block_size: int
    """Number of weights per block."""
    block_bytes: int
    max_integer: int = 0
    """Maximum magnitude of stored integers."""
    pack: Callable[[Tensor], Tensor] | None = None
    """Converts (..., block) int8 integers to (..., bytes) uint8; None for plain numbers."""
    unpack: Callable[[Tensor], Tensor] | None = None
    """Inverse of `pack`."""
    dtype: torch.dtype | None = None
    """Dtype of a type of plain numbers; None for blocks."""

    def num_bytes(self, num_weights: int) -> int:
        """Return the size in bytes of `num_weights` weights in whole blocks."""
        return num_weights // self.block_size * self.block_bytes

    def encode(self, integers: Tensor, scales: Tensor) -> Tensor:
        """Encode integers and their scales as blocks.

        Args:
            integers: (N, K) int8; K is a multiple of `block_size`.
            scales: (N, K / block_size) float32, exact in fp16.

        Returns:
            (N, bytes) uint8.
        """
        if self.pack is None:
            raise ValueError(f"{self.name} has no blocks of integers")
        packed = self.pack(integers.unflatten(1, (-1, self.block_size)))
        d = scales.to(torch.float16).unsqueeze(-1).view(torch.uint8)
        return torch.cat([d, packed], dim=2).flatten(1)

    def decode(self, data: Tensor, shape: tuple[int, int]) -> Tensor:
        """Decode a tensor's bytes, (bytes,) uint8, to (N, K) float32 weights."""
        if self.dtype is not None:
            return data.view(self.dtype).view(shape).to(torch.float32)
        if self.unpack is None:
            raise ValueError(f"{self.name} has no blocks of integers")
        blocks = data.view(shape[0], -1, self.block_bytes)
        d = blocks[..., :2].contiguous().view(torch.float16).to(torch.float32)
        return (self.unpack(blocks[..., 2:]).to(torch.float32) * d).flatten(1)


def _pack_4bit(integers: Tensor) -> Tensor:
    low, high = (integers + 8).view(torch.uint8).chunk(2, dim=-1)
    return low | (high << 4)


def _unpack_4bit(packed: Tensor) -> Tensor:
    return torch.cat([packed & 15, packed >> 4], dim=-1).view(torch.int8) - 8


_SHIFTS = (0, 2, 4, 6)


def _pack_2bit(integers: Tensor) -> Tensor:
    parts = (integers + 1).view(torch.uint8).unflatten(-1, (-1, 4))
    first, second, third, fourth = (parts[..., i] << shift for i, shift in enumerate(_SHIFTS))
    return first | second | third | fourth


def _unpack_2bit(packed: Tensor) -> Tensor:
    parts = torch.stack([packed >> shift & 3 for shift in _SHIFTS], dim=-1)
    return parts.flatten(-2).view(torch.int8) - 1


def _pack_8bit(integers: Tensor) -> Tensor:
    return integers.view(torch.uint8)


def _unpack_8bit(packed: Tensor) -> Tensor:
    return packed.contiguous().view(torch.int8)


F32 = BlockType("F32", 0, 1, 4, dtype=torch.float32)
F16 = BlockType("F16", 1, 1, 2, dtype=torch.float16)
BF16 = BlockType("BF16", 30, 1, 2, dtype=torch.bfloat16)
Q4_0 = BlockType("Q4_0", 2, 32, 18, 7, _pack_4bit, _unpack_4bit)
Q2_0 = BlockType("Q2_0", 42, 64, 18, 1, _pack_2bit, _unpack_2bit)
Q8_0 = BlockType("Q8_0", 8, 32, 34, 127, _pack_8bit, _unpack_8bit)
TYPES = {kind.name.lower(): kind for kind in (F32, F16, BF16, Q8_0, Q4_0, Q2_0)}
"""Types by their value of `--type`."""
MIN_NORMAL = 2.0**-14
"""Smallest normal number of fp16; smaller scales are rounded. Q8_0 allows that: the error of a
weight is at most 127 * 2**-25 = 3.8e-6, in groups whose largest weight is below 0.008."""
TYPE_BY_ID = {kind.type_id: kind for kind in TYPES.values()}


def encode_numbers(name: str, weight: Tensor, kind: BlockType) -> Tensor:
    """Encode weights as plain numbers: (N, bytes) uint8, or (bytes,) for a vector.

    Args:
        name: name of the tensor, for errors.
        weight: (N, K), or (K,), float32.
        kind: a type of plain numbers.

    Raises:
        ArbError: a weight is not exact in the type.
    """
    numbers = weight.to(kind.dtype)
    if not torch.equal(numbers.to(torch.float32), weight):
        raise _inexact_scale(name, kind)
    return numbers.view(torch.uint8)


def encode_digits(
    name: str, digits: Tensor, scales: Tensor, group_size: int, kind: BlockType
) -> Tensor:
    """Encode digits and the scales of their groups as blocks, (N, bytes) uint8.

    The scale of a block of zeros is encoded as 0. In Q8_0, scales below `MIN_NORMAL` are rounded.

    Args:
        name: name of the tensor, for errors.
        digits: (N, K) int8, trits or z.
        scales: (N, ceil(K / group_size)) float32.
        group_size: number of weights that share a scale.
        kind: a type of blocks.

    Raises:
        ArbError: rows or groups are not multiples of a block, a digit is too large, or a scale is
            not exact in fp16.
    """
    columns = digits.shape[1]
    if group_size % kind.block_size or columns % kind.block_size:
        raise ArbError(
            f"`{name}` has rows of {columns} weights in groups of {group_size}, which are not"
            f" multiples of the {kind.block_size} weights in a block of {kind.name}",
            "use `--type bf16`, which holds any weights",
        )
    digits = digits.contiguous()
    lowest, highest = map(int, digits.aminmax())
    if max(highest, -lowest) > kind.max_integer:
        raise ArbError(
            f"`{name}` has integers above {kind.max_integer}, the maximum of {kind.name}",
            "use `--type q8_0`, or `--type bf16`, which holds any weights",
        )
    block_scales = scales.repeat_interleave(group_size // kind.block_size, dim=1)
    block_scales = block_scales[:, : columns // kind.block_size]
    words = digits.view(torch.int64).unflatten(1, (-1, kind.block_size // 8))  # 8 digits each
    block_scales = torch.where(words.ne(0).any(dim=2), block_scales, 0.0)
    rounded = block_scales.to(torch.float16).to(torch.float32)
    if kind is Q8_0:
        rounded = torch.where(block_scales < MIN_NORMAL, block_scales, rounded)
    if not torch.equal(rounded, block_scales):
        raise _inexact_scale(name, kind)
    return kind.encode(digits, block_scales)


def _inexact_scale(name: str, kind: BlockType) -> ArbError:
    return ArbError(
        f"`{name}` has a scale that is not exact in fp16, so {kind.name} would round its weights",
        "use `--type bf16`, which holds any weights",
    )
