"""A few real training steps under the microscope, and verdicts with their evidence."""

import dataclasses
import gc
import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from itertools import combinations, pairwise
from pathlib import Path
from statistics import fmean
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from arbcli.checkpoint import Checkpoint, latest_checkpoint, load_checkpoint, read_json
from arbcli.data import entropy, evaluation_batches, open_texts
from arbcli.device import (
    deterministic,
    peak_bytes,
    resolve_backend,
    resolve_device,
)
from arbcli.errors import ArbError
from arbcli.kernels.backend import use_backend
from arbcli.kernels.blend_moment import moment_max
from arbcli.kernels.cast_votes import TRIT_THRESHOLD
from arbcli.kernels.decode_weight import HIGHEST_EXPONENT, LOWEST_EXPONENT, OCTAVE
from arbcli.kernels.packing import unpack_trits
from arbcli.model.config import VOCABULARY
from arbcli.model.lm import ByteLM
from arbcli.model.ternary import TernaryTensor
from arbcli.model.update import STEP_OF_RADIX
from arbcli.training import TrainConfig, Trainer, config_from

STEPS = 12
"""Enough for the warm-up to reach full speed, and for votes to gather, flip and gather again."""
BINS = 16

MAX_CLIMB = 1.5
"""Nats above its lowest that the held-out loss may climb. Twelve steps of `tiny` from a new model
climb by 0.01 with `moment` and `nibble`, by up to 0.9 with `carry`, by 1.7 to 3.4 with `votes`."""
MAX_FLIPS = 0.1
"""Share of the trits that a step may flip: at most 0.03 flip with `moment`, 0.4 with `votes`."""
MAX_GROWTH = 32
"""Times that the blocks may enlarge the residual stream. A new model does 1.4 and a trained one 3;
branches as large as the stream, all in one direction, reach this in 16 blocks."""
TAKEOFF = 2
"""A block enlarges the stream this often only if its branches outweigh all that was before."""
MAX_SATURATED = 0.5
"""Share of a digit's values at its ends. `nibble` starts with 0.15 of its remainders there; if it
is most of them, half of all steps are lost."""
DEAD_BRANCH = 1e-3
"""A branch below this share of the stream is less than bfloat16 resolves; they start at 0.2."""
UNIFORM_MARGIN = 0.01
"""Nats below ln 256 that still count as not better: rounding, or one lucky byte."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Reading:
    """What one batch of held-out text, always the same, shows after `step` steps.

    A number is None where it is not finite, and before the first step where it is about a step.
    """

    step: int
    lr: float | None
    """Of the step that led here."""
    loss: float | None
    """Of that step, on its own text and before its update, nats a byte."""
    flip_share: float | None
    """Share of all trits that the step changed."""
    live_bytes: int
    """Tensors alive after it: of the CUDA allocator, or those that Python can reach."""
    val_loss: float | None
    """Of the held-out batch, nats a byte."""
    loss_by_position: tuple[float | None, ...]
    """The same in buckets of positions: `ProbeReport.position_starts`."""
    residual_rms: tuple[float | None, ...]
    """Root-mean-square of the residual stream: after the embedding, and after every block."""
    residual_growth: float | None
    """The last of these over the first."""
    takeoff_layer: int | None
    """The first block that enlarges the stream by `TAKEOFF` or more."""
    attention_rms: tuple[float | None, ...]
    """What the attention of every block adds to the stream."""
    mlp_rms: tuple[float | None, ...]
    logit_min: float | None
    logit_max: float | None
    prediction_entropy: float | None
    """Average over the predictions, nats."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Histogram:
    """How often the values of a digit occur, in bins of equal width from `low` to `high`."""

    low: int
    high: int
    counts: tuple[int, ...]
    saturated_share: float
    """Share of the values at either end of what the digit can hold."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TensorReport:
    """What the steps did to one packed tensor."""

    name: str
    num_weights: int
    up_share: float
    """Trits that went up, of all, in a step on average; so the next three."""
    down_share: float
    into_zero_share: float
    out_of_zero_share: float
    still_share: float
    """Trits that no step moved."""
    changed: bool
    """Whether any digit of any weight changed at all."""
    update_size: float | None
    """Root-mean-square of the change of z over that of lr * P / 16, over all steps; stochastic
    rounding adds to it where steps are small. None for a rule without a step size."""
    digits: dict[str, Histogram]
    """Of `scale` (v, in 1/128 octaves), `remainder` or `votes`, and `moment` if there is one."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Verdict:
    """A name for what was seen, and the numbers that it rests on."""

    name: str
    evidence: str


