"""A model of `arb` in plain PyTorch: its core, and parts of dense blocks.

    symbols -> embedding -> [encoder -> chunks ->] blocks [-> decoder] -> norm -> head

`arb export --to hf` copies this file and those of the model's other parts next to the weights. They
stay packed: five trits in a byte, or one digit in a byte, with a scale for each group of a row. In
float64, with weights that are decoded, the same code is the reference of `arb verify-kernels`.

A text is read as a whole, (T, D), without padding, and texts of a batch one after another. There is
no cache of keys and values: each generated symbol reads the text again.
"""

import math
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional

TRITS = 5
"""Trits in a byte."""
PLANE = 32
"""Bytes of a full block; their trits d are consecutive weights, for d = 0..4."""
OCTAVE = 128
"""Steps of a scale per doubling."""
EPS = 1e-6
"""Epsilon of norms without gains."""
MIX = 0x9E3779B97F4A7C15 - 2**64
"""The golden ratio in 64 bits, as a signed integer."""
Settings = dict[str, Any]
"""Configuration of a part."""


class PartSpec(NamedTuple):
    """The stream of a part, and how its weights are stored."""

    dim: int
    """D, the width of the stream."""
    ctx: int
    """Maximum number of positions that a part sees."""
    config: Any
    """Configuration of the model, as `ArbConfig`."""
    parts: dict[str, Any]
    """Classes of parts by kind."""
    causal: bool = True
    """Whether a position sees none that come after it."""

    def gains(self) -> nn.Parameter | None:
        """Create the gains of a norm of the stream; None if norms have none."""
        return vector(self.dim) if self.config.norm_gain else None


def vector(length: int) -> nn.Parameter:
    """Create a vector of floats, which is small."""
    return nn.Parameter(torch.empty(length))


class Reading(NamedTuple):
    """Inputs of parts in addition to the stream of a text."""

    text: Tensor
    """Symbols of the text, int64."""
    position_ids: Tensor
    """(T,) int64, the symbol that each position stands for."""


