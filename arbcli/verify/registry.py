"""Registry of the verifications of all operations.

Modules that declare one are found by their source, and need no entry here.
"""

from importlib import import_module

from arbcli.verify.names import sources_of_kernels
from arbcli.verify.verification import Verification


def _find() -> dict[str, Verification]:
    """Import the modules of verifications; return them by name of the operation, in source order.

    Raises:
        ValueError: a verification has not the name of its operation.
    """
    verifications: dict[str, Verification] = {}
    for module_name, names in sources_of_kernels():
        module = import_module(module_name)
        for name in names:
            verification = getattr(module, f"{name}_verification")
            if verification.name != name:
                raise ValueError(f"`{name}_verification` verifies `{verification.name}`")
            verifications[name] = verification
    return verifications


BY_NAME = _find()
KERNELS = tuple(BY_NAME.values())
