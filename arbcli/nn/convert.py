"""Conversion of a float model to integers, in place and one tensor at a time."""

import copy
from collections.abc import Iterable, Mapping, Sequence
from fnmatch import fnmatchcase
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from arbcli.base.environment import set_environment
from arbcli.base.errors import ArbError, quoted
from arbcli.model.rules import LR_OF_TUNING
from arbcli.nn.layers import is_transposed, role, set_integer_class, set_packed, unsupported
from arbcli.nn.optimizer import IntegerOptimizer, check_numbers, guard_others
from arbcli.nn.storage import Storage, new_fused, new_packed
from arbcli.nn.weights import Anchored, MatrixRows

MARK = "quantization_config"
"""Field of a configuration of Transformers that has the settings of integers in `KEY`. Without a
`quant_method` in it, Transformers refuses to load the folder as floats."""
KEY = "arb_integers"
ORIGIN = "arb.origin"
"""Field of a configuration whose float weights were decoded by this package."""


PROJECTIONS = ("q_proj", "k_proj", "v_proj"), ("gate_proj", "up_proj")
"""Names of the linear layers with the same input in Llama, Qwen, Gemma and many others."""


class _Use(NamedTuple):
    """A parameter of a module."""

    module: nn.Module
    name: str
    full_name: str
    value: nn.Parameter
    role: str

    def matches(self, pattern: str) -> bool:
        """Return whether a pattern matches the name of the parameter or of a module above it."""
        parts = self.full_name.split(".")
        names = (".".join(parts[:end]) for end in range(1, len(parts) + 1))
        return any(fnmatchcase(name, pattern) for name in names)


def to_integers(
    model: nn.Module,
    *,
    rule: str = "moment",
    weights: str = "int8",
    lr: float = LR_OF_TUNING,
    scale_type: str = "T32",
    direction: str | None = "factored",
    rules: Mapping[str, str] | None = None,
    scale_types: Mapping[str, str] | None = None,
    skip: str | Sequence[str] = (),
    skip_unsupported: bool = False,
    fuse: Sequence[Sequence[str]] = (),
    accumulation: int = 1,
    weight_decay: float = 0.0,
    seed: int = 0,
) -> IntegerOptimizer:
    """Replace the float parameters of a model by integers, in place.

    Linear layers, embeddings, `Conv1D` of Transformers and stacked experts multiply by packed
    weights. Every other parameter is decoded when its module reads it. Parameters are converted one
    at a time, so that the peak of memory is the model and one of them.

    Patterns are those of shells, such as `*.mlp.*`, and match the name of a parameter or of a
    module above it. Of several patterns the last that matches counts.

    Args:
        model: a module with parameters in bfloat16 or float32.
        rule: update rule: `moment`, `nibble` or `carry`.
        weights: form of the weights, `int8`.
        lr: learning rate; the default is for tuning, and 0.5 is usual from scratch.
        scale_type: scale type, such as `T32`.
        direction: direction of the steps of matrices: `factored`, for tuning, `orthogonal`, which
            learns more from scratch, or `sign`; None is the default of the rule.
        rules: rules by pattern, at the learning rate of `rule`.
        scale_types: scale types by pattern.
        skip: pattern of parameters that stay float, or several.
        skip_unsupported: whether parameters that cannot be converted stay float.
        fuse: names of linear layers of a module that multiply the same input, and are stepped as
            one matrix, as `arb train` does; `PROJECTIONS` has the names in most models.
        accumulation: number of backward passes in a step.
        weight_decay: weight decay, multiplied by the learning rate.
        seed: seed of the stochastic rounding, 0..2**31-1.

    Returns:
        The optimizer of the integers.

    Raises:
        ArbError: a parameter cannot be converted, or a setting or pattern does not fit; the model
            is unchanged.
    """
    set_environment()
    check_numbers(lr, accumulation, weight_decay, seed)
    settings: dict[str, Any] = {
        "rule": rule, "weights": weights, "scale_type": scale_type, "direction": direction,
        "rules": dict(rules or {}), "scale_types": dict(scale_types or {}),
        "skip": [skip] if isinstance(skip, str) else [*skip],
        "skip_unsupported": skip_unsupported, "fuse": [[*names] for names in fuse],
    }  # fmt: skip
    convert(model, settings, rounds=True)
    return IntegerOptimizer(
        model, lr, accumulation=accumulation, weight_decay=weight_decay, seed=seed
    )


