"""The state of a model: predicted from its configuration alone, and measured.

A prediction reads the declarations of layers, in a model that is built on tensors without memory.
"""

import dataclasses
import itertools
from collections import Counter, deque
from collections.abc import Iterator
from dataclasses import dataclass, fields, is_dataclass
from types import FunctionType, ModuleType
from typing import TYPE_CHECKING, Any

from arbcli.base.lazy import imported
from arbcli.config.layer_spec import SCALE_TYPES
from arbcli.config.model import ModelConfig
from arbcli.config.parts.base import remove_rules
from arbcli.config.presets import set_symbol_directions
from arbcli.config.training import TrainConfig
from arbcli.inspect.parts import PartReport, list_parts
from arbcli.kernels.codec.layout import TRITS_PER_BYTE
from arbcli.model.rules import DIRECTION, RULES

if TYPE_CHECKING:
    from torch import Tensor

    from arbcli.model.language_model import LanguageModel

AREAS = (
    "embedding", "sequencer", "memgram", "attention", "indexer", "mlp", "experts", "codebook",
    "knowledge", "moe_graph", "router", "mamba", "chunking", "streams", "norms", "head", "ahead",
)  # fmt: skip
"""Parts of models in the order of reports; others follow."""
KINDS = ("trits", "scales", "remainder", "moment", "votes", "statistics", "counters", "edges")
"""Purposes of buffers, in the order of reports; a rule may declare more."""
ADAMW_BYTES = 16
"""A weight, its gradient and two moments, float32 each."""
MAX_COUNTER_BYTES = 2**14
"""An integer tensor that is not a buffer counts as state only if it takes more bytes than this."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Footprint:
    """Memory of a group of weights."""

    weights: int
    """Logical weights: one a trit, padding not counted."""
    padding_trits: int
    """Trits that fill the last byte of a row."""
    bytes_by_kind: dict[str, int]
    """Size in bytes of each of `KINDS`; a nibble's moment is in the byte of its remainder."""
    state_bytes: int
    bytes_per_weight: float


@dataclass(frozen=True, slots=True, kw_only=True)
class StateReport:
    """State of a model, predicted from its configuration."""

    config: ModelConfig
    areas: dict[str, Footprint]
    total: Footprint
    trained_weights: int
    """Number of weights except those of norms, which are frozen."""
    adamw_bytes: int
    """Memory of these weights, their gradients and AdamW's two moments in float32."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelReport(StateReport):
    """The state of a model, and of each of its parts."""

    parts: tuple[PartReport, ...]
    """Rows of depth 0 make up the model."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Choice:
    """State of a model with one rule and scale type."""

    rule: str
    direction: str | None
    scale_type: str
    state_bytes: int
    bytes_per_weight: float


@dataclass(frozen=True, slots=True, kw_only=True)
class WhatIfReport:
    """The state of one shape of model under every rule and scale type."""

    trained_weights: int
    adamw_bytes: int
    choices: tuple[Choice, ...]

    @property
    def passed(self) -> bool:
        """True, as nothing is checked."""
        return True


@dataclass(frozen=True, slots=True, kw_only=True)
class MeasuredState:
    """Tensors of a model: buffers, parameters and all others that are reachable from it."""

    bytes_by_area: dict[str, dict[str, int]]
    """Bytes by area, then by kind; tensors that no module declares are in `other`."""
    state_bytes: int
    counter_bytes: int
    """Seeds, keys and counters: small integers that are not buffers."""
    float_parameters: int
    """Number of elements of parameters; 0 for packed models."""
    float_buffers: int
    """Number of elements of float buffers."""
    float_attributes: int
    """Number of elements of other float tensors."""
    float_names: tuple[str, ...]
    """Names of the float tensors."""


def predict(config: ModelConfig) -> StateReport:
    """Count the weights and bytes of a model by building it on the meta device."""
    return _state(config, _empty(config))


def predict_run(config: TrainConfig) -> StateReport:
    """Count the weights and bytes of a run, which may have more state than its model."""
    return _state(config.model, model_of_run(config))


def model_of_run(config: TrainConfig) -> "LanguageModel":
    """Build the packed model of a run on the meta device, with the state that the run adds."""
    model = _empty(config.model)
    if config.reduce_dtype is not None:
        model.declare_wire()
    if config.weight_average:
        imported("arbcli.model.averages:declare_averages")(model)
    return model


def predict_parts(config: ModelConfig) -> ModelReport:
    """Count the weights and bytes of a model and of each of its parts: see `predict`."""
    model = _empty(config)
    report = _state(config, model)
    fields_of_model = {field.name: getattr(report, field.name) for field in fields(report)}
    return ModelReport(**fields_of_model, parts=list_parts(model))


def _empty(config: ModelConfig) -> "LanguageModel":
    import torch  # takes seconds to import, and reports of it need none

    from arbcli.model.build import build_model

    with torch.device("meta"):
        return build_model(dataclasses.replace(config, weights="ternary"))


def _state(config: ModelConfig, model: "LanguageModel") -> StateReport:
    weights, sizes = Counter[str](), sizes_by_area(model)
    for tensor in model.state_modules():
        weights[tensor.area] += getattr(tensor, "num_weights", 0)
    tensors = model.packed_tensors().values()
    trained = sum(tensor.num_weights for tensor in tensors if not tensor.frozen)
    return StateReport(
        config=config,
        areas={area: _footprint(weights[area], kinds) for area, kinds in sizes.items()},
        total=_footprint(weights.total(), sum(sizes.values(), Counter())),
        trained_weights=trained,
        adamw_bytes=trained * ADAMW_BYTES,
    )


