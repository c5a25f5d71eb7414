"""Which mistakes the quick tests do not see: changes of one expression, each alone; a script.

    python tests/mutants.py map FOLDER [arguments of pytest]
    python tests/mutants.py try FOLDER EACH SEED MODULE...
    python tests/mutants.py draw FOLDER NUMBER SEED MODULE...
    python tests/mutants.py cases EACH [KERNEL...]

`map` runs tests in a copy of this tree and notes which statements of `arbcli` each of them runs.
`try` draws EACH changes of every function in MODULE (`train/run.py`, or a folder of such), and of
the lines outside of functions, and runs the tests of the changed statement: those of the module's
own test file first, then those that run least. It prints what none of them sees. Some changes make
no difference to anyone: that is for the reader to judge.

`draw` draws NUMBER changes in all: each of the next MODULE, of any of its functions. Besides single
expressions, calls that convert or bound are left out, and neighbouring statements change places.

`cases` draws EACH changes of the reference of every kernel, and prints those that no case tells
from the reference: a kernel with the same mistake would pass.
"""

import ast
import builtins
import gc
import importlib
import importlib.machinery
import inspect
import json
import mmap
import os
import random
import resource
import shutil
import signal
import subprocess
import sys
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from itertools import chain, cycle, islice, pairwise
from pathlib import Path
from types import CodeType, FunctionType
from typing import Any, NamedTuple

ROOT = Path(__file__).parents[1]
WIDE_SECONDS, MOST_TESTS = 15.0, 200
"""The most tests that are run of a change, and the sum of their times as the map has them."""
ENDLESS_SECONDS = 5
"""Processor time after which a changed reference is considered endless."""
OPTIONS = ["-q", "-x", "-p", "no:cacheprovider", "--no-header", "-m", "not slow"]
FLIPPED: dict[type, type] = {
    ast.Lt: ast.LtE, ast.LtE: ast.Lt, ast.Gt: ast.GtE, ast.GtE: ast.Gt, ast.Eq: ast.NotEq,
    ast.NotEq: ast.Eq, ast.Is: ast.IsNot, ast.IsNot: ast.Is, ast.In: ast.NotIn, ast.NotIn: ast.In,
    ast.Add: ast.Sub, ast.Sub: ast.Add, ast.Mult: ast.Add, ast.FloorDiv: ast.Mult,
    ast.Div: ast.Mult, ast.Mod: ast.Mult, ast.Pow: ast.Mult, ast.BitAnd: ast.BitOr,
    ast.LShift: ast.RShift, ast.RShift: ast.LShift,
}  # fmt: skip
EXCHANGED = {"min": "max", "max": "min", "any": "all", "all": "any", "zeros": "ones",
             "amax": "amin", "floor": "ceil", "ceil": "floor", "sum": "mean"}  # fmt: skip
CONVERSIONS = ("to", "float", "long", "contiguous", "clone", "copy", "clamp", "clamp_", "detach")
DROPPED = (ast.AugAssign, ast.Raise, ast.Continue, ast.Break, ast.Delete)


class Mutant(NamedTuple):
    """One change of a file."""

    line: int
    function: str
    """Empty outside of functions."""
    before: str
    after: str
    place: tuple[int, int]
    """Offsets in the source, in bytes."""


