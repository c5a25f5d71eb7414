"""Measure the peak memory of training steps against the float baseline's, each in its own process.

    python -m benchmarks.peaks [PRESET...] [--kinds KIND...] [--out DIR]

The steps are those of `benchmarks.training_step`, which times several in one process: the first
of them then also counts workspaces that the others find. Here a kind counts all that it needs.
Several processes share the GPU, so nothing is timed.
"""

import multiprocessing
from concurrent.futures import ProcessPoolExecutor
from functools import partial
from typing import Any

from arbcli.inspect.peak import predict_peak
from arbcli.training.trainer import Trainer
from benchmarks import results
from benchmarks.training_step import KINDS, SAVING, SHAPES, maker, prepare

MEASURED = ("AdamW, no sub-norms", "factored", "factored, fp8", *SAVING, "AdamW, bare")
"""Default kinds; AdamW without sub-norms is the faster one for `1b`."""
AT_ONCE = 3
"""Processes; three baselines of `1b` take 160 GB, so kinds are ordered to alternate with ours."""


def measure(preset: str, kind: str) -> dict[str, Any]:
    """Measure the peak of one kind, and predict it."""
    made = maker(preset, kind)
    subject = prepare(kind, made)
    trainer, predicted = subject.trainer, None
    if isinstance(trainer, Trainer) and not made.is_float:
        predicted = predict_peak(trainer.config, captured=True).peak_bytes
    return {
        "preset": preset,
        "kind": kind,
        "allocated_bytes": subject.allocated,
        "reserved_bytes": subject.reserved,
        "predicted_bytes": predicted,
    }


def main() -> None:
    """Print a line a kind, and write the rows of each preset."""
    parser = results.options("peaks", "Measure the peak memory of training steps.")
    parser.add_argument("presets", nargs="*", metavar="PRESET", help=f"of {', '.join(SHAPES)}")
    parser.add_argument("--kinds", nargs="+", choices=KINDS, default=MEASURED)
    args = parser.parse_args()
    spawn = multiprocessing.get_context("spawn")
    for preset in args.presets or ["1b"]:
        with ProcessPoolExecutor(AT_ONCE, spawn, max_tasks_per_child=1) as pool:
            rows = []
            for row in pool.map(partial(measure, preset), args.kinds):
                rows.append(row)
                mib = {
                    name: value and value / 2**20 for name, value in row.items() if "bytes" in name
                }
                print(preset, row["kind"], mib, flush=True)
        command = results.command_line("peaks", preset)
        results.save("peaks", rows, command=command, folder=args.out)


if __name__ == "__main__":
    main()
