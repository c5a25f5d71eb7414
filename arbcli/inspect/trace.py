"""Tracking of live tensors, in real runs and in runs on meta tensors."""

import gc
import math
import sys
import weakref
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, nullcontext
from itertools import compress
from types import FrameType, FunctionType
from typing import Any

import torch
from torch import Tensor
from torch.autograd import Function
from torch.nn import Parameter, functional
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from arbcli.families.experts.kernels import grouped_matmul
from arbcli.kernels.runtime._triton import replaced_launches
from arbcli.kernels.runtime.backend import row_chunks
from arbcli.model import packed
from arbcli.model.layers.rotary import fresh_tables

META = torch.device("meta")
MARK = "__dynamo_disable"
"""Attribute of a function by which torch finds the one that its compiler leaves alone."""


def held_tensors() -> Iterator[Tensor]:
    """Yield the tensors that Python holds, by exact type, as other checks evaluate lazy objects."""
    objects = gc.get_objects()
    return compress(objects, map({Tensor, Parameter}.__contains__, map(type, objects)))


class Storages(TorchDispatchMode):
    """Observes allocations and frees of storages of one device, in order, while the mode is on."""

    def __init__(self, device: torch.device) -> None:
        super().__init__()
        self.device = device
        self.alive: dict[int, Any] = {}
        """Results of `on_alloc` for counted storages that are alive, by id of the storage."""
        self._references: dict[int, weakref.ref] = {}

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        """Return False, as True would import torch's compiler, which takes 2 s."""
        return False

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
        """Record tensors that Python holds though no operation returned them; count them or not."""
        for tensor in held_tensors():
            if tensor.layout is torch.strided:
                self._note(tensor, None, count=count)

    def on_alloc(self, tensor: Tensor, size: int, op: Any) -> Any:
        """Handle a new storage of `size` bytes, whose first tensor `op` returned; describe it."""
        raise NotImplementedError

    def on_free(self, storage: Any) -> None:
        """Handle the end of a storage, as `on_alloc` described it."""

    def _note(self, tensor: Tensor, op: Any, *, count: bool = True) -> None:
        storage = tensor.untyped_storage()
        key, size = id(storage), storage.nbytes()
        if key in self._references or size == 0 or storage.device.type != self.device.type:
            return

        def forget(_: weakref.ref) -> None:
            del self._references[key]
            if count:
                self.on_free(self.alive.pop(key))

        self._references[key] = weakref.ref(storage, forget)
        if count:
            self.alive[key] = self.on_alloc(tensor, size, op)


@contextmanager
def no_compiler() -> Iterator[None]:
    """Prevent torch from importing its compiler only to exclude functions from it, for a second.

    Torch marks functions of `torch._refs` so at their first call, which many operations on `meta`
    make. Here they are marked as they are; nothing may be compiled inside.
    """
    marked = []
    if "torch._dynamo" not in sys.modules:
        code = torch._disable_dynamo(lambda: None).__code__
        wrappers = [
            function
            for function in gc.get_objects()
            if type(function) is FunctionType and function.__code__ is code
        ]
        # what a wrapper calls is in its closure; torch replaces the `__wrapped__` of some
        for cell in (cell for wrapper in wrappers for cell in wrapper.__closure__ or ()):
            function = cell.cell_contents
            if isinstance(function, FunctionType) and MARK not in vars(function):
                setattr(function, MARK, function)
                marked.append(function)
    try:
        yield
    finally:
        for function in marked:
            delattr(function, MARK)


class LiveTensors(Storages):
    """Counts the bytes of one device's storages that are allocated while the mode is on."""

    def __init__(self, device: torch.device) -> None:
        super().__init__(device)
        self.bytes = self.stage_peak = 0

    def start_stage(self) -> None:
        """Measure `stage_peak` anew."""
        self.stage_peak = self.bytes

    def on_alloc(self, tensor: Tensor, size: int, op: Any) -> int:
        """Count a storage."""
        self.bytes += size
        self.stage_peak = max(self.stage_peak, self.bytes)
        return size

    def on_free(self, storage: int) -> None:
        """Stop counting a storage of so many bytes."""
        self.bytes -= storage


def calling_function() -> str:
    """Name the innermost running function of this package, outside this folder.

    torch runs a backward on the thread that called it.
    """
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        name, function = frame.f_globals.get("__name__", ""), frame.f_code.co_name
        if name == "torch._tensor" and function == "backward":
            break
        if name.startswith("arbcli.") and not name.startswith("arbcli.inspect."):
            return f"{name.removeprefix('arbcli.')}.{function}"
        frame = frame.f_back
    return "autograd"


@contextmanager
def no_memory(device: torch.device) -> Iterator[None]:
    """Run code for `device` within the block on tensors with shapes and storages, but no memory.

    They are torch's own `meta` tensors, on which tensors for `device` are created. Kernels
    are not launched; allocations of their launchers are seen. `FakeTensorMode` is made for this,
    but its tensors of a GPU have no backward where torch was built without CUDA.

    A few functions of torch are replaced meanwhile, for all threads: a mode would not reach the
    backward. They are those that distinguish a `meta` tensor from one of the device (`_answers`),
    or that compute in another way there (`_substitutes`).
    """
    default = device if device.type == "cpu" else nullcontext()
    with ExitStack() as stack:
        for owner, name, function in (*_answers(device), *_substitutes(device)):
            stack.callback(setattr, owner, name, getattr(owner, name))
            setattr(owner, name, function)
        stack.enter_context(fresh_tables())
        stack.enter_context(replaced_launches(_launch_nothing))
        stack.enter_context(_OnMeta(device))
        stack.enter_context(default)
        yield


