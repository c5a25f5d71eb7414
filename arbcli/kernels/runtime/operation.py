"""Arguments, implementations and verification of an operation, declared by one `Operation`.

The validation of calls, random cases, and tests of refused arguments and of layouts are derived
from the declared arguments. Cases of special values, and draws of arguments that depend on one
another, are declared next to them.
"""

from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial, wraps
from inspect import signature
from typing import Any, Generic, ParamSpec, Protocol, TypeVar

import torch
from torch import Tensor

from arbcli.kernels.runtime.arguments import (
    Argument,
    Arguments,
    Array,
    Matrix,
    Number,
    compiled_check,
    evaluate,
    names_in,
    never,
)
from arbcli.kernels.runtime.backend import choose

P = ParamSpec("P")
R = TypeVar("R")
Results = Tensor | tuple[Tensor | None, ...]
"""Outputs of an implementation; None where a peer computes nothing."""


@dataclass(frozen=True, slots=True)
class Case:
    """One set of inputs, the same for the kernel, the torch backend and the reference."""

    label: str
    """Shapes and what is awkward about them."""
    inputs: tuple
    """Positional arguments; the runner of a case passes clones, so updates in place are safe."""
    chunk_elements: int | None = None
    """Elements of the parts that the torch backend works on; None is as many as it likes."""


MOST_DRAWS = 100
"""Maximum number of draws per random case until one is valid."""
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
    """Function to time, whose results count as written once; None is the operation's launcher."""
    peer: Callable[[], object] | None = None
    """The same work, without arguments, by torch or a library that it calls."""
    peer_name: str = "torch"
    flops: int = 0
    """Multiplications and additions of a matrix product in bf16; 0 where there is none."""


Device = torch.device
MakeCases = Callable[[torch.device, int], Iterator[Case]]
MakeTimings = Callable[[torch.device, int], Iterable[Timing]]
Drawn = tuple[str, tuple, tuple]
"""A label, the inputs of an operation, and the gradients of its results."""


def cases_of(
    draw: Callable[[torch.device], Iterator[tuple]],
    choose: Callable[..., Iterable] = lambda inputs, *_: inputs,
) -> MakeCases:
    """Make the cases of an operation: `choose` finds its inputs in all that is drawn with a label.

    Operations whose cases are drawn together share the draw.
    """

    def cases(device: torch.device, _group_size: int) -> Iterator[Case]:
        for label, *drawn in draw(device):
            yield Case(label, tuple(choose(*drawn)))

    return cases


class Drawable(Protocol):
    """A timing whose inputs follow from the arguments of its operation: see `Timed`."""

    def draw(self, arguments: Arguments, device: torch.device, group_size: int) -> Timing:
        """Draw the inputs."""
        ...


@dataclass(frozen=True, slots=True)
class Gate:
    """Tolerance of a comparison."""

    relative: float = 0.0
    """Largest norm of the error over norm of the reference, for real values."""
    peer_slack: float = 0.0
    """With a peer: how much larger than the peer's error ours may be, as a share."""
    rounded: bool = False
    """Whether a result in bf16 has a peer in the reference, rounded to that and nowhere before."""
    peer_relative: float = 2.0**-6
    """With a peer: the largest error that it excuses. The torch backend is the peer of many
    kernels, and would else be held to itself; roundings to bfloat16 are 2**-9 each."""
    reason: str = ""
    exact: bool = False
    """Every element equal, which is the only gate for integers."""

    @property
    def text(self) -> str:
        """Describe the tolerance in a few words."""
        if self.exact:
            return "equal"
        peer = f", or torch's error + {self.peer_slack:.0%}" if self.peer_slack else ""
        return f"relative {self.relative:.0e}{peer}"


EXACT = Gate(exact=True, reason="integers are compared with torch.equal")


