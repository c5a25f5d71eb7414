"""Settings: the help, choices, bounds, heading and option name of a field, declared at the field.

    steps: Annotated[int, Setting("Training steps.", OPTIMISATION, least=1)] = 400

The options of `arb`, their pages of help, files of settings, the checks of a configuration and
docs/settings.md are all made from these declarations. A field without one has no option.
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
"""Headings of a page of help, in order."""
PRESETS_OWN = "the preset's"
"""A default that each preset sets."""


@dataclass(frozen=True, slots=True, eq=False)
class Setting:
    """How a person sees a field, and the values that it takes."""

    help: str
    """One or two sentences; other fields are named in backquotes, and shown as their options."""
    group: str = MODEL
    """Heading, one of `GROUPS`."""
    choices: tuple[str, ...] = ()
    words: Mapping[str, Mapping[str, str]] = field(default_factory=dict)
    """Choices of the option where they are other words, with the values of fields that each sets.
    Fields whose options have one name share the option and its words."""
    also: tuple[str, ...] = ()
    """Values that a saved configuration may have besides `choices`."""
    least: float | None = None
    most: float | None = None
    default: str | None = None
    """The default in words, where it is not the value that is declared."""
    option: str | None = None
    """Name of the option without its dashes; None follows from the field's name."""
    negatable: bool = True
    """Whether a field that is true or false has an option for false."""
    metavar: str | None = None
    """Placeholder for the value; None follows from the choices or the type."""
    decisive: bool = False
    """Whether the final weights depend on it."""


class Declared(NamedTuple):
    """A field or an argument that has a setting."""

    name: str
    setting: Setting
    kind: Any
    """Its type, without the setting."""
    value: Any
    """Its default; `inspect.Parameter.empty` if it has none."""

    @property
    def option(self) -> str:
        """The option's name, and that of its negation after a `/`."""
        name = self.setting.option or self.name.replace("_", "-")
        negation = f"/--no-{name}" if self.kind is bool and self.setting.negatable else ""
        return f"--{name}{negation}"

    @property
    def default(self) -> str | None:
        """The default in words, None where there is nothing to say."""
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
    """List the settings of a dataclass, or of the arguments of a function, by name."""
    found = {}
    for name, one in inspect.signature(source).parameters.items():
        kind, setting = parted(one.annotation)
        if setting is not None:
            found[name] = Declared(name, setting, kind, one.default)
    return found


def decisive(config: Any) -> dict[str, Any]:
    """List the values of a configuration that its result depends on."""
    names = settings_of(type(config)).items()
    return {name: getattr(config, name) for name, one in names if one.setting.decisive}


def replaced(declared: Declared, **changes: Any) -> Declared:
    """Return a declaration whose setting has other values."""
    return declared._replace(setting=dataclasses.replace(declared.setting, **changes))
