"""Declarations of how an operation is verified: a `Verification` for each `Operation`.

Random cases, and tests of refused arguments and of layouts, are derived from the arguments that an
operation declares. Cases of special values, and draws of arguments that depend on one another, are
declared here. The `CaseGenerator` that draws take is imported from here, too.
"""

from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import KW_ONLY, dataclass, field
from functools import partial, wraps
from typing import Any

import torch
from torch import Tensor

from arbcli.kernels.runtime.arguments import Arguments, Matrix, Number, evaluate, names_in
from arbcli.kernels.runtime.operation import Operation
from arbcli.verify.case_generator import CaseGenerator as CaseGenerator
from arbcli.verify.case_generator import Sizes, draw_argument

MAX_DRAWS = 100
"""Maximum number of draws per random case until one is valid."""
DRAWS = 10
"""Number of random cases of each kernel that are always checked."""
TILES = (16, 32, 64, 128, 160, 256, 320)
"""Boundaries of tiles, planes and blocks of weights."""
ROW_TILES = (8, 16, 32, 64, 128)
"""The same of rows of activations, which fused products take up to 64 of."""
SMALL_ROWS, SMALL_COLUMNS = (4, 16, 32), (16, 32, 160, 320)
"""The boundaries without a GPU, where Triton's interpreter takes long."""
CHANGED_SIZES = (9, 17, 165)
"""m, n and k of cases with changed arguments."""


@dataclass(frozen=True, slots=True)
class Case:
    """One set of inputs, the same for the kernel, the torch backend and the reference."""

    label: str
    """Shapes and their awkward properties."""
    inputs: tuple
    """Positional arguments; the runner of a case passes clones, so updates in place are safe."""
    chunk_elements: int | None = None
    """Maximum elements that the torch backend processes at a time; None is its default."""


REFUSED = {"refused": {"ok": torch.zeros_like}}
"""A changed case of an update that is refused."""
Device = torch.device
MakeCases = Callable[[torch.device, int], Iterator[Case]]


def filled(value: float) -> Callable[[Tensor], Tensor]:
    """Return a change that fills a tensor with a value."""
    return partial(torch.full_like, fill_value=value)


