"""How the weights of a layer are stored, and the packed tensor for a float parameter."""

from dataclasses import dataclass

import torch
from torch import nn

from arbcli.base.errors import ArbError, quoted
from arbcli.config.layer_spec import SCALE_TYPES, LayerSpec, is_chunked
from arbcli.model.initial import head_lr_factor, inner_lr_factor
from arbcli.model.layers.vector import DIRECTION as VECTOR_DIRECTION
from arbcli.model.optimizers import DIRECTIONS
from arbcli.model.rules import DIRECTION, WITH_DIGITS
from arbcli.nn import weights as kinds

MIN_COLUMNS = 64
"""Parameters that a module reads itself have a scale for each number if their rows are shorter."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Storage:
    """Settings of packed tensors.

    Raises:
        ArbError: a setting is unknown, or does not fit the others.
    """

    rule: str = "moment"
    """Update rule: `moment`, `nibble` or `carry`."""
    weights: str = "int8"
    """Form of the weights: `int8` is all digits of z."""
    scale_type: str = "T32"
    """Scale type: `T32` has a scale for 32 weights of a row."""
    direction: str | None = None
    """Direction of the steps of matrices; None is the default of the rule."""
    lr_rule: str | None = None
    """Rule that the learning rate is meant for; None is `rule`."""

    def __post_init__(self) -> None:
        """Check the settings."""
        for name, value, known in (
            ("rule", self.rule, WITH_DIGITS),
            ("weights", self.weights, ("int8",)),
            ("scale_type", self.scale_type, tuple(SCALE_TYPES)),
            ("direction", self.direction, (None, *DIRECTIONS)),
        ):
            if value not in known:
                raise ArbError(
                    f"`{name}={value!r}` is not supported", f"choose one of: {quoted(known)}"
                )

    def layer_spec(self, dim: int) -> LayerSpec:
        """Return the spec of layers in a model of this width."""
        return LayerSpec(
            dim=dim,
            depth=1,
            ctx=1,
            scale_type=self.scale_type,
            rule=self.rule,
            lr_rule=self.lr_rule,
            digits="all",
            direction=self.direction or DIRECTION[self.rule],
        )


DEFAULT = Storage()


def new_packed(
    value: nn.Parameter,
    roles: frozenset[str],
    storage: Storage,
    *,
    dim: int,
    is_head: bool = False,
    transposed: bool = False,
) -> kinds.Anchored:
    """Build the packed tensor that replaces a float parameter, with uninitialised weights.

    Args:
        value: the parameter.
        roles: how modules use it: see `role`.
        storage: how it is stored.
        dim: width of the model.
        is_head: whether its outputs are logits of symbols.
        transposed: whether the packed matrix is its transpose.

    Returns:
        The tensor, on the device of the parameter.
    """
    spec = storage.layer_spec(dim)
    shape = value.shape[::-1] if transposed else value.shape
    packed: kinds.Anchored
    with value.device:
        if roles & {"product", "lookup"}:
            packed = _matrix(shape[0], shape[1], roles, spec, value.dtype, is_head)
        elif "experts" in roles:
            packed = kinds.ExpertStack(*shape, spec, area="experts", dtype=value.dtype)
        elif value.ndim < 2 or value[0].numel() < MIN_COLUMNS:
            packed = kinds.Numbers(value.numel(), spec, area="vectors", dtype=value.dtype)
        else:
            stacked = value.ndim == 3 and shape[2] >= MIN_COLUMNS
            matrices, rows = (len(value), shape[1]) if stacked else (1, len(value))
            columns = value.numel() // (matrices * rows)
            packed = kinds.Stack(
                matrices * rows, columns, spec, area="read", direction=VECTOR_DIRECTION,
                matrices=matrices, dtype=value.dtype,
            )  # fmt: skip
        packed.anchor.requires_grad_(value.requires_grad)
    packed.shape, packed.transposed = tuple(value.shape), transposed
    return packed


def new_fused(values: list[nn.Parameter], storage: Storage, *, dim: int) -> kinds.FusedMatrix:
    """Build the packed tensor that replaces the weights of layers with the same input.

    Args:
        values: the weights, of the same number of columns, dtype and device.
        storage: how they are stored.
        dim: width of the model.
    """
    first, spec = values[0], storage.layer_spec(dim)
    with first.device:
        packed = kinds.FusedMatrix(
            [len(value) for value in values],
            first.shape[1],
            spec,
            area="linear",
            lr_factor=inner_lr_factor(spec, spec.direction),
            dtype=first.dtype,
        )
        packed.anchor.requires_grad_(first.requires_grad)
    return packed


def _matrix(
    rows: int,
    columns: int,
    roles: frozenset[str],
    spec: LayerSpec,
    dtype: torch.dtype,
    is_head: bool,
) -> kinds.Anchored:
    if roles >= {"product", "lookup"} or (is_head and is_chunked(rows)):
        return kinds.Symbols(rows, columns, spec, area="head", dtype=dtype)
    if "product" in roles:
        factor = head_lr_factor(spec) if is_head else inner_lr_factor(spec, spec.direction)
        return kinds.Matrix(rows, columns, spec, area="linear", lr_factor=factor, dtype=dtype)
    kind = kinds.ManyRows if is_chunked(rows) else kinds.Rows
    return kind(rows, columns, spec, area="embedding", dtype=dtype)
