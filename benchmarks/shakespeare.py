"""nanoGPT's table: tiny Shakespeare, its split, 10.65 million weights, compared with its recipe.

    python -m benchmarks.shakespeare [--data FILE] [--kinds KIND...] [--seeds N...]

The first nine tenths of the characters are trained on. The held-out loss is that of the windows of
256 characters of all others, every 250 steps: its lowest value is what nanoGPT publishes, 1.4697.
Of the seeds the first one runs by itself and is timed, the others share the GPU.

Peer: `benchmarks.nanogpt`.
"""

import tempfile
import time
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from pathlib import Path
from statistics import mean
from typing import Any

import torch
from torch import Tensor

from arbcli.data.opening import open_texts
from arbcli.kernels.runtime.backend import use_backend
from arbcli.kernels.runtime.device import deterministic
from arbcli.training.configure import new_config
from arbcli.training.schedule import Patience
from arbcli.training.trainer import Trainer
from benchmarks import results
from benchmarks.nanogpt import train_nanogpt
from benchmarks.together import train_together

DATA = Path("data/tinyshakespeare.txt")
SHAPE: dict[str, Any] = {"preset": "small", "ctx": 256, "batch": 64}
TRAINED = 0.9
"""Share of the characters that is trained on."""
EVERY = 250
"""Steps between evaluations."""
EVAL_BATCH = 64
"""Maximum number of windows in a batch of an evaluation."""
NANOGPT = "nanoGPT"
DROPOUT = {"dropout": 0.3, "attention_dropout": 0.2, "embedding_dropout": 0.2}
KINDS: dict[str, dict[str, Any]] = {
    "trit": DROPOUT | {"digits": "trit", "lr": 1.0, "steps": 5000, "patience": 4},
    "all": DROPOUT | {"digits": "all", "steps": 5000, "patience": 4},
    "anneal": DROPOUT | {"digits": "fade", "steps": 3000},
    "muon": DROPOUT | {"weights": "float", "optimizer": "muon", "steps": 3000, "patience": 4},
    "adamw": DROPOUT | {"weights": "float", "optimizer": "adamw", "steps": 3000, "patience": 4},
    NANOGPT: {},
}
"""Settings of each kind, besides defaults. In sweeps the lowest losses were those of long schedules
that are stopped, not those of short ones; a hypothesis is that a high rate regularises."""


