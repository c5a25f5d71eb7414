"""Break a training step down by kernel, and say whether the host or the GPU binds it.

    python -m benchmarks.step_kernels [MODEL...] [--out DIR]

Steps are traced one kernel after another, as they run before they are captured: a range around the
updates tells their kernels from those of the model. A captured step is timed too. The GPU
binds a step where its kernels take nearly all of its time. MODEL is one of `MODELS`.
"""

import functools
import json
import re
import tempfile
import time
from collections import Counter
from collections.abc import Iterable
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from torch.profiler import ProfilerActivity, profile, record_function

from arbcli.data.opening import open_texts
from arbcli.kernels.runtime.device import deterministic
from arbcli.model.updater import Updater
from arbcli.training.configure import new_config
from arbcli.training.trainer import EAGER_STEPS, Trainer
from benchmarks import results
from benchmarks.bare_twin import BareStep
from benchmarks.training_step import empty, run_steps, text

MODELS: dict[str, dict[str, Any]] = {
    "hnet-two-stage": {"preset": "hnet-two-stage", "batch": 8},
    "hnet-base": {"preset": "hnet-base", "batch": 8},
    "hnet-base, mamba": {"preset": "hnet-base", "batch": 8, "outer_blocks": "mamba"},
    "hnet-small, mamba": {"preset": "hnet-small", "batch": 32, "outer_blocks": "mamba"},
}
"""Options by name."""
TRACED, TIMED = 3, 20
"""Steps."""
KINDS = {
    "attention": r"attention|flash|fmha",
    "products": r"gemm|nvjet|cutlass|xmma|cublas|matmul|splitk",
    "scan and convolution": r"scan|conv",
    "chunks": r"chunk|boundar|smooth|spread",
    "decoding of weights": r"decode",
    "norms and gates": r"norm|gate|silu",
    "embedding and loss": r"embedding|cross_entropy",
}
"""Purposes of kernels of the model, by their names; the first that fits."""
UPDATE, OTHERS = "updates", "copies, sums and others"
METHODS = ("__call__", "step_held", "finish")
"""Methods of the updater, which launch all kernels of updates."""
LISTED = 12
"""Kernels of a row, those that take longest."""


def kind_of(name: str) -> str:
    """Return the purpose of a kernel of the model."""
    return next((kind for kind, names in KINDS.items() if re.search(names, name.lower())), OTHERS)


def times(events: Iterable[dict[str, Any]]) -> tuple[Counter, Counter]:
    """Add up the microseconds of kernels by kind, and by name."""
    events = list(events)
    updates = [e for e in events if e.get("cat") == "gpu_user_annotation" and e["name"] == UPDATE]
    spans = sorted((event["ts"], event["ts"] + event["dur"]) for event in updates)
    by_kind: Counter[str] = Counter()
    by_name: Counter[str] = Counter()
    at = 0
    kernels = (event for event in events if event.get("cat") in ("kernel", "gpu_memcpy"))
    for event in sorted(kernels, key=lambda event: event["ts"]):
        while at < len(spans) and spans[at][1] <= event["ts"]:
            at += 1
        within = at < len(spans) and spans[at][0] <= event["ts"]
        name = event["name"].split("(")[0].removeprefix("void ")
        by_kind[UPDATE if within else kind_of(name)] += event["dur"]
        by_name[name] += event["dur"]
    return by_kind, by_name


def annotated(method: str) -> Any:
    """Wrap a method of the updater in a range of the trace."""
    run = getattr(Updater, method)

    @functools.wraps(run)
    def inside(*args: Any, **given: Any) -> Any:
        with record_function(UPDATE):
            return run(*args, **given)

    return mock.patch.object(Updater, method, inside)


def trainer_of(options: dict[str, Any], capture: bool) -> Trainer:
    """Make a trainer on Python's own source."""
    config = new_config(steps=1000, data=[str(text())], **options)
    texts = open_texts(config.data, None, seed=0, context=config.model.ctx)
    return Trainer(config, texts, capture=capture)


def trace(trainer: Trainer | BareStep) -> list[dict[str, Any]]:
    """Trace some steps, after one that compiles."""
    patches = [annotated(method) for method in METHODS]
    for patch in patches:
        patch.start()
    run_steps(trainer, EAGER_STEPS)
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "trace.json"
        with profile(activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA]) as profiler:
            run_steps(trainer, TRACED)
        profiler.export_chrome_trace(str(path))
        found = json.loads(path.read_text())["traceEvents"]
    for patch in patches:
        patch.stop()
    return found


def measure(options: dict[str, Any]) -> dict[str, Any]:
    """Trace and time the step of one model."""
    empty()
    with deterministic():
        trainer = trainer_of(options, capture=False)
        by_kind, by_name = times(trace(trainer))
        eager = run_steps(trainer, TIMED)
        begun = time.perf_counter()
        for _ in range(TRACED):
            trainer.train_step()
        launched = (time.perf_counter() - begun) / TRACED  # the GPU may still be at work
        weights = trainer.num_weights
        torch.cuda.synchronize()
        del trainer
        empty()
        trainer = trainer_of(options, capture=True)
        run_steps(trainer, EAGER_STEPS + 2)
        captured = run_steps(trainer, TIMED)
    return {
        "weights": weights,
        "batch": options["batch"],
        "ctx": trainer.config.model.ctx,
        "step_ms": round(1e3 * captured, 3),
        "step_by_step_ms": round(1e3 * eager, 3),
        "host_ms": round(1e3 * launched, 3),
        "kernel_ms": round(sum(by_kind.values()) / 1e3 / TRACED, 3),
        "by_kind_ms": {k: round(us / 1e3 / TRACED, 3) for k, us in by_kind.most_common()},
        "by_kernel_ms": {k: round(us / 1e3 / TRACED, 3) for k, us in by_name.most_common(LISTED)},
    }


def main() -> None:
    """Print what each model's step is made of, and write its row."""
    parser = results.options("step_kernels", "Break a training step down by kernel.")
    parser.add_argument("models", nargs="*", metavar="MODEL", help=f"of {', '.join(MODELS)}")
    args = parser.parse_args()
    for name in args.models or MODELS:
        row = {"model": name} | measure(MODELS[name])
        print(row, flush=True)
        command = results.command_line("step_kernels")
        results.save("step_kernels", [row], command=command, folder=args.out)


if __name__ == "__main__":
    main()
