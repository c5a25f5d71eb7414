"""Plant a fault on purpose: a function's syntax tree is changed, or a constant of a module.

A fault is planted on a seam, which survives a rename of locals and the moving of files. A *place*
finds functions: those that a kernel's `Operation` reaches, the methods of a class, all that is
defined in a room. A *change* is a pattern of an expression or a statement, and what takes its
place. A lower-case letter in a pattern is anything at all, the same wherever it is met, so what
locals are called does not matter; other names, constants and what is called are meant. A change
that changes no function, or several, is an error: then the pattern tells too little, or the code
has none of this any more.

A changed function takes the place of the real one in two ways, and both are needed:

- A Python function gets the faulty code object. So it is faulty wherever it is held: by a spec, a
  class, a closure, another module. Nobody has to be found.
- A kernel is not a Python function any more. Triton's interpreter reads its source again, by
  `inspect`, from a file, and compiles that. So the faulty source, decorators and all, is written
  to a file and executed with the module's own globals, and the kernel it makes is put wherever a
  module of `arbcli` has the real one. No private part of triton is touched. Kernels that were
  compiled for a GPU refuse globals that change, so faults are planted in interpreted ones only.
"""

import ast
import copy
import inspect
import sys
import textwrap
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import cache, partial
from importlib import import_module
from itertools import count
from pathlib import Path
from pkgutil import walk_packages
from types import CodeType, FunctionType, ModuleType
from typing import Any

import pytest
from syntax import parsed, walk

from arbcli.verify.check_kernels import find_kernels

Place = Callable[[], list]
"""Finds functions and kernels."""
Change = Callable[[ast.AST], int]
"""Changes the tree of a function in place, and counts the changes."""
Planter = Callable[[ExitStack, Path], None]
"""Plants until the stack is closed; the folder is for source."""


def rewrite(old: str, new: str, only: int | None = None) -> Change:
    """Put one expression or statement in place of another.

    Args:
        old: the pattern: a lower-case letter is anything, `...` after arguments any further ones.
        new: what takes its place, with the same letters.
        only: which of the matches in a function, from 0, in the order of its source; None is all.
    """
    (pattern,), (instead,) = ast.parse(old).body, ast.parse(new).body
    if isinstance(pattern, ast.Expr):
        pattern, instead = pattern.value, instead.value

    def change(tree: ast.AST) -> int:
        rewriter = _Rewriter(pattern, instead, only)
        rewriter.visit(tree)
        return rewriter.changed

    change.pattern = pattern  # tells which functions need no look
    return change


class _Rewriter(ast.NodeTransformer):
    def __init__(self, pattern: ast.AST, instead: ast.AST, only: int | None) -> None:
        self.pattern, self.instead, self.only = pattern, instead, only
        self.met = self.changed = 0

    def visit(self, node: ast.AST) -> ast.AST:
        bindings: dict[str, Any] = {}
        if _matches(self.pattern, node, bindings):
            self.met += 1
            filled = _filled(self.instead, bindings)
            if self.only in (None, self.met - 1) and not _same(filled, node):
                self.changed += 1
                return filled
        return self.generic_visit(node)


def _letter(node: object) -> str | None:
    """Name the letter that stands for anything, if a part of a pattern is one."""
    name = node.id if isinstance(node, ast.Name) else ""
    return name if len(name) == 1 and name.islower() else None


def _is_rest(node: object) -> bool:
    return isinstance(node, ast.Constant) and node.value is ...


def _matches(pattern: object, node: object, bindings: dict[str, Any]) -> bool:
    """Compare a part of a pattern with a part of a function, and note what letters stand for."""
    if letter := _letter(pattern):
        if not isinstance(node, ast.expr) or isinstance(node, ast.Slice):
            return False
        return _same(bindings.setdefault(letter, node), node)
    if isinstance(pattern, list):
        if not isinstance(node, list):
            return False
        if pattern and _is_rest(pattern[-1]):
            pattern, bindings["..."] = pattern[:-1], node[len(pattern) - 1 :]
            node = node[: len(pattern)]
        return len(pattern) == len(node) and all(
            _matches(part, other, bindings) for part, other in zip(pattern, node, strict=True)
        )
    if not isinstance(pattern, ast.AST):
        return type(pattern) is type(node) and pattern == node
    if type(pattern) is not type(node):
        return False
    if isinstance(pattern, ast.Call) and pattern.args and _is_rest(pattern.args[-1]):
        bindings["keywords"] = node.keywords
        pattern = ast.Call(pattern.func, pattern.args, node.keywords)
    fields = [field for field in pattern._fields if field not in ("ctx", "kind", "type_comment")]
    return all(
        _matches(getattr(pattern, name, None), getattr(node, name, None), bindings)
        for name in fields
    )


