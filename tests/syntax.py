"""Syntax trees of files, and walks through them in less time than those of `ast` take."""

import ast
from functools import cache
from pathlib import Path

import arbcli


def kernel_files() -> list[Path]:
    """List the source files of the core's kernels, then those of the families' kernels."""
    package = Path(arbcli.__file__).parent
    core, families = (package / "kernels").rglob("*.py"), package.glob("families/*/kernels/*.py")
    return [*sorted(core), *sorted(families)]


@cache
def parsed(path: Path) -> ast.Module:
    """Return the tree of a file, which is read once."""
    return ast.parse(path.read_text("utf-8"))


def statements(tree: ast.AST) -> list[ast.AST]:
    """Return a tree and all statements in it, level by level, without expressions."""
    nodes = [tree]
    for node in nodes:  # grows meanwhile
        for name in ("body", "orelse", "finalbody", "handlers", "cases"):
            nodes += getattr(node, name, ())
    return nodes


def children(node: ast.AST) -> list[ast.AST]:
    """Return the nodes right below a node, without the context of a name."""
    nodes: list[ast.AST] = []
    for name in node._fields:
        value = getattr(node, name, None)
        if type(value) is list:
            nodes += [part for part in value if isinstance(part, ast.AST)]
        elif name != "ctx" and isinstance(value, ast.AST):
            nodes.append(value)
    return nodes


def walk(node: ast.AST) -> list[ast.AST]:
    """Return a node and all below it, level by level, without contexts of names."""
    nodes = [node]
    for node in nodes:  # grows meanwhile
        nodes += children(node)
    return nodes
