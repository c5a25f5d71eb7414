"""The optimizer of integer weights, which consumes gradients in the backward."""

import math
import warnings
from collections.abc import Callable
from contextlib import nullcontext
from functools import cache
from typing import Any, SupportsFloat

import torch
from torch import Tensor, nn
from torch.autograd import Variable
from torch.nn.modules.module import register_module_module_registration_hook
from torch.optim.optimizer import register_optimizer_step_pre_hook
from torch.optim.swa_utils import AveragedModel

from arbcli.base.errors import ArbError
from arbcli.kernels.rows.weighted_rows import TouchedRows
from arbcli.kernels.update.sign_gradient import SignGradient
from arbcli.model.packed import TernaryTensor
from arbcli.model.rules import LR_OF_TUNING
from arbcli.model.updater import HELD_BYTES
from arbcli.nn.layers import IntegerModule
from arbcli.nn.updater import ModuleUpdater
from arbcli.nn.weights import Anchor, Anchored


class IntegerOptimizer(torch.optim.Optimizer):
    """Steps the integer weights of a model.

    Each backward consumes its gradients: it blends them into the moments, and the last one of a
    step also steps the weights. `step` ends the step. As gradients are normalised, factors of the
    loss and clipping have no effect.

    Args:
        model: a model with integer weights.
        lr: learning rate. Schedulers set it in `param_groups`, and a step reads it and the other
            settings in its first backward.
        accumulation: number of backward passes in a step.
        weight_decay: weight decay, multiplied by the learning rate.
        seed: seed of the stochastic rounding, 0..2**31-1.

    Raises:
        ArbError: the model has no integer weights, a number is out of range, or the model is
            trained in several processes.
    """

    takes_signs = False
    """Whether gradients may be passed as signs: see `Updater`."""
    is_set = False
    """Whether `set_step` is called before the backward, as for captured steps."""

    def __init__(
        self,
        model: nn.Module,
        lr: float = LR_OF_TUNING,
        *,
        accumulation: int = 1,
        weight_decay: float = 0.0,
        seed: int = 0,
    ) -> None:
        self._weights = [part for part in model.modules() if isinstance(part, Anchored)]
        if not self._weights:
            raise ArbError(
                "the model has no integer weights", "convert it with `arbcli.to_integers`"
            )
        check_numbers(lr, accumulation, weight_decay, seed)
        settings = {"accumulation": accumulation, "weight_decay": weight_decay, "seed": seed}
        super().__init__([weight.anchor for weight in self._weights], {"lr": lr, **settings})
        self._updater: ModuleUpdater | None = None
        self._counters = {"nonfinite_steps": 0, "refused": 0}
        self.step_number = 0
        """Number of steps that were done, by `step` or by replays of a graph."""
        self._micro = 0
        self._runs_backward = False
        self._stepped: set[tuple[int, int]] = set()
        """Tensors with a gradient in this backward, by their addresses and first matrices."""
        self._blended: set[tuple[int, int]] = set()
        """Tensors with a gradient in this step, by the same keys."""
        self._unstepped: dict[int, TernaryTensor] = {}
        """Tensors whose moments have gradients of this step, and which did not step along them."""
        for weight in self._weights:
            weight.sink = self._consume
        guard_others()

    def __getstate__(self) -> dict[str, Any]:
        """Refuse copies: their weights would belong to another model."""
        raise ArbError(
            "the optimizer of integer weights cannot be copied or pickled",
            "save `optimizer.state_dict()` and `model.state_dict()`",
        )

    def _consume(
        self,
        tensor: TernaryTensor,
        grad: Tensor | SignGradient,
        where: "range | TouchedRows | None" = None,
    ) -> None:
        """Update a tensor from its gradient; the sink of all weights."""
        if not self._runs_backward:
            self._begin_backward()
        key = id(tensor), where.start if isinstance(where, range) else 0
        if key in self._stepped:
            raise ArbError(
                "integer weights have two gradients in a backward",
                "use `use_reentrant=False` for activation checkpointing, and call"
                " `optimizer.zero_grad()` after a backward that failed",
            )
        self._stepped.add(key)
        updater = self._updater_now
        late = self._micro > 1 and key not in self._blended
        self._blended.add(key)
        self._unstepped[id(tensor)] = tensor
        if updater.controls.last and not late:
            del self._unstepped[id(tensor)]
        with updater.late() if late else nullcontext():
            updater(tensor, grad, where)

    def _begin_backward(self) -> None:
        shared = torch.distributed.is_available() and torch.distributed.is_initialized()
        if shared and torch.distributed.get_world_size() > 1:
            raise ArbError(
                "`IntegerOptimizer` only trains in a single process",
                "use one GPU, or `arb train` for several",
            )
        if self._micro == 0 and not self.is_set:
            self.set_step()
        updater = self._updater_now
        if self._micro == updater.controls.accumulation:
            raise ArbError(
                f"this is backward {self._micro + 1} of a step, which has"
                f" `accumulation={updater.controls.accumulation}`",
                "call `optimizer.step()`, or pass the number of backward passes in a step as"
                " `accumulation`; use `use_reentrant=False` for activation checkpointing",
            )
        updater.begin_micro(self._micro)
        self._micro += 1
        self._runs_backward = True
        Variable._execution_engine.queue_callback(self._end_backward)

    def set_step(self) -> None:
        """Copy number, learning rate and settings of the step to the device.

        Raises:
            ArbError: the learning rate or the weight decay is not finite.
        """
        group, updater = self.param_groups[0], self._updater_now
        lr, weight_decay = float(group["lr"]), float(group["weight_decay"])
        if not (math.isfinite(lr) and math.isfinite(weight_decay)):
            raise ArbError(
                f"`lr={lr}, weight_decay={weight_decay}` of step {self.step_number} is not finite",
                "check the schedule that sets `optimizer.param_groups`",
            )
        updater.controls.weight_decay = weight_decay
        updater.set_step(self.step_number, lr, group["accumulation"])

    def _end_backward(self) -> None:
        self._runs_backward = False
        self._stepped.clear()
        self._updater_now.step_held()

    @property
    def _updater_now(self) -> ModuleUpdater:
        """The updater, on the device and with the dtype of the weights."""
        device, dtype = self._weights[0].trits.device, self._weights[0].anchor.dtype
        updater = self._updater
        if updater is None or (updater.device, updater.dtype) != (device, dtype):
            self._counters = self.counters()
            seed = self.param_groups[0]["seed"]
            updater = self._updater = ModuleUpdater(self._weights, seed, dtype, HELD_BYTES)
            updater.restore(self._counters)
        return updater

    @torch.compiler.disable
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """End the step; without a backward since the last one, nothing happens.

        Args:
            closure: computes a loss and its backward.

        Returns:
            The result of the closure.

        Raises:
            ArbError: the weights have another optimizer since.
        """
        if any(weight.sink != self._consume for weight in self._weights):
            raise ArbError("a newer `IntegerOptimizer` trains these weights", "call its `step`")
        with torch.enable_grad():
            result = None if closure is None else closure()
        if self._micro:
            updater = self._updater_now
            if self._unstepped:
                updater.end_early(self._unstepped.values())
            updater.finish()
            self.step_number += 1
        self._forget_step()
        return result

    def _forget_step(self) -> None:
        """Begin the next step with the next backward."""
        self._micro, self._runs_backward = 0, False
        for records in (self._stepped, self._blended, self._unstepped):
            records.clear()

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Refuse further parameter groups, which no step would read."""
        if self.param_groups:
            raise ArbError(
                "the optimizer of integer weights has a single group of parameters",
                "train float parameters, those in `arbcli.floats(model)`, with an optimizer of"
                " torch",
            )
        super().add_param_group(param_group)

    @property
    def _step_supports_amp_scaling(self) -> bool:
        """Refuse a `GradScaler`, which reads this before a step."""
        raise ArbError(
            "a `GradScaler` finds no gradients of integer weights",
            "leave it out: gradients are normalised, and products are not in float16",
        )

    def zero_grad(self, set_to_none: bool = True) -> None:
        """End a step that has begun, as `step` does; it cannot be discarded.

        Gradients are not stored, so there is nothing to set to zero: a backward has already
        blended them into the moments.
        """
        if self._micro:
            if not self._runs_backward:  # which may have failed
                warnings.warn(
                    "`zero_grad` ends a step, whose gradients have trained the weights; freeze the"
                    " model (`requires_grad_(False)`) for a backward that must not train it",
                    stacklevel=2,
                )
            self.step()

    def counters(self) -> dict[str, int]:
        """Return counts of rejected gradients since the start; synchronises with the device.

        Returns:
            nonfinite_steps: number of steps with a gradient that was not finite.
            refused: number of gradients that were not finite or zero, and were ignored.
        """
        return self._counters if self._updater is None else self._updater.counters()

    def state_dict(self) -> dict[str, Any]:
        """Return step, counters and settings; moments are in the state of the model."""
        # torch.distributed.checkpoint needs an entry for each weight
        self.state.update({weight.anchor: {} for weight in self._weights})
        self.state[self._weights[0].anchor] = {"step_of_run": self.step_number} | self.counters()
        return super().state_dict()

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Restore step, counters and settings; a step that has begun is forgotten.

        Raises:
            ArbError: it is the state of another optimizer.
        """
        if not any("step_of_run" in state for state in state_dict.get("state", {}).values()):
            raise ArbError(
                "the state was not saved by an `IntegerOptimizer`",
                "pass the result of its `state_dict()`",
            )
        super().load_state_dict(state_dict)
        state = {name: int(value) for name, value in self.state[self._weights[0].anchor].items()}
        self.step_number = state.pop("step_of_run")
        self._counters, self._updater = state, None
        self._forget_step()


