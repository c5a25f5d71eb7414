"""A float model that is imported and tuned on another text, against float training of the same.

    python -m benchmarks.tuning TEXTS [--folder FOLDER] [--text TEXT] [--parts PART...]
        [--kinds KIND...] [--seeds N...] [--out DIR]

TEXTS is a folder with `novels-train.txt`, `novels-val.txt`, and what `benchmarks.code_text` writes:
`code-train.txt`, `code-val.txt` and chats. FOLDER is a Llama or Qwen 3 for Transformers with its
tokenizer; its rows are in `tuning_tokens.json`. Without it a Qwen 3 of bytes (10.8 million weights)
is trained on code in float32 by AdamW, and written as such a folder. Integers go the way of the
README: `arb import`, then `arb train --init-from`, by the functions that these commands call. The
peers begin with the same folder: AdamW and Muon by the float baseline, others by `float_steps`.

`new` is the held-out loss of TEXT, by default novels, `old` that of code, in nats a byte, both of
the same windows. With a tokenizer, rows also have the losses of the other texts, and `_choices`: in
how many of some held-out passages the true continuation is more likely than three others.
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
from safetensors.torch import save_file
from torch import Tensor

import arbcli
from arbcli.base.run_files import TOKENIZER
from arbcli.config.model import ModelConfig
from arbcli.config.training import TrainConfig
from arbcli.data.text import (
    EVAL_BATCHES,
    EVAL_SEED,
    Text,
    batch_at,
    batch_starts,
    held_out_batch,
)
from arbcli.generation.load import load_model, read_saved, saved_config
from arbcli.interop.huggingface.config_json import read_folder_config
from arbcli.interop.huggingface.dense import sources
from arbcli.interop.huggingface.folder import WeightFolder
from arbcli.kernels.runtime.backend import use_backend
from arbcli.kernels.runtime.device import (
    COMPUTE,
    default_compute,
    deterministic,
    resolve_backend,
    resolve_device,
)
from arbcli.model.baselines import FloatWeight
from arbcli.model.build import build_model
from arbcli.model.language_model import LanguageModel
from arbcli.training.configure import new_config
from arbcli.training.directory import open_run_texts
from arbcli.training.observer import Observer
from arbcli.training.record import Record
from arbcli.training.schedule import learning_rate
from arbcli.training.trainer import Trainer
from benchmarks import float_steps, results
from benchmarks.float_qwen import FloatQwen, Shape
from benchmarks.float_steps import WholeStep
from benchmarks.measuring import measured, wait_turn

SHAPE = Shape(
    layers=6, dim=384, heads=6, kv_heads=6, head_width=64, ffn=1024, vocabulary=256, tied=False
)
PRETRAINED_STEPS, WARMUP = 2000, 60
RULES = {
    "moment": ("moment", "muon"),
    "moment factored": ("moment", "adafactor"),
    "nibble": ("nibble", "muon"),
    "nibble factored": ("nibble", "adafactor"),
}
"""Rule and optimizer, by kind."""
VARIANTS: dict[str, dict[str, Any]] = {
    "moment, fp8": {"compute": "fp8"},
    "moment, 8 x 8": {"batch": 8, "accum": 8},
    "moment, averaged": {"weight_average": 50},
}
"""Options of the run that differ from those of `moment`, by kind."""
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
class Setting:
    """How models of bytes, or of tokens, are tuned."""

    ctx: int
    """Symbols of a window."""
    batch: int
    """Windows of a step."""
    steps: int
    rates: dict[str, dict[str, tuple[float, ...]]]
    """Rates by part and kind: the first with each seed, the others with seed 0 after it."""
    suffix: str = ""
    """Ending of the names of files of results."""


BYTES = Setting(
    ctx=512,
    batch=64,
    steps=600,
    rates={
        "swept": {
            "AdamW": (3e-3, 5e-3, 1e-2, 1e-3, 3e-4, 1e-4),
            "moment": (0.3, 0.5, 1.0, 0.1, 0.03, 0.01),
            "nibble": (0.3, 0.1, 1.0, 0.03),
            "Muon": (5e-3, 1e-2, 2e-3, 5e-4),
            "moment factored": (0.3, 1.0, 0.1, 0.03),
            "nibble factored": (0.3, 0.1),
            "moment, fp8": (0.3,),
            "moment, 8 x 8": (0.3,),
        },
        "others": {
            "bf16 AdamW": (3e-3, 1e-3, 1e-2),
            "bf16 AdamW, eight bits": (3e-3, 1e-3, 1e-2),
            "LoRA 256": (1e-3, 3e-3, 3e-4),
            "LoRA 16": (1e-2, 3e-2, 3e-3),
            "bf16 Adafactor": (1e-3, 3e-4, 3e-3),
            "BAdam": (3e-3, 1e-3, 1e-2),
        },
    },
)
TOKENS = Setting(
    ctx=1024,
    batch=8,
    steps=512,
    rates={
        "swept": {
            "AdamW": (3e-4, 1e-3, 1e-4, 3e-3),
            "moment": (0.01, 0.005, 0.003, 0.03),
            "moment factored": (0.01, 0.003, 0.03),
            "moment, averaged": (0.01, 0.02),
            "nibble": (0.01, 0.005, 0.003, 0.03),
            "moment, fp8": (0.03, 0.01),
        },
        "others": {"LoRA 16, all matrices": (1e-3, 3e-3, 3e-4, 1e-2)},
    },
    suffix="_tokens",
)
TEXTS = {"novels": "txt", "code": "txt", "chats": "jsonl"}
"""Endings of the files of each text."""
NEW, OLD, CHATS = TEXTS
CURVE = 4
"""Number of losses of a curve."""
QUESTIONS, CHOICES, PASSAGE, CONTINUATION = 256, 4, 48, 8
"""Numbers of held-out passages, of continuations of each, and of tokens of both."""
QUESTIONS_AT_ONCE = 16
WRITING = Lock()
"""Held while a file of results is written."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Job:
    """A run of tuning."""

    part: str
    kind: str
    lr: float
    seed: int = 0
    steps: int = BYTES.steps
    batch: int = BYTES.batch
    text: str = NEW


