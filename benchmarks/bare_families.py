"""The bare baseline of other families in plain PyTorch: chunks, compressed attention, experts.

The equations are those of the float baseline without sub-norms. No kernel of `arb` is launched.
`torch.compile` compiles each kind of block once: a block adds what the one before it left pending,
so that its first kernel does both, as if the whole loss were compiled.

- **Windows** of attention are torch's flash attention, and the causal attention of chunks is
  `scaled_dot_product_attention`, which takes cuDNN's kernels where they exist.
- **Compressed attention** multiplies pieces of one window by the two windows that they see, and
  queries by their entries, which are gathered if they are selected. No score exceeds the root of a
  head's width, so the parts add up without a maximum. PyTorch's flash attention has neither
  entries nor sinks.
- **Chunks** are gathered by a cumulative sum; the moving average over them is one product with a
  triangular matrix of the weights.
- **Experts** are two grouped products (`torch._grouped_mm`) of positions sorted by expert.
"""

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd import Function
from torch.nn import functional
from torch.nn.attention.flex_attention import create_block_mask, flex_attention

from arbcli.config.model import BlockConfig, ModelConfig
from arbcli.config.parts.attention import AttentionConfig
from arbcli.config.parts.mlp import MLPConfig
from arbcli.families.compressed.config import CompressedAttentionConfig
from arbcli.families.experts.config import ExpertsConfig
from arbcli.model.layers.rotary import Angles, rotary_table
from arbcli.model.parts.window import attend_in_window
from benchmarks.bare_twin import rms_norm

MIN_SHARE = 1e-4
"""Boundary probabilities in the moving average are at least this, and at most 1 less it."""
RATIO_WEIGHT = 0.3
"""Weight of the ratio loss; that of the indexers' divergence is 1."""
BALANCE_UNIT = 1 / 8
"""Score of a unit of an expert's balance."""
TINY = 1e-30
Stream = tuple[Tensor, Tensor | None]
"""A residual stream, and what is to be added to it."""


class _Taken(Function):
    """Rows of a matrix by index; the gradient sums rows by the inverse index, and ignores -1."""

    @staticmethod
    def forward(x: Tensor, index: Tensor, inverse: Tensor) -> Tensor:
        return x[index]

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
        ctx.save_for_backward(inputs[2])

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        (inverse,) = ctx.saved_tensors
        rows = torch.where((inverse >= 0)[..., None], grad[inverse.clamp(min=0)], 0)
        return rows.sum(1), None, None


class _Gathered(Function):
    """Rows of a matrix by index, whose gradients are summed in float32."""

    @staticmethod
    def forward(x: Tensor, index: Tensor) -> Tensor:
        return x[index]

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
        x, index = inputs
        ctx.save_for_backward(index)
        ctx.rows, ctx.dtype = len(x), x.dtype

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        (index,) = ctx.saved_tensors
        sums = torch.zeros(ctx.rows, grad.shape[-1], device=grad.device)
        return sums.index_add(0, index, grad.float()).to(ctx.dtype), None


def gathered(x: Tensor, index: Tensor) -> Tensor:
    """Gather vectors of a text, (B, E, d), by (B, N, k) int64: (B, N, k, d)."""
    batch, entries, width = x.shape
    first = torch.arange(batch, device=x.device).view(-1, 1, 1) * entries
    return _Gathered.apply(x.flatten(0, 1), (index + first).flatten()).view(*index.shape, width)


def unit(x: Tensor) -> Tensor:
    """Divide vectors by their root-mean-squares; autocast keeps the dtype."""
    return rms_norm(x).to(x.dtype)


def total(stream: Stream) -> Tensor:
    """Return a stream with its pending addition."""
    x, added = stream
    return x if added is None else x + added


def rotate(x: Tensor, angles: Angles) -> Tensor:
    """Rotate (..., d) by (..., d / 2) angles, in the dtype of x."""
    cos, sin = (part.to(x.dtype) for part in angles)
    a, b = x.chunk(2, -1)
    return torch.cat((a * cos - b * sin, b * cos + a * sin), -1)


def at(angles: Angles, places: slice, *, heads: bool = False) -> Angles:
    """Take the angles of some positions, with an axis for heads if there are any."""
    cos, sin = (part[places] for part in angles)
    return (cos[:, None], sin[:, None]) if heads else (cos, sin)


