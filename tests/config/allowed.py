"""Record the values that every field of a configuration takes, in turn and in pairs.

`python tests/config/allowed.py` writes them to `allowed.txt`; `test_allowed.py` compares. Every
field of every part of the models of `verify.models`, and of runs, gets numbers around its bounds,
words of all settings, and the parts of other models. A line has the values with the number of
models that take them, then a sum of their widths, products and the like. Refusals follow, in which
each number is N.
"""

import re
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import fields, is_dataclass, replace
from functools import partial
from itertools import combinations, product
from pathlib import Path
from typing import Any

from arbcli.base.errors import ArbError
from arbcli.config.model import ModelConfig
from arbcli.config.settings import settings_of
from arbcli.config.short_forms import MODEL_SETTINGS
from arbcli.config.training import TrainConfig, train_config
from arbcli.verify.models import MODELS as ALL_MODELS

ALIKE = ("graph softplus", "graph hash", "graph nearest", "hnet", "hnet words", "4 streams")
"""Models with the fields of others."""
MODELS = {name: config for name, config in ALL_MODELS.items() if name not in ALIKE}
WRITTEN = Path(__file__).with_suffix(".txt")
NUMBERS = (None, True, False, -1, 0, 1, 2, 3, 4, 6, 8, 2**10, 2**20, 2**20 + 1, 2**31 - 1, 2**31,
           -0.5, 0.0, 0.25, 0.5, 1.0, 1.5)  # fmt: skip
PLACE = {"device": "cpu", "backend": "torch", "compute": "fp32"}
RUNS: tuple[dict[str, Any], ...] = (
    {}, {"weights": "float"}, {"rule": "votes", "accum": 2}, {"rule": "carry"},
    {"wire": "int12", "accum": 2},
)  # fmt: skip
NOT_TRIED = ("model", "stages", "device", "data", "val", "teacher", "tokenizer", "kind")
"""Fields of other fields, and of any text, which is checked where it is opened."""

WORDS_OF_PARTS = ("gain", "mean", "mlp=text", "none", "unit")
MOST_LISTED, MOST_WORDS = 12, 3


class _Field:
    """Outcomes of one field in all models."""

    def __init__(self) -> None:
        self.taken: Counter[str] = Counter()
        self.total = 0.0
        self.refused: dict[str, Counter[str]] = {}

    def try_value(self, name: str, make: Callable[[], Any]) -> None:
        try:
            made = make()
        except ArbError as error:
            text = f"{error}; {error.hint}; {' '.join(error.fields)}"
            message = re.sub(r"\d[\d,.]*", "N", text.replace(f"`{name}`", "`V`"))
            message = message.replace("`N`, which is not", "`V`, which is not")
            self.refused.setdefault(message, Counter())[name] += 1
        else:
            self.taken[name] += 1
            self.total += sum(_facts(made))

    def lines(self) -> Iterator[str]:
        yield f"  {_counted(self.taken)} = {self.total:.9g}"
        for message, values in sorted(self.refused.items()):
            yield f"  {message}: {_counted(values)}"


def _shown(value: Any) -> str:
    """Name a value, or the only one of a tuple."""
    if isinstance(value, tuple) and len(value) == 1:
        (value,) = value
    if is_dataclass(value):
        return type(value).__name__
    return f"{len(value)} of these" if "Config(" in str(value) else str(value)


def _counted(values: Counter[str]) -> str:
    if len(values) > MOST_LISTED:
        return f"{len(values)} values, {values.total()} times"
    return " ".join(f"{value}*{count}" for value, count in values.items())


def _facts(config: ModelConfig | TrainConfig) -> Iterator[float]:
    """Yield what a configuration computes of its fields."""
    if isinstance(config, TrainConfig):
        yield config.eval_interval
        yield from config.fades
        yield len(config.decisive())
        config = config.model
    yield from (config.symbols, config.layers, config.reach or -1, config.reads_text)
    yield from (*config.slots, *config.lengths, config.products())
    for site, part in config.sited_parts():
        yield from (part.saved_width(site), part.reach(site) or -1, bool(part.across))


