"""Layout of packed trits: byte = sum over d of (trit_d + 1) * 3**d, 0..242.

A row of K weights is a sequence of blocks of 160 weights in 32 bytes. Byte j of block b holds the
weights k = 160 b + 32 d + j for d = 0..4. So one digit of all bytes of a block is 32 consecutive
weights, a *plane*: its size is a power of two, and with T32 it is one group. The last block of a
row may be short: with `rest` remaining weights its planes are ceil(rest / 5) wide. Every row starts
on a byte boundary, and padding trits are 0.
"""

TRITS_PER_BYTE = 5
PLANE = 32
"""Bytes per full block, and weights per plane."""
BLOCK = PLANE * TRITS_PER_BYTE
MAX_BYTE = 3**TRITS_PER_BYTE - 1


def row_bytes(in_features: int) -> int:
    """Count the bytes of one packed row of `in_features` weights."""
    blocks, rest = divmod(in_features, BLOCK)
    return blocks * PLANE + -(-rest // TRITS_PER_BYTE)
