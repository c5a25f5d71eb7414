"""Train chunked models whose stages have learning rates of their own, one stage at a time.

    python -m benchmarks.stage_rates TRAIN VAL [MODEL...] [--seeds N...] [--steps N] [--lr X]
                                    [--stages NAME...] [--factors X...] [--out DIR]

The rate of all weights of a stage is multiplied by each of `FACTORS`, those of other stages,
embedding and head stay; and last those of all weights are, as rates that are better for all of
them would be taken for those of a stage. MODEL is one of `MODELS`: of one outer stage, and of two;
those that are called tiny train on a CPU, too. Stages are `outer 0` and so on, `main`, `around`
(embedding and head) and `all`.
"""

from itertools import product
from typing import Any
from unittest import mock

from arbcli.data.opening import open_texts
from arbcli.kernels.runtime.device import deterministic
from arbcli.model.language_model import LanguageModel
from arbcli.training.configure import new_config
from arbcli.training.trainer import Trainer
from benchmarks import results
from benchmarks.search import KINDS, POSITIONS
from benchmarks.training_step import empty

READ: dict[str, Any] = {"preset": "hnet-small", "ctx": 1024, "batch": 8}
TINY: dict[str, Any] = {
    "preset": "hnet-tiny", "ctx": 256, "batch": 4, "dim": 128, "layers": 2, "heads": 2, "ffn": 352,
    "outer_dim": (96,), "outer_layers": (1,), "outer_heads": (2,), "outer_ffn": (256,),
    "compute": "fp32",
}  # fmt: skip
MODELS = {
    "one outer stage": READ,
    "two outer stages": READ | {
        "outer_dim": (192, 256), "outer_layers": (1, 1), "outer_heads": (3, 4),
        "outer_ffn": (512, 704), "chunk_length": (3, 3),
    },
    "one outer stage, every 8": READ | {"boundaries": "every", "chunk_length": (8,)},
    "85 M, every 4": {"kind": "every 4"},
    "85 M, every 32": {"kind": "every 32"},
    "tiny, one outer stage": TINY,
    "tiny, two outer stages": TINY | {
        "outer_dim": (64, 96), "outer_layers": (1, 1), "outer_heads": (2, 2),
        "outer_ffn": (176, 256), "chunk_length": (3, 3),
    },
}  # fmt: skip
"""Options by name, or a kind of `benchmarks.search`, which has all digits."""
FACTORS = (0.25, 0.5, 2.0, 4.0)


def stage_of(name: str) -> str:
    """Name the stage that a weight is of: `outer 0` and so on, `main`, or `around` all."""
    first, second, *_ = name.split(".")
    return f"outer {second}" if first == "stages" else "main" if first == "blocks" else "around"


def options_of(name: str) -> dict[str, Any]:
    """Return the options of one of `MODELS`."""
    options = MODELS[name]
    if "kind" not in options:
        return options
    model = KINDS[options["kind"]]()
    return {"preset": model, "digits": "all", "batch": POSITIONS // model.ctx}


def build(
    options: dict, paths: tuple[str, str], stage: str, factor: float, **given: Any
) -> Trainer:
    """Make a trainer, one of whose stages steps by another rate."""
    config = new_config(**options, data=[paths[0]], val=[paths[1]], **given)
    texts = open_texts(config.data, config.val, seed=given["seed"], context=config.model.ctx)
    initialise = LanguageModel.initialise

    def with_factor(model: LanguageModel, seed: int) -> None:
        initialise(model, seed)
        for name, tensor in model.packed_tensors().items():
            tensor.lr_factor *= factor if stage in ("all", stage_of(name)) else 1

    with mock.patch.object(LanguageModel, "initialise", with_factor):
        return Trainer(config, texts, capture=config.device == "cuda")


def main() -> None:
    """Print a line a run, and write its row as soon as it is there."""
    parser = results.options("stage_rates", "Train with learning rates by stage.")
    parser.add_argument("train")
    parser.add_argument("val")
    parser.add_argument("models", nargs="*", metavar="MODEL", help=f"of {', '.join(MODELS)}")
    parser.add_argument("--seeds", type=int, nargs="*", default=[0])
    parser.add_argument("--steps", type=int, default=500)
    parser.add_argument("--lr", type=float, help="of all weights [default: the rule's]")
    parser.add_argument(
        "--stages", nargs="*", help="whose rates are multiplied [default: each, all]"
    )
    parser.add_argument("--factors", type=float, nargs="*", default=FACTORS)
    given = parser.parse_intermixed_args()
    paths, rate = (given.train, given.val), {} if given.lr is None else {"lr": given.lr}
    command = results.command_line("stage_rates", "TRAIN", "VAL", "--steps", str(given.steps))
    for seed in given.seeds:
        for model in given.models or MODELS:
            options = options_of(model)
            depth = len(new_config(**options).model.outer)
            stages = given.stages or [*(f"outer {index}" for index in range(depth)), "main", "all"]
            runs = [("all", 1.0), *product(stages, given.factors)]
            for stage, factor in runs:
                empty()
                with deterministic():
                    trainer = build(
                        options, paths, stage, factor, seed=seed, steps=given.steps, **rate
                    )
                    for _ in range(given.steps):
                        trainer.train_step()
                    loss = round(trainer.evaluate(64), 4)
                row = {
                    "model": model, "stage": stage, "factor": factor, "seed": seed,
                    "steps": given.steps, "lr": trainer.config.lr, "weights": trainer.num_weights,
                    "held_out_nats": loss,
                }  # fmt: skip
                print(row, flush=True)
                results.save("stage_rates", [row], command=command, folder=given.out)


if __name__ == "__main__":
    main()
