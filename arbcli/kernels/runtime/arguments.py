"""Declarations of an operation's arguments, and the checks compiled from them.

A size is bound where its name first stands alone, as `M` and `D` in "M, D", and checked where it is
used again, as in "2*D". "*B, D" is any number of dimensions followed by D. An argument whose sizes
depend on a later one is checked after it.
"""

import ast
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, Literal, TypedDict

import torch
from torch import Tensor

from arbcli.kernels.codec.layout import row_bytes
from arbcli.kernels.runtime.backend import backend_of

FUNCTIONS = {
    "torch": torch, "row_bytes": row_bytes, "min": min, "max": max, "len": len,
    "backend_of": backend_of,
}  # fmt: skip
"""Functions that expressions may call."""
REAL = (torch.float32, torch.bfloat16)
"""Dtypes of real values; all `REAL` arrays of a call have the same one."""
SOME_REAL = (torch.float32, torch.bfloat16, "of its own")
"""Dtypes of real values, independent of other arguments."""
REALS: dict[str, tuple] = {"real": REAL, "any_real": SOME_REAL}
DTYPE_IS_REAL = "dtype in (torch.float32, torch.bfloat16)"
"""Condition on an argument `dtype`: that of a result of real values."""


@dataclass(frozen=True, slots=True)
class Array:
    """Declaration of a tensor argument."""

    sizes: str
    """Shape expression (see the module's docstring)."""
    dtypes: tuple = REAL
    """Allowed dtypes."""
    dense: bool | Literal["rows", "parts"] = False
    """Whether the tensor, its `rows`, or its `parts` x[0], x[1], .. must be contiguous; otherwise
    any strides are allowed."""
    optional: bool = False
    """Whether None is allowed."""
    one: bool = False
    """Whether the tensor has one element, or one per text, in any number of dimensions."""

    @property
    def dims(self) -> list[str]:
        """Sizes of the dimensions."""
        return [size.strip() for size in self.sizes.split(",") if size.strip()]


@dataclass(frozen=True, slots=True)
class Matrix:
    """Declaration of a packed matrix."""

    sizes: str = "N, K"
    optional: bool = False

    @property
    def dims(self) -> list[str]:
        """Sizes of the dimensions."""
        return [size.strip() for size in self.sizes.split(",")]


@dataclass(frozen=True, slots=True)
class Number:
    """Declaration of a host number or string."""

    allowed: tuple[Any, ...] = ()
    """The only allowed values; () allows all."""
    optional: bool = False


Argument = Array | Matrix | Number
Arguments = Mapping[str, Argument]


def declared(schema: str) -> Arguments:
    """Read the declarations of arguments, such as `x, y: real[M, D]; gain: float32[D]? dense; eps`.

    A name alone is a number, and `name: a|b` one of some strings. `packed[N, K]` is a packed
    matrix. Other types are those of tensors: `real` and `any_real` for `REAL` and `SOME_REAL`, or
    names of dtypes, separated by `|`. Then come the sizes, `?` if None is allowed, and `dense`,
    `rows`, `parts` or `one`: see `Array`.
    """
    arguments: dict[str, Argument] = {}
    for entry in filter(None, schema.split(";")):
        names, _, kind = map(str.strip, entry.partition(":"))
        match = re.fullmatch(r"([\w|]+)\[(.*)\](\??) ?(\w*)", kind)
        argument: Argument
        if match is None:
            argument = Number(tuple(kind.split("|")) if kind else ())
        elif match[1] == "packed":
            argument = Matrix(match[2], bool(match[3]))
        else:
            dense: Any = match[4] == "dense" or (match[4] in ("rows", "parts") and match[4])
            dtypes = REALS.get(match[1]) or tuple(getattr(torch, d) for d in match[1].split("|"))
            argument = Array(match[2], dtypes, dense, bool(match[3]), match[4] == "one")
        arguments |= dict.fromkeys(names.split(", "), argument)
    return arguments


def evaluate(expression: Any, known: Mapping[str, Any]) -> Any:
    """Evaluate an expression of sizes; return other values unchanged."""
    return eval(expression, FUNCTIONS, dict(known)) if isinstance(expression, str) else expression


def names_in(expression: str) -> set[str]:
    """List the names in an expression."""
    nodes = ast.walk(ast.parse(expression or "0", mode="eval"))
    return {node.id for node in nodes if isinstance(node, ast.Name)} - {*FUNCTIONS}


