"""A float model and its step in as few operations as PyTorch needs: the fastest peer of a step.

The shapes are a dense preset's, and the equations those of the float baseline without sub-norms.
The model is one compiled function in bf16, its batch stays on the GPU, gradients are not clipped,
and the whole step is one CUDA graph. It draws no text and keeps no checkpoint.
"""

from collections.abc import Callable, Iterable

import torch
from torch import Tensor, nn
from torch.nn import functional

from arbcli.config.parts.attention import AttentionConfig
from arbcli.config.parts.mlp import MLPConfig
from arbcli.config.presets import preset
from arbcli.training.trainer import EAGER_STEPS

LR, DECAY, MOMENTUM = 1e-3, 0.1, 0.95
NEWTON_SCHULZ = (3.4445, -4.7750, 2.0315)
"""Coefficients of an iteration. Source: K. Jordan, "Muon", https://kellerjordan.github.io/posts/muon/."""
ITERATIONS = 5


def rms_norm(x: Tensor) -> Tensor:
    """Divide vectors by their root-mean-squares."""
    return functional.rms_norm(x, (x.shape[-1],))


class Block(nn.Module):
    """Attention with rotary positions and unit queries and keys, and a gated MLP."""

    def __init__(self, dim: int, heads: int, ffn: int) -> None:
        super().__init__()
        self.heads = heads
        self.qkv = nn.Linear(dim, 3 * dim, bias=False)
        self.out = nn.Linear(dim, dim, bias=False)
        self.up = nn.Linear(dim, 2 * ffn, bias=False)
        self.down = nn.Linear(ffn, dim, bias=False)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        """Add both branches to a stream, (B, T, dim)."""
        batch, length, dim = x.shape
        parts = self.qkv(rms_norm(x)).view(batch, length, 3, self.heads, dim // self.heads)
        q, k, v = parts.permute(2, 0, 3, 1, 4)

        def rotate(part: Tensor) -> Tensor:
            a, b = part.chunk(2, -1)
            return rms_norm(torch.cat((a * cos - b * sin, b * cos + a * sin), -1))

        y = functional.scaled_dot_product_attention(rotate(q), rotate(k), v, is_causal=True)
        x = x + self.out(y.transpose(1, 2).reshape(batch, length, dim))
        gate, value = self.up(rms_norm(x)).chunk(2, -1)
        return x + self.down(functional.silu(gate) * value)


class Model(nn.Module):
    """The loss of the next bytes."""

    def __init__(self, dim: int, layers: int, heads: int, ffn: int, length: int) -> None:
        super().__init__()
        self.embedding = nn.Embedding(256, dim)
        self.blocks = nn.ModuleList(Block(dim, heads, ffn) for _ in range(layers))
        self.head = nn.Linear(dim, 256, bias=False)
        width = dim // heads
        rates = 10000.0 ** (-torch.arange(0, width, 2) / width)
        angles = torch.outer(torch.arange(length), rates)
        self.register_buffer("cos", angles.cos().bfloat16())
        self.register_buffer("sin", angles.sin().bfloat16())

    def forward(self, ids: Tensor, targets: Tensor) -> Tensor:
        """Compute the mean loss of (B, T) targets in nats."""
        x = self.embedding(ids).bfloat16()
        for block in self.blocks:
            x = block(x, self.cos, self.sin)
        logits = self.head(rms_norm(x)).float()
        return functional.cross_entropy(logits.flatten(0, 1), targets.flatten())


def orthogonalise(x: Tensor) -> Tensor:
    """Bring the singular values of a stack of matrices near 1."""
    a, b, c = NEWTON_SCHULZ
    x = x.bfloat16()
    tall = x.shape[-2] > x.shape[-1]
    x = x.mT if tall else x
    x = x / (x.norm(dim=(-2, -1), keepdim=True) + 1e-7)
    for _ in range(ITERATIONS):
        gram = x @ x.mT
        x = a * x + (b * gram + c * gram @ gram) @ x
    return x.mT if tall else x


def step_by_muon(weights: list[Tensor], gradients: list[Tensor], moments: Tensor) -> None:
    """Step matrices of one shape, (N, K) or (n, N, K) each, as a stack."""
    shape = moments.shape[-2:]
    stack = torch.cat([gradient.reshape(-1, *shape) for gradient in gradients]).float()
    moments.mul_(MOMENTUM).add_(stack)
    steps = orthogonalise(stack + MOMENTUM * moments)
    steps = steps * (0.2 * max(shape) ** 0.5)
    parts = steps.split([weight.numel() // shape.numel() for weight in weights])
    steps_of = [part.view(weight.shape) for part, weight in zip(parts, weights, strict=True)]
    torch._foreach_mul_(weights, 1 - DECAY * LR)
    torch._foreach_add_(weights, [step.float() for step in steps_of], alpha=-LR)


class BareStep:
    """Trains a model; a step after the first few is a replay.

    Args:
        model: returns the loss of a batch from ids and targets.
        ids: (B, T) int64, the batch of every step.
        matrices: step by Muon, each (N, K), or (n, N, K) for several; all else steps by AdamW.
        loss: the same function, compiled; None compiles the model as a whole.
    """

    def __init__(
        self,
        model: nn.Module,
        ids: Tensor,
        matrices: Iterable[Tensor] = (),
        loss: Callable | None = None,
    ) -> None:
        self.model, self.ids = model, ids
        self.loss: Callable = loss or torch.compile(self.model, dynamic=False, fullgraph=True)
        self.by_shape: dict[torch.Size, list[Tensor]] = {}
        for weight in matrices:
            self.by_shape.setdefault(weight.shape[-2:], []).append(weight)
        held = {id(weight) for weights in self.by_shape.values() for weight in weights}
        rest = [weight for weight in self.model.parameters() if id(weight) not in held]
        self.adam = torch.optim.AdamW(rest, lr=LR, weight_decay=DECAY, fused=True, capturable=True)
        self.moments = {
            shape: torch.zeros_like(torch.cat([each.reshape(-1, *shape) for each in weights]))
            for shape, weights in self.by_shape.items()
        }
        self.step_by_muon: Callable = torch.compile(step_by_muon, dynamic=False)
        self.stream = torch.cuda.Stream()
        self.graph: torch.cuda.CUDAGraph | None = None
        self.step = 0

    @property
    def num_weights(self) -> int:
        """Parameters."""
        return sum(weight.numel() for weight in self.model.parameters())

    def state_bytes(self) -> int:
        """Count weights, moments and tables."""
        held = [state for known in self.adam.state.values() for state in known.values()]
        tensors = [*self.model.parameters(), *self.model.buffers(), *self.moments.values(), *held]
        return sum(tensor.nbytes for tensor in tensors)

    def train_step(self) -> None:
        """Run a training step."""
        if self.graph is None and self.step == EAGER_STEPS:
            torch.cuda.synchronize()
            torch.cuda.empty_cache()
            self.graph = graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph):
                self._compute()
        self.step += 1
        if self.graph is not None:
            self.graph.replay()
            return
        self.stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self.stream):
            self._compute()
        torch.cuda.current_stream().wait_stream(self.stream)

    def _compute(self) -> None:
        with torch.autocast("cuda", torch.bfloat16):
            loss = self.loss(self.ids, self.ids)
        loss.backward()
        with torch.no_grad():
            for shape, weights in self.by_shape.items():
                self.step_by_muon(weights, [weight.grad for weight in weights], self.moments[shape])
        self.adam.step()
        for weight in self.model.parameters():
            weight.grad = None


class BareTwin(BareStep):
    """Trains a model of a dense preset.

    Args:
        name: of the preset.
        ctx: bytes of a window.
        batch: windows.
        muon: whether matrices of blocks step by Muon.
    """

    def __init__(self, name: str, ctx: int, batch: int, *, muon: bool) -> None:
        config = preset(name)
        (blocks,) = config.stages[0].lists
        mixer, channel = blocks[0].parts
        assert isinstance(mixer, AttentionConfig)
        assert isinstance(channel, MLPConfig)
        with torch.device("cuda"):
            model = Model(config.dim, len(blocks), mixer.heads, channel.width, ctx)
            ids = torch.randint(256, (batch, ctx))
        super().__init__(model, ids, model.blocks.parameters() if muon else ())
