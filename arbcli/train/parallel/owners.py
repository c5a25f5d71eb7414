"""Which process owns which tensor, and where each lies in what travels.

An owner adds up the gradient of its tensors, steps them, and tells the others. What only a step
needs, such as remainder and moment, it alone keeps. Tensors are dealt out from the last of the
model to the first, as a backward comes to them, each to whoever has had the least work so far, so
that the work is even at every moment of a backward.
"""

from collections.abc import Iterable
from dataclasses import dataclass

from torch import Tensor

from arbcli.model.layers.table import TableWeight
from arbcli.model.packed import TernaryTensor

BUCKET_WEIGHTS = 2**25
"""Tensors travel together until they have so many weights: few messages, and long ones."""
ALIGNMENT = 16
"""Bytes; every tensor in a message begins at a multiple."""
ORTHOGONAL_COST = 1 / 100
"""What a weight of an orthogonalised matrix costs for each row or column of its smaller side, a
pass over memory being 1: thirty operations against twenty bytes."""


@dataclass(eq=False, slots=True)
class Member:
    """A tensor in a bucket."""

    tensor: TernaryTensor
    owner: int
    up: int
    """Where its sums begin in the part of the owner, bytes."""
    down: int
    """Where what the owner tells begins in its message, bytes."""


@dataclass(eq=False, slots=True)
class Bucket:
    """Tensors whose gradients travel together."""

    members: list[Member]
    up_sizes: list[int]
    """Bytes of each owner's part of the sums."""
    down_sizes: list[int]
    """Bytes of each owner's message to all."""

    @property
    def rows(self) -> int:
        """Count the rows of all its tensors."""
        return sum(member.tensor.out_features for member in self.members)


def rounded_up(size: int) -> int:
    """Round up to `ALIGNMENT`."""
    return -(-size // ALIGNMENT) * ALIGNMENT


def told(tensor: TernaryTensor) -> dict[str, Tensor]:
    """List what a forward and the next quantisation read of a tensor: an owner tells it to all."""
    names = ["trits", "exponent"]
    if hasattr(tensor, "fraction"):
        names.append("fraction")
    if tensor.packed.remainder is not None:
        names.append("remainder")
    if hasattr(tensor, "wire_exponent"):
        names.append("wire_exponent")
    return {name: getattr(tensor, name) for name in names}


def kept(tensor: TernaryTensor) -> dict[str, Tensor]:
    """List what the owner of a tensor alone needs."""
    others = told(tensor)
    return {name: part for name, part in tensor.state.items() if name not in others}


def cost(tensor: TernaryTensor) -> float:
    """Estimate what a step of a tensor costs, in passes over one weight."""
    direction = tensor.direction
    small = min(tensor.out_features // tensor.matrices, tensor.in_features)
    orthogonal = direction is not None and type(direction).__name__ == "Orthogonal"
    return tensor.num_weights * (1 + small * ORTHOGONAL_COST * orthogonal)


def deal_out(tensors: Iterable[TernaryTensor], size: int) -> dict[int, int]:
    """Find an owner for every tensor, by its `id`."""
    owners, loads = {}, [0.0] * size
    for tensor in reversed([*tensors]):
        owner = loads.index(min(loads))
        owners[id(tensor)] = owner
        loads[owner] += cost(tensor)
    return owners


def plan(tensors: Iterable[TernaryTensor], size: int, sum_bytes: int) -> list[Bucket]:
    """Lay out the messages of a step.

    Args:
        tensors: of the model, in its order.
        size: how many processes there are.
        sum_bytes: of a sum that travels.

    Returns:
        Buckets, in about the order of a backward; each table, whose rows travel, has its own.
    """
    tensors = [*tensors]
    owners, buckets, weights = deal_out(tensors, size), [], 0
    for tensor in reversed(tensors):
        alone = isinstance(tensor, TableWeight)
        if alone or not buckets or weights >= BUCKET_WEIGHTS:
            buckets.append(Bucket([], [0] * size, [0] * size))
            weights = 0
        bucket, owner = buckets[-1], owners[id(tensor)]
        bucket.members.append(
            Member(tensor, owner, bucket.up_sizes[owner], bucket.down_sizes[owner])
        )
        sums = rounded_up(tensor.num_weights * sum_bytes)
        bucket.up_sizes[owner] += sums + rounded_up(tensor.out_features)
        sizes = (rounded_up(part.nbytes) for part in told(tensor).values())
        bucket.down_sizes[owner] += sum(sizes)
        weights = BUCKET_WEIGHTS if alone else weights + tensor.num_weights
    return buckets
