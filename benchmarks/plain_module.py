"""Time a plain module of Qwen3-0.6B's shape in integers beside `arb train` and AdamW.

    python -m benchmarks.plain_module [PART...]
    python -m benchmarks.plain_module --tiny --device cpu

Each part runs in a process of its own and prints a JSON object with the tokens per second and the
peaks of allocated and of reserved memory of steps on random tokens:

    arb         `arb train` at this shape, captured (`benchmarks.large_tuning`)
    plain       the module below in integers, eager, then captured
    recomputed  the same; normed inputs are computed again in the backward, as by `arb train`
    adamw       the module with bfloat16 weights and the fused AdamW of PyTorch
"""

import argparse
import dataclasses
import json
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.nn import functional
from torch.utils.checkpoint import checkpoint


@dataclasses.dataclass(frozen=True)
class Shape:
    """Sizes of a Llama-like model with norms of queries and keys."""

    layers: int = 28
    dim: int = 1024
    heads: int = 16
    kv_heads: int = 8
    head_dim: int = 128
    ffn_dim: int = 3072
    vocabulary: int = 151936


TINY = Shape(2, 64, 4, 2, 16, 96, 5000)
TIMED = 6
"""Number of timed steps."""


class Norm(nn.Module):
    """RMSNorm."""

    def __init__(self, dim: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(dim))

    def forward(self, x: Tensor) -> Tensor:
        """Divide each row by its root-mean-square."""
        return functional.rms_norm(x, x.shape[-1:], self.weight.to(x.dtype), 1e-6)


