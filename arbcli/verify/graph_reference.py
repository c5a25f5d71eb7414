"""`GraphLM` again, in float64 and plain torch, to compare the real one and each of its parts with.

Written from the formulas, a position, a head or an n-gram at a time: no kernel is called, no layer
of the model, and not torch's attention. All rows of a codebook are scored, the integers of graph
and memory are read one by one, and hashes are Python's integers. `w` are a part's decoded weights
by their names within it, less `.weight`.
"""

import math
from dataclasses import dataclass, field

import torch
from torch import Tensor

from arbcli.config.graph import GraphConfig
from arbcli.model.blocks.edges import Edges
from arbcli.model.blocks.memgram import MemGram
from arbcli.model.blocks.moe_graph import MoEGraph
from arbcli.model.graph import GraphLM

Weights = dict[str, Tensor]


@dataclass(slots=True)
class Choices:
    """What a model has chosen, so that its reference goes the same way where scores are close."""

    rows: dict[str, Tensor]
    """Of each codebook, (B, T, heads, k) int64, the best first."""
    experts: list[Tensor]
    """Of each iteration, (B * T, k) int64."""
    halted: Tensor | None
    """(B * T,) int64: the iteration with which a position halts."""
    entries: dict[int, Tensor] = field(default_factory=dict)
    """Of each block that chooses among entries, (B, N, k) int32 numbers, those of none -1."""
    positive: dict[int, Tensor] = field(default_factory=dict)
    """Of the same blocks, (B, N, h, E): which products of queries and keys are above 0."""
    scores: list[tuple[Tensor, Tensor]] = field(default_factory=list)
    """What the reference finds: scores of what was chosen, and those of the best, sorted."""
    products: list[tuple[Tensor, Tensor]] = field(default_factory=list)
    """And products that the model has above 0, the others 0, and those that are above 0."""

    def judge(self, chosen: Tensor, every: Tensor) -> None:
        """Note the scores (..., k) of what was chosen, and the best of all (..., n)."""
        best = every.detach().sort(dim=-1, descending=True).values[..., : chosen.shape[-1]]
        mine = chosen.detach().sort(dim=-1, descending=True).values
        self.scores.append((mine.flatten(), best.flatten()))


def reference_graph_lm(
    w: Weights,
    model: GraphLM,
    ids: Tensor,
    window: int | None = None,
    choices: Choices | None = None,
) -> tuple[Tensor, Tensor | None]:
    """Compute what a whole model makes of bytes.

    Args:
        w: its weights.
        model: says which parts there are, and what its integer memories hold.
        ids: (B, T) bytes.
        window: positions that each one attends to; None is all before it, and itself.
        choices: of the model, which are taken and judged; None is to choose the best.

    Returns:
        (B, T, 256) logits, and the shares that `moe_graph` gives, None without iterations.
    """
    config, window = model.config, window or ids.shape[1]
    x = w["embedding"][ids]
    if config.sequencer:
        x = x + sequencer(under(w, "sequencer"), ids)
    if config.memgram:
        x = x + memgram(under(w, "memgram"), ids, model.memgram)
    streams, half = [x], config.layers // 2

    def through(x: Tensor, indices: range) -> Tensor:
        for index in indices:
            own = under(w, f"blocks.{index}")
            if config.attention:
                h = norm(x, own["attention_norm"])
                x = x + attention(under(own, "attention"), h, config, window)
            x = x + mlp(under(own, "mlp"), norm(x, own["mlp_norm"]))
        return x

    x = through(x, range(half))
    before, codes, sure, shares = x, None, None, None
    if config.codebook:
        own = under(w, "codebook")
        shape = config.code_heads, config.top_k
        y, codes, sure = codebook(own, before, *shape, choices, "codebook")
        streams.append(y)
    if config.knowledge_codebook:
        own = under(w, "knowledge")
        shape = config.knowledge_heads, config.top_k
        streams.append(codebook(own, before, *shape, choices, "knowledge")[0])
    x = sum(streams[1:], x)
    if config.moe or config.graph:
        own, table = under(w, "moe_graph"), w.get("codebook.table")
        x, shares = moe_graph(own, x, codes, sure, table, model.moe_graph, ids, choices)
    x = through(x, range(half, config.layers))
    if config.router:
        x = router(under(w, "router"), [x, *streams])
    x = x + mlp(under(w, "byte_mlp"), norm(x, w["byte_norm"]))
    return norm(x, w["norm"]) @ w["head"].T, shares


