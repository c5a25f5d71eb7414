"""nanoGPT's character model of tiny Shakespeare with its own recipe, as an expert runs it on a GPU.

`config/train_shakespeare_char.py` of https://github.com/karpathy/nanoGPT: 6 layers of width 384, 6
heads, context 256, LayerNorm, GELU, learned positions, tied embedding, dropout of 0.2; AdamW at
1e-3 to 1e-4 in 5,000 steps of 64 windows, weight decay 0.1 on matrices, gradients clipped to 1.
bfloat16 under autocast, compiled, and the whole step with its draw of windows is one CUDA graph.
"""

import math
import time
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from arbcli.kernels.runtime.device import capturing

LAYERS, HEADS, DIM, CTX = 6, 6, 384, 256
DROPOUT = 0.2
STEPS, WARMUP, BATCH = 5000, 100, 64
LR, MIN_LR, BETAS, WEIGHT_DECAY, CLIP_NORM = 1e-3, 1e-4, (0.9, 0.99), 0.1, 1.0
EAGER_STEPS = 5


class Block(nn.Module):
    """Causal attention, and an MLP of four times the width."""

    def __init__(self) -> None:
        super().__init__()
        self.norms = nn.ModuleList(nn.LayerNorm(DIM, bias=False) for _ in range(2))
        self.qkv = nn.Linear(DIM, 3 * DIM, bias=False)
        self.output = nn.Linear(DIM, DIM, bias=False)
        self.up, self.down = (
            nn.Linear(DIM, 4 * DIM, bias=False),
            nn.Linear(4 * DIM, DIM, bias=False),
        )

    def forward(self, x: Tensor) -> Tensor:
        """Add attention and MLP to (B, T, DIM)."""
        rate = DROPOUT if self.training else 0.0
        q, k, v = self.qkv(self.norms[0](x)).unflatten(-1, (3, HEADS, -1)).permute(2, 0, 3, 1, 4)
        y = functional.scaled_dot_product_attention(q, k, v, dropout_p=rate, is_causal=True)
        y = self.output(y.transpose(1, 2).flatten(2))
        x = x + functional.dropout(y, DROPOUT, self.training)
        y = self.down(functional.gelu(self.up(self.norms[1](x))))
        return x + functional.dropout(y, DROPOUT, self.training)


class NanoGPT(nn.Module):
    """The model, of a vocabulary of characters."""

    def __init__(self, vocabulary: int) -> None:
        super().__init__()
        self.embedding = nn.Embedding(vocabulary, DIM)
        self.places = nn.Embedding(CTX, DIM)
        self.blocks = nn.ModuleList(Block() for _ in range(LAYERS))
        self.norm = nn.LayerNorm(DIM, bias=False)
        for name, weight in self.named_parameters():
            if weight.dim() == 2:
                last = name.endswith(("output.weight", "down.weight"))
                nn.init.normal_(weight, std=0.02 / (math.sqrt(2 * LAYERS) if last else 1))

    def forward(self, ids: Tensor, targets: Tensor) -> Tensor:
        """Compute the mean cross-entropy of (B, T) targets in nats."""
        x = self.embedding(ids) + self.places.weight[: ids.shape[1]]
        x = functional.dropout(x, DROPOUT, self.training)
        for block in self.blocks:
            x = block(x)
        logits = functional.linear(self.norm(x), self.embedding.weight)
        return functional.cross_entropy(logits.float().flatten(0, 1), targets.flatten())


def rate_of(step: int, steps: int) -> float:
    """Return the learning rate of a step: a linear warm-up, then a cosine."""
    if step < WARMUP:
        return LR * (step + 1) / (WARMUP + 1)
    share = (step - WARMUP) / max(1, steps - WARMUP)
    return MIN_LR + (LR - MIN_LR) * (1 + math.cos(math.pi * share)) / 2


