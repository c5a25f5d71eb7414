"""Construction of a run's configuration for this machine."""

import dataclasses
from typing import Any

from arbcli.config.model import VOCABULARY, ModelConfig
from arbcli.config.presets import set_symbol_directions
from arbcli.config.training import TrainConfig, train_config
from arbcli.kernels.runtime import device as devices


def new_config(
    *,
    preset: str | ModelConfig = "tiny",
    device: str | None = None,
    backend: str | None = None,
    compute: str | None = None,
    **settings: Any,
) -> TrainConfig:
    """Build a configuration from settings, with defaults for the others.

    Args:
        preset: name of a preset, or the configuration of a model.
        device: `cpu`, `cuda` or `mps`; None is the GPU if there is one.
        backend: kernel backend; None is the default of the device.
        compute: dtype of activations; None is the device's native one.
        settings: fields of `TrainConfig` and of the preset's model.

    Raises:
        ArbError: settings are incompatible with each other or with this machine.
    """
    torch_device = devices.resolve_device(device)
    compute = compute or devices.default_compute(torch_device)
    devices.check_compute(compute, torch_device)
    backend = devices.resolve_backend(backend, torch_device)
    config = train_config(
        preset, device=str(torch_device), backend=backend, compute=compute, **settings
    )
    return config if config.tokenizer is None else _set_vocabulary(config, config.tokenizer)


def _set_vocabulary(config: TrainConfig, path: str) -> TrainConfig:
    """Set the model's vocabulary to that of the tokenizer, unless it has one already."""
    from arbcli.data.tokens import Tokenizer
    from arbcli.generation.tokens import check_vocabulary

    model, tokenizer = config.model, Tokenizer.read(path)
    if model.vocabulary == VOCABULARY:
        model = dataclasses.replace(model, vocabulary=tokenizer.size)
        model = set_symbol_directions(model)
    check_vocabulary(model, tokenizer, path)
    return dataclasses.replace(config, model=model)
