"""Memory audit of real training steps: live memory at every stage, and leaks.

On CUDA the levels are read from the allocator. A CPU has no such allocator, so live storages are
counted: each is added when an operation returns it, or when it is found among Python's objects, and
removed when it is freed.
"""

import dataclasses
import pickle
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from arbcli.base.atomic_files import write_file
from arbcli.config.training import TrainConfig
from arbcli.data.opening import open_texts
from arbcli.inspect.floats import FloatTensor, FloatTensors
from arbcli.inspect.memory import MeasuredState, StateReport, measure, predict_run
from arbcli.inspect.peak import PeakReport, predict_peak
from arbcli.inspect.room import BATCH_BYTES, HINT, check_memory
from arbcli.inspect.trace import LiveTensors
from arbcli.kernels.runtime.backend import use_backend
from arbcli.kernels.runtime.device import check_room, deterministic, explained_out_of_memory
from arbcli.model.layers.rotary import fresh_tables
from arbcli.training.configure import new_config
from arbcli.training.parallel.group import Group
from arbcli.training.teacher import read_teacher
from arbcli.training.trainer import Trainer

RUN_SETTINGS = "device", "backend", "compute", "batch", "accum", "steps"
"""Settings of a run that are part of its report."""
TOLERANCE = 0.01
"""Maximum relative error of the predicted size of the state."""


@dataclass(frozen=True, slots=True, kw_only=True)
class FitReport:
    """Whether a training step fits into a budget."""

    budget_bytes: int
    predicted_peak: PeakReport
    fits: bool
    advice: str | None
    """Options with which the step fits; None if it fits already."""
    seconds: float
    """Duration of the prediction."""

    @property
    def passed(self) -> bool:
        """Whether the step fits."""
        return self.fits