def check_numbers(lr: float, accumulation: int, weight_decay: float, seed: int) -> None:
    """Check the numbers of an `IntegerOptimizer`.

    Raises:
        ArbError: one is out of range.
    """
    if not isinstance(accumulation, int) or accumulation < 1:
        raise ArbError(f"`accumulation` is {accumulation}", "use an integer of at least 1")
    finite = all(isinstance(x, SupportsFloat) and 0 <= x < math.inf for x in (lr, weight_decay))
    if not (finite and isinstance(seed, int) and 0 <= seed < 1 << 31):
        raise ArbError(
            f"`lr={lr!r}, weight_decay={weight_decay!r}, seed={seed}` is out of range",
            "use finite numbers of at least 0, and an integer of at most 2**31-1 as seed",
        )


@cache
def guard_others() -> None:
    """Refuse float optimizers, averages and merged adapters of integer weights."""
    register_optimizer_step_pre_hook(_refuse_anchors)
    register_module_module_registration_hook(_refuse_wrappers)


def _refuse_anchors(optimizer: torch.optim.Optimizer, *_: Any) -> None:
    parameters = (value for group in optimizer.param_groups for value in group["params"])
    is_own = isinstance(optimizer, IntegerOptimizer)
    if not is_own and any(isinstance(value, Anchor) for value in parameters):
        raise ArbError(
            f"{type(optimizer).__name__} has integer weights among its parameters",
            "train these with the optimizer of `arbcli.to_integers`, and give"
            f" {type(optimizer).__name__} the parameters in `arbcli.floats(model)`",
        )


def _refuse_wrappers(module: nn.Module, name: str, part: nn.Module | None) -> None:
    parts = part.modules() if isinstance(module, AveragedModel) and part is not None else ()
    if any(isinstance(inner, Anchored) for inner in parts):
        raise ArbError(
            "`AveragedModel` cannot average integer weights",
            "average the result of `arbcli.nn.float_state_dict(model)` after each step",
        )
    if name == "base_layer" and isinstance(part, IntegerModule):
        module.merge = _refuse_merge  # type: ignore[assignment]  # of adapters of PEFT


def _refuse_merge(*_: Any, **__: Any) -> None:
    raise ArbError(
        "adapters cannot be merged into integer weights",
        "save them, and merge them into the floats that `arbcli.export_float` writes",
    )
