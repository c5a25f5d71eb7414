"""The sandbox of chat templates, in which time and memory of a rendering are bounded.

An operation is charged to a budget, in proportion to its time and memory, before it runs, so
nested lists, long texts and loops within loops end with an error. Filters, tests and methods
that cannot be charged in this way are not available.
"""

import json
import re
import string
from collections.abc import Callable, Iterator, Mapping, Sized, ValuesView
from collections.abc import Set as AnySet
from datetime import datetime
from typing import Any

LONGEST_VALUE = 2**24
"""Maximum size of a value in an operation: see `Budget.charge`."""
MOST_UNITS = 2**28
"""Budget of a rendering without its messages. A unit is about 1 ns and at most 4 bytes."""
UNITS_OF_INPUT = 64
"""Units that are added to the budget for each unit of the messages' size."""
STEP = 32
"""Units of a part of the template that runs once, of which a call takes 8 more."""
ELEMENT = 16
"""Units of an element of a list."""
WIDEST_FIELD = 64
"""Maximum width and precision of a field of `str.format`."""
WIDEST_INDENT = 8
"""Maximum number of spaces of a level of JSON, and of characters of a separator."""

FREE = ("attr", "count", "d", "default", "first", "last", "length")
"""Filters that only look at the outermost value."""
SHALLOW = (
    "items", "list", "map", "reject", "rejectattr", "reverse", "safe", "select", "selectattr",
)  # fmt: skip
"""Filters whose cost is the number of elements of the outermost value."""
DEEP = (
    "abs", "capitalize", "dictsort", "e", "escape", "float", "forceescape", "groupby", "int",
    "join", "lower", "max", "min", "replace", "sort", "string", "sum", "title", "tojson", "trim",
    "unique", "upper",
)  # fmt: skip
"""Filters whose cost is the size of the value with all that it contains."""
NUMERIC_TESTS = ("divisibleby", "even", "odd")
"""Tests that compute a remainder, which would format a text."""
METHODS: dict[type | tuple[type, ...], tuple[str, ...]] = {
    str: (
        "capitalize", "casefold", "count", "endswith", "find", "index", "isalnum",
        "isalpha", "isascii", "isdecimal", "isdigit", "islower", "isnumeric", "isspace", "istitle",
        "isupper", "join", "lower", "lstrip", "partition", "removeprefix", "removesuffix",
        "replace", "rfind", "rindex", "rpartition", "rsplit", "rstrip", "split", "splitlines",
        "startswith", "strip", "swapcase", "title", "upper",
    ),
    (list, tuple): ("count", "index"),
    dict: ("get", "items", "keys", "values"),
}  # fmt: skip
"""Methods by type."""
MODULES = "builtins", "jinja2.filters", "markupsafe"
"""Modules of the types that have no other methods."""
SEARCHES = ("lstrip", "rfind", "rindex", "rpartition", "rsplit", "rstrip", "strip", "trim")
"""Methods and filters whose cost is the product of the lengths of two texts."""


