"""Runs: a directory with `config.json`, `metrics.jsonl` and checkpoints; start, resume, load."""

import dataclasses
import json
import math
import os
import platform
import signal
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from arbcli import __version__
from arbcli.checkpoint import (
    check_layout,
    checkpoint_path,
    checkpoints,
    latest_checkpoint,
    load_checkpoint,
    read_json,
    run_lock,
    save_checkpoint,
    write_json,
)
from arbcli.config.model import GraphConfig
from arbcli.config.model import preset as model_preset
from arbcli.data import Texts, entropy, open_texts
from arbcli.device import (
    check_compute,
    default_compute,
    deterministic,
    explained_out_of_memory,
    peak_bytes,
    resolve_backend,
    resolve_device,
)
from arbcli.errors import ArbError
from arbcli.infer.generation import Sampling, generate
from arbcli.model.build import build_model, model_config_from
from arbcli.model.language_model import LanguageModel
from arbcli.rules import find_rule
from arbcli.train.trainer import COMPUTE, TrainConfig, Trainer, config_from, schedule, text_digest

LOG_EVERY = 10
"""Steps between records; reading a loss makes a GPU wait."""
MAX_NONFINITE_STEPS = 3
TIMED_STEPS = 20
"""Steps that are timed, and thrown away, to turn minutes into a number of steps."""
SAMPLE_BYTES = 256
FLOAT_LR = {
    ("float", "adamw"): 1e-3,
    ("float", "muon"): 3e-3,
    ("ste", "adamw"): 3e-3,
    ("ste", "muon"): 3e-3,
}
"""Default `--lr` of the twins, by weights and optimizer."""
PRESET_LR = {("arb-3b", "factored"): 0.1}
"""Default `--lr` where a preset needs another than its rule's, by preset and direction.

With the factored direction a wide model takes smaller steps: at the rule's own its stream grows
manifold, and what is chosen in it, experts and codes, becomes the same for every position.
"""
PROMPT = b"\n"


