"""Counter-based random bits: h(key, n, k) = mix((k * GOLDEN) ^ mix(n ^ key)), 32 bits an element.

The same (seed, step, tensor, element) gives the same bits in every kernel, backend and reference,
in any order and any tiling, so a stochastically rounded state can be compared with `torch.equal`.
Source of `mix`: C. Wellons, "Prospecting for hash functions", `lowbias32`,
https://nullprogram.com/blog/2018/07/31/
"""

import torch
from torch import Tensor

from arbcli.kernels.runtime._triton import tl, triton

GOLDEN = 0x9E3779B9


def _int32(word: int) -> Tensor:
    """Make a constant: an operation on a Python number would first make it a tensor each time."""
    signed = word - (1 << 32) if word >> 31 else word
    return torch.tensor(signed, dtype=torch.int32, device="cpu")


_GOLDEN, _FIRST, _SECOND = _int32(GOLDEN), _int32(0x7FEB352D), _int32(0x846CA68B)
_15, _16, _LOW_16, _LOW_17 = (_int32(word) for word in (15, 16, 0xFFFF, 0x1FFFF))


def mix(x: Tensor) -> Tensor:
    """Scramble int32 words of any shape; the bits of `mix_reference` as two's complement."""
    high = (x >> _16).bitwise_and_(_LOW_16)
    x = (x ^ high).mul_(_FIRST)
    torch.bitwise_right_shift(x, _15, out=high).bitwise_and_(_LOW_17)
    x.bitwise_xor_(high).mul_(_SECOND)
    torch.bitwise_right_shift(x, _16, out=high).bitwise_and_(_LOW_16)
    return x.bitwise_xor_(high)


def random_bits(key: Tensor, rows: Tensor, columns: Tensor) -> Tensor:
    """Compute random words for every pair of a row and a column index.

    Args:
        key: int32 scalar tensor, from `stream_keys`.
        rows: (N,) int32 row indices n.
        columns: (K,) int32 column indices k.

    Returns:
        (N, K) int32, uniform over all 32 bits.
    """
    return mix((columns * _GOLDEN)[None, :] ^ mix(rows ^ key)[:, None])


def random_halves(key: Tensor, rows: slice, columns: Tensor, turn: Tensor | None = None) -> Tensor:
    """Compute 16 random bits an element: rows 2 i and 2 i + 1 share the words (key, i, k).

    Args:
        key: int32 scalar tensor, from `stream_keys`.
        rows: of the matrix, from an even one.
        columns: (K,) int32 column indices k.
        turn: int32 scalar tensor, added modulo 2**16; None for 0.

    Returns:
        (N, K) int32 in 0..65535.
    """
    first, last = rows.start // 2, -(-rows.stop // 2)
    pairs = torch.arange(first, last, dtype=torch.int32, device=columns.device)
    words = random_bits(key, pairs, columns)
    halves = words.new_empty(len(pairs), 2, len(columns))
    torch.bitwise_and(words, _LOW_16, out=halves[:, 0])
    torch.bitwise_right_shift(words, _16, out=halves[:, 1]).bitwise_and_(_LOW_16)
    halves = halves.flatten(0, 1)[: rows.stop - rows.start]
    return halves if turn is None else halves.add_(turn).bitwise_and_(_LOW_16)


def stream_keys(seed: Tensor, tick: Tensor, num_tensors: int, num_streams: int) -> Tensor:
    """Derive one key for every tensor and purpose from the seed and the numbers of updates.

    As `mix` is a bijection, no key of a run is used twice before the counter of all keys wraps.

    Args:
        seed: int32 scalar tensor.
        tick: int32 tensor of any shape, distinct for every update of a run.
        num_tensors: number of tensors.
        num_streams: number of independent streams of each tensor.

    Returns:
        (*tick.shape, num_tensors, num_streams) int32 on the device of `seed`.
    """
    num_keys = num_tensors * num_streams
    first = tick[..., None] * num_keys
    counter = torch.arange(num_keys, dtype=torch.int32, device=seed.device) + first
    return mix(counter ^ mix(seed ^ _GOLDEN)).unflatten(-1, (num_tensors, num_streams))


def stream_key(seed: int, tick: int, device: torch.device) -> Tensor:
    """Derive a single key of `stream_keys`, an int32 scalar tensor on the device."""
    words = torch.tensor([seed, tick], dtype=torch.int32, device=device)
    return stream_keys(words[0], words[1], 1, 1)[0, 0]


@triton.jit
def mix_word(x):
    """Scramble uint32 words inside a kernel."""
    x ^= x >> 16
    x *= 0x7FEB352D
    x ^= x >> 15
    x *= 0x846CA68B
    return x ^ (x >> 16)


@triton.jit
def random_words(key, n, k):
    """Compute uint32 random words inside a kernel; `n` and `k` broadcast against each other."""
    row = mix_word(n.to(tl.uint32) ^ key.to(tl.uint32, bitcast=True))
    return mix_word((k.to(tl.uint32) * 0x9E3779B9) ^ row)
