"""A sample of text from the model of a run."""

from contextlib import nullcontext

import torch

from arbcli.base.lazy import imported
from arbcli.families import MEDIA_MARK
from arbcli.generation.generation import generate
from arbcli.generation.sampling import Sampling
from arbcli.generation.tokens import encode_prompt
from arbcli.training.trainer import Trainer

SAMPLE_BYTES = 256
SAMPLE_STEPS = 32
"""Forward passes for a sample of a masked model."""
PROMPT = b"\n"
PROMPT_BYTES = 16
"""Length of the prompt from the held-out text, if the tokenizer drops `PROMPT`."""


def sample_text(trainer: Trainer) -> str:
    """Generate a sample; it is empty if the held-out text is mostly sounds and pictures.

    Raises:
        ArbError: GPU memory is exhausted.
    """
    model, config = trainer.model, trainer.config
    val = trainer.texts.val
    may_have_media = trainer.texts.tokenizer is None and val.may_contain(MEDIA_MARK)
    if may_have_media and imported("arbcli.families.media.evaluation:is_mostly_media")(val):
        return ""
    sampling, prompt = Sampling(seed=config.seed), PROMPT
    if not encode_prompt(model, prompt):  # the tokenizer drops it
        prompt = trainer.texts.val.source.read(0, PROMPT_BYTES)
    # large float baselines are compiled block by block, for training only; `set_stance` imports
    # torch's compiler, which takes 2 s
    stance = torch.compiler.set_stance("force_eager") if trainer.is_compiled else nullcontext()
    with stance, trainer.averaged():
        if config.model.is_masked:
            length = min(SAMPLE_BYTES, config.model.ctx)
            filled = imported("arbcli.families.masked.holes:filled")
            text = filled(model, length, SAMPLE_STEPS, sampling, backend=config.backend)
        else:
            text = generate(model, prompt, SAMPLE_BYTES, sampling, backend=config.backend)
        return b"".join(text).decode(errors="replace")
