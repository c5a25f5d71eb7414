"""List arguments that calls omit, exchange or give unlike others, and names that nothing reads.

Found by names alone: a call may be of any function or class of its name, and says something only
where all of these say the same. `constants.py` puts what is found into its list.
"""

import ast
import re
from collections import Counter
from collections.abc import Iterator
from typing import NamedTuple

from syntax import children, walk

MOST_UNLIKE = 6
"""Calls that do what most calls of their function do not, up to which they are listed."""
FACTORIES = ("arange", "empty", "eye", "full", "linspace", "ones", "rand", "randint", "randn",
             "tensor", "zeros")  # fmt: skip
COMPUTES = ("kernels", "model", "families", "training", "generation")
"""Packages whose tensors are on the device of a model."""
DRAWS = re.compile(r".*(_draw|case|cases|_reference|_acceptances|_state)$")
"""Functions of kernels' cases, which are moved to a device afterwards."""
ELSEWHERE = ("torch", "tl", "np", "F", "os", "json", "math", "dist")
"""Modules whose functions may have the names of ours."""


class _Parameters(NamedTuple):
    ordered: list[str]
    optional: set[str]


class _Call(NamedTuple):
    """A call of a function or class of which the package has one of that name."""

    where: str
    scope: set[str]
    """Names of parameters and variables around it."""
    called: str
    arguments: list[ast.expr]
    keywords: list[str | None]
    signatures: list[_Parameters]


def left_out(calls: list[_Call]) -> Iterator[str]:
    """List optional parameters of calls that are not given where a variable has their name."""
    for where, scope, called, arguments, keywords, signatures in calls:
        if any(isinstance(each, ast.Starred) for each in arguments) or None in keywords:
            continue
        open_to_all = set.intersection(
            *(each.optional - {*each.ordered[: len(arguments)], *keywords} for each in signatures)
        )
        for name in sorted(open_to_all & scope):
            yield f"{where} hands no {name} on to {called}"


def unlike_others(calls: list[_Call]) -> Iterator[str]:
    """List calls that give an optional parameter, or leave it out, unlike most calls."""
    given: dict[tuple[str, str], list[str]] = {}
    omitted: dict[tuple[str, str], list[str]] = {}
    for where, _, called, arguments, keywords, signatures in calls:
        spread = any(isinstance(each, ast.Starred) for each in arguments) or None in keywords
        alike = {(*each.ordered, *sorted(each.optional)) for each in signatures}
        if spread or len(alike) > 1 or called == "Setting":
            continue
        (parameters, *_) = signatures
        written = {*parameters.ordered[: len(arguments)], *keywords}
        for name in sorted(parameters.optional):
            chosen = given if name in written else omitted
            chosen.setdefault((called, name), []).append(where)
    for called, name in sorted(given.keys() & omitted.keys()):
        some, others = given[called, name], omitted[called, name]
        if min(len(some), len(others)) <= MOST_UNLIKE:
            less = "gives" if len(some) < len(others) else "does not give"
            yield from (f"{each} {less} {name} to {called}" for each in min(some, others, key=len))


def lacking(trees: dict[str, ast.Module]) -> Iterator[str]:
    """List tensors that are made on no named device, and errors without a hint."""
    for place, tree in trees.items():
        computes = place.split("/")[0] in COMPUTES
        for function in (node for node in walk(tree) if isinstance(node, ast.FunctionDef)):
            inner = [node for part in function.body for node in _within(part)]
            for call in (node for node in inner if isinstance(node, ast.Call)):
                keywords, name = {each.arg for each in call.keywords}, _named(call.func)
                if name == "ArbError" and not keywords & {"hint", None}:
                    yield f"{place}: {function.name} gives no hint"
                made = computes and name in FACTORIES and not DRAWS.match(function.name)
                made = made and _named(getattr(call.func, "value", call)) == "torch"
                if made and not keywords & {"device", "generator", None}:
                    yield f"{place}: {function.name} makes {name} on no device"


def exchanged(calls: list[_Call]) -> Iterator[str]:
    """List arguments by position that have the name of another parameter, which has another."""
    for where, _, called, arguments, _, signatures in calls:
        named = [_named(each) for each in arguments]
        for number, name in enumerate(named):
            places = {
                each.ordered.index(name) if name in each.ordered else number for each in signatures
            }
            place = places.pop()
            if places or place == number or place >= len(named):
                continue
            if not named[place] or named[place] != name:
                yield f"{where} gives {name} to {called} as argument {number}"


