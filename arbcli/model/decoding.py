"""Decoding with a cache: new positions of a text, and one position of each text of a batch."""

from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, NamedTuple

from torch import Tensor

from arbcli.kernels.matmul.swizzled import fits_prepacked
from arbcli.model.parts.base import BlockInputs, BlockOutput, fits_vectors, map_texts
from arbcli.model.stack import run_position

if TYPE_CHECKING:
    from arbcli.model.cache import Cache
    from arbcli.model.language_model import LanguageModel


def forward_with_cache(model: "LanguageModel", ids: Tensor, cache: "Cache") -> Tensor:
    """Compute logits of new positions: see `LanguageModel.forward`."""
    if model.stages and cache.texts is not None:  # some text nearly always begins a chunk
        *_, logits = [phase.run() for phase in step_phases(model, ids, cache)]
        assert logits is not None  # the last phase returns them
        return logits
    with cache.reading(ids) as text:
        x, inputs = _embed(model, text, ids.shape[1])
        fused = not model.stages and fuses(model, x)
        return _logits(model, model.run_stages(0, x, ids, inputs, cache, fused=fused), fused=fused)


class Phase(NamedTuple):
    """A part of a decoding step with fixed shapes, which can be captured as a CUDA graph."""

    depth: int
    """Nesting depth; phases of depth 0 always run, deeper ones if `leads_deeper` says so."""
    run: Callable[[], Tensor | None]
    """Run the phase; the last one returns the logits, (B, 1, V)."""
    leads_deeper: Callable[[], Tensor] | None = None
    """Return a bool tensor of one element, true if the phases one level deeper run; None: never."""
    handle: Tensor | None = None
    """Handle of the conditional node for deeper phases, int64 of one element, 0 for no node; None
    if conditional nodes are not supported."""


def step_phases(model: "LanguageModel", ids: Tensor, cache: "Cache") -> list[Phase]:
    """Return the phases of a decoding step, in order.

    A byte that does not begin a chunk only needs the outer stages.

    Args:
        model: the model.
        ids: (1, 1) int64, or (B, 1) for a batch; read by each run of the phases.
        cache: from `new_cache`; updated in place.
    """
    last = len(model.stages)
    if not last:
        return [Phase(0, lambda: model(ids, cache))]
    inputs, is_fused = BlockInputs(), False

    def descend(index: int) -> None:
        nonlocal inputs, is_fused
        if index == 0:
            with cache.reading(ids) as text:
                x, inputs = _embed(model, text, 1)
            is_fused = fuses(model, x)
        else:
            x = model.stages[index - 1].step_inward(cache.stages[index - 1], fused=is_fused)
        model.stages[index].step_down(x, ids, inputs, cache.stages[index], fused=is_fused)

    def main() -> None:
        stage, past = model.stages[last - 1], cache.stages[last - 1]
        x = stage.step_inward(past, fused=is_fused)
        x = run_position(model.blocks, x, cache.main, inputs, fused=is_fused)
        stage.step_outward(x, past, cache.main.position, fused=is_fused)

    def ascend(index: int) -> Tensor | None:
        x = model.stages[index].step_up(inputs, cache.stages[index], fused=is_fused)
        if index:  # stages count their own positions
            before = cache.stages[index - 1]
            return model.stages[index - 1].step_outward(x, before, None, fused=is_fused)
        return _logits(model, BlockOutput(x), fused=is_fused)

    phases = []
    for index, past in enumerate(cache.stages):
        begins = partial(getattr, past, "begins")
        phases.append(Phase(index, partial(descend, index), begins, past.handle))
    phases.append(Phase(last, main))
    return phases + [Phase(index, partial(ascend, index)) for index in reversed(range(last))]


def _embed(model: "LanguageModel", text: Tensor, length: int) -> tuple[Tensor, BlockInputs]:
    """Embed while decoding, each text separately; also return the additional inputs."""
    if model.config.beside:
        x = map_texts(lambda row: model.embed(row, length), text)
    else:
        x = model.embed(text, length)
    return x, model.block_inputs(text, length)


def _logits(model: "LanguageModel", hidden: BlockOutput, *, fused: bool) -> Tensor:
    """Compute logits while decoding, each text separately."""
    if fused:
        return fused_logits(model, hidden.x)
    if len(hidden.x) == 1:
        return model.logits(hidden)
    return map_texts(lambda row: model.logits(BlockOutput(row)), hidden.total())


def fuses(model: "LanguageModel", x: Tensor) -> bool:
    """Return whether decoding steps use the fused kernels.

    Args:
        model: the model.
        x: the stream, (B, 1, D).
    """
    fits = model.weights_are_prepared and fits_prepacked(x, model.config.layer_spec().group_size)
    stages = model.config.stages
    plain = model.config.weights == "ternary" and not model.config.norm_gain
    plain = plain and all(fits_vectors(stage.dim) and stage.adds_plainly for stage in stages)
    return fits and plain and model.fits_bytes


def fused_logits(model: "LanguageModel", x: Tensor) -> Tensor:
    """Compute logits of one position of each text, (B, 1, D) to (B, 1, V), by fused kernels."""
    if model.config.composite:
        return map_texts(lambda row: model.logits(BlockOutput(row)), x)
    if model.config.head:
        if model.byte_mlp.steps_fused:
            x = model.byte_mlp.step(x, None, x)
        else:
            x = map_texts(lambda row: model.byte_mlp(row, model.byte_norm).total(), x)
    return model.head.fused(x, normalise=True)
