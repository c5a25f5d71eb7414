"""The state of a model: predicted from its configuration alone, and found by walking it.

A prediction is arithmetic from the definition of the packed tensor. It shares no code with the
modules, so that the two can be compared, and imports no torch, so that it is instant.
"""

import dataclasses
import itertools
import math
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass
from types import FunctionType, ModuleType
from typing import TYPE_CHECKING, Any

from arbcli.config.model import RULES, SCALE_TYPES, VOCABULARY, GraphConfig, ModelConfig

if TYPE_CHECKING:
    from torch import Tensor
    from torch.nn import Module

AREAS = (
    "embedding", "sequencer", "memgram", "attention", "mlp", "codebook", "knowledge", "moe_graph",
    "router", "norms", "head",
)  # fmt: skip
KIND_OF_BUFFER = {
    "trits": "trits",
    "exponent": "scales",
    "fraction": "scales",
    "remainder": "remainder",
    "moment": "moment",
    "votes": "votes",
    "scale_votes": "votes",
    "row_statistic": "statistics",
    "column_statistic": "statistics",
    "usage": "counters",
    "balance": "counters",
    "symbol": "counters",
    "strength": "counters",
    "source": "edges",
    "target": "edges",
    "sign": "edges",
    "score": "edges",
}
KINDS = tuple(dict.fromkeys(KIND_OF_BUFFER.values()))
ADAMW_BYTES = 16
"""A weight, its gradient and two moments, float32 each."""
TRITS_PER_BYTE = 5
LARGEST_COUNTER = 2**14
"""An integer tensor that is no buffer counts as state only if it takes more bytes than this."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Footprint:
    """What some of the weights take."""

    weights: int
    """Logical weights: one a trit, padding not counted."""
    padding_trits: int
    """Trits that fill the last byte of a row."""
    bytes_by_kind: dict[str, int]
    """Every one of `KINDS`; a nibble's moment is in the byte of its remainder."""
    state_bytes: int
    bytes_per_weight: float