def changes_of(node: ast.AST) -> Iterator[tuple[ast.AST, str]]:
    """Return the changes of one node: pairs of a node to replace and its new text."""

    def changed(**fields: object) -> str:
        return ast.unparse(type(node)(**{**dict(ast.iter_fields(node)), **fields}))

    match node:
        case ast.Compare(ops=[operator], left=left, comparators=[right]) if (
            type(operator) in FLIPPED
        ):
            yield node, changed(ops=[FLIPPED[type(operator)]()])
        case ast.BinOp(op=operator, left=left) if type(operator) in FLIPPED:
            yield node, changed(op=FLIPPED[type(operator)]())
            yield node, ast.unparse(left)
        case ast.BinOp(op=ast.BitOr(), left=left, right=right):
            yield node, ast.unparse(left)
            yield node, ast.unparse(right)
        case ast.BoolOp(values=[*values]):
            for kept in range(len(values)):
                rest = values[:kept] + values[kept + 1 :]
                yield node, changed(values=rest) if len(rest) > 1 else ast.unparse(rest[0])
        case ast.UnaryOp(op=ast.Not() | ast.USub(), operand=operand):
            yield node, ast.unparse(operand)
        case ast.If(test=test) | ast.While(test=test):
            yield test, f"not ({ast.unparse(test)})"
        case ast.IfExp(body=body, orelse=orelse):
            yield node, changed(body=orelse, orelse=body)
        case ast.Constant(value=bool(value)):
            yield node, repr(not value)
        case ast.Constant(value=int(value)):
            yield node, repr(value + 1)
            if value > 1:
                yield node, repr(value - 1)
        case ast.Constant(value=float(value)):
            yield node, repr(value * 2 if value else 1.0)
        case ast.Call(func=function, args=arguments, keywords=keywords):
            for number in range(len(keywords)):
                yield node, changed(keywords=keywords[:number] + keywords[number + 1 :])
            for number in range(len(arguments) - 1):
                one, other = arguments[number : number + 2]
                if ast.unparse(one) != ast.unparse(other):
                    swapped = [*arguments[:number], other, one, *arguments[number + 2 :]]
                    yield node, changed(args=swapped)
            if isinstance(function, ast.Attribute) and not arguments and not keywords:
                yield node, ast.unparse(function.value)
            if isinstance(function, ast.Name) and len(arguments) == 1 and not keywords:
                yield node, ast.unparse(arguments[0])
            name = getattr(function, "id", getattr(function, "attr", ""))
            if name in EXCHANGED:
                text = ast.unparse(function)
                yield function, text[: -len(name)] + EXCHANGED[name]
        case ast.List(elts=[*parts]) | ast.Tuple(elts=[*parts], ctx=ast.Load()) if len(parts) > 1:
            number = len(parts) // 2
            shorter = changed(elts=parts[:number] + parts[number + 1 :])
            yield node, f"({shorter})" if isinstance(node, ast.Tuple) else shorter
        case ast.Slice(lower=lower, upper=upper) if lower or upper:
            yield node, changed(lower=None) if lower else changed(upper=None)
        case ast.Expr(value=ast.Call()) | ast.Assign(targets=[ast.Attribute() | ast.Subscript()]):
            yield node, "pass"
        case _ if isinstance(node, DROPPED):
            yield node, "pass"


def further_changes_of(node: ast.AST) -> Iterator[tuple[ast.AST, str]]:
    """Yield a call without its conversion or its bound."""
    match node:
        case ast.Call(func=ast.Attribute(value=value, attr=name)) if name in CONVERSIONS:
            yield node, ast.unparse(value)
        case ast.Call(func=ast.Name(id="min" | "max"), args=[one, other]):
            yield node, ast.unparse(one)
            yield node, ast.unparse(other)


def may_change_places(first: ast.stmt, second: ast.stmt) -> bool:
    """Return whether two statements also run the other way round, and one of them is a call."""
    plain = ast.Expr | ast.Assign | ast.AugAssign
    if not (isinstance(first, plain) and isinstance(second, plain)):
        return False
    names = [node for node in ast.walk(first) if isinstance(node, ast.Name)]
    bound = {node.id for node in names if isinstance(node.ctx, ast.Store)}
    read = {node.id for node in ast.walk(second) if isinstance(node, ast.Name)}
    return not bound & read and ast.Call in (type(first.value), type(second.value))


def decides(mutant: Mutant) -> bool:
    """Return whether a change turns a condition around."""
    before, after = mutant.before, mutant.after
    return after.startswith(("not (", "(not (")) or (" else " in before and " else " in after)


def _is_kernel(node: ast.AST) -> bool:
    return "jit" in "".join(map(ast.unparse, getattr(node, "decorator_list", [])))


