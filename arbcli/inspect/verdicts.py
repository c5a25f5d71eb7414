"""Report of a probe, and named verdicts with the numbers that support them."""

import math
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import combinations, pairwise
from statistics import fmean
from typing import Any

MAX_CLIMB = 1.5
"""Maximum rise of the held-out loss above its minimum, in nats. In twelve steps a new `tiny` rises
0.1 with `moment`, 0.2 with `nibble`, up to 1.0 with `carry`, and 1.7 to 5.2 with `votes`."""
MAX_FLIPS = 0.1
"""Maximum share of the trits that a step flips: 0.02 with `moment`, over 0.35 with `votes`."""
MAX_GROWTH = 32
"""Maximum growth of the residual stream over the blocks: 1.4 in a new model, 3 in a trained one.
Branches as large as the stream, all in one direction, reach this in 16 blocks."""
TAKEOFF = 2
"""Growth in one block that is only possible if its branches outweigh the stream before it."""
MAX_SATURATED = 0.5
"""Maximum share of a digit's values at the ends of its range. `nibble` starts with 0.15 of its
remainders there; if most are there, half of all steps are lost."""
DEAD_BRANCH = 1e-3
"""Minimum size of a branch relative to the stream, below which bfloat16 does not resolve it; new
models have 0.2."""
MIN_SPREAD = 0.25
"""Minimum standard deviation of the logits of a prediction: 1 in a new model, 3 in a trained one.
With 0.25 the cross-entropy is within about 0.03 nats of a uniform guess."""
UNIFORM_MARGIN = 0.01
"""Minimum improvement over ln 256 in nats; less may be rounding, or one lucky byte."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Reading:
    """Measurements on a fixed batch of held-out text, after `step` steps.

    A number is None if it is not finite, or if it is of a step and there was none yet.
    """

    step: int
    lr: float | None
    """Learning rate of the last step."""
    loss: float | None
    """Training loss of the last step before its update, in nats per byte."""
    flip_share: float | None
    """Share of all trits that the step changed."""
    live_bytes: int
    """Size of live tensors after the step: of the CUDA allocator, or reachable from Python."""
    val_loss: float | None
    """Loss on the held-out batch in nats per byte."""
    loss_by_position: tuple[float | None, ...]
    """`val_loss` in buckets of positions: see `ProbeReport.position_starts`."""
    residual_rms: tuple[float | None, ...]
    """Root-mean-square of the residual stream: after the embedding, and after every block."""
    residual_growth: float | None
    """Last element of `residual_rms` divided by the first."""
    residual_most: tuple[float | None, ...]
    """Like `residual_rms`, for the byte with the largest stream at that depth."""
    growth_by_position: tuple[float | None, ...]
    """Growth of the streams of bytes, in buckets of positions: `ProbeReport.position_starts`; none
    where blocks read chunks and not bytes."""
    stream_ranges: tuple[tuple[float | None, ...], ...]
    """For each block with several streams, the minimum and maximum weight with which its mixer
    reads streams, its mixer writes them, its channel mixer reads them, and its channel mixer writes
    them; None if the block lacks the part."""
    takeoff_layer: int | None
    """The first block that enlarges the stream by `TAKEOFF` or more."""
    mixer_rms: tuple[float | None, ...]
    """Root-mean-square of the mixer's output in every block; None in a block without one."""
    channel_rms: tuple[float | None, ...]
    """Root-mean-square of the channel mixer's output in every block, like `mixer_rms`."""
    logit_min: float | None
    logit_max: float | None
    logit_spread: float | None
    """Standard deviation of the logits of a prediction, on average."""
    prediction_entropy: float | None
    """Average over the predictions, nats."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Histogram:
    """Histogram of the values of a digit, in bins of equal width from `low` to `high`."""

    low: int
    high: int
    counts: tuple[int, ...]
    saturated_share: float
    """Share of the values at either end of the digit's range."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TensorReport:
    """Effect of the steps on one packed tensor."""

    name: str
    num_weights: int
    up_share: float
    """Mean share of trits that a step increases; the next three are shares of a step, too."""
    down_share: float
    into_zero_share: float
    out_of_zero_share: float
    still_share: float
    """Share of trits that no step changed."""
    changed: bool
    """Whether any digit of any weight changed."""
    update_size: float | None
    """Root-mean-square of the change of z over that of lr * P / 16, over all steps; stochastic
    rounding adds to it where steps are small. None for a rule without a step size."""
    digits: dict[str, Histogram]
    """Histograms of `scale` (v, in 1/128 octaves), `remainder` or `votes`, and `moment`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Verdict:
    """A finding, with the numbers that support it."""

    name: str
    evidence: str


@dataclass(frozen=True, slots=True, kw_only=True)
class ChunkReport:
    """The chunks that a model finds in the batch of held-out text, after the last step."""

    mean_lengths: tuple[float, ...]
    """Bytes, or tokens, of a chunk of each stage, the outermost first."""
    lengths: tuple[int, ...]
    """Number of chunks of the outermost stage with 1, 2 and so on bytes, or tokens."""
    sample: str
    """The beginning of the first window; bytes that are not UTF-8 are U+FFFD. Empty for tokens."""
    sample_bytes: tuple[int, ...]
    """Bytes of `sample`."""
    sample_depths: tuple[int, ...]
    """For each of these bytes, how many stages begin a chunk there."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ProbeReport:
    """Measurements and verdicts of a probe."""

    passed: bool
    verdicts: tuple[Verdict, ...]
    """Findings, the most severe first; or only `ok`."""
    config: dict[str, Any]
    """The `TrainConfig` of the steps."""
    text: str
    num_weights: int
    uniform_loss: float
    """Loss of a uniform prediction per symbol: ln 256 for bytes."""
    text_entropy: float
    """Order-0 entropy of the bytes of the held-out text, nats a symbol, as losses are."""
    position_starts: tuple[int, ...]
    """First position of every bucket; the last one ends with the context."""
    readings: tuple[Reading, ...]
    """Before the first step, and after each."""
    tensors: tuple[TensorReport, ...]
    first_nonfinite: str | None
    """Name of the module or gradient with the first NaN or infinity."""
    acausal_logits: int
    """Number of predictions that changed with a later byte; each is an error."""
    acausal_layers: tuple[int, ...]
    """Number of positions whose stream changed with a later byte, after the embedding and every
    block. Empty if blocks read chunks instead of bytes."""
    chunks: ChunkReport | None
    """None of a model without chunks."""
    state_bytes: int
    peak_bytes: int
    """Peak memory of the steps: of the CUDA allocator, or of the process on a CPU."""