class Packed(nn.Module):
    """A matrix (N, K) of weights bf16(z * 2**E * bf16(2**(F / 128))); z is a trit or a digit.

    Buffers:
        trits: (N, ceil(K / 5)) uint8, or digits: (N, K) int8.
        exponent, fraction: (N, groups) int8, E and F.
    """

    trits: Tensor
    digits: Tensor
    exponent: Tensor
    fraction: Tensor

    def __init__(self, rows: int, columns: int, spec: PartSpec, storage: str | None = None) -> None:
        super().__init__()
        self.columns, self.group_size = columns, spec.config.group_size
        if (storage or spec.config.storage) == "trits":
            blocks, rest = divmod(columns, TRITS * PLANE)
            width = blocks * PLANE + -(-rest // TRITS)
            self.register_buffer("trits", torch.empty(rows, width, dtype=torch.uint8))
        else:
            self.register_buffer("digits", torch.empty(rows, columns, dtype=torch.int8))
        groups = -(-columns // self.group_size)
        for name in ("exponent", "fraction"):
            self.register_buffer(name, torch.empty(rows, groups, dtype=torch.int8))
        self._decoded: Tensor | None = None

    def rows(self, index: Tensor | slice, dtype: torch.dtype) -> Tensor:
        """Decode some rows, (..., K) of a dtype."""
        is_packed = hasattr(self, "trits")
        z = unpack(self.trits[index], self.columns) if is_packed else self.digits[index]
        roots = torch.exp2(self.fraction[index].float() / OCTAVE).bfloat16().float()
        scales = torch.ldexp(roots, self.exponent[index].int())
        scales = scales.repeat_interleave(self.group_size, dim=-1)[..., : self.columns]
        return (z * scales).bfloat16().to(dtype)

    def weight(self, dtype: torch.dtype) -> Tensor:
        """Return the weights, (N, K) of a dtype, which are decoded once."""
        kept, device = self._decoded, self.exponent.device
        if kept is None or kept.dtype != dtype or kept.device != device:
            kept = self._decoded = self.rows(slice(None), dtype)
        return kept

    def forward(self, x: Tensor) -> Tensor:
        """Multiply (..., K) by the weights: (..., N)."""
        return functional.linear(x, self.weight(x.dtype))


def unpack(packed: Tensor, columns: int) -> Tensor:
    """Unpack (..., bytes) uint8 to (..., K) trits: byte = sum over d of (trit_d + 1) * 3**d."""
    powers = 3 ** torch.arange(TRITS, device=packed.device)[:, None]
    full = columns // (TRITS * PLANE)
    blocks = packed[..., : full * PLANE].unflatten(-1, (full, PLANE))
    short = packed[..., None, full * PLANE :]
    planes = (part[..., None, :] // powers % 3 - 1 for part in (blocks, short))
    return torch.cat([part.flatten(-3) for part in planes], dim=-1)[..., :columns]


def wide(x: Tensor) -> Tensor:
    """Convert a tensor of any shape to float32; float64 is unchanged."""
    return x if x.dtype == torch.float64 else x.float()


def norm(x: Tensor, gains: Tensor | None = None, eps: float = EPS) -> Tensor:
    """Divide by the root-mean-square of (..., D), and multiply by gains, in float32 or float64."""
    y = functional.rms_norm(wide(x), x.shape[-1:], eps=eps)
    return (y if gains is None else y * wide(gains)).to(x.dtype)


def rounded(x: Tensor) -> Tensor:
    """Round rows of (T, D) to -127..127 times a scale; the gradient is that of x."""
    scale = x.detach().abs().amax(dim=-1, keepdim=True).clamp(min=1e-5) / 127
    return x + ((x / scale).round() * scale - x).detach()


def gated(x: Tensor, limit: float = math.inf) -> Tensor:
    """Multiply the second half of (..., 2 D) by the silu of the first, both limited."""
    gate, up = x.chunk(2, dim=-1)
    return functional.silu(gate.clamp(max=limit)) * up.clamp(-limit, limit)


def rotate(
    x: Tensor, position_ids: Tensor, width: int | None = None, rotary: Settings | None = None
) -> Tensor:
    """Rotate pairs (i, i + d / 2) of (T, ..., d) by the angles of `position_ids`, (T,).

    The first `width / 2` pairs are rotated; None is all.
    """
    half = x.shape[-1] // 2
    angles = torch.zeros(len(x), half, dtype=torch.float64)
    width = width or 2 * half
    rates = [rotary_rate(i, width, **rotary or {}) for i in range(width // 2)]
    angles[:, : width // 2] = torch.outer(position_ids.cpu().double(), angles.new_tensor(rates))
    angles = angles.view(len(x), *[1] * (x.dim() - 2), half)
    first, second = wide(x).split(half, dim=-1)
    cos, sin = (part.to(first) for part in (angles.cos(), angles.sin()))
    return torch.cat((first * cos - second * sin, first * sin + second * cos), dim=-1).to(x.dtype)


def rotary_rate(
    i: int,
    width: int,
    base: float = 10000.0,
    scaling: str = "none",
    factor: float = 1.0,
    low: float | None = None,
    high: float | None = None,
    original_ctx: int = 0,
    **_: Any,
) -> float:
    """Compute the radians by which pair i of `width / 2` rotates from a position to the next."""
    rate, kept = base ** (-2 * i / width), 0.0
    if scaling == "llama3":
        rotations, low, high = original_ctx * rate / (2 * math.pi), low or 1.0, high or 4.0
        kept = min(max((rotations - low) / (high - low), 0.0), 1.0)
    elif scaling == "yarn":
        first, last = (
            width * math.log(original_ctx / (rotations * 2 * math.pi), base) / 2
            for rotations in (high or 32.0, low or 1.0)
        )
        first, last = max(math.floor(first), 0), min(math.ceil(last), width - 1)
        kept = 1 - min(max((i - first) / max(last - first, 0.001), 0.0), 1.0)
    return rate * (kept + (1 - kept) / factor)


def sees_last(length: int, window: int, device: torch.device, *, causal: bool = True) -> Tensor:
    """Return the (T, T) mask of attention to the last `window` positions.

    A position sees itself and, unless the mask is causal, as many positions after it.
    """
    place = torch.arange(length, device=device)
    distance = place[:, None] - place
    distance = distance if causal else distance.abs()
    return (distance >= 0) & (distance < window)


def attention_shares(
    q: Tensor, k: Tensor, sees: Tensor, scale: float, sinks: Tensor | None = None
) -> Tensor:
    """Compute the shares of keys, (H, T, S), of (T, H, d) queries and (S, G, d) keys.

    Each key head is shared by H / G query heads. Sinks, (H,), are logits without a value.
    """
    heads = q.shape[1]
    scores = torch.einsum("thd,shd->hts", q, repeated(k, heads))
    scores = (wide(scores) * scale).masked_fill(~sees, -math.inf)
    if sinks is not None:
        logits = wide(sinks).view(heads, 1, 1).expand(-1, len(q), 1)
        scores = torch.cat((scores, logits), dim=-1)
    return scores.softmax(dim=-1)[..., : len(k)].to(k.dtype)


def repeated(x: Tensor, heads: int) -> Tensor:
    """Repeat key or value heads, (S, G, d), for the query heads: (S, heads, d)."""
    return x.repeat_interleave(heads // x.shape[1], dim=1)


def mixed(shares: Tensor, values: Tensor) -> Tensor:
    """Average (S, G, d) values by (H, T, S) shares: (T, H d)."""
    return torch.einsum("hts,shd->thd", shares, repeated(values, len(shares))).flatten(1)


def ngram_rows(text: Tensor, rows: int, order: int) -> Tensor:
    """Hash the n-gram that ends at each byte of a text, (T,), to 0..rows - 1, or -1 without one."""
    key, complete = torch.zeros_like(text), torch.ones_like(text, dtype=torch.bool)
    for back in range(order):
        byte = functional.pad(text, (back, 0), value=-1)[: len(text)]
        key, complete = key * 257 + byte + 1, complete & (byte >= 0)
    mixed = (key + (order << 40)) * MIX
    return torch.where(complete, ((mixed >> 32) & 0x7FFFFFFF) * rows >> 31, -1)


class Attention(nn.Module):
    """Attention to the last positions."""

    name = "attention"

    def __init__(self, part: Settings, spec: PartSpec) -> None:
        super().__init__()
        self.part, self.eps, self.causal = part, spec.config.norm_eps, spec.causal
        self.heads, self.kv_heads = part["heads"], part["kv_heads"] or part["heads"]
        self.width = width = part["head_width"] or spec.dim // self.heads
        self.window = min(part["window"] or spec.ctx, spec.ctx)
        inner, rows = self.heads * width, (self.heads + 2 * self.kv_heads) * width
        self.qkv = Packed(rows, spec.dim, spec)
        self.bias = vector(rows) if part["bias"] else None
        gains = part["query_key_norm"] == "gain"
        self.query_gain, self.key_gain = (vector(width) if gains else None for _ in range(2))
        self.sinks = vector(self.heads) if part["sink"] else None
        self.sub_norm = vector(inner) if part["bitnet"] else None
        self.output = Packed(spec.dim, inner, spec)
        self.output_bias = vector(spec.dim) if part["output_bias"] else None

    def forward(self, _x: Tensor, h: Tensor, _reading: Reading) -> Tensor:
        """Attend over the normalised stream, (T, D)."""
        rotary, position_ids = self.part["rotary"], torch.arange(len(h))
        qkv = self.qkv(rounded(h) if self.part["bitnet"] else h)
        qkv = qkv if self.bias is None else qkv + self.bias
        counts = self.heads, self.kv_heads, self.kv_heads
        q, k, v = qkv.view(len(h), -1, self.width).split(counts, dim=1)
        if self.part["query_key_norm"] != "none":
            q, k = norm(q, self.query_gain, self.eps), norm(k, self.key_gain, self.eps)
        rotated = int(self.width * rotary["share"])
        q, k = (rotate(part, position_ids, rotated, rotary) for part in (q, k))
        scale = self.width**-0.5
        if rotary["scaling"] == "yarn":
            scale *= (0.1 * math.log(rotary["factor"]) + 1) ** 2
        sees = sees_last(len(h), self.window, h.device, causal=self.causal)
        y = mixed(attention_shares(q, k, sees, scale, self.sinks), v)
        if self.part["bitnet"]:
            y = rounded(norm(y, self.sub_norm, self.eps))
        elif self.part["sub_norm"]:
            y = norm(y)
        y = self.output(y)
        return y if self.output_bias is None else y + self.output_bias


class MLP(nn.Module):
    """Gated MLP with SiLU, or with relu(gate)**2 in a BitNet."""

    name = "mlp"

    def __init__(self, part: Settings, spec: PartSpec) -> None:
        super().__init__()
        self.part, self.eps = part, spec.config.norm_eps
        self.sub_norm = vector(part["width"]) if part["bitnet"] else None
        self.gate_up = Packed(2 * part["width"], spec.dim, spec)
        self.output = Packed(spec.dim, part["width"], spec)

    def forward(self, _x: Tensor, h: Tensor, _reading: Reading) -> Tensor:
        """Transform the normalised stream, (T, D)."""
        if self.part["bitnet"]:
            gate, up = self.gate_up(rounded(h)).chunk(2, dim=-1)
            return self.output(rounded(norm(gate.relu() ** 2 * up, self.sub_norm, self.eps)))
        y = gated(self.gate_up(h))
        return self.output(norm(y) if self.part["sub_norm"] else y)


class Block(nn.Module):
    """A mixer, then a channel mixer, each after a norm and added to the stream."""

    def __init__(self, block: Settings, stage: Settings, spec: PartSpec) -> None:
        super().__init__()
        self.stage, self.eps = stage, spec.config.norm_eps
        self.branches: list[tuple[str, str]] = []
        for part in filter(None, (block["mixer"], block["channel"])):
            kind = spec.parts[part["kind"]]
            norm_name = getattr(kind, "norm_name", f"{kind.name}_norm")
            self.branches.append((kind.name, norm_name))
            self.add_module(kind.name, kind(part, spec))
            self.register_parameter(norm_name, spec.gains())
            if stage["streams"] > 1:
                connection = spec.parts["streams"](stage["streams"], spec)
                self.add_module(f"{kind.name}_streams", connection)

    def forward(self, x: Tensor, reading: Reading) -> Tensor:
        """Pass a stream, (T, D), or several, (T, n, D), through the block."""
        for name, norm_name in self.branches:
            part, gains = getattr(self, name), getattr(self, norm_name)

            def branch(x: Tensor, part: nn.Module = part, gains: Tensor | None = gains) -> Tensor:
                return self.stage["contribution"] * part(x, norm(x, gains, self.eps), reading)

            connection = getattr(self, f"{name}_streams", None)
            x = connection(x, branch) if connection else x + branch(x)
        if self.stage["bound"] is not None:  # scales down vectors beyond it
            inverse = torch.rsqrt(wide(x).square().mean(dim=-1, keepdim=True) + EPS)
            x = (x * (self.stage["bound"] * inverse).clamp(max=1)).to(x.dtype)
        return x


class Stack(nn.ModuleList):
    """Blocks on a stream, or on several that begin as copies of it and are averaged."""

    def __init__(self, blocks: list[Settings], stage: Settings, spec: PartSpec) -> None:
        super().__init__(Block(block, stage, spec) for block in blocks)
        self.streams = stage["streams"]

    def forward(self, x: Tensor, reading: Reading, span: slice = slice(None)) -> Tensor:
        """Pass the stream, (T, D), through a slice of the blocks."""
        if self.streams > 1:
            x = torch.stack([x] * self.streams, dim=1)
        for block in [*self][span]:
            x = block(x, reading)
        return wide(x).mean(dim=1).to(x.dtype) if self.streams > 1 else x


class PlainModel(nn.Module):
    """A language model of any stages of blocks."""

    def build(self, config: Any, parts: dict[str, Any], *, causal: bool = True) -> None:
        """Create the parts of the model, without values.

        Args:
            config: configuration of the model, as `ArbConfig`.
            parts: classes of its parts by kind.
            causal: whether a position sees none that come after it.
        """
        self.plain, model = config, config.model
        *outer, main = model["stages"]
        specs = [PartSpec(of["dim"], of["ctx"], config, parts, causal) for of in model["stages"]]
        first, last = specs[0], specs[-1]
        self.embedding = Packed(config.symbols, first.dim, first, config.symbol_storage)
        self.beside = [part["kind"] for part in model["beside"]]
        for part in model["beside"]:
            self.add_module(part["kind"], parts[part["kind"]](part, first))
        self.stages = nn.ModuleList(
            parts[stage["chunking"]["kind"]](stage, spec, inner.dim)
            for stage, spec, inner in zip(outer, specs, specs[1:], strict=False)
        )
        self.blocks = Stack(main["blocks"], main, last)
        self.between = None
        if main["memories"] or main["router"]:
            self.between = parts["between"](main["memories"], main["router"], last)
        if model["head"]:
            self.byte_norm = first.gains()
            self.byte_mlp = MLP(model["head"], first)
        self.norm = first.gains()
        if model["composite"]:
            self.head = parts["composite"](first)
        elif not model["tied"]:
            self.head = Packed(config.vocab_size, first.dim, first, config.symbol_storage)

    def read(self, ids: Tensor, dtype: torch.dtype) -> Tensor:
        """Compute logits of each next symbol, (T, V), from a text, (T,) int64."""
        x = self.embedding.rows(ids, dtype)
        for name in self.beside:
            x = x + getattr(self, name)(ids, dtype)
        position_ids = torch.arange(len(ids), device=ids.device)
        return self.logits(self.run_stage(0, x, Reading(ids, position_ids)))

    def logits(self, x: Tensor) -> Tensor:
        """Compute (T, V) logits from the stream after the last block, (T, D)."""
        if self.plain.model["head"]:
            x = x + self.byte_mlp(x, norm(x, self.byte_norm), None)
        x = norm(x, self.norm, self.plain.norm_eps)
        if self.plain.model["tied"]:
            return functional.linear(x, self.embedding.weight(x.dtype)[: self.plain.vocab_size])
        return self.head(x)

    def run_stage(self, index: int, x: Tensor, reading: Reading) -> Tensor:
        """Pass the stream, (T, D), through a stage and those inside it."""
        if index < len(self.stages):
            return self.stages[index](
                x, reading, lambda *inside: self.run_stage(index + 1, *inside)
            )

        def run(x: Tensor, span: slice = slice(None)) -> Tensor:
            return self.blocks(x, reading, span)

        return self.between(run, x, reading) if self.between else run(x)


Inner = Callable[[Tensor, Reading], Tensor]
"""The stages inside an outer one, as a function of its chunks."""