def reference_ponder(shares: Tensor) -> Tensor:
    """Average over positions how far (iterations, M) shares are from what is expected, in nats.

    Each iteration ought to halt a quarter of what is left, and the last one all of it.
    """
    cost, left = 0, 1.0
    for index, share in enumerate(shares):
        expected = left if index == len(shares) - 1 else left / 4
        left -= expected
        cost = cost + share * torch.log(share.clamp(min=1e-6) / expected)
    return cost.mean()


def under(w: Weights, prefix: str) -> Weights:
    """Choose the weights of a part, by their names within it."""
    found = {name: weight for name, weight in w.items() if name.startswith(f"{prefix}.")}
    return {name.removeprefix(f"{prefix}."): weight for name, weight in found.items()}


def norm(x: Tensor, weight: Tensor | None = None) -> Tensor:
    """Divide by the root-mean-square, and multiply by (1, D) weights."""
    x = x / (x.square().mean(dim=-1, keepdim=True) + 1e-6).sqrt()
    return x if weight is None else x * weight[0]


def gated(x: Tensor, limit: float = math.inf) -> Tensor:
    """Multiply the second half of (..., 2 D) by the silu of the first, both limited."""
    gate, up = x.chunk(2, dim=-1)
    gate, up = gate.clamp(max=limit), up.clamp(-limit, limit)
    return gate * torch.sigmoid(gate) * up


def mlp(w: Weights, x: Tensor) -> Tensor:
    """Compute a gated MLP, whose sub-norm is there if its weights are."""
    h = gated(x @ w["gate_up"].T)
    return (norm(h, w["sub_norm"]) if "sub_norm" in w else h) @ w["output"].T


def ngrams(ids: Tensor, order: int) -> list[list[list[int]]]:
    """List, for each row and byte, the n-gram that ends there; -1 is before the text."""
    return [
        [padded[end : end + order] for end in range(len(row))]
        for row in ids.tolist()
        for padded in [[-1] * (order - 1) + row]
    ]


def ngram_row(history: list[int], num_rows: int) -> int:
    """Hash the bytes of one n-gram; -1 if one of them is before the text."""
    if min(history) < 0:
        return -1
    key = 0
    for byte in reversed(history):
        key = key * 257 + byte + 1
    mixed = (key + (len(history) << 40)) * 0x9E3779B97F4A7C15 % 2**64
    return ((mixed >> 32) % 2**31 * num_rows) >> 31


def sequencer(w: Weights, ids: Tensor) -> Tensor:
    """Add up the rows of 2-, 3- and 4-grams."""
    table, y = w["table"], []
    for order in (2, 3, 4):
        for row in ngrams(ids, order):
            found = [ngram_row(history, len(table)) for history in row]
            y += [table[i] if i >= 0 else 0 * table[0] for i in found]
    y = torch.stack(y).view(3, *ids.shape, -1).sum(dim=0)
    return norm(y, w["norm"]) @ w["projection"].T


def memgram(w: Weights, ids: Tensor, part: MemGram) -> Tensor:
    """Recall what followed each 6-gram."""
    y = []
    for row in ngrams(ids, 6):
        for history in row:
            entry = ngram_row(history, len(part.symbol))
            strength = int(part.strength[entry]) if entry >= 0 else 0
            symbol = int(part.symbol[entry]) + 128 if strength else 0
            recalled = w["output"] @ norm(w["table"][symbol], w["norm"])
            y.append(math.sqrt(strength / 127) * recalled)
    return torch.stack(y).view(*ids.shape, -1)


def attention(w: Weights, x: Tensor, config: GraphConfig, window: int) -> Tensor:
    """Attend with every head and query of (B, T, D) alone, to at most `window` positions."""
    parts = (config.dim, config.latent, config.rotary)
    queries, latent, key = (x @ w["query_down"].T).split(parts, dim=-1)
    size, still = config.head_dim, config.head_dim - config.rotary
    width = still + size
    up = norm(latent, w["latent_norm"]) @ w["up"].T
    key, y = turn(key), []
    for head in range(config.heads):
        q = queries[..., head * size : (head + 1) * size]
        q = norm(torch.cat((q[..., :still], turn(q[..., still:])), dim=-1))
        kv = up[..., head * width : (head + 1) * width]
        k, v = norm(torch.cat((kv[..., :still], key), dim=-1)), kv[..., still:]
        rows = []
        for t in range(x.shape[1]):
            seen = slice(max(0, t - window + 1), t + 1)
            scores = (q[:, t, None] * k[:, seen]).sum(dim=-1) * 2 / math.sqrt(size)
            rows.append((scores.softmax(dim=1)[..., None] * v[:, seen]).sum(dim=1))
        y.append(torch.stack(rows, dim=1))
    return norm(torch.cat(y, dim=-1), w["sub_norm"]) @ w["output"].T


