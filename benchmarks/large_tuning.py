"""Steps of tuning at the shapes of Qwen3-8B, 1.7B and 0.6B, in memory that is capped.

    python -m benchmarks.large_tuning [--only CASE...] [--ctx T] [--out DIR]

CASE is a name in `CASES`, such as `8b-moment`; `8b-moment:4x8` has steps of 8 micro-batches of 4
windows. Weights are random. A process may take no more of the GPU than `gib` says
(`torch.cuda.set_per_process_memory_fraction`), and the peak is predicted before by what
`arb audit-memory` asks. Steps are those of `arb train`, on random tokens, captured. The peers are
`float_steps`'s: bf16 weights whose gradients are released, and float32 weights with torch's fused
AdamW. A peer adds up the gradients of micro-batches in the dtype of its weights and updates once.
Processes prepare `--at-once` and measure one after another.
"""

import argparse
import dataclasses
import json
import re
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from arbcli.config.model import ModelConfig
from arbcli.data.text import Texts
from arbcli.inspect.peak import predict_peak
from arbcli.inspect.recipe import MAX_TRACED
from arbcli.interop.huggingface.config_json import read_folder_config
from arbcli.kernels.runtime.device import deterministic
from arbcli.training.configure import new_config
from arbcli.training.trainer import EAGER_STEPS, Trainer
from benchmarks import results
from benchmarks.float_qwen import FloatQwen, Shape
from benchmarks.float_steps import AdamW, ReleasedAdafactor, WholeStep
from benchmarks.measuring import measured, wait_turn

