"""Expected speed of a step on a GPU, from the sizes of the model and rates fitted on an H200."""

import dataclasses
from dataclasses import dataclass

import torch

from arbcli.base.errors import ArbError
from arbcli.config.training import TrainConfig
from arbcli.kernels.runtime.device import PEAK_TERAOPS, check_compute, peak_operations
from arbcli.model.layers.symbols import KEPT_BYTES
from arbcli.model.rules import find_rule

FITTED_ON = "NVIDIA H200"
"""GPU of the rates, which were fitted to complete steps of `benchmarks.large_tuning`."""
PRODUCTS, PRODUCTS_FP8 = 9.1e14, 1.77e15
"""Operations per second of products in bf16, attention without its mask included, and in e4m3."""
ACTIVATIONS = 3.0e11
"""Saved activations per second of a forward or backward, beside its products."""
WEIGHTS = 1e11
"""Weights per second that a micro-batch decodes and adds gradients to, or that an update steps."""
ORTHOGONAL = 5.0e13
"""Weights per second times the width of the stream, in Newton-Schulz iterations."""
MIN_SECONDS = 8e-5
"""Minimum time in seconds of a part in a micro-batch, which small models reach."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Speed:
    """Expected speed of the captured steps of a process."""

    gpu: str
    """This machine's GPU if its peak rate is known, else `FITTED_ON`."""
    tokens_per_second: float
    fp8_tokens_per_second: float | None
    """The same with products in e4m3; None if these are set already or not supported."""

    def __str__(self) -> str:
        """Describe the speed in words, with two digits."""
        text = f"about {_rounded(self.tokens_per_second)} tokens/s on an {self.gpu}"
        if self.fp8_tokens_per_second is None:
            return text
        return f"{text}, {_rounded(self.fp8_tokens_per_second)} with --compute fp8"


def expected_speed(config: TrainConfig) -> Speed | None:
    """Estimate the speed of a run; None on other devices, or if `step_seconds` is None."""
    seconds = step_seconds(config) if config.device.startswith("cuda") else None
    if seconds is None:
        return None
    gpu, peak, supports_fp8 = FITTED_ON, None, config.compute != "fp8"
    if torch.cuda.is_available():
        device = torch.device(config.device)
        peak = peak_operations(device)
        gpu = torch.cuda.get_device_name(device) if peak else gpu
        try:
            check_compute("fp8", device)
        except ArbError:
            supports_fp8 = False
    scale = peak / (PEAK_TERAOPS[FITTED_ON] * 1e12) if peak else 1
    tokens = scale * config.batch * config.accum * config.model.ctx
    seconds_fp8 = step_seconds(dataclasses.replace(config, compute="fp8"))
    return Speed(
        gpu=gpu,
        tokens_per_second=tokens / seconds,
        fp8_tokens_per_second=tokens / seconds_fp8 if supports_fp8 and seconds_fp8 else None,
    )


def step_seconds(config: TrainConfig) -> float | None:
    """Estimate the time of a captured step on an H200, in seconds.

    Returns:
        The time; None unless integer weights of attention and MLPs are trained in bf16 or fp8.
    """
    model, parts = config.model, list(config.model.specs_and_parts())
    kinds = {part.kind for _, part in parts}
    supported = config.compute in ("bf16", "fp8", "fp8-backward") and model.weights == "ternary"
    if not supported or len(model.stages) > 1 or kinds - {"attention", "mlp"}:
        return None
    linear = sum(part.products(spec, 0) for spec, part in parts)
    attention = sum(part.products(spec, model.ctx) for spec, part in parts) - linear
    activations = sum(part.saved_width(spec) for spec, part in parts)
    spec, tokens, passes = model.layer_spec(), config.batch * model.ctx, 3 + config.recompute
    head = model.vocabulary * spec.dim
    weights = linear + head * (1 if model.tied else 2)
    in_fp8 = {"fp8": passes - 1, "fp8-backward": 2}.get(config.compute, 0)
    kept = min(1, KEPT_BYTES[config.recompute] / (2 * tokens * model.vocabulary))
    in_bf16 = passes * attention + (4 - kept) * head + (passes - in_fp8) * linear
    seconds_per_token = (
        2 * in_bf16 / PRODUCTS
        + 2 * in_fp8 * linear / PRODUCTS_FP8
        + passes * activations / ACTIVATIONS
    )
    orthogonal = linear * spec.dim if spec.direction == "orthogonal" else 0
    if not find_rule(model.rule, model.digits).moment_range:
        orthogonal *= config.accum  # each gradient, not their average
    seconds = config.accum * tokens * seconds_per_token + (config.accum + 1) * weights / WEIGHTS
    return max(seconds + orthogonal / ORTHOGONAL, config.accum * len(parts) * MIN_SECONDS)


def _rounded(number: float) -> str:
    return f"{float(f'{number:.2g}'):,.0f}"
