"""A Qwen 3 or Llama in plain torch, tuned as the field does it: the peer of tuning in integers.

Blocks are compiled, and may be computed again in the backward. Losses are computed a few tokens at
a time. Products are bf16; those of blocks may be e4m3, except for gradients of weights.
`float_steps` has the optimizers of bf16 weights.
"""

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

COMPUTE = torch.bfloat16
"""Dtype of activations."""
LOGITS_AT_ONCE = 2**26
"""Maximum number of logits that are computed at once."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Shape:
    """Sizes and constants of a Qwen 3, or of a Llama, which has no norms of queries and keys."""

    layers: int
    dim: int
    heads: int
    kv_heads: int
    head_width: int
    ffn: int
    vocabulary: int
    tied: bool
    head_norms: bool = True
    theta: float = 1e6
    eps: float = 1e-6

    @classmethod
    def read(cls, folder: Path) -> "Shape":
        """Read the shape of a folder for Transformers."""
        fields = json.loads((folder / "config.json").read_text())
        sizes = {field: fields[name] for field, name in FIELDS.items()}
        width = fields.get("head_dim") or sizes["dim"] // sizes["heads"]
        return cls(**sizes, head_width=width, head_norms=fields["model_type"] == "qwen3")

    def hugging_face(self, **others: Any) -> dict[str, Any]:
        """Return the fields of `config.json` of a Qwen 3."""
        sizes = {name: getattr(self, field) for field, name in FIELDS.items()}
        return sizes | {"model_type": "qwen3", "head_dim": self.head_width} | others


FIELDS = {
    "layers": "num_hidden_layers", "dim": "hidden_size", "heads": "num_attention_heads",
    "kv_heads": "num_key_value_heads", "ffn": "intermediate_size", "vocabulary": "vocab_size",
    "tied": "tie_word_embeddings", "theta": "rope_theta", "eps": "rms_norm_eps",
}  # fmt: skip
"""Fields of `config.json`, by those of `Shape`."""


class FloatQwen(nn.Module):
    """A Qwen 3 or Llama with random weights.

    Args:
        shape: its sizes.
        dtype: of its weights.
        recompute: whether a backward computes the inside of a block again.
        fp8: whether blocks multiply in e4m3, except for gradients of weights.
        device: where it is.
    """

    def __init__(
        self, shape: Shape, dtype: torch.dtype, *, recompute: bool, fp8: bool = False,
        device: str = "cuda",
    ) -> None:  # fmt: skip
        super().__init__()
        self.shape, self.recompute, self.fp8 = shape, recompute, fp8
        q, kv = shape.heads * shape.head_width, shape.kv_heads * shape.head_width
        sizes = {
            "q": (q, shape.dim), "k": (kv, shape.dim), "v": (kv, shape.dim), "o": (shape.dim, q),
            "gate": (shape.ffn, shape.dim), "up": (shape.ffn, shape.dim),
            "down": (shape.dim, shape.ffn), "norm": (shape.dim,), "ffn_norm": (shape.dim,),
        }  # fmt: skip
        if shape.head_norms:
            sizes |= {"q_norm": (shape.head_width,), "k_norm": (shape.head_width,)}

        def drawn(size: tuple[int, ...]) -> nn.Parameter:
            weight = torch.empty(size, dtype=dtype, device=device)
            return nn.Parameter(weight.fill_(1) if len(size) == 1 else weight.normal_(0, 0.02))

        self.matrices = [
            nn.ParameterDict({name: drawn(size) for name, size in sizes.items()})
            for _ in range(shape.layers)
        ]
        """Weights of each block by name, also of its norms."""
        self.blocks = nn.ModuleList(self.matrices)
        self.embedding = drawn((shape.vocabulary, shape.dim))
        self.norm = drawn((shape.dim,))
        self.head = self.embedding if shape.tied else drawn((shape.vocabulary, shape.dim))
        self.factors = [nn.ParameterDict() for _ in range(shape.layers)]
        """Factors `a` and `b` of each block, by the name of the matrix to which 2 b a is added."""
        self.adapters = nn.ModuleList(self.factors)
        self._block = torch.compile(_block, dynamic=False)

    def loss(self, ids: Tensor, targets: Tensor, tokens: int | None = None) -> Tensor:
        """Compute the mean cross-entropy, in nats a token, of (B, T) int64.

        With `tokens`, the number of tokens of a step, it is the share of this batch in their mean.
        """
        shape = self.shape
        turned = _turns(ids.shape[1], shape.head_width, shape.theta, ids.device)
        x = functional.embedding(ids, self.embedding).to(COMPUTE)
        for block, adapters in zip(self.matrices, self.factors, strict=True):
            factors = [pair[part] for pair in adapters.values() for part in "ab"]
            names = tuple(block.keys()), tuple(adapters.keys())
            options = (
                x, *turned, shape.head_width, shape.eps, self.fp8, *names, *block.values(),
                *factors,
            )  # fmt: skip
            if self.recompute:
                x = checkpoint(self._block, *options, use_reentrant=False, preserve_rng_state=False)
            else:
                x = self._block(*options)
        x = functional.rms_norm(x, x.shape[-1:], self.norm.to(x.dtype), shape.eps)
        return _Loss.apply(x.flatten(0, 1), self.head, targets.flatten(), tokens or targets.numel())


class _Product(torch.autograd.Function):
    """x @ w.T in e4m3, each row with a scale of its own; the gradient of w is computed in bf16.

    Source: torchao's recipe `rowwise_with_gw_hp`.
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor) -> Tensor:
        ctx.save_for_backward(x, weight)
        return _multiply(x.flatten(0, -2), weight).unflatten(0, x.shape[:-1])

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor]:
        x, weight = ctx.saved_tensors
        rows = grad.flatten(0, -2)
        grad_x = _multiply(rows, weight.T.contiguous()).view(x.shape)
        return grad_x, rows.T @ x.flatten(0, -2)


