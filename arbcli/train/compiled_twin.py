"""A float twin as an expert runs it: compiled, and warmed up so that its step can be captured."""

from collections.abc import Iterator
from contextlib import contextmanager

import torch

from arbcli.model.dense import ByteLM

WHOLE_LAYERS = 8
"""A model of more blocks is compiled by parts, all blocks by one compilation.

A compiler takes minutes for many blocks at once, and gains one fused sum a block by it, which is
nothing where a block is large.
"""


def compile_twin(model: ByteLM, backend: str = "inductor") -> None:
    """Compile what a float twin computes in a step, in place; it is compiled when first used.

    Args:
        model: with float weights.
        backend: of `torch.compile`.
    """
    how = {"backend": backend, "dynamic": False, "fullgraph": True}
    if model.config.layers <= WHOLE_LAYERS:
        model.losses = torch.compile(model.losses, **how)
        return
    for part in (model.embedding, *model.blocks, model.head):
        part.compile(**how)
    model.cross_entropy = torch.compile(model.cross_entropy, **how)


@contextmanager
def side_stream(stream: torch.cuda.Stream) -> Iterator[None]:
    """Queue work on a stream, after what was queued so far and before what comes next.

    Work before a capture must not be on the default stream: autograd may remember where a parameter
    was last used, and a capture that touches the default stream fails.
    """
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        yield
    torch.cuda.current_stream().wait_stream(stream)
