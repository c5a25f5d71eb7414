"""Every number and name that the package outside of its kernels has written down, in one list.

`python tests/constants.py` writes the list to `constants.txt`; `test_constants.py` compares. What
differs from it was changed on purpose, and then it is read here once more; or it was not.
"""

import ast
import dataclasses
from collections.abc import Iterator
from pathlib import Path

import arbcli
from arbcli.config.presets import PRESETS

PACKAGE = Path(arbcli.__file__).parent
WRITTEN = Path(__file__).with_name("constants.txt")
BOUNDS = ("min", "max", "least", "most")
LONGEST = 60
"""Letters of a string: what is longer is said to people."""
PARTS = (
    ast.Constant, ast.Tuple, ast.List, ast.Dict, ast.Set, ast.UnaryOp, ast.BinOp, ast.Name,
    ast.Attribute, ast.operator, ast.unaryop, ast.expr_context,
)  # fmt: skip


def constants() -> str:
    """List them, a line each: where it is, its name and its value as it is written."""
    lines = []
    for path in sorted(PACKAGE.rglob("*.py")):
        place = path.relative_to(PACKAGE).with_suffix("").as_posix()
        if not place.startswith("kernels/"):
            tree = ast.parse(path.read_text(encoding="utf-8"))
            lines += [f"{place}: {line}" for line in _found(tree.body, "")]
    lines += [f"{name}: {dataclasses.asdict(shape)}" for name, shape in PRESETS.items()]
    return "\n".join(lines) + "\n"


def _found(body: list[ast.stmt], owner: str) -> Iterator[str]:
    for node in body:
        if isinstance(node, ast.ClassDef):
            yield from _found(node.body, f"{owner}{node.name}.")
        elif isinstance(node, ast.FunctionDef):
            yield from _defaults(node, owner)
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


def _bounds(value: ast.AST) -> str:
    """Find the least and the most that options take, wherever they are declared."""
    calls = [node for node in ast.walk(value) if isinstance(node, ast.Call)]
    found = [each for call in calls for each in call.keywords if each.arg in BOUNDS]
    return "".join(
        f" {ast.unparse(each)}"
        for each in found
        if isinstance(each.value, ast.Name) or _is_constant(each.value)
    )


def _is_constant(value: ast.expr) -> bool:
    nodes = list(ast.walk(value))
    found = [node.value for node in nodes if isinstance(node, ast.Constant)]
    told = [one for one in found if one not in (None, "") and one is not Ellipsis]
    short = all(not isinstance(one, str) or len(one) <= LONGEST for one in found)
    return all(isinstance(node, PARTS) for node in nodes) and short and bool(told)


if __name__ == "__main__":
    WRITTEN.write_text(constants(), encoding="utf-8")