def turn(x: Tensor) -> Tensor:
    """Turn pairs (i, i + d / 2) of (B, T, d) by position * 10000**(-2 i / d)."""
    half, like = x.shape[-1] // 2, {"dtype": torch.float64, "device": x.device}
    rate = 10000.0 ** (-torch.arange(half, **like) / half)
    angle = torch.arange(x.shape[1], **like)[:, None] * rate
    turned = torch.complex(x[..., :half], x[..., half:]) * torch.exp(1j * angle)
    return torch.cat((turned.real, turned.imag), dim=-1)


def codebook(
    w: Weights,
    x: Tensor,
    heads: int,
    top_k: int,
    choices: Choices | None = None,
    name: str = "codebook",
) -> tuple[Tensor, Tensor, Tensor]:
    """Score all rows of the table; return the result, the first head's best rows, and weights."""
    query = (norm(x, w["norm"]) @ w["query"].T).unflatten(-1, (heads, 2, -1))
    query = norm(query, w["query_norm"])
    left, right = query[..., 0, :] @ w["left"].T, query[..., 1, :] @ w["right"].T
    scores = (left[..., :, None] + right[..., None, :]).flatten(-2)
    best, rows = scores.sort(dim=-1, descending=True)
    if choices:
        rows = choices.rows[name]
        best = scores.gather(-1, rows)
        choices.judge(best, scores)
    weights = best[..., :top_k].softmax(dim=-1)
    values = (weights[..., None] * w["table"][rows[..., :top_k]]).sum(dim=-2).flatten(-2)
    return norm(values, w["sub_norm"]) @ w["output"].T, rows[..., 0, 0], weights[..., 0, 0]


def experts(
    w: Weights,
    x: Tensor,
    query: Tensor,
    config: GraphConfig,
    balance: Tensor | None,
    chosen: list[int] | None = None,
    choices: Choices | None = None,
) -> Tensor:
    """Send one position, (expert_dim,), to its experts: those that a hash has chosen, or the best.

    The balance of roots is in units of 1 / 32.
    """
    scores, unit = norm(query, w["gate.norm"]) @ w["gate.keys"].T, 1 / 8
    if config.moe_gate != "softmax":
        scores, unit = torch.log(1 + torch.exp(scores)).sqrt(), 1 / 32
    if chosen is None:
        chances = (scores + balance * unit).tolist()
        chosen = sorted(range(config.experts), key=lambda e: -chances[e])[: config.moe_top_k]
    elif choices:
        chances = scores + balance * unit
        choices.judge(chances[chosen], chances)
    gates = scores[chosen]
    gates = gates.softmax(dim=0) if config.moe_gate == "softmax" else gates / gates.sum()
    limit = 10.0 if config.moe_clamp else math.inf
    y = 0
    for gate, expert in zip(gates, chosen, strict=True):
        up, down = (w[name].chunk(config.experts)[expert] for name in ("gate_up", "down"))
        y = y + gate * (down @ norm(gated(up @ x, limit), w["sub_norm"]))
    if config.shared_expert:
        hidden = gated(w["shared.gate_up"] @ x, limit)
        y = y + w["shared.down"] @ norm(hidden, w["shared.sub_norm"])
    return y


def experts_by_hash(history: list[int], config: GraphConfig) -> list[int]:
    """Draw the experts of a 3-gram from those that are left, by Python's integers."""
    left, chosen = list(range(config.experts)), []
    for draw in range(config.moe_top_k):
        key = (ngram_row(history, 2**31) + draw * 2**40) * 0x9E3779B97F4A7C15 % 2**64
        key = (key ^ (key >> 32)) * 0x9E3779B97F4A7C15 % 2**64
        chosen.append(left.pop((key >> 32) % 2**31 * len(left) >> 31))
    return chosen


