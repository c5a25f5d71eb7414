"""References and random inputs for `arbcli.families.votes.kernels.hold_flips`."""

import torch
from torch import Tensor

from arbcli.verify.kernels.codec.packing import unpack_trits_reference
from arbcli.verify.kernels.update.random_bits import random_bits_reference


def hold_flips_reference(
    packed: Tensor, votes: Tensor, grad: Tensor, threshold: Tensor, key: Tensor, max_flips: int
) -> Tensor:
    """Compute `hold_flips`, a trit at a time."""
    rows, columns = votes.shape
    old = unpack_trits_reference(packed, columns).tolist()
    bits = (random_bits_reference(int(key), rows, columns) >> 16).tolist()
    total = (votes.to(torch.int64) - torch.sign(grad).to(torch.int64)).clamp(-127, 127).tolist()
    ranks = {}
    for n in range(rows):
        for k in range(columns):
            up, down = total[n][k] >= int(threshold), total[n][k] <= -int(threshold)
            if (up and old[n][k] < 1) or (down and old[n][k] > -1):
                ranks[n, k] = (abs(total[n][k]), bits[n][k])
    held = torch.zeros(rows, columns, dtype=torch.bool)
    if len(ranks) > max_flips:
        highest_held = sorted(ranks.values(), reverse=True)[max_flips]
        for place, rank in ranks.items():
            held[place] = rank <= highest_held
    return held