@dataclass(frozen=True, eq=False)
class Operation(Generic[P, R]):
    """An operation: its arguments, its implementations, and what they are compared on.

    Implementations take the arguments in their order, by the same names. Called, it checks its
    arguments and runs the implementation of the backend in use.
    """

    name: str
    triton: Callable[P, R]
    """Implementation whose parameters, defaults and results are those of the operation."""
    torch: Callable[P, R]
    reference: Callable
    cases: MakeCases
    """(device, group size) to cases. Without packed matrices the group size is ignored."""
    gate: Gate = EXACT
    arguments: Arguments = field(default_factory=dict)
    """Arguments by name, in their order."""
    native: Callable[P, R] | None = None
    """Implementation of the `native` backend; None is that of `torch`."""
    where: tuple[str, ...] = ()
    """Further conditions on sizes and arguments: expressions of Python."""
    launch: tuple[Callable, ...] = ()
    """Functions called on Triton, torch and the native backend; () is the compared ones."""
    compared: Sequence[str] | Callable[[tuple, Any], Any] = ()
    """Arguments that are changed in place, and so are results when implementations are compared; or
    (inputs, results) to what is compared."""
    sizes: Mapping[str, Any] = field(default_factory=dict)
    """How sizes are drawn, by name: an expression of m, n, k and sizes before it, or a tuple to
    pick one from. M, N and K are m, n and k, and D is k."""
    draw: Callable | None = None
    """(dice, group size, m, n, k) to the inputs of a random case, where arguments depend on one
    another; None draws each by what is declared."""
    large_reference: Callable | None = None
    """For large cases; None is the torch backend, for exact ones, or the reference itself."""
    peer: Callable | None = None
    """torch's own operation, which cases in bf16 may be no worse than."""
    torch_is_peer: bool = False
    """Whether the torch backend is."""
    needs_rows: bool | None = None
    """Whether m matters; None is whether a size is drawn by it."""
    uses_scales: bool | None = None
    """Whether the scale type matters; None is whether there is a packed matrix."""
    scale_path: Callable[[int], Hashable] = int
    """(group size) to what the code asks of it: sizes of the same answer take the same path."""
    timed: Sequence[Drawable] = ()
    """Production sizes that are timed on a GPU, with inputs drawn from `arguments`."""
    timings: MakeTimings | None = None
    """(device, group size) to timings with inputs made by hand; None draws those of `timed`."""
    not_verified: tuple[str, ...] = ()
    """Gaps of the cases and their reasons, for the ledger."""
    check: Callable[..., None] = field(init=False)
    """Refuses arguments that do not fit, with a ValueError."""
    bfloat16: tuple[int, ...] = field(init=False)
    """Places of inputs that may be bfloat16."""
    first: int = field(init=False)
    """Place of the tensor whose device decides the backend."""
    packed_first: bool = field(init=False)
    """Whether it is a packed matrix."""

    def __post_init__(self) -> None:
        kinds = [*self.arguments.values()]
        tensors = [i for i, kind in enumerate(kinds) if not isinstance(kind, Number)]
        first = [i for i in tensors if not kinds[i].optional]
        known = signature(self.triton).parameters.values()
        defaults = {each.name: each.default for each in known if each.default is not each.empty}
        derived: dict[str, Any] = {
            "check": compiled_check(self.name, self.arguments, self.where, defaults),
            "first": first[0] if first else 0,
            "bfloat16": tuple(
                i for i in tensors if torch.bfloat16 in getattr(kinds[i], "dtypes", ())
            ),
            "packed_first": bool(first) and isinstance(kinds[first[0]], Matrix),
            "launch": self.launch or (self.triton, self.torch, self.native or self.torch),
        }
        if self.uses_scales is None:
            derived["uses_scales"] = any(isinstance(kind, Matrix) for kind in kinds)
        if self.needs_rows is None and self.draw is None:
            rows = {"M": "m"} | {key: str(value) for key, value in self.sizes.items()}
            sized = (rows.get(size, "") for size in self._sized())
            derived["needs_rows"] = any("m" in names_in(how) for how in sized)
        if self.compared:
            for backend in ("triton", "torch", *(["native"] if self.native else [])):
                derived[backend] = self._compared(getattr(self, backend))
        if self.torch_is_peer:
            derived["peer"] = derived.get("torch", self.torch)
        if self.timed and self.timings is None:
            derived["timings"] = partial(_drawn_timings, self.timed, self.arguments)
        for key, value in derived.items():
            object.__setattr__(self, key, value)

    def __call__(self, *inputs: P.args, **named: P.kwargs) -> R:
        """Check the arguments, and run on the backend in use.

        Raises:
            ValueError: an argument does not fit.
        """
        self.check(*inputs, **named)
        first: Any = inputs[self.first]
        run = choose(first.trits if self.packed_first else first, *self.launch)
        return run(*inputs, **named)

    def draw_timings(self, device: Device, group_size: int) -> Iterable[Timing]:
        """Make the timings of this operation, with their inputs on `device`."""
        return self.timings(device, group_size) if self.timings else ()

    def chosen(self, tensor: Tensor) -> Callable:
        """Choose the implementation for a tensor."""
        return choose(tensor, *self.launch)

    def run(self, backend: str) -> Callable:
        """Return a backend's implementation for comparisons; it returns modified arguments too."""
        if backend == "native":
            return self.native or self.torch
        return self.torch if backend == "torch" else self.triton

    @property
    def dense(self) -> tuple[int, ...]:
        """Places of tensors whose elements must lie one after the other."""
        return tuple(
            place for place, kind in enumerate(self.arguments.values())
            if isinstance(kind, Array) and (kind.dense or kind.one)
        )  # fmt: skip

    @property
    def one_layout(self) -> bool:
        """Whether no input that is always there may have other strides than a new tensor's."""
        tensors = [
            kind for kind in self.arguments.values()
            if not isinstance(kind, Number) and not kind.optional
        ]  # fmt: skip
        return all(
            isinstance(kind, Array) and (kind.dense or kind.one or not kind.sizes)
            for kind in tensors
        )

    def _sized(self) -> Iterator[str]:
        for kind in self.arguments.values():
            if not isinstance(kind, Number):
                yield from (name for size in kind.dims for name in names_in(size.strip("*")))

    def _compared(self, run: Callable) -> Callable:
        compared, names = self.compared, [*self.arguments]

        @wraps(run)
        def with_changes(*inputs: Any) -> Any:
            found = run(*inputs)
            if callable(compared):
                return compared(inputs, found)
            changed = [inputs[names.index(name)] for name in compared]
            before = () if found is None else found if isinstance(found, tuple) else (found,)
            results = (*before, *(part for part in changed if part is not None))
            return results[0] if len(results) == 1 else results

        return with_changes

    def drawn(self, dice: Any, group_size: int, m: int, n: int, k: int) -> tuple:
        """Draw the inputs of a random case.

        Args:
            dice: what is drawn with, a `Dice`.
            group_size: of packed matrices.
            m: rows of activations.
            n: outputs of a matrix.
            k: its inputs.

        Raises:
            ValueError: no draw for these sizes is valid.
        """
        if self.draw is not None:
            return self.draw(dice, group_size, m, n, k)
        for _ in range(MOST_DRAWS):  # invalid combinations are drawn again
            inputs = self._drawn(dice, group_size, m, n, k)
            with suppress(ValueError):
                self.check(*inputs)
                return inputs
        raise ValueError(f"{self.name}: nothing drawn for {m}x{n}x{k} fits {self.where}")

    def _drawn(self, dice: Any, group_size: int, m: int, n: int, k: int) -> tuple:
        known: dict[str, Any] = {"m": m, "n": n, "k": k, "M": m, "N": n, "K": k, "D": k}
        for name, how in self.sizes.items():
            how = dice.pick(how) if isinstance(how, tuple) else how
            known[name] = evaluate(how, known)
        return tuple(
            draw_argument(kind, dice, group_size, known)
            for kind in self.arguments.values()
            if (kind.drawn if isinstance(kind, Number) else getattr(kind, "values", 0) is not never)
        )