def with_one(value: float) -> Callable[[Tensor], Tensor]:
    """Return a change that sets one element of a matrix, (N, K)."""

    def change(values: Tensor) -> Tensor:
        values = values.clone()
        values[len(values) // 2, -2] = value
        return values

    return change


def same_inputs(run: Callable) -> Callable:
    """Return the `library` of an operation for a function that takes the same inputs."""
    return partial(partial, run)


def no_rows(values: Tensor) -> Tensor:
    """Return the first 0 rows of a tensor, (N, ...): (0, ...)."""
    return values[:0]


def gradients_of(
    reference: Callable, indices: Sequence[int], results: int = 1, ignored: Sequence[int] = ()
) -> Callable[..., tuple[Tensor, ...]]:
    """Return the reference of a backward operation: autograd in float64 through a forward's.

    It takes a gradient for each of the first `results` of the forward, and the forward's inputs,
    among which it ignores some of its arguments.

    Args:
        reference: reference of the forward.
        indices: those of the inputs whose gradients it returns; one that is None has none.
        results: number of results with gradients.
        ignored: indices of the arguments that it ignores.
    """

    def backward(*arguments: Any) -> tuple[Tensor, ...]:
        read_arguments = (part for i, part in enumerate(arguments) if i not in ignored)
        grads, inputs = arguments[:results], [*read_arguments][results:]
        leaves = []
        for number in indices:
            if inputs[number] is not None:
                inputs[number] = inputs[number].detach().double().requires_grad_()
                leaves.append(inputs[number])
        with torch.enable_grad():
            outputs = reference(*inputs)
            outputs = (outputs,) if isinstance(outputs, Tensor) else outputs[:results]
            pairs = zip(outputs, grads, strict=True)
            total = torch.stack([(y * grad.double()).sum() for y, grad in pairs]).sum()
            total = total + sum(0 * leaf.sum() for leaf in leaves)  # each has a gradient
        return torch.autograd.grad(total, leaves)

    return backward


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


def float32_sums(sums: str, in_bf16: str | None = None) -> Gate:
    """Return the gate of float32 sums, whose bf16 results may be a tenth worse than the peer's.

    Args:
        sums: number or range of the terms, for the reason.
        in_bf16: comparison with the peer, for the reason; None for the reference, rounded once.
    """
    reason = f"float32 sums {sums}".rstrip() + "; in bf16 "
    reason += in_bf16 or "no worse than one rounding"
    return Gate(relative=1e-5, peer_slack=0.1, rounded=in_bf16 is None, reason=reason)


@dataclass(frozen=True, eq=False)
class Verification:
    """Verification of an operation: its reference, cases and gate, and what it is timed next to."""

    operation: Operation
    reference: Callable
    """The equation in int64 or float64; it shares no helper with the kernel."""
    gate: Gate = EXACT
    _: KW_ONLY
    cases: MakeCases = None  # type: ignore[assignment]  # set below
    """(device, group size) to cases. Without packed matrices the group size is ignored. None draws
    `DRAWS` cases, those of `shapes`, and those that are `changed`."""
    shapes: Sequence[Sizes] = ()
    """m, n and k of drawn cases that no random sizes reach, such as none."""
    changed: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    """Drawn cases of special values, by label: arguments, with their value or a function of the
    drawn one."""
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
    terms: Callable | None = None
    """(inputs) to the float64 terms that each result sums, for results in which terms may cancel.
    Errors are then relative to the norm of the terms, if that is larger than the reference's: the
    terms are rounded independently, so their errors add as squares, whatever their signs."""
    needs_rows: bool | None = None
    """Whether m matters; None is whether a size is drawn by it."""
    uses_scales: bool | None = None
    """Whether the scale type matters; None is whether there is a packed matrix."""
    scale_path: Callable[[int], Hashable] = int
    """(group size) to what the code asks of it: sizes of the same answer take the same path."""
    library: Callable | None = None
    """(inputs) to a call of torch or cuBLAS that does the same work, which is timed next to it."""
    looked_up: str | None = None
    """Argument of which few rows are read, whose bytes are not counted in a roofline."""
    timed: bool = True
    """Whether it is timed: not if a CUDA graph cannot capture its launcher."""
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
        if self.cases is None:
            derived["cases"] = self._drawn_cases
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

    def run(self, backend: str) -> Callable:
        """Return a backend's implementation for comparisons; it returns modified arguments too."""
        if backend == "native":
            return self.native or self.torch
        return self.torch if backend == "torch" else self.triton

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
        for _ in range(MAX_DRAWS):  # invalid combinations are drawn again
            inputs = self._drawn(rng, group_size, m, n, k)
            with suppress(ValueError):
                self.operation.check(*inputs)
                return inputs
        where = self.operation.where
        raise ValueError(f"{self.name}: no_rows drawn for {m}x{n}x{k} fits {where}")

    def drawn_case(
        self, prefix: str, rng: CaseGenerator, group_size: int, m: int, n: int, k: int
    ) -> Case:
        """Draw a random case, whose label begins with a prefix."""
        inputs = self.drawn(rng, group_size, m, n, k)
        size = f"{m}x{n}x{k}" if self.needs_rows else f"{n}x{k}"
        low = rng.dtype == torch.bfloat16 and any(
            isinstance(value, Tensor) and value.is_floating_point() for value in inputs
        )
        return Case(f"{prefix}{size} bf16" if low else f"{prefix}{size}", inputs)

    def _drawn_cases(self, device: Device, group_size: int) -> Iterator[Case]:
        near: tuple[tuple[int, ...], ...] = (ROW_TILES, TILES, TILES)
        if device.type != "cuda":
            near = (SMALL_ROWS, SMALL_ROWS, SMALL_COLUMNS)
        for seed in range(DRAWS):
            rng = CaseGenerator(seed, device)
            yield self.drawn_case(f"seed {seed}: ", rng, group_size, *rng.sizes(*near))
        for sizes in self.shapes:
            rng = CaseGenerator(0, device, torch.float32)
            yield self.drawn_case("", rng, group_size, *sizes)
        for label, changes in self.changed.items():
            for seed in range(2):
                rng = CaseGenerator(seed, device, torch.float32)
                case = self.drawn_case(f"{label} {seed}: ", rng, group_size, *CHANGED_SIZES)
                inputs = dict(zip(self.arguments, case.inputs, strict=False))
                for name, value in changes.items():
                    inputs[name] = value(inputs[name]) if callable(value) else value
                yield Case(case.label, tuple(inputs.values()))

    def _drawn(self, rng: CaseGenerator, group_size: int, m: int, n: int, k: int) -> tuple:
        sizes: dict[str, Any] = {"m": m, "n": n, "k": k, "M": m, "N": n, "K": k, "D": k}
        for name, how in self.sizes.items():
            how = rng.pick(how) if isinstance(how, tuple) else how
            sizes[name] = evaluate(how, sizes)
        return tuple(
            draw_argument(kind, self.values.get(name), rng, group_size, sizes)
            for name, kind in self.arguments.items()
            if not isinstance(kind, Number) or kind.allowed or self.values.get(name)
        )