@dataclass(frozen=True, slots=True, kw_only=True)
class StateReport:
    """The state of a model, as its configuration says."""

    config: ModelConfig
    areas: dict[str, Footprint]
    total: Footprint
    trained_weights: int
    """All but those of the norms, which are frozen."""
    adamw_bytes: int
    """What these, their gradients and AdamW's two moments take in float32."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Choice:
    """One rule and scale type, and the state that goes with it."""

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


@dataclass(frozen=True, slots=True, kw_only=True)
class MeasuredState:
    """What hangs on a model: its buffers, its parameters and every other tensor it can reach."""

    bytes_by_area: dict[str, dict[str, int]]
    """By area, then by kind; only what is there. A tensor nobody expects is of the kind `other`."""
    state_bytes: int
    counter_bytes: int
    """Seeds, keys and counters: small integers that are no buffers."""
    float_parameters: int
    """Elements of parameters, which no packed model has."""
    float_buffers: int
    """Elements of buffers that are not integers."""
    float_attributes: int
    """Elements of other tensors that are not integers."""
    float_names: tuple[str, ...]
    """Where these are."""


def predict(config: ModelConfig) -> StateReport:
    """Count the weights and the bytes of a model that does not exist yet."""
    parts: dict[str, list[Footprint]] = {area: [] for area in AREAS}
    of_graph = isinstance(config, GraphConfig)
    for name, count, rows, columns in (_graph_matrices if of_graph else _matrices)(config):
        if count == 0:
            continue
        area = area_of(name)
        parts[area].append(footprint(config, count, rows, columns, frozen=area == "norms"))
        if name.endswith(".table"):
            parts[area].append(_add_up(0, 0, {"counters": count * rows}))
    for area, kind, size in _memories(config) if of_graph else ():
        parts[area].append(_add_up(0, 0, {kind: size}))
    areas = {area: _sum(found) for area, found in parts.items() if found}
    total = _sum(list(areas.values()))
    trained = total.weights - areas["norms"].weights
    return StateReport(
        config=config,
        areas=areas,
        total=total,
        trained_weights=trained,
        adamw_bytes=trained * ADAMW_BYTES,
    )


def what_if(config: ModelConfig) -> WhatIfReport:
    """Predict the state under every rule, with its own direction, and every scale type."""
    choices = []
    for scale_type, (name, rule) in itertools.product(SCALE_TYPES, RULES.items()):
        kind = {"rule": name, "direction": rule.direction, "scale_type": scale_type}
        report = predict(dataclasses.replace(config, **kind))
        size = report.total.state_bytes, report.total.bytes_per_weight
        choices.append(Choice(**kind, state_bytes=size[0], bytes_per_weight=size[1]))
    return WhatIfReport(
        trained_weights=report.trained_weights,
        adamw_bytes=report.adamw_bytes,
        choices=tuple(choices),
    )


def area_of(name: str) -> str:
    """Find the area of a weight by its name in the model."""
    if "norm" in name:
        return "norms"
    path = name.split(".")
    if path[0] == "byte_mlp":
        return "head"
    return next((area for area in AREAS if area in path), "other")


def _matrices(config: ModelConfig) -> list[tuple[str, int, int, int]]:
    """List every matrix: name, how many there are, outputs, inputs."""
    dim, ffn, layers = config.dim, config.ffn, config.layers
    matrices = [
        ("embedding", 1, VOCABULARY, dim),
        ("attention_norm", layers, 1, dim),
        ("attention.qkv", layers, 3 * dim, dim),
        ("attention.output", layers, dim, dim),
        ("mlp_norm", layers, 1, dim),
        ("mlp.gate_up", layers, 2 * ffn, dim),
        ("mlp.output", layers, dim, ffn),
        ("norm", 1, 1, dim),
        ("head", 1, VOCABULARY, dim),
    ]
    if config.sub_norms:
        matrices += [("attention.sub_norm", layers, 1, dim), ("mlp.sub_norm", layers, 1, ffn)]
    return matrices


def _graph_matrices(config: GraphConfig) -> list[tuple[str, int, int, int]]:
    """List every matrix of a `GraphLM`, as `_matrices` does."""
    dim, layers, iterations = config.dim, config.layers, config.max_moe_iters
    still = config.head_dim - config.rotary
    matrices = [("embedding", 1, VOCABULARY, dim)]
    if config.sequencer:
        matrices += [
            ("sequencer.table", 1, config.ngram_rows, config.ngram_dim),
            ("sequencer.norm", 1, 1, config.ngram_dim),
            ("sequencer.projection", 1, dim, config.ngram_dim),
        ]
    if config.memgram:
        matrices += [
            ("memgram.table", 1, VOCABULARY, dim),
            ("memgram.norm", 1, 1, dim),
            ("memgram.output", 1, dim, dim),
        ]
    if config.attention:
        matrices += [
            ("attention_norm", layers, 1, dim),
            ("attention.query_down", layers, dim + config.latent + config.rotary, dim),
            ("attention.latent_norm", layers, 1, config.latent),
            ("attention.up", layers, config.heads * (still + config.head_dim), config.latent),
            ("attention.sub_norm", layers, 1, dim),
            ("attention.output", layers, dim, dim),
        ]
    for path, norm, count, ffn in (
        ("mlp.", "mlp_norm", layers, config.ffn),
        ("byte_mlp.", "byte_norm", 1, config.head_ffn),
    ):
        matrices += [
            (norm, count, 1, dim),
            (f"{path}gate_up", count, 2 * ffn, dim),
            (f"{path}sub_norm", count if config.sub_norms else 0, 1, ffn),
            (f"{path}output", count, dim, ffn),
        ]
    for name, (halves, width, heads) in config.codebooks.items():
        matrices += [
            (f"{name}.{part}", 1, rows, columns)
            for part, rows, columns in (
                ("norm", 1, dim),
                ("query", heads * 2 * config.key_dim, dim),
                ("query_norm", 1, config.key_dim),
                ("left", halves[0], config.key_dim),
                ("right", halves[1], config.key_dim),
                ("table", halves[0] * halves[1], width),
                ("sub_norm", 1, heads * width),
                ("output", dim, heads * width),
            )
        ]
    experts, width, ffn, gate = (
        config.experts, config.expert_dim, config.expert_ffn, config.gate_dim
    )  # fmt: skip
    if config.moe or config.graph:
        inward = (width + gate if config.moe else 0) + config.adapter_rank + 1
        matrices += [
            ("moe_graph.norm", 1, 1, dim),
            ("moe_graph.inward", 1, inward, dim),
            ("moe_graph.adapter_norm", 1, 1, config.adapter_rank),
            ("moe_graph.adapters", iterations, dim, config.adapter_rank),
        ]
    if config.moe:
        matrices += [
            ("moe_graph.experts.gate.norm", 1, 1, gate),
            ("moe_graph.experts.gate.keys", 1, experts, gate),
            ("moe_graph.experts.gate_up", experts, 2 * ffn, width),
            ("moe_graph.experts.sub_norm", 1, 1, ffn),
            ("moe_graph.experts.down", experts, width, ffn),
            ("moe_graph.sub_norm", 1, 1, width),
            ("moe_graph.output", 1, dim, width),
        ]
    if config.graph:
        matrices += [
            ("moe_graph.message_norm", 1, 1, config.code_dim),
            ("moe_graph.message", 1, dim, config.code_dim),
        ]
    if config.router:
        streams = 2 + len(config.codebooks)
        matrices += [("router.norm", 1, 1, dim), ("router.scores", 1, streams, dim)]
    return [*matrices, ("norm", 1, 1, dim), ("head", 1, VOCABULARY, dim)]


def _memories(config: GraphConfig) -> list[tuple[str, str, int]]:
    """List the integers of a `GraphLM` that are no weights: area, kind and bytes."""
    found = []
    if config.moe:
        found.append(("moe_graph", "counters", config.experts))
    if config.graph:
        found.append(("moe_graph", "edges", (4 + 4 + 1 + 1) * math.prod(config.edges)))
    if config.memgram:
        found.append(("memgram", "counters", 2 * config.memory_rows))
    return found


def footprint(
    config: ModelConfig, count: int, rows: int, columns: int, *, frozen: bool
) -> Footprint:
    """Count what `count` matrices take; frozen ones are trits and scales and nothing else."""
    rule, weights = RULES[config.rule], rows * columns
    row_bytes = divide_up(columns, TRITS_PER_BYTE)
    groups = rows * divide_up(columns, config.group_size)
    voting = config.rule == "votes" and not frozen
    sizes = {
        "trits": rows * row_bytes,
        "scales": groups if voting else 2 * groups,
        "remainder": 0 if frozen or voting else weights,
        "moment": weights if rule.moment_range and not rule.nibble and not frozen else 0,
        "votes": weights + groups if voting else 0,
        "statistics": 2 * (rows + columns) if config.direction == "factored" and not frozen else 0,
    }
    return _add_up(
        count * weights,
        count * rows * (TRITS_PER_BYTE * row_bytes - columns),
        {kind: count * size for kind, size in sizes.items()},
    )


def _sum(parts: list[Footprint]) -> Footprint:
    kinds = {kind: sum(part.bytes_by_kind.get(kind, 0) for part in parts) for kind in KINDS}
    weights, padding = (
        sum(getattr(part, name) for part in parts) for name in ("weights", "padding_trits")
    )
    return _add_up(weights, padding, kinds)


def _add_up(weights: int, padding_trits: int, bytes_by_kind: dict[str, int]) -> Footprint:
    state_bytes = sum(bytes_by_kind.values())
    return Footprint(
        weights=weights,
        padding_trits=padding_trits,
        bytes_by_kind=bytes_by_kind,
        state_bytes=state_bytes,
        bytes_per_weight=state_bytes / weights if weights else 0.0,
    )


def divide_up(number: int, size: int) -> int:
    """Divide, and round up."""
    return -(-number // size)


def measure(model: "Module", *others: object) -> MeasuredState:
    """Find every tensor that hangs on a model, or on `others`, without asking their classes.

    Parameters, buffers and the attributes of modules are followed, through lists, dicts and
    objects, so the updater that a module hands its gradients to is walked too.
    """
    areas: dict[str, dict[str, int]] = {}
    floats = {"parameter": 0, "buffer": 0, "attribute": 0}
    names, counters = [], 0
    for name, role, tensor in _held((model, *others)):
        integer = not (tensor.is_floating_point() or tensor.is_complex())
        if not integer:
            floats[role] += tensor.numel()
            names.append(name)
        elif role == "attribute" and tensor.nbytes <= LARGEST_COUNTER:
            counters += tensor.nbytes
            continue
        kinds = areas.setdefault(area_of(name), {})
        kind = KIND_OF_BUFFER.get(name.rpartition(".")[2], "other") if integer else "other"
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


def _held(roots: tuple[object, ...]) -> Iterator[tuple[str, str, "Tensor"]]:
    """Yield (name, role, tensor) of every tensor reachable from the roots, each once."""
    from torch import Tensor  # takes seconds to import, and a prediction needs none
    from torch.nn import Module

    tree = {"_parameters": "parameter", "_buffers": "buffer", "_modules": "module"}
    seen: dict[int, Any] = {}
    queue = deque(((), "attribute", root) for root in roots)
    while queue:
        path, role, value = queue.popleft()
        if id(value) in seen:
            continue
        seen[id(value)] = value  # held, so that its id is not given to another
        found = []
        if isinstance(value, Tensor):
            yield ".".join(path), role, value
        elif isinstance(value, dict):
            found = [((*path, str(key)), role, entry) for key, entry in value.items()]
        elif isinstance(value, list | tuple | set):
            found = [((*path, str(index)), role, entry) for index, entry in enumerate(value)]
        elif isinstance(value, Module):
            for key, entry in vars(value).items():
                within = (path, tree[key]) if key in tree else ((*path, key), "attribute")
                found.append((*within, entry))
        elif hasattr(value, "__dict__") and not isinstance(value, type | ModuleType | FunctionType):
            found = [(path, "attribute", vars(value))]
        # the tree of modules comes first: what is in it keeps the name that it has there
        queue.extend(entry for entry in found if entry[1] == "attribute")
        queue.extendleft(entry for entry in found if entry[1] != "attribute")
