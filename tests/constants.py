"""Every number and name that the package outside of its kernels has written down, in one list.

And what goes nowhere: parameters that no caller in the package gives, those that a function does
not read, and what `seams.py` finds. Where a value is not handed on any more, one of these is new.

`python tests/constants.py` writes the list to `constants.txt`; `test_constants.py` compares. What
differs from it was changed on purpose, and then it is read here once more; or it was not.
"""

import ast
import dataclasses
from collections.abc import Iterator
from pathlib import Path

import seams
from syntax import parsed, walk

import arbcli
from arbcli.config.presets import PRESETS

PACKAGE = Path(arbcli.__file__).parent
WRITTEN = Path(__file__).with_name("constants.txt")
BOUNDS = ("min", "max", "least", "most")
MOST_ARGUMENTS = 99
LONGEST = 60
"""Letters of a string: what is longer is said to people."""
PARTS = (
    ast.Constant, ast.Tuple, ast.List, ast.Dict, ast.Set, ast.UnaryOp, ast.BinOp, ast.Name,
    ast.Attribute, ast.operator, ast.unaryop, ast.expr_context,
)  # fmt: skip

OF_KERNELS = ("kernels/", "verify/kernels/")
"""Modules of kernels and of their verification."""


def constants() -> str:
    """List them, a line each: where it is, its name and its value as it is written."""
    trees = {
        path.relative_to(PACKAGE).with_suffix("").as_posix(): parsed(path)
        for path in sorted(PACKAGE.rglob("*.py"))
    }
    lines = [
        f"{place}: {line}"
        for place, tree in trees.items()
        if not place.startswith(OF_KERNELS)
        for line in _found(tree.body, "")
    ]
    lines += [f"{name}: {dataclasses.asdict(shape)}" for name, shape in PRESETS.items()]
    lines += _leading_nowhere(trees)
    calls = seams.calls_in(trees)
    found = [*seams.left_out(calls), *seams.exchanged(calls), *seams.never_read(trees)]
    lines += [line for line in found if not line.startswith(OF_KERNELS)]
    unlike = seams.unlike_others(calls)
    lines += [line for line in unlike if not line.startswith(("kernels/", "verify/"))]
    lines += seams.lacking(trees)
    return "\n".join(lines) + "\n"


def _found(body: list[ast.stmt], owner: str) -> Iterator[str]:
    for node in body:
        if isinstance(node, ast.ClassDef):
            yield from _found(node.body, f"{owner}{node.name}.")
        elif isinstance(node, ast.FunctionDef):
            yield from _defaults(node, owner)
            if written := seams.written_in(node):
                yield f"{owner}{node.name}: {' '.join(written)}"
            yield from _found([n for n in node.body if isinstance(n, ast.FunctionDef)], owner)
        elif isinstance(node, ast.Assign | ast.AnnAssign | ast.AugAssign) and node.value:
            target = node.targets[0] if isinstance(node, ast.Assign) else node.target
            if _is_constant(node.value):
                bounds = _bounds(node.annotation) if isinstance(node, ast.AnnAssign) else ""
                yield f"{owner}{ast.unparse(target)} = {ast.unparse(node.value)}{bounds}"
            elif bounds := _bounds(node.value):
                yield f"{owner}{ast.unparse(target)}:{bounds}"


def _defaults(function: ast.FunctionDef, owner: str) -> Iterator[str]:
    """List the values that parameters have unless they are given, and the bounds of options."""
    about = function.args
    places = [*about.posonlyargs, *about.args]
    given = zip(places[len(places) - len(about.defaults) :], about.defaults, strict=True)
    for argument, value in (*given, *zip(about.kwonlyargs, about.kw_defaults, strict=True)):
        bounds = _bounds(argument)
        if value is not None and (_is_constant(value) or bounds):
            yield f"{owner}{function.name}({argument.arg}={ast.unparse(value)}{bounds})"


class _Given:
    """Arguments of all calls of a function of that name: keywords, and the most by position."""

    def __init__(self) -> None:
        self.keywords: set[str | None] = set()
        self.places = 0

    def add(self, arguments: list[ast.expr], keywords: list[ast.keyword]) -> None:
        self.keywords |= {each.arg for each in keywords}  # None is any of them
        spread = any(isinstance(each, ast.Starred) for each in arguments)
        self.places = max(self.places, MOST_ARGUMENTS if spread else len(arguments))

    def has(self, parameter: str, place: int) -> bool:
        return bool({parameter, None} & self.keywords) or self.places > place


def _leading_nowhere(trees: dict[str, ast.Module]) -> Iterator[str]:
    given: dict[str, _Given] = {}
    calls = [node for tree in trees.values() for node in walk(tree)]
    for call in (node for node in calls if isinstance(node, ast.Call)):
        name, arguments = _name_of(call.func), call.args
        if name == "partial" and arguments:
            name, arguments = _name_of(arguments[0]), arguments[1:]
        given.setdefault(name, _Given()).add(arguments, call.keywords)
    for place, tree in trees.items():
        for owner, function in _functions(tree.body, ""):
            name = owner if function.name == "__init__" else function.name
            about = function.args
            static = any("staticmethod" in ast.unparse(d) for d in function.decorator_list)
            ordered = [*about.posonlyargs, *about.args][bool(owner) and not static :]
            optional = [*enumerate(ordered)][len(ordered) - len(about.defaults) :]
            pairs = zip(about.kwonlyargs, about.kw_defaults, strict=True)
            optional += [(MOST_ARGUMENTS, each) for each, default in pairs if default is not None]
            where = f"{place}: {f'{owner}.' * bool(owner)}{function.name}"
            if name in given:
                for number, each in optional:
                    if not given[name].has(each.arg, number):
                        yield f"{where}({each.arg}) is given by no caller"
            read = {n.id for n in walk(function) if isinstance(n, ast.Name)}
            if not place.startswith(OF_KERNELS) and _computes(function):
                for each in (*ordered, *about.kwonlyargs):
                    if each.arg not in read and not each.arg.startswith("_"):
                        yield f"{where}({each.arg}) is not read"


def _functions(body: list[ast.stmt], owner: str) -> Iterator[tuple[str, ast.FunctionDef]]:
    for node in body:
        if isinstance(node, ast.ClassDef):
            yield from _functions(node.body, node.name)
        elif isinstance(node, ast.FunctionDef):
            yield owner, node


def _computes(function: ast.FunctionDef) -> bool:
    """Return whether a function is more than a default of a class: constant, nothing, error."""
    return any(isinstance(node, ast.Call | ast.Name) for s in function.body for node in walk(s)
               if not isinstance(s, ast.Raise))  # fmt: skip


def _name_of(function: ast.expr) -> str:
    return getattr(function, "id", getattr(function, "attr", ""))


def _bounds(value: ast.AST) -> str:
    """Find the least and the most that options take, wherever they are declared."""
    calls = [node for node in walk(value) if isinstance(node, ast.Call)]
    found = [each for call in calls for each in call.keywords if each.arg in BOUNDS]
    return "".join(
        f" {ast.unparse(each)}"
        for each in found
        if isinstance(each.value, ast.Name) or _is_constant(each.value)
    )


def _is_constant(value: ast.expr) -> bool:
    nodes = list(walk(value))
    found = [node.value for node in nodes if isinstance(node, ast.Constant)]
    told = [one for one in found if one not in (None, "") and one is not Ellipsis]
    short = all(not isinstance(one, str) or len(one) <= LONGEST for one in found)
    return all(isinstance(node, PARTS) for node in nodes) and short and bool(told)


if __name__ == "__main__":
    WRITTEN.write_text(constants(), encoding="utf-8")