def draw_argument(kind: Argument, dice: Any, group_size: int, known: Mapping[str, Any]) -> Any:
    """Draw an argument with bound sizes."""
    if isinstance(kind, Number):
        chosen = dice.pick(kind.drawn)
        return chosen if kind.named else evaluate(chosen, known)
    if kind.optional and dice.chance(0.3):
        return None
    shape: list[int] = []
    for size in kind.dims:
        shape += known[size[1:]] if size.startswith("*") else [evaluate(size, known)]
    if isinstance(kind, Matrix):
        return dice.packed(*shape[:2], group_size, kind.spread, kind.digits)
    dtype = kind.dtypes[0]
    if dtype != torch.float32:
        dtype = dice.pick(kind.dtypes)
    if callable(kind.values):
        drawn = kind.values(dice, *shape)
    elif torch.bfloat16 in kind.dtypes:
        drawn = dice.reals(*shape)
    elif dtype == torch.float32:
        drawn = dice.reals(*shape, dtype=dtype)
    elif dtype == torch.bool:
        drawn = dice.view(dice.integers(0, 1, *shape).bool())
    else:
        limits = torch.iinfo(min(dtype, torch.int32, key=lambda kind: kind.itemsize))
        low, high = kind.values or (limits.min, limits.max)
        low, high = evaluate(low, known), evaluate(high, known)
        drawn = dice.integers(low, high, *shape, dtype=dtype)
    return drawn.contiguous() if kind.dense is True else drawn


def _drawn_timings(
    timings: Sequence[Drawable], arguments: Arguments, device: torch.device, group_size: int
) -> list[Timing]:
    return [timing.draw(arguments, device, group_size) for timing in timings]
