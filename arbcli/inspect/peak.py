"""The most memory that a training step holds at once, found by running it without memory.

The trainer's own steps run on tensors that have shapes and storages only; see `trace.py`. Whatever
they allocate and release goes, in order, through a model of the CUDA allocator, or on a CPU through
a sum. Nothing here knows what a model consists of.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from arbcli.config.training import TrainConfig
from arbcli.data import Texts
from arbcli.device import deterministic
from arbcli.inspect.allocator import Allocator, round_up
from arbcli.inspect.trace import META, Storages, calling_function, without_memory
from arbcli.kernels.runtime.backend import compile_for
from arbcli.train.trainer import Trainer

ASSUMED_GPU = ((9, 0), 132)
"""Compute capability and processors where there is no GPU to ask: those of an H200."""
WARM_STEPS = 2
"""Steps that are not captured; every later one allocates what the second did."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PeakReport:
    """The most memory that a training step holds at once."""

    device: str
    """`cuda` or `cpu`."""
    batch: int
    """Windows of a micro-batch."""
    compute_bytes: int
    """Of an activation."""
    captured: bool
    """Whether it is that of a run whose steps are one CUDA graph, as `arb train` does them."""
    state_bytes: int
    """What is alive before the first step."""
    saved_bytes: int
    """What the forward made and is still alive at the peak."""
    transient_bytes: int
    """What came after it: gradients, and tensors of the shape of a weight."""
    constant_bytes: int
    """What steps leave alive: rotary table, keys, workspaces of the matrix library."""
    peak_bytes: int
    """The sum of these four; on CUDA in the allocator's blocks."""
    reserved_bytes: int
    """What the CUDA allocator takes from the device for it, gaps included; on a CPU the same."""
    at: str
    """What the model does at the peak."""


CUBLAS_WORKSPACE = 8 * 4096 * 2**10
"""What `CUBLAS_WORKSPACE_CONFIG` asks for, as `arbcli.environment` sets it."""
PRODUCTS = {
    torch.ops.aten.mm.default,
    torch.ops.aten.bmm.default,
    torch.ops.aten.addmm.default,
    torch.ops.aten.baddbmm.default,
}
"""Operations that cuBLAS computes."""