@dataclass(frozen=True, slots=True, kw_only=True)
class ProbeReport:
    """Everything that a probe measured, and what it makes of it."""

    passed: bool
    verdicts: tuple[Verdict, ...]
    """What is wrong, the gravest first; or `ok` alone."""
    config: dict[str, Any]
    """The `TrainConfig` of the steps."""
    text: str
    num_weights: int
    uniform_loss: float
    """ln 256."""
    text_entropy: float
    """Order-0 entropy of the held-out text, nats a byte."""
    position_starts: tuple[int, ...]
    """First position of every bucket; the last one ends with the context."""
    readings: tuple[Reading, ...]
    """Before the first step, and after each."""
    tensors: tuple[TensorReport, ...]
    first_nonfinite: str | None
    """Where the first NaN or infinity was: which module made it, or which gradient it was in."""
    acausal_logits: int
    """Predictions that moved when a byte after them was changed; each one is an error."""
    state_bytes: int
    peak_bytes: int
    """Most memory held at once in the steps: of the CUDA allocator, or of the process on a CPU."""


def probe(config: TrainConfig, *, steps: int, checkpoint: Checkpoint | None = None) -> ProbeReport:
    """Do a few steps of a new model, or of a saved one, and judge what happens.

    Args:
        config: what to compute, with ternary weights.
        steps: how many; at least 1.
        checkpoint: where to start; None is a new model.

    Raises:
        ArbError: something the user can fix.
    """
    texts = open_texts(config.data, config.val, seed=config.seed, context=config.model.ctx)
    try:
        with deterministic():
            trainer = Trainer(config, texts)
            if checkpoint is not None:
                trainer.restore(checkpoint)
            return examine(trainer, steps)
    except torch.OutOfMemoryError as error:
        raise ArbError(
            "the GPU's memory is not enough for this model and batch",
            hint="use a smaller `--batch`, `--ctx` or `--preset`",
        ) from error


def open_saved(
    path: Path,
    *,
    steps: int,
    note: Callable[[str], None],
    device: str | None = None,
    backend: str | None = None,
    **given: Any,
) -> tuple[TrainConfig, Checkpoint]:
    """Read what `probe` needs to go on with a saved model.

    Args:
        path: a run directory, whose newest intact checkpoint is taken, or a checkpoint in one.
        steps: how many will be done; a run that ends before is taken to be that much longer.
        note: is told of each checkpoint that is passed over.
        device: None is the GPU if there is one.
        backend: None is the device's own.
        given: fields of `TrainConfig` to use instead of the run's.

    Raises:
        ArbError: there is no checkpoint, or it is damaged.
    """
    run = path if path.is_dir() else path.parent
    checkpoint = latest_checkpoint(run, note) if run == path else load_checkpoint(path)
    config = config_from(read_json(run / "config.json"))
    place = resolve_device(device)
    if "data" in given:
        given.setdefault("val", ())
    given |= {"device": str(place), "backend": resolve_backend(backend, place)}
    longest = max(config.steps, checkpoint.step + steps)
    return dataclasses.replace(config, steps=longest, **given), checkpoint


def examine(trainer: Trainer, steps: int) -> ProbeReport:
    """Do `steps` steps of a trainer of ternary weights, and judge what happens."""
    config, device, context = trainer.config, trainer.device, trainer.config.model.ctx
    weights = trainer.model.weights().items()
    tallies = [_Tally(name, weight) for name, weight in weights if not weight.frozen]
    (held_out,) = evaluation_batches(
        trainer.texts.val, num_batches=1, batch_size=config.batch, context=context, device=device
    )
    starts = [0, *(2**bit for bit in range((context - 1).bit_length()))]
    peak = 0
    with use_backend(config.backend), _Watch(trainer) as watch:
        acausal = _count_acausal(trainer.model, held_out[0])
        about = {"lr": None, "loss": None, "flip_share": None, "live_bytes": _live_bytes(device)}
        readings = [_read(trainer, watch, *held_out, starts, about)]
        for _ in range(steps):
            for tally in tallies:
                tally.begin()
            if device.type == "cuda":
                torch.cuda.reset_peak_memory_stats(device)
            about = {"lr": trainer.lr, "loss": _finite(float(trainer.train_step()))}
            peak = max(peak, peak_bytes(device))
            flips = sum(tally.finish(about["lr"]) for tally in tallies)
            about |= {"flip_share": flips / trainer.num_weights, "live_bytes": _live_bytes(device)}
            readings.append(_read(trainer, watch, *held_out, starts, about))
    report = ProbeReport(
        passed=False,
        verdicts=(),
        config=dataclasses.asdict(config),
        text=trainer.texts.description,
        num_weights=trainer.num_weights,
        uniform_loss=math.log(VOCABULARY),
        text_entropy=entropy(trainer.texts.val),
        position_starts=tuple(starts),
        readings=tuple(readings),
        tensors=tuple(tally.report() for tally in tallies),
        first_nonfinite=watch.first_nonfinite,
        acausal_logits=acausal,
        state_bytes=trainer.state_bytes(),
        peak_bytes=peak,
    )
    verdicts = judge(report)
    return dataclasses.replace(report, verdicts=verdicts, passed=verdicts[0].name == "ok")


