"""N-grams next to the embedding and memories between blocks in plain PyTorch, for Transformers."""

from collections.abc import Callable

import torch
from torch import Tensor, nn

from arbcli.families.experts.modeling import Experts
from arbcli.interop.huggingface.modeling_core import (
    Packed,
    PartSpec,
    Reading,
    Settings,
    ngram_rows,
    norm,
    wide,
)

ORDERS, MEMGRAM_ORDER = (2, 3, 4), 6
"""Lengths of the n-grams of the sequencer, and of the memory."""
BYTES, INT8_MAX = 256, 127
UNIT = 32
"""Value of 1 in codes."""
HALT_SUM, HALT_BIAS, KEEP = 0.99, -1.0, 0.95
ROUTER_BIAS = 3.0


class Sequencer(nn.Module):
    """The projected sum of the table's rows of a position's n-grams."""

    def __init__(self, part: Settings, spec: PartSpec) -> None:
        super().__init__()
        self.rows = part["rows"]
        self.table = Packed(part["rows"], part["width"], spec)
        self.projection = Packed(spec.dim, part["width"], spec)

    def forward(self, text: Tensor, dtype: torch.dtype) -> Tensor:
        """Compute the addition to the embedding of a text, (T, D), from (T,) int64 bytes."""
        total = torch.zeros((), dtype=dtype, device=text.device)
        for order in ORDERS:
            rows = ngram_rows(text, self.rows, order)
            total = total + self.table.rows(rows.clamp(min=0), dtype) * (rows >= 0)[:, None]
        return self.projection(norm(total))


class MemGram(nn.Module):
    """Embeds the remembered next byte of the last n-gram, weighted by its strength."""

    symbol: Tensor
    strength: Tensor

    def __init__(self, part: Settings, spec: PartSpec) -> None:
        super().__init__()
        for name in ("symbol", "strength"):
            self.register_buffer(name, torch.empty(part["rows"], dtype=torch.int8))
        self.table = Packed(BYTES, spec.dim, spec)
        self.output = Packed(spec.dim, spec.dim, spec)

    def forward(self, text: Tensor, dtype: torch.dtype) -> Tensor:
        """Compute the addition to the embedding of a text, (T, D), from (T,) int64 bytes."""
        rows = ngram_rows(text, len(self.symbol), MEMGRAM_ORDER)
        index = rows.clamp(min=0)
        strength = (self.strength[index].double() / INT8_MAX * (rows >= 0))[:, None]
        embedded = self.table.rows(self.symbol[index].long() + 128, dtype)
        # the strength is applied after the norm, which would cancel it
        return self.output(norm(embedded)) * strength.sqrt().to(dtype)


class Codebook(nn.Module):
    """Weighted sums of the rows of a table whose product keys score best."""

    def __init__(self, part: Settings, spec: PartSpec) -> None:
        super().__init__()
        self.heads, self.key_width, self.top_k = part["heads"], part["key_width"], part["top_k"]
        halves, width = part["halves"], part["width"]
        self.query = Packed(self.heads * 2 * self.key_width, spec.dim, spec)
        self.left = Packed(halves[0], self.key_width, spec)
        self.right = Packed(halves[1], self.key_width, spec)
        self.table = Packed(halves[0] * halves[1], width, spec)
        self.output = Packed(spec.dim, self.heads * width, spec)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Return the result, (T, D), and the first head's best row and its share, (T,) each."""
        query = norm(self.query(norm(x)).view(len(x), self.heads, 2, self.key_width))
        left, right = wide(self.left(query[:, :, 0])), wide(self.right(query[:, :, 1]))
        rows = self.choose(left, right)
        shares = row_scores(left, right, rows).softmax(dim=-1)
        values = (shares[..., None] * self.values(rows, torch.float32)).sum(dim=-2)
        y = self.output(norm(values.flatten(1).to(x.dtype)))
        return y, rows[:, 0, 0], shares[:, 0, 0]

    def choose(self, left: Tensor, right: Tensor) -> Tensor:
        """Select (T, heads, k) rows by the scores of both halves of their keys, (T, heads, n)."""
        (best_left, i), (best_right, j) = (half.topk(self.top_k, dim=-1) for half in (left, right))
        sums = (best_left[..., :, None] + best_right[..., None, :]).flatten(-2)
        pairs = i[..., :, None] * right.shape[-1] + j[..., None, :]
        return pairs.flatten(-2).gather(-1, sums.topk(self.top_k, dim=-1).indices)

    def values(self, rows: Tensor, dtype: torch.dtype) -> Tensor:
        """Look up (...) rows of the table, (..., width)."""
        return self.table.rows(rows, dtype)