def compiled_check(
    operation: str, arguments: Mapping[str, Argument], where: tuple[str, ...] = (),
    defaults: Mapping[str, Any] = MappingProxyType({}),
) -> Callable[..., None]:  # fmt: skip
    """Generate and compile the check of a declaration, as it runs in every eager call."""
    space: dict[str, Any] = {"_refuse": _refuse, "_refuse_values": _refuse_values}
    space |= {"_operation": operation, "_arguments": arguments, "_float32": torch.float32}
    space |= {"_bfloat16": torch.bfloat16, "_where": where, "_shapes": {}, **FUNCTIONS}
    space["_defaults"] = defaults
    trailing, parameters = True, list[str]()
    for name, kind in reversed([*arguments.items()]):
        trailing = trailing and (kind.optional or isinstance(kind, Number))
        parameters.insert(0, f"{name}=_defaults.get({name!r})" if trailing else name)
    lines: list[str] = []
    known = {name for name, kind in arguments.items() if isinstance(kind, Number)}
    waiting = sorted(arguments, key=lambda name: arguments[name].optional)
    while waiting:
        name = next(name for name in waiting if _is_ready(arguments[name], known))
        waiting.remove(name)
        kind = arguments[name]
        checks = _lines_of(name, kind, known, space)
        if kind.optional and checks:
            checks = [f"if {name} is not None:", *(f"    {line}" for line in checks)]
        lines += checks
    for index, condition in enumerate(where):
        lines.append(f"if not ({condition}): _refuse_values(_operation, _where[{index}], locals())")
    body = "\n    ".join(lines or ["pass"])
    code = compile(f"def check({', '.join(parameters)}):\n    {body}", f"<{operation}>", "exec")
    exec(code, space)
    return space["check"]


def _is_ready(kind: Argument, known: set[str]) -> bool:
    """Return whether the sizes of an argument are bound, or bound by the argument itself."""
    if isinstance(kind, Number):
        return True
    named = {size.strip("*") for size in kind.dims if size.strip("*").isidentifier()}
    named = set() if isinstance(kind, Array) and kind.one else named
    needed = {name for size in kind.dims for name in names_in(size.strip("*"))} - named
    return needed <= known


def _lines_of(name: str, kind: Argument, known: set[str], space: dict[str, Any]) -> list[str]:
    """Generate the check of an argument, and add the sizes that it binds."""
    if isinstance(kind, Number):
        if not kind.allowed:
            return []
        space[f"_{name}"] = kind.allowed
        return [
            f"if {name} not in _{name}: _refuse(_operation, {name!r}, {name}, _arguments, {{}})"
        ]
    refuse = f"_refuse(_operation, {name!r}, {name}, _arguments, locals())"
    if isinstance(kind, Matrix):
        return _lines_of_matrix(name, kind, known, refuse)
    return _lines_of_array(name, kind, known, space, refuse)


def _lines_of_matrix(name: str, kind: Matrix, known: set[str], refuse: str) -> list[str]:
    lines, wrong = [f"{name}.check()"], []
    attributes = ("out_features", "in_features", "group_size")
    for size, attribute in zip(kind.dims, attributes, strict=False):
        if size.isidentifier() and size not in known:
            lines.append(f"{size} = {name}.{attribute}")
            known.add(size)
        else:
            wrong.append(f"{name}.{attribute} != ({size})")
    return [*lines, f"if {' or '.join(wrong)}: {refuse}"] if wrong else lines


def _lines_of_array(
    name: str, kind: Array, known: set[str], space: dict[str, Any], refuse: str
) -> list[str]:
    dims = kind.dims
    lead = dims[0][1:] if dims and dims[0].startswith("*") else None
    new = {size.strip("*") for size in dims if size.strip("*").isidentifier()} - known
    wrong, after = [_wrong_dtype(name, kind, known, space)], list[str]()
    if kind.dense == "rows":
        wrong.append(f"({name}.shape[-1] > 1 and {name}.stride(-1) != 1)")
    elif kind.dense == "parts":
        after.append(f"if len({name}) and not {name}[0].is_contiguous(): {refuse}")
    elif kind.dense or kind.one:
        wrong.append(f"not {name}.is_contiguous()")
    shape = "".join(f"{d}, " if d.startswith("*") else f"({d}), " for d in dims)
    if kind.one:
        texts = f"_count({lead})" if lead else "1"
        space["_count"] = lambda texts: texts.numel()
        wrong.append(f"{name}.numel() != {texts}")
    elif not new:
        like = space["_shapes"].get(kind.sizes)
        wrong.append(f"{name}.shape != {like}.shape" if like else f"{name}.shape != ({shape})")
    else:
        number = len(dims) - (lead is not None)
        wrong.append(f"{name}.dim() {'<' if lead else '!='} {number}")
        unequal = []
        if lead:
            sizes = f"{name}.shape[:-{number}]" if number else f"{name}.shape"
            if lead in known:
                unequal.append(f"{sizes} != {lead}")
            else:
                after.append(f"{lead} = {sizes}")
                known.add(lead)
        singles = dims[1:] if lead else dims
        targets = []
        for place, size in enumerate(singles):
            if size.isidentifier() and size not in known:
                targets.append(size)
                known.add(size)
            else:
                targets.append(f"_{place}")
                unequal.append(f"_{place} != ({size})")
        if targets:
            sizes = f"{name}.shape[-{number}:]" if lead else f"{name}.shape"
            after.append(f"{', '.join(targets)}, = {sizes}")
        if unequal:
            after.append(f"if {' or '.join(unequal)}: {refuse}")
    lines = [f"if {' or '.join(wrong)}: {refuse}", *after]
    if dims and not kind.optional and not kind.one:
        space["_shapes"].setdefault(kind.sizes, name)
    if kind.dtypes == REAL and "_real" not in known and not kind.optional:
        known.add("_real")
        lines.append(f"_real = {name}.dtype")
    return lines


