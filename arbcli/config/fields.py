"""Configurations from plain values of files, and changes of their fields by path."""

import dataclasses
import re
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import is_dataclass
from types import NoneType, UnionType
from typing import Any, get_args, get_origin

from arbcli.base.errors import ArbError, quoted
from arbcli.base.reading import shown
from arbcli.config.kinds import SLOTS, Kinds
from arbcli.config.model import MAX_BLOCKS, ModelConfig
from arbcli.config.settings import as_type, plain_type

NONE = "none"
"""None in files, as TOML has no null."""


def build_dataclass(kind: type, values: Any, where: str) -> Any:
    """Build a dataclass from a dictionary, recursively.

    Args:
        kind: the dataclass.
        values: values by field; instances of the field's class are used unchanged.
        where: path of the dictionary in its file, for errors.

    Raises:
        TypeError: a field is missing or unknown, or has a value in place of a dictionary.
        ArbError: a value is invalid; the message has its path.
    """
    if not isinstance(values, dict):
        raise TypeError(f"`{where}` is `{shown(values)}`, not an object")
    every = {field.name: field for field in dataclasses.fields(kind)}
    known = {name: field for name, field in every.items() if field.init}
    fields = dict(values)
    if "kind" in every and fields.pop("kind", every["kind"].default) != every["kind"].default:
        raise TypeError(f"`{where}` is not of the kind `{every['kind'].default}`")
    if unknown := [name for name in fields if name not in known]:
        raise TypeError(f"`{where}` has no field `{shown(unknown[0])}`")
    needed = [name for name, field in known.items() if field.default is dataclasses.MISSING]
    if missing := [name for name in needed if name not in fields]:
        raise TypeError(f"`{where}` has no `{missing[0]}`")
    built = {
        name: _value(plain_type(known[name].type), value, SLOTS.get(name), f"{where}.{name}")
        for name, value in fields.items()
    }
    try:
        return kind(**built)
    except ArbError as error:
        raise _name_paths(error, known, where) from None


def _name_paths(error: ArbError, known: Iterable[str], where: str) -> ArbError:
    """Replace the names of fields in an error by their paths in a file."""
    text = str(error)
    for name in error.fields:
        if name in known:
            text = re.sub(rf"`{name}(?=[`=])", f"`{where}.{name}", text, count=1)
    if text == str(error):
        text = f"`{where}`: {text}"
    return ArbError(text, error.hint)


def _value(kind: Any, value: Any, union: Kinds | None, where: str) -> Any:
    """Convert a value of a file to the type of its field."""
    if value is None or (value == NONE and NoneType in get_args(kind)):
        return None
    if union is not None and not isinstance(value, list | tuple):
        name = value.get("kind", union.usual) if isinstance(value, dict) else None
        if len(union) == 1:  # older files do not name the only kind
            name = union.names[0]
        if not isinstance(name, str) or name not in union:
            raise TypeError(
                f"`{where}` is of the kind `{shown(name)}`, which is none of: {quoted(union)}"
            )
        return build_dataclass(union[name], value, where)
    kinds = get_args(kind) if get_origin(kind) is UnionType else (kind,)
    for option in kinds:
        if get_origin(option) is tuple and isinstance(value, list | tuple):
            if len(value) > MAX_BLOCKS:
                raise TypeError(f"`{where}` has {len(value):,} entries, more than {MAX_BLOCKS:,}")
            element = get_args(option)[0]
            return tuple(
                _value(element, part, union, f"{where}[{index}]")
                for index, part in enumerate(value)
            )
        if isinstance(option, type) and is_dataclass(option) and not isinstance(value, option):
            return build_dataclass(option, value, where)
    return value


def change_fields(config: ModelConfig, fields: Mapping[str, Any]) -> ModelConfig:
    """Return a model with other values of some fields, in every part that has them.

    Args:
        config: configuration of the model.
        fields: values by path: a field, after any of the fields, indices and kinds on the way to
            it, in order. `attention.window` is that of all parts of the kind `attention`, and
            `stages.0.contribution` that of the outermost stage.

    Raises:
        ArbError: no part has a field, or a value is invalid.
    """
    paths = {path: tuple(path.split(".")) for path in fields}
    changes: Counter[str] = Counter()
    try:
        changed = _changed(config, {path: paths[path] for path in fields}, fields, changes)
    except TypeError as error:
        raise ArbError(str(error), "see docs/models.md for the fields of a model") from None
    except ArbError as error:  # its fields need not have options
        raise ArbError(str(error), error.hint) from None
    if missing := [path for path in fields if not changes[path]]:
        raise ArbError(
            f"no setting is named `{shown(missing[0])}`, and no part of the model has such a field",
            "see docs/models.md for the fields of a model, as in `attention.window`",
        )
    return changed


def _changed(
    node: Any, paths: dict[str, tuple[str, ...]], values: Mapping[str, Any], changes: Counter[str]
) -> Any:
    """Return a node of a configuration with changed fields.

    Args:
        node: a configuration; other values are returned as they are.
        paths: names that are left of each path.
        values: values by path.
        changes: number of fields that were changed, by path; updated.
    """
    if not is_dataclass(node) or isinstance(node, type):
        return node
    paths = _strip_prefix(paths, getattr(node, "kind", None))
    changed_fields: dict[str, Any] = {}
    for field in dataclasses.fields(node):
        if not field.init:
            continue
        old = getattr(node, field.name)
        inner = _strip_prefix(paths, field.name)
        if isinstance(old, tuple):
            below = (_entry_paths(inner, index) for index in range(len(old)))
            pairs = zip(old, below, strict=True)
            new: Any = tuple(_changed(entry, left, values, changes) for entry, left in pairs)
        else:
            new = _changed(old, inner, values, changes)
        for path, names in paths.items():
            if names == (field.name,):
                kind = plain_type(field.type)
                new = _value(kind, values[path], SLOTS.get(field.name), path)
                new = as_type(new, kind, f"`{path}`")
                changes[path] += 1
        if new != old or type(new) is not type(old):
            changed_fields[field.name] = new
    return dataclasses.replace(node, **changed_fields) if changed_fields else node


def _entry_paths(paths: dict[str, tuple[str, ...]], index: int) -> dict[str, tuple[str, ...]]:
    """Return the paths for an entry of a tuple: without its index, or without any."""
    return {
        path: names[1:] if names[0] == str(index) else names
        for path, names in paths.items()
        if names[0] == str(index) or not names[0].isdigit()
    }


def _strip_prefix(
    paths: dict[str, tuple[str, ...]], name: str | None
) -> dict[str, tuple[str, ...]]:
    """Remove a name from the beginning of longer paths that begin with it."""
    return {
        path: names[1:] if len(names) > 1 and names[0] == name else names
        for path, names in paths.items()
    }
