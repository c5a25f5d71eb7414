"""A float model made ternary: fading with a teacher, straight-through latents, and rounding alone.

    python -m benchmarks.ternary_tuning TEXTS [--kinds KIND...] [--way WAY...] [--out DIR]

TEXTS and `--folder` are as of `benchmarks.tuning`. Without a folder a float Qwen 3 of bytes, of the
size of `base` (85 million weights), is trained by AdamW on code and novels. Integers fade to the
trit by `arb train --init-from --weights anneal`, with and without `--teacher`; straight-through
baselines begin with the same float weights. All see as many tokens of the same text. `rounded` has
the trits of the import, and no training.

WAY replaces the ways of this file: a kind, a rate, and fields of `Way`, such as
`"moment 0.6 taught=True fade_to=0.25"`.
"""

import ast
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch

from arbcli.config.training import FADE_LEARNT_TO
from arbcli.generation.load import load_model, read_saved, saved_config
from arbcli.interop.huggingface.folder import WeightFolder
from arbcli.model.language_model import LanguageModel
from arbcli.model.rules import stage_rule
from arbcli.training.configure import new_config
from benchmarks.float_qwen import Shape
from benchmarks.tuning import (
    BYTES,
    FLOAT,
    MIXTURES,
    WARMUP,
    float_model,
    imported,
    options,
    prepared_folder,
    run_all,
    run_jobs,
    save_row,
    scores,
    setting_of,
    text_options,
    tuned_integers,
    tuned_twin,
    twin_trainer,
)

SHAPE = Shape(
    layers=12, dim=768, heads=12, kv_heads=12, head_width=64, ffn=2048, vocabulary=256, tied=False
)
BATCH, STEPS = 32, 1000
TEXTS = ("code", "novels")


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


def way_options(way: Way, texts: Path, folder: Path) -> dict[str, Any]:
    """Return options of `arb train` for a way."""
    options = text_options(texts, folder, *TEXTS)
    if setting_of(folder) is BYTES:
        options["batch"] = BATCH
    return options | {"lr": way.lr, "steps": way.steps, "seed": way.seed}


def fade(way: Way, texts: Path, folder: Path, device: str) -> dict[str, Any]:
    """Train the imported model with fading weights, as `arb train --init-from` does."""
    initial = imported(folder, way.kind)
    model = replace(saved_config(read_saved(initial, print).checkpoint), digits="fade")
    config = new_config(
        preset=model, device=device, warmup=WARMUP, fade_from=way.fade_from, fade_to=way.fade_to,
        teacher=str(initial) if way.taught else None, **way_options(way, texts, folder),
    )  # fmt: skip
    return tuned_integers(config, initial, texts, folder)


def straight_through(way: Way, texts: Path, folder: Path, device: str) -> dict[str, Any]:
    """Train float latents that are rounded to trits, with straight-through gradients."""
    options = way_options(way, texts, folder)
    trainer = twin_trainer(folder, device=device, weights="ste", optimizer=way.kind, **options)
    return tuned_twin(trainer, folder, texts, device)


def begin(texts: Path, folder: Path, rules: list[str], device: str) -> Iterator[dict[str, Any]]:
    """Score the float model, its imports, one of them the teacher, and their trits, untrained."""

    def row(kind: str, model: LanguageModel) -> dict[str, Any]:
        way = asdict(Way(kind=kind, lr=0.0, steps=0))
        return way | {"state_bytes": 0} | scores(model, texts, folder, device)

    yield row(FLOAT, float_model(folder, WeightFolder(folder).read, device))
    for rule in rules:
        model = load_model(imported(folder, rule), device=device)
        yield row(f"{rule} imported", model)
        for tensor in model.packed_tensors().values():
            tensor.rule = stage_rule(tensor.rule.name, "trit")
        yield row(f"{rule} rounded", model)


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
    files = [[f"{name}-{part}.txt" for name in TEXTS] for part in ("train", "val")]
    with prepared_folder(args, *files, SHAPE, BATCH) as folder, ThreadPoolExecutor() as pool:
        list(pool.map(partial(imported, folder), rules))

        def save_begun() -> None:
            for row in begin(args.texts, folder, rules, args.device):
                save_row("ternary_tuning", row, args)

        begun = pool.submit(save_begun)
        run_all("ternary_tuning", args.way, folder, args)
        begun.result()


if __name__ == "__main__":
    main()
