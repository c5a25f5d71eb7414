"""Custom operators for layers, which `torch.compile` treats as opaque.

Layers launch kernels and decode packed weights, and their backwards emit gradients, none of which
`torch.compile` can trace. Within a compiled function each layer is one operator and its backward
another, both built from the `Function` that runs in eager mode. `torch.compile(block,
fullgraph=True)` works, with one compilation for all blocks of a kind.

Operators only take tensors and numbers. A module is passed as one of its tensors, `key_tensor`, and
looked up by the address of its memory.
"""

import inspect
import re
from collections.abc import Callable, Iterable
from types import NoneType
from typing import Any, NamedTuple, get_args, get_type_hints
from weakref import WeakSet, ref

import torch
from torch import Tensor, library, nn
from torch.autograd import Function

from arbcli.kernels.runtime.backend import use_backend


class Findable(nn.Module):
    """A module that an operator can look up by one of its tensors."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        _findable.add(self)

    def __setstate__(self, state: dict) -> None:
        """Register copies too."""
        super().__setstate__(state)
        _findable.add(self)

    @property
    def key_tensor(self) -> Tensor:
        """The tensor that identifies the module; only modules that are interchangeable share it."""
        raise NotImplementedError


class KeepsInputs(Function):
    """A function whose backward reads its inputs, which are tensors or None."""

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
        """Save the inputs."""
        ctx.save_for_backward(*inputs)


_findable: WeakSet[Findable] = WeakSet()
_found: dict[int, "ref[Findable]"] = {}


def find(tensor: Tensor) -> Findable:
    """Return the module that a tensor identifies.

    Raises:
        LookupError: no module has it, as the compiler passed a copy.
    """
    address = tensor.data_ptr()
    known = _found.get(address, lambda: None)()
    if known is None or known.key_tensor.data_ptr() != address:
        known = next((part for part in _findable if part.key_tensor.data_ptr() == address), None)
        if known is None:
            raise LookupError("no layer has this tensor: the compiler passed a copy of it")
        _found[address] = ref(known)
    return known


ANCHOR = torch.empty(0, requires_grad=True, device="cpu")
"""The `anchor` of compiled functions."""
AUTOGRAD = torch._C.DispatchKey.AutogradFunctionality


def anchor(like: Tensor) -> Tensor:
    """Return an empty tensor, (0,), that requires a gradient, so that the backward runs."""
    return torch.empty(0, device=like.device, requires_grad=torch.is_grad_enabled())


def operator(
    function: "type[Function] | Callable",
    fake: Callable | None = None,
    fake_grads: Callable | None = None,
) -> Callable[..., Any]:
    """Return a callable that applies a function, as one custom operator under `torch.compile`.

    Args:
        function: a `Function` with an annotated `forward` without a context, a `setup_context` that
            only saves tensors and sets attributes, and a `backward`; or a plain function without a
            gradient. Inputs are tensors, numbers, strings, named tuples of numbers, and `Findable`
            modules, or None; results are tensors.

            If the last inputs of `forward` are `anchor` and `trained`, callers omit them. They are
            for functions whose backward emits the gradient of a weight: `trained` says whether that
            backward will run.
        fake: returns empty results for the same inputs, with modules as their `key_tensor` tensors.
            None runs the function on the `torch` backend, where it must read neither modules nor
            values of tensors. Fake gradients have the shapes of the saved inputs; if an input with
            a gradient is not saved, the backward runs on the `torch` backend.
        fake_grads: returns a list of empty gradients of the inputs that have one, from those of the
            results, for a function that saves none of these inputs. None is as above.
    """
    return _Operator(function, fake, fake_grads).apply


class _Operator:
    """A function with its operators `arb::name` and `arb::name_backward`."""

    def __init__(self, function: Any, fake: Callable | None, fake_grads: Callable | None) -> None:
        differentiable = isinstance(function, type)
        self.function, self.fake, self.fake_grads = function, fake, fake_grads
        self.run: Callable = self.function.forward if differentiable else function
        self.run_plain: Callable = self.function.apply if differentiable else function
        self.run.__signature__ = inspect.signature(self.run)  # torch asks for it at every call
        hints = get_type_hints(self.run)
        number = len(get_args(hints.pop("return"))) or 1
        self.trains, self.single = "anchor" in hints, number == 1
        self.kinds = [*map(_kind, hints, hints.values())]
        parameters = [f"{kind.schema} {name}" for name, kind in zip(hints, self.kinds, strict=True)]
        numbers = [
            text for text, kind in zip(parameters, self.kinds, strict=True) if not kind.tensor
        ]
        results = "Tensor" if self.single else f"({', '.join(['Tensor'] * number)})"
        name = "arb::" + re.sub("(?<!^)(?=[A-Z])", "_", function.__name__.strip("_")).lower()
        self.forward = library.custom_op(
            name, self._forward, mutates_args=(), schema=f"({', '.join(parameters)}) -> {results}"
        )
        self.forward.register_fake(self._fake)
        if not differentiable:
            return
        parameters = ["Tensor?[] grads", "Tensor?[] saved", "bool[] wanted", *numbers]
        self.backward = library.custom_op(
            f"{name}_backward", self._backward, mutates_args=(),
            schema=f"({', '.join(parameters)}) -> Tensor[]",
        )  # fmt: skip
        self.backward.register_fake(self._fake_backward)
        self.forward.register_autograd(self._propagate, setup_context=self._keep)

    def apply(self, *inputs: Any) -> Any:
        """Apply the function."""
        compiled = torch.compiler.is_compiling()
        if self.trains:
            inputs += (
                ANCHOR if compiled else anchor(_operator_input(inputs[0])),
                torch.is_grad_enabled(),
            )
        if not compiled:
            return self.run_plain(*inputs)
        return self.forward(*map(_operator_input, inputs))

    def _forward(self, *inputs: Any) -> Any:
        results = self.run(*self._converted(inputs))
        return self._returned(_owned([results] if self.single else results, inputs))

    def _fake(self, *inputs: Any) -> Any:
        if self.fake:
            results = self.fake(*inputs)
        else:
            with use_backend("torch"):
                results = self.run(*self._converted(inputs))
        return self._returned(map(_empty_like, [results] if self.single else results))

    def _keep(self, ctx: Any, inputs: tuple, output: Any) -> None:
        """Save the tensors that the function saves, with None in place of all others."""
        context = _Context(())
        self.function.setup_context(context, inputs, output)
        outputs = [output] if self.single else output
        saved = [
            part if kind.kept or _is_in(part, context.saved_tensors) else None
            for part, kind in zip(inputs, self.kinds, strict=True)
            if kind.tensor
        ]
        saved += [part if _is_in(part, context.saved_tensors) else None for part in outputs]
        ctx.save_for_backward(*saved)
        ctx.mark_non_differentiable(*context.non_differentiable)
        pairs = zip(inputs, self.kinds, strict=True)
        ctx.numbers = [part for part, kind in pairs if not kind.tensor]

    def _propagate(self, ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        needs_grad = list(ctx.needs_input_grad[: len(self.kinds)])
        gradients = iter(
            self.backward(list(grads), list(ctx.saved_tensors), needs_grad, *ctx.numbers)
        )
        return tuple(next(gradients) if needed else None for needed in needs_grad)

    def _backward(
        self, grads: list, saved: list, needs_grad: list[bool], *numbers: Any
    ) -> list[Tensor]:
        # some backends use autograd, which torch disables within operators
        with torch._C._SetExcludeDispatchKeyGuard(AUTOGRAD, False):
            gradients = self._gradients(grads, saved, needs_grad, *numbers)
        return _owned(gradients, (*grads, *saved))

    def _gradients(
        self, grads: list, saved: list, needs_grad: list[bool], *numbers: Any
    ) -> list[Tensor]:
        inputs, outputs = self._inputs(saved, numbers)
        ctx = _Context(needs_grad)
        self.function.setup_context(ctx, self._converted(inputs), self._returned(outputs))
        gradients = self.function.backward(ctx, *grads)
        gradients = gradients if isinstance(gradients, tuple) else (gradients,)
        # the gradient of an anchor is None
        return [
            torch.empty(0, device="cpu") if part is None else part
            for part, needed in zip(gradients, needs_grad, strict=True)
            if needed
        ]

    def _fake_backward(
        self, grads: list, saved: list, needs_grad: list[bool], *numbers: Any
    ) -> list[Tensor]:
        if self.fake_grads:
            return self.fake_grads(*grads)
        inputs, _ = self._inputs(saved, numbers)
        like = [part for part, needed in zip(inputs, needs_grad, strict=True) if needed]
        if any(part is None for part in like):
            with use_backend("torch"):
                like = self._gradients(grads, saved, needs_grad, *numbers)
        return [_empty_like(part) for part in like]

    def _inputs(self, saved: list, numbers: tuple) -> tuple[list, list]:
        """Merge tensors and numbers in the order of the inputs; return inputs and outputs."""
        tensors, others = iter(saved), iter(numbers)
        inputs = [next(tensors if kind.tensor else others) for kind in self.kinds]
        return inputs, [*tensors]

    def _converted(self, inputs: Iterable) -> tuple:
        """Convert the operator's inputs to those of the function."""
        parts = zip(inputs, self.kinds, strict=True)
        return tuple(part if part is None else kind.make(part) for part, kind in parts)

    def _returned(self, results: Iterable[Tensor]) -> Any:
        results = tuple(results)
        return results[0] if self.single else results