def swiglu(gate: Tensor, up: Tensor) -> Tensor:
    """Compute silu(gate) * up."""
    return functional.silu(gate) * up


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Apply rotary position embeddings."""
    first, second = x.chunk(2, dim=-1)
    return x * cos + torch.cat((-second, first), dim=-1) * sin


class Block(nn.Module):
    """A block of Qwen 3."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.head_dim, self.recomputes = shape.head_dim, False
        q_dim, kv_dim = shape.heads * shape.head_dim, shape.kv_heads * shape.head_dim
        self.q = nn.Linear(shape.dim, q_dim, bias=False)
        self.k = nn.Linear(shape.dim, kv_dim, bias=False)
        self.v = nn.Linear(shape.dim, kv_dim, bias=False)
        self.o = nn.Linear(q_dim, shape.dim, bias=False)
        self.gate = nn.Linear(shape.dim, shape.ffn_dim, bias=False)
        self.up = nn.Linear(shape.dim, shape.ffn_dim, bias=False)
        self.down = nn.Linear(shape.ffn_dim, shape.dim, bias=False)
        self.norm, self.ffn_norm = Norm(shape.dim), Norm(shape.dim)
        self.q_norm, self.k_norm = Norm(shape.head_dim), Norm(shape.head_dim)

    def project(self, norm: Norm, x: Tensor, *layers: nn.Linear) -> list[Tensor]:
        """Return each layer's product with norm(x)."""
        y = norm(x)
        if not self.recomputes:
            return [layer(y) for layer in layers]
        address = y.data_ptr()
        recomputed: list[Tensor] = []

        def pack(saved: Tensor) -> Tensor | torch.Size:
            return saved.shape if saved.data_ptr() == address else saved

        def unpack(saved: Tensor | torch.Size) -> Tensor:
            if isinstance(saved, Tensor):
                return saved
            if not recomputed:  # once for all layers
                with torch.no_grad():
                    recomputed.append(norm(x))
            return recomputed[0].view(saved)

        with saved_tensors_hooks(pack, unpack):
            return [layer(y) for layer in layers]

    def attend(self, q: Tensor, k: Tensor, v: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        """Compute causal attention with rotary positions."""
        # heads stay behind positions in memory, so that no tensor is copied after the attention
        q, k, v = (x.unflatten(-1, (-1, self.head_dim)) for x in (q, k, v))
        q, k = rotate(self.q_norm(q), cos, sin), rotate(self.k_norm(k), cos, sin)
        q, k, v = (x.transpose(1, 2) for x in (q, k, v))
        y = functional.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
        return y.transpose(1, 2).flatten(2)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        """Add attention and MLP to x."""
        q, k, v = self.project(self.norm, x, self.q, self.k, self.v)
        x = x + self.o(self.attend(q, k, v, cos, sin))
        gate, up = self.project(self.ffn_norm, x, self.gate, self.up)
        return x + self.down(swiglu(gate, up))


class Model(nn.Module):
    """Blocks between an embedding and a head that share their weights."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.head_dim = shape.head_dim
        self.embedding = nn.Embedding(shape.vocabulary, shape.dim)
        self.blocks = nn.ModuleList(Block(shape) for _ in range(shape.layers))
        self.norm = Norm(shape.dim)
        self.head = nn.Linear(shape.dim, shape.vocabulary, bias=False)
        self.head.weight = self.embedding.weight

    def forward(self, ids: Tensor) -> Tensor:
        """Return the activations that the head multiplies."""
        x = self.embedding(ids)
        exponents = torch.arange(0, self.head_dim, 2, device=ids.device) / self.head_dim
        angles = torch.arange(ids.shape[1], device=ids.device)[:, None] * 1e6**-exponents
        angles = torch.cat((angles, angles), dim=-1)[:, None]
        cos, sin = angles.cos().to(x.dtype), angles.sin().to(x.dtype)
        for block in self.blocks:
            x = block(x, cos, sin)
        return self.norm(x)


def chunked_loss(head: nn.Module, x: Tensor, targets: Tensor) -> Tensor:
    """Compute the mean cross-entropy in chunks, whose logits are recomputed in the backward."""

    def chunk_loss(x: Tensor, targets: Tensor) -> Tensor:
        return functional.cross_entropy(head(x).float(), targets, reduction="sum")

    rows, targets = x.flatten(0, 1), targets.flatten()
    total = torch.zeros((), device=x.device)
    for chunk in zip(rows.split(512), targets.split(512), strict=True):
        total = total + checkpoint(chunk_loss, *chunk, use_reentrant=False)
    return total / len(rows)


def timed(step: Callable[[], Tensor], batch: int, ctx: int, warm_up: int) -> dict[str, float]:
    """Time steps after some that are not timed."""
    on_gpu = torch.cuda.is_available()
    for _ in range(warm_up):
        first_loss = float(step())
    if on_gpu:
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
    start = time.perf_counter()
    for _ in range(TIMED):
        loss = step()
    last_loss = float(loss)  # synchronizes
    seconds = (time.perf_counter() - start) / TIMED
    row = {"tokens_per_second": round(batch * ctx / seconds), "step_ms": round(1e3 * seconds, 2)}
    row |= {"first_loss": first_loss, "last_loss": last_loss}
    if on_gpu:
        row["allocated_gib"] = round(torch.cuda.max_memory_allocated() / 2**30, 3)
        row["reserved_gib"] = round(torch.cuda.max_memory_reserved() / 2**30, 3)
    return row


def random_batches(
    shape: Shape, device: str, batch: int, ctx: int
) -> Iterator[tuple[Tensor, Tensor]]:
    """Yield inputs and targets."""
    generator = torch.Generator().manual_seed(0)
    while True:
        windows = torch.randint(shape.vocabulary, (batch, ctx + 1), generator=generator)
        windows = windows.to(device)
        yield windows[:, :-1].contiguous(), windows[:, 1:].contiguous()


def time_arb(batch: int, ctx: int) -> dict[str, object]:
    """Time `arb train`'s captured step."""
    from benchmarks import large_tuning

    case = dataclasses.replace(large_tuning.CASES["0.6b-moment"], batch=batch)
    row, step = large_tuning.prepare_ours(case, ctx)
    return {"captured": timed(step, batch, ctx, 5), "weights": row["weights"]}


def time_module(part: str, shape: Shape, device: str, batch: int, ctx: int) -> dict[str, object]:
    """Time the module, in integers or with AdamW."""
    torch.manual_seed(0)
    torch.set_default_dtype(torch.float32 if device == "cpu" else torch.bfloat16)
    with torch.device(device):
        model = Model(shape)
    torch.set_default_dtype(torch.float32)
    if device == "cuda":
        global swiglu, rotate
        swiglu = torch.compile(swiglu, dynamic=False)
        rotate = torch.compile(rotate, dynamic=False)
    data = random_batches(shape, device, batch, ctx)
    if part == "adamw":
        adamw = torch.optim.AdamW(model.parameters(), lr=3e-4, fused=device == "cuda")

        def float_step() -> Tensor:
            ids, targets = next(data)
            loss = chunked_loss(model.head, model(ids), targets)
            loss.backward()
            adamw.step()
            adamw.zero_grad()
            return loss.detach()

        return {"eager": timed(float_step, batch, ctx, 3)}

    from arbcli.nn import CapturedStep, IntegerOptimizer, linear_cross_entropy
    from arbcli.nn.convert import convert
    from arbcli.nn.weights import Anchored, Numbers

    settings: dict[str, Any] = {
        "rule": "moment", "weights": "int8", "scale_type": "T32", "direction": None,
        "rules": {}, "scale_types": {}, "skip": [], "skip_unsupported": False,
        "fuse": [["q", "k", "v"], ["gate", "up"]],
    }  # fmt: skip
    convert(model, settings, rounds=False)  # rounding 0.6 billion weights would take minutes
    packed_tensors = [module for module in model.modules() if isinstance(module, Anchored)]
    for index, packed in enumerate(packed_tensors):
        if isinstance(packed, Numbers):
            packed.round(torch.ones(packed.shape))
        else:
            packed.std = 0.02
            packed.initialise(0, index)
    for block in model.blocks:
        block.recomputes = part == "recomputed"  # type: ignore[assignment]
    optimizer = IntegerOptimizer(model, 0.03)

    def loss_of(ids: Tensor, targets: Tensor) -> Tensor:
        return linear_cross_entropy(model.head, model(ids), targets)

    def eager_step() -> Tensor:
        loss = loss_of(*next(data))
        loss.backward()
        optimizer.step()
        return loss.detach()

    row: dict[str, object] = {"eager": timed(eager_step, batch, ctx, 3)}
    if device == "cuda":
        torch.cuda.empty_cache()
    captured = CapturedStep(optimizer, loss_of)
    row["captured"] = timed(lambda: captured(next(data)), batch, ctx, 5)
    return row | {"counters": optimizer.counters()}


def main() -> None:
    """Run the parts, each in a process of its own."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("parts", nargs="*", metavar="PART")
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--tiny", action="store_true")
    parser.add_argument("--here", action="store_true", help="run one part in this process")
    asked = parser.parse_args()
    shape, batch, ctx = (TINY, 2, 32) if asked.tiny else (Shape(), 4, 2048)
    if asked.here:
        (part,) = asked.parts
        timings = (
            time_arb(batch, ctx)
            if part == "arb"
            else time_module(part, shape, asked.device, batch, ctx)
        )
        name = torch.cuda.get_device_name() if asked.device == "cuda" else "cpu"
        print(json.dumps({"part": part, **timings, "device": name, "torch": torch.__version__}))
        return
    for part in asked.parts or ("arb", "plain", "recomputed", "adamw"):
        if part == "arb" and asked.tiny:
            continue
        options = ["--device", asked.device, *["--tiny"] * asked.tiny, "--here", part]
        command = [sys.executable, "-m", "benchmarks.plain_module", *options]
        subprocess.run(command, check=True)


if __name__ == "__main__":
    main()
