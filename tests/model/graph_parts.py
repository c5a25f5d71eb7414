"""A tiny `GraphLM`, and all of it again from its equations, in float64, a position at a time."""

import math

import torch

from arbcli.kernels.weighted_rows import TouchedRows
from arbcli.model.config import GraphConfig, preset
from arbcli.model.experts import BALANCE_UNIT
from arbcli.model.graph_lm import ROUTER_BIAS, GraphLM
from arbcli.model.latent_attention import SHARPNESS
from arbcli.model.ternary import INIT_SPREAD, TernaryTensor

SHAPE = {
    "dim": 40, "layers": 2, "heads": 2, "ffn": 48, "ctx": 8,
    "latent": 24, "rotary": 8, "ngram_rows": 64, "ngram_dim": 16, "key_dim": 8,
    "codes": (4, 8), "code_dim": 36, "code_heads": 2,
    "knowledge": (8, 6), "knowledge_dim": 12, "knowledge_heads": 3, "top_k": 3,
    "experts": 4, "expert_dim": 24, "expert_ffn": 20, "gate_dim": 8, "adapter_rank": 4,
    "edges": (16, 2), "head_ffn": 44, "memory_rows": 64, "max_moe_iters": 3, "memgram": True,
    "moe": True, "graph": True,
}  # fmt: skip
"""Two groups of scales where a row has 36, 40, 44 or 48 weights."""
STD = 0.3
"""Of weights of parts by themselves: large, so that what is chosen differs between positions."""
CLOSE = {"rtol": 1e-4, "atol": 2e-5}


def graph_config(**options) -> GraphConfig:
    return preset("arb-tiny", **SHAPE | options)


def initialised(part: torch.nn.Module) -> torch.nn.Module:
    """Set the weights of a part that is no whole model."""
    tensors = [tensor for tensor in part.modules() if isinstance(tensor, TernaryTensor)]
    for index, tensor in enumerate(tensors):
        if tensor.frozen:
            tensor.fill(1)
        else:
            tensor.spread = INIT_SPREAD  # tables too: rows of zeros would hide a lot
            tensor.initialise(STD, seed=0, index=index)
    return part


def model(*, recompute=False, **options) -> GraphLM:
    """Make a model whose integer memories hold something."""
    lm = GraphLM(graph_config(**options), torch.float32, recompute=recompute)
    for tensor in lm.weights().values():
        tensor.spread = INIT_SPREAD
    lm.initialise(0)
    fill_memories(lm)
    return lm


def fill_memories(part: torch.nn.Module) -> None:
    """Put random integers in the graph, the memory of n-grams and the balance of experts."""
    buffers = dict(part.named_buffers())
    generator = torch.Generator().manual_seed(1)
    for name, buffer in buffers.items():
        kind = name.rpartition(".")[2]
        low, high = {
            "source": (0, 2), "target": (0, math.prod(SHAPE["codes"])), "sign": (-127, 128),
            "score": (0, 128), "symbol": (-128, 128), "strength": (0, 128), "balance": (-3, 4),
        }.get(kind, (0, 0))  # fmt: skip
        if high:
            drawn = torch.randint(low, high, buffer.shape, generator=generator)
            if kind == "source":  # a code of the bucket
                drawn = drawn * len(buffer) + torch.arange(len(buffer))[:, None]
            buffer.copy_(drawn)


def text(rows=2, length=6, seed=0) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(97, 101, (rows, length), generator=generator)


def normal(*shape: int, seed=0) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def collect(part: torch.nn.Module) -> dict[str, list]:
    """Make every weight hand its (gradient, where) to a list of its own."""
    found: dict[str, list] = {}
    for name, tensor in part.named_modules():
        if hasattr(tensor, "sink"):
            found[name] = []
            tensor.sink = lambda _, grad, where=None, name=name: found[name].append((grad, where))
    return found


