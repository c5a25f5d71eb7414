"""Operators: functions of layers that a compiler takes whole.

Layers launch kernels and decode packed weights, and their backwards step them: nothing that
`torch.compile` could trace. So inside a compiled function each of them is one operator, and its
backward another. Both are made of the `Function` that runs where nothing is compiled, and a user's
own `torch.compile(block, fullgraph=True)` works, with one compilation for all blocks of a kind.

An operator is given tensors and numbers only. It finds a module by the memory of one of its
tensors, `found_by`.
"""

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
    """A module that an operator can find by one of its tensors."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        _findable.add(self)

    def __setstate__(self, state: dict) -> None:
        """Let a copy be found too."""
        super().__setstate__(state)
        _findable.add(self)

    @property
    def found_by(self) -> Tensor:
        """A tensor whose memory no other module has, unless it would do the same."""
        raise NotImplementedError


_findable: WeakSet[Findable] = WeakSet()
_found: dict[int, "ref[Findable]"] = {}


def find(tensor: Tensor) -> Findable:
    """Find the module that has this tensor.

    Raises:
        LookupError: there is none: it is a copy.
    """
    place = tensor.data_ptr()
    known = _found.get(place, lambda: None)()
    if known is None or known.found_by.data_ptr() != place:
        known = next((part for part in _findable if part.found_by.data_ptr() == place), None)
        if known is None:
            raise LookupError("no layer has this tensor: a compiler gave a copy of it")
        _found[place] = ref(known)
    return known


ANCHOR = torch.empty(0, requires_grad=True, device="cpu")
"""The `anchor` of compiled functions."""
AUTOGRAD = torch._C.DispatchKey.AutogradFunctionality


def anchor(like: Tensor) -> Tensor:
    """Make an empty tensor that requires a gradient, so that a backward runs in any case."""
    return torch.empty(0, device=like.device, requires_grad=torch.is_grad_enabled())


def operator(
    function: "type[Function] | Callable", fake: Callable | None = None
) -> Callable[..., Any]:
    """Make what applies a function, as one operator where a compiler traces it.

    Args:
        function: has `forward`, with annotations and without a context; `setup_context`, which
            only saves tensors and sets attributes; and `backward`. Or it is a function without a
            gradient. Inputs are tensors, numbers, strings, named tuples of numbers, and modules
            that are `Findable`; results are tensors.

            Where the last inputs of `forward` are `anchor` and `trained`, the function is applied
            without them. They are for a function whose backward hands on the gradient of a weight:
            `trained` tells whether that backward will come.
        fake: makes results of the same inputs, without values; modules are the tensors that they
            are found by. None runs the function on the `torch` backend, which must not read a
            module or the values of tensors then. Gradients are like the inputs that are saved; if
            one is not saved that has a gradient, they are made on the `torch` backend, too.
    """
    return _Operator(function, fake).apply


class _Operator:
    """A function and its two operators, `arb::name` and `arb::name_backward`."""

    def __init__(self, function: Any, fake: Callable | None) -> None:
        differentiable = isinstance(function, type)
        self.function, self.fake = function, fake
        self.run: Callable = self.function.forward if differentiable else function
        self.run_plain: Callable = self.function.apply if differentiable else function
        hints = get_type_hints(self.run)
        number = len(get_args(hints.pop("return"))) or 1
        self.trains, self.single = "anchor" in hints, number == 1
        self.kinds = [*map(_kind, hints, hints.values())]
        taken = [f"{kind.schema} {name}" for name, kind in zip(hints, self.kinds, strict=True)]
        numbers = [text for text, kind in zip(taken, self.kinds, strict=True) if not kind.tensor]
        results = "Tensor" if self.single else f"({', '.join(['Tensor'] * number)})"
        name = "arb::" + re.sub("(?<!^)(?=[A-Z])", "_", function.__name__.strip("_")).lower()
        self.forward = library.custom_op(
            name, self._forward, mutates_args=(), schema=f"({', '.join(taken)}) -> {results}"
        )
        self.forward.register_fake(self._fake)
        if not differentiable:
            return
        taken = ["Tensor?[] grads", "Tensor?[] kept", "bool[] wanted", *numbers]
        self.backward = library.custom_op(
            f"{name}_backward", self._backward, mutates_args=(),
            schema=f"({', '.join(taken)}) -> Tensor[]",
        )  # fmt: skip
        self.backward.register_fake(self._fake_backward)
        self.forward.register_autograd(self._propagate, setup_context=self._keep)

    def apply(self, *inputs: Any) -> Any:
        """Apply the function."""
        compiled = torch.compiler.is_compiling()
        if self.trains:
            inputs += (ANCHOR if compiled else anchor(_given(inputs[0])), torch.is_grad_enabled())
        if not compiled:
            return self.run_plain(*inputs)
        return self.forward(*map(_given, inputs))

    def _forward(self, *given: Any) -> Any:
        found = self.run(*self._found(given))
        return self._returned(_own([found] if self.single else found, given))

    def _fake(self, *given: Any) -> Any:
        if self.fake:
            found = self.fake(*given)
        else:
            with use_backend("torch"):
                found = self.run(*self._found(given))
        return self._returned(map(_like, [found] if self.single else found))

    def _keep(self, ctx: Any, inputs: tuple, output: Any) -> None:
        """Save what the function saves, None in the places of all other tensors."""
        noted = _Context(())
        self.function.setup_context(noted, inputs, output)
        outputs = [output] if self.single else output
        kept = [
            part if kind.kept or _is_in(part, noted.saved_tensors) else None
            for part, kind in zip(inputs, self.kinds, strict=True)
            if kind.tensor
        ]
        kept += [part if _is_in(part, noted.saved_tensors) else None for part in outputs]
        ctx.save_for_backward(*kept)
        ctx.mark_non_differentiable(*noted.still)
        given = zip(inputs, self.kinds, strict=True)
        ctx.numbers = [part for part, kind in given if not kind.tensor]

    def _propagate(self, ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        wanted = list(ctx.needs_input_grad[: len(self.kinds)])
        found = self.backward(list(grads), list(ctx.saved_tensors), wanted, *ctx.numbers)
        found = iter(found)
        return tuple(next(found) if some else None for some in wanted)

    def _backward(self, grads: list, kept: list, wanted: list[bool], *numbers: Any) -> list[Tensor]:
        # a few torch backends differentiate, which torch leaves out inside of operators
        with torch._C._SetExcludeDispatchKeyGuard(AUTOGRAD, False):
            found = self._gradients(grads, kept, wanted, *numbers)
        return _own(found, (*grads, *kept))

    def _gradients(
        self, grads: list, kept: list, wanted: list[bool], *numbers: Any
    ) -> list[Tensor]:
        inputs, outputs = self._inputs(kept, numbers)
        ctx = _Context(wanted)
        self.function.setup_context(ctx, self._found(inputs), self._returned(outputs))
        found = self.function.backward(ctx, *grads)
        found = found if isinstance(found, tuple) else (found,)
        # that of an anchor is none
        return [
            torch.empty(0, device="cpu") if part is None else part
            for part, some in zip(found, wanted, strict=True)
            if some
        ]

    def _fake_backward(
        self, grads: list, kept: list, wanted: list[bool], *numbers: Any
    ) -> list[Tensor]:
        inputs, _ = self._inputs(kept, numbers)
        found = [part for part, some in zip(inputs, wanted, strict=True) if some]
        if any(part is None for part in found):
            with use_backend("torch"):
                found = self._gradients(grads, kept, wanted, *numbers)
        return [_like(part) for part in found]

    def _inputs(self, kept: list, numbers: tuple) -> tuple[list, list]:
        """Put tensors and numbers in their order: inputs, and outputs."""
        tensors, others = iter(kept), iter(numbers)
        inputs = [next(tensors if kind.tensor else others) for kind in self.kinds]
        return inputs, [*tensors]

    def _found(self, given: Iterable) -> tuple:
        """Turn what an operator is given into what the function takes."""
        parts = zip(given, self.kinds, strict=True)
        return tuple(part if part is None else kind.make(part) for part, kind in parts)

    def _returned(self, found: Iterable[Tensor]) -> Any:
        found = tuple(found)
        return found[0] if self.single else found


class _Kind(NamedTuple):
    """An input of a function, as its operator takes it."""

    schema: str
    make: Callable[[Any], Any]
    """From what the operator is given."""
    tensor: bool = False
    kept: bool = False
    """Whether the backward is given it in any case."""


def _kind(name: str, hint: Any) -> _Kind:
    options = [option for option in get_args(hint) or (hint,) if option is not NoneType]
    (base,), mark = options, "?" if get_args(hint) else ""
    if issubclass(base, Findable):
        return _Kind(f"Tensor{mark}", find, tensor=True, kept=True)
    if issubclass(base, tuple):
        return _Kind("SymInt[]", base._make)
    schema = {Tensor: f"Tensor{mark}", bool: "bool", int: "SymInt", float: "float", str: "str"}[
        base
    ]
    return _Kind(schema, lambda part: part, tensor=base is Tensor, kept=name == "anchor")


class _Context:
    """Takes the place of autograd's, and notes what it is told."""

    def __init__(self, wanted: Iterable[bool]) -> None:
        self.needs_input_grad = tuple(wanted)
        self.saved_tensors: tuple = ()
        self.still: tuple = ()

    def save_for_backward(self, *tensors: Tensor | None) -> None:
        self.saved_tensors = tensors

    def mark_non_differentiable(self, *tensors: Tensor) -> None:
        self.still = tensors


def _given(part: Any) -> Any:
    """Turn an input of a function into one of its operator."""
    if isinstance(part, Findable):
        return part.found_by
    return list(part) if isinstance(part, tuple) else part


def _is_in(part: Any, tensors: tuple) -> bool:
    return any(part is tensor for tensor in tensors)


def _like(part: Tensor) -> Tensor:
    return torch.empty(part.shape, dtype=part.dtype, device=part.device)


def _own(results: Iterable[Tensor], given: Iterable) -> list[Tensor]:
    """Make results contiguous, and copy those whose memory is not their own, as operators must."""
    taken = {part.untyped_storage().data_ptr() for part in given if isinstance(part, Tensor)}
    found = []
    for result in results:
        part = result.contiguous()
        if part.untyped_storage().data_ptr() in taken and part.numel():
            part = part.clone()
        taken.add(part.untyped_storage().data_ptr())
        found.append(part)
    return found
