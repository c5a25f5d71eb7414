"""Every float tensor of a training step: its module, stage and bytes, and whether it survives.

Each is the result of a torch operation, or is allocated by a launcher for a kernel; registers and
stack variables of loops in C are not tensors.
"""

import dataclasses
from collections import Counter
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.nn import Module
from torch.utils._pytree import tree_leaves

from arbcli.inspect.trace import Storages, calling_function
from arbcli.kernels.runtime.arguments import dtype_name

OUTSIDE = "-"
"""Module name of computations outside the model."""


@dataclass(frozen=True, slots=True, kw_only=True)
class FloatTensor:
    """A float tensor of a step, or several that are alike."""

    module: str
    """Innermost module whose forward runs, or whose output received the last gradient."""
    stage: str
    """`forward`, `backward` (which updates the weights too), or `end` after both."""
    made_in: str
    """Function of this package that allocated the tensors; `autograd` if there is none."""
    dtype: str
    shape: tuple[int, ...]
    bytes: int
    """Size of each tensor in bytes."""
    survives: bool
    """Whether the tensors are alive after the step."""
    count: int


class FloatTensors(Storages):
    """Records every float tensor that a step of a model allocates while the mode is on."""

    def __init__(self, device: torch.device, model: Module) -> None:
        super().__init__(device)
        self.stage, self._model, self._within = "forward", model, [OUTSIDE]
        self._kinds: Counter[FloatTensor] = Counter()
        """All that were allocated, in the order of the first of each kind."""

    @contextmanager
    def watching(self) -> Iterator["FloatTensors"]:
        """Turn the mode on, and follow which module computes."""
        with ExitStack() as hooks:
            for name, module in self._model.named_modules():
                if name:
                    enter = partial(self._enter, name)
                    hooks.enter_context(module.register_forward_pre_hook(enter))
                    hooks.enter_context(module.register_forward_hook(self._leave))
            with self:
                yield self

    def reached(self, stage: str) -> None:
        """Begin the stage after `stage`, which `Trainer.train_step` reports as reached."""
        self.stage = {"forward": "backward", "backward": "end"}[stage]
        self._within = [OUTSIDE]

    def report(self) -> tuple[FloatTensor, ...]:
        """List the float tensors in the order of their allocation; those alive now survive."""
        alive = Counter(self.alive.values())
        kinds = (
            dataclasses.replace(kind, survives=survives, count=count)
            for kind, allocated in self._kinds.items()
            for survives, count in ((False, allocated - alive[kind]), (True, alive[kind]))
        )
        return tuple(kind for kind in kinds if kind.count)

    def on_alloc(self, tensor: Tensor, size: int, op: Any) -> FloatTensor | None:
        """Record a storage of floats."""
        if not (tensor.is_floating_point() or tensor.is_complex()):
            return None
        kind = FloatTensor(
            module=self._within[-1],
            stage=self.stage,
            made_in=calling_function(),
            dtype=dtype_name(tensor.dtype),
            shape=tuple(tensor.shape),
            bytes=size,
            survives=True,
            count=1,
        )
        self._kinds[kind] += 1
        return kind

    def _enter(self, name: str, _module: Module, _inputs: Any) -> None:
        if self.stage == "end":  # the next micro-batch
            self.stage = "forward"
        self._within.append(name)

    def _leave(self, _module: Module, _inputs: Any, outputs: Any) -> None:
        name = self._within.pop()

        def on_gradient(gradient: Tensor) -> None:
            self._within = [OUTSIDE, name]

        for output in tree_leaves(outputs):
            # a module may return the output of an inner or an earlier module
            is_new_output = isinstance(output, Tensor) and not output._backward_hooks
            if is_new_output and output.requires_grad and self.stage == "forward":
                output.register_hook(on_gradient)
