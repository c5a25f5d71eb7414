"""Tensors of a model and their first weights, which its configuration fixes.

`python tests/pins.py` computes the facts of `model/old_configs.json` anew. A change of one of them
is a change of what checkpoints hold, or of how runs begin.
"""

import json
from hashlib import sha256
from pathlib import Path
from typing import Any

import torch

from arbcli.config.model import ModelConfig
from arbcli.config.presets import config_from_dict
from arbcli.inspect.memory import predict
from arbcli.model.build import build_model
from arbcli.model.operations import step_operations

PATH = Path(__file__).parent / "model" / "old_configs.json"
SEEDS = (0, 3)
DIGITS = 16
"""Number of digits of a stored digest."""
ASPECTS = {
    "names": (), "shapes": ("out_features", "in_features", "matrices"),
    "starts": ("std", "spread", "frozen"), "steps": ("lr_factor", "direction"),
    "areas": ("area", "low_precision"),
    "groups": ("grouped", "forward_weights", "backward_weights"),
}  # fmt: skip
"""Attributes of a weight, by what they are about."""


def layout(config: ModelConfig) -> dict[str, int | str]:
    """Describe the tensors of a model in their order: counts, and a digest of each aspect."""
    with torch.device("meta"):
        model = build_model(config)
    weights, state = model.weights(), model.state_dict()
    facts = {
        "tensors": len(weights),
        "weights": sum(getattr(weight, "num_weights", 0) for weight in weights.values()),
        "state_bytes": predict(config).total.state_bytes,
        "operations": step_operations(config),
        "state": _digest([(name, str(part.dtype), *part.shape) for name, part in state.items()]),
    }
    names = {id(weight): name for name, weight in weights.items()}
    for aspect, attributes in ASPECTS.items():
        lines = [
            (name, *(_plain(_attribute(weight, part), names) for part in attributes))
            for name, weight in weights.items()
        ]
        facts[aspect] = _digest(lines)
    return facts


def first_weights(config: ModelConfig, seed: int) -> str:
    """Digest all tensors of a model as a run of a seed begins."""
    model, digest = build_model(config, torch.float32, seed=seed), sha256()
    for name, part in model.state_dict().items():
        digest.update(name.encode())
        digest.update(part.contiguous().view(torch.uint8).numpy().tobytes())
    return digest.hexdigest()[:DIGITS]


def _attribute(weight: Any, name: str) -> Any:
    """Return an attribute of a weight, or of its group; None if it has none."""
    if name not in ASPECTS["groups"] or not hasattr(weight, "group"):
        return getattr(weight, name, None)
    return weight.group is not None if name == "grouped" else getattr(weight.group, name, ())


def _plain(value: Any, names: dict[int, str]) -> Any:
    """Write an attribute of a weight as JSON: a direction by its class, other weights by name."""
    if isinstance(value, tuple):
        return [names[id(part)] for part in value]
    if value is None or isinstance(value, bool | int | float | str):
        return value
    return type(value).__name__


def _digest(lines: list) -> str:
    return sha256(json.dumps(lines).encode()).hexdigest()[:DIGITS]


def main() -> None:
    """Write the facts of every configuration that is in the file."""
    pins = json.loads(PATH.read_text())
    for pin in pins.values():
        config = config_from_dict(pin["config"])
        pin["layout"] = layout(config)
        if "first" in pin:
            pin["first"] = {str(seed): first_weights(config, seed) for seed in SEEDS}
    lines = (f"{json.dumps(name)}: {json.dumps(pin)}" for name, pin in pins.items())
    PATH.write_text("{\n" + ",\n".join(lines) + "\n}\n")


if __name__ == "__main__":
    main()
