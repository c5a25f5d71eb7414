"""Which tensors are alive: counted in real runs, and in runs on tensors that have no memory."""

import gc
import heapq
import sys
import weakref
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.autograd import Function
from torch.nn import Parameter, functional
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from arbcli.kernels.runtime.launches import replaced_launches
from arbcli.model.layers.rotary import fresh_tables

NUM_LARGEST = 3
"""Tensors that a report names."""
META = torch.device("meta")


@dataclass(frozen=True, slots=True, kw_only=True)
class LiveTensor:
    """A tensor that was alive, the first one seen of its storage."""

    shape: tuple[int, ...]
    dtype: str
    bytes: int
    op: str
    """The operation that returned it; `None` where Python held it, and none was seen."""
    made_in: str
    """The function of this package that called the operation; `autograd` where none did."""


class Storages(TorchDispatchMode):
    """Sees the storages of one device come to life and die while the mode is on, in their order."""

    def __init__(self, device: torch.device) -> None:
        super().__init__()
        self.device = device
        self._alive: dict[int, weakref.ref] = {}

    def __enter__(self) -> "Storages":
        self.find(count=False)
        return super().__enter__()

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Run an operation, and note the storages that it returns."""
        result = func(*args, **(kwargs or {}))
        for leaf in tree_leaves(result):
            if isinstance(leaf, Tensor):
                self._note(leaf, func)
        return result

    def find(self, *, count: bool = True) -> None:
        """Note what Python holds though no operation returned it, and count it or not."""
        for thing in gc.get_objects():
            if type(thing) in (Tensor, Parameter) and thing.layout is torch.strided:
                self._note(thing, None, count=count)

    def came(self, key: int, tensor: Tensor, size: int, op: Any) -> None:
        """Is told of a new storage of `size` bytes, the first tensor of it, and what returned it."""
        raise NotImplementedError

    def went(self, key: int) -> None:
        """Is told that a storage has died."""
        raise NotImplementedError

    def _note(self, tensor: Tensor, op: Any, *, count: bool = True) -> None:
        storage = tensor.untyped_storage()
        key, size = id(storage), storage.nbytes()
        if key in self._alive or size == 0 or storage.device.type != self.device.type:
            return

        def forget(_: weakref.ref) -> None:
            del self._alive[key]
            if count:
                self.went(key)

        self._alive[key] = weakref.ref(storage, forget)
        if count:
            self.came(key, tensor, size, op)


class LiveTensors(Storages):
    """Counts the bytes of one device's storages that come to life while the mode is on."""

    def __init__(self, device: torch.device) -> None:
        super().__init__(device)
        self.bytes = self.stage_peak = self.peak = 0
        self.at_peak: list[LiveTensor] = []
        self._counted: dict[int, LiveTensor] = {}
        self._state: set[int] = set()

    def settle(self) -> None:
        """Take what is alive for the state; what comes later is transient, or derived from it."""
        self._state = set(self._counted)
        self.peak = self.bytes

    def start_stage(self) -> None:
        """Measure `stage_peak` anew."""
        self.stage_peak = self.bytes

    def since_settling(self) -> list[LiveTensor]:
        """List what has come since, and is alive, the largest first."""
        return sorted(self._transient(), key=lambda tensor: -tensor.bytes)

    def came(self, key: int, tensor: Tensor, size: int, op: Any) -> None:
        """Count a storage."""
        self._counted[key] = LiveTensor(
            shape=tuple(tensor.shape),
            dtype=str(tensor.dtype).removeprefix("torch."),
            bytes=size,
            op=str(op),
            made_in=calling_function() if op else "unknown",
        )
        self.bytes += size
        self.stage_peak = max(self.stage_peak, self.bytes)
        if self._state and self.bytes > self.peak:
            self.peak = self.bytes
            largest = heapq.nlargest(NUM_LARGEST, self._transient(), key=lambda noted: noted.bytes)
            self.at_peak = largest

    def went(self, key: int) -> None:
        """Strike a storage off."""
        self.bytes -= self._counted.pop(key).bytes
        self._state.discard(key)

    def _transient(self) -> list[LiveTensor]:
        # of a copy, as the garbage collector may run at any time, and what dies is struck off
        return [noted for key, noted in self._counted.copy().items() if key not in self._state]


