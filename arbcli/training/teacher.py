"""Knowledge distillation: a frozen, packed model whose predictions a run learns."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from arbcli.base.errors import ArbError, setting_error
from arbcli.config.training import TrainConfig
from arbcli.data.tokens import Tokenizer
from arbcli.generation.load import SavedModel, accept_weights, empty_model, read_saved, saved_config
from arbcli.generation.tokens import check_digest
from arbcli.model.checkpoint import TOKENIZER_DIGEST, Checkpoint
from arbcli.model.language_model import LanguageModel


def read_teacher(
    config: TrainConfig, note: Callable[[str], None] = lambda _: None
) -> SavedModel | None:
    """Read the weights of a run's teacher; None if it has none.

    Args:
        config: configuration of the run.
        note: called with a message for each damaged checkpoint that is skipped.

    Raises:
        ArbError: there is no checkpoint, or it has another vocabulary.
    """
    if config.teacher is None:
        return None
    saved = read_saved(Path(config.teacher), note, accept_weights)
    teacher_config = saved_config(saved.checkpoint)
    if teacher_config.fills or config.model.fills:
        raise setting_error(
            "models that fill holes cannot have a teacher or be one",
            "leave `teacher` out, or train both with `objective=next`",
        )
    symbols = teacher_config.vocabulary
    if symbols != config.model.vocabulary:
        raise ArbError(
            f"the teacher `{saved.path}` predicts {symbols:,} symbols, and the model has"
            f" {config.model.vocabulary:,}",
            "choose a teacher with the tokenizer of the model",
            fields=("teacher",),
        )
    if config.tokenizer is not None:
        tokenizer_digest = saved.checkpoint.data.get(TOKENIZER_DIGEST)
        check_digest(Tokenizer.read(config.tokenizer), tokenizer_digest, Path(config.tokenizer))
    return saved


def reload_teacher(facts: dict[str, Any], config: TrainConfig) -> SavedModel | None:
    """Read the teacher of a resumed run.

    Raises:
        ArbError: it is missing or has changed.
    """
    teacher = read_teacher(config)
    if teacher is not None and teacher.checkpoint.digest != facts.get("teacher_digest"):
        raise ArbError(
            f"`{teacher.path}` is not the teacher that the run began with",
            "restore it, or start a new run with `--out`",
        )
    return teacher


def frozen_model(checkpoint: Checkpoint, device: torch.device, dtype: torch.dtype) -> LanguageModel:
    """Build the model of a teacher, without training state."""
    model = empty_model(checkpoint, device, dtype, weights_only=True)
    if model.device.type != "meta":  # used for memory predictions
        model.load_state_dict(checkpoint.tensors)
    return model
