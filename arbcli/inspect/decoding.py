"""Measurements of a decoding step after a prefill: magnitudes in each block, and memory."""

import math
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.overrides import TorchFunctionMode

from arbcli.base.errors import ArbError
from arbcli.config.training import TrainConfig
from arbcli.data.opening import open_texts
from arbcli.data.text import Text, held_out_batch
from arbcli.generation.decoder import Decoder, read_symbols
from arbcli.generation.load import empty_model
from arbcli.inspect.audit import Check, Level, check_levels, read_level
from arbcli.inspect.trace import LiveTensors
from arbcli.kernels.runtime.backend import use_backend
from arbcli.kernels.runtime.device import COMPUTE, explained_out_of_memory, spare_bytes
from arbcli.model.build import build_model
from arbcli.model.checkpoint import Checkpoint
from arbcli.model.language_model import LanguageModel
from arbcli.model.parts.base import BlockOutput, Part
from arbcli.model.parts.cached import CachedAttention
from arbcli.model.stack import Block
from arbcli.training.directory import open_run_texts
from arbcli.training.record import finite

STEPS = 3
"""Number of measured decoding steps. They run once before, as the first step and the first one that
begins a chunk cache derived constants."""


@dataclass(frozen=True, slots=True, kw_only=True)
class BlockReading:
    """Magnitudes in a block at the decoded position; None if one is not finite or absent."""

    name: str
    stream: float | None
    """Maximum |x| of the residual stream after the block."""
    branches: dict[str, float | None]
    """Maximum |f| of the output f that each part adds to the stream."""
    attention_min: float | None
    """Minimum attention logit over all heads and visible positions."""
    attention_max: float | None


@dataclass(frozen=True, slots=True, kw_only=True)
class DecodingProbe:
    """Sizes of a decoding step."""

    passed: bool
    """Whether all numbers are finite."""
    device: str
    compute: str
    prefill: int
    """Number of positions before the decoded one."""
    blocks: tuple[BlockReading, ...]
    """The blocks that ran, in their order; those within chunks only run where a chunk begins."""
    logit_min: float | None
    logit_max: float | None
    cache_bytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class DecodingAudit:
    """Memory of prefill and decoding steps."""

    device: str
    backend: str
    compute: str
    prefill: int
    cache_bytes: int
    levels: tuple[Level, ...]
    """After loading, preparing weights and cache, the prefill, and each step."""
    checks: tuple[Check, ...]
    passed: bool


@torch.no_grad()
def probe_decoding(
    config: TrainConfig, prefill: int, checkpoint: Checkpoint | None = None
) -> DecodingProbe:
    """Prefill positions of the held-out text, decode one with the torch backend, and measure it.

    Args:
        config: configuration of the run, with the text and the device.
        prefill: number of positions.
        checkpoint: a saved model; None is a new one.

    Raises:
        ArbError: the text is too short, memory is exhausted, or the model is masked.
    """
    ids = _held_out(open_run_texts(config).val, prefill + 1, config.device)
    with explained_out_of_memory(), use_backend("torch"):
        model = _model(config, checkpoint)
        cache = model.new_cache(prefill + 1)
        read_symbols(model, ids[:-1], cache)
        with _watched(model) as blocks:
            logits = model(ids[None, -1:], cache)
    low, high = map(finite, torch.stack(logits.aminmax()).tolist())
    sizes = [low, high] + [
        size for block in blocks for size in (block.stream, *block.branches.values())
    ]
    return DecodingProbe(
        passed=None not in sizes,
        device=config.device,
        compute=config.compute,
        prefill=prefill,
        blocks=tuple(blocks),
        logit_min=low,
        logit_max=high,
        cache_bytes=cache.nbytes,
    )


