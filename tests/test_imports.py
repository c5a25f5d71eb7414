"""The layers import downwards only, and triton stays in its place."""

import ast
import builtins
import importlib
import subprocess
import sys
from collections.abc import Iterable
from functools import cache
from pathlib import Path

from apparatus.forking import run_forked
from syntax import kernel_files, parsed, statements, walk

PACKAGE = Path(__file__).parents[1] / "arbcli"
RANK = {
    "base": 0, "version": 0, "kernels": 1, "data": 2, "model.optimizers": 2, "model.rules": 3,
    "config": 4, "model": 5, "generation": 6, "interop": 7, "nn": 8, "training": 8, "loggers": 9,
    "interop.huggingface.card": 9, "interop.gguf.export": 10, "interop.huggingface.export": 11,
    "interop.exporting": 12, "inspect": 12, "verify": 13, "serve": 13, "commands": 14, "cli": 15,
    "__main__": 16, "__init__": 16,
}  # fmt: skip
"""Packages and modules of the core; each imports those of a lower rank. Families may import all."""


def layer(module: str) -> str:
    """Return the longest prefix of a module's name that has a rank, or the name of its package."""
    names = module.split(".")[1:]
    prefixes = [".".join(names[:length]) for length in range(len(names), 0, -1)]
    return next((prefix for prefix in prefixes if prefix in RANK), names[0])


def imported_by(nodes: Iterable[ast.AST]) -> set[str]:
    names: set[str] = set()
    for node in nodes:
        if isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"relative import of {node.module}"
            # of a package the parts are meant: `from arbcli import x` is an import of `arbcli.x`
            names |= {node.module, *(f"{node.module}.{alias.name}" for alias in node.names)}
        elif isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
    return names


@cache
def imported(path: Path) -> set[str]:
    return imported_by(statements(parsed(path)))


MODULES = sorted(PACKAGE.rglob("*.py"))


def test_imports_point_downwards():
    for path in MODULES:
        package = layer(".".join(path.relative_to(PACKAGE.parent).with_suffix("").parts))
        for name in imported(path):
            assert name != "arbcli.__version__", f"{path}: it is in `arbcli.version`"
            if package != "families" and name.startswith("arbcli.") and layer(name) in RANK:
                below = layer(name) == package or RANK[layer(name)] < RANK[package]
                assert below, f"{path} imports {name}"


def test_no_file_imports_itself_through_others():
    """Not within functions either, nor by a name in words; what only types need is left out."""
    paths = PACKAGE.rglob("*.py")
    files = {".".join(p.relative_to(PACKAGE.parent).with_suffix("").parts): p for p in paths}
    imports = {name: run_imports(path) & {*files} for name, path in files.items()}
    while ends := {name for name, others in imports.items() if not others & {*imports}}:
        imports = {name: others for name, others in imports.items() if name not in ends}
    assert sorted(imports) == []


@cache
def run_imports(path: Path) -> set[str]:
    tree = parsed(path)
    types = [
        node
        for condition in statements(tree)
        if isinstance(condition, ast.If) and ast.unparse(condition.test) == "TYPE_CHECKING"
        for node in condition.body
    ]
    names = imported_by(node for node in statements(tree) if node not in types)
    for node in walk(tree) if "import_module" in path.read_text("utf-8") else ():
        if isinstance(node, ast.Call) and ast.unparse(node.func).endswith("import_module"):
            names |= {a.value for a in node.args if isinstance(a, ast.Constant)}
    return names


def test_kernels_import_neither_verification_nor_references():
    """Not through what they import either."""
    files = {".".join(p.relative_to(PACKAGE.parent).with_suffix("").parts): p for p in MODULES}
    kernels = {*kernel_files()}
    reached = [name for name, path in files.items() if path in kernels]
    for name in reached:  # grows meanwhile
        reached += sorted((run_imports(files[name]) & {*files}) - {*reached})
    assert "arbcli.base.errors" in reached
    assert not [name for name in reached if name.startswith("arbcli.verify")]
    for name in reached:
        declared = {node.name for node in statements(parsed(files[name])) if hasattr(node, "name")}
        assert not [n for n in declared if n and n.endswith("_reference")], name


def test_triton_is_imported_by_kernels_only():
    for path in MODULES:
        if "kernels" not in path.parts:
            assert not any(name.split(".")[0] == "triton" for name in imported(path)), path


