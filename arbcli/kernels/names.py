"""Names of the kernels, without the kernels: torch takes seconds to import."""

import re
from collections.abc import Iterable
from functools import cache
from pathlib import Path

from arbcli.errors import ArbError

SPEC = re.compile(r'\bOperation\(\s*"(\w+)"')
"""How the source of a kernel begins its spec."""


@cache
def kernel_names() -> tuple[str, ...]:
    """Read the names of all kernels from their sources."""
    sources = sorted(Path(__file__).parent.rglob("*.py"))
    return tuple(name for path in sources for name in SPEC.findall(path.read_text("utf-8")))


def check_kernel_names(names: Iterable[str]) -> None:
    """Refuse names that no kernel has.

    Raises:
        ArbError: a name is unknown.
    """
    known = kernel_names()
    for name in names:
        if name not in known:
            listed = ", ".join(f"`{other}`" for other in known)
            raise ArbError(f"no kernel is named `{name}`", hint=f"choose from: {listed}")
