"""Settings: the help, choices, bounds, heading and option name of a field, declared at the field.

    steps: int = setting(400, "Training steps.", OPTIMISATION, minimum=1)

and at an argument of a function, whose type is `Annotated[int, Setting(...)]`.

The options of `arb`, their help pages, files of settings, the validation of configurations and
docs/settings.md are generated from these declarations. A field without one has no option.

Configurations may come from untrusted files, so all types and sizes are checked. Errors name fields
in `fields`, which a command line replaces by options.
"""

import dataclasses
import inspect
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from types import UnionType
from typing import Annotated, Any, NamedTuple, get_args, get_origin

from arbcli.base.errors import ArbError, quoted, setting_error
from arbcli.base.reading import has_type, shown

MODEL = "Model"
HNET = "Parts of hnet presets"
GRAPH = "Parts of arb-tiny and arb-3b"
TEXT = "Text"
OPTIMISATION = "Optimisation"
RUN = "Run"
OUTPUT = "Output"
GROUPS = (MODEL, HNET, GRAPH, TEXT, OPTIMISATION, RUN, OUTPUT)
"""Headings of a help page, in order."""
PRESETS_OWN = "the preset's"
"""Description of a default that each preset sets."""


@dataclass(frozen=True, slots=True, eq=False)
class Setting:
    """Help and valid values of a field."""

    help: str = ""
    """One or two sentences; empty for a field without an option. Names of fields in backquotes are
    displayed as options."""
    group: str = MODEL
    """Heading, one of `GROUPS`."""
    choices: tuple[str, ...] = ()
    """Valid values of the field; empty if not limited."""
    words: Mapping[str, Mapping[str, str]] = dataclasses.field(default_factory=dict)
    """Choices of the option if they differ from the field's, each with the values of the fields
    that it sets. Fields whose options have the same name share the option and its words."""
    also: tuple[str, ...] = ()
    """Further valid values in saved configurations."""
    minimum: float | None = None
    """Lower bound, inclusive."""
    maximum: float | None = None
    """Upper bound, inclusive; None is that of all sizes, see `check_fields`."""
    default: str | None = None
    """Description of the default, if it is not the declared value."""
    option: str | None = None
    """Name of the option without dashes; None derives it from the field's name."""
    common: bool = False
    """Whether the option is on the short help page."""
    negatable: bool = True
    """Whether a boolean field has a `--no-` option."""
    metavar: str | None = None
    """Placeholder for the value; None derives it from the choices or the type."""
    decisive: bool | None = None
    """Whether the final weights depend on the field; None if its heading is `OPTIMISATION`."""


def setting(value: Any, *args: Any, **kwargs: Any) -> Any:
    """Declare a field of a dataclass with a default and a `Setting`, of which these are arguments.

    The default must not be mutable.
    """
    return dataclasses.field(default=value, metadata={_KEY: Setting(*args, **kwargs)})


_KEY, _FIELDS = "setting", "__dataclass_fields__"
"""Key of a setting in the metadata of its field, and the attribute of a dataclass with all."""


class Declared(NamedTuple):
    """A field or an argument that has a setting."""

    name: str
    setting: Setting
    kind: Any
    """Type, without the setting."""
    value: Any
    """Default; `inspect.Parameter.empty` if there is none."""

    @property
    def option(self) -> str:
        """Name of the option, and after a `/` of its negation."""
        name = self.setting.option or self.name.replace("_", "-")
        negation = f"/--no-{name}" if self.kind is bool and self.setting.negatable else ""
        return f"--{name}{negation}"

    @property
    def default(self) -> str | None:
        """Description of the default for help pages; None if it is not displayed."""
        if self.setting.default is not None:
            return self.setting.default
        if self.value in (None, False, ()) and type(self.value) is not int:
            return None
        if self.value is inspect.Parameter.empty:
            return None
        return "yes" if self.value is True else str(self.value)


def split_type(annotation: Any) -> tuple[Any, Setting | None]:
    """Split an annotation into its type and its setting."""
    if get_origin(annotation) is not Annotated:
        return annotation, None
    kind, *others = get_args(annotation)
    return kind, next((part for part in others if isinstance(part, Setting)), None)


def plain_type(annotation: Any) -> Any:
    """Return the type of an annotation, without its setting."""
    return split_type(annotation)[0]


def settings_of(source: type | Callable) -> dict[str, Declared]:
    """Return the settings with help of a dataclass's fields or a function's arguments, by name."""
    settings = {}
    metadata = {name: field.metadata for name, field in getattr(source, _FIELDS, {}).items()}
    for name, parameter in inspect.signature(source).parameters.items():
        kind, setting = split_type(parameter.annotation)
        setting = metadata.get(name, {}).get(_KEY, setting)
        if setting is not None and setting.help:
            settings[name] = Declared(name, setting, kind, parameter.default)
    return settings


