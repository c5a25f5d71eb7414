"""A float twin as an expert runs it: compiled, and warmed up so that its step can be captured."""

from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from arbcli.model.compressed import CompressedLM
from arbcli.model.dense import Block, ByteLM
from arbcli.model.hnet import HNet
from arbcli.model.language_model import RECOMPUTE
from arbcli.model.streams import StreamsLM

WHOLE_LAYERS = 8
"""A model of more blocks, or one that recomputes them, is compiled by parts, blocks only once.

A compiler takes minutes for many blocks as one piece, and gains one fused sum a block by it, which
is nothing where a block is large.
"""


def compile_twin(model: ByteLM | HNet, backend: str = "inductor") -> None:
    """Compile what a step of a float twin computes, in place of its `losses`.

    It is compiled when first used. Whatever else uses the model finds it as it was, but for the
    blocks of an `HNet`, or of several streams: they are compiled where they stand, as what is
    between those of an `HNet` launches kernels. A `CompressedLM` launches them inside its blocks,
    and is left as it is.

    Args:
        model: with float weights.
        backend: of `torch.compile`.
    """
    if isinstance(model, CompressedLM):
        return
    how = {"backend": backend, "dynamic": False, "fullgraph": True}
    if isinstance(model, HNet | StreamsLM):
        for block in model.modules():
            if isinstance(block, Block):
                block.compile(**how)
        return
    compiled = partial(torch.compile, **how)
    if model.config.layers <= WHOLE_LAYERS and not model.recompute:
        model.losses = compiled(model.losses)
        return
    embedding, *blocks = map(compiled, (model.embedding, *model.blocks))

    @compiled
    def text_loss(x: Tensor, targets: Tensor) -> Tensor:
        logits = model.head(x, model.norm)
        return model.cross_entropy(logits.flatten(0, 1), targets.flatten())

    def losses(ids: Tensor, targets: Tensor) -> dict[str, Tensor]:
        x = embedding(ids, model.compute_dtype)
        for block in blocks:
            x = checkpoint(block, x, **RECOMPUTE) if model.recompute else block(x)
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