def _same(one: ast.AST, other: ast.AST) -> bool:
    return ast.unparse(one) == ast.unparse(other)


def _filled(instead: ast.AST, bindings: dict[str, Any]) -> ast.AST:
    """Copy what takes a pattern's place, with what its letters stand for."""

    class Filler(ast.NodeTransformer):
        def visit_Name(self, node: ast.Name) -> ast.AST:
            return copy.deepcopy(bindings[node.id]) if _letter(node) else node

        def visit_Call(self, node: ast.Call) -> ast.AST:
            rest = bool(node.args) and _is_rest(node.args[-1])
            node.args = node.args[:-1] if rest else node.args
            self.generic_visit(node)
            if rest:
                node.args += copy.deepcopy(bindings["..."])
                node.keywords += copy.deepcopy(bindings["keywords"])
            return node

    return Filler().visit(copy.deepcopy(instead))


def functions_of_kernel(name: str, backend: str = "triton") -> Place:
    """Find all functions and kernels that a spec's implementation reaches by global names."""

    def find() -> list:
        (spec,) = find_kernels([name])
        return _reached(getattr(spec, backend))

    return find


def launched(name: str) -> Place:
    """Find the kernels that a spec's launchers launch, without those that these call."""

    def find() -> list:
        functions = [
            value for value in functions_of_kernel(name)() if isinstance(value, FunctionType)
        ]
        inner = [named for function in functions for named in _named(function)]
        return [kernel for kernel in inner if _is_kernel(kernel)]

    return find


def functions_of_package(*rooms: str) -> Place:
    """Find all functions and methods that are defined in packages or modules of `arbcli`."""

    def find() -> list:
        functions: dict[int, Any] = {}
        for module in _modules(rooms):
            for value in vars(module).values():
                if getattr(value, "__module__", None) == module.__name__:
                    parts = vars(value).values() if isinstance(value, type) else [value]
                    functions |= {id(part): part for part in map(_function, parts) if part}
        return [*functions.values()]

    return find


def method(owner: type, name: str) -> Place:
    """Find a method of a class."""
    return lambda: [_function(vars(owner)[name])]


def _modules(rooms: tuple[str, ...]) -> Iterator[ModuleType]:
    for room in rooms:
        module = import_module(f"arbcli.{room}")
        yield module
        for info in walk_packages(getattr(module, "__path__", []), f"{module.__name__}."):
            if not info.name.endswith(".modeling"):  # which imports Transformers
                yield import_module(info.name)


def _function(value: object) -> Callable | None:
    """Take a function out of what a class wraps it in; None if it is none, or was generated."""
    if isinstance(value, staticmethod | classmethod):
        value = value.__func__
    if isinstance(value, property):
        value = value.fget
    plain = inspect.unwrap(value) if callable(value) else None
    written = isinstance(plain, FunctionType) and Path(plain.__code__.co_filename).exists()
    return value if written else None


def _is_kernel(value: object) -> bool:
    """Whether triton made this of a function; both of its kinds have that as `fn`."""
    return type(value).__module__.startswith("triton.") and hasattr(value, "fn")


def _names(code: CodeType) -> Iterator[str]:
    yield from code.co_names
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            yield from _names(constant)


def _named(function: object) -> list:
    """List the functions and kernels of `arbcli` that a function has global names for, or holds."""
    if isinstance(function, partial):
        return [function.func, *(a for a in function.args if isinstance(a, FunctionType))]
    function = function.fn if _is_kernel(function) else inspect.unwrap(function)
    values = [function.__globals__.get(name) for name in _names(function.__code__)]
    values += [cell.cell_contents for cell in function.__closure__ or ()]
    kernels = [value for value in values if _is_kernel(value)]
    functions = [value for value in values if isinstance(value, FunctionType)]
    return [
        value
        for value in kernels + functions
        if (value.fn if _is_kernel(value) else value).__module__.startswith("arbcli.")
    ]


def _reached(start: Callable) -> list:
    reached, waiting = {}, [start]
    while waiting:
        function = waiting.pop(0)
        if id(function) not in reached:
            reached[id(function)] = function
            waiting += _named(function)
    return [function for function in reached.values() if not isinstance(function, partial)]


