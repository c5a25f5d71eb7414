"""Where a model puts the boundaries of its chunks in a text."""

import torch

from arbcli.device import deterministic
from arbcli.errors import ArbError
from arbcli.kernels.runtime.backend import use_backend
from arbcli.model.language_model import LanguageModel


def check_chunks(model: LanguageModel) -> None:
    """Refuse a model that has no chunks.

    Raises:
        ArbError: it has none.
    """
    if not model.stages:
        raise ArbError(
            "this model reads bytes one by one, without chunks",
            hint="train a preset with chunks, such as `hnet-tiny`",
        )


@torch.no_grad()
def chunk_depths(model: LanguageModel, text: bytes, backend: str) -> list[int]:
    """Count, for every byte of a text, the stages that begin a chunk there.

    The text is read as in generation: chunks are never joined for want of slots.

    Args:
        model: one with chunks.
        text: at least one byte.
        backend: what runs the kernels.
    """
    cache, depths = model.new_cache(len(text)), []
    ids = torch.tensor(list(text), device=model.device)[None]
    with deterministic(), use_backend(backend):
        for part in ids.split(cache.window, dim=1):
            model(part, cache)
            depths += cache.depths().tolist()
    return depths