ALTERNATIVES = (
    "families.", "verify.", "interop.", "training.float_optimizer", "training.teacher",
    "training.dropout", "training.parallel.shared_updater", "training.parallel.rendezvous",
    "model.baselines", "model.cache", "model.state", "data.conversion", "data.tokens", "data.chats",
    "kernels.runtime.native_library", "kernels.rows.weighted_rows",
)  # fmt: skip
"""Modules that a dense run in one process does not need."""


MOST = ((50, 4_300), (94, 10_900), (142, 15_950))
"""Largest numbers of modules and of lines of code that may be loaded after each stage."""
OF_A_RUN = ("model.cache", "model.state", "kernels.runtime.native_library")
"""Modules that its sample and its backend need."""


@cache
def code_lines(path: Path) -> int:
    """Count the lines with code: without blank lines, docstrings and comments."""
    numbered = enumerate(path.read_text("utf-8").splitlines(), 1)
    lines = {n for n, line in numbered if line.strip() and not line.strip().startswith("#")}
    for node in statements(parsed(path)):
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant):
            lines -= {*range(node.lineno, (node.end_lineno or 0) + 1)}
    return len(lines)


def load_in_stages(folder: Path) -> None:
    """Import, train a step on a CPU, evaluate, save and sample, and write what is loaded then."""
    sys.modules["triton"] = None
    importing = builtins.__import__

    def watched(name: str, *args, **options):
        assert not name.startswith(("torch._dynamo", "torch._inductor")), "takes two seconds"
        return importing(name, *args, **options)

    def show(number: int) -> None:
        ours = [module for name, module in sys.modules.items() if name.startswith("arbcli")]
        (folder / f"loaded{number}").write_text("\n".join(module.__file__ for module in ours))

    builtins.__import__ = watched
    importlib.import_module("arbcli.model.parts.mlp")
    show(0)
    importlib.import_module("arbcli.training.trainer")
    show(1)
    arbcli = importlib.import_module("arbcli")
    (folder / "text.txt").write_bytes(bytes(range(32, 127)) * 200)
    given = {"preset": "tiny", "layers": 1, "steps": 1, "batch": 1, "ctx": 16, "device": "cpu"}
    config = arbcli.configure(data=[folder / "text.txt"], **given)
    report = arbcli.train(config, folder / "run")
    assert report.sample
    assert report.val_loss < 8
    show(2)
    builtins.__import__ = importing
    assert importlib.import_module("arbcli.inspect.peak").predict_peak(config).peak_bytes


def test_step_without_triton_loads_what_it_needs_and_neither_alternatives_nor_a_compiler(tmp_path):
    log = tmp_path / "log"
    assert run_forked(lambda: load_in_stages(tmp_path), log) == 0, log.read_text()
    for number, (most_modules, most_lines) in enumerate(MOST):
        paths = [Path(line) for line in (tmp_path / f"loaded{number}").read_text().splitlines()]
        names = {".".join(path.relative_to(PACKAGE).with_suffix("").parts) for path in paths}
        needless = {n for n in names if n.startswith(ALTERNATIVES) and not n.endswith("__init__")}
        assert needless <= {*(OF_A_RUN if number == 2 else ())}
        assert len(paths) <= most_modules
        assert sum(map(code_lines, paths)) <= most_lines


def test_configurations_of_the_core_import_no_family():
    code = (
        "import dataclasses, sys\n"
        "from arbcli.config.file import settings_text\n"
        "from arbcli.config.presets import PRESETS, config_from_dict, preset\n"
        "from arbcli.config.training import train_config, train_config_dict, train_config_from\n"
        "place = {'device': 'cpu', 'backend': 'torch', 'compute': 'fp32'}\n"
        "given = place | {'ctx': 16, 'steps': 3, 'weights': 'int8', 'optimizer': 'sign'}\n"
        "config = train_config('tiny', **given)\n"
        "assert train_config_from({'config': train_config_dict(config)}) == config\n"
        "assert config_from_dict(dataclasses.asdict(config.model)) == config.model\n"
        "assert settings_text(config) and 'hnet-base' in PRESETS\n"
        "families = lambda: {name for name in sys.modules if name.startswith('arbcli.families.')}\n"
        "assert not families(), families()\n"
        "preset('tiny', experts=3, mlp_rule='nibble')\n"
        "assert 'arbcli.families.experts.config' in families()\n"
        "assert 'arbcli.families.hnet' not in families()\n"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
