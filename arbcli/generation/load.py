"""Loading of trained models from runs and checkpoints."""

import dataclasses
import warnings
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import torch

from arbcli.base.errors import ArbError
from arbcli.base.lazy import imported
from arbcli.base.output import printable
from arbcli.base.reading import check_schema, read_json
from arbcli.base.run_files import COMPANIONS, CONFIG, best_checkpoints, step_of
from arbcli.config.model import ModelConfig
from arbcli.config.presets import config_from_dict
from arbcli.config.settings import check_choice
from arbcli.generation.tokens import saved_tokenizer
from arbcli.kernels.runtime.device import COMPUTE, check_room, default_compute, resolve_device
from arbcli.model.build import build_model
from arbcli.model.checkpoint import (
    FLOAT_STATE,
    LATENT,
    LATENT_AVERAGE,
    MOMENTS,
    Accept,
    Checkpoint,
    check_layout,
    is_export,
    latest_checkpoint,
    load_checkpoint,
    path_of,
)
from arbcli.model.language_model import LanguageModel


def load_model(
    path: Path | str, *, device: str | None = None, compute: str | None = None
) -> LanguageModel:
    """Load a trained model, with a warning for each damaged checkpoint that is skipped.

    Args:
        path: a checkpoint, or a run directory, whose newest intact checkpoint is loaded.
        device: device of the model; None is the GPU if there is one.
        compute: dtype of activations; None is that of training.

    Returns:
        The model.

    Raises:
        ArbError: there is no checkpoint, or it is damaged.
    """

    def warn(message: str) -> None:
        warnings.warn(printable(message), stacklevel=2)

    model = load_named_model(Path(path), resolve_device(device), warn, compute)[0]
    model.register_forward_pre_hook(_convert_ids)
    return model


def _convert_ids(model: LanguageModel, inputs: tuple) -> tuple:
    """Convert ids of any integer dtype to int64, and check that they are a batch."""
    ids, *others = inputs
    if ids.is_floating_point() or ids.is_complex() or ids.dtype == torch.bool:
        raise ValueError(f"expected bytes as integers, got {ids.dtype}")
    if ids.ndim != 2:
        raise ValueError(
            f"expected bytes of shape (batch, length), got {tuple(ids.shape)}; for one text pass"
            " `ids[None]`"
        )
    return ids.long(), *others


def load_named_model(
    path: Path, device: torch.device, note: Callable[[str], None], compute: str | None = None
) -> tuple[LanguageModel, str]:
    """Load a trained model, and return it with the path of its checkpoint.

    Args:
        path: a checkpoint, or a run directory, whose newest intact checkpoint is loaded.
        device: device of the model.
        note: called with a message for each checkpoint that is skipped.
        compute: dtype of activations; None is that of training.

    Raises:
        ArbError: there is no checkpoint, or it is damaged.
    """
    if compute is not None:
        check_choice("compute", compute, COMPUTE)
    name, checkpoint = _restore_context(*read_saved(path, note))
    dtype = COMPUTE[compute or _training_dtype(name, checkpoint, device)]
    model = empty_model(checkpoint, device, dtype)
    model.load_state_dict(checkpoint.tensors)
    model.tokenizer = saved_tokenizer(name, checkpoint, model.config)
    return model, str(name)


@dataclass(frozen=True, eq=False)
class Weights:
    """A trained model without training state, with its checkpoint."""

    model: LanguageModel
    """The model, on the CPU with float32 activations."""
    checkpoint: Checkpoint
    """The checkpoint, which shares its tensors with the model."""
    path: Path
    """Path of the checkpoint."""
    compute: str
    """Dtype of activations in training."""

    @property
    def origin(self) -> str:
        """Digest of the training checkpoint, also if this one is an export of it."""
        return self.checkpoint.data.get("origin", self.checkpoint.digest)


def load_weights(path: Path, note: Callable[[str], None]) -> Weights:
    """Load the weights of a trained model for export; training state is verified but not kept.

    Args:
        path: a checkpoint, or a run directory, whose newest intact checkpoint is loaded.
        note: called with a message for each checkpoint that is skipped.

    Raises:
        ArbError: there is no checkpoint, or it is damaged.
    """
    name, checkpoint = _restore_context(*read_saved(path, note, accept_weights))
    cpu = torch.device("cpu")
    model = empty_model(checkpoint, cpu, weights_only=True)  # with the angles of a baseline
    model.load_state_dict(checkpoint.tensors, assign=True)
    return Weights(model, checkpoint, name, _training_dtype(name, checkpoint, cpu))


def accept_weights(checkpoint: Checkpoint) -> set[str]:
    """Check like `check_saved`, and select the tensors that are not training state."""
    _check_tensors(checkpoint)
    averages = {name for name in checkpoint.tensors if name.endswith(LATENT_AVERAGE)}
    names = averages | set(empty_model(checkpoint, weights_only=True).state_dict())
    _check_size(checkpoint, names)
    return names


def _accept_state(checkpoint: Checkpoint) -> set[str]:
    """Check like `check_saved`, and select all tensors but the moments of a float baseline."""
    _check_tensors(checkpoint)
    names = {name for name in checkpoint.tensors if not name.endswith(MOMENTS)}
    _check_size(checkpoint, names)
    return names