PARTS = ("begun", "swept", "speed", "others")
FLOAT = "float"
"""Kind of the float model before it is tuned."""
UNTIMED_STEPS, TIMED_STEPS = 8, 40


def setting_of(folder: Path | None) -> Setting:
    """Choose the setting: that of tokens if the folder of a model has a tokenizer."""
    return TOKENS if folder and (folder / TOKENIZER).exists() else BYTES


def jobs(seeds: Sequence[int], setting: Setting, text: str = NEW) -> list[Job]:
    """List all runs of some of the seeds 0 to 2, of each kind the most telling ones first."""
    settings: dict[str, Any] = {"batch": setting.batch, "text": text}
    ours = [kind for kind in setting.rates["swept"] if kind in RULES]
    begun = [Job(part="begun", kind=kind, lr=0.0, steps=0, **settings) for kind in (FLOAT, *ours)]
    return begun + [
        Job(part=part, kind=kind, lr=lr, seed=seed, steps=setting.steps, **settings)
        for part, rates in setting.rates.items()
        if text != CHATS or part == "swept"  # `FloatQwen` has no documents
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
    windows: int = BYTES.batch,
) -> None:
    """Train the float model on code, or other texts, and write a folder for Transformers."""
    folder.mkdir(parents=True)
    shape, shown = shape or SHAPE, {"architectures": ["Qwen3ForCausalLM"], "dtype": "float32"}
    fields = shape.hugging_face(max_position_embeddings=BYTES.ctx)
    (folder / "config.json").write_text(json.dumps(fields | shown))
    train, val = ([str(texts / name) for name in some] for some in (data, held_out))
    trainer = twin_trainer(
        folder, device=device, batch=windows, lr=1e-3, steps=steps, optimizer="adamw", data=train,
        val=val,
    )  # fmt: skip
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


def text_options(texts: Path, folder: Path, *names: str) -> dict[str, Any]:
    """Return options of `arb train` for texts of one kind, and for their windows."""
    setting = setting_of(folder)
    options: dict[str, Any] = {
        role: [str(texts / f"{name}-{part}.{TEXTS[name]}") for name in names]
        for role, part in (("data", "train"), ("val", "val"))
    }
    if setting is TOKENS:
        options["tokenizer"] = str(folder / TOKENIZER)
    if CHATS in names:
        options["field"] = "messages"
    return options | {"ctx": setting.ctx, "batch": setting.batch}


def twin_config(folder: Path, *, weights: str = "float", **options: Any) -> TrainConfig:
    """Configure the float baseline of a folder's model, by options of `arb train`."""
    model = read_folder_config(folder, weights=weights)
    return new_config(preset=model, warmup=WARMUP, **options)


def twin_trainer(folder: Path, **options: Any) -> Trainer:
    """Make a trainer of the float baseline: see `twin_config`."""
    config = twin_config(folder, **options)
    with deterministic():
        return Trainer(config, open_run_texts(config), capture=True)


