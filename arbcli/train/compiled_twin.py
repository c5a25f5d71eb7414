"""A float twin as an expert runs it: compiled, and warmed up so that its step can be captured."""

from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from arbcli.model.language_model import LanguageModel
from arbcli.model.stack import RECOMPUTE

WHOLE_LAYERS = 8
"""A model of more blocks, or one that recomputes them, is compiled by parts, blocks only once.

A compiler takes minutes for many blocks as one piece, and gains one fused sum a block by it, which
is nothing where a block is large.
"""


def compile_twin(model: LanguageModel, backend: str = "inductor") -> None:
    """Compile what a step of a float twin computes, in place of its `losses`.

    It is compiled when first used. Whatever else uses the model finds it as it was, but for the
    blocks of a model with chunks or several streams: they are compiled where they stand, as what is
    between them launches kernels. Blocks whose parts launch kernels are left as they are.

    Args:
        model: with float weights.
        backend: of `torch.compile`.
    """
    how = {"backend": backend, "dynamic": False, "fullgraph": True}
    blocks = [block for stack in model.stacks() for block in stack]
    plain = [block for block in blocks if all(branch.part.compiles for branch in block.branches)]
    several = any(stage.streams > 1 for stage in model.config.stages)
    if model.stages or several or len(plain) < len(blocks):
        for block in plain:
            block.compile(**how)
        return
    compiled = partial(torch.compile, **how)
    if len(blocks) <= WHOLE_LAYERS and not model.recompute:
        model.losses = compiled(model.losses)
        return
    embedding, *blocks = map(compiled, (model.embedding, *blocks))

    @compiled
    def text_loss(x: Tensor, targets: Tensor) -> Tensor:
        logits = model.head(x, model.norm)
        return model.cross_entropy(logits.flatten(0, 1), targets.flatten())

    def losses(ids: Tensor, targets: Tensor) -> dict[str, Tensor]:
        x = embedding(ids, model.compute_dtype)
        for block in blocks:
            x = (checkpoint(block, x, **RECOMPUTE) if model.recompute else block(x)).x
        return {"text": text_loss(x, targets)}

    model.losses = losses


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
