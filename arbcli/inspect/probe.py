"""Measurements of a few training steps, and verdicts on them."""

import dataclasses
import gc
import math
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional

from arbcli.base.errors import ArbError
from arbcli.base.run_files import run_of
from arbcli.config.training import TrainConfig
from arbcli.data.text import entropy, held_out_batch
from arbcli.families.experts.mixture import Experts
from arbcli.families.streams.hyper_connection import HyperConnection
from arbcli.generation.load import read_saved
from arbcli.inspect.trace import held_tensors
from arbcli.inspect.verdicts import (
    TAKEOFF,
    ChunkReport,
    Histogram,
    ProbeReport,
    Reading,
    TensorReport,
    judge,
    ratio,
)
from arbcli.kernels.codec.packed import HIGHEST_EXPONENT, LOWEST_EXPONENT, OCTAVE
from arbcli.kernels.codec.packing import unpack_trits
from arbcli.kernels.runtime.backend import use_backend
from arbcli.kernels.runtime.device import (
    deterministic,
    explained_out_of_memory,
    peak_bytes,
    resolve_backend,
    resolve_device,
)
from arbcli.model.checkpoint import Checkpoint
from arbcli.model.language_model import LanguageModel
from arbcli.model.packed import StreamedTensor, TernaryTensor, pass_gradients
from arbcli.model.parts.base import BlockOutput, Part
from arbcli.model.rules.base import STEP_OF_RADIX
from arbcli.training.directory import open_run_texts, read_facts, run_config
from arbcli.training.record import finite
from arbcli.training.teacher import read_teacher
from arbcli.training.trainer import Trainer

BINS = 16
SAMPLE_BYTES = 400
"""Number of bytes of held-out text whose chunks are shown."""
MAX_LOGITS = 2**28
"""Maximum number of logits to inspect if steps compute none; at least one window is inspected."""
ROUNDING = 1e-3
"""Maximum change of a value by rounding alone, relative to the root-mean-square of all values."""


def probe(
    config: TrainConfig,
    *,
    steps: int,
    checkpoint: Checkpoint | None = None,
    progress: Callable[[str], None] = lambda _: None,
) -> ProbeReport:
    """Run a few steps of a new or saved model, and check their results.

    Args:
        config: configuration of a model with packed weights.
        steps: number of steps, at least 1.
        checkpoint: checkpoint to start from; None is a new model.
        progress: called with a message before each step.

    Raises:
        ArbError: a text cannot be read, the model cannot be probed, or memory is exhausted.
    """
    texts, teacher = open_run_texts(config), read_teacher(config)
    with deterministic(), explained_out_of_memory():
        trainer = Trainer(config, texts, teacher=teacher and teacher.checkpoint)
        if checkpoint is not None:
            trainer.restore(checkpoint)
        return examine(trainer, steps, progress)


def open_saved(
    path: Path,
    *,
    steps: int,
    note: Callable[[str], None],
    device: str | None = None,
    backend: str | None = None,
    **settings: Any,
) -> tuple[TrainConfig, Checkpoint]:
    """Read the arguments with which `probe` continues a saved model.

    Args:
        path: a run directory, whose newest intact checkpoint is taken, or a checkpoint in one.
        steps: number of steps; a run that would end earlier is extended.
        note: called with a message for each checkpoint that is skipped.
        device: device; None is the GPU if there is one.
        backend: kernel backend; None is the default of the device.
        settings: fields of `TrainConfig` to use instead of the run's.

    Raises:
        ArbError: there is no checkpoint, or it is damaged.
    """
    run = run_of(path)
    checkpoint = read_saved(path, note).checkpoint
    config = run_config(run, read_facts(run))
    if config.model.weights != "ternary":
        raise ArbError("a float baseline has no integers to probe", "name a run of packed weights")
    torch_device = resolve_device(device)
    if "data" in settings:
        settings.setdefault("val", ())
        settings.setdefault("field", None)
    settings |= {name: tuple(settings[name]) for name in ("data", "val") if name in settings}
    settings |= {"device": str(torch_device), "backend": resolve_backend(backend, torch_device)}
    settings |= {"weight_average": 0}  # an average has replaced the weights
    if settings.get("compute") == "fp32":
        settings["pack"] = False  # only gates in bfloat16 are packed
    total_steps = max(config.steps, checkpoint.step + steps)
    if config.model.digits == "fade":  # at the same steps, so that faded weights stay ternary
        ends = (config.steps / total_steps * end for end in config.fades)
        settings |= dict(zip(("fade_from", "fade_to"), ends, strict=True))
    return dataclasses.replace(config, steps=total_steps, **settings), checkpoint