class _Watch:
    """Sees every forward and every gradient of a trainer: sizes, and the first NaN or infinity."""

    def __init__(self, trainer: Trainer) -> None:
        self.trainer = trainer
        self.first_nonfinite: str | None = None
        self._rms: dict[str, Tensor] = {}
        self._seen: list[tuple[str, Tensor]] = []

    def __enter__(self) -> "_Watch":
        self._handles = []
        for name, module in self.trainer.model.named_modules():
            self._handles.append(module.register_forward_pre_hook(partial(self._enter, name)))
            self._handles.append(module.register_forward_hook(partial(self._leave, name)))
        for name, weight in self.trainer.model.weights().items():
            weight.sink = partial(self._take, name)
        return self

    def __exit__(self, *_: object) -> None:
        for handle in self._handles:
            handle.remove()
        for weight in self.trainer.model.weights().values():
            weight.sink = self.trainer.updater

    def _enter(self, name: str, _module: nn.Module, args: tuple[Any, ...]) -> None:
        # what a module is given was made by the one around it, between two of its parts
        self._note(f"output of `{name.rpartition('.')[0] or 'model'}`", args[0])

    def _leave(self, name: str, _module: nn.Module, _args: object, output: Tensor) -> None:
        self._note(f"output of `{name or 'model'}`", output)
        norm = torch.linalg.vector_norm(output.detach(), dtype=torch.float32)
        self._rms[name] = norm / math.sqrt(output.numel())

    def _take(self, name: str, weight: TernaryTensor, grad: Tensor) -> None:
        self._note(f"gradient of `{name}`", grad)
        self.trainer.updater(weight, grad)

    def _note(self, what: str, value: Tensor) -> None:
        if value.is_floating_point():
            largest = torch.linalg.vector_norm(value.detach(), math.inf, dtype=torch.float32)
            self._seen.append((what, largest))

    def take_rms(self) -> dict[str, float | None]:
        """Read what was seen since the last time; the sizes are those of the last forward."""
        finite = torch.stack([largest for _, largest in self._seen]).isfinite().tolist()
        if self.first_nonfinite is None and not all(finite):
            what, _ = self._seen[finite.index(False)]
            self.first_nonfinite = f"{what} by step {self.trainer.step}"
        sizes = map(_finite, torch.stack(list(self._rms.values())).tolist())
        result = dict(zip(self._rms, sizes, strict=True))
        self._seen.clear()
        self._rms.clear()
        return result


