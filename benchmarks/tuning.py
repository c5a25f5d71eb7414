"""A float model that is imported and tuned on another text, against float training of the same.

    python -m benchmarks.tuning TEXTS [--parts PART...] [--kinds KIND...] [--seeds N...] [--out DIR]

TEXTS is a folder with `code-train.txt`, `code-val.txt` (`benchmarks.code_text` writes them),
`novels-train.txt` and `novels-val.txt`. A Qwen 3 of bytes (10.8 million weights) is trained on code
in float32 by AdamW, and written as a folder for Transformers. Integers go the way of the README:
`arb import`, then `arb train --init-from` on novels, by the functions that these commands call. The
peers begin with the same folder: AdamW and Muon by the float baseline, others by `float_steps`.

`new` is the held-out loss of novels, `old` that of code, in nats a byte, both of the same windows.
`speed` times steps alone, each way in a process of its own.
"""

import argparse
import gc
import itertools
import json
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, nullcontext
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from threading import Lock
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

import arbcli
from arbcli.data.text import EVAL_BATCHES, Text, Texts, batch, evaluation_batches
from arbcli.generation.load import load_model, read_saved, saved_config
from arbcli.interop.huggingface.config_json import read_folder_config
from arbcli.interop.huggingface.dense import sources
from arbcli.interop.huggingface.folder import WeightFolder
from arbcli.interop.importing import read_float
from arbcli.kernels.runtime.backend import use_backend
from arbcli.kernels.runtime.device import deterministic, resolve_backend, resolve_device
from arbcli.model.baselines import FloatWeight
from arbcli.training.configure import new_config
from arbcli.training.schedule import learning_rate
from arbcli.training.trainer import Trainer
from benchmarks import float_steps, results
from benchmarks.float_qwen import FloatQwen, Shape
from benchmarks.float_steps import WholeStep
from benchmarks.measuring import measured, wait_turn