def row_scores(left: Tensor, right: Tensor, rows: Tensor) -> Tensor:
    """Add up the scores of both halves of the keys of rows, (..., k)."""
    width = right.shape[-1]
    return left.gather(-1, rows // width) + right.gather(-1, rows % width)


class Quantiser(nn.Module):
    """Replaces each position by the nearest code."""

    codes: Tensor

    def __init__(self, part: Settings, spec: PartSpec) -> None:
        super().__init__()
        self.query = Packed(part["width"], spec.dim, spec)
        self.register_buffer("codes", torch.empty(part["codes"], part["width"], dtype=torch.int8))
        self.output = Packed(spec.dim, part["width"], spec)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Return the result, (T, D), the code of each position, (T,) int64, and ones."""
        z = norm(wide(self.query(norm(x))))
        chosen = self.choose(z)
        values = self.values(chosen, z.dtype) + (z - z.detach())  # the codes, with a gradient of z
        return self.output(norm(values.to(x.dtype))), chosen, torch.ones_like(z[:, 0])

    def choose(self, z: Tensor) -> Tensor:
        """Choose the nearest code of each position, (T,) int64, by (T, width) vectors."""
        return self.closeness(z).argmax(dim=1)

    def closeness(self, z: Tensor) -> Tensor:
        """Compute the negative squared distances of rounded vectors and codes, exactly.

        Args:
            z: (T, width).

        Returns:
            (T, codes) float64, in squared units of 1 / `UNIT`.
        """
        q = (z.detach() * UNIT).round().clamp(-INT8_MAX, INT8_MAX).double()
        codes = self.codes.double()
        norms = q.square().sum(dim=1, keepdim=True) + codes.square().sum(dim=1)
        return 2 * q @ codes.T - norms

    def values(self, rows: Tensor, dtype: torch.dtype) -> Tensor:
        """Look up (...) codes, (..., width)."""
        return self.codes[rows].to(dtype) / UNIT


class Edges(nn.Module):
    """Edges from each code to those that followed it, in buckets by the remainder of the code."""

    source: Tensor
    target: Tensor
    sign: Tensor
    score: Tensor

    def __init__(self, edges: list[int]) -> None:
        super().__init__()
        integers = {"source": torch.int32, "target": torch.int32}
        for name in ("source", "target", "sign", "score"):
            buffer = torch.empty(*edges, dtype=integers.get(name, torch.int8))
            self.register_buffer(name, buffer)

    def forward(self, codes: Tensor) -> tuple[Tensor, Tensor]:
        """Look up targets, (T, W) int64 with 0 for no edge, and their weights, (T, W) float64."""
        bucket = codes % len(self.source)
        score = self.score[bucket]
        is_edge = (self.source[bucket] == codes[:, None]) & (score > 0)
        weights = self.sign[bucket].double() * score / INT8_MAX**2
        return self.target[bucket].long() * is_edge, weights * is_edge


class Iterated(nn.Module):
    """Iterated experts, adapters and a graph of codes, with adaptive halting per position."""

    def __init__(self, part: Settings, spec: PartSpec, code_width: int) -> None:
        super().__init__()
        self.part, mixture, rank = part, part["experts"], part["adapter_rank"]
        width, query = (part["expert_dim"], part["gate_dim"]) if mixture else (0, 0)
        self.sizes = width, query, rank, 1
        self.inward = Packed(sum(self.sizes), spec.dim, spec)
        if mixture:
            self.experts = Experts(mixture, spec, width, query)
            self.output = Packed(spec.dim, width, spec)
        self.adapters = nn.ModuleList(
            Packed(spec.dim, rank, spec) for _ in range(part["iterations"])
        )
        if part["edges"]:
            self.edges = Edges(part["edges"])
            self.message = Packed(spec.dim, code_width, spec)
        if part["graph_gate"]:
            self.edge_query = Packed(query, code_width, spec)
        if part["graph_adapters"]:
            self.edge_scale = Packed(rank, code_width, spec)

    def forward(
        self,
        start: Tensor,
        book: Codebook | Quantiser,
        codes: Tensor,
        shares: Tensor,
        reading: Reading,
    ) -> Tensor:
        """Iterate the stream, (T, D), from a codebook's codes and their shares, (T,) each.

        Codebook, codes and shares are only read if there are edges.
        """
        part, stream, result = self.part, start, torch.zeros_like(start)
        halted = torch.zeros_like(wide(start[:, 0]))
        for index, adapter in enumerate(self.adapters):
            x, query, low, halting = self.inward(norm(stream)).split(self.sizes, dim=1)
            if part["edges"]:
                messages, strength, codes = self._hop(codes, book, start.dtype)
                strength = strength * (1 + (shares - shares.detach())).to(start.dtype)[:, None]
            if part["graph_gate"]:
                query = query + self.edge_query(messages) * strength
            if part["graph_adapters"]:
                low = low * (1 + self.edge_scale(messages) * strength)
            change = adapter(norm(low))
            if part["experts"]:
                change = change + self.output(norm(self.experts(query, x, reading) + x))
            if part["edges"]:
                change = change + self.message(messages) * strength
            stream = start + KEEP * (stream - start) + change
            share = self.halt(index, halted, torch.sigmoid(wide(halting[:, 0]) + HALT_BIAS))
            result = result + share[:, None].to(start.dtype) * stream
            halted = halted + share
        return result

    def halt(self, index: int, halted: Tensor, probability: Tensor) -> Tensor:
        """Compute the share of each position that halts in an iteration, (T,).

        Args:
            index: number of the iteration.
            halted: (T,), share that has halted so far; at `HALT_SUM` or more nothing halts.
            probability: (T,), share that halts now; the rest halts if this reaches `HALT_SUM`, and
                in the last iteration.
        """
        last = (halted + probability >= HALT_SUM) | (index + 1 == len(self.adapters))
        return torch.where(last, 1 - halted, probability) * (halted < HALT_SUM)

    def _hop(
        self, codes: Tensor, book: Codebook | Quantiser, dtype: torch.dtype
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Follow the edges of codes, (T,).

        Returns:
            Normalised messages, (T, width); their strengths, (T, 1); and the next codes, (T,).
        """
        targets, weights = self.edges(codes)
        total = weights.abs().sum(dim=1, keepdim=True)
        shares = (weights / total.clamp(min=1e-6))[..., None]
        rows = (shares * book.values(targets, torch.float32)).sum(dim=1).to(dtype)
        best = weights.abs().argmax(dim=1, keepdim=True)
        next_codes = torch.where(total[:, 0] > 0, targets.gather(1, best)[:, 0], codes)
        return norm(rows), total.clamp(max=1).to(dtype), next_codes


class Router(nn.Module):
    """Mixes taps of the stream by scores of the first one, the stream after the last block."""

    def __init__(self, taps: int, spec: PartSpec) -> None:
        super().__init__()
        self.scores = Packed(taps, spec.dim, spec)

    def forward(self, taps: list[Tensor]) -> Tensor:
        """Mix (T, D) taps."""
        scores = wide(self.scores(norm(taps[0])))
        scores[:, 0] += ROUTER_BIAS
        shares = scores.softmax(dim=1).to(taps[0].dtype)
        return (shares[..., None] * torch.stack(taps, dim=1)).sum(dim=1)


BOOKS = {"codebook": Codebook, "quantiser": Quantiser}


class Between(nn.Module):
    """Codebooks that read the same stream and iterated experts between blocks, and a router."""

    def __init__(self, part: Settings | None, router: bool, spec: PartSpec) -> None:
        super().__init__()
        self.part = part = part or {}
        self.books = [name for name in ("codebook", "knowledge") if part.get(name)]
        for name in self.books:
            self.add_module(name, BOOKS[part[name]["kind"]](part[name], spec))
        if part.get("iterated"):
            width = part["codebook"]["width"] if part["codebook"] else 0
            self.moe_graph = Iterated(part["iterated"], spec, width)
        self.router = Router(2 + len(self.books), spec) if router else None

    def forward(
        self, run: Callable[[Tensor, slice], Tensor], x: Tensor, reading: Reading
    ) -> Tensor:
        """Run the stream, (T, D), through slices of the blocks, with the memories between them."""
        place, taps = self.part.get("place", 0), [x]
        x = run(x, slice(0, place))
        results = [getattr(self, name)(x) for name in self.books]
        codes, shares = results[0][1:] if "codebook" in self.books else (None, None)
        for y, *_ in results:
            x = x + y
            taps.append(y)
        if self.part.get("iterated"):
            x = self.moe_graph(x, getattr(self, "codebook", None), codes, shares, reading)
        x = run(x, slice(place, None))
        return self.router([x, *taps]) if self.router else x
