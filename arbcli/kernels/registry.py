"""Registry of all operations, for `arb verify-kernels`, tests and timings.

Modules that declare an operation are found by their source, and need no entry here.
"""

from importlib import import_module

from arbcli.kernels.names import sources_of_kernels
from arbcli.kernels.runtime.operation import Operation


def _find() -> dict[str, Operation]:
    """Import the modules that declare operations; return operations by name, in source order."""
    found: dict[str, Operation] = {}
    for module_name, names in sources_of_kernels():
        module = import_module(module_name)
        declared = {op.name: op for op in vars(module).values() if isinstance(op, Operation)}
        found |= {name: declared[name] for name in names}
    return found


BY_NAME = _find()
KERNELS = tuple(BY_NAME.values())