class Table(nn.Module):
    """Cosines and sines of positions."""

    cos: Tensor
    sin: Tensor

    def __init__(self, length: int, width: int, rotated: int | None = None) -> None:
        super().__init__()
        device = torch.empty(0).device
        for name, part in zip(
            ("cos", "sin"), rotary_table(length, width, device, rotated), strict=True
        ):
            self.register_buffer(name, part.clone())

    def forward(self) -> Angles:
        """Return both, (length, width / 2) each."""
        return self.cos, self.sin


class Attention(nn.Module):
    """Causal attention to a text or a window, with unit queries and keys."""

    def __init__(self, config: AttentionConfig, dim: int, length: int) -> None:
        super().__init__()
        self.heads, self.window = config.heads, config.window
        self.qkv = nn.Linear(dim, 3 * dim, bias=False)
        self.out = nn.Linear(dim, dim, bias=False)
        self.table = Table(length, dim // config.heads)

    def forward(self, x: Tensor) -> tuple[Tensor, None]:
        """Attend from each position of a normalised stream, (B, T, D)."""
        batch, length, dim = x.shape
        parts = self.qkv(x).view(batch, length, 3, self.heads, dim // self.heads)
        q, k, v = parts.permute(2, 0, 3, 1, 4)
        q, k = (unit(rotate(part, at(self.table(), slice(length)))) for part in (q, k))
        if self.window is not None and self.window < length:
            y = attend_in_window(q, k, v, self.window)
        else:
            y = functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.out(y.transpose(1, 2).reshape(batch, length, dim)), None


class Indexer(nn.Module):
    """Selects entries for each group of bytes, and learns from the attention that they receive."""

    def __init__(self, config: CompressedAttentionConfig, dim: int, length: int) -> None:
        super().__init__()
        self.heads, self.width, self.ratio = config.index_heads, config.index_width, config.ratio
        self.top_k = config.top_k or 0
        self.query = nn.Linear(dim, self.heads * (self.width + 1), bias=False)
        self.key = nn.Linear(config.head_width or 0, self.width, bias=False)
        self.table = Table(length, self.width, self.width // 2)

    def forward(self, x: Tensor, still: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Compute queries (B, E, h, w), their weights (B, E, h), and keys (B, E, w)."""
        angles, m = self.table(), self.ratio
        ends, starts = slice(m - 1, x.shape[1], m), slice(0, x.shape[1], m)
        both = self.query(x.detach()[:, ends])
        q, weights = both.split((self.heads * self.width, self.heads), -1)
        q = rotate(unit(q.unflatten(-1, (self.heads, -1))), at(angles, ends, heads=True))
        keys = rotate(unit(self.key(still.detach())), at(angles, starts))
        return q, weights * (self.heads * self.width) ** -0.5, keys

    @torch.no_grad()
    def select(self, q: Tensor, weights: Tensor, keys: Tensor) -> tuple[Tensor, Tensor]:
        """Select (B, E, k) entries before each group, and a mask of those that exist."""
        groups = q.shape[1]
        dots = (q.flatten(1, 2) @ keys.mT).unflatten(1, (groups, -1))
        scores = (dots.relu().float() * weights.float()[..., None]).sum(2)
        places = torch.arange(groups, device=q.device)
        scores = scores.masked_fill(places > places[:, None], -torch.inf)
        best = scores.topk(min(self.top_k, groups), sorted=False)
        return best.indices, best.values > -torch.inf

    def divergence(
        self,
        projections: tuple[Tensor, Tensor, Tensor],
        chosen: Tensor,
        exists: Tensor,
        shares: Tensor,
    ) -> Tensor:
        """Compare scores with shares of attention, (B, E, k) float32; a float32 scalar."""
        q, weights, keys = projections
        dots = (q @ gathered(keys, chosen).mT).relu()
        scores = (dots.float() * weights.float()[..., None]).sum(2)
        learned = scores.masked_fill(~exists, -torch.inf).log_softmax(-1).masked_fill(~exists, 0)
        target = shares / shares.sum(-1, keepdim=True).clamp(min=TINY)
        return (target * (target.clamp(min=TINY).log() - learned)).sum(-1).mean()


class Compressed(nn.Module):
    """Attention to a window and to pooled entries: see `arbcli.families.compressed.attention`.

    A text is a multiple of the window and of an entry, and one head of keys serves all queries.
    With `flex`, `flex_attention` attends to the window, and to entries that are not selected.
    """

    flex = False

    def __init__(self, config: CompressedAttentionConfig, dim: int, length: int) -> None:
        super().__init__()
        self.heads, self.window, self.ratio = config.heads, config.window, config.ratio
        self.width = width = config.head_width or dim // config.heads
        inner = self.heads * width
        self.projection = nn.Linear(dim, inner + 3 * width, bias=False)
        self.beta = nn.Parameter(torch.zeros(width, self.ratio))
        self.sink = nn.Parameter(torch.ones(self.heads))
        self.out = nn.Linear(inner, dim, bias=False)
        self.indexer = Indexer(config, dim, length) if config.top_k is not None else None
        self.table = Table(length, width, config.rotary)
        self.mask = self.new_mask(length) if self.flex else None

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor | None]:
        """Attend from each position of a normalised stream; also return the divergence."""
        length, m, width = x.shape[1], self.ratio, self.width
        angles = at(self.table(), slice(length))
        q, recent, values, gates = self.projection(x).split(
            (self.heads * width, width, width, width), -1
        )
        of_heads = at(angles, slice(None), heads=True)
        q = rotate(unit(q.unflatten(-1, (self.heads, width))), of_heads)
        recent = rotate(unit(recent), angles)
        share = (gates.unflatten(1, (-1, m)).float() + self.beta.T).softmax(2)
        still = unit((share * values.unflatten(1, (-1, m))).sum(2)).to(x.dtype)
        entries = rotate(still, at(angles, slice(0, length, m)))
        q = q * width**-0.5
        by_flex = self.mask is not None
        near, total = (
            self.attend_by_flex(q, recent, entries) if by_flex else self.attend_nearby(q, recent)
        )
        total = total + self.sink.exp()
        divergence = None
        if self.indexer is None and not by_flex:
            far, more = self.to_all(q, entries)
            near, total = near + far, total + more
        elif self.indexer is not None:
            projections = self.indexer(x, still)
            chosen, exists = self.indexer.select(*projections)
            far, more, weights = self.to_chosen(q, gathered(entries, chosen), exists)
            near, total = near + far, total + more
            with torch.no_grad():
                shares = (weights / self.view_groups(total, torch.inf)[..., None]).sum(2)
            divergence = self.indexer.divergence(projections, chosen, exists, shares)
        y = (near / total[..., None]).to(x.dtype)
        back = of_heads[0], -of_heads[1]
        return self.out(rotate(y, back).flatten(2)), divergence

    def new_mask(self, length: int) -> Any:
        """Say what positions see of the bytes, and of the entries after them unless selected."""
        window, m = self.window, self.ratio
        entries = 0 if self.indexer else length // m

        def seen(b: Tensor, h: Tensor, t: Tensor, s: Tensor) -> Tensor:
            near = (s <= t) & (s > t - window)
            return near | ((s >= length) & (s - length < (t + 1) // m))

        device = str(torch.empty(0).device)
        return create_block_mask(seen, None, None, length, length + entries, device=device)

    def attend_by_flex(self, q: Tensor, recent: Tensor, entries: Tensor) -> tuple[Tensor, Tensor]:
        """Attend to the last bytes, and to all complete entries: see `attend_nearby`."""
        keys = recent if self.indexer else torch.cat((recent, entries), 1)
        keys = keys[:, None]
        y, logs = flex_attention(
            q.transpose(1, 2), keys, keys, block_mask=self.mask, scale=1.0, enable_gqa=True,
            return_lse=True,
        )  # fmt: skip
        total = logs.exp().transpose(1, 2)
        return y.transpose(1, 2).float() * total[..., None], total

    def attend_nearby(self, q: Tensor, recent: Tensor) -> tuple[Tensor, Tensor]:
        """Attend to the last bytes; (B, T, H, d), unnormalised, and sums of weights, (B, T, H)."""
        window, pieces = self.window, q.shape[1] // self.window
        keys = recent.unflatten(1, (pieces, window))
        before = functional.pad(keys, (0, 0, 0, 0, 1, 0))[:, :-1]
        keys = torch.cat((before, keys), 2)
        rows = q.unflatten(1, (pieces, window))
        scores = (rows.flatten(2, 3) @ keys.mT).view(*rows.shape[:4], -1)
        t = torch.arange(window, device=q.device)[:, None] + window
        s = torch.arange(2 * window, device=q.device)
        exists = torch.arange(pieces, device=q.device)[:, None, None] * window + s >= window
        seen = ((s <= t) & (s > t - window) & exists)[:, :, None]
        weights = torch.where(seen, scores.float().exp(), 0)
        y = weights.flatten(2, 3).to(q.dtype) @ keys
        return y.view(q.shape), weights.sum(-1).flatten(1, 2)

    def to_all(self, q: Tensor, entries: Tensor) -> tuple[Tensor, Tensor]:
        """Attend to all complete entries, likewise."""
        scores = (q.flatten(1, 2) @ entries.mT).view(*q.shape[:3], -1)
        t = torch.arange(q.shape[1], device=q.device)
        seen = torch.arange(entries.shape[1], device=q.device) < ((t + 1) // self.ratio)[:, None]
        weights = torch.where(seen[:, None], scores.float().exp(), 0)
        y = weights.flatten(1, 2).to(q.dtype) @ entries
        return y.view(q.shape), weights.sum(-1)

    def view_groups(self, x: Tensor, padding: float = 0.0) -> Tensor:
        """View positions as groups that share a selection, without the first, incomplete one.

        (B, T, H, ...) to (B, T / m, m H, ...); the last group is padded.
        """
        m, others = self.ratio, [0] * (2 * (x.dim() - 2))
        x = functional.pad(x[:, m - 1 :], (*others, 0, m - 1), value=padding)
        return x.unflatten(1, (-1, m)).flatten(2, 3)

    def to_chosen(self, q: Tensor, keys: Tensor, exists: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Attend to selected entries, likewise; also return the weights, (B, T / m, m H, k)."""
        m, length = self.ratio, q.shape[1]
        scores = self.view_groups(q) @ keys.mT
        weights = torch.where(exists[:, :, None], scores.float().exp(), 0)
        y = weights.to(q.dtype) @ keys

        def split_positions(x: Tensor) -> Tensor:
            x = x.unflatten(2, (m, -1)).flatten(1, 2)[:, : length - m + 1]
            return functional.pad(x, (*[0] * (2 * (x.dim() - 2)), m - 1, 0))

        return split_positions(y), split_positions(weights.sum(-1)), weights


class MLP(nn.Module):
    """A gated MLP."""

    def __init__(self, config: MLPConfig, dim: int) -> None:
        super().__init__()
        self.up = nn.Linear(dim, 2 * config.width, bias=False)
        self.down = nn.Linear(config.width, dim, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        """Apply it to a normalised stream."""
        gate, value = self.up(x).chunk(2, -1)
        return self.down(functional.silu(gate) * value)


class Experts(nn.Module):
    """Gated and normalised MLPs, of which a softmax selects some for each position, by load."""

    balance: Tensor

    def __init__(self, config: ExpertsConfig, dim: int) -> None:
        super().__init__()
        self.experts, self.top_k = config.experts, config.top_k
        self.gate = nn.Linear(dim, config.experts, bias=False)
        self.up = nn.Parameter(torch.empty(config.experts, 2 * config.width, dim))
        self.down = nn.Parameter(torch.empty(config.experts, dim, config.width))
        self.stacks = self.up, self.down
        for weight in self.stacks:
            nn.init.normal_(weight, 0, weight.shape[-1] ** -0.5)
        self.register_buffer("balance", torch.zeros(config.experts))

    def forward(self, x: Tensor) -> Tensor:
        """Apply the experts to a normalised stream, (B, T, D)."""
        rows, k = x.flatten(0, 1), self.top_k
        scores = self.gate(rows).float()
        chosen = (scores.detach() + self.balance * BALANCE_UNIT).topk(k).indices
        weights = scores.gather(1, chosen).softmax(1)
        ordered, order = chosen.flatten().sort(stable=True)
        slots = torch.arange(len(order), device=x.device)
        places = torch.empty_like(order).scatter(0, order, slots)
        ends = torch.searchsorted(ordered, torch.arange(self.experts, device=x.device), right=True)
        y = _Taken.apply(rows, order // k, places.view(-1, k))
        gate, value = grouped(y, self.up, ends).chunk(2, -1)
        y = grouped(unit(functional.silu(gate) * value), self.down, ends)
        y = _Taken.apply(y, places, order[:, None]).view(-1, k, x.shape[-1])
        if self.training:
            load = ends.diff(prepend=ends.new_zeros(1))
            self.balance.add_(torch.sign(len(order) - load * self.experts))
        return (y * weights[..., None]).sum(1).to(x.dtype).view(x.shape)


def grouped(x: Tensor, weights: Tensor, ends: Tensor) -> Tensor:
    """Multiply rows that are sorted by expert, (S, K), by (E, N, K) float32: (S, N)."""
    weights = weights.to(x.dtype)
    if x.is_cuda and x.dtype == torch.bfloat16:
        return torch._grouped_mm(x, weights.mT, offs=ends.to(torch.int32))
    owner = torch.searchsorted(ends, torch.arange(len(x), device=x.device), right=True)
    return (weights[owner] @ x[..., None])[..., 0]


class Block(nn.Module):
    """A mixer and a channel mixer on the stream; the sum with the latter is left pending."""

    def __init__(self, config: BlockConfig, dim: int, length: int) -> None:
        super().__init__()
        mixer, channel = config.parts
        if isinstance(mixer, CompressedAttentionConfig):
            self.mixer: nn.Module = Compressed(mixer, dim, length)
        else:
            assert isinstance(mixer, AttentionConfig)
            self.mixer = Attention(mixer, dim, length)
        if isinstance(channel, ExpertsConfig):
            self.channel: nn.Module = Experts(channel, dim)
        else:
            assert isinstance(channel, MLPConfig)
            self.channel = MLP(channel, dim)

    def forward(self, x: Tensor, added: Tensor | None) -> tuple[Tensor, Tensor, Tensor | None]:
        """Return the stream, what is to be added to it, and the divergence of an indexer.

        Args:
            x: (B, T, D), the stream.
            added: what is to be added to it, likewise; None before the first block.
        """
        x = total((x, added))
        y, divergence = self.mixer(unit(x))
        x = x + y
        return x, self.channel(unit(x)), divergence


class Chunking(nn.Module):
    """Chunks of one outer stage: see `arbcli.families.hnet.chunking`."""

    def __init__(self, dim: int, inner: int, length: int, slots: int) -> None:
        super().__init__()
        self.length, self.slots = length, slots
        self.router = nn.Linear(dim, 2 * dim, bias=False)
        self.inward = nn.Linear(dim, inner, bias=False)
        self.outward = nn.Linear(inner, dim, bias=False)
        self.residual = nn.Linear(dim, dim, bias=False)

    def route(self, x: Tensor) -> Tensor:
        """Compute boundary probabilities, (B, T) float32, of a normalised stream."""
        q, k = self.router(x).float().chunk(2, -1)
        u, v = (x.float() + q)[:, :-1], (x.float() + k)[:, 1:]
        lengths = [(part.square().sum(-1) + 1e-6).sqrt() for part in (u, v)]
        p = (1 - (u * v).sum(-1) / (lengths[0] * lengths[1])) / 2
        return functional.pad(p, (1, 0), value=1)

    def enter(self, x: Tensor) -> tuple[Tensor, Tensor, tuple[Tensor, ...]]:
        """Gather the chunks of (B, T, D).

        Returns:
            The stream of chunks, (B, C, inner D), the ratio loss, and what `leave` needs.
        """
        (batch, length, dim), slots, n = x.shape, self.slots, self.length
        x = unit(x)
        p = self.route(x)
        begins = p > 0.5
        mean, share = begins.float().mean(), p.mean()
        ratio = n / (n - 1) * ((n - 1) * mean * share + (1 - mean) * (1 - share))
        number = begins.long().cumsum(1)
        starts, owner = begins & (number <= slots), number.clamp(max=slots) - 1
        places = torch.arange(length, device=x.device).expand(batch, -1)
        first = places.new_zeros(batch, slots + 1)  # an extra slot takes all other positions
        first = first.scatter(1, torch.where(starts, owner, slots), places)[:, :slots]
        exists = torch.arange(slots, device=x.device) < number[:, -1:]
        row = torch.arange(batch, device=x.device)[:, None]
        first = torch.where(exists, first, 0)
        inverse = torch.where(starts, owner + row * slots, -1).view(-1, 1)
        chunks = _Taken.apply(x.flatten(0, 1), (first + row * length).flatten(), inverse)
        chunks = torch.where(exists[..., None], chunks.view(batch, slots, dim), 0)
        certain = torch.where(starts, p, 1 - p)
        return self.inward(chunks), ratio, (x, p.gather(1, first), certain, owner + row * slots)

    def leave(self, z: Tensor, known: tuple[Tensor, ...]) -> Tensor:
        """Spread the stream of chunks over their positions."""
        x, of_first, certain, owner = known
        s = smooth(self.outward(unit(z)), of_first.clamp(MIN_SHARE, 1 - MIN_SHARE))
        through = certain - certain.detach() + 1
        spread = s.flatten(0, 1)[owner.flatten()].view(x.shape)
        y = self.residual(x).float() + through[..., None] * spread
        return y.to(x.dtype)


def smooth(z: Tensor, share: Tensor) -> Tensor:
    """Average chunks (B, C, D): s[j] = P[j] z[j] + (1 - P[j]) s[j - 1], as one product."""
    logs = (1 - share.double()).log().cumsum(1)
    decay = (logs[:, :, None] - logs[:, None]).float()
    lower = torch.ones(decay.shape[1:], dtype=torch.bool, device=z.device).tril()
    weights = torch.where(lower, decay, -torch.inf).exp() * share[:, None]
    return (weights.to(z.dtype) @ z).float()


class FamilyModel(nn.Module):
    """The loss of the next bytes, with the other terms of the training loss.

    Args:
        config: of a model with at most one outer stage, whose boundaries are learned.
        dtype: of activations.
    """

    def __init__(self, config: ModelConfig, dtype: torch.dtype = torch.bfloat16) -> None:
        super().__init__()
        self.dtype, length, dim = dtype, config.ctx, config.stages[0].dim
        self.embedding = nn.Embedding(256, dim)
        main, outer = config.main, config.outer[0] if config.outer else None

        def blocks(configs: Iterable[BlockConfig], dim: int, length: int) -> nn.ModuleList:
            return nn.ModuleList(Block(each, dim, length) for each in configs)

        self.before = blocks(outer.before if outer else (), dim, length)
        self.chunking: Chunking | None = None
        if outer and outer.chunking:
            slots = config.capacity(0, length)
            self.chunking = Chunking(dim, main.dim, outer.chunking.length, slots)
        self.after = blocks(outer.after if outer else (), dim, length)
        self.blocks = blocks(main.blocks, main.dim, slots if outer else length)
        self.head = nn.Linear(dim, 256, bias=False)

    @property
    def matrices(self) -> list[Tensor]:
        """Matrices of the innermost blocks, and stacks of them, which Muon steps."""
        parts = [*self.blocks.modules()]
        experts = [each for part in parts if isinstance(part, Experts) for each in part.stacks]
        return [part.weight for part in parts if isinstance(part, nn.Linear)] + experts

    def compile_regions(self, **how: Any) -> "FamilyModel":
        """Compile each part by `torch.compile`, and return the model."""
        for part in (*self.before, *self.blocks, *self.after):
            part.compile(**how)
        for name in ("_begin", "_chunks", "_spread", "_score"):
            setattr(self, name, torch.compile(getattr(self, name), **how))
        return self

    def forward(self, ids: Tensor, targets: Tensor) -> Tensor:
        """Compute the training loss of (B, T) targets in nats, a float32 scalar."""
        others: list[Tensor] = []
        divergences: list[Tensor] = []
        stream = self._run(self.before, (self._begin(ids), None), divergences)
        if self.chunking is None:
            stream = self._run(self.blocks, stream, divergences)
        else:
            chunks, ratio, known = self._chunks(stream)
            others.append(RATIO_WEIGHT * ratio)
            inside = self._run(self.blocks, (chunks, None), divergences)
            stream = self._run(self.after, (self._spread(inside, known), None), divergences)
        if divergences:
            others.append(torch.stack(divergences).mean())
        return self._score(stream, targets, others)

    def _run(self, blocks: nn.ModuleList, stream: Stream, divergences: list[Tensor]) -> Stream:
        for block in blocks:
            x, added, divergence = block(*stream)
            stream = x, added
            if divergence is not None:
                divergences.append(divergence)
        return stream

    def _begin(self, ids: Tensor) -> Tensor:
        return self.embedding(ids).to(self.dtype)

    def _chunks(self, stream: Stream) -> tuple[Tensor, Tensor, tuple[Tensor, ...]]:
        assert self.chunking is not None
        return self.chunking.enter(total(stream))

    def _spread(self, stream: Stream, known: tuple[Tensor, ...]) -> Tensor:
        assert self.chunking is not None
        return self.chunking.leave(total(stream), known)

    def _score(self, stream: Stream, targets: Tensor, others: list[Tensor]) -> Tensor:
        logits = self.head(unit(total(stream))).float()
        return sum(others, functional.cross_entropy(logits.flatten(0, 1), targets.flatten()))
