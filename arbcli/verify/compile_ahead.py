"""Ahead-of-time compilation of every kernel for GPUs that need not be present.

The launchers run as on the GPU, on tensors without memory and with the launch replaced by a
recorder, so what is compiled is what they launch there on the fixed cases and on the matrices of
presets. Nothing is executed. Processes without `TRITON_INTERPRET` do the work, as kernels that
were defined for the interpreter cannot be compiled.
"""

import re
import subprocess
import tempfile
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import NamedTuple

import torch

from arbcli.base.errors import ArbError
from arbcli.inspect.trace import no_memory
from arbcli.kernels.runtime._triton import HAS_TRITON, INTERPRETED
from arbcli.kernels.runtime.backend import compile_for
from arbcli.verify.case_generator import ShapeGenerator
from arbcli.verify.cases import SMALL_MATRIX, production_cases
from arbcli.verify.check_kernels import find_kernels
from arbcli.verify.names import check_targets
from arbcli.verify.variants import Launch, Variant, recorded_launches, variant_of
from arbcli.verify.verification import Verification
from arbcli.verify.workers import Workers


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
        """Compute capability; (0, 0) for GPUs without one."""
        return divmod(int(self.architecture), 10) if self.backend == "cuda" else (0, 0)


TARGETS = {
    "sm_80": Target("cuda", 80, 32, 163 << 10, 108),
    "sm_89": Target("cuda", 89, 32, 99 << 10, 58),
    "sm_90": Target("cuda", 90, 32, 227 << 10, 132),
    "sm_100": Target("cuda", 100, 32, 227 << 10, 148),
    "sm_120": Target("cuda", 120, 32, 99 << 10, 170),
    "gfx942": Target("hip", "gfx942", 64, 64 << 10, 304),
}
"""Targets by architecture: A100, L4 and RTX 40, H100 and H200, B200, RTX 50, MI300."""
PARKED_BYTES = 16
"""ptxas parks up to four rarely used values to fit one more block of threads; more is a spill."""


@dataclass(frozen=True, slots=True)
class CompileResult:
    """Result of compiling one kernel for one target."""

    kernel: str
    target: str
    variants: int
    """Sets of types, constants and specialisations that were compiled."""
    registers: int
    """Registers of one thread; like the next two figures, the maximum of all variants."""
    spill_bytes: int
    """Registers of one thread that had to be kept in memory, in the cases that a CPU has too: wide
    heads and rows, which are drawn for a GPU alone, may spill."""
    shared_bytes: int
    """Shared memory of one block of threads."""
    passed: bool
    """Whether every variant compiled, without spilling, and fits."""
    error: str | None
    """Why it failed: the compiler's complaint, a spill, or too much shared memory."""


def find_targets(names: str) -> list[str]:
    """Return the names in a list of targets; `all` stands for all of them.

    Raises:
        ArbError: a name is unknown, or triton is missing.
    """
    chosen = check_targets(names)
    if not HAS_TRITON:
        raise ArbError(
            "kernels cannot be compiled without triton",
            hint="install it (Linux only), or leave `--targets` out",
        )
    return chosen


def compile_kernels(
    names: Iterable[str],
    targets: Iterable[str],
    group_size: int,
    number: int = 1,
    on_done: Callable[[CompileResult], None] = lambda result: None,
) -> tuple[CompileResult, ...]:
    """Compile kernels for each target, in processes of their own.

    Args:
        names: kernels to compile; none at all means every one.
        targets: keys of `TARGETS`.
        group_size: G.
        number: number of processes.
        on_done: called with the result of each finished kernel.

    Raises:
        ArbError: triton is missing, or a name is unknown.
    """
    targets = [target for name in targets for target in find_targets(name)]
    jobs = [(spec.name, target, group_size) for spec in find_kernels(names) for target in targets]
    with Workers(number, interpret=False) as workers:
        results = workers.run(
            ((_compile, job) for job in jobs), lambda _index, result: on_done(result)
        )
    return tuple(results)


def _compile(job: tuple[str, str, int]) -> CompileResult:
    """Compile the kernel of a name for a target, with scales of a group size."""
    name, target, group_size = job
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
        except Exception as failure:  # any error of the compiler is the result
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
    """Return the resource that a kernel exceeds; None if it fits."""
    if spill_bytes > PARKED_BYTES:
        return f"{spill_bytes} bytes of registers spill to memory"
    if shared_bytes > target.shared_bytes:
        return f"{shared_bytes} bytes of shared memory do not fit in {target.shared_bytes}"
    return None


def _needs(variant: Variant, target: Target) -> tuple[int, int, int]:
    """Compile a variant; return (registers, bytes spilled, bytes of shared memory)."""
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
    match = re.search(pattern, text)
    if match is None:
        raise ValueError(f"no figures in: {text[:200]}")
    return tuple(map(int, match.groups()))


VALUE_DEPENDENT = {
    "unpack_trits", "int8_matmul", "grouped_matmul", "grouped_grad_w",
    "spread_chunks", "spread_chunks_backward", "mamba_step",
    "gradient_gains", "smooth_chunks_backward",
}  # fmt: skip
"""Kernels whose cases or launchers ask for numbers in tensors: their tensors have memory. The last
is drawn by thousands of operations, which take minutes without."""
DTYPES = (torch.float32, torch.bfloat16)


def _variants(spec: Verification, group_size: int) -> list[Variant]:
    """List the specialisations that the launcher of an operation requests."""
    variants: dict[str, Variant] = {}
    gpu, cpu, may_spill = torch.device("cuda"), torch.device("cpu"), False

    def record(launch: Launch) -> None:
        variant = variant_of(launch)
        variants.setdefault(variant.key, variant._replace(may_spill=may_spill))

    if spec.name in VALUE_DEPENDENT:
        with recorded_launches(record):
            for case in spec.cases(cpu, group_size):
                for dtype in DTYPES:
                    spec.triton(*_convert_floats(case.inputs, dtype, spec.bfloat16))
            may_spill = True
            for case in production_cases(spec, cpu, group_size, SMALL_MATRIX, dtypes=DTYPES):
                spec.triton(*case.inputs)
        return [*variants.values()]
    labels = {case.label for case in spec.cases(cpu, group_size)}
    with no_memory(gpu), recorded_launches(record):
        for case in spec.cases(gpu, group_size):
            may_spill = case.label.removesuffix(" bf16") not in labels
            spec.triton(*case.inputs)
        may_spill = True
        for case in production_cases(spec, gpu, group_size, rng=ShapeGenerator, dtypes=DTYPES):
            spec.triton(*case.inputs)
    return [*variants.values()]


def _convert_floats(inputs: tuple, dtype: torch.dtype, which: tuple[int, ...]) -> Iterator:
    """Convert the float32 tensors among inputs to another dtype."""
    for index, value in enumerate(inputs):
        real = isinstance(value, torch.Tensor) and value.dtype == torch.float32
        yield value.to(dtype) if real and index in which else value
