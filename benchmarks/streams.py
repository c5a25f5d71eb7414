"""Train `small` with one and several residual streams, and `arb-tiny` with each choice of experts.

    python -m benchmarks.streams TRAIN VAL [--part streams|gates] [--steps N] [--seeds N...]
        [--times FILE] [NAME...]

All train for the same time: as long as `--steps` of the first variant of a part take alone on the
machine. `--times` keeps what a step was measured to take, so that several processes may share a
GPU afterwards. NAME is a variant; all by default.
"""

import json
from pathlib import Path
from typing import Any

import torch

from arbcli.data.opening import open_texts
from arbcli.inspect.memory import predict
from arbcli.kernels.runtime.device import deterministic
from arbcli.training.configure import new_config
from arbcli.training.trainer import Trainer
from benchmarks import results
from benchmarks.ablation import TIMED, run

EXPERTS: dict[str, Any] = {
    "preset": "arb-tiny",
    "moe": True,
    "experts": 32,
    "expert_ffn": 96,
    "batch": 32,
}
FACTORED = {"rule": "nibble", "direction": "factored"}
GATES: dict[str, dict[str, Any]] = {
    "softmax": {},
    "softplus": {"moe_gate": "softplus"},
    "hash": {"moe_gate": "hash"},
    "softplus-shared": {"moe_gate": "softplus", "shared_expert": True, "moe_clamp": True},
}
VARIANTS: dict[str, dict[str, dict]] = {
    "streams": {
        "1-stream": {"preset": "small"},
        "4-streams": {"preset": "small", "streams": 4},
        "2-streams": {"preset": "small", "streams": 2},
        "1-stream-digits": {"preset": "small", "digits": "all"},
        "4-streams-digits": {"preset": "small", "digits": "all", "streams": 4},
    },
    "gates": {
        f"{name}{of_rule}{of_rate}": EXPERTS | changes | rule | rate
        for of_rule, rule, rates in (
            ("", {}, {"": {}, "-lr-0.3": {"lr": 0.3}, "-lr-3": {"lr": 3.0}}),
            ("-factored", FACTORED, {"": {}, "-lr-1": {"lr": 1.0}, "-lr-0.3": {"lr": 0.3}}),
        )
        for of_rate, rate in rates.items()
        for name, changes in GATES.items()
    },
}
"""By part and name, the options of a run; the time of a part is that of its first one."""


def build(options: dict, paths: tuple[str, str], seed: int, steps: int) -> Trainer:
    """Make the trainer of a variant."""
    train, val = paths
    config = new_config(**options, data=[train], val=[val], steps=steps, seed=seed)
    texts = open_texts(config.data, config.val, seed=seed, context=config.model.ctx)
    return Trainer(config, texts, capture=True)


def measure(part: str, names: list[str], paths: tuple[str, str], file: Path | None) -> dict:
    """Measure the milliseconds of a step of each variant, those in the file left out."""
    times = json.loads(file.read_text()) if file and file.exists() else {}
    for name in names:
        if name not in times:
            times[name] = run(build(VARIANTS[part][name], paths, 0, TIMED), TIMED)
            print(f"{name:26} {times[name]:6.2f} ms a step", flush=True)
            if file:
                file.write_text(json.dumps(times))
    return times


def train(part: str, name: str, paths: tuple[str, str], seed: int, steps: int) -> dict:
    """Train a variant; print a line about it, and return it as a row."""
    trainer = build(VARIANTS[part][name], paths, seed, steps)
    milliseconds = run(trainer, steps)
    config, gauges = trainer.config, trainer.model.gauges()
    row = {
        "part": part,
        "variant": name,
        "seed": seed,
        "steps": steps,
        "lr": config.lr,
        "held_out_nats": round(trainer.evaluate(), 4),
        "ms": round(milliseconds, 2),
        "weights": predict(config.model).total.weights,
        "fullest_expert": round(gauges["fullest_expert"], 2) if part == "gates" else None,
    }
    fullest = "" if part == "streams" else f", fullest expert {row['fullest_expert']}"
    print(
        f"{name:26} seed {seed}: {row['held_out_nats']:.4f} nats after {steps} steps{fullest}",
        flush=True,
    )
    return row


def main() -> None:
    """Print a line a run, and write its row as soon as it is there."""
    parser = results.options("streams", "Compare residual streams, and choices of experts.")
    parser.add_argument("train")
    parser.add_argument("val")
    parser.add_argument("names", nargs="*")
    parser.add_argument("--part", choices=VARIANTS, default="streams")
    parser.add_argument("--steps", type=int, default=2000)
    parser.add_argument("--seeds", type=int, nargs="*", default=[0, 1, 2])
    parser.add_argument("--times", type=Path)
    given = parser.parse_intermixed_args()
    part, paths = given.part, (given.train, given.val)
    command = results.command_line("streams", "TRAIN", "VAL", "--part", part)
    names = given.names or list(VARIANTS[part])
    first = next(iter(VARIANTS[part]))
    with deterministic():
        times = measure(part, list(dict.fromkeys((first, *names))), paths, given.times)
        for seed in given.seeds:
            for name in names:
                steps = round(given.steps * times[first] / times[name])
                row = train(part, name, paths, seed, steps)
                results.save("streams", [row], command=command, folder=given.out)
                if torch.cuda.is_available():
                    torch.cuda.empty_cache()


if __name__ == "__main__":
    main()