def mutants_of(source: str, kernels: bool = False, further: bool = False) -> list[Mutant]:
    """List all changes of a module, without those of annotations, texts and kernels.

    Args:
        source: the text of the module.
        kernels: whether those of kernels are listed too.
        further: whether those of `further_changes_of` and of the order of statements are.
    """
    lines = source.encode().splitlines(keepends=True)
    starts = [0]
    for line in lines:
        starts.append(starts[-1] + len(line))
    found: list[Mutant] = []
    data = source.encode()

    def span(node: ast.AST) -> tuple[int, int]:
        begin, end = starts[node.lineno - 1], starts[node.end_lineno - 1]
        return begin + node.col_offset, end + node.end_col_offset

    def turn(body: list[ast.stmt], function: str) -> None:
        for first, second in pairwise(body):
            if may_change_places(first, second):
                (begin, middle), (again, end) = span(first), span(second)
                after = data[again:end] + data[middle:again] + data[begin:middle]
                before = data[begin:end].decode()
                found.append(Mutant(first.lineno, function, before, after.decode(), (begin, end)))

    def visit(node: ast.AST, function: str, around: str) -> None:
        if isinstance(node, ast.JoinedStr | ast.Import | ast.ImportFrom):
            return
        if isinstance(node, ast.FunctionDef | ast.ClassDef):
            if _is_kernel(node) and not kernels:
                return
            around = f"{around}.{node.name}".lstrip(".")
            if isinstance(node, ast.FunctionDef) and not function:
                function = around  # the code of those inside is part of its own
        for old, text in chain(changes_of(node), further_changes_of(node) if further else ()):
            begin, end = span(old)
            before = data[begin:end].decode()
            replaced = text if isinstance(old, ast.stmt | ast.Slice) else f"({text})"
            if isinstance(old, ast.Attribute | ast.Name | ast.Constant):
                replaced = text
            found.append(Mutant(old.lineno, function, before, replaced, (begin, end)))
        for name, value in ast.iter_fields(node):
            if name in ("annotation", "returns"):
                continue
            if further and function and name in ("body", "orelse") and isinstance(value, list):
                turn(value, function)
            for child in value if isinstance(value, list) else [value]:
                if isinstance(child, ast.AST):
                    visit(child, function, around)

    visit(ast.parse(source), "", "")
    return found


# ---- which tests execute which statements


class Recorder:
    """A plugin of pytest that notes the statements that each test executes."""

    def __init__(self, folder: Path, package: Path) -> None:
        self.folder, self.package = folder, f"{package}{os.sep}"
        self.places: list[str] = []
        self.written = 0
        self.rows = (folder / "map.jsonl").open("w")
        # shared with the processes that a test forks
        builtins._executed = self.executed = mmap.mmap(-1, 200_000)
        sys.pycache_prefix = str(folder / "pycache")
        sys.dont_write_bytecode = True
        self.plain = importlib.machinery.SourceFileLoader.source_to_code
        importlib.machinery.SourceFileLoader.source_to_code = self._compiled

    def _compiled(self, data: bytes, path: str, *, _optimization: int = -1) -> object:
        # called as a bound method of this recorder: the loader is not needed
        tree = ast.parse(data)
        if path.startswith(self.package):
            self._note_statements(tree, path[len(self.package) :], inside=False)
        return compile(tree, path, "exec", dont_inherit=True, optimize=_optimization)

    def _note_statements(self, node: ast.AST, name: str, inside: bool) -> None:
        if isinstance(node, ast.FunctionDef):
            if _is_kernel(node):
                return
            inside = True
        for field, value in ast.iter_fields(node):
            if not isinstance(value, list):
                continue
            for child in value:
                if isinstance(child, ast.AST):
                    self._note_statements(child, name, inside)
            statements = field in ("body", "orelse", "finalbody") and value
            if inside and statements and isinstance(value[0], ast.stmt):
                noted = (self._noted(each, name) for each in value)
                setattr(node, field, [part for parts in noted for part in parts])

    def _noted(self, statement: ast.stmt, name: str) -> list[ast.stmt]:
        if isinstance(statement, ast.Expr) and isinstance(statement.value, ast.Constant):
            return [statement]
        (note,) = ast.parse(f"_executed[{len(self.places)}] = 1").body
        self.places.append(f"{name}:{statement.lineno}")
        for part in ast.walk(note):
            ast.copy_location(part, statement)
        return [note, statement]

    def pytest_runtest_logreport(self, report) -> None:
        if report.when == "teardown":
            found = [n for n in range(len(self.places)) if self.executed[n]]
            row = {"test": report.nodeid, "seconds": report.duration + self.seconds}
            row |= {"places": self.places[self.written :], "executed": found}
            self.written = len(self.places)
            self.rows.write(json.dumps(row) + "\n")
            self.executed[:] = bytes(len(self.executed))
        elif report.when == "setup":
            self.seconds = report.duration
        else:
            self.seconds += report.duration


