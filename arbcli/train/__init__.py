"""Training: the step, the run, and the files of a run.

`arbcli.train` is both a function and this package: importing a submodule rebinds the name to the
package. The package is therefore callable, and calls the function.
"""

import sys
from types import ModuleType
from typing import Any


class _CalledPackage(ModuleType):
    def __call__(self, *arguments: Any, **options: Any) -> Any:
        from arbcli import start_training

        return start_training(*arguments, **options)


sys.modules[__name__].__class__ = _CalledPackage
