"""Settings: the help, choices, bounds, heading and option name of a field, declared at the field.

    steps: Annotated[int, Setting("Training steps.", OPTIMISATION, minimum=1)] = 400

The options of `arb`, their help pages, files of settings, the validation of configurations and
docs/settings.md are generated from these declarations. A field without one has no option.
"""

import dataclasses
import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Annotated, Any, NamedTuple, get_args, get_origin

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

    help: str
    """One or two sentences. Names of fields in backquotes are displayed as options."""
    group: str = MODEL
    """Heading, one of `GROUPS`."""
    choices: tuple[str, ...] = ()
    """Valid values of the field; empty if not limited."""
    words: Mapping[str, Mapping[str, str]] = field(default_factory=dict)
    """Choices of the option if they differ from the field's, each with the values of the fields
    that it sets. Fields whose options have the same name share the option and its words."""
    also: tuple[str, ...] = ()
    """Further valid values in saved configurations."""
    minimum: float | None = None
    """Lower bound, inclusive."""
    maximum: float | None = None
    """Upper bound, inclusive."""
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
    decisive: bool = False
    """Whether the final weights depend on the field."""


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


def parted(annotation: Any) -> tuple[Any, Setting | None]:
    """Split an annotation into its type and its setting."""
    if get_origin(annotation) is not Annotated:
        return annotation, None
    kind, *others = get_args(annotation)
    return kind, next((one for one in others if isinstance(one, Setting)), None)


def plain_type(annotation: Any) -> Any:
    """Return the type of an annotation, without its setting."""
    return parted(annotation)[0]


def settings_of(source: type | Callable) -> dict[str, Declared]:
    """Return the settings of a dataclass's fields or a function's arguments, by name."""
    settings = {}
    for name, one in inspect.signature(source).parameters.items():
        kind, setting = parted(one.annotation)
        if setting is not None:
            settings[name] = Declared(name, setting, kind, one.default)
    return settings


def decisive(config: Any) -> dict[str, Any]:
    """Return the values of a configuration's decisive fields, by name."""
    names = settings_of(type(config)).items()
    return {name: getattr(config, name) for name, one in names if one.setting.decisive}


def replaced(declared: Declared, **changes: Any) -> Declared:
    """Return a declaration with changed attributes of its setting."""
    return declared._replace(setting=dataclasses.replace(declared.setting, **changes))