def ratio(value: float | None, base: float | None) -> float | None:
    """Divide; None if the divisor is 0 or missing."""
    return None if value is None or not base else value / base


def judge(report: ProbeReport) -> tuple[Verdict, ...]:
    """Derive the verdicts from the measurements, most severe first; `ok` if there is no finding."""
    checks = {
        "acausal": _acausal,
        "leak": _leak,
        "spike": _spike,
        "worse-than-uniform": _worse_than_uniform,
        "residual-growth": _residual_growth,
        "logits-compressed": _logits_compressed,
        "saturated": _saturated,
        "dead": _dead,
    }
    evidence = {name: "; ".join(check(report)) for name, check in checks.items()}
    verdicts = [Verdict(name=name, evidence=text) for name, text in evidence.items() if text]
    return tuple(verdicts) or (Verdict(name="ok", evidence=_progress(report)),)


def _acausal(report: ProbeReport) -> Iterator[str]:
    if report.acausal_logits:
        yield f"{report.acausal_logits:,} predictions moved when a byte after them was changed"
    first = next((layer for layer, moved in enumerate(report.acausal_layers) if moved), None)
    if first is not None:
        name = f"`blocks.{first - 1}`" if first else "the embedding"
        moved = report.acausal_layers[first]
        yield f"after {name} {moved:,} positions moved when a byte after them was changed"


