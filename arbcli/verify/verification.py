"""Declarations of how an operation is verified: a `Verification` for each `Operation`.

Random cases, and tests of refused arguments and of layouts, are derived from the arguments that an
operation declares. Cases of special values, and draws of arguments that depend on one another, are
declared here.
"""

from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import KW_ONLY, dataclass, field
from fnmatch import fnmatchcase
from functools import wraps
from typing import Any, Protocol

import torch

from arbcli.kernels.runtime.arguments import Arguments, Array, Matrix, Number, evaluate, names_in
from arbcli.kernels.runtime.operation import Operation
from arbcli.verify.case_generator import CaseGenerator, draw_argument, never

MOST_DRAWS = 100
"""Maximum number of draws per random case until one is valid."""


@dataclass(frozen=True, slots=True)
class Case:
    """One set of inputs, the same for the kernel, the torch backend and the reference."""

    label: str
    """Shapes and what is awkward about them."""
    inputs: tuple
    """Positional arguments; the runner of a case passes clones, so updates in place are safe."""
    chunk_elements: int | None = None
    """Elements of the parts that the torch backend works on; None is as many as it likes."""


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

    def draw(
        self,
        arguments: Arguments,
        values: Mapping[str, Any],
        device: torch.device,
        group_size: int,
    ) -> Timing:
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
class Verification:
    """Verification of an operation: its reference, cases, gate and timings."""

    operation: Operation
    reference: Callable
    """The equation in int64 or float64; it shares no helper with the kernel."""
    cases: MakeCases
    """(device, group size) to cases. Without packed matrices the group size is ignored."""
    gate: Gate = EXACT
    _: KW_ONLY
    triton: Callable = None  # type: ignore[assignment]  # set below
    """Implementation to compare, of the Triton backend; None is that of the operation."""
    torch: Callable = None  # type: ignore[assignment]
    """The same of torch."""
    native: Callable | None = None
    """The same of the native backend; None where it is that of torch."""
    compared: Sequence[str] | Callable[[tuple, Any], Any] = ()
    """Arguments that are changed in place, and so are results when implementations are compared; or
    (inputs, results) to what is compared."""
    sizes: Mapping[str, Any] = field(default_factory=dict)
    """How sizes are drawn, by name: an expression of m, n, k and sizes before it, or a tuple to
    pick one from. M, N and K are m, n and k, and D is k."""
    values: Mapping[str, Any] = field(default_factory=dict)
    """How arguments are drawn, by name: see `draw_argument`."""
    draw: Callable | None = None
    """(generator, group size, m, n, k) to the inputs of a random case, where arguments depend on
    one another; None draws each by itself."""
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
    """Production sizes that are timed on a GPU, with inputs drawn from the declared arguments."""
    timings: MakeTimings | None = None
    """(device, group size) to timings with inputs made by hand; None draws those of `timed`."""
    long: tuple[str, ...] = ()
    """Labels of cases, or patterns of them, that Triton's interpreter leaves out: each takes it
    about a second, and other cases detect every planted fault that they detect."""
    not_verified: tuple[str, ...] = ()
    """Gaps of the cases and their reasons, for the ledger."""

    def __post_init__(self) -> None:
        kinds = [*self.arguments.values()]
        native = self.native or self.operation.native
        derived: dict[str, Any] = {
            "triton": self.operation.triton if self.triton is None else self.triton,
            "torch": self.operation.torch if self.torch is None else self.torch,
            "native": native,
        }
        if self.uses_scales is None:
            derived["uses_scales"] = any(isinstance(kind, Matrix) for kind in kinds)
        if self.needs_rows is None and self.draw is None:
            rows = {"M": "m"} | {key: str(value) for key, value in self.sizes.items()}
            sized = (rows.get(size, "") for size in self._sized())
            derived["needs_rows"] = any("m" in names_in(how) for how in sized)
        if self.compared:
            for backend in ("triton", "torch", *(["native"] if native else [])):
                derived[backend] = self._compared(derived[backend])
        if self.torch_is_peer:
            derived["peer"] = derived["torch"]
        if self.timed and self.timings is None:
            derived["timings"] = self._drawn_timings
        for key, value in derived.items():
            object.__setattr__(self, key, value)

    @property
    def name(self) -> str:
        """Name of the operation."""
        return self.operation.name

    @property
    def arguments(self) -> Arguments:
        """Declared arguments of the operation, by name."""
        return self.operation.arguments

    def is_long(self, label: str) -> bool:
        """Return whether the interpreter leaves out the case of a label."""
        return any(fnmatchcase(label, pattern) for pattern in self.long)

    def draw_timings(self, device: Device, group_size: int) -> Iterable[Timing]:
        """Make the timings of this operation, with their inputs on `device`."""
        return self.timings(device, group_size) if self.timings else ()

    def run(self, backend: str) -> Callable:
        """Return a backend's implementation for comparisons; it returns modified arguments too."""
        if backend == "native":
            return self.native or self.torch
        return self.torch if backend == "torch" else self.triton

    @property
    def bfloat16(self) -> tuple[int, ...]:
        """Places of inputs that may be bfloat16."""
        kinds = enumerate(self.arguments.values())
        return tuple(i for i, kind in kinds if torch.bfloat16 in getattr(kind, "dtypes", ()))

    @property
    def dense(self) -> tuple[int, ...]:
        """Places of tensors whose elements must lie one after the other."""
        return tuple(
            place for place, kind in enumerate(self.arguments.values())
            if isinstance(kind, Array) and (kind.dense or kind.one)
        )  # fmt: skip

    def _sized(self) -> Iterator[str]:
        for kind in self.arguments.values():
            if not isinstance(kind, Number):
                yield from (name for size in kind.dims for name in names_in(size.strip("*")))

    def _compared(self, run: Callable) -> Callable:
        compared, names = self.compared, [*self.arguments]

        @wraps(run)
        def run_in_place(*inputs: Any) -> Any:
            results = run(*inputs)
            if callable(compared):
                return compared(inputs, results)
            changed = [inputs[names.index(name)] for name in compared]
            returned = (
                () if results is None else results if isinstance(results, tuple) else (results,)
            )
            outputs = (*returned, *(tensor for tensor in changed if tensor is not None))
            return outputs[0] if len(outputs) == 1 else outputs

        return run_in_place

    def drawn(self, rng: CaseGenerator, group_size: int, m: int, n: int, k: int) -> tuple:
        """Draw the inputs of a random case.

        Args:
            rng: generator of the case.
            group_size: of packed matrices.
            m: rows of activations.
            n: outputs of a matrix.
            k: its inputs.

        Raises:
            ValueError: no draw for these sizes is valid.
        """
        if self.draw is not None:
            return self.draw(rng, group_size, m, n, k)
        for _ in range(MOST_DRAWS):  # invalid combinations are drawn again
            inputs = self._drawn(rng, group_size, m, n, k)
            with suppress(ValueError):
                self.operation.check(*inputs)
                return inputs
        where = self.operation.where
        raise ValueError(f"{self.name}: nothing drawn for {m}x{n}x{k} fits {where}")

    def _drawn(self, rng: CaseGenerator, group_size: int, m: int, n: int, k: int) -> tuple:
        sizes: dict[str, Any] = {"m": m, "n": n, "k": k, "M": m, "N": n, "K": k, "D": k}
        for name, how in self.sizes.items():
            how = rng.pick(how) if isinstance(how, tuple) else how
            sizes[name] = evaluate(how, sizes)
        return tuple(
            draw_argument(kind, self.values.get(name), rng, group_size, sizes)
            for name, kind in self.arguments.items()
            if self._is_drawn(name, kind)
        )

    def _is_drawn(self, name: str, kind: Any) -> bool:
        if isinstance(kind, Number):
            return bool(kind.allowed or self.values.get(name))
        return self.values.get(name) is not never

    def _drawn_timings(self, device: Device, group_size: int) -> list[Timing]:
        return [
            timing.draw(self.arguments, self.values, device, group_size) for timing in self.timed
        ]
