"""Generation by a float model as an expert writes it: the peer of `benchmarks.generation`.

Weights are bf16, the cache is static, a byte is one CUDA graph, and a block is seven kernels or so
that `torch.compile` makes. What norms divide by is taken out of the product after them and formed
in the same pass, the gate is formed where its two sums end, and a residual is added where a product
ends. Heads of queries and keys have unit root-mean-square, so scores are bounded by the root of a
head's width, and a softmax needs no maximum.
"""

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from arbcli.config.layer_spec import NORM_EPS
from arbcli.generation.sampling import Sampling
from arbcli.interop.huggingface.dense import Shape, shape_of
from arbcli.kernels.output.choose_byte import choose_byte_
from arbcli.kernels.update.random_bits import stream_key
from arbcli.model.language_model import LanguageModel
from arbcli.model.layers.rotary import rotary_table

WARM_UP_STEPS = 3
MODES: dict[str, dict[str, str | int | bool | Callable[..., Any]] | None] = {
    "tuned": {"coordinate_descent_tuning": True},
    "default": {},
    "cuBLAS": None,
}
"""Ways to compile products: options of the compiler that writes them; None leaves them to cuBLAS.

Which is the fastest depends on the GPU and torch's version, so a benchmark tries them.
"""


def dense_shape(model: LanguageModel) -> Shape:
    """Return the shape of a model of dense blocks.

    Raises:
        ValueError: the model has another architecture.
    """
    shape = shape_of(model.config)
    if shape is None:
        raise ValueError("not a model of dense blocks")
    return shape


def dense_weights(
    model: LanguageModel, dtype: torch.dtype
) -> tuple[list[list[Tensor]], Tensor, Tensor]:
    """Return the matrices of a model of dense blocks in a dtype.

    Returns:
        Those of each block: of queries, keys and values; of attention's output; of gate and up; of
        the MLP's output. Then the embedding and the head.
    """
    weights = {name: part.weight(dtype).detach() for name, part in model.weights().items()}
    parts = ("attention.qkv", "attention.output", "mlp.gate_up", "mlp.output")
    blocks = [
        [weights[f"blocks.{index}.{part}.weight"] for part in parts]
        for index in range(dense_shape(model).layers)
    ]
    return blocks, weights["embedding.weight"], weights["head.weight"]


def multiply(x: Tensor, weight: Tensor, *, normalise: bool, cublas: bool) -> Tensor:
    """Multiply one vector by a matrix, and divide it by its root-mean-square.

    Args:
        x: (K,) bfloat16 or float32.
        weight: (N, K) of that dtype.
        normalise: whether to divide.
        cublas: whether cuBLAS multiplies; else both sums are formed in one pass.

    Returns:
        (N,) float32.
    """
    if cublas:
        x = functional.rms_norm(x.float(), x.shape, eps=NORM_EPS).to(x.dtype) if normalise else x
        return functional.linear(x[None], weight)[0].float()
    wide = x.float()
    y = (weight.float() * wide).sum(1)
    if normalise:
        squares = (wide * wide).expand(weight.shape).sum(1)
        y = y * torch.rsqrt(squares / len(x) + NORM_EPS)
    return y


