"""A trained model from a run or a checkpoint."""

import warnings
from collections.abc import Callable
from pathlib import Path

import torch

from arbcli.checkpoint import (
    check_layout,
    checkpoint_path,
    latest_checkpoint,
    load_checkpoint,
    read_json,
)
from arbcli.config.checks import check_choice
from arbcli.config.presets import config_from_dict
from arbcli.device import COMPUTE, default_compute, resolve_device
from arbcli.errors import ArbError
from arbcli.model.build import build_model
from arbcli.model.language_model import LanguageModel


def load_model(
    path: Path | str, *, device: str | None = None, compute: str | None = None
) -> LanguageModel:
    """Load a trained model; a warning tells of each damaged checkpoint that is passed over.

    Args:
        path: a run directory, whose newest intact checkpoint is taken, or a checkpoint.
        device: where to put it; None is the GPU if there is one.
        compute: dtype of activations; None is the one that the run was trained in.

    Returns:
        The model, ready to generate, evaluate or train on.

    Raises:
        ArbError: there is no checkpoint, or it is damaged.
    """

    def warn(message: str) -> None:
        warnings.warn(message, stacklevel=2)

    return load_named_model(Path(path), resolve_device(device), warn, compute)[0]


def load_named_model(
    path: Path, place: torch.device, note: Callable[[str], None], compute: str | None = None
) -> tuple[LanguageModel, str]:
    """Load a trained model, and find out which checkpoint that is.

    Args:
        path: a run directory, whose newest intact checkpoint is taken, or a checkpoint.
        place: where to put it.
        note: is told of each checkpoint that is passed over.
        compute: dtype of activations; None is the one that the run was trained in.

    Raises:
        ArbError: there is no checkpoint, or it is damaged.
    """
    if compute is not None:
        check_choice("compute", compute, COMPUTE)
    whole_run = path.is_dir()
    checkpoint = latest_checkpoint(path, note) if whole_run else load_checkpoint(path)
    name = checkpoint_path(path, checkpoint.step) if whole_run else path
    dtype = COMPUTE[compute or _trained_in(path if whole_run else path.parent, place)]
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


def _trained_in(run: Path, place: torch.device) -> str:
    """Find the dtype of activations of a run, or of the device if a checkpoint lies alone."""
    path = run / "config.json"
    if not path.exists():
        return default_compute(place)
    try:
        compute = read_json(path)["config"]["compute"]
        check_choice("compute", compute, COMPUTE)
    except (KeyError, TypeError) as error:
        raise ArbError(
            f"`{path}` does not tell what the run was trained in: {error}", hint="give `--compute`"
        ) from None
    return compute