def copy_tree(folder: Path) -> Path:
    """Copy what git knows of this tree, as it is now."""
    tree = folder / "tree"
    listed = ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"]
    names = subprocess.run(listed, cwd=ROOT, capture_output=True, text=True, check=True).stdout
    for name in filter(None, names.split("\0")):
        source, target = ROOT / name, tree / name
        if source.is_file():
            target.parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(source, target)
    return tree


def begin(tree: Path) -> None:
    """Make this process one that could run tests of a tree, and load others' packages."""
    os.environ |= {"PYTHONPATH": str(tree), "OMP_NUM_THREADS": "1", "TRITON_INTERPRET": "1",
                   "PYTHONDONTWRITEBYTECODE": "1"}  # fmt: skip
    os.chdir(tree)
    sys.path = [str(tree), str(tree / "tests"), *(p for p in sys.path if str(ROOT) not in p)]
    sys.dont_write_bytecode = True
    sys.meta_path = [one for one in sys.meta_path if "editable" not in repr(one).lower()]
    for name in ("numpy", "pytest", "rich.live", "torch.distributed", "typer.testing", "triton"):
        importlib.import_module(name)
    sys.modules["torch"].set_num_threads(1)


def make_map(folder: Path, arguments: list[str]) -> int:
    """Run tests, and write what each of them executes."""
    tree = copy_tree(folder)
    begin(tree)
    import pytest

    recorder = Recorder(folder, tree / "arbcli")
    options = [option for option in OPTIONS if option != "-x"]
    return int(pytest.main([*options, *arguments], [recorder]))


class Map:
    """The tests that execute a statement, in the order in which they are tried."""

    def __init__(self, path: Path) -> None:
        self.seconds: dict[str, float] = {}
        self.breadth: dict[str, int] = {}
        self.tests: dict[str, dict[int, list[str]]] = {}
        places: list[tuple[str, int]] = []
        for line in path.read_text().splitlines():
            row = json.loads(line)
            test = row["test"]
            self.seconds[test], self.breadth[test] = row["seconds"], len(row["executed"])
            split = (place.rsplit(":", 1) for place in row["places"])
            places += [(name, int(number)) for name, number in split]
            for number in row["executed"]:
                name, line = places[number]
                self.tests.setdefault(name, {}).setdefault(line, []).append(test)

    def of(self, name: str, line: int) -> list[str]:
        """List tests that run a line of a function."""
        known = self.tests.get(name, {})
        before = max((number for number in known if number <= line), default=None)
        stem = Path(name).stem.lstrip("_")

        def order(test: str) -> tuple[bool, int]:
            return stem not in test.split("::")[0], self.breadth[test]

        return sorted(set(known[before]), key=order) if before else []

    def within(self, tests: list, seconds: float) -> list:
        """Take the first tests, or their items, that take so many seconds together."""
        chosen, total = [], 0.0
        for test in tests:
            own = self.seconds[getattr(test, "nodeid", test)]
            if total + own <= seconds and len(chosen) < MOST_TESTS:
                chosen.append(test)
                total += own
        return chosen


def code_of(code: CodeType, names: Sequence[str]) -> CodeType:
    """Find the code of a function of a module by the names of the classes around it, and its own.

    Raises:
        StopIteration: there is none.
    """
    for name in names:
        found = (c for c in code.co_consts if isinstance(c, CodeType) and c.co_name == name)
        code = next(found)
    return code


