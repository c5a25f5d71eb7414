"""Compile every kernel for GPUs that need not be there, and read what each needs of them.

The launchers run as on the GPU, on tensors without memory and with the launch replaced by a
recorder, so what is compiled is what they launch there on the fixed cases and on the matrices of
presets. Nothing is executed. Processes without `TRITON_INTERPRET` do the work, as kernels that
were defined for the interpreter cannot be compiled.
"""

import re
import subprocess
import tempfile
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch

from arbcli.errors import ArbError
from arbcli.inspect.trace import without_memory
from arbcli.kernels.runtime._triton import HAS_TRITON, INTERPRETED, TensorDescriptor, tl
from arbcli.kernels.runtime.backend import compile_for
from arbcli.kernels.runtime.launches import replaced_launches
from arbcli.kernels.runtime.spec import KernelSpec
from arbcli.verify.fuzz import ShapeDice, real_cases
from arbcli.verify.kernels import find_kernels
from arbcli.verify.parity import matrix_shapes
from arbcli.verify.workers import JobDone, Workers


class Target(NamedTuple):
    """A kind of GPU."""

    backend: str
    architecture: int | str
    warp_size: int
    shared_bytes: int
    """Shared memory that one block of threads can have."""
    processors: int
    """Multiprocessors: launchers share work out among them."""

    @property
    def capability(self) -> tuple[int, int]:
        """Compute capability; (0, 0) of a GPU that has none."""
        return divmod(self.architecture, 10) if self.backend == "cuda" else (0, 0)


TARGETS = {
    "sm_80": Target("cuda", 80, 32, 163 << 10, 108),
    "sm_89": Target("cuda", 89, 32, 99 << 10, 58),
    "sm_90": Target("cuda", 90, 32, 227 << 10, 132),
    "sm_100": Target("cuda", 100, 32, 227 << 10, 148),
    "sm_120": Target("cuda", 120, 32, 99 << 10, 170),
    "gfx942": Target("hip", "gfx942", 64, 64 << 10, 304),
}
"""By the name its makers use: A100, L4 and RTX 40, H100 and H200, B200, RTX 50, MI300."""
PARKED_BYTES = 16
"""ptxas parks up to four rarely used values to fit one more block of threads; more is a spill."""


@dataclass(frozen=True, slots=True)
class CompileResult:
    """What compiling one kernel for one target gave."""

    kernel: str
    target: str
    variants: int
    """Sets of types, constants and specialisations that were compiled."""
    registers: int
    """Of one thread, the most of all variants; as the other two figures."""
    spill_bytes: int
    """Registers of one thread that had to be kept in memory, in the cases that a CPU has too: wide
    heads and rows, which are drawn for a GPU alone, may spill."""
    shared_bytes: int
    """Shared memory of one block of threads."""
    passed: bool
    """Whether every variant compiled, without spilling, and fits."""
    error: str | None
    """Why it failed: the compiler's complaint, a spill, or too much shared memory."""


class Launch(NamedTuple):
    """What a launcher asked for."""

    function: Any
    grid: tuple[int, ...]
    arguments: dict[str, Any]
    constants: dict[str, Any]
    """Arguments that it is compiled for: those declared so, and None."""
    options: dict[str, Any]
    """How it is compiled: warps, registers."""


class Variant(NamedTuple):
    """One compilation: a function with the types, constants and facts about its arguments."""

    function: Any
    signature: dict[str, str]
    constants: dict[str, Any]
    attributes: dict[tuple[int], list]
    options: dict[str, Any]
    may_spill: bool = False
    """Whether registers in memory are no fault."""


def find_targets(names: str) -> list[str]:
    """Split a list of targets; `all` is every one.

    Raises:
        ArbError: a name is unknown, or triton is missing.
    """
    if not HAS_TRITON:
        raise ArbError(
            "kernels cannot be compiled without triton",
            hint="install it (Linux only), or leave `--targets` out",
        )
    chosen = list(TARGETS) if names == "all" else [name.strip() for name in names.split(",")]
    for name in chosen:
        if name not in TARGETS:
            known = ", ".join(f"`{target}`" for target in TARGETS)
            raise ArbError(f"no target is named `{name}`", hint=f"use `all`, or some of: {known}")
    return chosen