def job_options(job: Job, texts: Path, folder: Path) -> dict[str, Any]:
    """Return options of `arb train` for a job."""
    settings = {"lr": job.lr, "steps": job.steps, "seed": job.seed, "batch": job.batch}
    return text_options(texts, folder, job.text) | settings


def tune_twin(job: Job, texts: Path, folder: Path, device: str) -> dict[str, Any]:
    """Tune the float baseline by AdamW or Muon."""
    options = job_options(job, texts, folder)
    trainer = twin_trainer(folder, device=device, optimizer=job.kind.lower(), **options)
    return tuned_twin(trainer, folder, texts, device, job.text)


def tuned_twin(
    trainer: Trainer, folder: Path, texts: Path, device: str, new: str = NEW
) -> dict[str, Any]:
    """Train a baseline from the weights of the folder to its end, and score it.

    Args:
        trainer: of the baseline.
        folder: of the float model.
        texts: folder of the texts.
        device: of the trainer.
        new: name of the text that is new.
    """
    fill(trainer.model, WeightFolder(folder).read)
    config = trainer.config
    curve = Curve(f"{config.optimizer} {config.lr:g}")
    with deterministic():
        for step in range(1, config.steps + 1):
            trainer.train_step()
            if step % max(1, config.steps // CURVE) == 0:
                curve.add(step, trainer.evaluate() / trainer.texts.val.symbol_bytes)
    trainer.release_graph()
    figures = {"state_bytes": trainer.state_bytes(), "curve": curve.losses}
    eager = untrained(config.model, device)  # one that is compiled would be so for each shape
    eager.load_state_dict(trainer.model.state_dict())
    return figures | scores(eager, texts, folder, device, new)


class Curve(Observer):
    """Keeps and prints held-out losses of a run, in nats a byte.

    Args:
        name: of the run.
    """

    def __init__(self, name: str) -> None:
        self.name = name
        self.losses: list[tuple[int, float]] = []
        """Number of steps, and the loss after them."""

    def recorded(self, record: Record) -> None:
        """Add the loss of a record, if it has one."""
        if record.val_loss is not None:
            self.add(record.step, record.val_loss)

    def add(self, step: int, loss: float) -> None:
        """Add a loss."""
        self.losses.append((step, round(loss, 4)))
        print(f"{self.name}, step {step}: {loss:.4f}", file=sys.stderr, flush=True)


@torch.no_grad()
def fill(model: LanguageModel, read: Callable[[str], Tensor]) -> None:
    """Copy weights, by their names of Transformers, into a float baseline."""
    for source in sources(model):
        if isinstance(source.tensor, FloatWeight):
            for part in source.parts:
                rows = source.tensor.latent[part.rows]
                rows.copy_(read(part.hugging_face).view_as(rows))


def untrained(config: ModelConfig, device: str) -> LanguageModel:
    """Build a baseline whose weights are not set."""
    compute = COMPUTE[default_compute(resolve_device(device))]
    return build_model(config, compute, seed=None).to(device)


def float_model(folder: Path, read: Callable[[str], Tensor], device: str) -> LanguageModel:
    """Build the float baseline of a folder with some weights, to score them."""
    model = untrained(read_folder_config(folder, weights="float"), device)
    fill(model, read)
    return model


def prepare_plain(kind: str, lr: float, folder: Path, device: str) -> WholeStep:
    """Make a float model in bf16, with the weights of the folder, and what tunes it."""
    model = FloatQwen(Shape.read(folder), torch.bfloat16, recompute=False, device=device)
    read = WeightFolder(folder).read
    with torch.no_grad():
        for name, weight in named_weights(model).items():
            weight.copy_(read(name))
    return WholeStep(model, float_steps.KINDS[kind](model, lr))


def named_weights(model: FloatQwen) -> dict[str, Tensor]:
    """List the weights by their names of Transformers, with their adapters added."""
    named: dict[str, Tensor] = {
        "model.embed_tokens.weight": model.embedding,
        "model.norm.weight": model.norm,
    }
    if not model.shape.tied:
        named["lm_head.weight"] = model.head
    for index, (block, factors) in enumerate(zip(model.matrices, model.factors, strict=True)):
        for name, weight in block.items():
            if name in factors:
                pair = factors[name]
                weight = weight.detach().float() + 2 * pair["b"].detach() @ pair["a"].detach()
            named[f"model.layers.{index}.{IN_BLOCK[name]}.weight"] = weight
    return named


def tune_plain(job: Job, texts: Path, folder: Path, device: str) -> dict[str, Any]:
    """Tune weights in bf16, or adapters, as the field does it."""
    step = prepare_plain(job.kind, job.lr, folder, device)
    config = twin_config(folder, device=device, **job_options(job, texts, folder))
    text = open_run_texts(config).train
    context = config.model.ctx
    for number in range(job.steps):
        step.updates.lr.fill_(job.lr * learning_rate(config, number) / config.lr)
        starts = batch_starts(text, job.seed, number, 0, job.batch, context)
        step(*batch_at(text, starts, context, device))
    figures = {"state_bytes": step.state_bytes(), "captured": step.graph is not None}
    twin = float_model(folder, named_weights(step.model).__getitem__, device)
    return figures | scores(twin, texts, folder, device, job.text)


def measure(kind: str, texts: Path, folder: Path, device: str) -> dict[str, Any]:
    """Time steps of a way of tuning, and measure its peak."""
    setting, options = setting_of(folder), text_options(texts, folder, NEW)
    if kind in float_steps.KINDS:
        text = open_run_texts(twin_config(folder, device=device, **options)).train
        draws = [batch_starts(text, 0, step, 0, setting.batch, setting.ctx) for step in range(4)]
        prepared = prepare_plain(kind, 1e-4, folder, device)
        batches = itertools.cycle([batch_at(text, at, setting.ctx, device) for at in draws])
        step, state = lambda: prepared(*next(batches)), prepared.state_bytes
    else:
        if kind in RULES or kind in VARIANTS:
            options |= VARIANTS.get(kind, {})
            model = saved_config(read_saved(imported(folder, kind), print).checkpoint)
            config = new_config(preset=model, device=device, **options)
            with deterministic():
                trainer = Trainer(config, open_run_texts(config), capture=True)
        else:
            trainer = twin_trainer(folder, device=device, optimizer=kind.lower(), **options)
        step, state, text = trainer.train_step, trainer.state_bytes, trainer.texts.train
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
        "bytes_per_second": round(setting.batch * setting.ctx * text.symbol_bytes / seconds),
        "seconds": round(seconds, 5),
    }


