"""Float baselines under `torch.compile`, with a warm-up so that the step can be captured."""

from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial

import torch

from arbcli.model.language_model import LanguageModel

FUSED_BLOCKS = 8
"""Maximum number of blocks for the compilation of the complete model.

Larger models, and those that recompute blocks, are compiled block by block, once for equal blocks.
Compiling many blocks together takes minutes, and only fuses one more addition per block.
"""
COMPILE_LIMIT = 64
"""Limit of recompilations of a block; torch's default is eight."""


def compile_baseline(model: LanguageModel, backend: str = "inductor") -> None:
    """Compile the losses of a float baseline; the compilation happens at the first use.

    The method `losses` is compiled as a whole. Large models are compiled block by block in place,
    and so are models with chunks, several streams, n-grams, memories or a router, whose other parts
    launch kernels or record statistics.

    Args:
        model: a model with float weights.
        backend: backend of `torch.compile`.
    """
    compiled = partial(torch.compile, backend=backend, dynamic=False, fullgraph=True)
    blocks = [block for stack in model.stacks() for block in stack]
    config = model.config
    between = config.beside or config.main.memories or config.main.router
    between = between or any(stage.streams > 1 for stage in config.stages)
    if len(blocks) <= FUSED_BLOCKS and not (model.stages or between or model.recompute):
        model.losses = compiled(model.losses)  # type: ignore[method-assign]
        return
    # one compilation for each kind and width of blocks, and another one for evaluations
    torch._dynamo.config.recompile_limit = max(COMPILE_LIMIT, torch._dynamo.config.recompile_limit)
    for part in (model.embedding, *blocks):
        part.compile(backend=backend, dynamic=False, fullgraph=True)
    model._text_loss = compiled(model._text_loss)  # type: ignore[method-assign]


@contextmanager
def side_stream(stream: torch.cuda.Stream) -> Iterator[None]:
    """Run the block on a stream, ordered with the current stream before and after it.

    Work before a capture must not run on the default stream: autograd
    may remember on which stream a parameter was last used, and a capture that touches the default
    stream fails.
    """
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        yield
    torch.cuda.current_stream().wait_stream(stream)
