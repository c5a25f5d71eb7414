"""Names that tests, benchmarks and examples take from modules of the project are defined there.

Slow tests and benchmarks are rarely run, so that a name that has changed would be noticed late.
"""

import ast
from functools import cache
from pathlib import Path

import pytest
from syntax import children, parsed, walk

ROOT = Path(__file__).parents[1]
TESTS = ROOT / "tests"
PATCHES = {"setattr", "delattr", "object"}
"""Methods of `monkeypatch` and `mock.patch` whose arguments are a module and a name in it."""
IMPLICIT = {"__name__", "__file__", "__doc__", "__dict__"}


def modules_below(base: Path, folder: Path) -> dict[str, Path]:
    """Return the files of all modules and packages in a folder, by name."""
    names = {}
    for path in folder.rglob("*.py"):
        parts = path.relative_to(base).with_suffix("").parts
        names[".".join(parts[:-1] if parts[-1] == "__init__" else parts)] = path
    return names


MODULES = {
    **modules_below(TESTS, TESTS),
    **modules_below(ROOT, ROOT / "arbcli"),
    **modules_below(ROOT, ROOT / "benchmarks"),
}


def module_of(path: Path, name: str) -> Path | None:
    """Return the file of a module that `path` imports; None if it is not of the project."""
    own = path.parent / f"{name}.py"
    return own if TESTS in path.parents and own.exists() else MODULES.get(name)


@cache
def defined(path: Path) -> set[str]:
    """Return the names that a module defines, in branches and functions with `global` too."""
    names = set(IMPLICIT)
    nodes: list[ast.AST] = [*parsed(path).body]
    while nodes:
        node = nodes.pop()
        if isinstance(node, ast.FunctionDef | ast.ClassDef):
            names.add(node.name)
            names.update(*(part.names for part in walk(node) if isinstance(part, ast.Global)))
        elif isinstance(node, ast.Import | ast.ImportFrom):
            names |= {(alias.asname or alias.name).split(".")[0] for alias in node.names}
        elif isinstance(node, ast.Name):
            names.add(node.id)
        else:
            nodes += children(node)
    return names


def missing_names(path: Path) -> list[str]:
    """List what a file imports from modules of the project, or reads in them, and is not there."""
    missing, modules, nodes = [], {}, walk(parsed(path))
    for node in nodes:
        if isinstance(node, ast.ImportFrom) and (origin := module_of(path, str(node.module))):
            for alias in node.names:
                part = module_of(path, f"{node.module}.{alias.name}")
                if part:
                    modules[alias.asname or alias.name] = part
                elif alias.name not in defined(origin):
                    missing.append(f"{node.module}.{alias.name}")
    others = {node.arg for node in nodes if isinstance(node, ast.arg)}
    others |= {n.id for n in nodes if isinstance(n, ast.Name) and isinstance(n.ctx, ast.Store)}
    for node in nodes:
        module, name = None, None
        if isinstance(node, ast.Attribute):
            module, name = node.value, node.attr
        elif isinstance(node, ast.Call) and getattr(node.func, "attr", "") in PATCHES:
            module, name, *_ = *node.args, None, None
            name = getattr(name, "value", None)
        if isinstance(module, ast.Name) and isinstance(name, str):
            known = modules.get(module.id) if module.id not in others else None
            if known and name not in defined(known):
                missing.append(f"{module.id}.{name}")
    return missing


@pytest.mark.parametrize("folder", ["tests", "benchmarks", "examples"])
def test_names_of_modules_exist(folder):
    paths = sorted((ROOT / folder).rglob("*.py"))
    found = {str(path.relative_to(ROOT)): missing_names(path) for path in paths}
    assert {path: names for path, names in found.items() if names} == {}


def test_missing_names_are_found(tmp_path):
    path = tmp_path / "test_of_this.py"
    path.write_text(
        "from arbcli.base.errors import ArbError, NoSuchError\n"
        "from arbcli.training import sample\n"
        "from arbcli.training import loop as later\n"
        "def test(monkeypatch, loop):\n"
        "    from arbcli.training.trainer import Trainer, no_such_name\n"
        "    monkeypatch.setattr(sample, 'SAMPLE_BYTES', 4)\n"
        "    monkeypatch.setattr(sample, 'NO_SUCH_BYTES', 4)\n"
        "    assert later.no_such_function(loop.anything, Trainer.anything, ArbError)\n"
    )
    assert sorted(missing_names(path)) == [
        "arbcli.base.errors.NoSuchError",
        "arbcli.training.trainer.no_such_name",
        "later.no_such_function",
        "sample.NO_SUCH_BYTES",
    ]