def synchronise(device: str) -> None:
    """Wait for the device."""
    if device == "cuda":
        torch.cuda.synchronize()


def tune_integers(job: Job, texts: Path, folder: Path, device: str) -> dict[str, Any]:
    """Tune integers as `arb train --init-from` does, from the import of the folder."""
    begun = imported(folder, job.kind)
    model = saved_config(read_saved(begun, print).checkpoint)
    options = job_options(job, texts, folder) | VARIANTS.get(job.kind, {})
    config = new_config(preset=model, device=device, warmup=WARMUP, **options)
    return tuned_integers(config, begun, texts, folder, job.text)


def tuned_integers(
    config: TrainConfig, begun: Path, texts: Path, folder: Path, new: str = NEW
) -> dict[str, Any]:
    """Train a run from another one, and score it: see `tuned_twin`."""
    config = replace(config, eval_every=max(1, config.steps // CURVE), keep=1)
    curve = Curve(f"{config.model.rule} {config.lr:g}")
    with tempfile.TemporaryDirectory() as made:
        run = Path(made, "run")
        arbcli.train(config, run, init_from=begun, observer=curve)
        return {"curve": curve.losses} | score(run, texts, folder, config.device, new)


def score(run: Path, texts: Path, folder: Path, device: str, new: str = NEW) -> dict[str, Any]:
    """Return the scores of a saved run, and the bytes of its state."""
    model = load_model(run, device=device)
    state = max(path.stat().st_size for path in run.glob("step-*.safetensors"))
    return {"state_bytes": state} | scores(model, texts, folder, device, new)


def imported(folder: Path, kind: str) -> Path:
    """Return the run that a kind begins with; a process of its own imports it if it is missing.

    Raises:
        RuntimeError: the import failed.
    """
    run = folder.with_name(f"{folder.name}-{kind.replace(' ', '-')}")
    if not run.exists():
        rule, optimizer = RULES.get(kind, RULES["moment"])
        command = [sys.executable, "-m", "arbcli", "import", str(folder), "--rule", rule]
        command += ["--optimizer", optimizer, *MIXTURES.get(kind, ()), "--out", str(run)]
        done = subprocess.run(command, capture_output=True, text=True)
        if done.returncode:
            raise RuntimeError(f"{' '.join(command)}\n{done.stderr[-800:]}")
    return run


@torch.no_grad()
def scores(
    model: LanguageModel, texts: Path, folder: Path, device: str, new: str = NEW
) -> dict[str, float]:
    """Return losses and choices of a model on the held-out texts, see the module."""
    setting, figures = setting_of(folder), {}
    names = {"new": new, "old": OLD}
    if setting is TOKENS:
        names |= {name: name for name in TEXTS if name not in (new, OLD)}
    with use_backend(resolve_backend(None, resolve_device(device))):
        for field, name in names.items():
            options = text_options(texts, folder, name)
            options["data"] = options["val"]  # what it was trained on is not read
            text = open_run_texts(twin_config(folder, device=device, **options)).val
            total, count = 0.0, 0
            for number in range(EVAL_BATCHES):
                inputs = held_out_batch(text, number, setting.batch, setting.ctx, device)
                learnt = int((inputs[1] >= 0).sum())
                total, count = total + float(model.loss(*inputs)) * learnt, count + learnt
            figures[field] = round(total / count / text.symbol_bytes, 4)
            if setting is TOKENS and not text.packs:
                figures[f"{field}_choices"] = choose(model, text, device)
    return figures


def choose(model: LanguageModel, text: Text, device: str) -> float:
    """Return the share of passages whose true continuation has the lowest loss of `CHOICES`."""
    length, right = PASSAGE + CONTINUATION, 0
    for number in range(QUESTIONS // QUESTIONS_AT_ONCE):
        starts = batch_starts(text, EVAL_SEED, number, 0, QUESTIONS_AT_ONCE * CHOICES, length - 1)
        windows = text.window_batch(starts, length).long().view(-1, CHOICES, length).to(device)
        windows[:, :, :PASSAGE] = windows[:, :1, :PASSAGE]
        ids = windows.flatten(0, 1)
        losses = model.position_losses(ids[:, :-1], ids[:, 1:])[:, PASSAGE - 1 :].sum(1)
        right += int((losses.view(-1, CHOICES).argmin(1) == 0).sum())
    return right / QUESTIONS


def tune(job: Job, texts: Path, folder: Path, device: str) -> dict[str, Any]:
    """Run a job: tune a model, or score what ways begin with, and return its results."""
    if job.kind == FLOAT:
        twin = float_model(folder, WeightFolder(folder).read, device)
        return {"state_bytes": 0} | scores(twin, texts, folder, device, job.text)
    if job.part == "begun":
        return score(imported(folder, job.kind), texts, folder, device, job.text)
    if job.kind in RULES or job.kind in VARIANTS:
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
    parser.add_argument("--text", choices=TEXTS, default=NEW, help="what is new [novels]")
    parser.add_argument("--kinds", nargs="+", help="only run jobs of these kinds")
    parser.add_argument("--jobs", help=argparse.SUPPRESS)
    return parser


@contextmanager
def prepared_folder(args: argparse.Namespace, *what: Any) -> Iterator[Path]:
    """Train the float model if it is missing.

    Args:
        args: parsed arguments of `options`; without a folder, a temporary one is used.
        what: arguments of `pretrain` after the device.

    Yields:
        Folder of the float model.
    """
    with tempfile.TemporaryDirectory() as temporary:
        folder = args.folder or Path(temporary, "qwen3-of-bytes")
        if not folder.exists():
            pretrain(args.texts, folder, args.steps or PRETRAINED_STEPS, args.device, *what)
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
            job = replace(job, steps=job.steps and (args.steps or job.steps))
            kinds.setdefault(job.kind, []).append(asdict(job))

    def run(group: list[dict[str, Any]]) -> None:
        words = ["-m", f"benchmarks.{benchmark}", str(args.texts), "--device", args.device]
        words += ["--jobs", json.dumps(group), "--folder", str(folder)]
        command = [sys.executable, *words]
        with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
            assert process.stdout is not None
            for line in process.stdout:
                if line.startswith("{"):
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
    name = benchmark + setting_of(args.folder).suffix
    with WRITING:
        results.save(name, [row], command=command, folder=args.out)


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
    parts, setting = args.parts or PARTS, setting_of(args.folder)
    with prepared_folder(args) as folder:
        if "speed" in parts:
            words = [sys.executable, "-m", "benchmarks.tuning", str(args.texts)]
            words += ["--device", args.device, "--folder", str(folder), "--measure"]
            kinds = [kind for rates in setting.rates.values() for kind in rates]
            kinds = [kind for kind in kinds if kind in (args.kinds or (kind,))]
            for row in measured([*words, kind] for kind in kinds):
                if row is not None:
                    save_row("tuning", row, args)
        chosen = [job for job in jobs(args.seeds, setting, args.text) if job.part in parts]
        run_all("tuning", chosen, folder, args)


if __name__ == "__main__":
    main()
