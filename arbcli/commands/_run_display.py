"""Progress display of `arb train`."""

import math
import time
from collections.abc import Sequence
from pathlib import Path
from threading import Timer
from typing import TYPE_CHECKING, Any

from arbcli.base.output import LiveLine, OutputError, bytes_text, clock, emit_json, note, note_text
from arbcli.config.model import VOCABULARY
from arbcli.config.training import option_word
from arbcli.training.observer import Observer

if TYPE_CHECKING:
    from arbcli.training.record import FirstStep, Record, TrainReport
    from arbcli.training.trainer import Trainer


ESTIMATE_AFTER = 10.0
"""Seconds of training after which the estimated duration is printed, once a step is complete."""
LONG_SECONDS = 15 * 60
"""Estimated duration above which a run on a CPU prints faster alternatives, in seconds."""
SMALL_WEIGHTS = 4e6
"""Number of weights below which no preset is substantially smaller."""
BAR_COLUMNS = 24
NOT_SAVED = "nothing was saved"
NO_SAMPLE = (
    "none, because the held-out text is mostly sounds and pictures\n"
    "continue a sound or picture with: arb generate auto --prompt-file FILE --out FILE"
)


class RunDisplay(Observer):
    """Shows the progress of a run on stderr, and with `as_json` its records on stdout.

    Args:
        quiet: whether to hide progress.
        as_json: whether to print each record as a JSON object.
        advises: whether to suggest faster alternatives if a run on a CPU takes long.
        is_first: whether this is the first process of a run; others print nothing.
    """

    def __init__(
        self, *, quiet: bool, as_json: bool, advises: bool = False, is_first: bool = True
    ) -> None:
        self.quiet, self.as_json = quiet or not is_first, as_json and is_first
        self.advises, self.is_first = advises, is_first
        self.line = LiveLine(refreshes=True)
        self._step = self._first_step = 0
        """Number of completed steps, in total and when this process started."""
        self._start_time = 0.0
        self._remaining: tuple[float, float] | None = None
        """Remaining seconds at the last record, and the time of the record."""
        self._value_texts: list[str] = []
        """Formatted values of the last record."""
        self._estimate: Timer | None = None
        self.symbols, self.symbol_bytes = VOCABULARY, 1.0

    def __enter__(self) -> "RunDisplay":
        self.line.__enter__()
        return self

    def __exit__(self, *exception: object) -> None:
        if self._estimate:
            self._estimate.cancel()
            self._estimate = None
        self.line.__exit__(*exception)

    def wait(self, text: str) -> None:
        """Show a temporary line until the next one."""
        if not self.quiet:
            self.line.show_wait(text)

    def started(self, run: Path | None, trainer: "Trainer", facts: dict[str, Any]) -> None:
        if self.quiet:
            return
        from arbcli.interop.huggingface.dense import shape_of  # torch is loaded by now
        from arbcli.kernels.runtime import native

        config, text = trainer.config, facts["text"]
        self.steps, self.keeps_lines = config.steps, config.log_every is not None
        self.is_saved = run is not None
        model = config.model
        self.symbols = model.vocabulary
        self._train_bytes = text["train_bytes"]
        num_weights = trainer.num_weights
        weights, optimizer = option_word("--weights", config), option_word("--optimizer", config)
        packed = model.weights == "ternary"
        storage = f"rule {model.rule_text}, {model.scale_type}, " if packed else ""
        note(f"run     {run or 'none: with `--no-save` nothing is saved'}")
        note(f"text    {text['description']}: {text['train_bytes']:,} bytes to train on,")
        note(f"        {text['val_bytes']:,} held out, order-0 entropy {text['entropy']:.3f} nats")
        if text.get("tokenizer"):
            train, self.symbol_bytes = trainer.texts.train, trainer.texts.val.symbol_bytes
            if train.packs:  # windows contain parts of records
                self._train_bytes = train.window_bytes(range(train.windows(0)), 0)
            note(
                f"        as {len(train):,} tokens of {train.symbol_bytes:.2f} bytes to train on,"
                f" of a vocabulary of {model.vocabulary:,}"
            )
        note(f"model   {num_weights:,} {weights} weights, {storage}ctx {model.ctx}")
        if config.log_every == 1:
            parameters, buffers = trainer.num_floats
            note(
                f"        float parameters {parameters:,}, float buffers {buffers:,},"
                f" logical ternary weights {num_weights if packed else 0:,}"
            )
        shape = shape_of(model)
        if self.is_saved and shape and shape.sub_norms:
            note("        never a GGUF file, as llama.cpp has no sub-norms: see `--no-sub-norms`")
        method = f"{optimizer} at lr {config.lr:g}" if optimizer else model.rule_text
        windows = config.batch * config.accum
        note(f"steps   {config.steps:,} of {windows:,} windows, by {method}, seed {config.seed}")
        hardware = f"{config.device}, backend {config.backend}, {config.compute}"
        if (size := trainer.group.size) > 1:
            hardware += f", {size} processes with {config.accum // size} of {config.accum} batches"
        note(f"device  {hardware}")
        if config.device == "cpu" and config.backend == "torch" and not native.available():
            note(f"        `native` would be faster: {native.why_not()}")
        if trainer.step:
            note(f"resumed at step {trainer.step}")
        self._advice = ""
        if self.advises and config.device == "cpu":
            smaller = "" if num_weights < SMALL_WEIGHTS else "`--preset tiny` is a smaller model, "
            self._advice = f"{smaller}`--minutes 10` trains as many steps as fit"
        self._step = self._first_step = trainer.step
        self._start_time, self._remaining = time.perf_counter(), None
        self.line.follow(self._progress)
        if self._estimate:  # of an earlier attempt to start
            self._estimate.cancel()
        self._start_timer()

    def stepped(self, step: int) -> None:
        self._step = step

    def _seconds_left(self) -> tuple[str, float]:
        """Estimate the remaining time by the last record, or else by the steps so far.

        Returns:
            A prefix, `more than ` before the first step is complete, else empty; and seconds.
        """
        now, num_steps = time.perf_counter(), self._step - self._first_step
        if self._remaining:
            seconds, recorded_at = self._remaining
            return "", max(0.0, seconds - (now - recorded_at))
        seconds = now - self._start_time
        if num_steps:
            return "", seconds / num_steps * (self.steps - self._step)
        return "more than ", seconds * (self.steps - self._step - 1)

    def _start_timer(self) -> None:
        self._estimate = Timer(ESTIMATE_AFTER, self.print_estimate)
        self._estimate.daemon = True
        self._estimate.start()

    def print_estimate(self) -> None:
        """Print the estimated duration once a step is complete, and alternatives if it is long."""
        if self._step == self._first_step:
            if self._estimate:  # the run has not ended
                self._start_timer()
            return
        _, seconds = self._seconds_left()
        note(f"time    about {clock(seconds)} to step {self.steps:,}")
        if self._advice and seconds > LONG_SECONDS:
            note(f"        quicker, from the start: {self._advice}")

    def _progress(self, width: int) -> str:
        """Return the status line between records, of at most `width` columns."""
        prefix, seconds = self._seconds_left()
        filled = self._step * BAR_COLUMNS // self.steps
        bar = f"[{'#' * filled}{'.' * (BAR_COLUMNS - filled)}]"
        parts = [f"step {self._step}/{self.steps}", f"{prefix}{clock(seconds)} left", bar]
        return fit_width([*parts, *self._value_texts], width)

    def first_step(self, first: "FirstStep") -> None:
        if self.quiet:
            return
        bits = first.loss / math.log(2)
        note(f"first   step {first.step} took {first.seconds:.2f} s{_compile_time(first)}")
        note(f"        the loss before it was {first.loss:.4f} nats = {bits:.4f} bits a byte")

    def recorded(self, record: "Record") -> None:
        self._emit(record.as_json())
        if self.quiet:
            return
        if record.seconds_left is not None:
            self._remaining = record.seconds_left, time.perf_counter()
        self._value_texts = _value_texts(record, record.bytes_seen / self._train_bytes)
        parts = [f"step {record.step}/{self.steps}", *self._value_texts]
        keep = self.keeps_lines or record.val_loss is not None
        if self.line.is_live:
            if keep:
                self.line.show(fit_width(parts, self.line.width), keep=True)
        else:
            if record.seconds_left is not None:
                parts.insert(1, f"{clock(record.seconds_left)} left")
            self.line.show("  ".join(parts), keep=keep)
        gauges = {name: value for name, value in record.gauges.items() if name != "wire"}
        if record.val_loss is not None and gauges:
            self.line.show(_gauges(gauges), keep=True)
        if record.sample is not None:
            self.line.show(f"\nsample at step {record.step}\n{record.sample}\n", keep=True)

    def _uniform(self) -> str:
        """Format the loss of a uniform prediction."""
        nats = math.log(self.symbols) / self.symbol_bytes
        unit = "" if self.symbol_bytes == 1 else f" over {self.symbol_bytes:.2f} bytes a token"
        return f"{nats:.4f} nats is uniform, ln {self.symbols}{unit}"

    def _emit(self, value: dict[str, Any]) -> None:
        """Print a JSON object with `as_json`, until stdout is closed."""
        if not self.as_json:
            return
        try:
            emit_json(value)
        except OutputError as error:
            self.as_json = False
            suffix = ", and its directory has every record" if self.is_saved else ""
            note(f"{error}; the run continues{suffix}")

    def noted(self, message: str) -> None:
        if self.is_first:
            note(message)

    def ended(self, report: "TrainReport") -> None:
        """Remove the progress line; `finished` prints the result."""
        self.wait("")

    def finished(self, report: "TrainReport") -> None:
        """Print the result of the run."""
        self._emit(report.as_json())
        if report.stopped_by:
            note(f"stopped by {report.stopped_by} after step {report.steps}")
            if report.run is None:
                note(NOT_SAVED)
            return
        if report.seconds:  # 0 if the run was already finished
            if not self.quiet:
                note_text(f"\nsample\n{report.sample or NO_SAMPLE}\n")
            if report.val_loss is None:
                note("held-out loss  none: with `--eval-every 0` nothing is evaluated")
            else:
                bits = report.bits_per_byte
                note(f"held-out loss  {report.val_loss:.4f} nats = {bits:.4f} bits a byte")
        if report.seconds and not self.quiet:
            note(f"               {report.entropy:.4f} nats is the text's order-0 entropy,")
            note(f"               {self._uniform()}")
            note(f"time           {clock(report.seconds)}")
        note(f"checkpoint     {report.checkpoint or f'none: {NOT_SAVED}'}")


