"""What `arb train` shows of a run."""

import math
from pathlib import Path
from typing import TYPE_CHECKING, Any

from arbcli.output import LiveLine, OutputError, bytes_text, emit_json, note, note_text

if TYPE_CHECKING:
    from arbcli.train.record import FirstStep, Record, TrainReport
    from arbcli.train.trainer import Trainer


NOT_SAVED = "nothing was saved"


class RunDisplay:
    """Shows a run: a live line and tables for a person, or a JSON object a record."""

    def __init__(self, *, quiet: bool, as_json: bool) -> None:
        self.quiet, self.as_json = quiet, as_json
        self.line = LiveLine()

    def __enter__(self) -> "RunDisplay":
        self.line.__enter__()
        return self

    def __exit__(self, *exception: object) -> None:
        self.line.__exit__(*exception)

    def wait(self, what: str) -> None:
        """Show what is waited for, until there is something else to show."""
        if not self.quiet:
            self.line.show_wait(what)

    def started(self, run: Path | None, trainer: "Trainer", facts: dict[str, Any]) -> None:
        if self.quiet:
            return
        from arbcli.kernels.runtime import native  # with torch, which is loaded by now

        config, text = trainer.config, facts["text"]
        self.steps, self.keeps_lines = config.steps, config.log_every is not None
        self.is_saved = run is not None
        model = config.model
        kind = f"{model.rule}" if model.weights == "ternary" else model.weights
        number, (parameters, buffers) = trainer.num_weights, trainer.num_floats
        ternary = number if model.weights == "ternary" else 0
        note(f"run     {run or 'none: with `--no-save` nothing is saved'}")
        note(f"text    {text['description']}: {text['train_bytes']:,} bytes to train on,")
        note(f"        {text['val_bytes']:,} held out, order-0 entropy {text['entropy']:.3f} nats")
        note(f"model   {number:,} {kind} weights, {model.scale_type}, ctx {model.ctx}")
        note(
            f"        float parameters {parameters:,}, float buffers {buffers:,},"
            f" logical ternary weights {ternary:,}"
        )
        place = f"{config.device}, backend {config.backend}, {config.compute}"
        if (size := trainer.group.size) > 1:
            place += f", {size} processes with {config.accum // size} of {config.accum} batches"
        note(f"device  {place}")
        if config.device == "cpu" and config.backend == "torch" and not native.available():
            note(f"        `native` would be faster: {native.why_not()}")
        if trainer.step:
            note(f"resumed at step {trainer.step}")

    def first_step(self, first: "FirstStep") -> None:
        if self.quiet:
            return
        bits = first.loss / math.log(2)
        note(
            f"before  loss {first.loss:.4f} nats = {bits:.4f} bits a byte, before step {first.step}"
        )
        note(f"        step {first.step} took {first.seconds:.2f} s{_of_compiling(first)}")

    def recorded(self, record: "Record") -> None:
        self._emit(record.as_json())
        if self.quiet:
            return
        line = (
            f"step {record.step}/{self.steps}  loss {record.loss:.3f} nats"
            f"  {record.bits_per_byte:.3f} bits"
        )
        if record.bytes_per_second is not None:
            line += f"  {record.bytes_per_second:,.0f} bytes/s  {_clock(record.seconds_left)} left"
        line += f"  {bytes_text(record.state_bytes)} state, {bytes_text(record.peak_bytes)} peak"
        if record.mfu is not None:
            line += f"  {record.mfu:.1%} MFU"
        if record.flip_share is not None:
            line += f"  {record.flip_share:.2%} flipped"
        if (length := record.gauges.get("chunk_length")) is not None:
            line += f"  {length:.2f} bytes a chunk"
        if (wire := record.gauges.get("wire")) is not None:
            line += f"  {wire:.2f} bytes a weight on the wire"
        if record.val_loss is not None:
            line += f"  held-out {record.val_loss:.4f}"
        self.line.show(line, keep=self.keeps_lines or record.val_loss is not None)
        gauges = {name: value for name, value in record.gauges.items() if name != "wire"}
        if record.val_loss is not None and gauges:
            self.line.show(_gauges(gauges), keep=True)
        if record.sample is not None:
            self.line.show(f"\nsample at step {record.step}\n{record.sample}\n", keep=True)

    def _emit(self, value: dict[str, Any]) -> None:
        """Print an object if objects are wanted, as long as somebody reads them."""
        if not self.as_json:
            return
        try:
            emit_json(value)
        except OutputError as error:
            self.as_json = False
            kept = ", and its directory has every record" if self.is_saved else ""
            note(f"{error}; the run goes on{kept}")

    def noted(self, message: str) -> None:
        note(message)

    def ended(self, report: "TrainReport") -> None:
        """Show nothing yet: the curve may still be drawn."""

    def finished(self, report: "TrainReport") -> None:
        """Show how the run ended."""
        self._emit(report.as_json())
        if report.stopped_by:
            note(f"stopped by {report.stopped_by} after step {report.steps}")
            if report.run is None:
                note(NOT_SAVED)
            if report.checkpoint:
                note(f"continue with: arb train --resume {report.run}")
            return
        if not self.quiet and report.sample:  # a run that was finished before makes none
            note_text(f"\nsample\n{report.sample}\n")
            if report.val_loss is None:
                note("held-out loss  none: with `--eval-every 0` nothing is evaluated")
            else:
                bits = report.bits_per_byte
                note(f"held-out loss  {report.val_loss:.4f} nats = {bits:.4f} bits a byte")
            note(f"               {report.entropy:.4f} nats is the text's order-0 entropy,")
            note(f"               {math.log(256):.4f} nats is uniform, ln 256")
            note(f"time           {_clock(report.seconds)}")
        why = NOT_SAVED if report.run is None else "a float twin is measured, not kept"
        note(f"checkpoint     {report.checkpoint or f'none: {why}'}")


def _of_compiling(first: "FirstStep") -> str:
    """Say what compiling has to do with the time of a step."""
    if first.compile_seconds is None:
        return ", in which torch compiles the twin"
    compiled, loaded = first.kernels_compiled, first.kernels_loaded
    took = f": {first.compile_seconds:.2f} s to"
    if compiled:
        return f"{took} compile {compiled:,} kernels" + (f" and load {loaded:,}" if loaded else "")
    if loaded:
        return f"{took} load {loaded:,} kernels that were compiled before"
    return ", and compiled no kernel"


def _gauges(gauges: dict[str, float]) -> str:
    """Show what a model measures of itself: shares, lengths, the load of its fullest expert."""
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


def _clock(seconds: float) -> str:
    minutes, seconds = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02d}:{seconds:02d}" if hours else f"{minutes}:{seconds:02d}"
