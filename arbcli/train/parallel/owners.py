"""Which process owns which tensor, and where each lies in what travels.

An owner adds up the gradient of its tensors, steps them, and tells the others. What only a step
needs, such as remainder and moment, it alone keeps. Tensors are dealt out from the last of the
model to the first, as a backward comes to them, each to the process with the least work so far, so
that the work is even at every moment of a backward.
"""

import math
from collections.abc import Iterable
from dataclasses import dataclass

import torch
from torch import Tensor

from arbcli.kernels.update.direction import UNIT
from arbcli.kernels.update.hadamard import LARGEST_BLOCK
from arbcli.kernels.update.last_bits import LARGEST_CHANGE
from arbcli.kernels.update.quantise_gradient import LARGEST_OF_PLANES
from arbcli.model.layers.table import TableWeight
from arbcli.model.packed import TernaryTensor
from arbcli.rules.base import STEP_OF_RADIX
from arbcli.train.updater import step_limit

BUCKET_WEIGHTS = 2**25
"""Of the tensors that travel together, about: few messages, and long ones."""
ALIGNMENT = 16
"""Bytes; every tensor in a message begins at a multiple."""
ORTHOGONAL_COST = 1 / 100
"""Cost of a weight of an orthogonalised matrix for each row or column of its smaller side, a
pass over memory being 1: thirty operations against twenty bytes."""


DIGITS = ("trits", "remainder")
"""Buffers that the last bits of z tell."""


@dataclass(frozen=True, slots=True)
class Sums:
    """How sums of parts of a gradient lie in a message."""

    dtype: torch.dtype
    has_low: bool
    """Whether four bits more of each are in a plane of their own: see `quantise_gradient`."""
    largest: int
    """Magnitude of a sum that they hold, and that can be added up with others' and mixed back."""

    def sizes(self, rows: int, columns: int) -> tuple[int, int]:
        """Count the bytes of a matrix of them, and those of the plane of four bits."""
        low = (rows + 1) // 2 * columns if self.has_low else 0
        return rows * columns * self.dtype.itemsize, low


SUMS = (
    Sums(torch.int8, has_low=False, largest=127),
    Sums(torch.int8, has_low=True, largest=LARGEST_OF_PLANES),
    Sums(torch.int16, has_low=False, largest=32767),
    Sums(torch.int32, has_low=False, largest=(2**31 - 1) // LARGEST_BLOCK),
)
"""From the narrowest on."""


@dataclass(eq=False, slots=True)
class Member:
    """A tensor in a bucket, or those of its matrices whose gradients come together."""

    tensor: TernaryTensor
    matrices: range
    owner: int
    up: int
    """Where its sums begin in the part of the owner, bytes."""
    down: int
    """Where what the owner tells begins in its message, bytes."""
    by_bits: bool
    """Whether trits and remainders are told by the last bits of both: see `are_told_by_bits`."""

    @property
    def rows(self) -> slice:
        """Find its rows among those of the tensor."""
        return self.tensor.rows_of(self.matrices)

    @property
    def shape(self) -> tuple[int, int]:
        """Count its rows and columns."""
        return self.rows.stop - self.rows.start, self.tensor.in_features

    @property
    def bits_shape(self) -> tuple[int, int]:
        """Count rows and bytes of the last bits of its digits."""
        rows, columns = self.shape
        return (rows + 1) // 2, columns

    def copied(self) -> list[Tensor]:
        """List what an owner tells of it as it is: views of the tensor's buffers."""
        parts = told(self.tensor).items()
        return [part[self.rows] for name, part in parts if not (self.by_bits and name in DIGITS)]


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
        return sum(member.shape[0] for member in self.members)


def rounded_up(size: int) -> int:
    """Round up to `ALIGNMENT`."""
    return -(-size // ALIGNMENT) * ALIGNMENT


def told(tensor: TernaryTensor) -> dict[str, Tensor]:
    """List what a forward and the next quantisation read of a tensor: an owner tells it to all."""
    names = ["trits", "exponent"]
    if hasattr(tensor, "fraction"):
        names.append("fraction")
    # weights that fade read them at first, and vectors always
    if tensor.reads_digits or tensor.packed.remainder is not None:
        names.append("remainder")
    if hasattr(tensor, "wire_exponent"):
        names.append("wire_exponent")
    return {name: getattr(tensor, name) for name in names}


def are_told_by_bits(tensor: TernaryTensor, lr: float) -> bool:
    """Return whether four bits say what a step makes of the digits of a tensor.

    They do where all digits are read, and no step moves z by more than `LARGEST_CHANGE`. Rows of a
    table may be far off, and are told as they are.

    Args:
        tensor: of a model.
        lr: the largest learning rate of its steps.
    """
    rule = tensor.rule
    if not tensor.reads_digits or isinstance(tensor, TableWeight):
        return False
    limit = step_limit(lr * tensor.lr_factor * rule.radix * STEP_OF_RADIX)
    return -(-limit // UNIT) <= LARGEST_CHANGE


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


def plan(
    tensors: Iterable[TernaryTensor], owners: dict[int, int], size: int, sums: Sums, lr: float
) -> list[Bucket]:
    """Lay out the messages of a step.

    Args:
        tensors: of the model, in its order.
        owners: of each, by its `id`.
        size: how many processes there are.
        sums: that travel.
        lr: the largest learning rate.

    Returns:
        Buckets, in about the order of a backward; each table, whose rows travel, has its own. Those
        of a stack of matrices are no larger than what of its gradient comes at once.
    """
    buckets: list[Bucket] = []
    weights = 0
    for tensor in reversed([*tensors]):
        alone, owner = isinstance(tensor, TableWeight), owners[id(tensor)]
        by_bits = are_told_by_bits(tensor, lr)
        for matrices in tensor.gradient_ranges():
            number = len(matrices) * (tensor.num_weights // tensor.matrices)
            # one that would be too large by more than half of what comes begins the next
            if alone or not buckets or weights + number // 2 > BUCKET_WEIGHTS:
                buckets.append(Bucket([], [0] * size, [0] * size))
                weights = 0
            bucket = buckets[-1]
            up, down = bucket.up_sizes[owner], bucket.down_sizes[owner]
            member = Member(tensor, matrices, owner, up, down, by_bits)
            bucket.members.append(member)
            parts = *sums.sizes(*member.shape), member.shape[0]
            bucket.up_sizes[owner] += sum(map(rounded_up, parts))
            bits = rounded_up(math.prod(member.bits_shape)) if by_bits else 0
            copied = sum(rounded_up(part.nbytes) for part in member.copied())
            bucket.down_sizes[owner] += bits + copied
            weights = 2 * BUCKET_WEIGHTS if alone else weights + number
    return buckets
