"""Every kernel there is, by its operation: what `arb verify-kernels`, tests and timings go through.

A module of this package that declares an operation is found by its source, and needs no entry here.
"""

from importlib import import_module

from arbcli.kernels.names import sources_of_kernels
from arbcli.kernels.runtime.operation import Operation


def _find() -> dict[str, Operation]:
    """Import the modules that declare operations; by name, in the order of their sources."""
    found: dict[str, Operation] = {}
    for path, names in sources_of_kernels():
        module = import_module(".".join(("arbcli.kernels", *path.with_suffix("").parts)))
        declared = {op.name: op for op in vars(module).values() if isinstance(op, Operation)}
        found |= {name: declared[name] for name in names}
    return found


BY_NAME = _find()
KERNELS = tuple(BY_NAME.values())
