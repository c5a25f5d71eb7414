"""The configuration of a run on this machine."""

import dataclasses
from typing import Any

from arbcli.config.model import VOCABULARY, ModelConfig
from arbcli.config.training import TrainConfig, train_config
from arbcli.device import check_compute, default_compute, resolve_backend, resolve_device
from arbcli.infer.tokens import check_vocabulary
from arbcli.tokens import Tokenizer


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
    config = train_config(preset, device=str(place), backend=backend, compute=compute, **given)
    return config if config.tokenizer is None else _of_tokens(config, config.tokenizer)


def _of_tokens(config: TrainConfig, path: str) -> TrainConfig:
    """Give the model of a run the vocabulary of its tokenizer, unless it has one of its own."""
    model, tokenizer = config.model, Tokenizer.read(path)
    if model.vocabulary == VOCABULARY:
        model = dataclasses.replace(model, vocabulary=tokenizer.size)
    check_vocabulary(model, tokenizer, path)
    return dataclasses.replace(config, model=model)