@torch.inference_mode(False)
@torch.no_grad()
def convert(model: nn.Module, settings: dict[str, Any], *, rounds: bool) -> None:
    """Replace the float parameters of a model by packed tensors, in place.

    Args:
        model: the model.
        settings: arguments of `to_integers` that describe the packed tensors.
        rounds: whether weights are rounded; else they are uninitialised.
    """
    guard_others()
    groups = _grouped(model, settings)
    storages = [_storage(uses, settings) for uses in groups]
    head = _output_weight(model)
    width = _width(model)
    has_ties = any(len(uses) > 1 for uses in groups)
    own_grid = ORIGIN in _configuration(model)
    together = _fused(model, groups, storages, settings["fuse"])
    changed: dict[nn.Module, str] = {}
    while groups:
        uses, storage = groups.pop(0), storages.pop(0)
        first, value = uses[0], uses[0].value
        dim = width or (value.shape[-1] if value.ndim else 1)
        changed |= {use.module: use.role for use in uses}
        if first.name not in first.module._parameters:
            pass  # it was fused with another layer
        elif first.name == "weight" and first.module in together:
            members = together[first.module]
            values: Any = [member._parameters["weight"] for member in members]
            matrix = new_fused(values, storage, dim=dim)
            if rounds:
                matrix.round(torch.cat(tuple(values)), own_grid)
            for part, member in enumerate(members):
                set_packed(member, "weight", MatrixRows(matrix, part), None if part else matrix)
            del values
        else:
            packed = new_packed(
                value, frozenset(use.role for use in uses), storage, dim=dim,
                is_head=value is head, transposed=is_transposed(first.module, first.name),
            )  # fmt: skip
            if rounds:
                packed.round(value, own_grid)
            _replace_uses(uses, packed)
        del uses, first, value
    for module, last_role in changed.items():
        set_integer_class(module, last_role == "experts")
    if hasattr(model, "config") and hasattr(model.config, "to_dict"):
        shared = model.config  # maybe with other models, whose weights are floats
        configuration = copy.copy(shared)
        setattr(configuration, MARK, {KEY: settings})
        for module in model.modules():
            if getattr(module, "config", None) is shared:
                module.config = configuration
        # patterns by which Transformers renames float weights when it saves them
        model._float_conversions = getattr(model, "_weight_conversions", None)  # type: ignore[assignment]
        model._weight_conversions = []  # type: ignore[assignment]
        if has_ties:
            model.tie_weights = _keep_ties  # type: ignore[assignment]


def _keep_ties(*_: Any, **__: Any) -> None:
    """Do nothing, in place of `tie_weights` of Transformers: tied weights are one packed tensor."""


def _replace_uses(uses: list[_Use], packed: Anchored) -> None:
    """Replace all uses of a parameter by a packed tensor, which the first module registers."""
    for use in uses:
        set_packed(use.module, use.name, packed, packed if use is uses[0] else None)


def _grouped(model: nn.Module, settings: dict[str, Any]) -> list[list[_Use]]:
    """Return the uses of each parameter that is converted.

    Raises:
        ArbError: a parameter cannot be converted, or a pattern matches none.
    """
    uses_of_value: dict[int, list[_Use]] = {}
    for module_name, module in model.named_modules():
        for name, value in module._parameters.items():
            if value is not None:
                full_name = f"{module_name}.{name}" if module_name else name
                use = _Use(module, name, full_name, value, role(module, name))
                uses_of_value.setdefault(id(value), []).append(use)
    groups = [*uses_of_value.values()]
    for pattern in (*settings["skip"], *settings["rules"], *settings["scale_types"]):
        if not any(use.matches(pattern) for uses in groups for use in uses):
            raise ArbError(
                f"no parameter matches the pattern `{pattern}`",
                "`[name for name, _ in model.named_parameters()]` has all names",
            )
    chosen_groups = [uses for uses in groups if not _any_matches(uses, settings["skip"])]
    kept = _in_containers(model)
    problems = [(uses, _problem(uses, kept)) for uses in chosen_groups]
    refused = [(uses[0].full_name, problem) for uses, problem in problems if problem]
    if refused and not settings["skip_unsupported"]:
        name, problem = refused[0]
        others = f" and {len(refused) - 1} more" if len(refused) > 1 else ""
        raise ArbError(
            f"`{name}`{others} cannot be converted to integers: {problem}",
            "pass its name in `skip`, or `skip_unsupported=True`",
        )
    convertible = [uses for uses, problem in problems if problem is None and uses[0].value.numel()]
    if not convertible:
        raise ArbError(
            "the model has no float weights to convert",
            "check `skip`, and whether the model was converted before",
        )
    return convertible