def _multiply(x: Tensor, weight: Tensor) -> Tensor:
    (q, scale), (w, scales) = _quantised(x), _quantised(weight)
    return torch._scaled_mm(q, w.T, scale, scales.T, out_dtype=x.dtype, use_fast_accum=True)


def _quantised(x: Tensor) -> tuple[Tensor, Tensor]:
    scale = x.abs().amax(1, keepdim=True).float().clamp(min=1e-12) / 448
    return (x / scale).to(torch.float8_e4m3fn), scale


def _block(
    x: Tensor, cos: Tensor, sin: Tensor, width: int, eps: float, fp8: bool, names: tuple[str, ...],
    adapted: tuple[str, ...], *weights: Tensor,
) -> Tensor:  # fmt: skip
    w = dict(zip(names, (weight.to(x.dtype) for weight in weights), strict=False))
    factors = iter(weight.to(x.dtype) for weight in weights[len(names) :])
    pairs = {name: (next(factors), next(factors)) for name in adapted}

    def linear(y: Tensor, name: str) -> Tensor:
        product = _Product.apply(y, w[name]) if fp8 else functional.linear(y, w[name])
        if name not in pairs:
            return product
        a, b = pairs[name]
        return product + 2 * functional.linear(functional.linear(y, a), b)

    y = functional.rms_norm(x, x.shape[-1:], w["norm"], eps)
    q, k, v = (linear(y, name).unflatten(-1, (-1, width)).transpose(1, 2) for name in "qkv")
    if "q_norm" in names:
        q, k = (
            functional.rms_norm(part, (width,), w[name], eps)
            for part, name in ((q, "q_norm"), (k, "k_norm"))
        )
    q, k = (_turn(part, cos, sin) for part in (q, k))
    y = functional.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
    x = x + linear(y.transpose(1, 2).flatten(2), "o")
    y = functional.rms_norm(x, x.shape[-1:], w["ffn_norm"], eps)
    return x + linear(functional.silu(linear(y, "gate")) * linear(y, "up"), "down")


def _turns(length: int, width: int, theta: float, device: torch.device) -> tuple[Tensor, Tensor]:
    rates = theta ** (-torch.arange(0, width, 2, device=device) / width)
    angles = torch.arange(length, device=device)[:, None] * rates
    angles = torch.cat((angles, angles), dim=-1)
    return angles.cos().to(COMPUTE), angles.sin().to(COMPUTE)


def _turn(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    first, second = x.chunk(2, dim=-1)
    return x * cos + torch.cat((-second, first), dim=-1) * sin


class _Loss(torch.autograd.Function):
    """The cross-entropy, whose gradients are formed a few tokens at a time in the forward."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, head: Tensor, targets: Tensor, count: int) -> Tensor:
        grad_x, grad_head = torch.empty_like(x), torch.zeros_like(head)
        total, weight = torch.zeros((), device=x.device), head.to(x.dtype)
        at_once = LOGITS_AT_ONCE // len(head)
        for begin in range(0, len(x), at_once):
            some = slice(begin, begin + at_once)
            losses, of_logits = _grade(x[some] @ weight.T, targets[some], count)
            total += losses
            grad_x[some] = of_logits @ weight
            if head.dtype == x.dtype:
                grad_head.addmm_(of_logits.T, x[some])
            else:
                grad_head += of_logits.T @ x[some]
        ctx.save_for_backward(grad_x, grad_head)
        return total

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor, None, None]:
        grad_x, grad_head = ctx.saved_tensors
        return grad_x, grad_head, None, None


@torch.compile(dynamic=False)
def _grade(logits: Tensor, targets: Tensor, count: int) -> tuple[Tensor, Tensor]:
    logits = logits.float()
    total = logits.logsumexp(1)
    target_logits = logits.gather(1, targets[:, None])[:, 0]
    here = torch.arange(logits.shape[1], device=logits.device) == targets[:, None]
    of_logits = ((logits - total[:, None]).exp() - here.float()) / count
    return (total - target_logits).sum() / count, of_logits.to(COMPUTE)
