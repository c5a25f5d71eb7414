"""Compile every kernel for a GPU that need not be there, and read what it takes.

The launchers run on the CPU with the launch replaced by a recorder, so what is compiled is what
they launch. Nothing is executed. Needs a process without `TRITON_INTERPRET`.
"""

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch

from arbcli.errors import ArbError
from arbcli.kernels._triton import HAS_TRITON, INTERPRETED
from arbcli.kernels.spec import KernelSpec


@dataclass(frozen=True, slots=True)
class CompileResult:
    """What compiling one kernel for one target gave."""

    kernel: str
    target: str
    variants: int
    """Sets of dtypes and constants that the launchers ask for."""
    error: str | None
    """First line of the compiler's complaint."""


@contextmanager
def _recorded_launches(record: Callable[[Any, tuple, dict], None]) -> Iterator[None]:
    from triton.runtime.jit import JITFunction

    run = JITFunction.run
    JITFunction.run = lambda self, *args, grid, warmup, **kwargs: record(self, args, kwargs)
    try:
        yield
    finally:
        JITFunction.run = run


def _type_of(value: object) -> str:
    """Name the type of a launch argument in the compiler's words."""
    if isinstance(value, torch.Tensor):
        name = str(value.dtype).removeprefix("torch.")
        short = {"bfloat16": "bf16", "float32": "fp32", "float16": "fp16", "uint8": "u8"}
        return "*" + short.get(name, name.replace("int", "i"))
    if isinstance(value, float):
        return "fp32"
    return "i32" if -(2**31) <= value < 2**31 else "i64"


def _variants(spec: KernelSpec, group_size: int) -> list[tuple[Any, dict, dict]]:
    """List the (function, signature, constants) that the launcher of a spec asks for."""
    found: dict[tuple, tuple[Any, dict, dict]] = {}

    def record(function, args, kwargs) -> None:
        named = dict(zip(function.arg_names, args, strict=False)) | kwargs
        constants = {p.name: named[p.name] for p in function.params if p.is_constexpr}
        signature = {
            name: "constexpr" if name in constants else _type_of(value)
            for name, value in named.items()
            if name in function.arg_names
        }
        key = (function.fn.__name__, *sorted(signature.items()), *sorted(constants.items()))
        found[key] = (function, signature, constants)

    with _recorded_launches(record):
        for case in spec.cases(torch.device("cpu"), group_size):
            for dtype in (torch.float32, torch.bfloat16):
                inputs = (
                    value.to(dtype)
                    if isinstance(value, torch.Tensor) and value.dtype == torch.float32
                    else value
                    for value in case.inputs
                )
                spec.triton(*inputs)
    return list(found.values())


def compile_kernels(
    specs: Iterable[KernelSpec], targets: Iterable[tuple[str, int | str, int]], group_size: int
) -> list[CompileResult]:
    """Compile kernels ahead of time for each target.

    Args:
        specs: whose kernels to compile.
        targets: (backend, architecture, warp size), e.g. ("cuda", 90, 32).
        group_size: G.

    Raises:
        ArbError: triton is missing or interpreted here.
    """
    if not HAS_TRITON or INTERPRETED:
        raise ArbError(
            "kernels cannot be compiled in this process",
            hint="install triton, and leave the environment variable `TRITON_INTERPRET` unset",
        )
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    results = []
    for spec in specs:
        variants = _variants(spec, group_size)
        for target in targets:
            error = None
            for function, signature, constants in variants:
                source = ASTSource(fn=function, signature=signature, constexprs=constants)
                try:
                    triton.compile(source, target=GPUTarget(*target))
                except Exception as failure:
                    error = f"{function.fn.__name__}: {str(failure).splitlines()[-1]}"
                    break
            results.append(
                CompileResult(spec.name, f"{target[0]}:{target[1]}", len(variants), error)
            )
    return results