def compile_kernels(
    names: Iterable[str],
    targets: Iterable[str],
    group_size: int,
    number: int = 1,
    progress: Callable[[JobDone], None] = lambda _: None,
) -> tuple[CompileResult, ...]:
    """Compile kernels for each target, in processes of their own.

    Args:
        names: kernels to compile; none at all means every one.
        targets: keys of `TARGETS`.
        group_size: G.
        number: of processes.
        progress: is told each kernel that is done, and what it found.

    Raises:
        ArbError: triton is missing, or a name is unknown.
    """
    targets = [target for name in targets for target in find_targets(name)]
    jobs = [(spec.name, target, group_size) for spec in find_kernels(names) for target in targets]
    with Workers(number, interpret=False) as workers:
        return tuple(workers.map(_compile_job, jobs, progress))


def _compile_job(name: str, target: str, group_size: int) -> CompileResult:
    assert not INTERPRETED, "this process would only interpret kernels"
    (spec,) = find_kernels([name])
    chosen = TARGETS[target]
    with compile_for(chosen.capability, chosen.processors):
        variants = [
            variant
            for variant in _variants(spec, group_size)
            if chosen.backend == "cuda" or not variant.constants.get("PTX")
        ]
    needs, error = [(0, 0, 0)], None
    for variant in variants:
        try:
            registers, spilled, shared = _needs(variant, chosen)
            needs.append((registers, 0 if variant.may_spill else spilled, shared))
        except Exception as failure:  # whatever a compiler complains of is the result
            complaint = f"{type(failure).__name__}: {failure}".strip().splitlines()[-1]
            error = f"{variant.function.fn.__name__}: {complaint}"
            break
    registers, spill_bytes, shared_bytes = map(max, zip(*needs, strict=True))
    error = error or find_excess(spill_bytes, shared_bytes, chosen)
    return CompileResult(
        kernel=name,
        target=target,
        variants=len(variants),
        registers=registers,
        spill_bytes=spill_bytes,
        shared_bytes=shared_bytes,
        passed=error is None,
        error=error,
    )


def find_excess(spill_bytes: int, shared_bytes: int, target: Target) -> str | None:
    """Say what a kernel needs too much of; None if it fits."""
    if spill_bytes > PARKED_BYTES:
        return f"{spill_bytes} bytes of registers spill to memory"
    if shared_bytes > target.shared_bytes:
        return f"{shared_bytes} bytes of shared memory do not fit in {target.shared_bytes}"
    return None


def _needs(variant: Variant, target: Target) -> tuple[int, int, int]:
    """Compile a variant and find its (registers, bytes spilled, bytes of shared memory)."""
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    source = ASTSource(variant.function, variant.signature, variant.constants, variant.attributes)
    compiled = triton.compile(source, target=GPUTarget(*target[:3]), options=variant.options)
    if target.backend == "cuda":
        usage = _cubin_usage(compiled.asm["cubin"])
        registers, spilled = _figures(usage, r"REG:(\d+) STACK:(\d+)")
    else:
        pattern = r"\.private_segment_fixed_size: *(\d+)[\s\S]*?\.vgpr_count: *(\d+)"
        spilled, registers = _figures(compiled.asm["amdgcn"], pattern)
    return registers, spilled, compiled.metadata.shared


def _cubin_usage(cubin: bytes) -> str:
    from triton import knobs

    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        command = [knobs.nvidia.cuobjdump.path, "-res-usage", file.name]
        return subprocess.run(command, check=True, capture_output=True, text=True).stdout


def _figures(text: str, pattern: str) -> tuple[int, ...]:
    found = re.search(pattern, text)
    if found is None:
        raise ValueError(f"no figures in: {text[:200]}")
    return tuple(map(int, found.groups()))


OF_VALUES = {
    "unpack_trits", "digits_matmul", "grouped_matmul", "grouped_grad_w",
    "spread_chunks", "spread_chunks_backward", "mamba_step",
    "gradient_gains", "smooth_chunks_backward",
}  # fmt: skip
"""Kernels whose cases or launchers ask for numbers in tensors: their tensors have memory. The last
is drawn by thousands of operations, which take minutes without."""
FEW_WEIGHTS = 1 << 19
"""Of the matrices of presets that these are drawn for."""


