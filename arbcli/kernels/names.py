"""Names of all kernels, without importing torch, which takes seconds."""

import re
from collections.abc import Iterable
from functools import cache
from pathlib import Path

from arbcli.base.errors import ArbError, quoted

SPEC = re.compile(r'\bOperation\(\s*"(\w+)"')
"""Pattern of the declaration of an operation in the source of a kernel."""


TARGETS = ("sm_80", "sm_89", "sm_90", "sm_100", "sm_120", "gfx942")
"""GPUs to compile for, by vendor name."""


def check_targets(names: str) -> list[str]:
    """Parse a list of targets; `all` selects every target.

    Raises:
        ArbError: a name is unknown.
    """
    chosen = [*TARGETS] if names == "all" else [name.strip() for name in names.split(",")]
    _check_known(chosen, TARGETS, "target", "use `all`, or some of")
    return chosen


def kernel_files() -> list[Path]:
    """List the source files of the core's kernels, then those of the families' kernels."""
    package = Path(__file__).parents[1]
    core, families = (package / "kernels").rglob("*.py"), package.glob("families/*/kernels/*.py")
    return [*sorted(core), *sorted(families)]


@cache
def sources_of_kernels() -> list[tuple[str, list[str]]]:
    """List the modules that declare kernels, with the kernels' names."""
    root = Path(__file__).parents[2]
    declared = {path: SPEC.findall(path.read_text("utf-8")) for path in kernel_files()}
    return [
        (".".join(path.relative_to(root).with_suffix("").parts), names)
        for path, names in declared.items()
        if names
    ]


def kernel_names() -> tuple[str, ...]:
    """List the names of all kernels."""
    return tuple(name for _, names in sources_of_kernels() for name in names)


def check_kernel_names(names: Iterable[str]) -> None:
    """Check that every name is the name of a kernel.

    Raises:
        ArbError: a name is unknown.
    """
    _check_known(names, kernel_names(), "kernel", "choose from")


def _check_known(names: Iterable[str], known: tuple[str, ...], kind: str, hint: str) -> None:
    for name in names:
        if name not in known:
            raise ArbError(f"no {kind} is named `{name}`", hint=f"{hint}: {quoted(known)}")
