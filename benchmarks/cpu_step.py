"""Time a training step of `tiny` on the CPU against its float baseline, in turns: `make bench`.

    python -m benchmarks.cpu_step [--compute fp32] [--out DIR]

Every kind is a process of its own that waits while another one computes, as libgomp reads once how
long its threads spin: ours as `arb` sets it, the baseline's as libgomp has it. Where there is a C++
compiler, the baseline is measured compiled too. With the time on the clock stands that of the
processor, of all threads, which other programs disturb less.
"""

import os
import shutil
import statistics
import subprocess
import sys
import time
from typing import Any

from benchmarks import results

ROUNDS, STEPS = 7, 4
CTX = 64
TWIN = {"weights": "float"}
KINDS = {
    "moment, factored": {"direction": "factored"},
    "moment, orthogonal": {},
    "moment, orthogonal, torch alone": {"backend": "torch"},
    "nibble, orthogonal": {"rule": "nibble"},
    "AdamW": TWIN,
    "AdamW, compiled": TWIN,
}


def serve(kind: str, compute: str | None) -> None:
    """Run steps for every line of stdin, and print the milliseconds per step."""
    from arbcli.data.opening import open_texts
    from arbcli.training.compiled_baseline import compile_baseline
    from arbcli.training.configure import new_config
    from arbcli.training.trainer import Trainer

    texts = open_texts(None, None, seed=0, context=CTX)
    config = new_config(ctx=CTX, device="cpu", steps=1000, compute=compute, **KINDS[kind])
    trainer = Trainer(config, texts)
    if kind.endswith("compiled"):
        compile_baseline(trainer.model)
    for _ in sys.stdin:
        started = time.perf_counter(), time.process_time()
        for _ in range(STEPS):
            trainer.train_step()
        ended = time.perf_counter(), time.process_time()
        milliseconds = [1e3 * (b - a) / STEPS for a, b in zip(started, ended, strict=True)]
        size = config.batch * config.model.ctx
        print(*milliseconds, size, config.compute, flush=True)


def start(kind: str, compute: str | None) -> subprocess.Popen:
    """Start the process of a kind."""
    about = ["--compute", compute] if compute else []
    # the words say to `benchmarks` that a baseline is trained
    words = ["--weights", "float"] if KINDS[kind] is TWIN else []
    environment = {key: value for key, value in os.environ.items() if key != "GOMP_SPINCOUNT"}
    return subprocess.Popen(
        [sys.executable, "-m", "benchmarks.cpu_step", "--serve", kind, *about, *words],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        env=environment,
    )


def ask(process: subprocess.Popen) -> tuple[tuple[float, float], int, str]:
    """Run the steps of a process; return milliseconds and bytes of a step, and its dtype.

    The milliseconds are those of the clock and of the processor.
    """
    assert process.stdin is not None
    assert process.stdout is not None
    process.stdin.write("\n")
    process.stdin.flush()
    clock, processor, size, compute = process.stdout.readline().split()
    return (float(clock), float(processor)), int(size), compute


def main() -> None:
    """Print a line a kind, with its speed against the faster baseline's, and write the rows."""
    parser = results.options("cpu_step", "Time training steps on the CPU against a float baseline.")
    parser.add_argument("--serve", choices=KINDS)
    parser.add_argument("--weights")
    parser.add_argument("--compute", choices=("bf16", "fp32"), help="default: what is native")
    args = parser.parse_args()
    if args.serve:
        serve(args.serve, args.compute)
        return
    compiler = any(shutil.which(name) for name in ("g++", "clang++", "c++"))
    kinds = [kind for kind in KINDS if compiler or not kind.endswith("compiled")]
    processes = {kind: start(kind, args.compute) for kind in kinds}
    times: dict[str, list[tuple[float, float]]] = {kind: [] for kind in kinds}
    rows: list[dict[str, Any]] = []
    try:
        for _ in range(1 + ROUNDS):  # the first warms up
            for kind, process in processes.items():
                both, size, compute = ask(process)
                times[kind].append(both)
    finally:
        for process in processes.values():
            process.kill()
            process.wait()
    for kind, rounds in times.items():
        clock, processor = ([pair[i] for pair in rounds[1:]] for i in (0, 1))
        milliseconds = statistics.median(clock)
        rows.append(
            {
                "preset": "tiny",
                "kind": kind,
                "ctx": CTX,
                "batch": size // CTX,
                "compute": compute,
                "ms": round(milliseconds, 2),
                "bytes_per_second": round(1e3 * size / milliseconds),
                "cpu_ms": round(statistics.median(processor), 2),
                "rounds_ms": [round(value, 2) for value in clock],
            }
        )
    twins = [row for row in rows if KINDS[row["kind"]] is TWIN]
    twin, of_cpu = (min(row[name] for row in twins) for name in ("ms", "cpu_ms"))
    for row in rows:
        print(
            f"{row['kind']:32} {row['ms']:8.1f} ms, {twin / row['ms']:.2f} x the baseline;"
            f" {row['cpu_ms']:8.1f} ms of the processor, {of_cpu / row['cpu_ms']:.2f} x"
        )
    options = ("--compute", args.compute) if args.compute else ()
    command = results.command_line("cpu_step", *options)
    results.save("cpu_step", rows, command=command, folder=args.out)


if __name__ == "__main__":
    main()