def calling_function() -> str:
    """Name the innermost function of this package, but for this folder, that is being run.

    A backward is run by torch, whoever asked for it.
    """
    frame = sys._getframe(1)
    while frame is not None:
        name, function = frame.f_globals.get("__name__", ""), frame.f_code.co_name
        if name == "torch._tensor" and function == "backward":
            break
        if name.startswith("arbcli.") and not name.startswith("arbcli.inspect."):
            return f"{name.removeprefix('arbcli.')}.{function}"
        frame = frame.f_back
    return "autograd"


@contextmanager
def without_memory(device: torch.device) -> Iterator[None]:
    """Run what would run on `device` on tensors that have shapes and storages, but no memory.

    Kernels are not launched; what their launchers allocate is seen.
    """
    default = device if device.type == "cpu" else nullcontext()
    with fresh_tables(), replaced_launches(_launch_nothing), _Pretence(device), default:
        yield


def _launch_nothing(_kernel: Any, _grid: Any, *_: Any, **__: Any) -> None: ...


class _Pretence(TorchFunctionMode):
    """Puts what is asked for on one device on torch's `meta` device, and says it were there.

    torch has `FakeTensorMode` for this, but its tensors of a GPU have no backward where torch was
    built without CUDA. Where torch computes the same in another way on `meta`, that is put right
    here: see `_attention` and `_rms_norm`.
    """

    def __init__(self, device: torch.device) -> None:
        super().__init__()
        self.device = device

    def __torch_function__(
        self, func: Any, types: Any, args: tuple = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Answer for the device, or call the function on `meta`."""
        kwargs = kwargs or {}
        if func is Tensor.device.__get__:
            real = func(*args)
            return self.device if real == META else real
        if func is Tensor.is_cuda.__get__:
            return args[0].is_meta and self.device.type == "cuda"
        if func is Tensor.data_ptr:  # aligned like an allocation, and not null
            return 2**20 + args[0].storage_offset() * args[0].itemsize
        if func is Tensor.pin_memory:
            return args[0]
        if func is functional.scaled_dot_product_attention and args[0].is_meta:
            return self._attention(*args, **kwargs)
        if func is functional.rms_norm and args[0].is_meta and self.device.type == "cuda":
            return _RmsNorm.apply(args[0])
        if func is torch.device:
            return func(*args, **kwargs)
        args = tuple(map(self._moved, args))
        return func(*args, **{name: self._moved(value) for name, value in kwargs.items()})

    def _attention(self, *args: Tensor, **kwargs: Any) -> Tensor:
        """Attend as the device would: flash attention, but for float32 on a GPU."""
        query, *others = args
        kwargs.pop("attn_mask", None)
        causal = {"dropout_p": 0.0, "is_causal": kwargs.pop("is_causal"), **kwargs}
        if self.device.type == "cpu":
            attend = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
            return attend(query, *others, **causal)[0]
        if query.dtype == torch.float32:
            return torch.ops.aten._scaled_dot_product_attention_math(query, *others, **causal)[0]
        width = query.shape[-1]
        padded = [functional.pad(part, (0, -width % 8)) if width % 8 else part for part in args]
        y = torch.ops.aten._scaled_dot_product_flash_attention(*padded, **causal)[0]
        return y[..., :width]

    def _moved(self, value: Any) -> Any:
        """Turn the device, or its name, into `meta`."""
        if isinstance(value, torch.device):
            return META if value.type == self.device.type else value
        return META if isinstance(value, str) and value == self.device.type else value



class _RmsNorm(Function):
    """What torch's own normalisation of the last dimension makes on a GPU, and keeps."""

    @staticmethod
    def forward(ctx, x: Tensor) -> Tensor:
        ctx.save_for_backward(x, x.new_empty(x.shape[:-1], dtype=torch.float32))
        return torch.empty_like(x)

    @staticmethod
    def backward(ctx, grad: Tensor) -> Tensor:
        grad = grad.contiguous()
        return torch.empty_like(ctx.saved_tensors[0])
