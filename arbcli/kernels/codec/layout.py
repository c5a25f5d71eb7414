"""How trits are packed: byte = sum over d of (trit_d + 1) * 3**d, 0..242.

A row of K weights is a sequence of blocks of 160 weights in 32 bytes. Byte j of block b holds the
weights k = 160 b + 32 d + j for d = 0..4, so that one digit of a block is 32 neighbours: a tile
of a power of two, and with T32 exactly one group. These 32 weights are a *plane*. The last block of
a row may be short: with `rest` weights left its planes are ceil(rest / 5) wide. Every row starts on
a byte, and padding trits are 0.
"""

TRITS_PER_BYTE = 5
PLANE = 32
"""Bytes of a full block, and weights of one digit of it."""
BLOCK = PLANE * TRITS_PER_BYTE
LARGEST_BYTE = 3**TRITS_PER_BYTE - 1


def row_bytes(in_features: int) -> int:
    """Count the bytes of one packed row of `in_features` weights."""
    blocks, rest = divmod(in_features, BLOCK)
    return blocks * PLANE + -(-rest // TRITS_PER_BYTE)
