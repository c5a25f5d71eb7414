"""Codebooks that read the same stream, then iterated experts, adapters and a graph of codes."""

import torch
from torch import Tensor

from arbcli.families.experts.reference import experts
from arbcli.families.graph.config import (
    CodebookConfig,
    IteratedConfig,
    MemoriesConfig,
    QuantiserConfig,
)
from arbcli.verify.parts.base import Reading, Weights, norm, output_of, under

HALT_AT, KEEP, HALT_PRIOR = 0.99, 0.95, 0.25
UNIT = 32


def memories(w: Weights, x: Tensor, reading: Reading) -> tuple[Tensor, list[Tensor]]:
    """Add the results of codebooks and iterations to the stream x, (T, D).

    Args:
        w: weights of the model.
        x: the stream.
        reading: inputs of the model, with the configuration of the memories.

    Returns:
        The stream, and the result of each codebook.
    """
    config, before = reading.config_of(MemoriesConfig), x
    results: dict[str, tuple[Tensor, Tensor, Tensor]] = {}
    for name, book in config.codebooks.items():
        find = quantiser if isinstance(book, QuantiserConfig) else codebook
        results[name] = find(under(w, name), before, reading.within(name, book))
        x = x + results[name][0]
    if config.iterated:
        codes = results["codebook"][1:] if config.codebook else None  # rows and weights
        reading_of_graph = reading.within("moe_graph", config.iterated)
        table = w.get("codebook.table")
        if isinstance(config.codebook, QuantiserConfig):
            table = reading.memory("codebook.codes").double() / UNIT
        x, shares = iterated(under(w, "moe_graph"), x, codes, table, reading_of_graph)
        reading_of_graph.note("ponder", ponder_costs(shares))
    return x, [y for y, *_ in results.values()]


def codebook(w: Weights, x: Tensor, reading: Reading) -> tuple[Tensor, Tensor, Tensor]:
    """Score all rows of the table; return the result, the first head's best rows, and weights."""
    config, taken = reading.config_of(CodebookConfig), reading.taken()
    query = (norm(x, w.get("norm")) @ w["query"].T).view(len(x), config.heads, 2, -1)
    query = norm(query, w.get("query_norm"))
    left, right = query[..., 0, :] @ w["left"].T, query[..., 1, :] @ w["right"].T
    scores = (left[..., :, None] + right[..., None, :]).flatten(-2)
    best, rows = scores.topk(config.top_k)
    if taken:
        there = taken[0][: len(x)] < scores.shape[-1]
        rows = taken[0][: len(x)] * there
        best = scores.gather(-1, rows).masked_fill(~there, -torch.inf)
        reading.judged.judge(best, scores)
    weights = best.softmax(dim=-1)
    values = (weights[..., None] * w["table"][rows]).sum(dim=-2).flatten(-2)
    return output_of(values, w), rows[..., 0, 0], weights[..., 0, 0]


def quantiser(w: Weights, x: Tensor, reading: Reading) -> tuple[Tensor, Tensor, Tensor]:
    """Return the nearest code of each position as a vector, the codes' numbers, and ones."""
    taken, codes = reading.taken(), reading.memory("codes").double()
    z = norm(norm(x, w.get("norm")) @ w["query"].T)
    near = (z.detach() * UNIT).round().clamp(-127, 127)
    apart = -(near[:, None] - codes).square().mean(dim=-1)
    best, chosen = apart.max(dim=-1)
    if taken:
        chosen = taken[0][: len(x)].flatten()
        best = apart.gather(-1, chosen[:, None])
        reading.judged.judge(best, apart)
    rows = codes[chosen] / UNIT
    reading.note("commitment", (z - rows).square().mean(dim=-1))
    values = z + (rows - z).detach()
    return output_of(values, w), chosen, torch.ones_like(z[:, 0])