class Trier:
    """A plugin of pytest that tries mutants instead of running tests, each in a fork.

    Args:
        folder: of the map.
        mutants: by module.
    """

    def __init__(
        self, known: Map, package: Path, folder: Path, chosen: dict[str, list[Mutant]]
    ) -> None:
        self.known, self.package, self.chosen = known, package, chosen
        self.rows = (folder / "mutants.jsonl").open("a")
        self.counts: Counter[str] = Counter()
        self.forked = False

    def pytest_runtest_logreport(self, report) -> None:
        if self.forked and report.failed:
            os._exit(1)

    def pytest_runtestloop(self, session) -> bool:
        gc.unfreeze()
        functions: dict[tuple[str, str], list[FunctionType]] = {}
        for one in gc.get_objects():
            if isinstance(one, FunctionType):
                key = one.__code__.co_filename, one.__code__.co_qualname
                functions.setdefault(key, []).append(one)
        gc.freeze()
        items = {item.nodeid: item for item in session.items}
        for name, mutants in self.chosen.items():
            path = self.package / name
            source = path.read_bytes()
            for mutant in mutants:
                outcome = self._try(name, mutant, source, functions, items)
                self.counts[outcome] += 1
                self.rows.write(
                    json.dumps({"module": name, "outcome": outcome} | mutant._asdict()) + "\n"
                )
                self.rows.flush()
                if outcome in ("survived", "not executed"):
                    before, after = (
                        " ".join(t.split())[:90] for t in (mutant.before, mutant.after)
                    )
                    where = f"{name}:{mutant.line} {mutant.function}"
                    sys.__stdout__.write(f"{outcome}: {where}: `{before}` -> `{after}`\n")
                    sys.__stdout__.flush()
        sys.__stdout__.write(f"{dict(self.counts)}\n")
        return True

    def _try(self, name, mutant, source, functions, items) -> str:
        first, last = mutant.place
        path = str(self.package / name)
        try:
            changed = compile(source[:first] + mutant.after.encode() + source[last:], path, "exec")
            names = mutant.function.split(".")
            new = code_of(changed, names)
        except (SyntaxError, StopIteration):
            return "not planted"
        held = functions.get((path, mutant.function), [])
        if not held or all(one.__code__ == new for one in held):
            return "not planted"
        tests = [items[test] for test in self.known.of(name, mutant.line) if test in items]
        if not tests:
            return "not executed"
        tests = self.known.within(tests, WIDE_SECONDS)
        seconds = sum(self.known.seconds[test.nodeid] for test in tests)
        return "survived" if self._passes(tests, held, new, seconds) else "seen"

    def _passes(self, tests, held, new, seconds) -> bool:
        """Run tests in a fork; what takes too long fails."""
        pid = os.fork()
        if not pid:
            try:
                os.setsid()
                most = int(seconds) + 5  # the map's seconds are by the clock
                resource.setrlimit(resource.RLIMIT_CPU, (most, most))
                null = os.open(os.devnull, os.O_RDWR)
                for descriptor in (0, 1, 2):
                    os.dup2(null, descriptor)
                self.forked = True
                for one in held:
                    one.__code__ = new
                for item, following in zip(tests, [*tests[1:], None], strict=True):
                    item.config.hook.pytest_runtest_protocol(item=item, nextitem=following)
                os._exit(0)
            finally:
                os._exit(1)
        _, status = os.waitpid(pid, 0)
        return os.waitstatus_to_exitcode(status) == 0


def _by_function(path: Path, further: bool = False) -> dict[str, list[Mutant]]:
    functions: dict[str, list[Mutant]] = {}
    for mutant in mutants_of(path.read_text(), further=further):
        if mutant.function:
            functions.setdefault(mutant.function, []).append(mutant)
    return functions


def _drawn_of_each(package: Path, each: int, seed: str, names: list[str]) -> Iterator[tuple]:
    """Yield modules with so many changes of every function."""
    for name in names:
        place = package / name
        for path in sorted(place.rglob("*.py")) if place.is_dir() else [place]:
            draw = random.Random(f"{seed} {path.name}")
            for found in _by_function(path).values():
                for mutant in draw.sample(found, min(each, len(found))):
                    yield str(path.relative_to(package)), mutant


def drawn_in_all(package: Path, seed: str, names: list[str]) -> Iterator[tuple[str, Mutant]]:
    """Yield modules with a change, without end: of each of `names` in turn, of any function."""
    draw, known = random.Random(seed), {}
    for name in cycle(names):
        place = package / name
        if name not in known:
            paths = sorted(place.rglob("*.py")) if place.is_dir() else [place]
            known[name] = [(p, each) for p in paths for each in _by_function(p, True).values()]
        path, mutants = draw.choice(known[name])
        yield str(path.relative_to(package)), draw.choice(mutants)