def _nodes(value: Any, path: tuple = ()) -> Iterator[tuple[tuple, Any]]:
    """Yield the configurations within one, with their paths of fields and indices."""
    if is_dataclass(value):
        yield path, value
        for field in fields(value):
            yield from _nodes(getattr(value, field.name), (*path, field.name))
    elif isinstance(value, tuple):
        for index, one in enumerate(value):
            yield from _nodes(one, (*path, index))


def _changed(config: Any, path: tuple, name: str, value: Any) -> Any:
    """Return a configuration in which the field of a node has another value."""
    if not path:
        return replace(config, **{name: value})
    at, *rest = path
    if isinstance(at, int):
        inner = _changed(config[at], rest, name, value)
        return (*config[:at], inner, *config[at + 1 :])
    return replace(config, **{at: _changed(getattr(config, at), rest, name, value)})


def _words() -> list[str]:
    """List the words of all settings, the first of many, and some of parts."""
    settings = [*MODEL_SETTINGS.values(), *settings_of(TrainConfig).values()]
    words = [(*each.setting.choices, *each.setting.also)[:MOST_WORDS] for each in settings]
    return sorted({*(word for some in words for word in some), *WORDS_OF_PARTS})


WORDS = _words()


def _values(name: str, value: Any, parts: dict[str, list]) -> list[Any]:
    """List what a field is given instead of its value: more of its kind, and of others."""
    if name in parts:
        return parts[name]
    if isinstance(value, tuple):
        shorter = [value[:-1], (*value, *value[-1:])] if value else [("a",), (1,)]
        return [*shorter, *((word,) for word in WORDS if not value or type(value[0]) is str)]
    return [*NUMBERS, *(WORDS if type(value) is str else ("none",))]


def _pairs(config: Any) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield pairs of fields with two values each: words, switched on and off, or 1 and 2."""
    choices: dict[str, tuple] = {}
    for name, each in settings_of(type(config)).items():
        if name not in NOT_TRIED:
            words = (*each.setting.choices, *each.setting.also)[:MOST_WORDS]
            choices[name] = words or ((True, False) if each.kind is bool else (1, 2))
    for one, other in combinations(choices, 2):
        for first, second in product(choices[one], choices[other]):
            yield f"{one} and {other}", {one: first, other: second}


def allowed() -> Iterator[str]:
    """Yield the lines of all fields, and one of each pair."""
    known = [node for config in MODELS.values() for _, node in _nodes(config)]
    parts: dict[str, dict[str, Any]] = {}
    for node in known:
        for field in fields(node):
            value = getattr(node, field.name)
            if is_dataclass(value):
                parts.setdefault(field.name, {"None": None})[repr(value)] = value
    shared = {name: list(found.values()) for name, found in parts.items()}
    runs = [train_config("tiny", lr=1.0, **PLACE, **given) for given in RUNS]
    alone: dict[str, _Field] = {}
    for config in (*MODELS.values(), *runs):
        seen: set[type] = set()
        for path, node in _nodes(config):
            if type(node) in seen or (path and isinstance(config, TrainConfig)):
                continue
            seen.add(type(node))
            for field in fields(node):
                if field.init and field.name not in NOT_TRIED:
                    tried = alone.setdefault(f"{type(node).__name__}.{field.name}", _Field())
                    for other in _values(field.name, getattr(node, field.name), shared):
                        name = _shown(other)
                        tried.try_value(name, partial(_changed, config, path, field.name, other))
    for name, each in sorted(alone.items()):
        yield from (name, *each.lines())
    for config in (MODELS["ahead"], MODELS["hnet every"], runs[0], runs[-1]):
        pairs: dict[str, _Field] = {}
        for names, values in _pairs(config):
            words = ",".join(map(str, values.values()))
            pairs.setdefault(names, _Field()).try_value(words, partial(replace, config, **values))
        free = [each for each in pairs.values() if not each.refused]
        yield f"{len(free)} pairs of {type(config).__name__} = {sum(e.total for e in free):.9g}"
        for names, each in pairs.items():
            if refused := sum(times.total() for times in each.refused.values()):
                yield f"{names}: {each.taken.total()} taken, {refused} refused = {each.total:.9g}"


if __name__ == "__main__":
    WRITTEN.write_text("\n".join(allowed()) + "\n", encoding="utf-8")