def iterated(
    w: Weights,
    start: Tensor,
    codes: tuple[Tensor, Tensor] | None,
    table: Tensor | None,
    reading: Reading,
) -> tuple[Tensor, Tensor]:
    """Iterate every position of (T, D) until enough of it has halted.

    Args:
        w: weights of the iterations.
        start: initial values of the iterations.
        codes: (T,) rows of the table and (T,) their weights; None where there is no codebook.
        table: table of the codebook.
        reading: inputs of the iterations.

    Returns:
        The result, and (iterations, T): what of each position halted with each iteration.
    """
    config = reading.config_of(IteratedConfig)
    mixture = config.experts
    width, query = (config.expert_dim, config.gate_dim) if mixture else (0, 0)
    parts = (width, query, config.adapter_rank, 1)
    halted = reading.taken()
    code = codes[0].tolist() if codes else []
    edges = edges_by_code(reading) if config.edges else {}
    stream, result, shares = start, torch.zeros_like(start), []
    left = start.new_ones(len(start))
    running = torch.ones_like(left, dtype=torch.bool)
    for index in range(config.iterations):
        inward = norm(stream, w.get("norm")) @ w["inward"].T
        into, asked, low, halting = inward.split(parts, dim=1)
        if config.edges and codes and table is not None:
            carried, strength, code = _hop(code, edges, table)
            carried = norm(carried, w.get("message_norm"))
            strong = (strength * (1 + codes[1] - codes[1].detach()))[:, None]
        if config.graph_gate:
            asked = asked + carried @ w["edge_query"].T * strong
        if config.graph_adapters:
            low = low * (1 + carried @ w["edge_scale"].T * strong)
        change = norm(low, w.get("adapter_norm")) @ w[f"adapters.{index}"].T
        if mixture:
            reading_of_experts = reading.within("experts", mixture, index)
            mixed = experts(under(w, "experts"), asked, into, reading_of_experts) + into
            change = change + output_of(mixed, w)
        if config.edges:
            change = change + carried @ w["message"].T * strong
        stream = start + KEEP * (stream - start) + change
        halt = torch.sigmoid(halting[:, 0] - 1.0)
        gone = (1 - left + halt).detach()
        done = gone >= HALT_AT
        last = index == config.iterations - 1
        if halted and not last:
            done = halted[0][: len(start)] == index
            within = torch.where(done, gone.clamp(min=HALT_AT), gone.clamp(max=HALT_AT))
            reading.judged.scores.append((gone[running], within[running]))
        share = torch.where(done | last, left, halt) * running
        left, running = left - share, running & ~done
        shares.append(share)
        result = result + share[:, None] * stream
    return result, torch.stack(shares)


def _hop(
    codes: list[int], edges: dict[int, list[tuple[int, float]]], table: Tensor
) -> tuple[Tensor, Tensor, list[int]]:
    """Follow the edges of codes: rows that they carry, (T, width), strengths, the next codes."""
    weights = table.new_zeros(len(codes), len(table))
    strengths, following = [], []
    for t, code in enumerate(codes):
        leaving = edges.get(code, [])
        total = sum(abs(weight) for _, weight in leaving)
        for target, weight in leaving:
            weights[t, target] += weight / max(total, 1e-6)
        strengths.append(min(total, 1))
        following.append(max(leaving, key=lambda edge: abs(edge[1]), default=(code, 0))[0])
    return weights @ table, table.new_tensor(strengths), following


def edges_by_code(reading: Reading) -> dict[int, list[tuple[int, float]]]:
    """List the (target, weight) of each code's edges."""
    targets: dict[int, list] = {}
    names = ("source", "target", "sign", "score")
    buffers = (reading.memory(f"edges.{name}").flatten().tolist() for name in names)
    for source, target, sign, score in zip(*buffers, strict=True):
        if score > 0:
            targets.setdefault(source, []).append((target, sign * score / 127**2))
    return targets


def ponder_costs(shares: Tensor) -> Tensor:
    """Measure how far (iterations, T) shares are from what is expected, in nats: (T,).

    Each iteration ought to halt a quarter of what is left, and the last one all of it.
    """
    cost, left = shares.new_zeros(shares.shape[1]), 1.0
    for index, share in enumerate(shares):
        expected = left if index == len(shares) - 1 else left * HALT_PRIOR
        left -= expected
        cost = cost + share * torch.log(share.clamp(min=1e-6) / expected)
    return cost
