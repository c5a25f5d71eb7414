"""A float model made ternary: fading with a teacher, straight-through latents, and rounding alone.

    python -m benchmarks.ternary_tuning TEXTS [--kinds KIND...] [--way WAY...] [--out DIR]

TEXTS is as of `benchmarks.tuning`. A float Qwen 3 of bytes, of the size of `base` (85 million
weights), is trained by AdamW on code and novels, and imported. Integers fade to the trit by `arb
train --init-from --weights anneal`, with and without `--teacher`; straight-through baselines begin
with the same float weights. All see as many tokens of the same text. `rounded` has the trits of the
import, and no training.

WAY replaces the ways of this file: a kind, a rate, and fields of `Way`, such as
`"moment 0.6 taught=True fade_to=0.25"`.
"""

import ast
import tempfile
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch

import arbcli
from arbcli.config.training import FADE_LEARNT_TO
from arbcli.data.text import Text, Texts
from arbcli.generation.load import load_model, read_saved, saved_config
from arbcli.interop.huggingface.config_json import read_folder_config
from arbcli.kernels.runtime.device import deterministic
from arbcli.model.rules import stage_rule
from arbcli.training.configure import new_config
from arbcli.training.trainer import Trainer
from benchmarks.float_qwen import Shape
from benchmarks.tuning import (
    MIXTURES,
    WARMUP,
    both_losses,
    imported,
    options,
    prepared_folder,
    run_all,
    run_jobs,
    save_row,
    score,
    tuned_twin,
)

SHAPE = Shape(
    layers=12, dim=768, heads=12, kv_heads=12, head_width=64, ffn=2048, vocabulary=256, tied=False
)
BATCH, STEPS = 32, 1000
TRAINED_ON = ("code-train.txt", "novels-train.txt")
HELD_OUT = ("code-val.txt", "novels-val.txt")


@dataclass(frozen=True, slots=True, kw_only=True)
class Way:
    """A way to a ternary model."""

    kind: str
    """Rules of weights that fade, or optimizer of a straight-through baseline."""
    lr: float
    taught: bool = False
    fade_from: float = 0.0
    """Share of the run after which weights begin to fade, if they do."""
    fade_to: float = FADE_LEARNT_TO
    """Share of the run after which they are trits."""
    seed: int = 0
    steps: int = STEPS


WAYS = (
    Way(kind="moment", lr=0.2),
    Way(kind="muon", lr=3e-3),
    Way(kind="nibble", lr=0.2),
    Way(kind="moment", lr=0.2, taught=True),
    Way(kind="moment", lr=0.3),
    Way(kind="nibble", lr=0.3),
    Way(kind="muon", lr=1e-2),
    Way(kind="muon", lr=1e-3),
)
RULES = ("moment", "nibble", *MIXTURES)


def fade(way: Way, texts: Path, folder: Path, device: str) -> dict[str, Any]:
    """Train the imported model with fading weights, as `arb train --init-from` does."""
    initial = imported(folder, way.kind)
    model = replace(saved_config(read_saved(initial, print).checkpoint), digits="fade")
    config = new_config(
        preset=model, batch=BATCH, device=device, warmup=WARMUP, eval_every=0, keep=1,
        fade_from=way.fade_from, fade_to=way.fade_to, lr=way.lr, steps=way.steps, seed=way.seed,
        teacher=str(initial) if way.taught else None,
        data=[str(texts / name) for name in TRAINED_ON],
        val=[str(texts / name) for name in HELD_OUT],
    )  # fmt: skip
    with tempfile.TemporaryDirectory() as made:
        run = Path(made, "run")
        arbcli.train(config, run, init_from=initial)
        return score(run, texts, device)


def straight_through(way: Way, texts: Path, folder: Path, device: str) -> dict[str, Any]:
    """Train float latents that are rounded to trits, with straight-through gradients."""
    train, held_out = (Text([texts / name for name in names]) for names in (TRAINED_ON, HELD_OUT))
    config = new_config(
        preset=read_folder_config(folder, weights="ste"), batch=BATCH, device=device,
        warmup=WARMUP, optimizer=way.kind, lr=way.lr, steps=way.steps, seed=way.seed,
    )  # fmt: skip
    with deterministic():
        trainer = Trainer(config, Texts(train, held_out, ""), capture=True)
    return tuned_twin(trainer, folder, texts, device)


def begin(texts: Path, folder: Path, rule: str, device: str) -> list[dict[str, Any]]:
    """Score the imported model, which is the teacher, and its trits without training."""
    model, rows = load_model(imported(folder, rule), device=device), []
    for kind in ("imported", "rounded"):
        if kind == "rounded":
            for tensor in model.packed_tensors().values():
                tensor.rule = stage_rule(tensor.rule.name, "trit")
        way = asdict(Way(kind=f"{rule} {kind}", lr=0.0, steps=0))
        rows.append(way | {"state_bytes": 0} | both_losses(model.loss, texts, device))
    return rows


def read_way(words: str) -> Way:
    """Parse a way from the command line, such as `moment 0.2 seed=1`."""
    kind, lr, *fields = words.split()
    values = dict(field.split("=") for field in fields)
    return Way(kind=kind, lr=float(lr), **{k: ast.literal_eval(v) for k, v in values.items()})


def train_way(way: Way, texts: Path, folder: Path, device: str) -> dict[str, Any]:
    """Train a ternary model in one of the ways, and return its results."""
    if device == "cuda":
        torch.cuda.reset_peak_memory_stats()
    row = (fade if way.kind in RULES else straight_through)(way, texts, folder, device)
    return row | {"peak_bytes": torch.cuda.max_memory_allocated() if device == "cuda" else None}


def main() -> None:
    """Train the float model, train ternary models in all ways, and write the rows."""
    parser = options("ternary_tuning", "Compare ways to a ternary model.")
    parser.add_argument("--way", nargs="+", type=read_way, default=WAYS, help="[those of the file]")
    args = parser.parse_args()
    if args.jobs:
        run_jobs(args.jobs, Way, lambda way: train_way(way, args.texts, args.folder, args.device))
        return
    kinds = args.kinds or {way.kind for way in args.way}
    rules = [rule for rule in RULES if rule in kinds]
    with prepared_folder(args, rules, TRAINED_ON, HELD_OUT, SHAPE, BATCH) as folder:
        for rule in rules:
            for row in begin(args.texts, folder, rule, args.device):
                save_row("ternary_tuning", row, args)
        run_all("ternary_tuning", args.way, folder, args)


if __name__ == "__main__":
    main()