class _Tally:
    """Counts what steps do to one packed tensor, by unpacking it before and after each."""

    def __init__(self, name: str, tensor: TernaryTensor) -> None:
        self.name, self.tensor = name, tensor
        self.steps, self.kinds = 0, [0.0] * 4
        self.moves = self.expected = 0.0
        self.moved = torch.zeros(tensor.out_features, tensor.in_features, dtype=torch.bool)

    def begin(self) -> None:
        """Remember the digits, on the CPU: a GPU's peak is to be that of the step alone."""
        self.before = [part.to("cpu", copy=True) for part in (self.tensor.trits, self._digit())]

    def finish(self, lr: float) -> float:
        """Compare with what `begin` remembered; return how many trits changed."""
        tensor, radix = self.tensor, self.tensor.rule.radix
        packed, digit = (part.to(tensor.trits.device) for part in self.before)
        old, new = (unpack_trits(trits, tensor.in_features) for trits in (packed, tensor.trits))
        kinds = [new > old, new < old, (new == 0) & (old != 0), (new != 0) & (old == 0)]
        move = (new.short() - old) * radix + (self._digit().short() - digit)
        sums = [kind.sum() for kind in kinds]
        *counts, moves = torch.stack([*sums, move.float().square_().mean()]).tolist()
        self.kinds = [total + count for total, count in zip(self.kinds, counts, strict=True)]
        self.steps += 1
        self.moves += moves
        self.expected += (lr * radix * STEP_OF_RADIX) ** 2
        self.moved |= (new != old).cpu()
        return counts[0] + counts[1]

    def _digit(self) -> Tensor:
        """Extract the digit below the trit: A, or the votes."""
        tensor = self.tensor
        if hasattr(tensor, "votes"):
            return tensor.votes
        return ((tensor.remainder & 15) ^ 8) - 8 if tensor.rule.nibble else tensor.remainder

    def report(self) -> TensorReport:
        """Sum up the steps, and look at every digit as it stands."""
        tensor, rule, voting = self.tensor, self.tensor.rule, hasattr(self.tensor, "votes")
        exponent, fraction = tensor.scales
        v = exponent.int() * OCTAVE + (0 if fraction is None else fraction)
        ends = (LOWEST_EXPONENT * OCTAVE, HIGHEST_EXPONENT * OCTAVE + OCTAVE - 1)
        digits = {"scale": _histogram(v, *ends, zoom=True)}
        end = TRIT_THRESHOLD if voting else rule.remainder_max
        digits["votes" if voting else "remainder"] = _histogram(self._digit(), -end, end)
        if rule.moment_range:
            moment = tensor.remainder >> 4 if rule.nibble else tensor.moment
            end = moment_max(rule.nibble)
            digits["moment"] = _histogram(moment, -end, end)
        up, down, into_zero, out_of_zero = (
            count / self.steps / tensor.num_weights for count in self.kinds
        )
        return TensorReport(
            name=self.name,
            num_weights=tensor.num_weights,
            up_share=up,
            down_share=down,
            into_zero_share=into_zero,
            out_of_zero_share=out_of_zero,
            still_share=1 - float(self.moved.float().mean()),
            changed=self.moves > 0,
            update_size=None if voting else _ratio(self.moves**0.5, self.expected**0.5),
            digits=digits,
        )


def _histogram(values: Tensor, least: int, most: int, *, zoom: bool = False) -> Histogram:
    """Count the values of a digit that holds `least` to `most`, or zoom to those that occur."""
    low, high = (int(values.min()), int(values.max())) if zoom else (least, most)
    bins = min(BINS, high - low + 1)
    index = (values.int().clamp(low, high) - low) * bins // (high - low + 1)
    return Histogram(
        low=low,
        high=high,
        counts=tuple(index.flatten().bincount(minlength=bins).tolist()),
        saturated_share=float(((values <= least) | (values >= most)).float().mean()),
    )


@torch.no_grad()
def _read(
    trainer: Trainer, watch: _Watch, ids: Tensor, targets: Tensor, starts: list[int], about: dict
) -> Reading:
    """Look at the model through held-out text; `about` is what is known of the step before."""
    logits = trainer.model(ids).float()
    losses = functional.cross_entropy(logits.transpose(1, 2), targets, reduction="none").mean(0)
    log_p = logits.log_softmax(-1)
    numbers = [losses.mean(), logits.min(), logits.max(), -(log_p.exp() * log_p).sum(-1).mean()]
    buckets = [bucket.mean() for bucket in losses.tensor_split(starts[1:])]
    numbers = list(map(_finite, torch.stack(numbers + buckets).tolist()))
    sizes = watch.take_rms()
    blocks = [f"blocks.{index}" for index in range(trainer.config.model.layers)]
    stream = tuple(sizes[name] for name in ("embedding", *blocks))
    factors = [_ratio(after, before) or 0 for before, after in pairwise(stream)]
    return Reading(
        step=trainer.step,
        val_loss=numbers[0],
        loss_by_position=tuple(numbers[4:]),
        residual_rms=stream,
        residual_growth=_ratio(stream[-1], stream[0]),
        takeoff_layer=next((i for i, factor in enumerate(factors) if factor >= TAKEOFF), None),
        attention_rms=tuple(sizes[f"{name}.attention"] for name in blocks),
        mlp_rms=tuple(sizes[f"{name}.mlp"] for name in blocks),
        logit_min=numbers[1],
        logit_max=numbers[2],
        prediction_entropy=numbers[3],
        **about,
    )


