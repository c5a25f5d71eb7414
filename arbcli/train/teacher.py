"""A teacher: a trained model, frozen and packed, whose predictions a run learns."""

from collections.abc import Callable
from pathlib import Path

import torch

from arbcli.checkpoint import Checkpoint
from arbcli.config.training import TrainConfig
from arbcli.errors import ArbError
from arbcli.infer.load import SavedModel, accept_weights, empty_model, read_saved, saved_config
from arbcli.infer.tokens import DIGEST, check_digest
from arbcli.model.language_model import LanguageModel
from arbcli.tokens import Tokenizer


def read_teacher(
    config: TrainConfig, note: Callable[[str], None] = lambda _: None
) -> SavedModel | None:
    """Read the weights of the teacher that a run has; None if it has none.

    Args:
        config: of the run.
        note: is told of each damaged checkpoint that is passed over.

    Raises:
        ArbError: there is no such checkpoint, or it is of other symbols.
    """
    if config.teacher is None:
        return None
    saved = read_saved(Path(config.teacher), note, accept_weights)
    known = saved_config(saved.checkpoint)
    if known.fills or config.model.fills:
        raise ArbError(
            "a model that fills holes cannot have a teacher, or be one",
            hint="leave `teacher` out, or train both with `objective=next`",
            fields=("teacher", "objective"),
        )
    symbols = known.vocabulary
    if symbols != config.model.vocabulary:
        raise ArbError(
            f"the teacher `{saved.path}` predicts {symbols:,} symbols, and the model has"
            f" {config.model.vocabulary:,}",
            hint="choose a teacher with the tokenizer of the model",
            fields=("teacher",),
        )
    if config.tokenizer is not None:
        trained_with = saved.checkpoint.data.get(DIGEST)
        check_digest(Tokenizer.read(config.tokenizer), trained_with, Path(config.tokenizer))
    return saved


def frozen_model(checkpoint: Checkpoint, device: torch.device, dtype: torch.dtype) -> LanguageModel:
    """Make the model of a teacher, with nothing that only a step needs."""
    model = empty_model(checkpoint, device, dtype, weights_only=True)
    if model.device.type != "meta":  # which a prediction has no memory on
        model.load_state_dict(checkpoint.tensors)
    return model
