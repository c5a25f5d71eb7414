"""Peak memory of a training step, from a run of it on tensors without memory.

The trainer's own steps run on tensors that have shapes and storages only; see `trace.py`. Whatever
they allocate and release goes, in order, through a model of the CUDA allocator, or on a CPU through
a sum. Nothing here depends on the parts of a model.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any, NamedTuple

import torch
from torch import Tensor

from arbcli.config.training import TrainConfig
from arbcli.data.files import has_documents
from arbcli.data.text import Text, Texts
from arbcli.inspect.allocator import Allocator
from arbcli.inspect.trace import META, Storages, calling_function, no_compiler, no_memory
from arbcli.kernels.runtime.arguments import dtype_name
from arbcli.kernels.runtime.backend import compile_for, gpu_of
from arbcli.kernels.runtime.device import COMPUTE, deterministic
from arbcli.training.parallel.group import Group, PendingTensor
from arbcli.training.teacher import read_teacher
from arbcli.training.trainer import Trainer

ASSUMED_GPU = ((9, 0), 132)
"""Compute capability and multiprocessors of an H200, assumed if there is no GPU."""
WARM_STEPS = 2
"""Steps that are not captured; every later one allocates the same as the second."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PeakTensor:
    """Tensors of one origin, dtype and shape that are alive at the peak, except the state."""

    part: str
    """`saved`, `transient` or `constant`: see `PeakReport`."""
    made_in: str
    """Function of this package that allocates them; `autograd` if there is none."""
    tensor: str
    """Dtype and shape; empty for workspaces."""
    number: int
    bytes: int
    """Total size in bytes, in the allocator's blocks."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PeakReport:
    """Peak memory of a training step, and its largest tensors."""

    device: str
    """`cuda`, `mps` or `cpu`."""
    batch: int
    """Number of windows per micro-batch."""
    compute_bytes: int
    """Bytes per element of activations."""
    captured: bool
    """Whether the run's steps are captured as one CUDA graph, as in `arb train`."""
    state_bytes: int
    """Memory that is alive before the first step."""
    saved_bytes: int
    """Memory allocated in the forward pass that is still alive at the peak."""
    transient_bytes: int
    """Memory allocated after the forward pass: gradients, and tensors of the shape of a weight."""
    constant_bytes: int
    """Memory that steps leave alive: rotary table, keys, workspaces of the matrix library."""
    peak_bytes: int
    """Sum of state, saved, transient and constant memory; on CUDA in the allocator's blocks."""
    reserved_bytes: int
    """Memory that the CUDA allocator reserves, gaps included; on a CPU `peak_bytes`."""
    evaluated_bytes: int
    """`reserved_bytes` after an evaluation, which allocates outside the pool of captured steps."""
    at: str
    """Function whose allocation reaches the peak; with the operation if it is `autograd`."""
    live: tuple[PeakTensor, ...]
    """Tensors alive at the peak except the state, the largest first."""


CUBLAS_BYTES = 8 * 4096 * 2**10
"""Workspace that `CUBLAS_WORKSPACE_CONFIG` asks for, as `arbcli.base.environment` sets it."""
CUBLASLT_BYTES = 2**20
"""Default workspace of cuBLASLt in torch."""
WORKSPACES = {
    torch.ops.aten.mm.default: CUBLAS_BYTES,
    torch.ops.aten.bmm.default: CUBLAS_BYTES,
    torch.ops.aten._scaled_mm.default: CUBLASLT_BYTES,
}
"""Size in bytes of the workspace that a library keeps after an operation, by operation."""


def _is_mask(index: Tensor | None) -> bool:
    return index is not None and index.is_meta and index.dtype == torch.bool


class _ByteCounter:
    """Memory of a CPU, of which only the size is counted."""

    def __init__(self) -> None:
        self.allocated = self.reserved = self.peak_reserved = 0

    def allocate(self, size: int) -> int:
        self.allocated += size
        self.reserved = self.peak_reserved = max(self.reserved, self.allocated)
        return size

    def release(self, size: int) -> None:
        self.allocated -= size