def never_read(trees: dict[str, ast.Module]) -> Iterator[str]:
    """List functions, classes, fields, attributes and constants that nothing reads."""
    nodes = {place: walk(tree) for place, tree in trees.items()}
    loads = (
        node
        for part in nodes.values()
        for node in part
        if type(getattr(node, "ctx", 0)) is ast.Load
    )
    read = Counter(getattr(node, "id", getattr(node, "attr", "")) for node in loads)
    for place, part in nodes.items():
        known = {}
        for node in part:
            if isinstance(node, ast.FunctionDef | ast.ClassDef):
                known[node.name] = None
            body = node.body if isinstance(node, ast.ClassDef | ast.Module) else []
            for each in body:
                targets = each.targets if isinstance(each, ast.Assign) else []
                targets = [each.target] if isinstance(each, ast.AnnAssign) else targets
                known |= dict.fromkeys(one.id for one in targets if isinstance(one, ast.Name))
            if isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store):
                known[node.attr] = None
        for name in known:
            if not read[name] and not name.startswith("__"):
                yield f"{place}: {name} is read by nothing"


def written_in(function: ast.FunctionDef) -> list[str]:
    """List the numbers and the patterns that are written in a function, without 0 and 1."""
    inner = [node for part in function.body for node in _within(part)]
    patterns = {
        id(node.args[0])
        for node in inner
        if isinstance(node, ast.Call)
        and getattr(getattr(node.func, "value", None), "id", "") == "re"
        and node.args
    }
    constants = [node for node in inner if isinstance(node, ast.Constant)]
    return [
        repr(node.value)
        for node in constants
        if id(node) in patterns or (type(node.value) in (int, float) and node.value not in (0, 1))
    ]


def _within(node: ast.AST) -> Iterator[ast.AST]:
    if not isinstance(node, ast.FunctionDef | ast.JoinedStr):
        yield node
        for child in children(node):
            yield from _within(child)


def calls_in(trees: dict[str, ast.Module]) -> list[_Call]:
    """List the calls of what the package defines, with the parameters of all of that name."""
    signatures, found = _signatures(trees), []

    def visit(node: ast.AST, where: str, scope: set[str]) -> None:
        kind = type(node)
        if kind is ast.ClassDef:
            where, scope = f"{where}{node.name}.", set()
        elif kind is ast.FunctionDef or kind is ast.Lambda:
            about = node.args
            own = {each.arg for each in (*about.posonlyargs, *about.args, *about.kwonlyargs)}
            own |= {n.id for n in walk(node) if type(n) is ast.Name and type(n.ctx) is ast.Store}
            where, scope = f"{where}{getattr(node, 'name', 'lambda')}.", scope | own
        elif kind is ast.Call:
            function, arguments = node.func, node.args
            if getattr(function, "id", "") == "partial" and arguments:
                function, *arguments = arguments
            called = getattr(function, "id", getattr(function, "attr", ""))
            foreign = getattr(getattr(function, "value", None), "id", "") in ELSEWHERE
            if called in signatures and not foreign:
                keywords = [each.arg for each in node.keywords]
                place = where.rstrip(".")
                found.append(_Call(place, scope, called, arguments, keywords, signatures[called]))
        for child in children(node):
            visit(child, where, scope)

    for place, tree in trees.items():
        visit(tree, f"{place}: ", set())
    return found


def _signatures(trees: dict[str, ast.Module]) -> dict[str, list[_Parameters]]:
    found: dict[str, list[_Parameters]] = {}

    def add(body: list[ast.stmt], owner: str) -> None:
        fields = [
            n for n in body if isinstance(n, ast.AnnAssign) and isinstance(n.target, ast.Name)
        ]
        makers = {n.name for n in body if isinstance(n, ast.FunctionDef)} & {"__init__", "__new__"}
        if owner and fields and not makers:
            names = [each.target.id for each in fields]
            optional = {each.target.id for each in fields if each.value}
            found.setdefault(owner, []).append(_Parameters(names, optional))
        for node in body:
            if isinstance(node, ast.ClassDef):
                add(node.body, node.name)
            elif isinstance(node, ast.FunctionDef):
                about = node.args
                ordered = [each.arg for each in (*about.posonlyargs, *about.args)]
                optional = set(ordered[len(ordered) - len(about.defaults) :])
                pairs = zip(about.kwonlyargs, about.kw_defaults, strict=True)
                optional |= {each.arg for each, default in pairs if default is not None}
                static = any("staticmethod" in ast.unparse(d) for d in node.decorator_list)
                name = owner if node.name == "__init__" else node.name
                kept = ordered[bool(owner) and not static :]
                found.setdefault(name, []).append(_Parameters(kept, optional))

    for tree in trees.values():
        add(tree.body, "")
    return found


def _named(argument: ast.expr) -> str:
    return getattr(argument, "id", getattr(argument, "attr", ""))
