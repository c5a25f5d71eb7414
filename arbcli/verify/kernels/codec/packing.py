"""Verification of `arbcli.kernels.codec.packing`."""

import torch
from torch import Tensor

from arbcli.kernels.codec.packing import MAX_BYTE, pack_trits, unpack_trits
from arbcli.verify.verification import Verification, no_rows


def pack_trits_reference(trits: Tensor) -> Tensor:
    """Compute `pack_trits`, one weight at a time."""
    rows, in_features = trits.shape
    size = in_features // 160 * 32 + -(-(in_features % 160) // 5)
    packed = [[0] * size for _ in range(rows)]
    values = trits.tolist()
    for n in range(rows):
        for block in range(-(-in_features // 160)):
            width = min(32, -(-(in_features - 160 * block) // 5))
            for j in range(width):
                for digit in range(5):
                    k = 160 * block + width * digit + j
                    trit = values[n][k] if k < in_features else 0
                    packed[n][32 * block + j] += (trit + 1) * 3**digit
    return torch.tensor(packed, dtype=torch.uint8, device=trits.device).view(rows, size)


def unpack_trits_reference(packed: Tensor, in_features: int) -> Tensor:
    """Compute `unpack_trits`, one weight at a time."""
    values = packed.tolist()
    trits = [[0] * in_features for _ in values]
    for k in range(in_features):
        block, offset = divmod(k, 160)
        width = min(32, -(-(in_features - 160 * block) // 5))
        digit, j = divmod(offset, width)
        place, power = 32 * block + j, 3**digit
        for row, unpacked in zip(values, trits, strict=True):
            unpacked[k] = row[place] // power % 3 - 1
    return torch.tensor(trits, dtype=torch.int8, device=packed.device).view(len(trits), in_features)


pack_trits_verification = Verification(
    pack_trits,
    pack_trits_reference,
    changed={"empty": {"trits": no_rows}},
    values={"trits": (-1, 1)},
)


def _every_byte(packed: Tensor) -> Tensor:
    return torch.arange(MAX_BYTE + 1, dtype=torch.uint8, device=packed.device)[:, None]


unpack_trits_verification = Verification(
    unpack_trits, unpack_trits_reference,
    changed={"every byte": {"packed": _every_byte, "in_features": 5}, "empty": {"packed": no_rows}},
    draw=lambda rng, group_size, m, n, k: (rng.trits(n, k), k),
)  # fmt: skip
