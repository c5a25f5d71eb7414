"""What a model takes in memory: predicted from its configuration alone, and found by walking it.

A prediction is arithmetic from the definition of the packed tensor. It shares no code with the
modules, so that the two can be compared, and imports no torch, so that it is instant.
"""

import dataclasses
import itertools
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass
from types import FunctionType, ModuleType
from typing import TYPE_CHECKING, Any

from arbcli.model.config import RULES, SCALE_TYPES, VOCABULARY, ModelConfig

if TYPE_CHECKING:
    from torch import Tensor
    from torch.nn import Module

AREAS = ("embedding", "attention", "mlp", "norms", "head")
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
}
KINDS = tuple(dict.fromkeys(KIND_OF_BUFFER.values()))
ADAMW_BYTES = 16
"""A weight, its gradient and two moments, float32 each."""
TRITS_PER_BYTE = 5
LARGEST_COUNTER = 2**14
"""An integer tensor that is no buffer counts as state only if it takes more bytes than this."""
CUBLAS_BYTES = 2 * 2**25
"""Workspaces that cuBLAS keeps once it has run, one for each thread: forward and backward."""
PARTS_BYTES = 132 * 128 * 128 * 4
"""Sums that the programs of a symmetric product hand each other: a tile each, on an H200."""
CHUNK = 2**18
"""Elements that the torch backend steps at once."""


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
class PeakReport:
    """The most memory that a training step holds at once."""

    device: str
    """`cuda` or `cpu`."""
    batch: int
    """Windows of a micro-batch."""
    compute_bytes: int
    """Of an activation."""
    state_bytes: int
    saved_bytes: int
    """Activations that the backward needs, of all blocks."""
    transient_bytes: int
    """What comes and goes where the peak is: gradients, and tensors of the shape of a weight."""
    constant_bytes: int
    """Rotary table, and workspaces of the matrix library."""
    peak_bytes: int
    """The sum of these four."""
    at: str
    """What the last block, or the loss, does at the peak."""


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
    for name, count, rows, columns in _matrices(config):
        area = area_of(name)
        parts[area].append(_footprint(config, count, rows, columns, frozen=area == "norms"))
    areas = {area: _sum(found) for area, found in parts.items()}
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
    return next((area for area in AREAS if area in name.split(".")), "other")


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


def _footprint(
    config: ModelConfig, count: int, rows: int, columns: int, *, frozen: bool
) -> Footprint:
    """Count what `count` matrices take; frozen ones are trits and scales and nothing else."""
    rule, weights = RULES[config.rule], rows * columns
    row_bytes = _divide_up(columns, TRITS_PER_BYTE)
    groups = rows * _divide_up(columns, config.group_size)
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
    return _add_up(
        sum(part.weights for part in parts),
        sum(part.padding_trits for part in parts),
        {kind: sum(part.bytes_by_kind[kind] for part in parts) for kind in KINDS},
    )


def _add_up(weights: int, padding_trits: int, bytes_by_kind: dict[str, int]) -> Footprint:
    state_bytes = sum(bytes_by_kind.values())
    return Footprint(
        weights=weights,
        padding_trits=padding_trits,
        bytes_by_kind=bytes_by_kind,
        state_bytes=state_bytes,
        bytes_per_weight=state_bytes / weights,
    )


