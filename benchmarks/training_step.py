"""Time a training step of every preset against its float baseline: `make bench`.

    python -m benchmarks.training_step [PRESET...] [--kinds KIND...] [--out DIR]

With `--kinds`, these are in memory together for each preset.

The baseline is that of `arb train --weights float`: compiled, Muon in batches of equal shapes, its
whole step one CUDA graph, with sub-norms as ours and without. Every step draws its batch as
training does. The bare baseline has neither sub-norms nor clipping, and its batch stays on the GPU:
see `benchmarks.bare_twin`. Kinds of ours without sub-norms train its model. `factored` is compared
with AdamW, and `orthogonal` with Muon; both have five Newton-Schulz iterations.

Kinds of a group are in memory together and take turns, so that clocks and heat reach them alike.
"""

import statistics
import sys
import time
import traceback
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch

from arbcli.kernels.runtime.device import deterministic
from arbcli.training.trainer import EAGER_STEPS, Trainer
from benchmarks import results
from benchmarks.bare_twin import BareStep, BareTwin
from benchmarks.measuring import empty, run_steps, trainer_of

SHAPES = {"tiny": (64, 16), "small": (256, 32), "base": (1024, 16), "1b": (2048, 8)}
"""Context and windows of a batch, by preset."""
KINDS: dict[str, dict[str, Any]] = {
    "factored": {"rule": "moment", "direction": "factored"},
    "factored, fp8": {"rule": "moment", "direction": "factored", "compute": "fp8"},
    "factored, packed": {"rule": "moment", "direction": "factored", "pack": True},
    "factored, fp8, packed": {
        "rule": "moment",
        "direction": "factored",
        "compute": "fp8",
        "pack": True,
    },
    "factored, recomputed": {"rule": "moment", "direction": "factored", "recompute": True},
    "orthogonal": {"rule": "moment", "direction": "orthogonal"},
    "orthogonal, fp8": {"rule": "moment", "direction": "orthogonal", "compute": "fp8"},
    "orthogonal, fp8-backward": {
        "rule": "moment",
        "direction": "orthogonal",
        "compute": "fp8-backward",
    },
    "AdamW": {"weights": "float"},
    "Muon": {"weights": "float", "optimizer": "muon"},
    "AdamW, bare": {"weights": "float"},
    "Muon, bare": {"weights": "float", "optimizer": "muon"},
}
KINDS |= {
    f"{kind}, no sub-norms": KINDS[kind] | {"sub_norms": False}
    for kind in ("factored", "factored, fp8", "orthogonal", "AdamW", "Muon")
}
SAVING = ("factored, packed", "factored, fp8, packed", "factored, recomputed")
"""Kinds that take less memory."""
IN_BF16 = tuple(kind for kind in KINDS if "fp8" not in kind and kind not in SAVING)
GROUPS = {
    "tiny": (IN_BF16,),
    "small": (IN_BF16,),
    "base": ((*IN_BF16, "factored, fp8", "factored, fp8, no sub-norms"),),
    "1b": (
        ("factored", "factored, no sub-norms", "AdamW, bare"),
        ("factored, fp8", "factored, fp8, no sub-norms", "orthogonal, fp8"),
        ("orthogonal", "orthogonal, fp8-backward", "Muon, bare"),
        ("orthogonal, no sub-norms",),
        ("AdamW", "Muon"),
        ("AdamW, no sub-norms", "Muon, no sub-norms"),
        SAVING,
    ),
}
"""Kinds that are in memory together, by preset; those of `1b` take 115 of the GPU's 139 GB."""
ROUNDS = 5
ROUND_SECONDS = 0.3
MIN_STEPS, MAX_STEPS = 3, 300
"""Minimum and maximum number of steps per round."""


@dataclass(slots=True)
class Subject:
    """A trainer whose step is captured, and what is known of it."""

    kind: str
    trainer: Trainer | BareStep
    allocated: int
    """Bytes, the most that tensors had at once, once compiled."""
    reserved: int
    """Bytes, the most that the allocator held, once compiled."""
    seconds: list[float]
    """Seconds per step, by round."""
    clock: dict[str, float]
    """Clock rate of the GPU after the last steps: see `results.read_clock`."""


@dataclass(frozen=True, slots=True)
class Maker:
    """A function that makes a trainer, and its kind."""

    make: Callable[[], Trainer | BareStep]
    is_float: bool
    """Whether it is a float baseline, which need not be deterministic."""


def build(preset: str, kind: str) -> Trainer | BareStep:
    """Make what trains, a trainer on Python's own source."""
    (ctx, batch), options = SHAPES[preset], KINDS[kind]
    if kind.endswith(", bare"):
        return BareTwin(preset, ctx, batch, muon=kind.startswith("Muon"))
    return trainer_of({"preset": preset, "ctx": ctx, "batch": batch} | options)


def maker(preset: str, kind: str) -> Maker:
    """Return the function that makes a trainer of this kind."""
    return Maker(partial(build, preset, kind), "weights" in KINDS[kind])