@torch.no_grad()
def _count_acausal(model: ByteLM, ids: Tensor) -> int:
    """Change one byte of every window, the last one of the last; count what moved before it."""
    batch, length = ids.shape
    rows = torch.arange(batch, device=ids.device)
    positions = ((rows + 1) * length // batch - 1).clamp_(min=0)
    changed = ids.clone()
    changed[rows, positions] = (ids[rows, positions] + VOCABULARY // 2) % VOCABULARY
    before, after = model(ids), model(changed)
    moved = ((before != after) & ~(before.isnan() & after.isnan())).any(-1)  # (B, T)
    earlier = torch.arange(length, device=ids.device) < positions[:, None]
    return int((moved & earlier).sum())


def _live_bytes(device: torch.device) -> int:
    gc.collect()
    if device.type == "cuda":
        return torch.cuda.memory_allocated(device)
    # by exact type: to ask anything of a proxy or a lazy object would wake it
    tensors = (value for value in gc.get_objects() if type(value) in (Tensor, nn.Parameter))
    storages = (tensor.untyped_storage() for tensor in tensors if tensor.device == device)
    return sum({storage.data_ptr(): storage.nbytes() for storage in storages}.values())


def _finite(value: float) -> float | None:
    return value if math.isfinite(value) else None


def _ratio(value: float | None, base: float | None) -> float | None:
    return None if value is None or not base else value / base


def judge(report: ProbeReport) -> tuple[Verdict, ...]:
    """Name what is wrong with what was measured, the gravest first; `ok` if nothing is."""
    checks = {
        "acausal": _acausal,
        "leak": _leak,
        "spike": _spike,
        "worse-than-uniform": _worse_than_uniform,
        "residual-growth": _residual_growth,
        "saturated": _saturated,
        "dead": _dead,
    }
    evidence = {name: "; ".join(check(report)) for name, check in checks.items()}
    found = [Verdict(name=name, evidence=text) for name, text in evidence.items() if text]
    return tuple(found) or (Verdict(name="ok", evidence=_progress(report)),)


def _acausal(report: ProbeReport) -> Iterator[str]:
    if report.acausal_logits:
        yield f"{report.acausal_logits:,} predictions moved when a byte after them was changed"


def _leak(report: ProbeReport) -> Iterator[str]:
    after = report.readings[1:]
    middle, last = after[(len(after) - 1) // 2], after[-1]  # what is made once is made by then
    growth = last.live_bytes - middle.live_bytes
    if growth > 0:
        yield f"live tensors grew by {growth:,} bytes from step {middle.step} to {last.step}"


def _spike(report: ProbeReport) -> Iterator[str]:
    if report.first_nonfinite:
        yield f"not finite: {report.first_nonfinite}"
    pairs = list(combinations([r for r in report.readings if r.val_loss is not None], 2))
    if pairs:
        low, high = max(pairs, key=lambda pair: pair[1].val_loss - pair[0].val_loss)
        if high.val_loss - low.val_loss > MAX_CLIMB:
            yield (
                f"the held-out loss climbed from {low.val_loss:.2f} nats after step {low.step}"
                f" to {high.val_loss:.2f} after step {high.step}"
            )
    most = max(report.readings[1:], key=lambda reading: reading.flip_share)
    if most.flip_share > MAX_FLIPS:
        yield f"step {most.step} flipped {most.flip_share:.1%} of all trits"


def _worse_than_uniform(report: ProbeReport) -> Iterator[str]:
    after = report.readings[1:]
    losses = [reading.val_loss for reading in after[len(after) // 2 :]]
    if None not in losses and fmean(losses) > report.uniform_loss - UNIFORM_MARGIN:
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


def _saturated(report: ProbeReport) -> Iterator[str]:
    for digit in ("scale", "remainder", "moment"):
        tensors = [tensor for tensor in report.tensors if digit in tensor.digits]
        shares = {tensor.name: tensor.digits[digit].saturated_share for tensor in tensors}
        name = max(shares, key=shares.get, default=None)
        if name and shares[name] > MAX_SATURATED:
            yield f"in `{name}` {shares[name]:.0%} of each {digit} is at an end of its range"


def _dead(report: ProbeReport) -> Iterator[str]:
    names = [tensor.name for tensor in report.tensors if not tensor.changed]
    if names:
        more = f" and {len(names) - 1} more tensors" if len(names) > 1 else ""
        yield f"no digit of `{names[0]}`{more} changed"
    last = report.readings[-1]
    for branch, sizes in (("attention", last.attention_rms), ("mlp", last.mlp_rms)):
        for layer, (size, stream) in enumerate(zip(sizes, last.residual_rms[1:], strict=True)):
            if (share := _ratio(size, stream)) is not None and share < DEAD_BRANCH:
                yield f"`blocks.{layer}.{branch}` is {share:.0e} of the stream that it adds to"


def _progress(report: ProbeReport) -> str:
    first, last = report.readings[0], report.readings[-1]
    flips = max(reading.flip_share for reading in report.readings[1:])
    return (
        f"the held-out loss went from {first.val_loss:.2f} to {last.val_loss:.2f} nats,"
        f" and no step flipped more than {flips:.1%} of all trits"
    )
