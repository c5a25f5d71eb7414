"""A float twin as an expert runs it: compiled, and warmed up so that its step can be captured."""

from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial

import torch

from arbcli.model.language_model import LanguageModel

WHOLE_LAYERS = 8
"""A model of more blocks, or one that recomputes them, is compiled by parts, blocks only once.

A compiler takes minutes for many blocks as one piece, and gains one fused sum a block by it, which
is nothing where a block is large.
"""
COMPILATIONS = 64
"""Of blocks, at most; torch's own limit is eight."""


def compile_twin(model: LanguageModel, backend: str = "inductor") -> None:
    """Compile what a step of a float twin computes.

    It is compiled when first used, as one piece in place of the model's `losses`. A large model is
    compiled by parts where they stand, so that whatever else uses it finds them compiled; and so is
    one with chunks, several streams, n-grams, memories or a router, as parts next to its blocks
    launch kernels, or note what a step has seen.

    Args:
        model: with float weights.
        backend: of `torch.compile`.
    """
    compiled = partial(torch.compile, backend=backend, dynamic=False, fullgraph=True)
    blocks = [block for stack in model.stacks() for block in stack]
    config = model.config
    between = config.beside or config.main.memories or config.main.router
    between = between or any(stage.streams > 1 for stage in config.stages)
    if len(blocks) <= WHOLE_LAYERS and not (model.stages or between or model.recompute):
        model.losses = compiled(model.losses)  # type: ignore[method-assign]
        return
    # one for each kind and width of blocks, and once more for evaluations
    torch._dynamo.config.recompile_limit = max(COMPILATIONS, torch._dynamo.config.recompile_limit)
    for part in (model.embedding, *blocks):
        part.compile(backend=backend, dynamic=False, fullgraph=True)
    model._text_loss = compiled(model._text_loss)  # type: ignore[method-assign]


@contextmanager
def side_stream(stream: torch.cuda.Stream | None) -> Iterator[None]:
    """Queue work on a stream, after what was queued so far and before what comes next.

    None is the stream that is in use.

    Work before a capture must not be on the default stream: autograd may remember where a parameter
    was last used, and a capture that touches the default stream fails.
    """
    if stream is None:
        yield
        return
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        yield
    torch.cuda.current_stream().wait_stream(stream)