def empty_model(
    checkpoint: Checkpoint,
    device: torch.device | None = None,
    dtype: torch.dtype = torch.float32,
    *,
    weights_only: bool = False,
) -> LanguageModel:
    """Build the model of a checkpoint, with uninitialised weights.

    Args:
        checkpoint: checkpoint with the configuration.
        device: device of the model; None is torch's `meta` device.
        dtype: dtype of activations.
        weights_only: whether to omit training state, as in an export.

    Raises:
        ArbError: this version does not support the configuration.
    """
    with device or torch.device("meta"):
        model = build_model(saved_config(checkpoint), dtype, seed=None)
        if "wire" in checkpoint.data:
            model.declare_wire()
        if "average" in checkpoint.data:
            imported("arbcli.model.averages:declare_averages")(model)
    if weights_only or is_export(checkpoint):
        model.drop_training_state()
    return model


class SavedModel(NamedTuple):
    """A checkpoint, and the path of its file."""

    path: Path
    checkpoint: Checkpoint


def read_saved(path: Path, note: Callable[[str], None], accept: Accept | None = None) -> SavedModel:
    """Read a checkpoint, or the newest intact one of a run, with averaged weights if it has them.

    Args:
        path: a checkpoint or a run directory.
        note: called with a message for each checkpoint that is skipped, and if an earlier one is
            the best.
        accept: check of the checkpoint before its tensors are read; None is that of `check_saved`,
            for all but the moments of a float baseline.

    Raises:
        ArbError: there is no checkpoint, it is damaged, or its tensors do not match its model.
    """
    accept = accept or _accept_state
    if not path.is_dir():
        return SavedModel(path, load_averages(load_checkpoint(path, accept)))
    checkpoint = latest_checkpoint(path, note, accept)
    for best in best_checkpoints(path):
        if step_of(best) < checkpoint.step:
            note(f"reading step {checkpoint.step:,}; `{best}` had the lowest held-out loss")
    return SavedModel(path_of(checkpoint, path), load_averages(checkpoint))


def _restore_context(path: Path, checkpoint: Checkpoint) -> SavedModel:
    """Give an imported model the context that it came with, if it was tuned on shorter windows."""
    original = path.parent / COMPANIONS / CONFIG
    if original.exists():
        length = read_json(original, {"max_position_embeddings": int})["max_position_embeddings"]
        config = checkpoint.config | {"ctx": max(checkpoint.config["ctx"], length)}
        checkpoint = dataclasses.replace(checkpoint, config=config)
    return SavedModel(path, checkpoint)


def load_averages(checkpoint: Checkpoint) -> Checkpoint:
    """Replace weights by their averages, if there are any."""
    tensors = {
        name: checkpoint.tensors.get(f"{name}_average", part)
        for name, part in checkpoint.tensors.items()
        if not name.endswith(LATENT_AVERAGE)
    }
    checkpoint = dataclasses.replace(checkpoint, tensors=tensors)
    if "average" not in checkpoint.data:
        return checkpoint
    from arbcli.model.averages import split_average  # most checkpoints have none

    for name, weight in empty_model(checkpoint).packed_tensors().items():
        average = tensors.pop(f"{name}.average", None)
        if average is not None:
            remainder = tensors.get(f"{name}.remainder", average)
            trits, remainder = split_average(weight.rule, average, remainder)
            tensors[f"{name}.trits"] = trits
            if f"{name}.remainder" in tensors:  # if it was read
                tensors[f"{name}.remainder"] = remainder
    data = {name: value for name, value in checkpoint.data.items() if name != "average"}
    return dataclasses.replace(checkpoint, tensors=tensors, data=data)


def saved_config(checkpoint: Checkpoint) -> ModelConfig:
    """Return the model configuration of a checkpoint.

    Raises:
        ArbError: this version does not support the configuration.
    """
    try:
        return config_from_dict(checkpoint.config)
    except TypeError as error:
        raise ArbError(
            f"the model is of another version of arb: {error}",
            "load it with the version that wrote it",
        ) from None


def check_saved(checkpoint: Checkpoint) -> None:
    """Check that a checkpoint's tensors match its model and fit into memory: see `Accept`.

    The check allocates no memory, as the model is built on the `meta` device.

    Args:
        checkpoint: the checkpoint; its tensors may be on `meta`.

    Raises:
        ArbError: the tensors do not match, or are too large.
    """
    _check_tensors(checkpoint)
    _check_size(checkpoint, checkpoint.tensors)


def _check_tensors(checkpoint: Checkpoint) -> None:
    tensors = checkpoint.tensors
    blocks = sum(1 for _ in saved_config(checkpoint).blocks())
    if blocks > len(tensors):  # to build them takes 5 ms each
        raise ArbError(
            f"it has {len(tensors)} tensors, and its configuration {blocks} blocks",
            "the file was modified: use another one",
        )
    expected = empty_model(checkpoint).state_dict()
    for name in tensors:  # the state of a float baseline's optimizer
        weight, _, kind = name.rpartition(".")
        if kind in FLOAT_STATE and f"{weight}.{LATENT}" in expected:
            expected[name] = expected[f"{weight}.{LATENT}"]
    check_layout(tensors, expected)


def _check_size(checkpoint: Checkpoint, names: Iterable[str]) -> None:
    size = sum(checkpoint.tensors[name].nbytes for name in names)
    check_room(2 * size, "to read it, and make its model,", "use a machine with more memory")


def _training_dtype(file: Path, checkpoint: Checkpoint, device: torch.device) -> str:
    """Return the dtype of activations in training, or the device's default without a run."""
    path, hint = file.parent / CONFIG, "give `--compute`"
    if is_export(checkpoint):  # exports have the dtype in their metadata
        data = checkpoint.data
        check_schema(data, {"compute": str}, f"`{file}`", hint)
    elif not path.exists():
        return default_compute(device)
    else:
        data = read_json(path, {"config": dict, "config.compute": str}, hint)["config"]
    check_choice("compute", data["compute"], COMPUTE)
    return data["compute"]
