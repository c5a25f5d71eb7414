"""Plant a fault on purpose: a piece of the source of a function is replaced.

A faulty function takes the place of the real one in two ways, and both are needed:

- A Python function gets the faulty code object. So it is faulty wherever it is held: by a spec, a
  class, a closure, another module. Nobody has to be found.
- A kernel is not a Python function any more. Triton's interpreter reads its source again, by
  `inspect`, from a file, and compiles that. So the faulty source, decorators and all, is written
  to a file and executed with the module's own globals, and the kernel it makes is put wherever a
  module of `arbcli` has the real one. No private part of triton is touched. Kernels that were
  compiled for a GPU refuse globals that change, so faults are planted in interpreted ones only.
"""

import inspect
import sys
import textwrap
from collections.abc import Iterator
from contextlib import contextmanager
from importlib import import_module
from pathlib import Path
from pkgutil import walk_packages
from types import CodeType, FunctionType
from typing import Any, NamedTuple

import pytest

import arbcli


class Fault(NamedTuple):
    """One mistake, and the check that must notice it."""

    caught_by: str
    place: str
    """The qualified name of a function or kernel of `arbcli`."""
    old: str
    """A piece of its source, that no other function of this name has."""
    new: str
    """Replacement of every occurrence."""

    @contextmanager
    def planted(self, folder: Path) -> Iterator[None]:
        """Plant it for the block; the folder is for source."""
        found = [target for target in _functions(self.place) if self.old in _source(target)]
        assert len(found) == 1, f"`{self.old}` is in {len(found)} functions `{self.place}`"
        (target,) = found
        faulty = _source(target).replace(self.old, self.new)
        forget = getattr(target, "cache_clear", lambda: None)
        with pytest.MonkeyPatch.context() as patch:
            if _is_kernel(target):
                _replace_kernel(patch, target, faulty, folder / "faulty.py")
            else:
                function = inspect.unwrap(target)
                patch.setattr(function, "__code__", _faulty_code(function, faulty))
            forget()
            yield
        forget()


def _functions(name: str) -> list[Any]:
    """Find the functions and kernels of a qualified name where they are defined."""
    found = []
    for module in _modules():
        target: Any = module
        for part in name.split("."):
            target = getattr(target, part, None)
        target = getattr(target, "fget", target)
        if getattr(getattr(target, "fn", target), "__module__", None) == module.__name__:
            found.append(target)
    return found


def _modules() -> list[Any]:
    """List what is loaded, but for the models in plain PyTorch, which are references."""
    names = [name for name in sys.modules if name.startswith("arbcli.")]
    return [sys.modules[name] for name in names if not name.endswith(".modeling")]


def _load_all() -> None:
    for package in ("model", "families"):
        path = Path(arbcli.__file__).with_name(package)
        for info in walk_packages([str(path)], f"arbcli.{package}."):
            if not info.name.endswith(".modeling"):  # which imports Transformers
                import_module(info.name)


_load_all()


def _is_kernel(target: Any) -> bool:
    """Whether triton made this of a function; both of its kinds have that as `fn`."""
    return type(target).__module__.startswith("triton.")


def _source(target: Any) -> str:
    function = target.fn if _is_kernel(target) else inspect.unwrap(target)
    return textwrap.dedent(inspect.getsource(function))


def _replace_kernel(patch: pytest.MonkeyPatch, kernel: Any, source: str, path: Path) -> None:
    """Make a kernel of the source, and put it wherever a module has the real one."""
    path.write_text(source)
    made: dict[str, Any] = {}
    exec(compile(source, str(path), "exec"), kernel.fn.__globals__, made)
    (faulty,) = made.values()
    for module in _modules():
        for name, value in [*vars(module).items()]:
            if value is kernel:
                patch.setattr(module, name, faulty)


def _faulty_code(function: FunctionType, source: str) -> CodeType:
    """Compile the source to code that has the variables around the function."""
    free = function.__code__.co_freevars
    around = f"def around({', '.join(free)}):\n{textwrap.indent(source, '    ')}"
    (outer,) = _codes(compile(around, function.__code__.co_filename, "exec"), "around")
    (code,) = _codes(outer, function.__name__)
    assert code.co_freevars == free
    return code


def _codes(code: CodeType, name: str) -> list[CodeType]:
    return [part for part in code.co_consts if isinstance(part, CodeType) and part.co_name == name]