class _Kind(NamedTuple):
    """The type of an input of a function in its operator."""

    schema: str
    make: Callable[[Any], Any]
    """Converts the operator's input to the function's."""
    tensor: bool = False
    kept: bool = False
    """Whether the backward always receives it."""


def _kind(name: str, hint: Any) -> _Kind:
    options = [option for option in get_args(hint) or (hint,) if option is not NoneType]
    (base,), mark = options, "?" if get_args(hint) else ""
    if issubclass(base, Findable):
        return _Kind(f"Tensor{mark}", find, tensor=True, kept=True)
    if issubclass(base, tuple):
        return _Kind("SymInt[]", base._make)
    schema = {Tensor: "Tensor", bool: "bool", int: "SymInt", float: "float", str: "str"}[base]
    return _Kind(schema + mark, lambda part: part, tensor=base is Tensor, kept=name == "anchor")


class _Context:
    """A stand-in for autograd's context, which records the saved tensors."""

    def __init__(self, needs_grad: Iterable[bool]) -> None:
        self.needs_input_grad = tuple(needs_grad)
        self.saved_tensors: tuple = ()
        self.non_differentiable: tuple = ()

    def save_for_backward(self, *tensors: Tensor | None) -> None:
        self.saved_tensors = tensors

    def mark_non_differentiable(self, *tensors: Tensor) -> None:
        self.non_differentiable = tensors


def _operator_input(part: Any) -> Any:
    """Convert an input of a function to that of its operator."""
    if isinstance(part, Findable):
        return part.key_tensor
    return list(part) if isinstance(part, tuple) else part


def _is_in(part: Any, tensors: tuple) -> bool:
    return any(part is tensor for tensor in tensors)


def _empty_like(part: Tensor) -> Tensor:
    return torch.empty(part.shape, dtype=part.dtype, device=part.device)


def _owned(results: Iterable[Tensor], inputs: Iterable) -> list[Tensor]:
    """Make results contiguous, and copy those that alias an input, as operators require."""
    pointers = {part.untyped_storage().data_ptr() for part in inputs if isinstance(part, Tensor)}
    owned = []
    for result in results:
        part = result.contiguous()
        if part.untyped_storage().data_ptr() in pointers and part.numel():
            part = part.clone()
        pointers.add(part.untyped_storage().data_ptr())
        owned.append(part)
    return owned