def moe_graph(
    w: Weights,
    x: Tensor,
    codes: Tensor | None,
    confidence: Tensor | None,
    table: Tensor | None,
    part: MoEGraph,
    ids: Tensor,
    choices: Choices | None = None,
) -> tuple[Tensor, Tensor]:
    """Iterate every position of (B, T, D).

    Args:
        w: weights of the iterations.
        x: what they start from.
        codes: (B, T) rows of the table, where the graph is a part.
        confidence: (B, T), their weights.
        table: of the codebook.
        part: has the edges and the balance.
        ids: (B, T) bytes.
        choices: of the model; None is to choose the best.

    Returns:
        The result, and (iterations, B * T): what of each position halted with each iteration.
    """
    config = part.config
    edges = edges_by_code(part.edges) if config.graph else {}
    by_hash = config.moe and config.moe_gate == "hash"
    balance = part.experts.gate.balance if config.moe and not by_hash else None
    histories = [history for row in ngrams(ids, 3) for history in row]
    found = []
    for m, start in enumerate(x.flatten(0, 1)):
        code = (int(codes.flatten()[m]), confidence.flatten()[m]) if config.graph else (None, None)
        chosen = experts_by_hash(histories[m], config) if by_hash else None
        chosen, halted = [chosen] * config.max_moe_iters, None
        if choices:
            halted = int(choices.halted[m])
            if config.moe and not by_hash:
                chosen = [of_one[m].tolist() for of_one in choices.experts]
        about = (edges, balance, chosen, halted, config)
        found.append(iterate(w, start, *code, table, *about, choices))
    y, shares = (torch.stack(part) for part in zip(*found, strict=True))
    return y.view(x.shape), shares.T


def iterate(
    w: Weights,
    start: Tensor,
    code: int | None,
    confidence: Tensor | None,
    table: Tensor | None,
    edges: dict[int, list[tuple[int, float]]],
    balance: Tensor | None,
    chosen: list[list[int] | None],
    halted: int | None,
    config: GraphConfig,
    choices: Choices | None = None,
) -> tuple[Tensor, Tensor]:
    """Iterate one position, (D,); return the result and what halted with each iteration.

    `chosen` are experts of each iteration, None the best; `halted` is the last one, None where
    enough has halted.
    """
    stream, left, result, shares = start, 1, 0, []
    sure = 1 + confidence - confidence.detach() if code is not None else None
    for index in range(config.max_moe_iters):
        inward = w["inward"] @ norm(stream, w["norm"])
        low = inward[-1 - config.adapter_rank : -1]
        change = w[f"adapters.{index}"] @ norm(low, w["adapter_norm"])
        if config.moe:
            x, query = inward[: config.expert_dim], inward[config.expert_dim :][: config.gate_dim]
            own, by = under(w, "experts"), choices if balance is not None else None
            mixed = experts(own, x, query, config, balance, chosen[index], by) + x
            change = change + w["output"] @ norm(mixed, w["sub_norm"])
        if code is not None:
            leaving = edges.get(code, [])
            total = sum(abs(weight) for _, weight in leaving)
            carried = [weight / max(total, 1e-6) * table[target] for target, weight in leaving]
            carried = w["message"] @ norm(sum(carried, 0 * table[0]), w["message_norm"])
            change = change + carried * min(total, 1) * sure
            code = max(leaving, key=lambda edge: abs(edge[1]), default=(code, 0))[0]
        stream = start + 0.95 * (stream - start) + change
        halt = torch.sigmoid(inward[-1] - 1.0)
        if left is None:
            halt = 0 * halt
        elif index == config.max_moe_iters - 1 or (
            1 - left + halt >= 0.99 if halted is None else index == halted
        ):
            halt, left = left + 0 * halt, None
        else:
            left = left - halt
        shares.append(halt)
        result = result + halt * stream
    return result, torch.stack(shares)


def edges_by_code(edges: Edges) -> dict[int, list[tuple[int, float]]]:
    """List the (target, weight) of each code's edges."""
    found: dict[int, list] = {}
    buffers = (edges.source, edges.target, edges.sign, edges.score)
    for source, target, sign, score in zip(*(b.flatten().tolist() for b in buffers), strict=True):
        if score > 0:
            found.setdefault(source, []).append((target, sign * score / 127**2))
    return found


def router(w: Weights, streams: list[Tensor]) -> Tensor:
    """Mix streams of (B, T, D) by scores of the first."""
    bias = torch.zeros(len(streams), dtype=torch.float64, device=streams[0].device)
    bias[0] = 3
    shares = (norm(streams[0], w["norm"]) @ w["scores"].T + bias).softmax(dim=-1)
    return sum(
        share[..., None] * part for share, part in zip(shares.unbind(-1), streams, strict=True)
    )