def _fused(
    model: nn.Module,
    groups: list[list[_Use]],
    storages: list[Storage],
    names: Iterable[Sequence[str]],
) -> dict[nn.Module, list[nn.Module]]:
    """Return the layers that are fused, by each of them.

    Raises:
        ArbError: no module has the layers, or they differ in more than their outputs.
    """
    known = {
        uses[0].module: (uses[0].value, storage)
        for uses, storage in zip(groups, storages, strict=True)
        if len(uses) == 1 and uses[0].role == "product"
    }
    fused: dict[nn.Module, list[nn.Module]] = {}
    for siblings in names:
        number = len(fused)
        for module in model.modules():
            layers = [layer for name in siblings if (layer := module._modules.get(name))]
            parts = [known[layer] for layer in layers if layer in known]
            alike = {
                (value.shape[1], value.dtype, value.device, value.requires_grad, storage)
                for value, storage in parts
            }
            if len(parts) == len(siblings) and len(alike) == 1:
                fused |= dict.fromkeys(layers, layers)
        if len(fused) == number:
            raise ArbError(
                f"no module has linear layers {quoted(siblings)} that can be fused",
                "they need equal inputs, dtypes and settings, and are not skipped or tied",
            )
    return fused


def _any_matches(uses: Iterable[_Use], patterns: Iterable[str]) -> bool:
    return any(use.matches(pattern) for use in uses for pattern in patterns)


def _in_containers(model: nn.Module) -> set[int]:
    """Return the identities of the parameters that modules also have in lists or dictionaries."""
    parts = [part for module in model.modules() for part in vars(module).items()]
    containers = [
        value.values() if isinstance(value, dict) else value
        for name, value in parts
        if name != "_parameters" and isinstance(value, list | tuple | dict)
    ]
    return {id(part) for values in containers for part in values if isinstance(part, nn.Parameter)}


def _problem(uses: list[_Use], kept: set[int]) -> str | None:
    """Return why a parameter cannot be converted; None if it can."""
    value = uses[0].value
    for use in uses:
        if problem := unsupported(use.module, value):
            return problem
    if id(value) in kept:
        return "a list or dictionary of a module has it too, and would keep its floats"
    if len({is_transposed(use.module, use.name) for use in uses}) > 1:
        return "it is tied to its transpose"
    return None


def _storage(uses: list[_Use], settings: dict[str, Any]) -> Storage:
    chosen = {"rule": settings["rule"], "scale_type": settings["scale_type"]}
    for name, kinds in (("rule", "rules"), ("scale_type", "scale_types")):
        for pattern, value in settings[kinds].items():
            if _any_matches(uses, [pattern]):
                chosen[name] = value
    return Storage(
        **chosen, weights=settings["weights"], direction=settings["direction"],
        lr_rule=settings["rule"],
    )  # fmt: skip


def _output_weight(model: nn.Module) -> Tensor | None:
    """Return the weight of the head of a model of Transformers."""
    layer = getattr(model, "get_output_embeddings", lambda: None)()
    return getattr(layer, "weight", None)


def _width(model: nn.Module) -> int | None:
    """Return the width of the stream, from the largest embedding; None without one."""
    tables = [part for part in model.modules() if isinstance(part, nn.Embedding)]
    return max(tables, key=lambda part: part.num_embeddings).embedding_dim if tables else None


def _configuration(model: nn.Module) -> dict[str, Any]:
    return getattr(getattr(model, "config", None), "to_dict", dict)()


def floats(model: nn.Module) -> dict[str, Tensor]:
    """Return the float parameters and buffers of a model by name, without anchors of integers."""
    anchors = {id(part.anchor) for part in model.modules() if isinstance(part, Anchored)}
    return {
        name: part
        for name, part in {**dict(model.named_parameters()), **dict(model.named_buffers())}.items()
        if part.is_floating_point() and id(part) not in anchors
    }
