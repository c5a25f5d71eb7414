"""A Qwen 3 in plain torch, tuned as the field does it: the peer of tuning in integers.

Blocks are compiled and computed again in the backward, losses are computed a few tokens at a time,
and each gradient is applied and released as soon as it is there. bf16 weights are stepped by
Adafactor with stochastic rounding; float32 ones by torch's fused AdamW, with products in bf16.
"""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

TOKENS_AT_ONCE = 512
"""Whose losses are computed at once."""
EPS = 1e-6


@dataclass(frozen=True, slots=True, kw_only=True)
class Shape:
    """Sizes of a Qwen 3."""

    layers: int
    dim: int
    heads: int
    kv_heads: int
    head_width: int
    ffn: int
    vocabulary: int
    tied: bool


class FloatQwen(nn.Module):
    """A Qwen 3 with random weights.

    Args:
        shape: its sizes.
        dtype: of its weights.
        recompute: whether a backward computes the inside of a block again.
        device: where it is.
    """

    def __init__(
        self, shape: Shape, dtype: torch.dtype, *, recompute: bool, device: str = "cuda"
    ) -> None:
        super().__init__()
        self.shape, self.recompute = shape, recompute
        q, kv = shape.heads * shape.head_width, shape.kv_heads * shape.head_width
        sizes = {
            "q": (q, shape.dim), "k": (kv, shape.dim), "v": (kv, shape.dim), "o": (shape.dim, q),
            "gate": (shape.ffn, shape.dim), "up": (shape.ffn, shape.dim),
            "down": (shape.dim, shape.ffn), "norm": (shape.dim,), "ffn_norm": (shape.dim,),
            "q_norm": (shape.head_width,), "k_norm": (shape.head_width,),
        }  # fmt: skip

        def drawn(size: tuple[int, ...]) -> nn.Parameter:
            weight = torch.empty(size, dtype=dtype, device=device)
            return nn.Parameter(weight.fill_(1) if len(size) == 1 else weight.normal_(0, 0.02))

        self.blocks = nn.ModuleList(
            nn.ParameterDict({name: drawn(size) for name, size in sizes.items()})
            for _ in range(shape.layers)
        )
        self.embedding = drawn((shape.vocabulary, shape.dim))
        self.norm = drawn((shape.dim,))
        self.head = self.embedding if shape.tied else drawn((shape.vocabulary, shape.dim))
        self._block = torch.compile(_block, dynamic=False)

    def loss(self, ids: Tensor, targets: Tensor) -> Tensor:
        """Compute the mean cross-entropy, in nats a token, of (B, T) int64."""
        turned = _turns(ids.shape[1], self.shape.head_width, ids.device)
        x = functional.embedding(ids, self.embedding).to(torch.bfloat16)
        for index in range(self.shape.layers):
            weights = self.weights_of(index)
            if self.recompute:
                x = checkpoint(
                    self._block, x, *turned, self.shape.head_width, *weights, use_reentrant=False
                )
            else:
                x = self._block(x, *turned, self.shape.head_width, *weights)
        x = functional.rms_norm(x, x.shape[-1:], self.norm.to(x.dtype), EPS)
        return _Loss.apply(x.flatten(0, 1), self.head, targets.flatten())

    def weights_of(self, index: int) -> list[Tensor]:
        """List the weights of a block, in `ORDER`."""
        return [self.blocks[index][name] for name in ORDER]


ORDER = ("norm", "q", "k", "v", "q_norm", "k_norm", "o", "ffn_norm", "gate", "up", "down")


def _block(x: Tensor, cos: Tensor, sin: Tensor, width: int, *weights: Tensor) -> Tensor:
    w = dict(zip(ORDER, (weight.to(x.dtype) for weight in weights), strict=True))
    y = functional.rms_norm(x, x.shape[-1:], w["norm"], EPS)
    q, k, v = (
        functional.linear(y, w[name]).unflatten(-1, (-1, width)).transpose(1, 2) for name in "qkv"
    )
    q, k = (
        _turn(functional.rms_norm(part, (width,), w[name], EPS), cos, sin)
        for part, name in ((q, "q_norm"), (k, "k_norm"))
    )
    y = functional.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
    x = x + functional.linear(y.transpose(1, 2).flatten(2), w["o"])
    y = functional.rms_norm(x, x.shape[-1:], w["ffn_norm"], EPS)
    gated = functional.silu(functional.linear(y, w["gate"])) * functional.linear(y, w["up"])
    return x + functional.linear(gated, w["down"])


