"""A float model made ternary: fading with a teacher, straight-through latents, and rounding alone.

    python -m benchmarks.ternary_tuning TEXTS [--kinds KIND...] [--way WAY...] [--out DIR]

TEXTS is as of `benchmarks.tuning`. A float Qwen 3 of bytes, of the size of `base` (85 million
weights), is trained by AdamW on code and novels, and imported. Integers fade to the trit by `arb
train --init-from --weights anneal`, with and without `--teacher`; straight-through twins begin with
the same float weights. All see as many tokens of the same text. `rounded` has the trits of the
import, and no training.

WAY replaces the ways of this file: a kind, a rate, and fields of `Way`, such as
`"moment 0.6 taught=True fade_to=0.25"`.
"""

import ast
import tempfile
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import arbcli
from arbcli.config.training import FADE_LEARNT_TO
from arbcli.data import Text, Texts
from arbcli.device import deterministic
from arbcli.imports.config_json import read_folder_config
from arbcli.infer.load import load_model, read_saved, saved_config
from arbcli.rules import stage_rule
from arbcli.train.configure import new_config
from arbcli.train.trainer import Trainer
from benchmarks.float_qwen import Shape
from benchmarks.tuning import (
    WARMUP,
    both_losses,
    do_some,
    imported,
    keep,
    options,
    prepared_folder,
    run_all,
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
    """Rule of weights that fade, or optimizer of a straight-through twin."""
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
RULES = ("moment", "nibble")


def fade(way: Way, texts: Path, folder: Path, device: str) -> dict[str, Any]:
    """Let the import of the folder fade, as `arb train --init-from` does."""
    begun = imported(folder, way.kind)
    model = replace(saved_config(read_saved(begun, print).checkpoint), digits="fade")
    config = new_config(
        preset=model, batch=BATCH, device=device, warmup=WARMUP, eval_every=0, keep=1,
        fade_from=way.fade_from, fade_to=way.fade_to, lr=way.lr, steps=way.steps, seed=way.seed,
        teacher=str(begun) if way.taught else None,
        data=[str(texts / name) for name in TRAINED_ON],
        val=[str(texts / name) for name in HELD_OUT],
    )  # fmt: skip
    with tempfile.TemporaryDirectory() as made:
        run = Path(made, "run")
        arbcli.start_training(config, run, init_from=begun)
        return score(run, texts, device)


def straight_through(way: Way, texts: Path, folder: Path, device: str) -> dict[str, Any]:
    """Train latents whose trits multiply, and which have the gradients of these."""
    train, held_out = (Text([texts / name for name in some]) for some in (TRAINED_ON, HELD_OUT))
    config = new_config(
        preset=read_folder_config(folder, weights="ste"), batch=BATCH, device=device,
        warmup=WARMUP, optimizer=way.kind, lr=way.lr, steps=way.steps, seed=way.seed,
    )  # fmt: skip
    with deterministic():
        trainer = Trainer(config, Texts(train, held_out, ""), capture=True)
    return tuned_twin(trainer, folder, texts, device)


def begin(texts: Path, folder: Path, rule: str, device: str) -> list[dict[str, Any]]:
    """Score the import of the folder, which is the teacher, and its trits without training."""
    model, rows = load_model(imported(folder, rule), device=device), []
    for kind in ("imported", "rounded"):
        if kind == "rounded":
            for tensor in model.packed_tensors().values():
                tensor.rule = stage_rule(rule, "trit")
        way = asdict(Way(kind=f"{rule} {kind}", lr=0.0, steps=0))
        rows.append(way | {"state_bytes": 0} | both_losses(model.loss, texts, device))
    return rows


def read_way(words: str) -> Way:
    """Read a way that the command line names."""
    kind, lr, *fields = words.split()
    given = dict(field.split("=") for field in fields)
    return Way(kind=kind, lr=float(lr), **{name: ast.literal_eval(given[name]) for name in given})


def go(way: Way, texts: Path, folder: Path, device: str) -> dict[str, Any]:
    """Go a way."""
    return (fade if way.kind in RULES else straight_through)(way, texts, folder, device)


def main() -> None:
    """Train the float model, go the ways, those of a kind in one process, and write the rows."""
    parser = options("ternary_tuning", "Compare ways to a ternary model.")
    parser.add_argument("--way", nargs="+", type=read_way, default=WAYS, help="[those of the file]")
    given = parser.parse_args()
    if given.some:
        do_some(given.some, Way, lambda way: go(way, given.texts, given.folder, given.device))
        return
    kinds = given.kinds or {way.kind for way in given.way}
    rules = [rule for rule in RULES if rule in kinds]
    with prepared_folder(given, rules, TRAINED_ON, HELD_OUT, SHAPE, BATCH) as folder:
        for rule in rules:
            for row in begin(given.texts, folder, rule, given.device):
                keep("ternary_tuning", row, given)
        run_all("ternary_tuning", given.way, folder, given)


if __name__ == "__main__":
    main()