def _launch_nothing(_kernel: Any, _grid: Any, *_: Any, **__: Any) -> None: ...


class _OnMeta(TorchFunctionMode):
    """Creates tensors for a device as `meta` tensors."""

    def __init__(self, device: torch.device) -> None:
        super().__init__()
        self.device = device

    def __torch_function__(
        self, func: Any, types: Any, args: tuple = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Call a function with `meta` instead of the device."""
        kwargs = kwargs or {}
        if func is torch.device:
            return func(*args, **kwargs)
        args = tuple(map(self._moved, args))
        if func is torch.tensor and self._moved(kwargs.get("device")) == META:
            return func(*args, **(kwargs | {"device": "cpu"})).to(META)  # so that it is seen
        return func(*args, **{name: self._moved(value) for name, value in kwargs.items()})

    def _moved(self, value: Any) -> Any:
        if isinstance(value, torch.device):
            return META if value.type == self.device.type else value
        return META if isinstance(value, str) and value == self.device.type else value


def _answers(device: torch.device) -> Iterator[tuple[Any, str, Any]]:
    """Yield replaced attributes of tensors: (class, name, replacement)."""
    is_cuda: Any = Tensor.is_cuda
    is_mps: Any = Tensor.is_mps
    data_ptr, pin_memory = Tensor.data_ptr, Tensor.pin_memory

    def has_cuda(tensor: Tensor) -> bool:
        return device.type == "cuda" if tensor.is_meta else is_cuda.__get__(tensor)

    def has_mps(tensor: Tensor) -> bool:
        return device.type == "mps" if tensor.is_meta else is_mps.__get__(tensor)

    def address(tensor: Tensor) -> int:
        if not tensor.is_meta:
            return data_ptr(tensor)
        return 2**20 + int(tensor.storage_offset()) * tensor.itemsize  # aligned, as allocations are

    def pinned(tensor: Tensor) -> Tensor:
        return pin_memory(tensor) if torch.cuda.is_available() else tensor

    yield Tensor, "is_cuda", property(has_cuda)
    yield Tensor, "is_mps", property(has_mps)
    yield Tensor, "data_ptr", address
    yield Tensor, "pin_memory", pinned


def _substitutes(device: torch.device) -> Iterator[tuple[Any, str, Any]]:
    """Yield replacements, as `_answers`, of functions that allocate otherwise than on `meta`."""
    attention, rms_norm = functional.scaled_dot_product_attention, functional.rms_norm
    synchronize = torch.cuda.synchronize

    def attend(q: Tensor, k: Tensor, v: Tensor, **options: Any) -> Tensor:
        if not q.is_meta:
            return attention(q, k, v, **options)
        mask = options.pop("attn_mask", None)
        if mask is not None:  # torch converts masks to floats, too
            bias = torch.zeros_like(mask, dtype=q.dtype)
            options["attn_mask"] = bias.masked_fill_(~mask, -math.inf)
        if device.type == "cpu":
            return torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(q, k, v, **options)[0]
        if q.dtype == torch.float32 or mask is not None:
            return torch.ops.aten._scaled_dot_product_attention_math(q, k, v, **options)[0]
        width = q.shape[-1]
        if width % 8:
            q, k, v = (functional.pad(part, (0, -width % 8)) for part in (q, k, v))
        y, *_ = torch.ops.aten._scaled_dot_product_flash_attention(q, k, v, **options)
        return y[..., :width]

    def normalise(x: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        simulates_gpu = x.is_meta and device.type == "cuda"
        return _RmsNorm.apply(x) if simulates_gpu else rms_norm(x, *args, **kwargs)

    def some_chunks(*args: Any) -> list[slice]:
        chunks = [*row_chunks(*args)]  # all of them are alike, and each takes its time
        return chunks[:2] + chunks[2:][-2:]

    def even_ranges(bounds: Tensor, slots: int) -> Iterator[tuple[int, slice]]:
        share = -(-slots // (len(bounds) - 1))  # as the balance of the experts would have it
        for expert in range(len(bounds) - 1):
            yield expert, slice(expert * share, min((expert + 1) * share, slots))

    def wait(of: Any = None) -> None:
        if torch.cuda.is_available() and of != META:  # no kernel runs on `meta`
            synchronize(of)

    yield torch.cuda, "synchronize", wait
    yield packed, "row_chunks", some_chunks
    yield grouped_matmul, "_ranges", even_ranges
    yield functional, "scaled_dot_product_attention", attend
    yield functional, "rms_norm", normalise


class _RmsNorm(Function):
    """Tensors that torch's normalisation of the last dimension makes on a GPU, and saves."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        y = torch.empty_like(x)
        ctx.save_for_backward(x, x.new_empty(x.shape[:-1], dtype=torch.float32))
        return y

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        grad = grad.contiguous()
        return torch.empty_like(ctx.saved_tensors[0])
