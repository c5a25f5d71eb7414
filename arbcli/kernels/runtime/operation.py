"""The contract of an operation: its arguments, and an implementation for each backend.

The language of its kernel, `tl` and `triton`, is imported from here, too.
"""

from collections.abc import Callable
from dataclasses import dataclass, field
from inspect import signature
from typing import Any, Generic, ParamSpec, TypeVar

from torch import Tensor

from arbcli.kernels.runtime._triton import tl as tl
from arbcli.kernels.runtime._triton import triton as triton
from arbcli.kernels.runtime.arguments import Arguments, Matrix, Number, compiled_check, declared
from arbcli.kernels.runtime.backend import backend_of

P = ParamSpec("P")
R = TypeVar("R")


@dataclass(frozen=True, eq=False)
class Operation(Generic[P, R]):
    """An operation: its arguments and its implementations.

    Implementations take the arguments in their order, by the same names. Called, it checks its
    arguments and runs the implementation of the backend in use.
    """

    name: str
    triton: Callable[P, R]
    """Implementation whose parameters, defaults and results are those of the operation."""
    torch: Callable[P, R]
    schema: str = ""
    """Declaration of the arguments, in their order: see `declared`."""
    native: Callable[P, R] | None = None
    """Implementation of the `native` backend; None is that of `torch`."""
    where: tuple[str, ...] = ()
    """Further conditions on sizes and arguments: expressions of Python."""
    arguments: Arguments = field(init=False)
    """Arguments by name."""
    check: Callable[..., None] = field(init=False)
    """Refuses arguments that do not fit, with a ValueError."""
    first: int = field(init=False)
    """Place of the tensor whose device decides the backend."""
    packed_first: bool = field(init=False)
    """Whether it is a packed matrix."""

    def __post_init__(self) -> None:
        arguments = declared(self.schema)
        kinds = [*arguments.values()]
        tensors = [i for i, kind in enumerate(kinds) if not isinstance(kind, Number)]
        first = [i for i in tensors if not kinds[i].optional]
        parameters = signature(self.triton).parameters.values()
        defaults = {p.name: p.default for p in parameters if p.default is not p.empty}
        derived: dict[str, Any] = {
            "arguments": arguments,
            "check": compiled_check(self.name, arguments, self.where, defaults),
            "first": first[0] if first else 0,
            "packed_first": bool(first) and isinstance(kinds[first[0]], Matrix),
        }
        for key, value in derived.items():
            object.__setattr__(self, key, value)

    def __call__(self, *inputs: P.args, **named: P.kwargs) -> R:
        """Check the arguments, and run on the backend in use.

        Raises:
            ValueError: an argument does not fit.
        """
        self.check(*inputs, **named)
        first: Any = inputs[self.first]
        tensor = first.trits if self.packed_first else first
        return self.chosen(tensor)(*inputs, **named)

    def chosen(self, tensor: Tensor) -> Callable[P, R]:
        """Choose the implementation for a tensor."""
        return getattr(self, backend_of(tensor)) or self.torch
