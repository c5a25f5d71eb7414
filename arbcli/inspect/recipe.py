"""Choice of micro-batch, accumulation and recomputation of a tuning step for a memory budget."""

import dataclasses
from bisect import bisect_left
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import torch

from arbcli.config.model import ModelConfig
from arbcli.config.training import MAX_UNSUMMED, TrainConfig, default_reduction
from arbcli.inspect.peak import predict_peak
from arbcli.inspect.ranks import share_out
from arbcli.inspect.room import least_bytes
from arbcli.inspect.speed import Speed, expected_speed
from arbcli.kernels.runtime.device import free_bytes

WINDOW = 2048
"""Default context of tuning an imported model, whose own context may be much longer."""
STEP_TOKENS = 65_536
"""Tokens of a step on a GPU."""
MIN_STEP_TOKENS = 4096
"""Tokens of a step on other devices, and of a short text."""
MIN_STEPS_PER_PASS = 100
"""Minimum number of steps in a pass over a text, if `MIN_STEP_TOKENS` allows it."""
EPOCHS = 3
"""Default number of passes over a text that is shorter than the default number of steps."""
MIN_KEPT_TOKENS = 8192
"""Minimum number of tokens in a micro-batch on a GPU that keeps its activations. A smaller one
takes more time, in passes over the gradients, than a larger one that recomputes activations."""
MAX_TRACED = 2
"""Maximum number of traced micro-batches per process; later ones allocate the same as the second.
"""
MAX_SUMMED = 64
"""Maximum number of micro-batches that are summed in 16 bits by default, as in the trace."""
SEGMENT = 20 * 2**20
"""Bytes that the allocator may reserve for the inputs of micro-batches that are not traced."""
USABLE, USABLE_BY_CPU = 0.95, 0.75
"""Usable share of a GPU's memory, whose driver and communication need the rest, and of a CPU's,
where libraries and the allocator do: a step of SmolLM2-135M took 1.28 times its prediction."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Recipe:
    """Settings of a tuning step that fits into a memory budget."""

    rule: str
    ctx: int
    batch: int
    accum: int
    """Micro-batches of a step, over all processes."""
    recompute: bool
    reduce_dtype: str | None
    """Integer format in which micro-batches are summed; None averages each into the moment."""
    budget_bytes: int
    reserved_bytes: int
    """Predicted memory of a process, evaluations included."""
    speed: Speed | None
    """Expected speed; None for several processes, or if it cannot be estimated."""

    @property
    def options(self) -> str:
        """Options of `arb train`."""
        text = f"--ctx {self.ctx} --batch {self.batch} --accum {self.accum}"
        if self.recompute:
            text += " --recompute"
        in_place = self.reduce_dtype is None and self.accum > MAX_UNSUMMED
        return f"{text} --reduce-dtype none" if in_place else text

    @property
    def summary(self) -> str:
        """Tokens of a step, memory and speed, in words."""
        used, budget = (size / 2**30 for size in (self.reserved_bytes, self.budget_bytes))
        tokens = self.ctx * self.batch * self.accum
        text = f"{tokens:,} tokens a step, {used:.2f} of {budget:.2f} GiB predicted"
        return f"{text}, {self.speed}" if self.speed else text


def tuning_context(model: ModelConfig) -> int:
    """Return the default length of windows on which an imported model is tuned, in tokens."""
    return min(model.ctx, WINDOW)


def usable_bytes(device: torch.device, processes: int = 1) -> int:
    """Return the free memory of a device for each process that uses it."""
    free = free_bytes(device) or 2**40  # unknown on some systems
    if device.type == "cuda":
        return int(USABLE * free)
    return int(USABLE_BY_CPU * free) // processes


def choose_step(
    config: TrainConfig,
    budget: int,
    *,
    text_tokens: int | None = None,
    processes: int = 1,
    sums: bool = True,
    progress: Callable[[str], None] = lambda text: None,
) -> Recipe | None:
    """Choose the largest micro-batch that fits, and as many as make up a step.

    Activations are recomputed only if few windows fit otherwise: see `MIN_KEPT_TOKENS`. Many
    micro-batches are summed if the sums fit, too.

    Args:
        config: configuration of the run; its `batch` and `accum` are ignored.
        budget: memory of each process in bytes.
        text_tokens: length of the training text; None is a long one.
        processes: number of processes that share a step.
        sums: whether micro-batches of a process may be summed.
        progress: called with the subject of each prediction, before it.

    Returns:
        The settings; None if not even a window fits.
    """
    uses_gpu = config.device.startswith("cuda")
    tokens = STEP_TOKENS if uses_gpu else MIN_STEP_TOKENS
    if text_tokens is not None:
        while tokens > MIN_STEP_TOKENS and tokens * MIN_STEPS_PER_PASS > text_tokens:
            tokens //= 2
    context = config.model.ctx
    windows = max(tokens // processes // context, 1)
    batches = [2**n for n in reversed(range(windows.bit_length()))]
    min_batch = min(MIN_KEPT_TOKENS // context, batches[0]) if uses_gpu else 1
    shares = share_out(config, processes) if processes > 1 else []
    rank = max(range(len(shares)), key=lambda rank: shares[rank].state_bytes, default=0)
    reserved_bytes: dict[tuple[int, bool], int] = {}

    def fits(batch: int, recompute: bool, *, summed: bool = False) -> bool:
        number = batches[0] // batch
        accum = processes * min(number, MAX_TRACED)
        step = dataclasses.replace(config, batch=batch, accum=accum, recompute=recompute)
        if summed:
            step = dataclasses.replace(step, reduce_dtype="int16")
        if least_bytes(step) > budget:
            return False
        progress(f"predicting --batch {batch}{' --recompute' * recompute}")
        peak = predict_peak(step, captured=True, rank=rank, size=processes)
        size = peak.evaluated_bytes + SEGMENT * (number > MAX_TRACED)
        if size <= budget or not summed:
            reserved_bytes[batch, recompute] = size
        return size <= budget

    for recompute in (False, True):
        if recompute < config.recompute or (recompute and config.pack):
            continue
        candidates = batches if recompute else [batch for batch in batches if batch >= min_batch]
        fitting = partial(fits, recompute=recompute)
        index = 0 if fitting(candidates[0]) else bisect_left(candidates, True, lo=1, key=fitting)
        if index < len(candidates):
            batch, reduce_dtype = candidates[index], config.reduce_dtype
            accum = batches[0] // batch * processes
            may_sum = sums and reduce_dtype is None and MAX_UNSUMMED < accum <= MAX_SUMMED
            if may_sum and fits(batch, recompute, summed=True):
                reduce_dtype = default_reduction(accum)
            step = dataclasses.replace(config, batch=batch, accum=accum, recompute=recompute)
            return Recipe(
                rule=config.model.rule,
                ctx=context,
                batch=batch,
                accum=accum,
                recompute=recompute,
                reduce_dtype=reduce_dtype,
                budget_bytes=budget,
                reserved_bytes=reserved_bytes[batch, recompute],
                speed=expected_speed(step) if processes == 1 else None,
            )
    return None