class Recipe:
    """A model with its optimizer, whose steps are a CUDA graph on a GPU.

    Args:
        train: training text as numbers of characters, (N,) int64 on the device.
        vocabulary: number of characters.
        seed: seed of weights, windows and dropout.
    """

    def __init__(self, train: Tensor, vocabulary: int, seed: int) -> None:
        torch.manual_seed(seed)
        self.train, self.device = train, train.device
        self.on_gpu = self.device.type == "cuda"
        self.model = NanoGPT(vocabulary).to(self.device)
        weights = [*self.model.parameters()]
        self._lr = torch.zeros((), device=self.device)
        self.optimizer = torch.optim.AdamW(
            [
                {"params": [w for w in weights if w.dim() >= 2], "weight_decay": WEIGHT_DECAY},
                {"params": [w for w in weights if w.dim() < 2], "weight_decay": 0.0},
            ],
            lr=self._lr if self.on_gpu else LR,
            betas=BETAS,
            fused=True,
            capturable=self.on_gpu,
        )
        self._loss = torch.compile(self.model) if self.on_gpu else self.model
        self._graph: Any = None

    def step(self, step: int, steps: int) -> None:
        """Step once."""
        self._lr.fill_(rate_of(step, steps))
        if not self.on_gpu:
            self.optimizer.param_groups[0]["lr"] = rate_of(step, steps)
            self.optimizer.param_groups[1]["lr"] = rate_of(step, steps)
            self._compute()
        elif step < EAGER_STEPS:
            stream = torch.cuda.Stream()
            stream.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(stream):
                self._compute()
            torch.cuda.current_stream().wait_stream(stream)
        else:
            if self._graph is None:
                torch.cuda.empty_cache()
                self._graph = torch.cuda.CUDAGraph()
                with capturing(self._graph):
                    self._compute()
            self._graph.replay()

    def _compute(self) -> None:
        starts = torch.randint(len(self.train) - CTX, (BATCH, 1), device=self.device)
        windows = self.train[starts + torch.arange(CTX + 1, device=self.device)]
        with torch.autocast(self.device.type, torch.bfloat16):
            loss = self._loss(windows[:, :-1], windows[:, 1:])
        loss.backward()
        nn.utils.clip_grad_norm_(self.model.parameters(), CLIP_NORM)
        self.optimizer.step()
        for weight in self.model.parameters():
            weight.grad = None

    @torch.no_grad()
    def evaluate(self, batches: Tensor) -> float:
        """Compute the mean loss of (batches, B, CTX + 1) windows, in nats per character."""
        self.model.eval()
        with torch.autocast(self.device.type, torch.bfloat16):
            losses = [self.model(batch[:, :-1], batch[:, 1:]) for batch in batches]
        self.model.train()
        return float(torch.stack(losses).mean())

    def state_bytes(self) -> int:
        """Return the size of weights and optimizer state in bytes."""
        states = [part for state in self.optimizer.state.values() for part in state.values()]
        tensors = [*self.model.parameters(), *states]
        return sum(part.nbytes for part in tensors if isinstance(part, Tensor))


def train_nanogpt(
    train: Tensor, batches: Tensor, seed: int, every: int, steps: int = STEPS
) -> dict[str, Any]:
    """Train, and evaluate on the way.

    Args:
        train: training text, (N,) int64 codes of characters on the device.
        batches: held-out windows, (batches, B, CTX + 1) int64 codes on the device.
        seed: seed.
        every: steps between evaluations.
        steps: number of steps.

    Returns:
        `curve`, held-out nats per character by step; `seconds` of all; `prepared_seconds` of those
        that the first steps took, with compilation; `state_bytes` and `weights`.
    """
    began = time.perf_counter()
    known = torch.unique(torch.cat([train, batches.flatten()]))
    recipe = Recipe(torch.searchsorted(known, train), len(known), seed)
    batches = torch.searchsorted(known, batches.contiguous())
    curve, prepared = {}, 0.0
    for step in range(steps):
        recipe.step(step, steps)
        if step == min(steps, 2 * EAGER_STEPS) - 1:
            recipe.evaluate(batches[:1])
            prepared = time.perf_counter() - began
        if (step + 1) % every == 0 or step + 1 == steps:
            curve[step + 1] = recipe.evaluate(batches)
    return {
        "curve": curve,
        "seconds": time.perf_counter() - began,
        "prepared_seconds": prepared,
        "state_bytes": recipe.state_bytes(),
        "weights": sum(weight.numel() for weight in recipe.model.parameters()),
    }