def decoded(part: torch.nn.Module) -> dict[str, torch.Tensor]:
    """Decode all weights by their names, less `.weight`, as float64 leaves."""
    return {
        name.removesuffix(".weight"): tensor.weight(torch.float32).double().requires_grad_()
        for name, tensor in part.named_modules()
        if isinstance(tensor, TernaryTensor)
    }


def whole(tensor: TernaryTensor, handed: list) -> torch.Tensor:
    """Put together what a sink was given in one backward."""
    total = torch.zeros(tensor.out_features, tensor.in_features)
    for grad, where in handed:
        if where is None:
            total += grad
        elif isinstance(where, TouchedRows):
            total[where.rows[: where.count]] += grad[: where.count]
        else:
            for each, matrix in zip(grad, where, strict=True):
                total.chunk(tensor.matrices)[matrix].add_(each)
    return total


def times(handed: list) -> int:
    """Count the matrices that a sink was given the gradient of."""
    return sum(len(where) if isinstance(where, range) else 1 for _, where in handed)


def assert_same(part, inputs, run, reference) -> None:
    """Compare a result, and gradients of inputs and weights, with autograd's of a reference.

    Args:
        part: the module; its weights are handed to the reference by name.
        inputs: tensors; those of floats need gradients.
        run: from the inputs to one tensor.
        reference: from the weights and the inputs to the same, in float64.
    """
    handed = collect(part)
    ours = [x.clone().requires_grad_(x.is_floating_point()) for x in inputs]
    y = run(*ours)
    weights = decoded(part)
    twins = [x.double().requires_grad_() if x.is_floating_point() else x for x in inputs]
    expected = reference(weights, *twins)
    torch.testing.assert_close(y.double(), expected, **CLOSE)
    grad_y = normal(*y.shape, seed=9)
    y.backward(grad_y)
    expected.backward(grad_y.double())
    for x, twin in zip(ours, twins, strict=True):
        if x.is_floating_point():
            torch.testing.assert_close(x.grad.double(), twin.grad, **CLOSE)
    modules = dict(part.named_modules())
    for name, grads in handed.items():
        tensor, twin = modules[name], weights[name.removesuffix(".weight")]
        assert times(grads) == tensor.matrices, name
        got = whole(tensor, grads).double()
        assert twin.grad is not None, name
        error = (got - twin.grad).norm() / twin.grad.norm().clamp(min=1e-6)
        assert error < 1e-4, name


def under(weights: dict[str, torch.Tensor], prefix: str) -> dict[str, torch.Tensor]:
    """Choose the weights of a part, by their names within it."""
    return {
        name.removeprefix(f"{prefix}."): weight
        for name, weight in weights.items()
        if name.startswith(f"{prefix}.")
    }


def norm(x):
    return x / (x.square().mean(dim=-1, keepdim=True) + 1e-6).sqrt()


def gated(x):
    gate, up = x.chunk(2, dim=-1)
    return gate * torch.sigmoid(gate) * up


def mlp(w, x):
    h = gated(norm(x) @ w["gate_up"].T)
    return (norm(h) if "sub_norm" in w else h) @ w["output"].T


def ngram_row(history: list[int], num_rows: int) -> int:
    """Hash the bytes of one n-gram; -1 if one of them is before the text."""
    if min(history) < 0:
        return -1
    key = 0
    for byte in reversed(history):
        key = key * 257 + byte + 1
    mixed = (key + (len(history) << 40)) * 0x9E3779B97F4A7C15 % 2**64
    return ((mixed >> 32) % 2**31 * num_rows) >> 31


def ngrams(ids, order: int) -> list[list[list[int]]]:
    """List the n-gram that ends at each byte."""
    return [
        [padded[end : end + order] for end in range(len(row))]
        for row in ids.tolist()
        for padded in [[-1] * (order - 1) + row]
    ]


def sequencer(w, ids):
    table, y = w["table"], []
    for order in (2, 3, 4):
        for row in ngrams(ids, order):
            found = [ngram_row(history, len(table)) for history in row]
            y += [table[i] if i >= 0 else 0 * table[0] for i in found]
    y = torch.stack(y).view(3, *ids.shape, -1).sum(dim=0)
    return norm(y) @ w["projection"].T