def turn(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Turn the halves of (heads, d) by the angles of a position, and normalise each head.

    A rotation keeps the root-mean-square, so that is found on the way.
    """
    halves = x.view(len(x), 2, -1)
    scale = torch.rsqrt((x * x).mean(1) + NORM_EPS)
    return ((halves * cos + halves.flip(1) * sin) * scale[:, None, None]).flatten(1)


def step_block(
    x: Tensor,
    matrices: list[Tensor],
    keys: Tensor,
    values: Tensor,
    position: Tensor,
    cos: Tensor,
    sin: Tensor,
    *,
    sub_norms: bool,
    cublas: bool,
) -> Tensor:
    """Compute what a block makes of one position of the stream.

    Args:
        x: (D,) of the dtype of the weights.
        matrices: of queries, keys and values; of attention's output; of gate and up; of the MLP's
            output.
        keys: (heads, W, d), a ring that is written to.
        values: like it.
        position: bytes seen before, int32 scalar.
        cos: of every position, (T, 1, d / 2) float32.
        sin: with the signs of both halves, (T, 2, d / 2) float32.
        sub_norms: whether norms precede the output projections.
        cublas: see `multiply`.

    Returns:
        (D,) like x.
    """
    qkv, output, gate_up, down = matrices
    heads, window, head_dim = keys.shape
    q, k, v = multiply(x, qkv, normalise=True, cublas=cublas).view(3, heads, head_dim)
    place = position.long()[None]
    angles = cos.index_select(0, place), sin.index_select(0, place)
    q, k = (turn(part, *angles) for part in (q, k))
    slot = place % window
    keys.index_copy_(1, slot, k[:, None].to(keys.dtype))
    values.index_copy_(1, slot, v[:, None].to(values.dtype))
    scores = (keys.float() * q[:, None]).sum(2) * head_dim**-0.5  # (heads, W)
    seen = torch.arange(window, device=x.device) <= position
    shares = torch.where(seen, scores.exp(), 0.0)
    y = (shares[:, :, None] * values.float()).sum(1)
    y = y / shares[:, :, None].expand(values.shape).sum(1)
    y = y.flatten().to(x.dtype)
    x = (x.float() + multiply(y, output, normalise=sub_norms, cublas=cublas)).to(x.dtype)
    if cublas:
        gate, up = multiply(x, gate_up, normalise=True, cublas=True).chunk(2)
    else:  # two sums of one pass, so that the gate is formed where they end
        gate, up = (multiply(x, half, normalise=True, cublas=False) for half in gate_up.chunk(2))
    hidden = (functional.silu(gate) * up).to(x.dtype)
    added = multiply(hidden, down, normalise=sub_norms, cublas=cublas)
    return (x.float() + added).to(x.dtype)


def choose_logits(x: Tensor, head: Tensor, *, cublas: bool) -> Tensor:
    """Compute (256,) logits of the stream's last position, (D,)."""
    return multiply(x, head, normalise=True, cublas=cublas).to(x.dtype)


class FloatDecoder:
    """A float model, its cache and the text so far.

    Args:
        model: with float weights, which are copied to `dtype`.
        positions: bytes that the text can have.
        sampling: how bytes are chosen.
        dtype: of weights, stream and cache.
        mode: of `MODES`; None compiles nothing.
    """

    @torch.no_grad()
    def __init__(
        self,
        model: LanguageModel,
        positions: int,
        sampling: Sampling | None = None,
        *,
        dtype: torch.dtype = torch.bfloat16,
        mode: str | None = None,
    ) -> None:
        config, device = dense_shape(model), model.device
        self.layers, self.embedding, self.head = dense_weights(model, dtype)
        self.sampling, self.length = sampling or Sampling(), 0
        self.window = min(config.ctx, positions)
        ring = (config.heads, self.window, config.head_width)
        self.rings = [
            [torch.zeros(ring, dtype=dtype, device=device) for _ in range(2)] for _ in self.layers
        ]
        self.position = torch.zeros((), dtype=torch.int32, device=device)
        cos, sin = rotary_table(positions, config.head_width, device)
        self.table = cos[:, None], torch.stack([-sin, sin], dim=1)
        self.byte = torch.zeros(1, 1, dtype=torch.int64, device=device)
        self.text = torch.zeros(positions, dtype=torch.uint8, device=device)
        self._key = stream_key(self.sampling.seed, 0, device)
        cublas = mode == "cuBLAS"
        self._step_block: Callable[..., Tensor] = partial(
            step_block, sub_norms=config.sub_norms, cublas=cublas
        )
        self._logits: Callable[..., Tensor] = partial(choose_logits, cublas=cublas)
        if mode is not None:
            compiled = partial(torch.compile, dynamic=False, fullgraph=True, options=MODES[mode])
            self._step_block, self._logits = compiled(self._step_block), compiled(self._logits)
        self._graph: torch.cuda.CUDAGraph | None = None

    @property
    def read_bytes(self) -> int:
        """Bytes of weights that a step reads."""
        matrices = [matrix for layer in self.layers for matrix in layer]
        return sum(matrix.nbytes for matrix in [*matrices, self.head])

    @torch.no_grad()
    def compute_logits(self) -> Tensor:
        """Read the last byte; return (256,) logits of the next one."""
        x = functional.embedding(self.byte[0], self.embedding)[0]
        for layer, ring in zip(self.layers, self.rings, strict=True):
            x = self._step_block(x, layer, *ring, self.position, *self.table)
        self.position += 1
        return self._logits(x, self.head)

    @torch.no_grad()
    def step(self) -> None:
        """Make one byte."""
        if self._graph is not None:
            self._graph.replay()
        else:
            self._compute()
        self.length += 1

    def _compute(self) -> None:
        how = self.sampling
        logits = self.compute_logits()
        choose_byte_(
            self.byte, self.text, logits, self.position, self._key,
            how.temperature, how.top_k, how.top_p,
        )  # fmt: skip

    @torch.no_grad()
    def capture(self) -> None:
        """Record a step as one CUDA graph, after a few whose bytes are then forgotten."""
        stream = torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            for _ in range(WARM_UP_STEPS):
                self._compute()
        torch.cuda.current_stream().wait_stream(stream)
        self._graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(self._graph):
            self._compute()
        self.position.zero_()

    def read(self, prompt: bytes) -> None:
        """Begin the text with a prompt, a byte a step; what a step chooses is overwritten."""
        for byte in prompt[:-1]:
            self.byte.fill_(byte)
            self.step()
        self.byte.fill_(prompt[-1])
        self.length = len(prompt)
        self.text[: self.length] = torch.tensor(list(prompt), dtype=torch.uint8)
