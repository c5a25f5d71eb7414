"""Texts from a float model as an expert makes them: the peer of generation.

Weights are bf16 and multiplied by cuBLAS, everything between two products is one kernel that
`torch.compile` makes, the cache is static, and a step is one CUDA graph. All texts are at the same
position, which is the easiest case.
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
from arbcli.kernels.output.choose_bytes import choose_bytes_
from arbcli.kernels.update.random_bits import stream_keys
from arbcli.model.language_model import LanguageModel
from arbcli.model.layers.rotary import rotary_table

WARM_UP_STEPS = 3
MODES = ("compiled attention", "torch's attention")
"""Ways to attend, of which the faster is the peer."""


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


def normalise(x: Tensor) -> Tensor:
    """Divide each row by its root-mean-square."""
    return functional.rms_norm(x.float(), x.shape[-1:], eps=NORM_EPS).to(x.dtype)


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Turn the halves of (B, heads, d) by the angles of a position, and normalise each head."""
    halves = x.float().unflatten(-1, (2, -1))
    return normalise((halves * cos + halves.flip(-2) * sin).flatten(-2)).to(x.dtype)


def attend(q: Tensor, keys: Tensor, values: Tensor, position: Tensor, mode: str) -> Tensor:
    """Attend with (B, heads, d) to rings of (B, heads, W, d)."""
    seen = torch.arange(keys.shape[2], device=q.device) <= position
    if mode == "torch's attention":
        mask = seen.expand(len(q), 1, 1, -1)
        return functional.scaled_dot_product_attention(q[:, :, None], keys, values, attn_mask=mask)[
            :, :, 0
        ]
    scores = (keys.float() * q.float()[:, :, None]).sum(3) * q.shape[-1] ** -0.5
    shares = torch.where(seen, scores.exp(), 0.0)  # normalised heads: no score is large
    y = (shares[..., None] * values.float()).sum(2) / shares.sum(2)[..., None]
    return y.to(q.dtype)


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
    mode: str,
) -> Tensor:
    """Compute what a block makes of one position of the streams, (B, D)."""
    qkv, output, gate_up, down = matrices
    texts, heads, window, head_dim = keys.shape
    sub_norm = normalise if sub_norms else lambda part: part
    q, k, v = functional.linear(normalise(x), qkv).view(texts, 3, heads, head_dim).unbind(1)
    place = position.long()[None]
    angles = cos.index_select(0, place), sin.index_select(0, place)
    q, k = (rotate(part, *angles) for part in (q, k))
    slot = place % window
    keys.index_copy_(2, slot, k[:, :, None])
    values.index_copy_(2, slot, v[:, :, None])
    y = attend(q, keys, values, position, mode).flatten(1)
    x = x + functional.linear(sub_norm(y), output)
    gate, up = functional.linear(normalise(x), gate_up).chunk(2, dim=1)
    return x + functional.linear(sub_norm(functional.silu(gate) * up), down)


class FloatDecoder:
    """A float model, a cache for texts, and the last byte of each.

    Args:
        model: with float weights, which are copied to `dtype`.
        texts: B.
        positions: bytes that a text can have.
        dtype: of weights, streams and cache.
        mode: of `MODES`.
        compiled: whether what is between two products is compiled.
    """

    @torch.no_grad()
    def __init__(
        self,
        model: LanguageModel,
        texts: int,
        positions: int,
        *,
        dtype: torch.dtype = torch.bfloat16,
        mode: str = MODES[0],
        compiled: bool = True,
    ) -> None:
        config, device = dense_shape(model), model.device
        self.layers, self.embedding, self.head = dense_weights(model, dtype)
        ring = (2, texts, config.heads, min(config.ctx, positions), config.head_width)
        self.rings = [torch.zeros(ring, dtype=dtype, device=device) for _ in self.layers]
        self.position = torch.zeros((), dtype=torch.int32, device=device)
        cos, sin = rotary_table(positions, config.head_width, device)
        self.table = cos[:, None], torch.stack([-sin, sin], dim=1)
        self.byte = torch.full((texts, 1), 10, dtype=torch.int64, device=device)
        self.text = torch.zeros(texts, positions, dtype=torch.uint8, device=device)
        how = Sampling()
        integers: dict[str, Any] = {"dtype": torch.int32, "device": device}
        keys = stream_keys(torch.zeros((), **integers), torch.zeros((), **integers), texts, 1)
        self.how = (
            keys[:, 0].contiguous(), torch.full((texts,), how.temperature, device=device),
            torch.full((texts,), how.top_k, **integers),
            torch.full((texts,), how.top_p, device=device),
        )  # fmt: skip
        self._step_block: Callable[..., Tensor] = partial(
            step_block, sub_norms=config.sub_norms, mode=mode
        )
        if compiled:
            self._step_block = torch.compile(self._step_block, dynamic=False, fullgraph=True)
        self._graph: torch.cuda.CUDAGraph | None = None

    @property
    def read_bytes(self) -> int:
        """Bytes of weights that a step reads."""
        matrices = [matrix for layer in self.layers for matrix in layer]
        return sum(matrix.nbytes for matrix in [*matrices, self.head])

    @torch.no_grad()
    def compute_logits(self) -> Tensor:
        """Read the last bytes; return (B, 256) logits of the next ones."""
        x = functional.embedding(self.byte[:, 0], self.embedding)
        for layer, ring in zip(self.layers, self.rings, strict=True):
            x = self._step_block(x, layer, *ring, self.position, *self.table)
        self.position += 1
        return functional.linear(normalise(x), self.head)

    @torch.no_grad()
    def step(self) -> None:
        """Make one byte of each text."""
        if self._graph is not None:
            self._graph.replay()
            return
        logits = self.compute_logits()
        position = self.position.expand(len(self.byte)).contiguous()
        choose_bytes_(self.byte, self.text, logits, position, *self.how)

    @torch.no_grad()
    def capture(self) -> None:
        """Record a step as one CUDA graph, after a few whose bytes are then forgotten."""
        stream = torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            for _ in range(WARM_UP_STEPS):
                self.step()
        torch.cuda.current_stream().wait_stream(stream)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            self.step()
        self._graph = graph
        self.position.zero_()

    def read(self, prompt: bytes) -> None:
        """Begin all texts with a prompt, a byte a step; what these steps choose is replaced."""
        for byte in prompt[:-1]:
            self.byte.fill_(byte)
            self.step()
        self.byte.fill_(prompt[-1])