def attention(w, x, config, window):
    """Attend with every head and query alone, to at most `window` positions."""
    h = norm(x) @ w["query_down"].T
    queries, latent, key = h.split((config.dim, config.latent, config.rotary), dim=-1)
    size, still = config.head_dim, config.head_dim - config.rotary
    width = still + size
    up = norm(latent) @ w["up"].T
    key, y = turn(key), []
    for head in range(config.heads):
        q = queries[..., head * size : (head + 1) * size]
        q = norm(torch.cat((q[..., :still], turn(q[..., still:])), dim=-1))
        kv = up[..., head * width : (head + 1) * width]
        k, v = norm(torch.cat((kv[..., :still], key), dim=-1)), kv[..., still:]
        rows = []
        for t in range(x.shape[1]):
            seen = slice(max(0, t - window + 1), t + 1)
            scores = (q[:, t, None] * k[:, seen]).sum(dim=-1) * SHARPNESS / math.sqrt(size)
            rows.append((scores.softmax(dim=1)[..., None] * v[:, seen]).sum(dim=1))
        y.append(torch.stack(rows, dim=1))
    return norm(torch.cat(y, dim=-1)) @ w["output"].T


def turn(x):
    """Turn pairs (i, i + d / 2) of (B, T, d) by position * 10000**(-2 i / d)."""
    half = x.shape[-1] // 2
    rate = 10000.0 ** (-torch.arange(half, dtype=torch.float64) / half)
    angle = torch.arange(x.shape[1], dtype=torch.float64)[:, None] * rate
    turned = torch.complex(x[..., :half], x[..., half:]) * torch.polar(angle * 0 + 1, angle)
    return torch.cat((turned.real, turned.imag), dim=-1)


def codebook(w, x, heads: int, top_k: int):
    """Score all rows of the table; return the result, the first head's best rows, and weights."""
    query = (norm(x) @ w["query"].T).unflatten(-1, (heads, 2, -1))
    left, right = (
        norm(query[..., half, :]) @ w[name].T for half, name in enumerate(("left", "right"))
    )
    scores = (left[..., :, None] + right[..., None, :]).flatten(-2)
    best, rows = scores.sort(dim=-1, descending=True)
    weights = best[..., :top_k].softmax(dim=-1)
    values = (weights[..., None] * w["table"][rows[..., :top_k]]).sum(dim=-2).flatten(-2)
    return norm(values) @ w["output"].T, rows[..., 0, 0], weights[..., 0, 0]


def experts(w, x, query, config, balance):
    """Send one position, (expert_dim,), to its experts."""
    scores = norm(query) @ w["gate.keys"].T
    chances = (scores + balance * BALANCE_UNIT).tolist()
    chosen = sorted(range(config.experts), key=lambda e: -chances[e])[: config.moe_top_k]
    gates = scores[chosen].softmax(dim=0)
    y = 0
    for gate, expert in zip(gates, chosen, strict=True):
        up, down = (w[name].chunk(config.experts)[expert] for name in ("gate_up", "down"))
        y = y + gate * (down @ norm(gated(up @ x)))
    return y


def iterate(w, start, code, confidence, table, edges, balance, config):
    """Iterate one position, (D,); return the result and what halted with each iteration."""
    stream, left, result, shares = start, 1, 0, []
    sure = 1 + confidence - confidence.detach() if code is not None else None
    for index in range(config.max_moe_iters):
        inward = w["inward"] @ norm(stream)
        change = w[f"adapters.{index}"] @ norm(inward[-1 - config.adapter_rank : -1])
        if config.moe:
            x, query = inward[: config.expert_dim], inward[config.expert_dim :][: config.gate_dim]
            mixed = experts(under(w, "experts"), x, query, config, balance) + x
            change = change + w["output"] @ norm(mixed)
        if code is not None:
            leaving = edges.get(code, [])
            total = sum(abs(weight) for _, weight in leaving)
            carried = [weight / max(total, 1e-6) * table[target] for target, weight in leaving]
            carried = w["message"] @ norm(sum(carried, 0 * table[0]))
            change = change + carried * min(total, 1) * sure
            code = max(leaving, key=lambda edge: abs(edge[1]), default=(code, 0))[0]
        stream = start + 0.95 * (stream - start) + change
        halt = torch.sigmoid(inward[-1] - 1.0)
        if left is None:
            halt = 0 * halt
        elif index == config.max_moe_iters - 1 or 1 - left + halt >= 0.99:
            halt, left = left + 0 * halt, None
        else:
            left = left - halt
        shares.append(halt)
        result = result + halt * stream
    return result, torch.stack(shares)


