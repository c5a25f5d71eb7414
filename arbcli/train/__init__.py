"""Training: the step, the run, what a run leaves on disk.

`arbcli.train(config)` is a function, and `arbcli.train` this package: once anything of it has been
imported, Python gives the package that name. So it can be called, and does what the function does.
"""

import sys
from types import ModuleType
from typing import Any


class _CalledPackage(ModuleType):
    def __call__(self, *arguments: Any, **options: Any) -> Any:
        from arbcli import start_training

        return start_training(*arguments, **options)


sys.modules[__name__].__class__ = _CalledPackage
