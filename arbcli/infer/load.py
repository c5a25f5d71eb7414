"""A trained model from a run or a checkpoint."""

import warnings
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from arbcli.checkpoint import (
    Checkpoint,
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
    trained_in = checkpoint.data.get("compute") or _trained_in(_run_of(path), place)
    model = empty_model(path, checkpoint, place, COMPUTE[compute or trained_in])
    model.load_state_dict(checkpoint.tensors)
    return model, str(name)


@dataclass(frozen=True, eq=False)
class Weights:
    """A trained model without what only a step needs, and where it comes from."""

    model: LanguageModel
    """On the CPU, in float32."""
    checkpoint: Checkpoint
    """What it was read from; its tensors are those of the model."""
    path: Path
    """Of the checkpoint."""
    compute: str
    """What the run was trained in."""

    @property
    def origin(self) -> str:
        """Digest of the checkpoint that training wrote, also where this is an export of it."""
        return self.checkpoint.data.get("origin", self.checkpoint.digest)


def load_weights(path: Path, note: Callable[[str], None]) -> Weights:
    """Load a trained model to be written in another form; training state is checked and forgotten.

    Args:
        path: a run directory, whose newest intact checkpoint is taken, or a checkpoint.
        note: is told of each checkpoint that is passed over.

    Raises:
        ArbError: there is no checkpoint, or it is damaged.
    """

    def build(config: dict[str, Any]) -> LanguageModel:
        model = _build(path, config, torch.device("meta"), torch.float32)
        model.drop_training_state()
        return model

    def select(config: dict[str, Any]) -> set[str]:
        return set(build(config).state_dict())

    whole_run = path.is_dir()
    reading = (path, note) if whole_run else (path,)
    checkpoint = (latest_checkpoint if whole_run else load_checkpoint)(*reading, select)
    model = build(checkpoint.config)
    check_layout(checkpoint.tensors, model.state_dict())
    model.load_state_dict(checkpoint.tensors, assign=True)
    place = checkpoint_path(path, checkpoint.step) if whole_run else path
    compute = checkpoint.data.get("compute") or _trained_in(_run_of(path), torch.device("cpu"))
    return Weights(model, checkpoint, place, compute)


def is_export(checkpoint: Checkpoint) -> bool:
    """Whether a checkpoint has the weights only, as `arb export --to safetensors` writes it."""
    return "origin" in checkpoint.data


def empty_model(
    path: Path,
    checkpoint: Checkpoint,
    place: torch.device | None = None,
    dtype: torch.dtype = torch.float32,
) -> LanguageModel:
    """Make the model that a checkpoint fits, its weights not yet set.

    Args:
        path: of the checkpoint, for an error.
        checkpoint: what to fit.
        place: where to put it; None is torch's `meta` device.
        dtype: of activations.

    Raises:
        ArbError: it is of another version of arb, or has other tensors.
    """
    model = _build(path, checkpoint.config, place or torch.device("meta"), dtype)
    if is_export(checkpoint):
        model.drop_training_state()
    check_layout(checkpoint.tensors, model.state_dict())
    return model


def _build(
    path: Path, fields: dict[str, Any], place: torch.device, dtype: torch.dtype
) -> LanguageModel:
    try:
        config = config_from_dict(fields)
    except TypeError as error:
        raise ArbError(
            f"`{path}` holds a model of another version of arb: {error}",
            hint="load it with the version that wrote it",
        ) from None
    with place:
        return build_model(config, dtype)


def _run_of(path: Path) -> Path:
    return path if path.is_dir() else path.parent


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