SHAPE = Shape(
    layers=6, dim=384, heads=6, kv_heads=6, head_width=64, ffn=1024, vocabulary=256, tied=False
)
CTX, BATCH = 512, 64
PRETRAINED_STEPS, STEPS = 2000, 600
WARMUP = 60
RULES = {
    "moment": ("moment", "muon"),
    "moment factored": ("moment", "adafactor"),
    "nibble": ("nibble", "muon"),
    "nibble factored": ("nibble", "adafactor"),
}
"""Rule and optimizer, by kind."""
MIXTURES = {
    "moment+nibble": ("--mlp-rule", "nibble"),
    "moment+nibble-blocks": ("--attention-rule", "nibble", "--mlp-rule", "nibble"),
}
"""Options of `arb import` for rules of parts, by kind; all other weights have `moment`."""
IN_BLOCK = {
    "q": "self_attn.q_proj", "k": "self_attn.k_proj", "v": "self_attn.v_proj",
    "o": "self_attn.o_proj", "q_norm": "self_attn.q_norm", "k_norm": "self_attn.k_norm",
    "gate": "mlp.gate_proj", "up": "mlp.up_proj", "down": "mlp.down_proj",
    "norm": "input_layernorm", "ffn_norm": "post_attention_layernorm",
}  # fmt: skip
"""Names of Transformers for the weights of a block."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Job:
    """A run of tuning."""

    part: str
    kind: str
    lr: float
    seed: int = 0
    steps: int = STEPS
    batch: int = BATCH


SWEPT = {
    "AdamW": (3e-3, 5e-3, 1e-2, 1e-3, 3e-4, 1e-4),
    "moment": (0.3, 0.5, 1.0, 0.1, 0.03, 0.01),
    "nibble": (0.3, 0.1, 1.0, 0.03),
    "Muon": (5e-3, 1e-2, 2e-3, 5e-4),
    "moment factored": (0.3, 1.0, 0.1, 0.03),
    "nibble factored": (0.3, 0.1),
}
"""Rates by kind: the first with each seed, the others with seed 0 after it."""
OTHERS = {
    "bf16 AdamW": (3e-3, 1e-3, 1e-2),
    "bf16 AdamW, eight bits": (3e-3, 1e-3, 1e-2),
    "LoRA 256": (1e-3, 3e-3, 3e-4),
    "LoRA 16": (1e-2, 3e-2, 3e-3),
    "bf16 Adafactor": (1e-3, 3e-4, 3e-3),
    "BAdam": (3e-3, 1e-3, 1e-2),
}
"""The same of other ways."""
PARTS = ("swept", "speed", "others")
SPEEDS = (*RULES, "AdamW", "Muon", *OTHERS)
UNTIMED_STEPS, TIMED_STEPS = 8, 40


def jobs(seeds: Sequence[int]) -> list[Job]:
    """List all runs of some of the seeds 0 to 2, of each kind the most telling ones first."""
    return [
        Job(part=part, kind=kind, lr=lr, seed=seed)
        for part, rates in (("swept", SWEPT), ("others", OTHERS))
        for kind, (first, *others) in rates.items()
        for lr, some in [(first, seeds), *((other, [0]) for other in others if 0 in seeds)]
        for seed in some
    ]


def pretrain(
    texts: Path,
    folder: Path,
    steps: int,
    device: str,
    data: Iterable[str] = ("code-train.txt",),
    held_out: Iterable[str] = ("code-val.txt",),
    shape: Shape | None = None,
    windows: int = BATCH,
) -> None:
    """Train the float model on code, or other texts, and write a folder for Transformers."""
    folder.mkdir(parents=True)
    shape = shape or SHAPE
    fields = {
        "architectures": ["Qwen3ForCausalLM"], "model_type": "qwen3", "hidden_size": shape.dim,
        "intermediate_size": shape.ffn, "num_hidden_layers": shape.layers,
        "num_attention_heads": shape.heads, "num_key_value_heads": shape.kv_heads,
        "head_dim": shape.head_width, "vocab_size": shape.vocabulary, "rms_norm_eps": 1e-6,
        "tie_word_embeddings": shape.tied, "max_position_embeddings": CTX, "rope_theta": 1e6,
        "dtype": "float32",
    }  # fmt: skip
    (folder / "config.json").write_text(json.dumps(fields))
    train, val = (Text([texts / name for name in some]) for some in (data, held_out))
    begun = Texts(train, val, "")
    trainer = twin_trainer(
        folder, begun, batch=windows, lr=1e-3, steps=steps, device=device, optimizer="adamw"
    )
    with deterministic():
        for _ in range(steps):
            trainer.train_step()
    tensors = {
        part.hugging_face: source.tensor.latent.detach()[part.rows].reshape(part.shape).clone()
        for source in sources(trainer.model)
        for part in source.parts
        if isinstance(source.tensor, FloatWeight)
    }
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})


def twin_trainer(folder: Path, texts: Texts, *, device: str, **options: Any) -> Trainer:
    """Make a trainer of the float baseline of a folder's model."""
    model = read_folder_config(folder, weights="float")
    config = new_config(preset=model, device=device, warmup=WARMUP, **options)
    with deterministic():
        return Trainer(config, texts, capture=True)


def tune_twin(job: Job, texts: Path, folder: Path, device: str) -> dict[str, Any]:
    """Tune the float baseline by AdamW or Muon."""
    novels = Texts(Text([texts / "novels-train.txt"]), Text([texts / "novels-val.txt"]), "")
    options = {
        "optimizer": job.kind.lower(),
        "lr": job.lr,
        "steps": job.steps,
        "seed": job.seed,
        "batch": job.batch,
    }
    trainer = twin_trainer(folder, novels, device=device, **options)
    return tuned_twin(trainer, folder, texts, device)


def tuned_twin(
    trainer: Trainer,
    folder: Path,
    texts: Path,
    device: str,
    begin: Callable[[], None] = lambda: None,
) -> dict[str, Any]:
    """Train a baseline from the weights of the folder to its end, and score it.

    Args:
        trainer: of the baseline.
        folder: of the float model.
        texts: folder of the texts.
        device: of the trainer.
        begin: is called when the weights are there.
    """
    begun = read_float(WeightFolder(folder), read_folder_config(folder, weights="float"))
    trainer.model.load_state_dict(begun.state_dict())
    begin()
    with deterministic():
        for _ in range(trainer.config.steps):
            trainer.train_step()
    trainer.release_graph()
    return {"state_bytes": trainer.state_bytes()} | both_losses(trainer.model.loss, texts, device)