def _divide_up(number: int, size: int) -> int:
    return -(-number // size)


def predict_peak(
    config: ModelConfig,
    *,
    batch: int,
    compute_bytes: int = 2,
    device: str = "cuda",
    recompute: bool = False,
) -> PeakReport:
    """Predict the most memory that a training step holds at once.

    With M tokens, D, F and H the width, the MLP's width and the heads, and a bytes an activation,
    a block saves for its backward, a token:

        a D: inputs of both branches (2), queries, keys and values (3), what was attended to (1)
        a F: gate and up (2)
        12 H: what queries and keys were divided by, and the log-sum-exp, in float32

    The peak is in the backward of the last block, while all the others still keep theirs, or in
    that of the loss: see the comments beside each candidate.

    Args:
        config: of the model.
        batch: windows of a micro-batch.
        compute_bytes: a, of an activation: 2 or 4.
        device: `cuda` or `cpu`.
        recompute: whether only the blocks' inputs are kept, and one block's inside at a time.
    """
    tokens, a, dim, ffn = batch * config.ctx, compute_bytes, config.dim, config.ffn
    on_cpu = device == "cpu"
    in_loss = in_gate = 0
    if on_cpu:  # what the torch backend has in hand, in float32
        in_loss = 8 * min(CHUNK, tokens * VOCABULARY)
        in_gate = (16 if config.sub_norms else 10) * min(CHUNK, 2 * tokens * ffn)
    block = a * (6 * dim + 2 * ffn) + 12 * config.heads
    saved = config.layers * (a * dim if recompute else block)
    again = block - a * dim if recompute else 0  # the inside of the block that is in its backward

    def update(rows: int, columns: int) -> int:
        return _update_bytes(config, rows, columns, a, on_cpu=on_cpu)

    candidates = {
        # last block's output, logits and their gradient
        "loss": tokens * a * (dim + 2 * VOCABULARY) + in_loss,
        # last block's output and its gradient, it normalised, gradient of the logits
        "head": tokens * a * (3 * dim + VOCABULARY) + update(VOCABULARY, dim),
        # gradient of the stream; gradients on both sides of the gate, and its result
        "mlp.sub_norm": tokens * (again + a * (dim + 4 * ffn)) + in_gate,
        # the same without the gradient of that result
        "mlp.output": tokens * (again + a * (dim + 3 * ffn)) + update(dim, ffn),
        # gate and up are gone; gradients of the stream, of them and of the input; it normalised
        "mlp.gate_up": tokens * (again + 3 * a * dim) + update(2 * ffn, dim),
        # only the input of the block is left, and normalised; gradients of the stream, of queries,
        # keys and values, and of the input
        "attention.qkv": tokens * (again + a * 7 * dim - block) + update(3 * dim, dim),
    }
    at = max(candidates, key=candidates.__getitem__)
    parts = {
        "state_bytes": predict(config).total.state_bytes,
        "saved_bytes": tokens * (saved + 16),  # and two int64 a token
        "transient_bytes": candidates[at],
        "constant_bytes": 4 * config.ctx * config.head_dim + (0 if on_cpu else CUBLAS_BYTES),
    }
    return PeakReport(
        device=device,
        batch=batch,
        compute_bytes=compute_bytes,
        **parts,
        peak_bytes=sum(parts.values()),
        at=at,
    )


def _update_bytes(config: ModelConfig, rows: int, columns: int, a: int, *, on_cpu: bool) -> int:
    """Predict the transient part of a matrix's update: the gradient, and what is made of it."""
    weights, smaller = rows * columns, min(rows, columns)
    found = 4 * rows * _divide_up(columns, config.group_size)  # slopes of the scales
    if config.direction == "factored" and not on_cpu:
        found += weights // 16  # sums of rows and columns, for every 128 weights of each
    hands = 0
    if on_cpu:  # what the torch backend makes of a chunk, and what is left of it beside the next
        chunk = min(weights, CHUNK)
        hands = max(11 * chunk, 4 * chunk + 12 * min(weights - chunk, chunk))
    if config.rule == "votes":
        # products of a chunk, or all votes widened at once
        hands = max((16 - 2 * a) * chunk, (14 + a) * weights // 2) if on_cpu else 0
    elif config.direction == "orthogonal":
        # an iterate, two squares and what programs hand each other, or two iterates and a square;
        # then the last iterate
        squares = a * (weights + 2 * smaller**2) + (0 if on_cpu else PARTS_BYTES)
        hands = max(squares, a * (2 * weights + smaller**2), a * weights + hands)
    return a * weights + found + hands


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