def _turns(length: int, width: int, device: torch.device) -> tuple[Tensor, Tensor]:
    rates = 1e6 ** (-torch.arange(0, width, 2, device=device) / width)
    angles = torch.arange(length, device=device)[:, None] * rates
    angles = torch.cat((angles, angles), dim=-1)
    return angles.cos().to(torch.bfloat16), angles.sin().to(torch.bfloat16)


def _turn(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    first, second = x.chunk(2, dim=-1)
    return x * cos + torch.cat((-second, first), dim=-1) * sin


class _Loss(torch.autograd.Function):
    """The mean cross-entropy, whose gradients are formed a few tokens at a time in the forward."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, head: Tensor, targets: Tensor) -> Tensor:
        grad_x, grad_head = torch.empty_like(x), torch.zeros_like(head)
        total, weight = torch.zeros((), device=x.device), head.to(x.dtype)
        for begin in range(0, len(x), TOKENS_AT_ONCE):
            some = slice(begin, begin + TOKENS_AT_ONCE)
            losses, of_logits = _grade(x[some] @ weight.T, targets[some], len(x))
            total += losses
            grad_x[some] = of_logits @ weight
            if head.dtype == x.dtype:
                grad_head.addmm_(of_logits.T, x[some])
            else:
                grad_head += of_logits.T @ x[some]
        ctx.save_for_backward(grad_x, grad_head)
        return total

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor, None]:
        grad_x, grad_head = ctx.saved_tensors
        return grad_x, grad_head, None


@torch.compile(dynamic=False)
def _grade(logits: Tensor, targets: Tensor, count: int) -> tuple[Tensor, Tensor]:
    logits = logits.float()
    total = logits.logsumexp(1)
    found = logits.gather(1, targets[:, None])[:, 0]
    here = torch.arange(logits.shape[1], device=logits.device) == targets[:, None]
    of_logits = ((logits - total[:, None]).exp() - here.float()) / count
    return (total - found).sum() / count, of_logits.to(torch.bfloat16)


class ReleasedAdafactor:
    """Steps bf16 weights by Adafactor, each as soon as its gradient is there, and releases that.

    Root-mean-squares of rows and columns are float32; the first moment is left out. Weights are
    rounded stochastically. Source: N. Shazeer and M. Stern, https://arxiv.org/abs/1804.04235

    Args:
        model: whose weights it steps.
        lr: by which an update of root-mean-square 1 is multiplied.
    """

    def __init__(self, model: nn.Module, lr: float) -> None:
        device = next(model.parameters()).device
        self.lr = torch.tensor(lr, device=device)
        self.decay = torch.tensor(0.0, device=device)
        self.steps = 0
        self.state: dict[Tensor, tuple[Tensor, ...]] = {}
        for weight in model.parameters():
            sizes = weight.shape if weight.dim() == 2 else weight.shape[:1]
            self.state[weight] = tuple(torch.zeros(size, device=device) for size in sizes)
            weight.register_post_accumulate_grad_hook(self._step)

    def next_step(self) -> None:
        """Begin a step."""
        self.steps += 1
        self.decay.fill_(1 - self.steps**-0.8)

    @torch.no_grad()
    def _step(self, weight: Tensor) -> None:
        grad, weight.grad = weight.grad, None
        run = _adafactor_matrix if weight.dim() == 2 else _adafactor_vector
        run(weight, grad, *self.state[weight], self.lr, self.decay)

    def state_tensors(self) -> list[Tensor]:
        """List what it keeps."""
        return [part for parts in self.state.values() for part in parts]


@torch.compile(dynamic=False)
def _adafactor_matrix(
    weight: Tensor, grad: Tensor, rows: Tensor, columns: Tensor, lr: Tensor, decay: Tensor
) -> None:
    squares = grad.float().square() + 1e-30
    rows.lerp_(squares.mean(1), 1 - decay)
    columns.lerp_(squares.mean(0), 1 - decay)
    update = grad.float() * (rows / rows.mean()).rsqrt()[:, None] * columns.rsqrt()
    _apply(weight, update, lr)


@torch.compile(dynamic=False)
def _adafactor_vector(
    weight: Tensor, grad: Tensor, squares: Tensor, lr: Tensor, decay: Tensor
) -> None:
    squares.lerp_(grad.float().square() + 1e-30, 1 - decay)
    _apply(weight, grad.float() * squares.rsqrt(), lr)


def _apply(weight: Tensor, update: Tensor, lr: Tensor) -> None:
    """Add an update, clipped at a root-mean-square of 1, and round stochastically to bf16."""
    size = update.square().mean().sqrt().clamp(min=1.0)
    bits = (weight.float() - lr * update / size).view(torch.int32)
    bits = bits + torch.randint_like(bits, 0, 2**16)
    weight.copy_((bits & -(2**16)).view(torch.float32).to(torch.bfloat16))
