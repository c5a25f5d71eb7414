"""What a kernel offers to be verified, tested and timed: one `KernelSpec` for all three."""

from collections.abc import Callable, Hashable, Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

Results = Tensor | tuple[Tensor | None, ...]
"""Outputs of an implementation; None where a peer computes nothing."""


@dataclass(frozen=True, slots=True)
class Case:
    """One set of inputs, the same for the kernel, the torch backend and the reference."""

    label: str
    """Shapes and what is awkward about them."""
    inputs: tuple
    """Positional arguments; whoever runs the case passes clones, so updates in place are safe."""
    peer: Callable[..., Results] | None = None
    """torch's own operation on these inputs, where the gate is "no worse than torch"."""
    chunk_elements: int | None = None
    """Elements of the parts that the torch backend works on; None is as many as it likes."""


MATRIX = (11264, 2048)
"""(N, K) that kernels are timed on: the largest matrix of a model of 1.2 billion weights."""


@dataclass(frozen=True, slots=True)
class Timing:
    """One set of inputs of a production size, and what else does the same work."""

    label: str
    """Shapes, and the kind where a kernel has several."""
    inputs: tuple
    """Positional arguments; every tensor of them is counted as read once."""
    run: Callable | None = None
    """What is timed, and its results are counted as written once; None is the spec's `triton`."""
    peer: Callable[[], object] | None = None
    """The same work, without arguments, by torch or a library that it calls."""
    peer_name: str = "torch"
    flops: int = 0
    """Multiplications and additions of a matrix product in bf16; 0 where there is none."""


MakeCases = Callable[[torch.device, int], Iterator[Case]]
MakeTimings = Callable[[torch.device, int], Iterator[Timing]]


@dataclass(frozen=True, slots=True)
class Gate:
    """How close is close enough, and why."""

    exact: bool
    """Every element equal, which is the only gate for integers."""
    relative: float = 0.0
    """Largest norm of the error over norm of the reference, for real values."""
    peer_slack: float = 0.0
    """With a peer: how much larger than the peer's error ours may be, as a share."""
    reason: str = ""

    @property
    def text(self) -> str:
        """Say in a few words what passes."""
        if self.exact:
            return "equal"
        peer = f", or torch's error + {self.peer_slack:.0%}" if self.peer_slack else ""
        return f"relative {self.relative:.0e}{peer}"


EXACT = Gate(exact=True, reason="integers are compared with torch.equal")


@dataclass(frozen=True, slots=True)
class KernelSpec:
    """A kernel, its implementations, its reference, and the inputs they are compared on.

    Every callable takes the inputs of a case and returns a tensor or a tuple of tensors. One that
    updates state in place returns that state too, so that it is compared like any other result.
    """

    name: str
    triton: Callable
    torch: Callable
    reference: Callable
    cases: MakeCases
    """(device, group size) to cases. A spec without `uses_scales` ignores the group size."""
    gate: Gate = EXACT
    uses_scales: bool = False
    """Whether the scale type matters."""
    scale_path: Callable[[int], Hashable] = int
    """(group size) to what the code asks of it: sizes of the same answer take the same path. By
    default each takes a path of its own."""
    bfloat16: tuple[int, ...] | None = None
    """Which float32 inputs may be bfloat16 too; None is all of them."""
    not_verified: tuple[str, ...] = ()
    """What the cases leave out and why, for the ledger."""
    timings: MakeTimings | None = None
    """(device, group size) to what is timed, on a GPU only."""
    native: Callable | None = None
    """What the `native` backend has of its own; None is what `torch` has."""

    def run(self, backend: str) -> Callable:
        """Find what runs with a backend."""
        if backend == "native":
            return self.native or self.torch
        return self.torch if backend == "torch" else self.triton