@torch.no_grad()
def audit_decoding(config: TrainConfig, prefill: int) -> DecodingAudit:
    """Measure live memory of a new model: loaded, prepared, after a prefill, and in each step.

    Args:
        config: configuration of the run, with the text, the device and the backend.
        prefill: number of positions of the prompt.

    Raises:
        ArbError: the text is too short, memory is exhausted, or the model is masked.
    """
    # bytes are symbols of any vocabulary
    texts = open_texts(config.data, config.val, seed=config.seed, context=config.model.ctx)
    prompt = _held_out(texts.val, prefill, config.device).tolist()
    tensors = LiveTensors(torch.device(config.device))
    with explained_out_of_memory(), use_backend(config.backend), tensors:
        model = _model(config, None)
        levels = [read_level(tensors, 0, "load")]
        with model.prepared_weights(spare_bytes(model.device)):
            decoder = Decoder(
                model, prefill + STEPS, backend=config.backend, capture=False, prompt=prefill
            )
            levels.append(read_level(tensors, 0, "prepare"))
            decoder.begin(prompt)
            levels.append(read_level(tensors, 0, "prefill"))
            for _ in range(STEPS):
                decoder.step()
            decoder.begin(prompt)
            for step in range(1, STEPS + 1):
                decoder.step()
                levels.append(read_level(tensors, step, "end"))
    check = check_levels([level.live_bytes for level in levels if level.step])
    return DecodingAudit(
        device=config.device,
        backend=config.backend,
        compute=config.compute,
        prefill=prefill,
        cache_bytes=decoder.nbytes,
        levels=tuple(levels),
        checks=(check,),
        passed=check.passed,
    )


def _held_out(text: Text, length: int, device: str) -> Tensor:
    """Return the first symbols of a held-out window, (length,) int64."""
    if text.packs:
        raise ArbError("decoding is measured on plain text", "name a text with `--data`")
    return held_out_batch(text, 0, 1, length, device)[0][0]


def _model(config: TrainConfig, checkpoint: Checkpoint | None) -> LanguageModel:
    """Build the model without training state."""
    device, dtype = torch.device(config.device), COMPUTE[config.compute]
    if checkpoint is not None:
        model = empty_model(checkpoint, device, dtype)
        model.load_state_dict(checkpoint.tensors)
    else:
        with device:
            model = build_model(config.model, dtype, seed=config.seed)
    model.drop_training_state()
    return model


class _AttentionLogits(TorchFunctionMode):
    """Keeps the logits of the last attention of one position, which the torch backend computes."""

    logits: Tensor | None = None

    def __torch_function__(
        self, func: Any, types: Any, args: tuple = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        options = kwargs or {}
        if func is functional.scaled_dot_product_attention:
            q, k, *_ = args
            logits = q.float() @ k.float().mT * options.get("scale", q.shape[-1] ** -0.5)
            seen = options.get("attn_mask")
            self.logits = logits if seen is None else logits.masked_fill(~seen, -math.inf)
            return func(*args, **options)
        result = func(*args, **options)
        if func is Tensor.masked_fill and args[2:] == (-math.inf,):
            self.logits = result
        return result


@contextmanager
def _watched(model: LanguageModel) -> Iterator[list[BlockReading]]:
    """Yield a list to which each block that runs within adds its reading."""
    readings: list[BlockReading] = []
    branches: dict[str, float | None] = {}
    ends: list[float | None] = [None, None]

    def left_part(part: nn.Module, _args: Any, output: BlockOutput) -> None:
        assert isinstance(part, Part)
        assert output.added is not None
        branches[part.name] = _largest(output.added)
        if isinstance(part, CachedAttention) and attention.logits is not None:
            logits = attention.logits[attention.logits != -math.inf]
            ends[:] = [finite(float(end)) for end in logits.aminmax()]
        attention.logits = None

    def left_block(name: str, _block: nn.Module, _args: Any, output: BlockOutput) -> None:
        if output.x.numel():  # blocks within chunks get no position where none begins
            reading = BlockReading(
                name=name,
                stream=_largest(output.total()),
                branches=dict(branches),
                attention_min=ends[0],
                attention_max=ends[1],
            )
            readings.append(reading)
        branches.clear()
        ends[:] = [None, None]

    with ExitStack() as hooks, _AttentionLogits() as attention:
        for name, block in model.named_modules():
            if isinstance(block, Block):
                hooks.enter_context(block.register_forward_hook(partial(left_block, name)))
                for branch in block.branches:
                    hooks.enter_context(branch.part.register_forward_hook(left_part))
        yield readings


def _largest(values: Tensor) -> float | None:
    """Return the largest |x|; None if it is not finite, or if there is none."""
    return finite(float(values.abs().max())) if values.numel() else None
