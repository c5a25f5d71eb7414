"""Registry of all operations, whose modules are found by their source and need no entry here."""

import re
from functools import cache
from importlib import import_module

from arbcli.kernels.runtime.operation import Operation
from arbcli.kernels.sources import kernel_files, module_of

DECLARATION = re.compile(r'\bOperation\(\s*"(\w+)"')
"""Pattern of the declaration of an operation."""


@cache
def all_operations() -> dict[str, Operation]:
    """Import the modules that declare operations; return operations by name, in source order."""
    operations: dict[str, Operation] = {}
    for path in kernel_files():
        names = DECLARATION.findall(path.read_text("utf-8"))
        if names:
            module = import_module(module_of(path))
            declared = {op.name: op for op in vars(module).values() if isinstance(op, Operation)}
            operations |= {name: declared[name] for name in names}
    return operations