@dataclass(frozen=True, slots=True, kw_only=True)
class Level:
    """Memory at the end of a stage."""

    step: int
    """Number of the step, from 1; 0 is loading."""
    stage: str
    """`load`, `forward`, `backward` (which updates the weights too) or `end`; of decoding `load`,
    `prepare`, `prefill` or `end`."""
    live_bytes: int
    """Allocated memory on CUDA, or the size of live tensors on a CPU, in bytes."""
    reserved_bytes: int | None
    """Memory that the CUDA allocator has reserved."""
    peak_bytes: int
    """Peak of live memory during the stage, in bytes."""
    loss: float | None = None
    """At the end of a step, its loss before the update in nats per byte."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Check:
    """A condition that must hold."""

    name: str
    passed: bool
    detail: str


@dataclass(frozen=True, slots=True, kw_only=True)
class AuditReport:
    """Prediction, measurement, and whether they agree."""

    device: str
    backend: str
    compute: str
    batch: int
    accum: int
    steps: int
    predicted: StateReport
    predicted_peak: PeakReport
    measured: MeasuredState
    seconds: float
    """Duration of the measured steps."""
    levels: tuple[Level, ...]
    peak_bytes: int
    """Peak of live memory over all steps, in bytes."""
    peak_error: float
    """Relative error of the predicted peak: predicted / measured - 1."""
    checks: tuple[Check, ...]
    passed: bool
    floats: tuple[FloatTensor, ...] | None
    """All float tensors of the first step; None if `audit` was called without `floats`."""


def config_of_any_gpu(**settings: Any) -> TrainConfig:
    """Build a configuration for a GPU, for predictions; the machine does not need one."""
    if torch.cuda.is_available():
        return new_config(**settings, device="cuda")
    compute = settings.pop("compute", "bf16")
    config = new_config(**settings, device="cpu", compute=compute)
    return dataclasses.replace(config, device="cuda", backend="triton")


def check_fit(
    config: TrainConfig, budget: int, progress: Callable[[str], None] = lambda text: None
) -> FitReport:
    """Return whether the steps and evaluations of a run fit into a budget.

    Args:
        config: configuration of the run.
        budget: the budget in bytes.
        progress: called with the subject of the prediction, before each of its steps.

    Raises:
        ArbError: the batches alone exceed this machine's memory.
    """
    started = time.perf_counter()
    positions = config.batch * config.accum * config.model.ctx
    check_room(positions * BATCH_BYTES, "to trace such a step", HINT)
    peak = predict_peak(
        config, captured=True, progress=lambda stage: progress(f"predicting {stage}")
    )
    fits = peak.evaluated_bytes <= budget
    advice = None if fits else _fitting_options(config, peak, budget, progress)
    return FitReport(
        budget_bytes=budget,
        predicted_peak=peak,
        fits=fits,
        advice=advice,
        seconds=round(time.perf_counter() - started, 1),
    )


def _fitting_options(
    config: TrainConfig, peak: PeakReport, budget: int, progress: Callable[[str], None]
) -> str:
    """Find options that fit: packed gates, else recomputation, or smaller micro-batches."""

    def predict_with(options: str, **changes: Any) -> PeakReport:
        return predict_peak(
            dataclasses.replace(config, **changes),
            captured=True,
            progress=lambda stage: progress(f"predicting {stage} with {options}"),
        )

    no_fit = "no batch fits: use a smaller --ctx or --preset, or --rule nibble"
    if budget <= peak.state_bytes:
        return no_fit
    # packing saves at most a quarter of what is not state
    least = peak.evaluated_bytes - (peak.evaluated_bytes - peak.state_bytes) / 4
    packs = least < budget and not config.pack and not config.packing_problems()
    if packs and predict_with("--pack", pack=True).evaluated_bytes <= budget:
        return "it fits with --pack"
    fitting = []
    recomputing: dict[str, Any] = {"recompute": True, "pack": False}
    recompute = "--recompute" + " instead of --pack" * config.pack
    kinds: list[tuple[str, dict[str, Any], PeakReport]] = [("", {}, peak)]
    if not config.recompute:
        recomputed = predict_with(recompute, **recomputing)
        if recomputed.evaluated_bytes <= budget:
            fitting.append(recompute)
        else:
            kinds.append((f" {recompute}", recomputing, recomputed))
    for options, changes, full in kinds:
        for batch in (b for b in range(config.batch - 1, 0, -1) if config.batch % b == 0):
            # what grows with the batch is at most all that is not state
            share = batch / config.batch
            if full.state_bytes + share * (full.evaluated_bytes - full.state_bytes) > budget:
                continue
            accum = config.accum * config.batch // batch
            smaller = f"--batch {batch} --accum {accum}{options}"
            if predict_with(smaller, batch=batch, accum=accum, **changes).evaluated_bytes <= budget:
                fitting.append(smaller)
                break
        if fitting:
            return f"it fits with {', or with '.join(fitting)}"
    return no_fit


def audit(
    config: TrainConfig,
    snapshot: Path | None = None,
    predicted: Callable[[PeakReport], None] = lambda peak: None,
    progress: Callable[[str], None] = lambda text: None,
    *,
    group: Group | None = None,
    state_bytes: int | None = None,
    floats: bool = False,
) -> AuditReport:
    """Run the steps of a run on its text, and measure memory throughout.

    Args:
        config: configuration of a run of at least two steps.
        snapshot: path for torch's record of all CUDA allocations.
        predicted: called with the predicted peak before it is measured.
        progress: called before each step, predicted or measured.
        group: the processes of the run; None is a single process.
        state_bytes: size of this process's share of the state; None is the whole state.
        floats: whether to list all float tensors of the first step. Modules then keep their
            arguments alive for longer, so another tensor may cause the peak of the forward pass.

    Raises:
        ArbError: there is not enough memory, or the snapshot cannot be written.
    """
    # refuses a text that is shorter than the context, before a step of this size is traced
    texts = open_texts(config.data, config.val, seed=config.seed, context=config.model.ctx)
    check_memory(config)
    group = group or Group()
    predicted_peak = predict_peak(
        config,
        rank=group.rank,
        size=group.size,
        progress=lambda stage: progress(f"predicting {stage}"),
    )
    predicted(predicted_peak)
    teacher = read_teacher(config)
    checkpoint = teacher and teacher.checkpoint
    tensors, float_report = LiveTensors(torch.device(config.device)), None
    smaller = "use a smaller `--batch`, `--ctx` or `--preset`"
    with (
        explained_out_of_memory(f"a step needs {predicted_peak.peak_bytes:,} bytes: {smaller}"),
        _recorded(snapshot),
        deterministic(),
        fresh_tables(),
        use_backend(config.backend),
        tensors,
    ):
        trainer = Trainer(config, texts, group=group, teacher=checkpoint)
        levels = [read_level(tensors, 0, "load")]
        loaded_bytes = tensors.bytes
        loaded_bytes -= measure(trainer.model, trainer.updater).counter_bytes
        if trainer.teacher:
            loaded_bytes -= sum(part.nbytes for part in trainer.teacher.buffers())
        started = time.perf_counter()
        for step in range(1, config.steps + 1):
            progress(f"step {step} of {config.steps}")
            if step == 1 and floats:
                watch = FloatTensors(tensors.device, trainer.model)
                with watch.watching():
                    levels += _watched_step(trainer, tensors, step, watch.reached)
                float_report = watch.report()
            else:
                levels += _watched_step(trainer, tensors, step)
        seconds = time.perf_counter() - started
    peak_bytes = max(level.peak_bytes for level in levels[1:])
    state, measured = predict_run(config), measure(trainer.model, trainer.updater)
    expected = state.total.state_bytes if state_bytes is None else state_bytes
    checks = (
        _check_floats(measured),
        _check_prediction(expected, measured, loaded_bytes),
        check_levels([level.live_bytes for level in levels if level.stage == "end"]),
    )
    return AuditReport(
        **{name: getattr(config, name) for name in RUN_SETTINGS},
        predicted=state,
        predicted_peak=predicted_peak,
        measured=measured,
        seconds=round(seconds, 1),
        levels=tuple(levels),
        peak_bytes=peak_bytes,
        peak_error=predicted_peak.peak_bytes / peak_bytes - 1,
        checks=checks,
        passed=all(check.passed for check in checks),
        floats=float_report,
    )


def _watched_step(
    trainer: Trainer,
    tensors: LiveTensors,
    step: int,
    reached: Callable[[str], None] = lambda stage: None,
) -> list[Level]:
    """Run a step, measure memory after each stage, and call `reached` with the stage."""
    levels = []

    def read(stage: str) -> None:
        levels.append(read_level(tensors, step, stage))
        reached(stage)

    loss = float(trainer.train_step(read)) / trainer.texts.train.symbol_bytes
    return [*levels, dataclasses.replace(read_level(tensors, step, "end"), loss=loss)]


def read_level(tensors: LiveTensors, step: int, stage: str) -> Level:
    """Measure the stage that ends, and begin the next one."""
    if stage in ("load", "end"):
        tensors.find()
    device = tensors.device
    if device.type == "cuda":
        live, reserved = torch.cuda.memory_allocated(device), torch.cuda.memory_reserved(device)
        peak = torch.cuda.max_memory_allocated(device)
        torch.cuda.reset_peak_memory_stats(device)
    else:
        live, peak, reserved = tensors.bytes, tensors.stage_peak, None
    tensors.start_stage()
    return Level(step=step, stage=stage, live_bytes=live, reserved_bytes=reserved, peak_bytes=peak)


def _check_floats(measured: MeasuredState) -> Check:
    names = ", ".join(measured.float_names[:3])
    return Check(
        name="no-float-state",
        passed=not measured.float_names,
        detail=f"{measured.float_parameters} trainable float parameters,"
        f" {measured.float_buffers} float buffers{': ' if names else ''}{names}",
    )


def _check_prediction(expected: int, measured: MeasuredState, loaded_bytes: int) -> Check:
    """Compare the predicted state with that of the model, and with all live memory after loading.

    Counters are left out of both.
    """
    measured_bytes = measured.state_bytes
    hidden = loaded_bytes - measured_bytes
    error = max(abs(measured_bytes - expected), abs(loaded_bytes - expected)) / expected
    detail = f"{expected:,} bytes predicted, {measured_bytes:,} measured in the model"
    if hidden > 0:
        detail += f", {hidden:,} outside it"
    return Check(name="state-as-predicted", passed=error <= TOLERANCE, detail=detail)


def check_levels(ends: list[int]) -> Check:
    """Check that live memory is the same at the end of each step, in bytes."""
    passed = all(end == ends[0] for end in ends)
    detail = f"{ends[0]:,} bytes after every step"
    if not passed:
        detail = "after the steps: " + ", ".join(f"{end:,}" for end in ends) + " bytes"
    return Check(name="returns-to-level", passed=passed, detail=detail)


@contextmanager
def _recorded(snapshot: Path | None) -> Iterator[None]:
    """Record the events of the CUDA allocator, and write them even if memory runs out."""
    if snapshot is None:
        yield
        return
    torch.cuda.memory._record_memory_history(max_entries=1_000_000)
    try:
        yield
    finally:
        try:
            events = torch.cuda.memory._snapshot()
            write_file(
                snapshot, lambda file: pickle.dump(events, file), "choose another `--snapshot`"
            )
        finally:
            torch.cuda.memory._record_memory_history(enabled=None)