class _Trace(Storages):
    """Allocates every storage in a simulated memory, and records the composition of the peak."""

    def __init__(self, device: torch.device) -> None:
        super().__init__(META)
        self.uses_gpu, self.uses_cpu = device.type == "cuda", device.type == "cpu"
        self.memory: Allocator | _ByteCounter = Allocator() if self.uses_gpu else _ByteCounter()
        self.parts = dict.fromkeys(("state", "saved", "transient", "constant"), 0)
        self.peak, self.peak_parts, self.at = 0, self.parts, ""
        self._workspaces: dict[tuple[int, bool, bool], _Allocation] = {}
        self._allocations_at_peak: list[_Allocation] = []
        self.loading = True

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Run an operation as the device would, which may need more than its results."""
        if func is torch.ops.aten._local_scalar_dense.default and args[0].is_meta:
            return torch.ones((), dtype=args[0].dtype, device="cpu").item()  # finite, and not 0
        if func is torch.ops.aten.index.Tensor and any(_is_mask(index) for index in args[1]):
            func, args = torch.ops.aten.clone.default, args[:1]  # as if all rows were chosen
        if not self.uses_gpu:
            kwargs = kwargs or {}
            copies_home = kwargs.get("device") == torch.device("cpu")
            if self.uses_cpu and copies_home:
                kwargs = kwargs | {"device": META}
            elif copies_home and func is torch.ops.aten._to_copy.default and args[0].is_meta:
                dtype = kwargs.get("dtype") or args[0].dtype  # numbers that the host computes with
                return torch.ones(args[0].shape, dtype=dtype, device="cpu")
            return super().__torch_dispatch__(func, types, args, kwargs)
        result = super().__torch_dispatch__(func, types, args, kwargs)
        if func in WORKSPACES and result.is_meta:
            # one for each thread that has had a product, and others where steps are captured
            captured = isinstance(self.memory, Allocator) and self.memory.is_capturing
            workspace = (WORKSPACES[func], self._runs_backward, captured)
            if workspace not in self._workspaces:
                self._workspaces[workspace] = self._allocate(WORKSPACES[func], func, "constant")
        return result

    def on_alloc(self, tensor: Tensor, size: int, op: Any) -> "_Allocation":
        """Allocate memory for a storage."""
        shape = "x".join(map(str, tensor.shape))
        return self._allocate(size, op, tensor=f"{dtype_name(tensor.dtype)} {shape}")

    def on_free(self, storage: "_Allocation") -> None:
        """Free the memory of a storage."""
        self.memory.release(storage.block)
        self.parts[storage.part] -= storage.size

    def end_stage(self) -> None:
        """End the loading, or a step: storages that are newly alive are constant."""
        self.loading = False
        for key, allocation in self.alive.items():
            if allocation.part in ("saved", "transient"):
                self.parts[allocation.part] -= allocation.size
                self.parts["constant"] += allocation.size
                self.alive[key] = allocation._replace(part="constant")

    def live(self) -> tuple[PeakTensor, ...]:
        """List the tensors alive at the peak, besides the state."""
        groups: dict[tuple[str, str, str], list[int]] = {}
        for _, size, part, made_in, tensor in self._allocations_at_peak:
            if part != "state":
                groups.setdefault((part, made_in, tensor), []).append(size)
        rows = [
            PeakTensor(part=part, made_in=name, tensor=tensor, number=len(sizes), bytes=sum(sizes))
            for (part, name, tensor), sizes in groups.items()
        ]
        return tuple(sorted(rows, key=lambda row: -row.bytes))

    @property
    def _runs_backward(self) -> bool:
        """Whether autograd runs, which has a thread of its own for a GPU."""
        return torch._C._current_graph_task_id() >= 0

    def _allocate(
        self, size: int, op: Any, part: str | None = None, *, tensor: str = ""
    ) -> "_Allocation":
        part = part or (
            "state" if self.loading else "transient" if self._runs_backward else "saved"
        )
        before = self.memory.allocated
        block: Any = self.memory.allocate(size)
        size = self.memory.allocated - before
        self.parts[part] += size
        function = "" if self.loading else calling_function()
        allocation = _Allocation(block, size, part, function, tensor)
        if not self.loading and self.memory.allocated >= self.peak:
            self.peak, self.peak_parts = self.memory.allocated, self.parts.copy()
            others = *self.alive.values(), *self._workspaces.values()
            self._allocations_at_peak = [*others, allocation]
            self.at = f"{op} in {function}" if function == "autograd" else function
        return allocation


class _Allocation(NamedTuple):
    """An allocation."""

    block: Any
    """Handle that the memory takes back."""
    size: int
    part: str
    """Category: a key of `_Trace.parts`."""
    made_in: str
    tensor: str
    """Dtype and shape, or empty."""


class _PlaceholderText(Text):
    """Placeholder for a text, as a prediction only needs the shapes of batches."""

    def __init__(self, config: TrainConfig) -> None:
        super().__init__([])
        self.packs, self.context = has_documents(config.field), config.model.ctx

    def __len__(self) -> int:
        return 2**30

    def packed_batch(self, starts: Sequence[int]) -> tuple[Tensor, Tensor, Tensor]:
        """Return zeros of the shape of a batch."""
        shape = len(starts), self.context
        ids, targets, documents = torch.zeros(3, *shape, dtype=torch.int64, device="cpu")
        return ids, targets, documents

    def window_batch(self, starts: Sequence[int], length: int) -> Tensor:
        """Return zeros of the shape of a batch."""
        windows = torch.frombuffer(bytearray(len(starts) * length), dtype=torch.uint8)
        return windows.view(len(starts), length)


class _SimulatedGroup(Group):
    """A process group simulated in one process; messages of the others are uninitialised.

    It allocates the same memory as a real group, which is all that a prediction measures.
    """

    def send_to_owners(self, sent: Tensor, sizes: Sequence[int]) -> PendingTensor:
        """Allocate memory for the messages of all processes."""
        arrived = sent.new_empty(self.size, sizes[self.rank])
        return PendingTensor(arrived, SimpleNamespace(wait=lambda: None), sent)

    def broadcast(self, tensor: Tensor, owner: int) -> PendingTensor:
        """Return the tensor unchanged, without communication."""
        return PendingTensor(tensor)

    def gather(self, tensors: list[Tensor]) -> list[Tensor]:
        """Allocate memory for the tensors of all processes."""
        if not tensors:
            return tensors
        stacked = torch.stack(tensors)
        return [part for _ in range(self.size) for part in torch.empty_like(stacked)]

    def _reduce(self, tensor: Tensor, op: Any) -> Tensor:
        return tensor.clone()


def predict_peak(
    config: TrainConfig,
    *,
    captured: bool = False,
    rank: int = 0,
    size: int = 1,
    progress: Callable[[str], None] = lambda stage: None,
) -> PeakReport:
    """Predict the peak memory of a training step on the device of `config`.

    Args:
        config: configuration of a run with packed weights.
        captured: whether the step is captured after a few steps, as in `arb train` on a GPU.
        rank: rank of the process.
        size: number of processes of the run.
        progress: called with `step 1 of 3` before that step.
    """
    device = torch.device(config.device)
    group = _SimulatedGroup(rank, size) if size > 1 else None
    captured = captured and config.backend == "triton"
    trace, teacher = _Trace(device), read_teacher(config)
    with deterministic(), compile_for(*_gpu(device)), no_compiler(), trace, no_memory(device):
        text = _PlaceholderText(config)
        checkpoint = teacher and teacher.checkpoint
        trainer = Trainer(config, Texts(text, text, ""), group=group, teacher=checkpoint)
        trace.end_stage()
        for step in range(1, WARM_STEPS + 1):
            progress(f"step {step} of {WARM_STEPS + captured}")
            trainer.train_step()
            trace.end_stage()
        if captured:
            progress(f"step {WARM_STEPS + 1} of {WARM_STEPS + 1}")
            assert isinstance(trace.memory, Allocator), "steps of a GPU are captured"
            trace.memory.empty_cache()  # as `Trainer` does
            with trace.memory.capturing():
                trainer.train_step()
        parts = {f"{name}_bytes": size for name, size in trace.peak_parts.items()}
        peak, reserved, at, live = trace.peak, trace.memory.peak_reserved, trace.at, trace.live()
        trainer.evaluate(num_batches=1)
    return PeakReport(
        device=device.type,
        batch=config.batch,
        compute_bytes=COMPUTE[config.compute].itemsize,
        captured=captured,
        **parts,
        peak_bytes=peak,
        reserved_bytes=reserved,
        at=at,
        live=live,
        evaluated_bytes=trace.memory.peak_reserved,
    )


def _gpu(device: torch.device) -> tuple[tuple[int, int], int]:
    """Return capability and multiprocessors of the GPU, of an assumed GPU, or of no GPU."""
    if device.type != "cuda":
        return (0, 0), 1
    return gpu_of(device) if torch.cuda.is_available() else ASSUMED_GPU