def _compile_time(first: "FirstStep") -> str:
    """Format the compile time of the first step."""
    if first.compile_seconds is None:
        return ", in which torch compiles the float baseline"
    compiled, loaded = first.kernels_compiled, first.kernels_loaded
    cost = f": {first.compile_seconds:.2f} s to"
    if compiled:
        also = f" and load {loaded:,}" if loaded else ""
        return f"{cost} compile {compiled:,} kernels{also}"
    return f"{cost} load {loaded:,} kernels that were compiled before" if loaded else ""


def fit_width(parts: Sequence[str], width: int) -> str:
    """Join as many leading parts as fit into `width` columns, and at least the first one."""
    line = parts[0]
    for part in parts[1:]:
        if len(line) + 2 + len(part) > width:
            break
        line += f"  {part}"
    return line


def _value_texts(record: "Record", epochs: float) -> list[str]:
    """Format the values of a record, most important first, after `epochs` passes over the text."""
    shown = []
    if record.val_loss is not None:
        shown.append(f"held-out {record.val_loss:.4f}")
    shown += [f"loss {record.loss:.3f} nats", f"{record.bits_per_byte:.3f} bits"]
    if record.token_loss is not None:
        shown.append(f"{record.token_loss:.3f} nats a token")
    shown += [f"lr {record.lr:.3g}", f"{epochs:.3g} epochs"]
    if record.bytes_per_second is not None:
        shown.append(f"{record.bytes_per_second:,.0f} bytes/s")
    shown.append(f"{clock(record.seconds)} elapsed")
    shown.append(f"{bytes_text(record.state_bytes)} state, {bytes_text(record.peak_bytes)} peak")
    if record.mfu is not None:
        shown.append(f"{record.mfu:.1%} MFU")
    if record.flip_share is not None:
        shown.append(f"{record.flip_share:.2%} flipped")
    if (length := record.gauges.get("chunk_length")) is not None:
        shown.append(f"{length:.2f} bytes a chunk")
    if (wire := record.gauges.get("wire")) is not None:
        shown.append(f"{wire:.2f} bytes a weight on the wire")
    return shown


def _gauges(gauges: dict[str, float]) -> str:
    """Format the gauges of a model, such as the load of the fullest expert."""
    shown = {
        "alive_codes": "{:.1%} of codes alive",
        "alive_knowledge": "{:.1%} of knowledge alive",
        "fullest_expert": "fullest expert {:.1f} times the mean",
        "edges": "{:.1%} of edges taken",
        "chunk_length": "{:.2f} bytes a chunk",
        "chunk_length_2": "{:.2f} chunks in one of the second stage",
        "joined": "{:.1%} of chunks joined for want of slots",
    }
    return "  " + ", ".join(shown.get(name, name + " {}").format(v) for name, v in gauges.items())