class Texts:
    """The training text and the held-out windows, as files and as tensors.

    Args:
        path: the text.
        folder: folder to write both files into.
        device: device of the tensors.
    """

    def __init__(self, path: Path, folder: Path, device: torch.device) -> None:
        text = path.read_bytes()
        split = int(TRAINED * len(text))
        self.files = folder / "train.txt", folder / "val.txt"
        for file, part in zip(self.files, (text[:split], text[split:]), strict=True):
            file.write_bytes(part)
        train, val = (
            torch.frombuffer(bytearray(part), dtype=torch.uint8).long().to(device)
            for part in (text[:split], text[split:])
        )
        ctx = int(SHAPE["ctx"])
        windows = val.unfold(0, ctx + 1, ctx)
        number = -(-len(windows) // EVAL_BATCH)
        size = len(windows) // number
        self.train = train
        self.batches = windows[: number * size].reshape(number, size, ctx + 1)
        """Held-out windows, (batches, B, ctx + 1) int64; at most `batches` - 1 are left out."""


@torch.no_grad()
def held_out_loss(trainer: Trainer, batches: Tensor) -> float:
    """Compute the mean loss of the held-out windows, in nats per character."""
    with use_backend(trainer.config.backend):
        losses = [trainer.model.loss(batch[:, :-1], batch[:, 1:]) for batch in batches]
    return float(torch.stack(losses).mean())


def trainer_of(settings: dict[str, Any], texts: Texts, seed: int) -> Trainer:
    """Build a trainer of the table's model."""
    train, val = map(str, texts.files)
    device = str(texts.train.device.type)
    config = new_config(
        **(SHAPE | settings), data=[train], val=[val], seed=seed, eval_every=EVERY, device=device
    )
    opened = open_texts(config.data, config.val, seed=seed, context=config.model.ctx)
    return Trainer(config, opened, capture=True)


def row_of(kind: str, seed: int, trainer: Trainer, curve: dict[int, float]) -> dict[str, Any]:
    """Make the row of a run of arb."""
    config = trainer.config
    if config.model.digits == "fade":  # before, weights are not ternary
        ternary = config.fades[1] * config.steps
        curve = {step: loss for step, loss in curve.items() if step >= ternary}
    return finished_row(
        {
            "kind": kind, "seed": seed, "steps": max(curve), "lr": config.lr,
            "dropout": config.dropout, "attention_dropout": config.attention_dropout,
            "embedding_dropout": config.embedding_dropout, "weight_decay": config.decay,
            "weights": trainer.num_weights,
            "state_mib": round(trainer.state_bytes() / 2**20, 1),
        },
        curve,
    )  # fmt: skip


def finished_row(row: dict[str, Any], curve: dict[int, float]) -> dict[str, Any]:
    """Add the best and the last of held-out losses, and all of them."""
    best = min(curve, key=lambda step: curve[step])
    return row | {
        "best_nats": round(curve[best], 4),
        "best_step": best,
        "final_nats": round(curve[max(curve)], 4),
        "curve": [[step, round(loss, 4)] for step, loss in curve.items()],
    }


def train_timed(
    trainer: Trainer, evaluate: Callable[[Trainer], float], began: float
) -> tuple[dict[int, float], dict[str, float]]:
    """Train a model to its end: its held-out losses by step, and seconds since `began`."""
    curve, prepared, patience = {}, 0.0, Patience(trainer.config.patience)
    for step in range(1, trainer.config.steps + 1):
        trainer.train_step()
        if step == min(10, trainer.config.steps):
            evaluate(trainer)
            prepared = time.perf_counter() - began
        if step % EVERY == 0 or step == trainer.config.steps:
            curve[step] = evaluate(trainer)
            patience.add(step, curve[step])
        if patience.is_exhausted:
            break
    trainer.release_graph()
    times = {"seconds": time.perf_counter() - began, "prepared_seconds": prepared}
    return curve, {name: round(value, 1) for name, value in times.items()}


def measure(kind: str, seeds: Sequence[int], texts: Texts) -> list[dict[str, Any]]:
    """Train a kind with several seeds: its rows, of which the first one has its seconds."""
    first, *others = seeds
    if kind == NANOGPT:
        rows = []
        for seed in seeds:
            result = train_nanogpt(texts.train, texts.batches, seed, EVERY)
            row = {"kind": kind, "seed": seed, "steps": max(result["curve"]), "lr": 1e-3}
            row |= dict.fromkeys(DROPOUT, 0.2) | {"weight_decay": 0.1, "weights": result["weights"]}
            row |= {"state_mib": round(result["state_bytes"] / 2**20, 1)}
            times = {name: round(result[name], 1) for name in ("seconds", "prepared_seconds")}
            rows.append(finished_row(row, result["curve"]) | times)
        return rows

    def evaluate(trainer: Trainer) -> float:
        return held_out_loss(trainer, texts.batches)

    began = time.perf_counter()
    trainer = trainer_of(KINDS[kind], texts, first)
    curve, times = train_timed(trainer, evaluate, began)
    rows = [row_of(kind, first, trainer, curve) | times]
    trainers = [trainer_of(KINDS[kind], texts, seed) for seed in others]
    if trainers:
        curves = train_together(trainers, EVERY, evaluate)
        rows += [
            row_of(kind, seed, trainer, curve)
            for seed, trainer, curve in zip(others, trainers, curves, strict=True)
        ]
    return rows


def print_table(rows: Sequence[dict[str, Any]]) -> None:
    """Print a line for each kind, averaged over its seeds."""
    print("\nkind     seeds  best (low, high)         final   steps  seconds (prepared)  state MiB")
    for kind in dict.fromkeys(row["kind"] for row in rows):
        rows_of_kind = [row for row in rows if row["kind"] == kind]
        best = [row["best_nats"] for row in rows_of_kind]
        last = mean(row["final_nats"] for row in rows_of_kind)
        timed = next(row for row in rows_of_kind if "seconds" in row)
        print(
            f"{kind:8} {len(rows_of_kind):5}  {mean(best):.4f} ({min(best):.4f}, {max(best):.4f})"
            f"  {last:.4f}  {rows_of_kind[0]['steps']:6}  {timed['seconds']:7.1f} "
            f"({timed['prepared_seconds']:.1f})  {rows_of_kind[0]['state_mib']:12.1f}"
        )


def main() -> None:
    """Measure the kinds."""
    parser = results.options("shakespeare", "Train on tiny Shakespeare, as nanoGPT does.")
    parser.add_argument("--data", type=Path, default=DATA, help=f"the text [default: {DATA}]")
    parser.add_argument("--kinds", nargs="+", choices=KINDS, default=[*KINDS])
    parser.add_argument("--seeds", nargs="+", type=int, default=[0, 1, 2])
    parser.add_argument("--device", default="cuda")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        texts = Texts(args.data, Path(folder), torch.device(args.device))
        rows = []
        for kind in args.kinds:
            with nullcontext() if kind == NANOGPT else deterministic():
                kind_rows = measure(kind, args.seeds, texts)
            for row in kind_rows:
                print(f"{kind} seed {row['seed']}: best {row['best_nats']}", flush=True)
            command = results.command_line("shakespeare")
            results.save("shakespeare", kind_rows, command=command, folder=args.out)
            rows += kind_rows
    print_table(rows)


if __name__ == "__main__":
    main()