def try_mutants(folder: Path, number: int, seed: str, names: list[str], in_all: bool) -> int:
    """Try changes of modules, so many of each function or in all; print what no test sees."""
    known, tree = Map(folder / "map.jsonl"), folder / "tree"
    begin(tree)
    package = tree / "arbcli"
    if in_all:
        drawn = islice(drawn_in_all(package, seed, names), number)
    else:
        drawn = _drawn_of_each(package, number, seed, names)
    chosen: dict[str, list[Mutant]] = {}
    files: dict[str, None] = {}
    for name, mutant in drawn:
        chosen.setdefault(name, []).append(mutant)
        tests = known.within(known.of(name, mutant.line), WIDE_SECONDS)
        files |= dict.fromkeys(test.split("::")[0] for test in tests)
    import pytest

    there = [file for file in files if (tree / file).exists()]
    return int(pytest.main([*OPTIONS, *there], [Trier(known, package, folder, chosen)]))


def unnoticed_changes(
    spec: Any, each: int, counts: Callable[[Mutant], bool] = lambda _: True
) -> Iterator[Mutant]:
    """Yield drawn changes of the reference of a kernel that none of its cases detects."""
    import torch

    from arbcli.verify.check_kernels import copies
    from arbcli.verify.compare import as_tuple, compare

    def differs(case: Any, wanted: tuple) -> bool:
        try:
            found = as_tuple(spec.reference(*copies(case.inputs)))
        except Exception:  # of any kind: it is not the reference's
            return True
        pairs = [pair for pair in zip(found, wanted, strict=False) if None not in pair]
        return len(found) != len(wanted) or any(
            not compare(spec, case.label, one, other).passed for one, other in pairs
        )

    def stop(*_: object) -> None:
        raise TimeoutError

    signal.signal(signal.SIGVTALRM, stop)
    reference = inspect.unwrap(spec.reference)
    path, module = Path(reference.__code__.co_filename), sys.modules[reference.__module__]
    helpers = [n for n in reference.__code__.co_names if "reference" in n or "float64" in n]
    functions = {reference.__name__: reference}
    functions |= {n: inspect.unwrap(vars(module)[n]) for n in helpers if n in vars(module)}
    source = path.read_bytes()
    every = filter(counts, mutants_of(source.decode()))
    own = [mutant for mutant in every if mutant.function in functions]
    sizes = (6, 32) if spec.uses_scales else (6,)
    cases = [case for size in sizes for case in spec.cases(torch.device("cpu"), size)]
    wanted = [as_tuple(spec.reference(*copies(case.inputs))) for case in cases]
    for mutant in random.Random(spec.name).sample(own, min(each, len(own))):
        first, last = mutant.place
        held = functions[mutant.function]
        try:
            changed = compile(source[:first] + mutant.after.encode() + source[last:], path, "exec")
            code, held.__code__ = held.__code__, code_of(changed, [mutant.function])
        except (SyntaxError, StopIteration, ValueError):
            continue
        try:
            signal.setitimer(signal.ITIMER_VIRTUAL, ENDLESS_SECONDS)
            if held.__code__ != code and not any(map(differs, cases, wanted)):
                yield mutant
        finally:
            signal.setitimer(signal.ITIMER_VIRTUAL, 0)
            held.__code__ = code


def try_cases(each: int, names: list[str]) -> None:
    """Print the changes of references that no case tells, of the named kernels or of all."""
    begin(ROOT)
    from arbcli.verify.check_kernels import KERNELS

    for spec in KERNELS:
        for mutant in unnoticed_changes(spec, each) if not names or spec.name in names else ():
            before, after = (" ".join(text.split())[:90] for text in (mutant.before, mutant.after))
            sys.stdout.write(f"{spec.name}: line {mutant.line}: `{before}` -> `{after}`\n")
            sys.stdout.flush()


if __name__ == "__main__":
    if sys.argv[1] == "cases":
        sys.exit(try_cases(int(sys.argv[2]), sys.argv[3:]))
    what, place, *rest = sys.argv[1:]
    Path(place).mkdir(parents=True, exist_ok=True)
    if what == "map":
        sys.exit(make_map(Path(place).resolve(), rest))
    number, seed, *modules = rest
    sys.exit(try_mutants(Path(place).resolve(), int(number), seed, modules, what == "draw"))