def sizes_by_area(model: "LanguageModel") -> dict[str, Counter[str]]:
    """Sum the bytes of a model's state by area, in the order of `AREAS`, and by purpose."""
    sizes = {area: Counter[str]() for area in AREAS}
    for tensor in model.state_modules():
        for name, kind in tensor.kinds.items():
            sizes.setdefault(tensor.area, Counter())[kind] += getattr(tensor, name).nbytes
    return {area: kinds for area, kinds in sizes.items() if kinds}


def _footprint(weights: int, sizes: Counter[str]) -> Footprint:
    """Return the footprint of weights from the sizes of their buffers in bytes, by kind."""
    state_bytes = sizes.total()
    return Footprint(
        weights=weights,
        padding_trits=TRITS_PER_BYTE * sizes["trits"] - weights,
        bytes_by_kind=dict.fromkeys(KINDS, 0) | sizes,
        state_bytes=state_bytes,
        bytes_per_weight=state_bytes / weights if weights else 0.0,
    )


def what_if(config: ModelConfig) -> WhatIfReport:
    """Predict the state under every rule, with its own directions, and every scale type.

    Rules of parts are left out. All digits take the same memory as the trit.
    """
    config, choices = remove_rules(config), []
    for scale_type, name in itertools.product(SCALE_TYPES, RULES):
        stored = dataclasses.replace(
            config,
            rule=name,
            direction=DIRECTION[name],
            digits="trit",
            scale_type=scale_type,
            votes_fixes=config.votes_fixes if name == "votes" else (),
            embedding_direction=None,
            head_direction=None,
        )
        report = predict(set_symbol_directions(stored))
        choices.append(
            Choice(
                rule=name,
                direction=DIRECTION[name],
                scale_type=scale_type,
                state_bytes=report.total.state_bytes,
                bytes_per_weight=report.total.bytes_per_weight,
            )
        )
    return WhatIfReport(
        trained_weights=report.trained_weights,
        adamw_bytes=report.adamw_bytes,
        choices=tuple(choices),
    )


def measure(model: "LanguageModel", *others: object) -> MeasuredState:
    """Measure all tensors reachable from a model, or from `others`, whatever their classes.

    Parameters, buffers and the attributes of modules are followed, through lists, dicts and
    objects, so the updater that a module hands its gradients to is walked too.
    """
    areas: dict[str, dict[str, int]] = {}
    floats = {"parameter": 0, "buffer": 0, "attribute": 0}
    names, counters = [], 0
    declared = {
        id(getattr(part, name)): (part.area, kind)
        for part in model.state_modules()
        for name, kind in part.kinds.items()
    }
    for name, role, tensor in _reachable((model, *others)):
        integer = not (tensor.is_floating_point() or tensor.is_complex())
        if not integer:
            floats[role] += tensor.numel()
            names.append(name)
        elif role == "attribute" and tensor.nbytes <= MAX_COUNTER_BYTES:
            counters += tensor.nbytes
            continue
        area, kind = declared.get(id(tensor), ("other", "other"))
        kinds = areas.setdefault(area, {})
        kinds[kind] = kinds.get(kind, 0) + tensor.nbytes
    return MeasuredState(
        bytes_by_area=areas,
        state_bytes=sum(sum(kinds.values()) for kinds in areas.values()),
        counter_bytes=counters,
        float_parameters=floats["parameter"],
        float_buffers=floats["buffer"],
        float_attributes=floats["attribute"],
        float_names=tuple(names),
    )


_Entry = tuple[tuple[str, ...], str, Any]
"""Path, role and value of an object."""


def _reachable(roots: tuple[object, ...]) -> Iterator[tuple[str, str, "Tensor"]]:
    """Yield (name, role, tensor) of every tensor reachable from the roots, each once."""
    from torch import Tensor  # takes seconds to import, and a prediction needs none
    from torch.nn import Module

    tree = {"_parameters": "parameter", "_buffers": "buffer", "_modules": "module"}
    seen: dict[int, Any] = {}
    queue: deque[_Entry] = deque(((), "attribute", root) for root in roots)
    while queue:
        path, role, value = queue.popleft()
        if id(value) in seen:
            continue
        seen[id(value)] = value  # held, so that its id is not given to another
        children: list[_Entry] = []
        if isinstance(value, Tensor):
            yield ".".join(path), role, value
        elif isinstance(value, dict):
            children = [((*path, str(key)), role, entry) for key, entry in value.items()]
        elif isinstance(value, list | tuple | set | frozenset | deque):
            children = [((*path, str(index)), role, entry) for index, entry in enumerate(value)]
        elif isinstance(value, Module):
            for key, entry in vars(value).items():
                if key in tree:
                    children.append((path, tree[key], entry))
                else:
                    children.append(((*path, key), "attribute", entry))
        elif hasattr(value, "__dict__") and not isinstance(value, type | ModuleType | FunctionType):
            children = [(path, "attribute", vars(value))]
        elif is_dataclass(value) and not isinstance(value, type):  # of slots
            names = (field.name for field in fields(value))
            children = [((*path, name), "attribute", getattr(value, name)) for name in names]
        # the tree of modules comes first: what is in it keeps the name that it has there
        queue.extend(entry for entry in children if entry[1] == "attribute")
        queue.extendleft(entry for entry in children if entry[1] != "attribute")