def _flash_backward(args: tuple, processors: int) -> tuple[int, int]:
    """Find the float32 sums of a deterministic backward: softmax_d, and dq in several parts."""
    batch, heads, length, width = args[1].shape
    rows, padded = batch * heads * round_up(length, 128), round_up(width, 32)
    parts = -(-processors // (batch * heads))
    return 4 * rows, 4 * parts * rows * padded


def _sort(args: tuple, _processors: int) -> tuple[int, ...]:
    """Find the numbers of what is sorted, and for many the second buffers of a radix sort."""
    number = args[0].numel()
    return (8 * number, 16 * number + 18_943) if number > 4096 else (8 * number,)


HIDDEN: dict[Any, Callable[[tuple, int], tuple[int, ...]]] = {
    torch.ops.aten._scaled_dot_product_flash_attention_backward.default: _flash_backward,
    torch.ops.aten.sort.stable: _sort,
}
"""What operations of torch allocate on a GPU, and release before they return, by (arguments,
processors): bytes in their order, after the results. What is not worth a line: sums of few numbers
in two steps, 512 bytes each."""


class _Total:
    """A memory that only counts, as that of a CPU is."""

    def __init__(self) -> None:
        self.allocated = self.reserved = self.peak_reserved = 0

    def allocate(self, size: int) -> int:
        self.allocated += size
        self.reserved = self.peak_reserved = max(self.reserved, self.allocated)
        return size

    def release(self, size: int) -> None:
        self.allocated -= size


class _Trace(Storages):
    """Takes every storage from a memory, and remembers what the most was made of."""

    def __init__(self, memory: Allocator | _Total, processors: int) -> None:
        super().__init__(META)
        self.memory, self.processors = memory, processors
        self.parts = dict.fromkeys(("state", "saved", "transient", "constant"), 0)
        self.peak, self.peak_parts, self.at = 0, self.parts, ""
        self.loading = True
        self._blocks: dict[int, tuple[Any, int, str]] = {}
        self._workspaces: set[tuple[bool, bool]] = set()

    def _accumulates(self, total: Any, other: Any) -> bool:
        """Whether autograd adds up gradients in place, as it does unless a mode looks on.

        A view it leaves alone, as its base might still be in use.
        """
        if (
            not self.in_backward
            or not isinstance(other, Tensor)
            or calling_function() != "autograd"
        ):
            return False
        return not total._is_view() and total.shape == other.shape and total.dtype == other.dtype

    @property
    def on_gpu(self) -> bool:
        """Whether memory is that of a GPU."""
        return isinstance(self.memory, Allocator)

    @property
    def in_backward(self) -> bool:
        """Whether autograd runs, which has a thread of its own for a GPU."""
        return torch._C._current_graph_task_id() >= 0

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Run an operation as the device would, which may need more than its results."""
        if func is torch.ops.aten.add.Tensor and self.on_gpu and self._accumulates(*args):
            func = torch.ops.aten.add_.Tensor
        result = super().__torch_dispatch__(func, types, args, kwargs)
        if func in PRODUCTS and self.on_gpu and result.is_meta:
            # torch keeps one for each thread, and another one for each where steps are captured
            where = (self.in_backward, self.memory.is_capturing)
            if where not in self._workspaces:
                self._workspaces.add(where)
                self._allocate(CUBLAS_WORKSPACE, "constant", func)
        if func in HIDDEN and self.on_gpu:
            sizes = HIDDEN[func](args, self.processors)
            taken = [self._allocate(size, "transient", func) for size in sizes]
            for block, size, part in reversed(taken):
                self.memory.release(block)
                self.parts[part] -= size
        return result

    def came(self, key: int, tensor: Tensor, size: int, op: Any) -> None:
        part = "transient" if self.in_backward else "saved"
        self._blocks[key] = self._allocate(size, "state" if self.loading else part, op)

    def went(self, key: int) -> None:
        block, size, part = self._blocks.pop(key)
        self.memory.release(block)
        self.parts[part] -= size

    def end_step(self) -> None:
        """Take what is alive now and was not before the steps for constants."""
        self.loading = False
        for key, (block, size, part) in self._blocks.items():
            if part in ("saved", "transient"):
                self.parts[part] -= size
                self.parts["constant"] += size
                self._blocks[key] = block, size, "constant"

    def _allocate(self, size: int, part: str, op: Any) -> tuple[Any, int, str]:
        before = self.memory.allocated
        block = self.memory.allocate(size)
        size = self.memory.allocated - before
        self.parts[part] += size
        if not self.loading and self.memory.allocated >= self.peak:
            self.peak, self.peak_parts = self.memory.allocated, self.parts.copy()
            self.at = f"{op} in {calling_function()}"
        return block, size, part


class _AnyText:
    """Text for who asks for its shape only."""

    def __len__(self) -> int:
        return 2**30

    def window_batch(self, starts: list[int], length: int) -> Tensor:
        windows = torch.frombuffer(bytearray(len(starts) * length), dtype=torch.uint8)
        return windows.view(len(starts), length)


def predict_peak(config: TrainConfig, *, captured: bool = False) -> PeakReport:
    """Predict the most memory that a training step holds at once where `config` says it runs.

    Args:
        config: of a run with packed weights.
        captured: whether it is captured after a few steps, as `arb train` does it on a GPU.
    """
    device = torch.device(config.device)
    on_gpu = device.type == "cuda"
    capability, processors = _gpu(device)
    trace = _Trace(Allocator() if on_gpu else _Total(), processors)
    with deterministic(), compile_for(capability, processors), trace, without_memory(device):
        trainer = Trainer(config, Texts(_AnyText(), _AnyText(), ""))
        trace.end_step()
        for _ in range(WARM_STEPS):
            trainer.train_step()
            trace.end_step()
        if captured and on_gpu and config.backend == "triton":
            trace.memory.empty_cache()
            with trace.memory.capturing():
                trainer.train_step()
    return trace


def _gpu(device: torch.device) -> tuple[tuple[int, int], int]:
    if device.type == "cpu":
        return (0, 0), 0
    if not torch.cuda.is_available():
        return ASSUMED_GPU
    properties = torch.cuda.get_device_properties(device)
    return (properties.major, properties.minor), properties.multi_processor_count