def prepare(kind: str, maker: Maker) -> Subject:
    """Make a trainer, run it until its step is captured, and measure its memory."""
    torch._dynamo.reset()  # what is captured needs no compiled code any more
    empty()
    allocated, reserved = torch.cuda.memory_allocated(), torch.cuda.memory_reserved()
    with nullcontext() if maker.is_float else deterministic():
        trainer = maker.make()
        trainer.train_step()  # compiles, and tries kernels
        torch.cuda.synchronize()
        empty()
        for _ in range(EAGER_STEPS + 2):
            trainer.train_step()
    torch.cuda.synchronize()
    allocated = torch.cuda.max_memory_allocated() - allocated
    reserved = torch.cuda.max_memory_reserved() - reserved
    return Subject(kind, trainer, allocated, reserved, [], {})


def time_in_turns(subjects: list[Subject], rounds: int = ROUNDS) -> None:
    """Time all of them in rounds, and drop earlier rounds."""
    steps = {}
    for subject in subjects:
        subject.seconds.clear()
        seconds = run_steps(subject.trainer, MIN_STEPS)
        steps[subject.kind] = min(MAX_STEPS, max(MIN_STEPS, round(ROUND_SECONDS / seconds)))
    for _ in range(rounds):
        for subject in subjects:
            subject.seconds.append(run_steps(subject.trainer, steps[subject.kind]))
    for subject in subjects:
        for _ in range(steps[subject.kind]):
            subject.trainer.train_step()
        subject.clock = results.read_clock()


def measure(
    name: str, shape: tuple[int, int], makers: dict[str, Maker], save: Callable[[list[dict]], None]
) -> None:
    """Measure kinds in turns, or one after another if they do not fit in memory together.

    Rows are saved whenever another kind is prepared, so that a run that is cut off leaves some;
    all rounds are timed after the last kind. What fails is reported and left out.

    Args:
        name: of the preset or family.
        shape: context and windows of a batch.
        makers: of the kinds.
        save: takes the rows of this call so far.
    """
    subjects: list[Subject] = []
    left_over: list[str] = []
    for number, (kind, maker) in enumerate(makers.items(), 1):
        started = time.perf_counter()
        try:
            if number == 1:  # libraries allocate workspaces once, which no kind should count
                prepare(kind, maker)
            subjects.append(prepare(kind, maker))
        except torch.OutOfMemoryError:
            left_over.append(kind)
        except Exception:
            traceback.print_exc()
        seconds = time.perf_counter() - started
        print(f"  prepared {name} {kind} in {seconds:.0f} s", file=sys.stderr, flush=True)
        if subjects:
            time_in_turns(subjects, ROUNDS if number == len(makers) else 1)
            save([to_row(name, shape, subject, len(subjects) > 1) for subject in subjects])
    subjects.clear()
    empty()
    if len(makers) > 1:
        for kind in left_over:
            measure(name, shape, {kind: makers[kind]}, save)
    elif left_over:
        print(f"{name} {left_over[0]}: the GPU's memory is not enough", file=sys.stderr)


def to_row(preset: str, shape: tuple[int, int], subject: Subject, in_turns: bool) -> dict:
    """Write a row of the results; `shape` is the context and the windows of a batch."""
    ctx, batch = shape
    seconds = statistics.median(subject.seconds)
    return {
        "preset": preset,
        "kind": subject.kind,
        "weights": subject.trainer.num_weights,
        "ctx": ctx,
        "batch": batch,
        "ms": round(1e3 * seconds, 4),
        "bytes_per_second": round(ctx * batch / seconds),
        "allocated_bytes": subject.allocated,
        "reserved_bytes": subject.reserved,
        "state_bytes": subject.trainer.state_bytes(),
        "rounds_ms": [round(1e3 * value, 4) for value in subject.seconds],
        "in_turns": in_turns,
        **subject.clock,
    }


def write_rows(benchmark: str, subject: str, folder: Path, rows: list[dict]) -> None:
    """Print a line a row, and save the rows of a preset or family."""
    for row in rows:
        print(
            f"{subject:10} {row['kind']:20} {row['weights'] / 1e6:6.1f} M {row['ms']:9.3f} ms"
            f" {row['bytes_per_second']:12,} bytes/s, allocated"
            f" {row['allocated_bytes'] / 2**20:8,.0f} MiB,"
            f" reserved {row['reserved_bytes'] / 2**20:8,.0f}, {len(row['rounds_ms'])} rounds",
            flush=True,
        )
    command = results.command_line(benchmark, subject)
    results.save(benchmark, rows, command=command, folder=folder)


def main() -> None:
    """Print a line a step, and write the rows of each preset."""
    parser = results.options("training_step", "Time training steps against float baselines.")
    parser.add_argument("presets", nargs="*", metavar="PRESET", help=f"of {', '.join(SHAPES)}")
    parser.add_argument("--kinds", nargs="+", choices=KINDS, help="measured together")
    args = parser.parse_args()
    for preset in args.presets or SHAPES:
        for kinds in (args.kinds,) if args.kinds else GROUPS[preset]:
            save = partial(write_rows, "training_step", preset, args.out)
            measure(preset, SHAPES[preset], {kind: maker(preset, kind) for kind in kinds}, save)


if __name__ == "__main__":
    main()
