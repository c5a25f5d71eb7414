"""From the options that were given to the configuration of a run on this machine."""

import dataclasses
from typing import Any

from arbcli.config.model import GraphConfig
from arbcli.config.model import preset as model_preset
from arbcli.device import check_compute, default_compute, resolve_backend, resolve_device
from arbcli.errors import ArbError
from arbcli.rules import find_rule
from arbcli.train.trainer import TrainConfig

FLOAT_LR = {
    ("float", "adamw"): 1e-3,
    ("float", "muon"): 3e-3,
    ("ste", "adamw"): 3e-3,
    ("ste", "muon"): 3e-3,
}
"""Default `--lr` of the twins, by weights and optimizer."""
PRESET_LR = {("arb-3b", "factored"): 0.1}
"""Default `--lr` where a preset needs another than its rule's, by preset and direction.

With the factored direction a wide model takes smaller steps: at the rule's own its stream grows
manifold, and what is chosen in it, experts and codes, becomes the same for every position.
"""


def new_config(
    *, preset: str = "tiny", device: str | None = None, backend: str | None = None, **given: Any
) -> TrainConfig:
    """Build a configuration from the options that were given, and defaults for the rest.

    Args:
        preset: name of a preset.
        device: `cpu` or `cuda`; None is the GPU if there is one.
        backend: None is the device's own.
        given: fields of `TrainConfig` and of the preset's model.

    Raises:
        ArbError: they do not fit each other, or this machine.
    """
    place = resolve_device(device)
    names = {field.name for field in dataclasses.fields(GraphConfig)}
    shape = {name: given.pop(name) for name in list(given) if name in names}
    model = model_preset(preset, **shape)
    ternary = model.weights == "ternary"
    if ternary and "optimizer" in given:
        raise ArbError(
            "ternary weights are stepped by a rule, not by an optimizer",
            hint="use `--rule`, or `--weights float` or `ste`",
        )
    given.setdefault("optimizer", "rule" if ternary else "adamw")
    twin = (model.weights, given["optimizer"])
    own_lr = find_rule(model.rule).lr if ternary else FLOAT_LR.get(twin, 1e-3)
    given.setdefault("lr", PRESET_LR.get((preset, model.direction), own_lr))
    given.setdefault("compute", default_compute(place))
    check_compute(given["compute"], place)
    backend = resolve_backend(backend, place)
    for name in ("data", "val"):
        given[name] = tuple(str(entry) for entry in given.get(name, ()))
    return TrainConfig(model=model, device=str(place), backend=backend, **given)