def _leak(report: ProbeReport) -> Iterator[str]:
    after = report.readings[1:]
    middle, last = after[(len(after) - 1) // 2], after[-1]  # one-time allocations precede both
    growth = last.live_bytes - middle.live_bytes
    if growth > 0:
        yield f"live tensors grew by {growth:,} bytes from step {middle.step} to {last.step}"


def _spike(report: ProbeReport) -> Iterator[str]:
    if report.first_nonfinite:
        yield f"not finite: {report.first_nonfinite}"
    losses = [(r.step, r.val_loss) for r in report.readings if r.val_loss is not None]
    pairs = list(combinations(losses, 2))
    if pairs:
        (first, low), (last, high) = max(pairs, key=lambda pair: pair[1][1] - pair[0][1])
        if high - low > MAX_CLIMB:
            yield (
                f"the held-out loss climbed from {low:.2f} nats after step {first}"
                f" to {high:.2f} after step {last}"
            )
    for before, after in pairwise(report.readings):
        share, rises = after.flip_share or 0, _loss(after) > _loss(before)
        if share > MAX_FLIPS and rises:
            yield f"step {after.step} flipped {share:.1%} of all trits, and the held-out loss rose"
            return


def _loss(reading: Reading) -> float:
    return math.inf if reading.val_loss is None else reading.val_loss


def _worse_than_uniform(report: ProbeReport) -> Iterator[str]:
    after = report.readings[1:]
    later = after[len(after) // 2 :]
    losses = [reading.val_loss for reading in later if reading.val_loss is not None]
    if len(losses) == len(later) and fmean(losses) > report.uniform_loss - UNIFORM_MARGIN:
        yield (
            f"the held-out loss is {fmean(losses):.2f} nats on average over the last"
            f" {len(losses)} steps, and guessing costs {report.uniform_loss:.2f}"
        )


def _residual_growth(report: ProbeReport) -> Iterator[str]:
    worst = max(report.readings, key=lambda reading: reading.residual_growth or 0)
    growth, layer = worst.residual_growth or 0, worst.takeoff_layer
    if growth > MAX_GROWTH:
        where = "" if layer is None else f", taking off in block {layer}"
        yield f"the residual stream grew {growth:,.0f} times over the blocks{where}"


def _logits_compressed(report: ProbeReport) -> Iterator[str]:
    first, last = report.readings[0], report.readings[-1]
    if last.logit_spread is not None and last.logit_spread < MIN_SPREAD:
        before = "" if first.logit_spread is None else f", after {first.logit_spread:.2f} at first"
        largest = last.residual_most[-1]
        stream = "" if largest is None else f", and the largest stream of a byte is {largest:.3g}"
        yield f"logits of a prediction spread by {last.logit_spread:.2g}{before}{stream}"


def _saturated(report: ProbeReport) -> Iterator[str]:
    for digit in ("scale", "remainder", "moment"):
        tensors = [tensor for tensor in report.tensors if digit in tensor.digits]
        shares = {tensor.name: tensor.digits[digit].saturated_share for tensor in tensors}
        name = max(shares, key=lambda name: shares[name], default=None)
        if name and shares[name] > MAX_SATURATED:
            yield f"in `{name}` {shares[name]:.0%} of each {digit} is at an end of its range"


def _dead(report: ProbeReport) -> Iterator[str]:
    names = [tensor.name for tensor in report.tensors if not tensor.changed]
    if names:
        more = f" and {len(names) - 1} more tensors" if len(names) > 1 else ""
        yield f"no digit of `{names[0]}`{more} changed"
    last = report.readings[-1]
    for branch, sizes in (("mixer", last.mixer_rms), ("channel mixer", last.channel_rms)):
        for layer, (size, stream) in enumerate(zip(sizes, last.residual_rms[1:], strict=True)):
            if (share := ratio(size, stream)) is not None and share < DEAD_BRANCH:
                yield f"the {branch} of `blocks.{layer}` adds {share:.0e} of the stream"


def _progress(report: ProbeReport) -> str:
    first, last = report.readings[0], report.readings[-1]
    flips = max(step.flip_share or 0 for step in report.readings[1:])
    return (
        f"the held-out loss went from {first.val_loss:.2f} to {last.val_loss:.2f} nats,"
        f" and no step flipped more than {flips:.1%} of all trits"
    )