@dataclass(frozen=True, slots=True, kw_only=True)
class Record:
    """One line of `metrics.jsonl`."""

    step: int
    """Steps done."""
    loss: float
    """Mean since the last record, nats a byte."""
    bits_per_byte: float
    """The same in bits."""
    val_loss: float | None
    """Nats a byte of held-out text, where it was evaluated."""
    lr: float
    """Learning rate of the last step."""
    bytes_per_second: float
    """Text seen a second since the last record, evaluation not counted."""
    flip_share: float | None
    """Share of the trits that changed in a step, on average since the last record."""
    state_bytes: int
    """What survives a step: weights and whatever the rule or the optimizer keeps."""
    peak_bytes: int
    """The most memory held at once: of the CUDA allocator, or of the process on a CPU."""
    seconds_left: float
    nonfinite_steps: int
    """Steps so far in which a gradient was not finite."""
    parts: dict[str, float]
    """What else the last step minimised, by name: see `LOSS_WEIGHTS`."""
    gauges: dict[str, float]
    """What the model measures of itself."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainReport:
    """What a finished or interrupted run reports."""

    run: str
    checkpoint: str | None
    """None for a float twin, which is measured and not kept."""
    steps: int
    val_loss: float | None
    """Nats a byte; None if the run was stopped before its last evaluation."""
    bits_per_byte: float | None
    entropy: float
    """Order-0 entropy of the held-out text, nats a byte."""
    seconds: float
    sample: str
    stopped_by: str | None
    """Name of the signal that ended the run early."""


class _Signals:
    """Remember the first SIGINT or SIGTERM; a second one has its usual effect."""

    def __init__(self) -> None:
        self.received: signal.Signals | None = None
        self._before: dict[int, Any] = {}

    def __enter__(self) -> "_Signals":
        for number in (signal.SIGINT, signal.SIGTERM):
            try:
                self._before[number] = signal.signal(number, self._receive)
            except ValueError:  # only the main thread may listen
                break
        return self

    def __exit__(self, *_: object) -> None:
        self._restore()

    def _receive(self, number: int, _frame: object) -> None:
        self.received = signal.Signals(number)
        self._restore()

    def _restore(self) -> None:
        while self._before:
            signal.signal(*self._before.popitem())


class Observer:
    """Is told what happens in a run; what it does with that is its own affair."""

    def started(self, run: Path, trainer: Trainer, facts: dict[str, Any]) -> None:
        """A run begins, or goes on, at `trainer.step`; `facts` is what `config.json` says."""

    def recorded(self, record: Record) -> None:
        """A record was written."""

    def noted(self, message: str) -> None:
        """Something that a person should know."""


def train(
    config: TrainConfig, run: Path, observer: Observer, *, minutes: float | None = None
) -> TrainReport:
    """Start a run in a new directory.

    Args:
        config: what to compute.
        run: directory to make; it must not hold a run.
        observer: is told of progress.
        minutes: sets the number of steps by timing a few.

    Raises:
        ArbError: something the user can fix; whatever was saved before is intact.
    """
    if (run / "config.json").exists():
        raise ArbError(
            f"`{run}` holds a run already",
            hint=f"continue it with `--resume {run}`, or choose another `--out`",
        )
    texts = open_texts(config.data, config.val, seed=config.seed, context=config.model.ctx)
    _make_directory(run)
    with run_lock(run), deterministic():
        if minutes is not None:
            config = _fit_to_minutes(config, texts, minutes)
        facts = _facts(config, texts)
        trainer = _build(config, texts)
        write_json(run / "config.json", facts)
        return _run(trainer, run, facts, observer)


def new_config(
    *, preset: str = "tiny", device: str | None = None, backend: str | None = None, **given: Any
) -> TrainConfig:
    """Build a configuration from the options that were given, and defaults for the rest.

    Args:
        preset: name of a preset.
        device: `cpu` or `cuda`; None is the GPU if there is one.
        backend: None is the device's own.
        given: fields of `TrainConfig` and of the preset; `tscale_type` is `scale_type`.

    Raises:
        ArbError: they do not fit each other, or this machine.
    """
    place = resolve_device(device)
    if "tscale_type" in given:
        given["scale_type"] = given.pop("tscale_type")
    names = {field.name for field in dataclasses.fields(GraphConfig)}
    shape = {name: given.pop(name) for name in list(given) if name in names}
    model = model_preset(preset, **shape)
    ternary = model.weights == "ternary"
    if ternary and "optimizer" in given:
        raise ArbError(
            "ternary weights are stepped by a rule, not by an optimizer",
            hint="use `--rule`, or `--weights float` or `ste`",
        )
    given.setdefault("optimizer", "rule" if ternary else "adamw")
    twin = (model.weights, given["optimizer"])
    own_lr = find_rule(model.rule).lr if ternary else FLOAT_LR.get(twin, 1e-3)
    given.setdefault("lr", PRESET_LR.get((preset, model.direction), own_lr))
    given.setdefault("compute", default_compute(place))
    check_compute(given["compute"], place)
    backend = resolve_backend(backend, place)
    for name in ("data", "val"):
        given[name] = tuple(str(entry) for entry in given.get(name, ()))
    return TrainConfig(model=model, device=str(place), backend=backend, **given)


def resume(
    path: Path, observer: Observer, *, device: str | None = None, backend: str | None = None
) -> TrainReport:
    """Continue a run from its newest intact checkpoint, or from the checkpoint that is named.

    Args:
        path: a run directory, or a checkpoint in one.
        observer: is told of progress.
        device: where to go on; None is where it was. The same bits come only from the same kind
            of machine.
        backend: what runs the kernels; None is what ran them.

    Raises:
        ArbError: there is nothing to continue, or the text has changed.
    """
    if not path.exists():
        raise ArbError(f"there is no run at `{path}`", hint="name a run directory or a checkpoint")
    run = path if path.is_dir() else path.parent
    facts = read_json(run / "config.json")
    config = config_from(facts)
    place = resolve_device(device or config.device)
    backend = resolve_backend(backend or (None if device else config.backend), place)
    check_compute(config.compute, place)
    config = dataclasses.replace(config, device=str(place), backend=backend)
    if config.model.weights != "ternary":
        raise ArbError("a float twin keeps no checkpoint", hint="start it again with `--out`")
    with run_lock(run), deterministic():
        texts = open_texts(config.data, config.val, seed=config.seed, context=config.model.ctx)
        whole_run = path == run
        checkpoint = latest_checkpoint(run, observer.noted) if whole_run else load_checkpoint(path)
        if checkpoint.data["digest"] != text_digest(texts):
            raise ArbError(
                f"the text is not the one that `{run}` was trained on",
                hint="restore it, or start a new run on the new text with `--out`",
            )
        trainer = _build(config, texts)
        trainer.restore(checkpoint)
        for later in checkpoints(run):
            if int(later.stem.removeprefix("step-")) > trainer.step:
                later.unlink()
        _truncate_metrics(run / "metrics.jsonl", trainer.step)
        return _run(trainer, run, facts, observer)


def _build(config: TrainConfig, texts: Texts) -> Trainer:
    with explained_out_of_memory():
        return Trainer(config, texts, capture=True)


def _make_directory(run: Path) -> None:
    try:
        run.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ArbError(
            f"cannot make `{run}`: {error.strerror}", hint="choose another `--out`"
        ) from error


def _fit_to_minutes(config: TrainConfig, texts: Texts, minutes: float) -> TrainConfig:
    """Turn minutes into steps by timing a few, on a trainer that is thrown away."""
    trainer = _build(config, texts)
    trainer.train_step()
    started = time.perf_counter()
    for _ in range(TIMED_STEPS):
        loss = trainer.train_step()
    float(loss)
    seconds = (time.perf_counter() - started) / TIMED_STEPS
    return dataclasses.replace(config, steps=max(1, int(minutes * 60 / seconds)))


def _facts(config: TrainConfig, texts: Texts) -> dict[str, Any]:
    """Gather what `config.json` holds."""
    return {
        "config": dataclasses.asdict(config),
        "text": {
            "description": texts.description,
            "digest": text_digest(texts),
            "entropy": entropy(texts.val),
            "train_bytes": len(texts.train),
            "val_bytes": len(texts.val),
        },
        "versions": {
            "arb": __version__,
            "python": platform.python_version(),
            "torch": torch.__version__,
        },
    }


def _truncate_metrics(path: Path, step: int) -> None:
    """Drop the records after `step`, and one that was cut off; they will be written again."""
    if not path.exists():
        return
    kept = []
    for line in path.read_text().splitlines():
        try:
            if json.loads(line)["step"] <= step:
                kept.append(line + "\n")
        except (ValueError, KeyError):
            break
    path.write_text("".join(kept))


def _run(trainer: Trainer, run: Path, facts: dict[str, Any], observer: Observer) -> TrainReport:
    with explained_out_of_memory():
        return _Loop(trainer, run, facts, observer).run()


class _Loop:
    """The steps of a run from where its trainer stands to the end, or to a signal."""

    def __init__(
        self, trainer: Trainer, run: Path, facts: dict[str, Any], observer: Observer
    ) -> None:
        self.trainer, self.run_path, self.facts, self.observer = trainer, run, facts, observer
        self.config = trainer.config
        self.losses: list[Tensor] = []
        self.started = self.last_record = time.perf_counter()
        self.paused = 0.0

    def run(self) -> TrainReport:
        """Train to the end, or to a signal; then save, evaluate and sample."""
        trainer, config = self.trainer, self.config
        self.observer.started(self.run_path, trainer, self.facts)
        val_loss, sample = None, ""
        with _Signals() as signals:
            while trainer.step < config.steps and not signals.received:
                self.losses.append(trainer.train_step())
                if trainer.step < config.steps:
                    self._after_step(trainer.step)
            if self._unsaved():
                self._save()
            if not signals.received:
                val_loss = self._evaluate()
            if self.losses:
                self._record(val_loss)
            if not signals.received:
                sample = self._sample()
        saved = checkpoints(self.run_path)
        return TrainReport(
            run=str(self.run_path),
            checkpoint=str(saved[0]) if saved else None,
            steps=trainer.step,
            val_loss=val_loss,
            bits_per_byte=None if val_loss is None else val_loss / math.log(2),
            entropy=self.facts["text"]["entropy"],
            seconds=time.perf_counter() - self.started,
            sample=sample,
            stopped_by=signals.received.name if signals.received else None,
        )

    def _unsaved(self) -> bool:
        newest = next(iter(checkpoints(self.run_path)), None)
        return newest is None or newest != checkpoint_path(self.run_path, self.trainer.step)

    def _after_step(self, step: int) -> None:
        """Do what is due after a step that is not the last."""
        if step % self.config.save_every == 0:
            self._save()
        evaluating = step % self.config.eval_every == 0
        if evaluating or step % LOG_EVERY == 0:
            self._record(self._evaluate() if evaluating else None)

    def _sample(self) -> str:
        model, config = self.trainer.model, self.config
        sampling = Sampling(seed=config.seed)
        text = generate(model, PROMPT, SAMPLE_BYTES, sampling, backend=config.backend)
        return b"".join(text).decode(errors="replace")

    @contextmanager
    def _not_timed(self) -> Iterator[None]:
        if self.losses:
            float(self.losses[-1])  # let a GPU finish the steps that are timed
        started = time.perf_counter()
        yield
        self.paused += time.perf_counter() - started

    def _save(self) -> None:
        if self.trainer.updater is None:
            return
        with self._not_timed():
            checkpoint = self.trainer.checkpoint(self.facts["text"]["digest"])
            save_checkpoint(self.run_path, checkpoint)

    def _evaluate(self) -> float:
        with self._not_timed():
            return self.trainer.evaluate()

    def _record(self, val_loss: float | None) -> None:
        trainer, config = self.trainer, self.config
        loss = float(torch.stack(self.losses).mean())  # waits for the GPU
        now, steps = time.perf_counter(), len(self.losses)
        seconds = max(now - self.last_record - self.paused, 1e-9) / steps
        flip_share, nonfinite = None, 0
        if trainer.updater:
            flip_share = trainer.updater.take_flips() / steps / trainer.updater.num_weights
            nonfinite = trainer.updater.counters()["nonfinite_steps"]
        record = Record(
            step=trainer.step,
            loss=loss,
            bits_per_byte=loss / math.log(2),
            val_loss=val_loss,
            lr=config.lr * schedule(trainer.step - 1, config.steps, config.warmup),
            bytes_per_second=config.batch * config.accum * config.model.ctx / seconds,
            flip_share=flip_share,
            state_bytes=trainer.state_bytes(),
            peak_bytes=peak_bytes(trainer.device),
            seconds_left=seconds * (config.steps - trainer.step),
            nonfinite_steps=nonfinite,
            parts={k: float(v) for k, v in trainer.loss_parts.items() if k != "text"},
            gauges=trainer.model.gauges(),
        )
        self.losses.clear()
        self.last_record, self.paused = now, 0.0
        try:
            with (self.run_path / "metrics.jsonl").open("a") as file:
                file.write(json.dumps(dataclasses.asdict(record)) + "\n")
        except OSError as error:
            raise ArbError(
                f"cannot write `{self.run_path / 'metrics.jsonl'}`: {error.strerror}",
                hint=f"free some space, then continue with `--resume {self.run_path}`",
            ) from error
        self.observer.recorded(record)
        if nonfinite >= MAX_NONFINITE_STEPS:
            raise ArbError(
                f"{nonfinite} steps had gradients that are not finite; the last was before step"
                f" {trainer.step}",
                hint=f"the checkpoints in `{self.run_path}` are intact; try a smaller `--lr`",
            )
        if not math.isfinite(loss) and trainer.updater is None:
            raise ArbError(f"the loss is {loss}", hint="try a smaller `--lr`")


def new_run_path(config: TrainConfig, root: Path = Path("runs")) -> Path:
    """Name the next free run directory: `runs/003-256x4-moment` and so on."""
    kind = config.model.rule if config.model.weights == "ternary" else config.model.weights
    names = os.listdir(root) if root.is_dir() else []
    number = max((int(name[:3]) for name in names if name[:3].isdigit()), default=0) + 1
    return root / f"{number:03d}-{config.model.dim}x{config.model.layers}-{kind}"


def latest_run(root: Path = Path("runs")) -> Path:
    """Find the run directory that was written to last.

    Raises:
        ArbError: there is none.
    """
    configs = sorted(root.glob("*/config.json"), key=lambda path: path.parent.stat().st_mtime)
    if not configs:
        raise ArbError(
            f"there is no run in `{root}`", hint="name one: `--resume PATH`, or start without it"
        )
    return configs[-1].parent


def load(path: Path | str, *, device: str | None = None) -> LanguageModel:
    """Load a trained model.

    Args:
        path: a run directory, whose newest intact checkpoint is taken, or a checkpoint.
        device: where to put it; None is the GPU if there is one.

    Returns:
        The model, ready to generate, evaluate or train on.

    Raises:
        ArbError: there is no checkpoint, or it is damaged.
    """
    return load_named(Path(path), resolve_device(device), lambda _: None)[0]


def load_named(
    path: Path, place: torch.device, note: Callable[[str], None]
) -> tuple[LanguageModel, str]:
    """Load a trained model, and find out which checkpoint that is.

    Args:
        path: a run directory, whose newest intact checkpoint is taken, or a checkpoint.
        place: where to put it.
        note: is told of each checkpoint that is passed over.

    Raises:
        ArbError: there is no checkpoint, or it is damaged.
    """
    whole_run = path.is_dir()
    checkpoint = latest_checkpoint(path, note) if whole_run else load_checkpoint(path)
    name = checkpoint_path(path, checkpoint.step) if whole_run else path
    dtype = COMPUTE[default_compute(place)]
    try:
        config = model_config_from(checkpoint.config)
    except TypeError as error:
        raise ArbError(
            f"`{path}` holds a model of another version of arb: {error}",
            hint="load it with the version that wrote it",
        ) from None
    with torch.device(place):
        model = build_model(config, dtype)
    check_layout(checkpoint.tensors, model.state_dict())
    model.load_state_dict(checkpoint.tensors)
    return model, str(name)