def edges_by_code(edges) -> dict[int, list[tuple[int, float]]]:
    """List the (target, weight) of each code's edges."""
    found: dict[int, list] = {}
    buffers = (edges.source, edges.target, edges.sign, edges.score)
    for source, target, sign, score in zip(*(b.flatten().tolist() for b in buffers), strict=True):
        if score > 0:
            found.setdefault(source, []).append((target, sign * score / 127**2))
    return found


def moe_graph(w, x, codes, confidence, table, part):
    """Iterate every position of (B, T, D); return the result and (iterations, B * T) shares."""
    config = part.config
    edges = edges_by_code(part.edges) if config.graph else {}
    balance = part.experts.gate.balance if config.moe else None
    found = [
        iterate(
            w, start,
            *((int(codes.flatten()[m]), confidence.flatten()[m]) if config.graph else (None, None)),
            table, edges, balance, config,
        )
        for m, start in enumerate(x.flatten(0, 1))
    ]  # fmt: skip
    y, shares = (torch.stack(part) for part in zip(*found, strict=True))
    return y.view(x.shape), shares.T


def logits(w, lm: GraphLM, ids, window: int | None = None):
    """Compute the logits of a whole model, every position attending to `window` positions."""
    config, window = lm.config, window or ids.shape[1]
    x = w["embedding"][ids]
    if config.sequencer:
        x = x + sequencer(under(w, "sequencer"), ids)
    if config.memgram:
        x = x + memgram(under(w, "memgram"), ids, lm.memgram)
    streams, half = [x], config.layers // 2

    def through(x, indices):
        for index in indices:
            block = under(w, f"blocks.{index}")
            if config.attention:
                x = x + attention(under(block, "attention"), x, config, window)
            x = x + mlp(under(block, "mlp"), x)
        return x

    x = through(x, range(half))
    before, codes, sure = x, None, None
    if config.codebook:
        own = under(w, "codebook")
        y, codes, sure = codebook(own, before, config.code_heads, config.top_k)
        streams.append(y)
    if config.knowledge_codebook:
        own = under(w, "knowledge")
        streams.append(codebook(own, before, config.knowledge_heads, config.top_k)[0])
    x = sum(streams[1:], x)
    if config.moe or config.graph:
        table = w.get("codebook.table")
        x, _ = moe_graph(under(w, "moe_graph"), x, codes, sure, table, lm.moe_graph)
    x = through(x, range(half, config.layers))
    if config.router:
        bias = torch.tensor([ROUTER_BIAS] + [0.0] * len(streams))
        shares = (norm(x) @ w["router.scores"].T + bias).softmax(dim=-1)
        parts = zip(shares.unbind(-1), [x, *streams], strict=True)
        x = sum(share[..., None] * part for share, part in parts)
    x = x + mlp(under(w, "byte_mlp"), x)
    return norm(x) @ w["head"].T


def memgram(w, ids, part):
    """Recall what followed each 6-gram."""
    y = []
    for row in ngrams(ids, 6):
        for history in row:
            entry = ngram_row(history, len(part.symbol))
            strength = int(part.strength[entry]) if entry >= 0 else 0
            symbol = int(part.symbol[entry]) + 128 if strength else 0
            y.append(math.sqrt(strength / 127) * (w["output"] @ norm(w["table"][symbol])))
    return torch.stack(y).view(*ids.shape, -1)