class Budget:
    """Work that a rendering may still do."""

    def __init__(self) -> None:
        self.start()

    def start(self, *values: Any) -> None:
        """Begin a rendering of values, whose size is added to the budget."""
        sizes = [_size(value, float("inf")) for value in values]
        self._left: float = MOST_UNITS + UNITS_OF_INPUT * sum(sizes)

    def spend(self, units: float) -> None:
        """Take units from the budget."""
        self._left -= max(units, 0)
        if self._left < 0:
            raise OverflowError("it exceeds the time and memory of a chat template")

    def charge(self, value: Any) -> int:
        """Take the size of a value: its characters, and `ELEMENT` for each element at any depth."""
        size = len(value) if isinstance(value, str) else _size(value, LONGEST_VALUE)
        if size > LONGEST_VALUE:
            raise OverflowError("a value exceeds the memory of a chat template")
        self.spend(size)
        return size

    def charge_length(self, value: Any) -> None:
        """Take the size of a value without that of its elements."""
        if isinstance(value, str):
            self.charge(value)
        elif isinstance(value, Sized):
            self.spend(ELEMENT * len(value))

    def charge_growth(self, name: str, text: Any, values: list[Any]) -> None:
        """Charge the cost of a method or filter: sizes, and products of those that it repeats."""
        size, sizes = self.charge(text), [self.charge(value) for value in values]
        if name == "replace" and len(sizes) > 1:
            self.spend((size // max(sizes[0], 1) + 1) * sizes[1])
        elif name == "join":  # the text is the separator of the method, and the list of the filter
            self.spend(_length(text) * sum(sizes) + size * sum(map(_length, values)))
        elif name == "format":
            self.spend(text.count("{") * sum(sizes))
        elif name in SEARCHES:
            self.spend(size * sum(sizes))
        elif name == "sum" and any(isinstance(value, list | tuple) for value in values):
            self.spend(size * _length(text))  # lists are added one by one


def _length(value: Any) -> int:
    return len(value) if isinstance(value, Sized) else 0


def _size(value: Any, most: float) -> int:
    """Return the size of a value as `Budget.charge` counts it, or one above `most`."""
    size, values = 0, [value]
    while values and size <= most:
        value = values.pop()
        if isinstance(value, str):
            size += len(value)
        elif isinstance(value, Mapping):
            size += 2 * ELEMENT * len(value)
            values += (*value.keys(), *value.values())
        elif isinstance(value, list | tuple | AnySet | ValuesView):
            size += ELEMENT * len(value)
            values += value
        elif isinstance(value, range):
            size += ELEMENT * len(value)
        else:
            size += len(str(value))
    return size


class Marks:
    """Length of the text rendered so far, and its marked ranges."""

    length = 0
    """Number of characters."""
    ranges: list[tuple[int, int]]
    """Ranges of characters in `{% generation %}` blocks."""


def add_charges(node: Any, nodes: Any) -> int:
    """Add filters to a parsed template, which charge its work to the budget.

    Args:
        node: the template or a part of it, which is changed.
        nodes: the module `jinja2.nodes`.

    Returns:
        Units of running the node once without its operations that are charged by their values.
    """

    def filtered(node: Any, name: str, *values: Any) -> Any:
        if name != "spent" and isinstance(node, nodes.Const | nodes.TemplateData):
            return node  # in the weight
        constants = [nodes.Const(value) for value in values]
        return nodes.Filter(node, name, constants, [], None, None)

    weight = STEP + sum([add_charges(part, nodes) for part in [*node.iter_child_nodes()]])
    if isinstance(node, nodes.Const | nodes.TemplateData):
        weight += len(str(node.data if isinstance(node, nodes.TemplateData) else node.value))
    elif isinstance(node, nodes.For | nodes.Macro | nodes.CallBlock | nodes.Block):
        node.body.insert(0, nodes.ExprStmt(filtered(nodes.Const(None), "spent", weight)))
        if isinstance(node, nodes.For) and node.test is not None:
            node.test = filtered(node.test, "spent", weight)
    elif isinstance(node, nodes.Output | nodes.Concat):
        node.nodes = [filtered(part, "charged") for part in node.nodes]
    elif isinstance(node, nodes.Compare):
        for operand in (node, *node.ops):
            operand.expr = filtered(operand.expr, "charged")
    elif isinstance(node, nodes.Pair):
        node.key = filtered(node.key, "charged")
    elif isinstance(node, nodes.Getitem) and isinstance(node.arg, nodes.Slice):
        node.node = filtered(node.node, "copied")
    return weight


def build_sandbox(jinja: Any, sandbox: Any, budget: Budget, marks: Marks) -> Any:
    """Create the environment of templates.

    Args:
        jinja: the module `jinja2`.
        sandbox: the module `jinja2.sandbox`.
        budget: budget of the renderings.
        marks: written by renderings.
    """

    class Sandbox(sandbox.ImmutableSandboxedEnvironment):
        """Sandbox without mutation and Python's attributes, whose operations are charged."""

        intercepted_binops = frozenset(("+", "-", "*", "/", "//", "%", "**"))

        def concat(self, parts: Iterator[str]) -> str:
            joined = [*parts]
            length = sum(map(len, joined))
            budget.charge(range(length // ELEMENT))
            return "".join(joined)

        def call(__self, __context: Any, __obj: Any, *args: Any, **kwargs: Any) -> Any:
            values = [*args, *kwargs.values()]
            owner = getattr(__obj, "__self__", None)
            if isinstance(owner, str):
                budget.charge_growth(__obj.__name__, owner, values)
            elif not isinstance(__obj, jinja.runtime.Macro | jinja.runtime.LoopContext):
                for value in values if isinstance(owner, dict) else (owner, *values):
                    budget.charge(value)
            budget.spend(8 * STEP)
            result = super().call(__context, __obj, *args, **kwargs)
            if not isinstance(owner, dict):
                budget.charge(result)
            return result

        def getattr(self, obj: Any, attribute: str) -> Any:
            if isinstance(obj, str) and attribute == "format":
                return _bounded_format(obj, budget)
            return super().getattr(obj, attribute)

        def getitem(self, obj: Any, argument: Any) -> Any:
            budget.spend(STEP + budget.charge(argument))
            return super().getitem(obj, argument)

        def is_safe_attribute(self, obj: Any, attr: str, value: Any) -> bool:
            if callable(value) and type(obj).__module__ in MODULES:
                methods = (names for kind, names in METHODS.items() if isinstance(obj, kind))
                if attr not in next(methods, ()):
                    return False
            return super().is_safe_attribute(obj, attr, value)

        def wrap_str_format(self, value: Any) -> None:
            """Treat `str.format` like other methods, which `is_safe_attribute` checks."""

        def call_binop(self, context: Any, operator: str, left: Any, right: Any) -> Any:
            numbers = isinstance(left, int | float) and isinstance(right, int | float)
            if operator == "**" or not (numbers or operator == "+"):
                raise sandbox.SecurityError(f"`{operator}` is not allowed for these values")
            budget.charge_length(left)
            budget.charge_length(right)
            result = super().call_binop(context, operator, left, right)
            if isinstance(result, int) and abs(result) >= 2**63:
                raise OverflowError("a number is too large")
            return result

    class Generation(jinja.ext.Extension):
        """The block `{% generation %}`, which marks an answer, with the scope of Transformers'."""

        tags = frozenset(("generation",))

        def parse(self, parser: Any) -> Any:
            line = next(parser.stream).lineno
            body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
            block = jinja.nodes.CallBlock(self.call_method("mark"), [], [], body)
            return block.set_lineno(line)

        def mark(self, caller: Any) -> str:
            text = caller()
            marks.ranges.append((marks.length, marks.length + len(text)))
            return text

    class Dict:
        """`dict` without its attributes, as in Transformers."""

        def __call__(self, *pairs: Any, **named: Any) -> dict[Any, Any]:
            return dict(*pairs, **named)

    class Namespace(jinja.utils.Namespace):
        """A namespace that is written without its values, which may contain it."""

        def __repr__(self) -> str:
            return "<Namespace>"

    def strftime_now(form: str) -> str:
        budget.charge(range(WIDEST_FIELD * len(form)))  # a field is shorter
        return datetime.now().strftime(form)

    def refuse(message: object) -> None:
        raise jinja.TemplateError(str(message))

    extensions = [Generation, "jinja2.ext.loopcontrols"]
    environment = Sandbox(trim_blocks=True, lstrip_blocks=True, extensions=extensions)
    environment.globals.clear()
    environment.globals["range"] = range
    environment.globals["namespace"] = Namespace
    environment.globals["dict"] = Dict()
    environment.globals["raise_exception"] = refuse
    environment.globals["strftime_now"] = strftime_now
    filters = environment.filters | {"tojson": _to_json}
    environment.filters = {
        name: _charged_filter(name, filters[name], jinja, budget)
        for name in (*FREE, *SHALLOW, *DEEP)
    }
    environment.filters |= _charges(jinja, budget)
    environment.tests = {
        name: _charged_test(name, test, jinja, budget) for name, test in environment.tests.items()
    }
    return environment


def _charges(jinja: Any, budget: Budget) -> dict[str, Callable[..., Any]]:
    """Return the filters of `add_charges`; with a context, so that none is run by the compiler."""

    @jinja.pass_context
    def spent(_: Any, value: Any, units: int) -> Any:
        budget.spend(units)
        return value

    @jinja.pass_context
    def charged(_: Any, value: Any) -> Any:
        budget.charge(value)
        return value

    @jinja.pass_context
    def copied(_: Any, value: Any) -> Any:
        budget.charge_length(value)
        return value

    return {"spent": spent, "charged": charged, "copied": copied}


def _charged_filter(
    name: str, function: Callable[..., Any], jinja: Any, budget: Budget
) -> Callable[..., Any]:
    """Return a filter that is charged before it runs, and whose result is charged."""

    @jinja.pass_context
    def charged(context: Any, value: Any, *args: Any, **named: Any) -> Any:
        # those of `replace` are then in their order: old, new, count
        values = [*args, *(named[key] for key in sorted(named, reverse=True))]
        if isinstance(value, Iterator) and (name == "list" or name in DEEP):
            value = [*value]
        if name in SHALLOW:
            budget.charge_length(value)
        budget.charge_growth(name, value if name in DEEP else None, values)
        result = function(*_passed(function, context), value, *args, **named)
        if name in DEEP:
            budget.charge(result)
        return result

    return charged


def _charged_test(
    name: str, function: Callable[..., bool], jinja: Any, budget: Budget
) -> Callable[..., bool]:
    """Return a test that is charged if it compares or reads all of its value."""

    @jinja.pass_context
    def charged(context: Any, value: Any, *args: Any) -> bool:
        if name in NUMERIC_TESTS and not isinstance(value, int | float):
            raise TypeError(f"`{name}` needs a number")
        for part in (value, *args) if args or name in ("lower", "upper") else ():
            budget.charge(part)
        return function(*_passed(function, context), value, *args)

    return charged


def _passed(function: Callable[..., Any], context: Any) -> list[Any]:
    """Return the arguments that Jinja passes to a filter or test before its value."""
    passed = getattr(function, "jinja_pass_arg", None)
    if passed is None:
        return []
    return [
        {"context": context, "eval_context": context.eval_ctx, "environment": context.environment}[
            passed.name
        ]
    ]


def _to_json(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """Write a value as JSON, with the arguments of Transformers' filter."""
    if indent is not None and not 0 <= indent <= WIDEST_INDENT:
        raise ValueError(f"an indent of {indent} is not in 0..{WIDEST_INDENT}")
    if any(len(separator) > WIDEST_INDENT for separator in separators or ()):
        raise ValueError(f"a separator is longer than {WIDEST_INDENT}")
    encoder = json.JSONEncoder(
        ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys
    )
    if indent is None:
        return encoder.encode(value)
    parts, length = [], 0
    for part in encoder.iterencode(value):  # indents can be much longer than the value
        parts.append(part)
        length += len(part)
        if length > LONGEST_VALUE:
            raise OverflowError(f"JSON is longer than {LONGEST_VALUE:,} characters")
    return "".join(parts)


def _bounded_format(text: str, budget: Budget) -> Callable[..., str]:
    """Return the `format` of a text, with fields that are values of at most `WIDEST_FIELD`."""

    def write(*values: Any, **named: Any) -> str:
        budget.charge_growth("format", text, [*values, *named.values()])
        for _, field, spec, _ in string.Formatter().parse(text):
            numbers = re.findall(r"\d+", spec or "")
            if re.search(r"[.\[]", field or "") or "{" in (spec or ""):
                raise ValueError(f"`{{{field}:{spec}}}` is not a plain field of `str.format`")
            if any(int(number) > WIDEST_FIELD for number in numbers):
                raise ValueError(f"`{spec}` is wider than {WIDEST_FIELD}")
        return text.format(*values, **named)

    return write
