"""Measure a run of several GPUs: its bits, and its speed against a baseline's.

    torchrun --nproc-per-node 2 -m benchmarks.many_gpus bits|speed [--preset NAME]
        [--data FILE --val FILE] [--device cpu] [--eager] [--digits all] [--steps N]
        [--kinds KIND...] [--out DIR]

`bits` trains with all GPUs, and with the first one alone that does all micro-batches, and compares
every tensor of the state. `speed` times a step of all GPUs with one micro-batch each, and of one
GPU with one: weak scaling is what each GPU does of that. The peer, of kind `twin`, is the float
baseline under torch's DistributedDataParallel, compiled, with gradients in bfloat16.

`--device cpu` tries it out with gloo: figures of time and memory mean nothing there.
"""

import json
import os
import statistics
import sys
import time
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import torch

from arbcli.data.opening import open_texts
from arbcli.data.text import Texts
from arbcli.kernels.runtime.device import deterministic
from arbcli.model.checkpoint import tensor_digest
from arbcli.training.configure import new_config
from arbcli.training.parallel.group import Group, joined, own_device
from arbcli.training.trainer import EAGER_STEPS, Trainer
from benchmarks import results
from benchmarks.measuring import drawn_on_device, empty
from benchmarks.training_step import SHAPES

ABOUT: dict[str, dict[str, Any]] = {
    preset: {"ctx": ctx, "batch": batch} for preset, (ctx, batch) in SHAPES.items()
} | {
    "arb-tiny": {"ctx": 128, "batch": 16},
    "arb-3b": {"ctx": 64, "batch": 24, "recompute": True},
}
"""Context and windows of a micro-batch, by preset."""
STARTED = time.perf_counter()
TWIN = {"weights": "float", "optimizer": "muon", "sub_norms": False}
ROUNDS, ROUND_SECONDS = 3, 0.7


def progress(group: Group, text: str) -> None:
    """Print the progress, so that the output of a killed process shows how far it got."""
    if group.first:
        print(f"[{time.perf_counter() - STARTED:6.1f} s] {text}", file=sys.stderr, flush=True)


def build(
    preset: str, texts: Texts, group: Group, *, capture: bool, steps: int = 10_000, **options: Any
) -> Trainer:
    """Make a trainer on the device of this process."""
    config = new_config(preset=preset, steps=steps, device=str(group.device), **options)
    with drawn_on_device():
        return Trainer(config, texts, capture=capture, group=group)


