"""Check that there is memory for a run, before any of it is allocated.

A GPU's allocator raises an error in time, and nothing is lost. A CPU's does not: the machine swaps,
or kills the process. Only memory that every step certainly holds is counted here, so the check is
immediate and refuses no run that fits; `arb audit-memory --budget` predicts the complete memory.
"""

import torch

from arbcli.config.layer_spec import MAX_CHUNK, is_chunked
from arbcli.config.model import ModelConfig
from arbcli.config.training import TrainConfig
from arbcli.inspect.memory import predict_run
from arbcli.kernels.runtime.device import COMPUTE, check_room, free_bytes

HINT = "use a smaller `--batch`, `--ctx` or `--preset`"
BATCH_BYTES = 2 * 8
"""Inputs and targets of a position, int64."""


def least_bytes(config: TrainConfig) -> int:
    """Return a lower bound of a step's peak memory, in bytes."""
    model, state = config.model, predict_run(config)
    ternary = model.weights == "ternary"
    positions = config.batch * model.ctx
    width = _saved_width(config) + _logits_width(model)
    return (
        (state.total.state_bytes if ternary else state.adamw_bytes)
        + positions * config.accum * BATCH_BYTES
        + positions * width * COMPUTE[config.compute].itemsize
    )


def _logits_width(model: ModelConfig) -> int:
    """Count the logits and gradients of logits of a position that are in memory at once."""
    if model.weights == "ternary" and is_chunked(model.vocabulary):
        return model.vocabulary // -(-model.vocabulary // MAX_CHUNK)  # the same memory has both
    return 2 * model.vocabulary


def _saved_width(config: TrainConfig) -> int:
    """Count the activations that the blocks keep for their backward, of each position."""
    model = config.model
    if model.outer:  # its blocks see chunks, as many as there are
        return 0
    if config.recompute or model.weights != "ternary":  # a compiler may recompute, too
        return model.layers * model.dim
    saved = sum(part.saved_width(spec) for spec, block in model.blocks() for part in block.parts)
    # packed gates take three quarters
    return saved - (sum(part.width // 2 for part in model.gates_to_pack()) if config.pack else 0)


def check_memory(config: TrainConfig, hint: str = HINT) -> None:
    """Check that this machine has enough memory for a run.

    Args:
        config: configuration of the run.
        hint: hint of the error.

    Raises:
        ArbError: it does not have `least_bytes`.
    """
    free = free_bytes(torch.device(config.device))
    check_room(least_bytes(config), "a training step", hint, free)
