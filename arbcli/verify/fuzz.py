"""Draw cases of a kernel: random ones, and the matrices of real models.

Every drawing makes one case for a matrix of N outputs by K inputs and M rows of activations, from
a generator that also decides strides, offsets, types and states. A plain one leaves those plain.
"""

from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from arbcli.kernels.codec.packed import Packed
from arbcli.kernels.runtime.inputs import dtype_name
from arbcli.verify.case_generator import CaseGenerator
from arbcli.verify.registry import BY_NAME
from arbcli.verify.verification import Case, Verification

TILES = (16, 32, 64, 128, 160, 256, 320)
"""Boundaries of tiles, planes and blocks of weights."""
ROW_TILES = (8, 16, 32, 64, 128)
"""The same of rows of activations, which fused products take up to 64 of."""
REAL_ROWS = (1, 64, 2048)


def fuzz_cases(
    name: str, device: torch.device, group_size: int, seeds: Iterable[int]
) -> Iterator[Case]:
    """Draw one random case of a kernel from each seed."""
    for seed in seeds:
        rng = CaseGenerator(seed, device)
        m, n, k = rng.near(ROW_TILES), rng.near(TILES), rng.near(TILES)
        if m * n < 64 or n * k < 64:  # so few sums can cancel to any relative error
            m, n, k = m + 64, n + 64, k + 5
        case = _case(name, f"seed {seed}: ", rng, group_size, m, n, k)
        # two rows of some matrix at a time, or about half of one
        chunk = rng.pick((None, 1, n * k // 2, m * k // 2))
        label = case.label if chunk is None else f"{case.label} by {chunk}"
        yield replace(case, label=label, chunk_elements=chunk)


@dataclass(frozen=True, slots=True)
class Drawn:
    """Coverage of the random cases of a kernel, read off their inputs."""

    cases: int
    elements: tuple[int, int]
    """Minimum and maximum size of the largest tensor of a case, in elements."""
    dtypes: dict[str, int]
    """Cases by the type of a tensor that they have; so are the other counts."""
    group_sizes: dict[str, int]
    strided: int
    """Cases with a tensor that is not contiguous."""
    offset: int
    """Cases with a tensor that begins inside of its memory."""
    saturated: int
    """Cases with a tensor of bytes that are all equal, and not 0."""
    in_parts: int
    """Cases that the torch backend works on in parts."""
    never: tuple[str, ...]
    """Counted properties that the kernel's inputs could have had, and never had."""


class Tally:
    """Counts the properties of a kernel's random cases.

    Args:
        name: name of the kernel.
    """

    def __init__(self, name: str) -> None:
        self.name = name
        self.counts: Counter[str] = Counter()
        self.dtypes: Counter[str] = Counter()
        self.group_sizes: Counter[str] = Counter()
        self.elements: list[int] = []
        self.has_bytes = False

    def add(self, case: Case) -> None:
        """Count one case."""
        tensors = list(_tensors(case.inputs))
        size_of = {v.group_size for v in case.inputs if isinstance(v, Packed)}
        of_bytes = [t for t in tensors if t.dtype in (torch.int8, torch.uint8)]
        self.has_bytes |= bool(of_bytes)
        self.elements.append(max(t.numel() for t in tensors))
        self.dtypes.update({dtype_name(t.dtype) for t in tensors})
        self.group_sizes.update(map(str, size_of))
        self.counts["strided"] += any(not t.is_contiguous() for t in tensors)
        self.counts["offset"] += any(t.storage_offset() > 0 for t in tensors)
        self.counts["saturated"] += any(map(_is_saturated, of_bytes))
        self.counts["in_parts"] += case.chunk_elements is not None

    def drawn(self) -> Drawn:
        """Return the coverage of the counted cases."""
        possible = ["in_parts"]
        if not BY_NAME[self.name].one_layout:
            possible += ["strided", "offset", *(["saturated"] if self.has_bytes else [])]
        return Drawn(
            cases=len(self.elements),
            elements=(min(self.elements), max(self.elements)),
            dtypes=dict(sorted(self.dtypes.items())),
            group_sizes=dict(self.group_sizes),
            **{name: self.counts[name] for name in ("strided", "offset", "saturated", "in_parts")},
            never=tuple(name.replace("_", " ") for name in possible if not self.counts[name]),
        )


def _tensors(inputs: tuple) -> Iterator[Tensor]:
    for value in inputs:
        if isinstance(value, tuple):
            yield from _tensors(value)
        elif isinstance(value, Tensor):
            yield value


def _is_saturated(values: Tensor) -> bool:
    if values.numel() < 5:
        return False
    first = values[(0,) * values.dim()]
    return bool(first != 0) and bool((values == first).all())


def real_rows(name: str) -> tuple[int, ...]:
    """Return the numbers of rows that a kernel multiplies matrices of models by."""
    return REAL_ROWS if BY_NAME[name].needs_rows else REAL_ROWS[:1]


def real_cases(
    name: str,
    device: torch.device,
    group_size: int,
    shapes: Iterable[tuple[int, int]],
    rows: int | None = None,
    turn: int | None = None,
    rng: type[CaseGenerator] = CaseGenerator,
    wanted: Callable[[str], bool] = lambda label: True,
) -> Iterator[Case]:
    """Draw a case of a kernel for every matrix (N, K) of a model, in each dtype.

    Inputs of some kernels do not depend on the matrix: a case with the same shapes, strides, dtypes
    and arguments as an earlier one is skipped.

    Args:
        name: name of the kernel.
        device: device of the tensors.
        group_size: G.
        shapes: (N, K) of the matrices.
        rows: number of rows of activations, one of `real_rows`; None is all of them.
        turn: None draws all cases. Otherwise each matrix has one number of rows and one dtype,
            which alternate; six consecutive turns cover all cases.
        rng: random source.
        wanted: called with the label of a case without its dtype; returns whether to draw it.
    """
    seen, choices = set(), real_rows(name)
    for index, (n, k) in enumerate(shapes):
        for place, m in enumerate(choices):
            its_turn = turn is None or (index + turn - place) % len(choices) == 0
            if rows not in (None, m) or not its_turn:
                continue
            for kind, dtype in enumerate((torch.bfloat16, torch.float32)):
                if turn is not None and (index // len(choices) + turn - kind) % 2:
                    continue
                if not wanted(_size(name, m, n, k)):
                    break
                case = _case(name, "", rng(0, device, dtype), group_size, m, n, k)
                form = _form(case.inputs)
                if form not in seen:
                    seen.add(form)
                    yield case
                if not any(_is_real(value) for value in case.inputs):
                    break


def _form(value: Any) -> Any:
    """Describe inputs without the values of tensors."""
    if isinstance(value, Tensor):
        return value.shape, value.stride(), value.storage_offset(), value.dtype
    return tuple(map(_form, value)) if isinstance(value, tuple) else repr(value)


def real_reference(spec: Verification) -> Callable:
    """Return the reference for large cases, as others compute one weight at a time."""
    return spec.large_reference or (spec.torch if spec.gate.exact else spec.reference)


def _case(
    name: str, prefix: str, rng: CaseGenerator, group_size: int, m: int, n: int, k: int
) -> Case:
    spec = BY_NAME[name]
    inputs = spec.drawn(rng, group_size, m, n, k)
    size = _size(name, m, n, k)
    low = rng.dtype == torch.bfloat16
    label = f"{prefix}{size} bf16" if low and any(map(_is_real, inputs)) else f"{prefix}{size}"
    return Case(label, inputs)


def _size(name: str, m: int, n: int, k: int) -> str:
    return f"{m}x{n}x{k}" if BY_NAME[name].needs_rows else f"{n}x{k}"


def _is_real(value: object) -> bool:
    return isinstance(value, Tensor) and value.dtype.is_floating_point