def prepare_plain(kind: str, lr: float, folder: Path | None, device: str) -> WholeStep:
    """Make a float model in bf16, with the weights of the folder, and what tunes it."""
    model = FloatQwen(SHAPE, torch.bfloat16, recompute=False, device=device)
    if folder is not None:
        load_plain(model, load_file(folder / "model.safetensors"))
    return WholeStep(model, float_steps.KINDS[kind](model, lr))


def tune_plain(job: Job, texts: Path, folder: Path, device: str) -> dict[str, Any]:
    """Tune weights in bf16, or adapters, as the field does it."""
    step = prepare_plain(job.kind, job.lr, folder, device)
    text, config = Text([texts / "novels-train.txt"]), new_config(steps=job.steps, warmup=WARMUP)
    drawn = {"seed": job.seed, "micro": 0, "batch_size": job.batch, "context": CTX}
    for number in range(job.steps):
        step.updates.lr.fill_(job.lr * learning_rate(config, number) / config.lr)
        step(*batch(text, step=number, device=device, **drawn))
    figures = {"state_bytes": step.state_bytes(), "captured": step.graph is not None}
    return figures | both_losses(step.model.loss, texts, device)


def measure(kind: str, texts: Path, folder: Path, device: str) -> dict[str, Any]:
    """Time steps of a way of tuning, and measure its peak."""
    novels = Text([texts / "novels-train.txt"])
    drawn: dict[str, Any] = {
        "seed": 0,
        "micro": 0,
        "batch_size": BATCH,
        "context": CTX,
        "device": device,
    }
    if kind in float_steps.KINDS:
        whole = prepare_plain(kind, 1e-4, folder, device)
        batches = itertools.cycle([batch(novels, step=number, **drawn) for number in range(4)])
        step, state = lambda: whole(*next(batches)), whole.state_bytes
    else:
        both = Texts(novels, Text([texts / "novels-val.txt"]), "")
        if kind in RULES:
            model = saved_config(read_saved(imported(folder, kind), print).checkpoint)
            config = new_config(preset=model, batch=BATCH, device=device)
            with deterministic():
                trainer = Trainer(config, both, capture=True)
        else:
            trainer = twin_trainer(folder, both, device=device, optimizer=kind.lower(), batch=BATCH)
        step, state = trainer.train_step, trainer.state_bytes
    with deterministic() if kind not in float_steps.KINDS else nullcontext():
        for _ in range(UNTIMED_STEPS):
            step()
        wait_turn()
        synchronise(device)
        started = time.perf_counter()
        for _ in range(TIMED_STEPS):
            step()
        synchronise(device)
    seconds = (time.perf_counter() - started) / TIMED_STEPS
    job = Job(part="speed", kind=kind, lr=0.0, steps=TIMED_STEPS)
    return asdict(job) | {
        "state_bytes": state(),
        "peak_bytes": torch.cuda.max_memory_allocated() if device == "cuda" else None,
        "bytes_per_second": round(BATCH * CTX / seconds),
        "seconds": round(seconds, 5),
    }


def synchronise(device: str) -> None:
    """Wait for the device."""
    if device == "cuda":
        torch.cuda.synchronize()


@torch.no_grad()
def load_plain(model: FloatQwen, tensors: dict[str, Tensor]) -> None:
    """Copy the weights of a folder."""
    model.embedding.copy_(tensors["model.embed_tokens.weight"])
    model.norm.copy_(tensors["model.norm.weight"])
    model.head.copy_(tensors["lm_head.weight"])
    for index, block in enumerate(model.matrices):
        for name, theirs in IN_BLOCK.items():
            block[name].copy_(tensors[f"model.layers.{index}.{theirs}.weight"])