def _variants(spec: KernelSpec, group_size: int) -> list[Variant]:
    """List what the launcher of a spec asks for, each as Triton specialises it.

    Triton compiles arguments of 1 as constants, and knows which are multiples of 16.
    """
    found: dict[str, Variant] = {}
    may_spill = False

    def record(launch: Launch) -> None:
        variant = _variant(launch)
        key = str((variant.function.fn.__name__, *variant[1:]))
        found.setdefault(key, variant._replace(may_spill=may_spill))

    shapes, gpu, cpu = matrix_shapes(), torch.device("cuda"), torch.device("cpu")
    if spec.name in OF_VALUES:
        small = [(n, k) for n, k in shapes if n * k <= FEW_WEIGHTS]
        with recorded_launches(record):
            for case in spec.cases(cpu, group_size):
                for dtype in (torch.float32, torch.bfloat16):
                    spec.triton(*_with_dtype(case.inputs, dtype, spec.bfloat16))
            may_spill = True
            for case in real_cases(spec.name, cpu, group_size, small):
                spec.triton(*case.inputs)
        return [*found.values()]
    labels = {case.label for case in spec.cases(cpu, group_size)}
    with without_memory(gpu), recorded_launches(record):
        for case in spec.cases(gpu, group_size):
            may_spill = case.label.removesuffix(" bf16") not in labels
            spec.triton(*case.inputs)
        may_spill = True
        for case in real_cases(spec.name, gpu, group_size, shapes, dice=ShapeDice):
            spec.triton(*case.inputs)
    return [*found.values()]


def _variant(launch: Launch) -> Variant:
    function, _, named, fixed, options = launch
    plain = {p.name for p in function.params if p.do_not_specialize}
    whole = {key: value for key, value in named.items() if type(value) is int and key not in plain}
    constants = fixed | {key: 1 for key, value in whole.items() if value == 1}
    signature = {
        name: "constexpr" if name in constants else type_of(named[name])
        for name in function.arg_names
    }
    given = [None if signature[name] == "constexpr" else named[name] for name in function.arg_names]
    multiples = {
        path
        for path, value in _flat(given)
        if function.arg_names[path[0]] not in plain and _is_multiple(value)
    }
    attributes = {path: [["tt.divisibility", 16]] for path in sorted(multiples)}
    return Variant(function, signature, constants, attributes, options)


def _is_multiple(value: Any) -> bool:
    """Whether Triton knows of an argument, or of its address, that it is a multiple of 16."""
    if isinstance(value, torch.Tensor):
        return value.storage_offset() * value.itemsize % 16 == 0
    return type(value) is int and value % 16 == 0


def _flat(values: Iterable, path: tuple[int, ...] = ()) -> Iterator[tuple[tuple[int, ...], Any]]:
    """List what tuples of tuples have inside, each with where it is."""
    for index, value in enumerate(values):
        if isinstance(value, tuple):
            yield from _flat(value, (*path, index))
        else:
            yield (*path, index), value


@contextmanager
def recorded_launches(record: Callable[[Launch], None]) -> Iterator[None]:
    """Let launches of kernels be recorded, and do nothing else."""

    def note(function, grid, *args, **kwargs) -> None:
        named = dict(zip(function.arg_names, args, strict=False)) | kwargs
        options = {key: named.pop(key) for key in [*named] if key not in function.arg_names}
        fixed = {p.name: named.pop(p.name) for p in function.params if p.is_constexpr}
        fixed |= {key: named.pop(key) for key in [*named] if named[key] is None}
        places = {name: index for index, name in enumerate(function.arg_names)}
        inside = ((places[key], value) for key, value in named.items() if isinstance(value, tuple))
        for index, values in inside:
            fixed |= {path: x for path, x in _flat(values, (index,)) if type_of(x) == "constexpr"}
        record(Launch(function, grid, named, fixed, options))

    with replaced_launches(note):
        yield


def _with_dtype(inputs: tuple, dtype: torch.dtype, which: tuple[int, ...] | None) -> Iterator:
    """Turn the float32 tensors among some inputs into another type."""
    for index, value in enumerate(inputs):
        real = isinstance(value, torch.Tensor) and value.dtype == torch.float32
        yield value.to(dtype) if real and (which is None or index in which) else value


def type_of(value: object) -> str | tuple:
    """Name the type of a launch argument in the compiler's words."""
    if isinstance(value, tuple):
        return tuple(map(type_of, value))
    if isinstance(value, tl.constexpr):
        return "constexpr"
    if isinstance(value, torch.Tensor):
        name = str(value.dtype).removeprefix("torch.")
        short = {
            "bfloat16": "bf16", "float32": "fp32", "float64": "fp64", "uint8": "u8",
            "float8_e4m3fn": "fp8e4nv",
        }  # fmt: skip
        return "*" + short.get(name, name.replace("int", "i"))
    if isinstance(value, TensorDescriptor):
        return f"tensordesc<{type_of(value.base)[1:]}{value.block_shape}>"
    if isinstance(value, float):
        return "fp32"
    return "i32" if -(2**31) <= value < 2**31 else "i64"