class _StepResult(NamedTuple):
    """Results of the step before a reading; None before the first step."""

    lr: float | None
    loss: float | None
    flip_share: float | None
    live_bytes: int


def examine(
    trainer: Trainer, steps: int, progress: Callable[[str], None] = lambda _: None
) -> ProbeReport:
    """Run `steps` steps of a trainer of ternary weights, and check their results.

    Raises:
        ArbError: the model is masked, or the text has documents.
    """
    config, device, context = trainer.config, trainer.device, trainer.config.model.ctx
    updater = trainer.updater
    if updater is None:
        raise ValueError("need a trainer of ternary weights")
    unused = tuple(
        f"{name}.{tensor}."
        for name, part in trainer.model.named_modules()
        if isinstance(part, Part)
        for tensor in part.unused_tensors
    )
    counters = [
        _ChangeCounter(name, weight)
        for name, weight in trainer.model.packed_tensors().items()
        if not (weight.frozen or name.startswith(unused))
    ]
    windows = config.batch
    if trainer.model.scores_in_chunks:
        windows = min(windows, max(1, MAX_LOGITS // (context * config.model.vocabulary)))
    if config.model.is_masked:
        raise ArbError(
            "a probe reads bytes from left to right, and the model predicts hidden ones",
            "follow a masked run by the losses that `arb train` logs",
        )
    if trainer.texts.val.packs:
        raise ArbError(
            "a probe reads plain text, and these are documents", "name a text with `--data`"
        )
    ids, targets = held_out_batch(trainer.texts.val, 0, windows, context, device)
    starts = [0, *(2**bit for bit in range((context - 1).bit_length()))]
    peak = 0
    with use_backend(config.backend), _live_counter(device) as live_bytes, _Hooks(trainer) as hooks:
        acausal, acausal_layers = _count_acausal_changes(trainer.model, ids)
        before = _StepResult(None, None, None, live_bytes())
        readings = [_read(trainer, hooks, ids, targets, starts, before)]
        for number in range(1, steps + 1):
            progress(f"step {number} of {steps}")
            for counter in counters:
                counter.begin()
            if device.type == "cuda":
                torch.cuda.reset_peak_memory_stats(device)
            lr, loss = trainer.lr, finite(float(trainer.train_step()))
            peak = max(peak, peak_bytes(device))
            flips = sum([counter.finish(lr) for counter in counters])
            step_result = _StepResult(lr, loss, flips / updater.num_weights, live_bytes())
            readings.append(_read(trainer, hooks, ids, targets, starts, step_result))
        chunks = _chunks(trainer.model, ids)
    report = ProbeReport(
        passed=False,
        verdicts=(),
        config=dataclasses.asdict(config),
        text=trainer.texts.description,
        num_weights=trainer.num_weights,
        uniform_loss=math.log(config.model.vocabulary),
        text_entropy=entropy(trainer.texts.val) * trainer.texts.val.symbol_bytes,
        position_starts=tuple(starts),
        readings=tuple(readings),
        tensors=tuple(counter.report() for counter in counters),
        first_nonfinite=hooks.first_nonfinite,
        acausal_logits=acausal,
        acausal_layers=acausal_layers,
        chunks=chunks,
        state_bytes=trainer.state_bytes(),
        peak_bytes=peak,
    )
    verdicts = judge(report)
    return dataclasses.replace(report, verdicts=verdicts, passed=verdicts[0].name == "ok")


class _Hooks:
    """Records RMS values of outputs and the first NaN or infinity in forward and backward passes.

    Hooks are registered on all modules while the context is open.
    """

    def __init__(self, trainer: Trainer) -> None:
        self.trainer = trainer
        self.first_nonfinite: str | None = None
        blocks = range(trainer.config.model.layers)
        self._layers = ("embedding", *(f"blocks.{index}" for index in blocks))
        self._rms: dict[str, Tensor] = {}
        self._streams: dict[str, Tensor] = {}
        self._ranges: dict[str, Tensor] = {}
        self._peaks: list[tuple[str, Tensor]] = []

    def __enter__(self) -> "_Hooks":
        self._hooks = ExitStack()
        add = self._hooks.enter_context
        for name, module in self.trainer.model.named_modules():
            add(module.register_forward_pre_hook(partial(self._record_input, name)))
            add(module.register_forward_hook(partial(self._record_output, name)))
            if isinstance(module, HyperConnection) and name.startswith("blocks."):
                add(module.register_forward_pre_hook(partial(self._record_range, name)))
        for name, weight in self.trainer.model.packed_tensors().items():
            if isinstance(weight, StreamedTensor):
                weight.sink = partial(self._record_gradient, name)
        return self

    def __exit__(self, *_: object) -> None:
        self._hooks.close()
        pass_gradients(self.trainer.model.packed_tensors().values(), self.trainer.updater)

    def _record_input(self, name: str, _module: nn.Module, args: tuple[Any, ...]) -> None:
        # the input of a module is computed by its parent
        self._record(f"output of `{name.rpartition('.')[0] or 'model'}`", args[:1])

    def _record_output(self, name: str, _module: nn.Module, _args: object, output: Any) -> None:
        self._record(f"output of `{name or 'model'}`", output)
        if isinstance(output, BlockOutput) and output.added is not None:
            output = output.added  # output of the part instead of the stream
        if (first := next(_floats(output), None)) is not None:
            norm = torch.linalg.vector_norm(first.detach(), dtype=torch.float32)
            self._rms[name] = norm / math.sqrt(first.numel())
            if name in self._layers and first.dim() > 2 and not torch.is_grad_enabled():
                rows = first.detach().flatten(2)
                norms = torch.linalg.vector_norm(rows, dim=2, dtype=torch.float32)
                self._streams[name] = norms / math.sqrt(rows.shape[2])  # (B, T)

    def _record_range(self, name: str, module: HyperConnection, args: tuple[Any, ...]) -> None:
        """Record minimum and maximum of the weights that read and write streams."""
        if not torch.is_grad_enabled():
            read, _, write = module.weights(args[0].flatten(0, 1))
            ends = (read.min(), read.max(), write.min(), write.max())
            self._ranges[name] = torch.stack(ends)

    def _record_gradient(self, name: str, weight: TernaryTensor, grad: Tensor, *where: Any) -> None:
        self._record(f"gradient of `{name}`", grad)
        if self.trainer.updater is not None:
            self.trainer.updater(weight, grad, *where)

    def _record(self, name: str, values: Any) -> None:
        for value in _floats(values):
            peak = torch.linalg.vector_norm(value.detach(), math.inf, dtype=torch.float32)
            self._peaks.append((name, peak))

    def take_streams(self) -> tuple[list[Tensor], dict[str, Tensor]]:
        """Return and clear the measurements of the last forward without gradients.

        Returns:
            RMS of the stream at each position after each layer, (B, T); and the minimum and maximum
            weights that read and write streams, (4,), by name of the hyper-connection.
        """
        measurements = [self._streams[name] for name in self._layers], dict(self._ranges)
        self._streams.clear()
        self._ranges.clear()
        return measurements

    def take_rms(self) -> dict[str, float | None]:
        """Return and clear the RMS values by module; note the first value that is not finite."""
        are_finite = torch.stack([peak for _, peak in self._peaks]).isfinite().tolist()
        if self.first_nonfinite is None and not all(are_finite):
            name, _ = self._peaks[are_finite.index(False)]
            self.first_nonfinite = f"{name} by step {self.trainer.step}"
        sizes = map(finite, torch.stack(list(self._rms.values())).tolist())
        result = dict(zip(self._rms, sizes, strict=True))
        self._peaks.clear()
        self._rms.clear()
        return result


def _floats(value: Any) -> Iterator[Tensor]:
    """Yield the floating-point tensors among the inputs or outputs of a module."""
    if isinstance(value, Tensor):
        if value.is_floating_point() and value.numel():
            yield value
    elif isinstance(value, list | tuple):
        for part in value:
            yield from _floats(part)


class _ChangeCounter:
    """Counts changes of a packed tensor by unpacking it before and after each step."""

    def __init__(self, name: str, tensor: TernaryTensor) -> None:
        self.name, self.tensor = name, tensor
        self.steps, self.kinds = 0, [0.0] * 4
        self.moves = self.expected = 0.0
        self.moved = torch.zeros(tensor.out_features, tensor.in_features, dtype=torch.bool)

    def begin(self) -> None:
        """Copy the digits to the CPU, so that they do not count for a GPU's peak memory."""
        self.before = [part.to("cpu", copy=True) for part in (self.tensor.trits, self._digit())]

    def finish(self, lr: float) -> float:
        """Compare with the digits that `begin` copied; return the number of changed trits."""
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
        self.expected += (lr * tensor.lr_factor * radix * STEP_OF_RADIX) ** 2
        self.moved |= (new != old).cpu()
        return counts[0] + counts[1]

    def _digit(self) -> Tensor:
        """Read the digit that carries into the trit."""
        (digit, _), *_ = self.tensor.rule.digits(self.tensor.state).values()
        return digit

    def report(self) -> TensorReport:
        """Return changes over all steps, and the current distribution of every digit."""
        tensor = self.tensor
        exponent, fraction = tensor.scales
        v = exponent.int() * OCTAVE + (0 if fraction is None else fraction)
        ends = (LOWEST_EXPONENT * OCTAVE, HIGHEST_EXPONENT * OCTAVE + OCTAVE - 1)
        digits = {"scale": _histogram(v, *ends, zoom=True)}
        for name, (values, end) in tensor.rule.digits(tensor.state).items():
            digits[name] = _histogram(values, -end, end)
        up, down, zeroed, unzeroed = (
            count / self.steps / tensor.num_weights for count in self.kinds
        )
        return TensorReport(
            name=self.name,
            num_weights=tensor.num_weights,
            up_share=up,
            down_share=down,
            into_zero_share=zeroed,
            out_of_zero_share=unzeroed,
            still_share=1 - float(self.moved.float().mean()),
            changed=self.moves > 0,
            update_size=None
            if tensor.direction is None
            else ratio(self.moves**0.5, self.expected**0.5),
            digits=digits,
        )


def _histogram(values: Tensor, minimum: int, maximum: int, *, zoom: bool = False) -> Histogram:
    """Compute a histogram of a digit from `minimum` to `maximum`, or with `zoom` of its range."""
    low, high = (int(values.min()), int(values.max())) if zoom else (minimum, maximum)
    bins = min(BINS, high - low + 1)
    index = (values.int().clamp(low, high) - low) * bins // (high - low + 1)
    return Histogram(
        low=low,
        high=high,
        counts=tuple(index.flatten().bincount(minlength=bins).tolist()),
        saturated_share=float(((values <= minimum) | (values >= maximum)).float().mean()),
    )


@torch.no_grad()
def _read(
    trainer: Trainer, hooks: _Hooks, ids: Tensor, targets: Tensor, starts: list[int],
    step_result: _StepResult,
) -> Reading:  # fmt: skip
    """Evaluate the model on held-out text after a step."""
    logits = trainer.model(ids).float()
    losses = functional.cross_entropy(logits.flatten(0, 1), targets.flatten(), reduction="none")
    losses = losses.view_as(targets).mean(0)  # (T,) float32
    log_p = logits.log_softmax(-1)
    numbers = [losses.mean(), logits.min(), logits.max(), -(log_p.exp() * log_p).sum(-1).mean()]
    numbers.append(logits.std(-1).mean())
    buckets = [bucket.mean() for bucket in losses.tensor_split(starts[1:])]
    numbers = list(map(finite, torch.stack(numbers + buckets).tolist()))
    streams, ranges = hooks.take_streams()
    sizes = hooks.take_rms()
    blocks = [f"blocks.{index}" for index in range(trainer.config.model.layers)]
    parts = _part_names(trainer.model)
    stream = tuple(sizes[name] for name in ("embedding", *blocks))
    factors = [ratio(after, before) or 0 for before, after in pairwise(stream)]
    return Reading(
        step=trainer.step,
        val_loss=numbers[0],
        loss_by_position=tuple(numbers[5:]),
        residual_rms=stream,
        residual_growth=ratio(stream[-1], stream[0]),
        residual_most=tuple(finite(float(stream.max())) for stream in streams),
        growth_by_position=_growth_by_position(streams, ids, starts),
        stream_ranges=_block_ranges(ranges, parts),
        takeoff_layer=next((i for i, factor in enumerate(factors) if factor >= TAKEOFF), None),
        mixer_rms=tuple(sizes[mixer] if mixer else None for mixer, _ in parts),
        channel_rms=tuple(sizes[channel] if channel else None for _, channel in parts),
        logit_min=numbers[1],
        logit_max=numbers[2],
        logit_spread=numbers[4],
        prediction_entropy=numbers[3],
        **step_result._asdict(),
    )


def _growth_by_position(
    streams: list[Tensor], ids: Tensor, starts: list[int]
) -> tuple[float | None, ...]:
    """Compute the mean growth of the RMS of streams, (B, T), through the blocks, per bucket."""
    first, last = streams[0], streams[-1]
    if any(stream.shape != ids.shape for stream in (first, last)):
        return ()
    growth = (last / first.clamp(min=torch.finfo(torch.float32).tiny)).mean(dim=0)
    return tuple(finite(float(bucket.mean())) for bucket in growth.tensor_split(starts[1:]))


def _part_names(model: LanguageModel) -> list[tuple[str | None, str | None]]:
    """Return the names of each innermost block's mixer and channel mixer; None if it has none."""
    parts = []
    for index, block in enumerate(model.blocks):
        names = iter([f"blocks.{index}.{branch.part.name}" for branch in block.branches])
        mixer = next(names) if model.config.main.blocks[index].mixer else None
        parts.append((mixer, next(names, None)))
    return parts


def _block_ranges(
    ranges: dict[str, Tensor], parts: list[tuple[str | None, str | None]]
) -> tuple[tuple[float | None, ...], ...]:
    """Return the ranges of the weights that read and write streams, per block."""
    if not ranges:
        return ()
    ranges_of_blocks = []
    for names in parts:
        ends = [ranges[f"{name}_streams"].tolist() if name else [math.nan] * 4 for name in names]
        ranges_of_blocks.append(tuple(finite(value) for part in ends for value in part))
    return tuple(ranges_of_blocks)


@torch.no_grad()
def _count_acausal_changes(model: LanguageModel, ids: Tensor) -> tuple[int, tuple[int, ...]]:
    """Change one byte per window, the last byte in the last window, and count changes before it.

    With experts, the rows of matrix products change, and thus the last bits of their sums. Then
    only changes above `ROUNDING` relative to the RMS count, and activations are float32, as the
    precision of bfloat16 is lower.

    Returns:
        Number of changed predictions, and of changed positions of the stream after the embedding
        and each block; the latter is empty if blocks read chunks.
    """
    batch, length = ids.shape
    rows = torch.arange(batch, device=ids.device)
    positions = ((rows + 1) * length // batch - 1).clamp_(min=0)
    changed, symbols = ids.clone(), model.config.vocabulary
    changed[rows, positions] = (ids[rows, positions] + symbols // 2) % symbols
    has_experts = any(isinstance(part, Experts) for part in model.modules())
    earlier = torch.arange(length, device=ids.device) < positions[:, None]

    def count_changes(before: Tensor, after: Tensor) -> int:
        same = (before == after) | (before.isnan() & after.isnan())
        if has_experts:
            same |= (before - after).abs() <= ROUNDING * before.square().mean().sqrt()
        return int((~same.all(-1) & earlier).sum())

    dtype = model.compute_dtype
    if has_experts:
        model.compute_dtype = torch.float32
    try:
        with _project_streams(model) as first:
            before = model(ids)
        with _project_streams(model) as second:
            after = model(changed)
    finally:
        model.compute_dtype = dtype
    layer_counts: tuple[int, ...] = ()
    if all(layer.shape[:2] == ids.shape for layer in first):
        layer_counts = tuple(map(count_changes, first, second))
    return count_changes(before, after), layer_counts


@contextmanager
def _project_streams(model: LanguageModel) -> Iterator[list[Tensor]]:
    """Project each position's stream after every layer to a number that depends on all elements.

    Yields:
        A list to which a forward appends tensors, (B, T, 1) float64.
    """
    projections: list[Tensor] = []

    def take(_module: nn.Module, _args: Any, output: Tensor | BlockOutput) -> None:
        x = output.total() if isinstance(output, BlockOutput) else output
        x = x.flatten(2).double()
        weights = torch.arange(1, x.shape[2] + 1, dtype=torch.float64, device=x.device)
        weights = weights * 2.0**0.5 % 1 - 0.5  # uniform, of variance 1/12
        projections.append(x @ weights[:, None] * (12 / x.shape[2]) ** 0.5)

    with ExitStack() as hooks:
        for layer in (model.embedding, *model.blocks):
            hooks.enter_context(layer.register_forward_hook(take))
        yield projections


def _chunks(model: LanguageModel, ids: Tensor) -> ChunkReport | None:
    """Return statistics of a model's chunks in (B, T) symbols; None for a model without chunks."""
    if not model.stages:
        return None
    from arbcli.families.hnet.boundaries import chunk_starts

    stages = torch.stack(chunk_starts(model, ids)).cpu()  # (stages, B, T)
    starts = torch.nonzero(functional.pad(stages[0], (0, 1), value=True).flatten()).flatten()
    lengths = starts.diff()  # each window is padded by one position
    is_end = torch.tensor([start % (ids.shape[1] + 1) == ids.shape[1] for start in starts.tolist()])
    sample = ids[0, :SAMPLE_BYTES].tolist() if model.tokenizer is None else []
    return ChunkReport(
        mean_lengths=tuple(ids.numel() / count for count in stages.sum(dim=(1, 2)).tolist()),
        lengths=tuple(lengths[~is_end[:-1]].bincount()[1:].tolist()),
        sample=bytes(sample).decode(errors="replace"),
        sample_bytes=tuple(sample),
        sample_depths=tuple(stages[:, 0, : len(sample)].sum(dim=0).tolist()),
    )


@contextmanager
def _live_counter(device: torch.device) -> Iterator[Callable[[], int]]:
    """Yield a function that returns the bytes of live tensors.

    On a CPU, tensors that are alive at the start are counted once, as counting takes as long as a
    step.
    """

    def count() -> int:
        gc.collect()
        if device.type == "cuda":
            return torch.cuda.memory_allocated(device)
        storages = (part.untyped_storage() for part in held_tensors() if part.device == device)
        return before + sum({part.data_ptr(): part.nbytes() for part in storages}.values())

    frozen, before = gc.get_freeze_count(), 0
    before = count()
    gc.freeze()
    try:
        yield count
    finally:
        if not frozen:
            gc.unfreeze()
