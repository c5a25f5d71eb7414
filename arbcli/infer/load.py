"""A trained model from a run or a checkpoint."""

import warnings
from collections.abc import Callable
from pathlib import Path

import torch

from arbcli.checkpoint import check_layout, checkpoint_path, latest_checkpoint, load_checkpoint
from arbcli.config.presets import config_from_dict
from arbcli.device import COMPUTE, default_compute, resolve_device
from arbcli.errors import ArbError
from arbcli.model.build import build_model
from arbcli.model.language_model import LanguageModel


def load_model(path: Path | str, *, device: str | None = None) -> LanguageModel:
    """Load a trained model; a warning tells of each damaged checkpoint that is passed over.

    Args:
        path: a run directory, whose newest intact checkpoint is taken, or a checkpoint.
        device: where to put it; None is the GPU if there is one.

    Returns:
        The model, ready to generate, evaluate or train on.

    Raises:
        ArbError: there is no checkpoint, or it is damaged.
    """

    def warn(message: str) -> None:
        warnings.warn(message, stacklevel=2)

    return load_named_model(Path(path), resolve_device(device), warn)[0]


def load_named_model(
    path: Path, place: torch.device, note: Callable[[str], None]
) -> tuple[LanguageModel, str]:
    """Load a trained model, and find out which checkpoint that is.

    Args:
        path: a run directory, whose newest intact checkpoint is taken, or a checkpoint.
        place: where to put it.
        note: is told of each checkpoint that is passed over.

    Raises:
        ArbError: there is no checkpoint, or it is damaged.
    """
    whole_run = path.is_dir()
    checkpoint = latest_checkpoint(path, note) if whole_run else load_checkpoint(path)
    name = checkpoint_path(path, checkpoint.step) if whole_run else path
    dtype = COMPUTE[default_compute(place)]
    try:
        config = config_from_dict(checkpoint.config)
    except TypeError as error:
        raise ArbError(
            f"`{path}` holds a model of another version of arb: {error}",
            hint="load it with the version that wrote it",
        ) from None
    with torch.device(place):
        model = build_model(config, dtype)
    check_layout(checkpoint.tensors, model.state_dict())
    model.load_state_dict(checkpoint.tensors)
    return model, str(name)
