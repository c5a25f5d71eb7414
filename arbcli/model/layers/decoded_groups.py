"""Small matrices that are decoded in groups, as decoding one takes less time than its launch."""

from arbcli.kernels.runtime.backend import LARGE_ELEMENTS
from arbcli.model.layers.linear import DecodedWith, LinearWeight

MAX_AT_ONCE = 2**22
"""Maximum number of weights of several blocks that are decoded in one launch: 8 MiB in bf16."""
MAX_KEPT = 2**21
"""Maximum number of weights that stay decoded between a forward and its backward: 4 MiB in bf16."""


def decode_in_groups(
    blocks: list[list[LinearWeight]], head: LinearWeight | None, *, across: bool
) -> None:
    """Decode small matrices in groups.

    A backward begins with smaller groups, as decoded weights would add to the peak while most
    activations are still in memory. Later groups begin at the boundaries of blocks.

    Args:
        blocks: the weights of each block, equally many, in the order of a forward, each once.
        head: the weight that is used after them, if it is used once, and as a whole.
        across: whether a group may have weights of several blocks and of the head. A block that is
            recomputed uses weights of its own only.
    """
    weights = [weight for block in blocks for weight in block]
    large = any(weight.num_weights >= LARGE_ELEMENTS for weight in weights)
    if not weights or large or weights[0].rule.reads_all:
        return
    fits = head is not None and head.num_weights < LARGE_ELEMENTS and not head.rule.reads_all
    after = [head] if across and head and fits else []
    size, number = len(blocks[0]), len(weights)
    group_blocks = MAX_AT_ONCE // sum(weight.num_weights for weight in blocks[0]) if across else 1
    length = size * max(1, group_blocks)
    forward, first = range(0, number, length), len(after)
    backward = (0, first + 1, *range(first + size - 1, first + number, length))
    weights += after
    kept_weights = weights[::-1][: first + size - 1] if across else []
    if sum(weight.num_weights for weight in kept_weights) > MAX_KEPT:
        kept_weights = []
    needed_after = _next_in_groups(weights, forward)
    needed_before = _next_in_groups(weights[::-1], backward)[::-1]
    for index, weight in enumerate(weights):
        keeps = len(weights) - index <= len(kept_weights)
        weight.group = DecodedWith(needed_after[index], needed_before[index], keeps)


def _next_in_groups(
    weights: list[LinearWeight], starts: range | tuple[int, ...]
) -> list[tuple[LinearWeight, ...]]:
    """Return the weights after each weight in its group; groups begin at the indices `starts`."""
    followers: list[tuple[LinearWeight, ...]] = [()] * len(weights)
    for start, end in zip(starts, (*starts[1:], len(weights)), strict=True):
        for index in range(start, end):
            followers[index] = tuple(weights[index + 1 : end])
    return followers
