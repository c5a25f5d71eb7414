"""Names of all kernels, without importing torch, which takes seconds."""

import re
from collections.abc import Iterable
from difflib import get_close_matches
from functools import cache
from pathlib import Path

from arbcli.base.errors import ArbError

DECLARATION = re.compile(r"^(\w+)_verification = Verification\(", re.MULTILINE)
"""Pattern of the declaration of how the operation of that name is verified."""


def module_of(path: Path) -> str:
    """Return the name of the module in a source file of the package."""
    return ".".join(path.relative_to(Path(__file__).parents[2]).with_suffix("").parts)


@cache
def sources_of_kernels() -> list[tuple[str, list[str]]]:
    """List the modules that verify operations, core first, with the operations' names."""
    package = Path(__file__).parents[1]
    core, families = (package.glob("verify/kernels/*/*.py"), package.glob("families/*/verify/*.py"))
    sources = [
        (module_of(path), DECLARATION.findall(path.read_text("utf-8")))
        for path in (*sorted(core), *sorted(families))
    ]
    return [(module, names) for module, names in sources if names]


def kernel_names() -> tuple[str, ...]:
    """List the names of all kernels."""
    return tuple(name for _, names in sources_of_kernels() for name in names)


def check_kernel_names(names: Iterable[str]) -> None:
    """Check that every name is the name of a kernel.

    Raises:
        ArbError: a name is unknown.
    """
    known = kernel_names()
    for name in names:
        if name not in known:
            near = get_close_matches(name, known, cutoff=0.5)
            guess = f"did you mean {' or '.join(f'`{k}`' for k in near)}? " if near else ""
            raise ArbError(
                f"no kernel is named `{name}`",
                f"{guess}`arb verify-kernels --list` shows all names",
            )