def _wrong_dtype(name: str, kind: Array, known: set[str], space: dict[str, Any]) -> str:
    if kind.dtypes in (REAL, SOME_REAL):
        if kind.dtypes == REAL and "_real" in known:
            return f"{name}.dtype is not _real"
        return f"({name}.dtype is not _float32 and {name}.dtype is not _bfloat16)"
    if len(kind.dtypes) == 1:
        space[f"_{name}"] = kind.dtypes[0]
        return f"{name}.dtype is not _{name}"
    space[f"_{name}"] = kind.dtypes
    return f"{name}.dtype not in _{name}"


def _refuse(
    operation: str, name: str, value: Any, arguments: Mapping[str, Argument], known: dict[str, Any]
) -> None:
    """Raise a ValueError with the required and the actual argument."""
    need, got = _needed(arguments[name], value, known)
    raise ValueError(f"{operation}: {name}: need {need}, got {got}")


def _needed(kind: Argument, value: Any, known: dict[str, Any]) -> tuple[str, str]:
    if isinstance(kind, Number):
        return f"one of {kind.allowed}", repr(value)
    sizes = {n for size in kind.dims for n in names_in(size.strip("*"))} & known.keys()
    values = ", ".join(f"{n} = {_plain(known[n])}" for n in sorted(sizes))
    need = f"of shape ({kind.sizes}{',' if len(kind.dims) == 1 else ''})"
    need += f" where {values}" if values else ""
    if isinstance(kind, Matrix):
        return f"a packed matrix {need}", f"{value.out_features} x {value.in_features}"
    dtypes = (known["_real"],) if kind.dtypes == REAL and "_real" in known else kind.dtypes
    types = " or ".join(dtype_name(t) for t in dtypes if isinstance(t, torch.dtype))
    need = f"one {types} of each text" if kind.one else f"{types} {need}"
    got = f"{dtype_name(value.dtype)} of shape {tuple(value.shape)}"
    if kind.dense or kind.one:
        which = f" {kind.dense}" if isinstance(kind.dense, str) else ""
        need, strided = f"contiguous{which} {need}", not value.is_contiguous()
        got += f" and strides {value.stride()}" if strided else ""
    return need, got


def _refuse_values(operation: str, condition: str, known: dict[str, Any]) -> None:
    """Raise a ValueError with the condition that does not hold."""
    names = sorted(names_in(condition) & known.keys())
    got = ", ".join(f"{name} = {_plain(known[name])}" for name in names)
    raise ValueError(f"{operation}: need {condition}, got {got}")


def _plain(value: Any) -> str:
    if isinstance(value, Tensor):
        return f"a tensor of shape {tuple(value.shape)}"
    if hasattr(value, "trits"):
        return "a packed matrix"
    return str(tuple(value) if isinstance(value, torch.Size) else value)


class TensorOptions(TypedDict):
    """Keyword arguments `dtype` and `device` of a new tensor."""

    dtype: torch.dtype
    device: torch.device


def placed(x: Tensor, device: torch.device) -> Tensor:
    """Copy a tensor of any shape to a device with its strides and offset, unlike `to`."""
    if not x.numel():
        return x.to(device)
    steps = zip(x.shape, x.stride(), strict=True)
    length = x.storage_offset() + 1 + sum((size - 1) * stride for size, stride in steps)
    memory = x.as_strided((length,), (1,), 0).to(device)
    return memory.as_strided(x.shape, x.stride(), x.storage_offset())


def normals(generator: torch.Generator) -> Callable[..., Tensor]:
    """Return a function that draws normal numbers of a shape, on the host."""
    return lambda *shape: torch.randn(shape, generator=generator)


def real_dtypes(device: torch.device) -> tuple[torch.dtype, ...]:
    """Return the dtypes of real values in cases; the interpreter's bf16 arithmetic is wrong."""
    return (torch.float32, torch.bfloat16) if device.type == "cuda" else (torch.float32,)


def dtype_name(dtype: torch.dtype) -> str:
    """Return the name of a dtype without `torch.`, such as `float32`."""
    return str(dtype).removeprefix("torch.")