def tune_integers(job: Job, texts: Path, folder: Path, device: str) -> dict[str, Any]:
    """Tune integers as `arb train --init-from` does, from the import of the folder."""
    begun = imported(folder, job.kind)
    options: dict[str, Any] = {
        "lr": job.lr, "steps": job.steps, "seed": job.seed, "batch": job.batch, "warmup": WARMUP,
        "eval_every": 0, "keep": 1, "device": device, "data": [str(texts / "novels-train.txt")],
        "val": [str(texts / "novels-val.txt")],
    }  # fmt: skip
    with tempfile.TemporaryDirectory() as made:
        run = Path(made, "run")
        config = new_config(preset=saved_config(read_saved(begun, print).checkpoint), **options)
        arbcli.train(config, run, init_from=begun)
        return score(run, texts, device)


def score(run: Path, texts: Path, device: str) -> dict[str, Any]:
    """Return both losses of a saved run, and the bytes of its state."""
    model = load_model(run, device=device)
    state = max(path.stat().st_size for path in run.glob("step-*.safetensors"))
    return {"state_bytes": state} | both_losses(model.loss, texts, device)


def imported(folder: Path, kind: str) -> Path:
    """Name the run that a kind begins with."""
    return folder.with_name(f"imported-{kind.replace(' ', '-')}")


def import_for(folder: Path, kind: str) -> None:
    """Import the float model for a kind, in a process of its own.

    Raises:
        RuntimeError: it failed.
    """
    rule, optimizer = RULES.get(kind, RULES["moment"])
    command = [sys.executable, "-m", "arbcli", "import", str(folder), "--rule", rule]
    command += ["--optimizer", optimizer, *MIXTURES.get(kind, ())]
    command += ["--out", str(imported(folder, kind))]
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode:
        raise RuntimeError(f"{' '.join(command)}\n{done.stderr[-800:]}")


@torch.no_grad()
def both_losses(
    loss: Callable[[Tensor, Tensor], Tensor], texts: Path, device: str
) -> dict[str, float]:
    """Average the loss over the held-out windows of both texts."""
    means = {}
    with use_backend(resolve_backend(None, resolve_device(device))):
        for name, file in (("new", "novels-val.txt"), ("old", "code-val.txt")):
            batches = evaluation_batches(
                Text([texts / file]), num_batches=EVAL_BATCHES, batch_size=BATCH, context=CTX,
                device=device,
            )  # fmt: skip
            losses = [float(loss(ids, targets)) for ids, targets in batches]
            means[name] = round(sum(losses) / len(losses), 4)
    return means


def tune(job: Job, texts: Path, folder: Path, device: str) -> dict[str, Any]:
    """Run a job: tune a model, and return its results."""
    if job.kind in RULES:
        return tune_integers(job, texts, folder, device)
    if job.kind in ("AdamW", "Muon"):
        return tune_twin(job, texts, folder, device)
    return tune_plain(job, texts, folder, device)


def options(benchmark: str, summary: str) -> argparse.ArgumentParser:
    """Return a parser for a benchmark that tunes models in several processes."""
    parser = results.options(benchmark, summary)
    parser.add_argument("texts", type=Path, help="folder of the texts")
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--steps", type=int, help="steps of every run, for a trial")
    parser.add_argument("--folder", type=Path, help="the float model; trained if missing")
    parser.add_argument("--kinds", nargs="+", help="only run jobs of these kinds")
    parser.add_argument("--jobs", help=argparse.SUPPRESS)
    return parser


@contextmanager
def prepared_folder(args: argparse.Namespace, kinds: Iterable[str], *what: Any) -> Iterator[Path]:
    """Train the float model if it is missing, and import it for several kinds.

    Args:
        args: parsed arguments of `options`; without a folder, a temporary one is used.
        kinds: kinds in `RULES` and `MIXTURES`.
        what: arguments of `pretrain` after the device.

    Yields:
        Folder of the float model.
    """
    with tempfile.TemporaryDirectory() as temporary:
        folder = args.folder or Path(temporary, "qwen3-of-bytes")
        if not folder.exists():
            pretrain(args.texts, folder, args.steps or PRETRAINED_STEPS, args.device, *what)
        with ThreadPoolExecutor(len(RULES)) as pool:
            list(pool.map(lambda kind: import_for(folder, kind), kinds))
        yield folder