def decisive(config: Any) -> dict[str, Any]:
    """Return the values of a configuration's decisive fields, by name."""
    values = {}
    for name, declared in settings_of(type(config)).items():
        setting = declared.setting
        if setting.group == OPTIMISATION if setting.decisive is None else setting.decisive:
            values[name] = getattr(config, name)
    return values


def replaced(declared: Declared, **changes: Any) -> Declared:
    """Return a declaration with changed attributes of its setting."""
    return declared._replace(setting=dataclasses.replace(declared.setting, **changes))


MAX_SIZE = 2**20
"""Upper bound of sizes whose setting has none; products of a tensor's sizes fit in 63 bits."""


def check_fields(config: Any, largest: int = MAX_SIZE) -> None:
    """Check all fields of a dataclass: see `check_value`.

    Raises:
        ArbError: a value has the wrong type or is out of bounds.
    """
    for field in dataclasses.fields(config):
        kind, setting = split_type(field.type)
        setting = field.metadata.get(_KEY, setting)
        check_value(field.name, getattr(config, field.name), kind, setting, largest)


def check_value(
    field: str, value: Any, kind: Any, setting: Setting | None, largest: int = MAX_SIZE
) -> None:
    """Check the type of a value, and the choices and bounds of its setting.

    Args:
        field: name of the field.
        value: the value; integers are sizes.
        kind: type of the field.
        setting: setting of the field, if it has one.
        largest: upper bound of sizes whose setting has none; the lower one is 1.

    Raises:
        ArbError: the value has the wrong type, is not a choice or is out of bounds.
    """
    check_type(field, value, kind)
    setting = setting or Setting()
    check_setting(field, value, setting)
    minimum = 1 if setting.minimum is None else None
    maximum = largest if setting.maximum is None else None
    for size in value if isinstance(value, tuple) else (value,):
        if type(size) is int and kind is not float:  # which may be 0 in a field of floats
            check_bounds(field, size, minimum, maximum)


def check_setting(field: str, value: Any, setting: Setting) -> None:
    """Check a value against the choices and bounds of a setting; None is always valid.

    Raises:
        ArbError: it is not a choice or is out of bounds.
    """
    for item in value if isinstance(value, tuple) else (value,):
        if item is None:
            continue
        if setting.choices:
            check_choice(field, item, (*setting.choices, *setting.also))
        if not isinstance(item, str):
            check_bounds(field, item, setting.minimum, setting.maximum)


def check_type(field: str, value: Any, kind: Any) -> None:
    """Check the type of a value; `True` is not an int, but an int is a float.

    Raises:
        ArbError: it has another type, or is not finite.
    """
    if not has_type(value, kind):
        name = getattr(kind, "__name__", None) or str(kind)
        if isinstance(value, float) and has_type(0.0, kind):
            raise ArbError(
                f"`{field}` is `{value}`", "use a number that is finite", fields=(field,)
            )
        raise ArbError(
            f"`{field}` is `{shown(value)}`, which is not of type {name}",
            "restore the file that holds it",
            fields=(field,),
        )


def as_type(value: Any, kind: Any, where: str) -> Any:
    """Convert a value of a file to a type: lists to tuples, and integers to floats.

    Args:
        value: the value.
        kind: type of the field.
        where: name of the field, in backquotes, for the error.

    Raises:
        ArbError: it has another type.
    """
    choices = get_args(kind) if get_origin(kind) is UnionType else (kind,)
    for choice in choices:
        if get_origin(choice) is tuple and isinstance(value, list):
            element = get_args(choice)[0]
            if all(type(part) is element for part in value):
                return tuple(value)
        if has_type(value, choice):
            return float(value) if choice is float else value
    names = " or ".join(
        "list" if get_origin(choice) is tuple else getattr(choice, "__name__", str(choice))
        for choice in choices
        if choice is not type(None)
    )
    raise ArbError(f"{where} is `{shown(value)}`", f"it takes a value of type {names}")


def check_choice(field: str, value: object, known: Iterable[object]) -> None:
    """Check that a value is one of `known`.

    Raises:
        ArbError: it is not.
    """
    if value not in known:
        raise ArbError(
            f"`{field}` is `{shown(value)}`", f"choose one of: {quoted(known)}", fields=(field,)
        )


def check_bounds(
    field: str, value: float, minimum: float | None = 1, maximum: float | None = None
) -> None:
    """Check that a number is within bounds; a bound of None is not checked.

    Raises:
        ArbError: it is smaller or larger.
    """
    hint = None
    if minimum is not None and value < minimum:
        hint = f"use {minimum} or more"
    if maximum is not None and value > maximum:
        hint = f"use at most {maximum:,}"
    if hint:
        raise setting_error(f"`{field}` is {shown(value)}", hint)