def edit(place: Place, change: Change) -> Planter:
    """Change the one function of a place that a change is about."""

    def plant(stack: ExitStack, folder: Path) -> None:
        changed = {}
        for target in place():
            plain = target.fn if _is_kernel(target) else inspect.unwrap(target)
            if hasattr(target, "cache_clear"):
                target.cache_clear()
                stack.callback(target.cache_clear)
            if plain not in changed and _may_fit(change, plain.__code__):
                tree = copy.deepcopy(_definition(plain.__code__))
                if change(tree):
                    changed[plain] = target, ast.unparse(ast.fix_missing_locations(tree))
        names = [plain.__qualname__ for plain in changed]
        assert len(names) == 1, f"the change fits {names or 'no function'}"
        ((plain, (target, source)),) = changed.items()
        path = folder / f"faulty_{next(_NUMBERS)}.py"
        if _is_kernel(target):
            _replace_kernel(stack, target, source, path)
        else:
            _replace_code(stack, plain, source, path)

    return plant


@cache
def _definitions(file: str) -> dict[int, ast.AST]:
    """Find the functions of a file by their first lines, those of decorators included."""
    functions = [node for node in walk(parsed(Path(file))) if isinstance(node, ast.FunctionDef)]
    return {node.lineno: node for node in functions} | {
        node.decorator_list[0].lineno: node for node in functions if node.decorator_list
    }


def _definition(code: CodeType) -> ast.AST:
    return _definitions(code.co_filename)[code.co_firstlineno]


@cache
def _nodes(code: CodeType) -> dict[type, list[ast.AST]]:
    """Group the nodes of a function by their kind."""
    groups: dict[type, list[ast.AST]] = {}
    for node in walk(_definition(code)):
        groups.setdefault(type(node), []).append(node)
    return groups


def _may_fit(change: Change, code: CodeType) -> bool:
    """Whether the pattern of a change is in a function: most functions of a place have none."""
    nodes = _nodes(code).get(type(change.pattern), ())
    return any(_matches(change.pattern, node, {}) for node in nodes)


def set_constant(room: str, name: str, value: object) -> Planter:
    """Give a constant another value in the modules of a room that have it by this name."""

    def plant(stack: ExitStack, folder: Path) -> None:
        patch = stack.enter_context(pytest.MonkeyPatch.context())
        holders = [module for module in _modules((room,)) if name in vars(module)]
        values = {repr(getattr(module, name)) for module in holders}
        assert len(values) == 1, f"`{name}` has the values {values or 'none'}"
        assert repr(value) not in values, f"`{name}` is {value} anyway"
        for module in holders:
            patch.setattr(module, name, value)

    return plant


@dataclass(frozen=True)
class Fault:
    """One mistake, and the check that must notice it."""

    kind: str
    name: str
    plant: Planter
    caught_by: str

    @contextmanager
    def planted(self, folder: Path) -> Iterator[None]:
        """Plant it, and take it away again."""
        with ExitStack() as stack:
            self.plant(stack, folder)
            yield


_NUMBERS = count()


def _loaded() -> list[ModuleType]:
    return [module for name, module in sys.modules.items() if name.split(".")[0] == "arbcli"]


def _replace_kernel(stack: ExitStack, kernel: object, source: str, path: Path) -> None:
    """Make a kernel of the source, and put it wherever a module has the real one."""
    path.write_text(source)
    made: dict[str, Any] = {}
    exec(compile(source, str(path), "exec"), kernel.fn.__globals__, made)
    (faulty,) = made.values()
    patch = stack.enter_context(pytest.MonkeyPatch.context())
    for module in _loaded():
        for name, value in [*vars(module).items()]:
            if value is kernel:
                patch.setattr(module, name, faulty)


def _replace_code(stack: ExitStack, function: FunctionType, source: str, path: Path) -> None:
    """Compile the source, without decorators, to the code of the function."""
    definition = ast.parse(source).body[0]
    definition.decorator_list = []
    free = function.__code__.co_freevars
    around = f"def around({', '.join(free)}):\n{textwrap.indent(ast.unparse(definition), '    ')}"
    path.write_text(around)
    (outer,) = _codes(compile(around, str(path), "exec"), "around")
    (code,) = _codes(outer, function.__name__)
    assert code.co_freevars == free
    patch = stack.enter_context(pytest.MonkeyPatch.context())
    patch.setattr(function, "__code__", code)


def _codes(code: CodeType, name: str) -> list[CodeType]:
    return [part for part in code.co_consts if isinstance(part, CodeType) and part.co_name == name]
