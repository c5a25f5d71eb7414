"""Sharding of tensors over processes (as in ZeRO), and the layout of their messages.

The owner of a tensor sums its gradients, steps it, and broadcasts the result. Only the owner keeps
buffers that only a step needs, such as remainder and moment. Tensors are assigned in the order of a
backward, last to first, each to the process with the least work so far, which balances the load
throughout the backward.
"""

from collections.abc import Iterable
from dataclasses import dataclass

import torch
from torch import Tensor

from arbcli.kernels.update.hadamard import MAX_BLOCK
from arbcli.kernels.update.quantise_gradient import MAX_PLANE_SUM
from arbcli.model.layers.table import TableWeight
from arbcli.model.packed import TernaryTensor

BUCKET_WEIGHTS = 2**25
"""Approximate number of weights in a bucket."""
ALIGNMENT = 16
"""Alignment of tensors in a message, in bytes."""
ORTHOGONAL_COST = 1 / 100
"""Cost of orthogonalisation per weight and row or column of the smaller side, relative to a pass
over memory: thirty operations against twenty bytes."""


@dataclass(frozen=True, slots=True)
class SumFormat:
    """Integer format of summed gradients in a message."""

    dtype: torch.dtype
    has_low: bool
    """Whether four more bits are in a separate plane: see `quantise_gradient`."""
    largest: int
    """Maximum magnitude of a sum, so that further sums and the Hadamard transform fit."""

    def sizes(self, rows: int, columns: int) -> tuple[int, int]:
        """Return the sizes of a matrix and of its plane of low bits, in bytes."""
        low = (rows + 1) // 2 * columns if self.has_low else 0
        return rows * columns * self.dtype.itemsize, low


SUM_FORMATS = (
    SumFormat(torch.int8, has_low=False, largest=127),
    SumFormat(torch.int8, has_low=True, largest=MAX_PLANE_SUM),
    SumFormat(torch.int16, has_low=False, largest=32767),
    SumFormat(torch.int32, has_low=False, largest=(2**31 - 1) // MAX_BLOCK),
)
"""Formats in the order of size."""


@dataclass(eq=False, slots=True)
class Member:
    """A tensor in a bucket, or a range of its stacked matrices."""

    tensor: TernaryTensor
    matrices: range
    owner: int
    up: int
    """Offset of its sums in the owner's part, in bytes."""
    down: int
    """Offset of its state in the owner's message, in bytes."""

    @property
    def rows(self) -> slice:
        """Its rows in the tensor."""
        return self.tensor.rows_of(self.matrices)

    @property
    def shape(self) -> tuple[int, int]:
        """Number of rows and columns."""
        return self.rows.stop - self.rows.start, self.tensor.in_features

    def sent(self) -> list[Tensor]:
        """Return the buffers of its rows that the owner sends: see `broadcast_buffers`."""
        return [part[self.rows] for part in broadcast_buffers(self.tensor).values()]


@dataclass(eq=False, slots=True)
class Bucket:
    """Tensors whose gradients are reduced in one message."""

    members: list[Member]
    up_sizes: list[int]
    """Size of each owner's part of the sums in bytes."""
    down_sizes: list[int]
    """Size of each owner's broadcast in bytes."""

    @property
    def rows(self) -> int:
        """Number of rows of all its tensors."""
        return sum(member.shape[0] for member in self.members)


def rounded_up(size: int) -> int:
    """Round up to `ALIGNMENT`."""
    return -(-size // ALIGNMENT) * ALIGNMENT


def broadcast_buffers(tensor: TernaryTensor) -> dict[str, Tensor]:
    """Return the buffers that all processes need, which the owner broadcasts.

    Buffers of an (N, K) tensor have N rows: `trits` uint8, and others int8.
    """
    names = ["trits", "exponent"]
    if hasattr(tensor, "fraction"):
        names.append("fraction")
    # fading weights read the remainder at first, and vectors and averages always
    reads_all = tensor.reads_digits or tensor.packed.remainder is not None
    if reads_all or hasattr(tensor, "average"):
        names.append("remainder")
    if hasattr(tensor, "wire_exponent"):
        names.append("wire_exponent")
    return {name: getattr(tensor, name) for name in names}


def owner_buffers(tensor: TernaryTensor) -> dict[str, Tensor]:
    """Return the buffers that only the owner of a tensor needs, int8 as declared by the tensor."""
    others = broadcast_buffers(tensor)
    return {name: part for name, part in tensor.state.items() if name not in others}


def cost(tensor: TernaryTensor) -> float:
    """Estimate the cost of a tensor's step, in units of memory traffic for one weight."""
    direction = tensor.direction
    smaller_side = min(tensor.out_features // tensor.matrices, tensor.in_features)
    orthogonal = direction is not None and type(direction).__name__ == "Orthogonal"
    return tensor.num_weights * (1 + smaller_side * ORTHOGONAL_COST * orthogonal)


def assign_owners(tensors: Iterable[TernaryTensor], size: int) -> dict[int, int]:
    """Assign an owner to each tensor; return them by the `id` of the tensor."""
    owners, loads = {}, [0.0] * size
    for tensor in reversed([*tensors]):
        owner = loads.index(min(loads))
        owners[id(tensor)] = owner
        loads[owner] += cost(tensor)
    return owners


def plan_buckets(
    tensors: Iterable[TernaryTensor], owners: dict[int, int], size: int, sums: SumFormat
) -> list[Bucket]:
    """Lay out the messages of a step.

    Args:
        tensors: tensors of the model, in its order.
        owners: owner of each tensor, by its `id`.
        size: number of processes.
        sums: format of the sums.

    Returns:
        Buckets in the approximate order of a backward. Each table has its own bucket, as only
        touched rows are sent. Stacked matrices are split into the ranges of their gradients.
    """
    buckets: list[Bucket] = []
    weights = 0
    for tensor in reversed([*tensors]):
        is_table, owner = isinstance(tensor, TableWeight), owners[id(tensor)]
        for matrices in tensor.gradient_ranges():
            number = len(matrices) * (tensor.num_weights // tensor.matrices)
            # starts a new bucket if more than half of the tensor would exceed the limit
            if is_table or not buckets or weights + number // 2 > BUCKET_WEIGHTS:
                buckets.append(Bucket([], [0] * size, [0] * size))
                weights = 0
            bucket = buckets[-1]
            up, down = bucket.up_sizes[owner], bucket.down_sizes[owner]
            member = Member(tensor, matrices, owner, up, down)
            bucket.members.append(member)
            parts = *sums.sizes(*member.shape), member.shape[0]
            bucket.up_sizes[owner] += sum(map(rounded_up, parts))
            bucket.down_sizes[owner] += sum(rounded_up(part.nbytes) for part in member.sent())
            weights = 2 * BUCKET_WEIGHTS if is_table else weights + number
    return buckets
