"""The configuration of a run on this machine."""

from typing import Any

from arbcli.config.model import ModelConfig
from arbcli.config.training import TrainConfig, train_config
from arbcli.device import check_compute, default_compute, resolve_backend, resolve_device


def new_config(
    *,
    preset: str | ModelConfig = "tiny",
    device: str | None = None,
    backend: str | None = None,
    compute: str | None = None,
    **given: Any,
) -> TrainConfig:
    """Build a configuration from the settings that were given, and defaults for the rest.

    Args:
        preset: name of a preset, or a model as it is saved.
        device: `cpu`, `cuda` or `mps`; None is the GPU if there is one.
        backend: None is the device's own.
        compute: dtype of activations; None is the one that the device multiplies natively.
        given: fields of `TrainConfig` and of the preset's model.

    Raises:
        ArbError: they do not fit each other, or this machine.
    """
    place = resolve_device(device)
    compute = compute or default_compute(place)
    check_compute(compute, place)
    backend = resolve_backend(backend, place)
    return train_config(preset, device=str(place), backend=backend, compute=compute, **given)