def run_all(benchmark: str, jobs: Iterable[Any], folder: Path, args: argparse.Namespace) -> None:
    """Run jobs, with one process for each kind; print and save rows as they come.

    Args:
        benchmark: module of `benchmarks` that runs jobs by `--jobs`, and name of the results.
        jobs: dataclasses with `kind`, and with `steps`, which `args` may replace.
        folder: folder of the float model.
        args: parsed arguments of `options`.
    """
    kinds: dict[str, list[dict[str, Any]]] = {}
    for job in jobs:
        if job.kind in (args.kinds or (job.kind,)):
            job = replace(job, steps=args.steps or job.steps)
            kinds.setdefault(job.kind, []).append(asdict(job))
    writing = Lock()

    def run(group: list[dict[str, Any]]) -> None:
        words = ["-m", f"benchmarks.{benchmark}", str(args.texts), "--device", args.device]
        words += ["--jobs", json.dumps(group), "--folder", str(folder)]
        command = [sys.executable, *words]
        with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
            assert process.stdout is not None
            for line in process.stdout:
                if line.startswith("{"):
                    with writing:
                        save_row(benchmark, json.loads(line), args)
        if process.returncode:
            print(f"{group[0]['kind']}: failed", flush=True)

    with ThreadPoolExecutor(max(1, len(kinds))) as pool:
        list(pool.map(run, kinds.values()))


def run_jobs(jobs: str, kind: type, run: Callable[[Any], dict[str, Any]]) -> None:
    """Run jobs one after another in a process of `run_all`, and print a row of each.

    Args:
        jobs: JSON list of the jobs' fields.
        kind: dataclass of jobs.
        run: runs a job, and returns its results, which a row has after the job's fields.
    """
    for fields in json.loads(jobs):
        started, job = time.perf_counter(), kind(**fields)
        result = run(job)
        seconds = round(time.perf_counter() - started, 1)
        print(json.dumps(asdict(job) | result | {"seconds": seconds}), flush=True)
        torch.compiler.reset()  # torch compiles eight variants of a function, and each job is one
        gc.collect()
        if torch.cuda.is_available():
            torch.cuda.empty_cache()


def save_row(benchmark: str, row: dict[str, Any], args: argparse.Namespace) -> None:
    """Print a row, and save it with the results."""
    print(json.dumps(row), flush=True)
    command = results.command_line(benchmark, "TEXTS")
    results.save(benchmark, [row], command=command, folder=args.out)


def print_begun(rules: Iterable[str], folder: Path, args: argparse.Namespace) -> None:
    """Print the losses of the float model and of its import."""
    for kind in rules:
        row = {"part": "begun", "kind": kind, "lr": 0.0, "seed": 0, "steps": 0, "seconds": 0.0}
        scores = score(imported(folder, kind), args.texts, args.device)
        print(json.dumps(row | scores), flush=True)
    twin = read_float(WeightFolder(folder), read_folder_config(folder, weights="float"))
    print("float", both_losses(twin.to(args.device).loss, args.texts, args.device), flush=True)


def main() -> None:
    """Train the float model, run all jobs, and write the rows."""
    parser = options("tuning", "Compare ways of tuning.")
    parser.add_argument("--parts", nargs="+", choices=PARTS, help="[all]")
    parser.add_argument("--seeds", nargs="+", type=int, choices=range(3), default=range(3))
    parser.add_argument("--measure", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.jobs:
        run_jobs(args.jobs, Job, lambda job: tune(job, args.texts, args.folder, args.device))
        return
    if args.measure:
        print(json.dumps(measure(args.measure, args.texts, args.folder, args.device)))
        return
    rules = [kind for kind in RULES if kind in (args.kinds or RULES)]
    with prepared_folder(args, rules) as folder:
        parts = args.parts or PARTS
        if {*parts} != {"speed"}:
            print_begun(rules, folder, args)
        if "speed" in parts:
            words = [sys.executable, "-m", "benchmarks.tuning", str(args.texts)]
            words += ["--device", args.device, "--folder", str(folder), "--measure"]
            kinds = [kind for kind in SPEEDS if kind in (args.kinds or (kind,))]
            for row in measured([*words, kind] for kind in kinds):
                if row is not None:
                    save_row("tuning", row, args)
        chosen = [job for job in jobs(args.seeds) if job.part in parts]
        run_all("tuning", chosen, folder, args)


if __name__ == "__main__":
    main()