SHAPES = {
    "8b": Shape(
        layers=36, dim=4096, heads=32, kv_heads=8, head_width=128, ffn=12288, vocabulary=151936,
        tied=False,
    ),
    "1.7b": Shape(
        layers=28, dim=2048, heads=16, kv_heads=8, head_width=128, ffn=6144, vocabulary=151936,
        tied=True,
    ),
    "0.6b": Shape(
        layers=28, dim=1024, heads=16, kv_heads=8, head_width=128, ffn=3072, vocabulary=151936,
        tied=True,
    ),
}  # fmt: skip
"""Qwen3-8B, Qwen3-1.7B and Qwen3-0.6B."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """A way of tuning."""

    shape: str
    kind: str
    """Rule and direction, or the name of a peer; `fp8` if matrices are multiplied in e4m3."""
    batch: int = 1
    """Windows of a micro-batch."""
    accum: int = 1
    """Micro-batches of a step."""
    recompute: bool = True
    gib: int | None = None
    """Memory that the process may take; sums of gradients do not fit into it."""

    @property
    def windows(self) -> int:
        """Windows of a step."""
        return self.batch * self.accum

    @property
    def documents(self) -> bool:
        """Whether windows are packed with documents that are kept apart."""
        return self.kind.endswith("documents")

    @property
    def fp8(self) -> bool:
        """Whether products of blocks are in e4m3, except for gradients of weights."""
        return self.kind.endswith("fp8")


CASES = {
    "8b-moment": Case(shape="8b", kind="moment orthogonal", gib=24),
    "8b-nibble": Case(shape="8b", kind="nibble orthogonal", gib=16),
    "8b-factored": Case(shape="8b", kind="moment factored", gib=24),
    "8b-nibble-factored": Case(shape="8b", kind="nibble factored", gib=16),
    "8b-bf16": Case(shape="8b", kind="bf16 Adafactor"),
    "8b-moment-fp8": Case(shape="8b", kind="moment orthogonal fp8", gib=24),
    "8b-nibble-fp8": Case(shape="8b", kind="nibble orthogonal fp8", gib=16),
    "8b-factored-fp8": Case(shape="8b", kind="moment factored fp8", gib=24),
    "8b-bf16-fp8": Case(shape="8b", kind="bf16 Adafactor fp8"),
    "0.6b-moment": Case(shape="0.6b", kind="moment orthogonal", batch=4, recompute=False),
    "0.6b-adamw": Case(shape="0.6b", kind="float32 AdamW", batch=4, recompute=False),
    "0.6b-nibble": Case(shape="0.6b", kind="nibble orthogonal", batch=4, recompute=False),
    "0.6b-documents": Case(
        shape="0.6b", kind="moment orthogonal documents", batch=4, recompute=False
    ),
    "1.7b-moment": Case(shape="1.7b", kind="moment orthogonal", batch=4, recompute=True),
    "1.7b-adamw": Case(shape="1.7b", kind="float32 AdamW", batch=4, recompute=True),
    "1.7b-bf16": Case(shape="1.7b", kind="bf16 Adafactor", batch=4, recompute=True),
    "1.7b-moment-fp8": Case(shape="1.7b", kind="moment orthogonal fp8", batch=4, recompute=True),
    "1.7b-bf16-fp8": Case(shape="1.7b", kind="bf16 Adafactor fp8", batch=4, recompute=True),
    "1.7b-nibble": Case(shape="1.7b", kind="nibble orthogonal", batch=4, recompute=True),
    "0.6b-bf16": Case(shape="0.6b", kind="bf16 Adafactor", batch=4, recompute=False),
}
SEVERAL_WINDOWS = (
    "8b-moment:4x8", "8b-moment-fp8:4x8", "8b-nibble:4x8", "8b-bf16:4x8", "8b-bf16:32x1",
    "8b-moment:4x2", "8b-moment-fp8:4x2", "8b-nibble:4x2", "8b-bf16:4x2", "8b-bf16:8x1",
    "8b-factored:4x8", "8b-factored-fp8:4x8", "8b-factored:4x2", "8b-factored-fp8:4x2",
    "1.7b-moment:4x8", "1.7b-bf16:4x8", "0.6b-moment:4x8", "0.6b-bf16:4x8",
)  # fmt: skip
"""Cases with more tokens a step, by default measured after those of `CASES`."""
TIMED_STEPS = 4
DOCUMENTS = 8
"""Number of documents per window."""


class RandomTokens:
    """All of a text that a step asks for; its windows may be packed with documents."""

    def __init__(self, vocabulary: int, context: int, packs: bool = False) -> None:
        self.vocabulary, self.context, self.packs = vocabulary, context, packs

    def __len__(self) -> int:
        return 2**30

    def windows(self, length: int) -> int:
        """Count where windows may begin."""
        return len(self) - length + 1

    def starts(self, _key: bytes, count: int, _length: int) -> list[int]:
        """Begin anywhere."""
        return [0] * count

    def window_batch(self, starts: list[int], length: int) -> Tensor:
        """Draw tokens."""
        return torch.randint(self.vocabulary, (len(starts), length), dtype=torch.int32)

    def packed_batch(self, starts: list[int]) -> tuple[Tensor, ...]:
        """Draw tokens, targets and documents of equal length."""
        window = self.window_batch(starts, self.context + 1).long()
        numbers = torch.arange(self.context) * DOCUMENTS // self.context
        return window[:, :-1], window[:, 1:], numbers.expand(len(starts), -1)


def model_config(shape: Shape, rule: str, direction: str) -> ModelConfig:
    """Read the model of a `config.json` of that shape, as `arb import` does."""
    fields = shape.hugging_face(max_position_embeddings=40960)
    with tempfile.TemporaryDirectory() as folder:
        Path(folder, "config.json").write_text(json.dumps(fields))
        return read_folder_config(Path(folder), rule=rule, direction=direction, digits="all")


def measure(case: Case, ctx: int) -> dict[str, Any]:
    """Run a few steps, and return measurements."""
    if case.gib is not None:
        memory = torch.cuda.get_device_properties(0).total_memory
        torch.cuda.set_per_process_memory_fraction(case.gib * 2**30 / memory)
    ours = case.kind.split()[0] in ("moment", "nibble")
    begun = time.perf_counter()
    row, step = prepare_ours(case, ctx) if ours else prepare_peer(case, ctx)
    build_seconds = time.perf_counter() - begun
    losses = [step() for _ in range(EAGER_STEPS + 1)]  # compile, and are captured
    torch.cuda.synchronize()
    ready = time.perf_counter() - begun
    print(
        f"{case}: made in {build_seconds:.0f} s, ready in {ready:.0f} s",
        file=sys.stderr,
        flush=True,
    )
    wait_turn()
    started = time.perf_counter()
    losses += [step() for _ in range(TIMED_STEPS)]
    torch.cuda.synchronize()
    seconds = (time.perf_counter() - started) / TIMED_STEPS
    return {
        "shape": case.shape, "kind": case.kind, "ctx": ctx, "batch": case.batch,
        "accum": case.accum, "recompute": case.recompute, "cap_gib": case.gib,
        **row, "state_bytes": row["state_bytes"](),
        "allocated_bytes": torch.cuda.max_memory_allocated(),
        "reserved_bytes": torch.cuda.max_memory_reserved(),
        "step_seconds": round(seconds, 4),
        "tokens_per_second": round(case.windows * ctx / seconds),
        "losses": [round(float(loss), 4) for loss in (losses[0], losses[-1])],
    }  # fmt: skip


def prepare_ours(case: Case, ctx: int) -> tuple[dict[str, Any], Callable[[], Tensor]]:
    """Make a trainer of integers, after its peak was predicted."""
    rule, direction = case.kind.split()[:2]
    model = model_config(SHAPES[case.shape], rule, direction)
    config = new_config(
        preset=model, ctx=ctx, batch=case.batch, accum=case.accum, recompute=case.recompute,
        device="cuda", field="+text" if case.documents else "text",
        compute="fp8" if case.fp8 else "bf16",
        **({} if case.gib is None else {"reduce_dtype": "none"}),
    )  # fmt: skip
    traced = dataclasses.replace(  # later micro-batches allocate what the second one does
        config, accum=min(case.accum, MAX_TRACED), reduce_dtype=config.reduce_dtype and "int16"
    )
    peak = predict_peak(traced, captured=True)
    text: Any = RandomTokens(model.vocabulary, ctx, case.documents)
    trainer = Trainer(config, Texts(text, text, ""), capture=True)
    row = {
        "weights": trainer.num_weights, "state_bytes": trainer.state_bytes,
        "predicted_allocated_bytes": peak.peak_bytes,
        "predicted_reserved_bytes": peak.reserved_bytes,
    }  # fmt: skip

    def step() -> Tensor:
        with deterministic():
            return trainer.train_step()

    return row, step


def prepare_peer(case: Case, ctx: int) -> tuple[dict[str, Any], Callable[[], Tensor]]:
    """Make a float model and its optimizer."""
    shape, released = SHAPES[case.shape], case.kind.startswith("bf16")
    dtype = torch.bfloat16 if released else torch.float32
    model = FloatQwen(shape, dtype, recompute=case.recompute, fp8=case.fp8)
    updates = (ReleasedAdafactor if released else AdamW)(model, 1e-5)
    whole = WholeStep(model, updates, case.accum)
    text = RandomTokens(shape.vocabulary, ctx)

    def step() -> Tensor:
        window = text.window_batch([0] * case.windows, ctx + 1).long().cuda()
        return whole(window[:, :-1], window[:, 1:])

    return {
        "weights": sum(weight.numel() for weight in model.parameters()),
        "state_bytes": whole.state_bytes,
        "predicted_allocated_bytes": None, "predicted_reserved_bytes": None,
    }, step  # fmt: skip


def read_case(words: str) -> Case:
    """Read a case from the command line, such as `8b-moment` or `8b-moment:4x8`.

    Raises:
        argparse.ArgumentTypeError: the case is unknown.
    """
    name, _, size = words.partition(":")
    numbers = re.fullmatch(r"([1-9]\d*)x([1-9]\d*)", size or "1x1")
    if name not in CASES or numbers is None:
        raise argparse.ArgumentTypeError(f"{words} is not NAME or NAME:4x8, of {', '.join(CASES)}")
    if not size:
        return CASES[name]
    batch, accum = map(int, numbers.groups())
    return dataclasses.replace(CASES[name], batch=batch, accum=accum)


def _checked(words: str) -> str:
    read_case(words)
    return words


def main() -> None:
    """Measure each way in a process of its own, print its line, and write the rows."""
    parser = results.options("large_tuning", "Measure tuning at large shapes.")
    every = [*CASES, *SEVERAL_WINDOWS]
    parser.add_argument(
        "--only", nargs="+", type=_checked, metavar="CASE", default=every, help="ways to tune"
    )
    parser.add_argument("--ctx", type=int, default=2048, help="tokens of a window")
    parser.add_argument("--at-once", type=int, default=1, help="ways that prepare at once")
    parser.add_argument("--one", type=read_case, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.one:
        print(json.dumps(measure(args.one, args.ctx)))
        return
    words = [sys.executable, "-m", "benchmarks.large_tuning", "--ctx", str(args.ctx), "--one"]
    rows = measured(([*words, name] for name in args.only), args.at_once)
    for name, row in zip(args.only, rows, strict=True):
        print(f"{name}: failed" if row is None else json.dumps(row), flush=True)
        if row is not None:
            command = results.command_line("large_tuning", "--only", name)
            results.save("large_tuning", [row], command=command, folder=args.out)


if __name__ == "__main__":
    main()