def wait(device: torch.device) -> None:
    """Wait until all that was queued is done."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def compare_bits(
    preset: str, texts: Texts, group: Group, capture: bool, steps: int, accum: int, digits: str
) -> dict:
    """Train with all processes and with the first alone; compare every tensor."""
    about: dict[str, Any] = {
        "capture": capture,
        "accum": accum,
        "batch": 8,
        "reduce_dtype": "int12",
        "seed": 7,
    }
    about |= {"digits": digits}
    trainer = build(preset, texts, group, **about)
    progress(group, f"bits of {preset}: made")
    losses = [float(trainer.train_step()) for _ in range(steps)]
    progress(group, "steps of all are done")
    trainer.check_agreement()
    saved = trainer.checkpoint("").tensors
    assert trainer.shared is not None
    wire = trainer.shared.bytes_per_weight()
    trainer.release_graph()
    kind = f"digits {digits}{', captured' * trainer.captures}"
    row = {"part": "bits", "preset": preset, "kind": kind, "gpus": group.size, "seed": 7}
    row |= {"steps": steps, "wire_bytes_a_weight": wire}
    if group.first:
        digests = {name: tensor_digest(name, part) for name, part in saved.items()}
        one = build(preset, texts, Group(device=group.device), **about)
        same = losses == [float(one.train_step()) for _ in range(steps)]
        tensors = one.checkpoint("").tensors
        differ = [n for n, part in tensors.items() if digests[n] != tensor_digest(n, part)]
        row |= {"losses_equal": same, "tensors": len(tensors), "tensors_that_differ": len(differ)}
        row |= {"first_that_differs": differ[:1], "last_loss": losses[-1]}
    group.agree(0)
    return row


def seconds_a_step(trainer: Trainer, group: Group) -> float:
    """Time steps in rounds; the median."""

    def run(steps: int) -> float:
        wait(group.device)
        started = time.perf_counter()
        for _ in range(steps):
            group.agree(0, 0)  # as a run does
            trainer.train_step()
        wait(group.device)
        return (time.perf_counter() - started) / steps

    run(EAGER_STEPS + 2)
    steps = max(group.agree(min(200, max(3, int(ROUND_SECONDS / run(3))))))
    return statistics.median(run(steps) for _ in range(ROUNDS))


def time_steps(preset: str, texts: Texts, group: Group, capture: bool, kinds: list[str]) -> list:
    """Time every kind with one GPU and with all."""
    rows, on_gpu = [], group.device.type == "cuda"
    all_kinds: dict[str, dict[str, Any]] = {
        "wire": {"reduce_dtype": "int12"}, "rule": {}, "twin": TWIN,
        "factored": {"reduce_dtype": "int12", "direction": "factored"},
    }  # fmt: skip
    for kind in kinds:
        for size in dict.fromkeys((1, group.size)):
            if kind == "rule" and size > 1:
                continue
            part = group if size > 1 else Group(device=group.device)
            seconds = wire = 0.0
            peak = state = 0
            captured = False
            if size > 1 or group.first:
                ours = nullcontext() if kind == "twin" else deterministic()
                torch._dynamo.reset()
                if on_gpu:
                    torch.cuda.reset_peak_memory_stats()
                with ours:
                    options = all_kinds[kind] | ABOUT[preset] | {"accum": size}
                    progress(part, f"{preset}, {kind} on {size}: making it")
                    trainer = build(preset, texts, part, capture=capture, **options)
                    progress(part, "first steps, which compile")
                    seconds = seconds_a_step(trainer, part)
                    progress(part, "timed")
                peak = torch.cuda.max_memory_allocated() if on_gpu else 0
                state = trainer.state_bytes()
                wire = trainer.shared.bytes_per_weight() if trainer.shared else 0
                captured = trainer.captures
                trainer.release_graph()
                del trainer
                empty()
            peaks, states = zip(*group.collect((peak, state))[:size], strict=True)
            if group.first:
                positions = ABOUT[preset]["ctx"] * ABOUT[preset]["batch"] * size
                rows.append({
                    "part": "speed", "preset": preset, "kind": kind, "gpus": size, "seed": None,
                    "captured": captured, "ms": 1000 * seconds,
                    "bytes_per_second": positions / seconds, "peak_bytes": peaks,
                    "state_bytes": states, "wire_bytes_a_weight": wire,
                })  # fmt: skip
                print(json.dumps(rows[-1]), flush=True)
        if group.first and size > 1 and kind != "rule":
            print(
                f"weak scaling {preset} {kind}: {rows[-2]['ms'] / rows[-1]['ms']:.1%}", flush=True
            )
    return rows


def main() -> int:
    """Measure one part; the first process writes the rows."""
    parser = results.options("many_gpus", "Measure a run that several GPUs share.")
    parser.add_argument("part", choices=("bits", "speed"))
    parser.add_argument("--preset", default="small")
    parser.add_argument("--data", type=Path)
    parser.add_argument("--val", type=Path)
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--eager", action="store_true", help="do not capture steps")
    parser.add_argument("--digits", choices=("trit", "all"), default="trit", help="of `bits`")
    parser.add_argument("--kinds", nargs="+")
    parser.add_argument("--steps", type=int, help="of `bits`")
    args = parser.parse_args()
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    place = own_device(torch.device(args.device))
    files = [[str(path)] if path else None for path in (args.data, args.val)]
    texts = open_texts(*files, seed=0, context=256)
    with joined(place, args.part) as group:
        subject, capture = (args.preset, texts, group), not args.eager
        if args.part == "bits":
            with deterministic():
                rows = [compare_bits(*subject, capture, args.steps or 8, 4, args.digits)]
            if group.first:
                print(json.dumps(rows[0]), flush=True)
        else:
            rows = time_steps(*subject, capture, args.kinds or ["wire", "rule", "twin"])
        group.agree(0)
        if group.first:
            command = results.command_line("many_gpus", args.part, "--preset", args.preset)
            results.save("many_gpus", rows, command=command, folder=args.out)
    return 0


if __name__ == "__main__":
    sys.exit(main())
