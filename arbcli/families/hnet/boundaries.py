"""Chunk boundaries of an H-Net model in a text."""

import torch
from torch import Tensor

from arbcli.base.errors import ArbError
from arbcli.kernels.runtime.backend import use_backend
from arbcli.kernels.runtime.device import deterministic
from arbcli.model.language_model import LanguageModel


def check_chunks(model: LanguageModel) -> None:
    """Check that a model has chunks of bytes.

    Raises:
        ArbError: it has none, or reads tokens.
    """
    if not model.stages:
        raise ArbError(
            "this model reads bytes one by one, without chunks",
            "train a preset with chunks, such as `hnet-tiny`",
        )
    if model.tokenizer:
        raise ArbError(
            "the chunks of this model are of tokens, and only those of bytes are shown",
            "leave `--chunks` out",
        )


@torch.no_grad()
def chunk_starts(model: LanguageModel, ids: Tensor) -> list[Tensor]:
    """Return the chunk boundaries of (B, T) bytes: for each stage a (B, T) bool mask."""
    recorded: list[Tensor] = []
    for stage in model.stages:
        stage.recorded = recorded
    try:
        model(ids)
    finally:
        for stage in model.stages:
            stage.recorded = None
    # empty slots mark the first byte, which always begins a chunk
    marks = torch.zeros_like(ids, dtype=torch.bool)
    return [marks.scatter(1, first.clamp(min=0), True) for first in recorded]


@torch.no_grad()
def chunk_depths(model: LanguageModel, text: bytes, backend: str) -> list[int]:
    """Return the number of stages that begin a chunk at each byte of a text.

    The text is read as in generation, without a limit on the number of chunks.

    Args:
        model: a model with chunks.
        text: at least one byte.
        backend: kernel backend.
    """
    cache, depths = model.new_cache(len(text)), []
    ids = torch.tensor(list(text), device=model.device)[None]
    with deterministic(), use_backend(backend):
        for part in ids.split(cache.window, dim=1):
            model(part, cache)
            depths += cache.depths().tolist()
    return depths
