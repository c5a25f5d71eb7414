"""`CompressedLM` again, in float64 and plain torch, to compare the real one and its cache with.

Written from the equations of `arbcli.model.blocks.compressed_attention`, a text, a byte, a head and
an entry at a time: no kernel is called and no layer of the model.
"""

import torch
from torch import Tensor

from arbcli.config.compressed import CompressedConfig
from arbcli.verify.graph_reference import Choices
from arbcli.verify.reference import reference_logits, rotary_angles

Weights = dict[str, Tensor]


def reference_compressed(
    w: Weights, config: CompressedConfig, ids: Tensor, choices: Choices | None = None
) -> tuple[Tensor, Tensor | None]:
    """Compute what a whole model makes of bytes.

    Args:
        w: its decoded weights by name.
        config: of the model.
        ids: (B, T) bytes.
        choices: of the model, which are taken and judged; None is to choose the best.

    Returns:
        (B, T, 256) logits, and the mean of the indexers' divergences; None where there are none.
    """
    rows, divergences = [], []
    for text, row in enumerate(ids):
        x = w["embedding.weight"][row]
        for index in range(config.layers):
            prefix = f"blocks.{index}."
            own = {name.removeprefix(prefix): w[name] for name in w if name.startswith(prefix)}
            taken = None
            if choices and index in choices.entries:
                taken = choices.entries[index][text], choices.positive[index][text]
            about = (own, config, config.ratio(index), choices, taken)
            x, found = reference_compressed_block(x, *about)
            divergences += [] if found is None else [found]
        rows.append(x)
    logits = reference_logits(torch.stack(rows), w)
    return logits, torch.stack(divergences).mean() if divergences else None


def reference_compressed_block(
    x: Tensor,
    w: Weights,
    config: CompressedConfig,
    m: int,
    choices: Choices | None = None,
    taken: tuple[Tensor, Tensor] | None = None,
) -> tuple[Tensor, Tensor | None]:
    """Compute a block's output, (T, D), of one text, and its indexer's divergence if it has one.

    `taken` are the (N, k) choices of the model's groups, and which of its (N, h, E) products are
    above 0; `choices` judges both.
    """
    heads, width, kv = config.heads, config.head_dim, config.kv_heads
    length, most = len(x), max(1, config.ctx // m)
    h = _norm(x) * w["attention_norm.weight"]
    projected = h @ w["attention.projection.weight"].T
    q, recent, value, gate = projected.split((heads * width, *[kv * width] * 3), dim=1)
    q = [_turn(_norm(q[t].view(heads, width)), t, config.turned) for t in range(length)]
    recent = [_turn(_norm(recent[t].view(kv, width)), t, config.turned) for t in range(length)]
    still = []
    for j in range(length // m):
        scores = torch.stack([gate[j * m + i] + w["attention.beta.weight"][:, i] for i in range(m)])
        share = torch.exp(scores) / torch.exp(scores).sum(dim=0)
        block = sum(share[i] * value[j * m + i] for i in range(m))
        still.append(_norm(block.view(kv, width)))
    entries = [_turn(entry, j * m, config.turned) for j, entry in enumerate(still)]

    chosen = {g: list(range(max(0, g - most), g)) for g in range(len(still) + 1)}
    scored: dict[int, Tensor] = {}
    if m <= config.indexed_ratio:
        for g in range(1, len(still) + 1):
            positive = taken[1][g - 1] if taken else None
            about = (g, w, config, m, choices, positive)
            scored[g] = _index(h[g * m - 1].detach(), still, chosen[g], *about)
            best = sorted(zip(scored[g].tolist(), chosen[g], strict=True), reverse=True)
            picked = sorted(j for _, j in best[: config.top_k])
            if taken:
                wanted = len(picked)
                picked = sorted(set(taken[0][g - 1].tolist()) & set(chosen[g]))
                mine = scored[g].new_full((wanted,), -torch.inf)  # of one missing, or not there
                mine[: len(picked)] = scored[g].detach()[[chosen[g].index(j) for j in picked]]
                choices.judge(mine, scored[g])
            scored[g] = scored[g][[chosen[g].index(j) for j in picked]]
            chosen[g] = picked
    shares = {g: torch.zeros(len(found), dtype=torch.float64) for g, found in chosen.items()}
    rows = []
    for t in range(length):
        g, out = (t + 1) // m, []
        for head in range(heads):
            own = head // (heads // kv)
            near = range(max(0, t - config.window + 1), t + 1)
            seen = [entries[j][own] for j in chosen[g]] + [recent[s][own] for s in near]
            scores = torch.stack([q[t][head] @ vector / width**0.5 for vector in seen])
            weights = torch.exp(scores)
            weights = weights / (weights.sum() + torch.exp(w["attention.sink.weight"][head, 0]))
            mixed = sum(weight * vector for weight, vector in zip(weights, seen, strict=True))
            out.append(_turn(mixed, -t, config.turned))
            shares[g] = shares[g] + weights[: len(chosen[g])].detach().cpu()
        rows.append(torch.cat(out))
    y = torch.stack(rows)
    if config.sub_norms:
        y = _norm(y) * w["attention.sub_norm.weight"]
    x = x + y @ w["attention.output.weight"].T
    h = (_norm(x) * w["mlp_norm.weight"]) @ w["mlp.gate_up.weight"].T
    first, second = h[:, : config.ffn], h[:, config.ffn :]
    h = first / (1 + torch.exp(-first)) * second
    if config.sub_norms:
        h = _norm(h) * w["mlp.sub_norm.weight"]
    x = x + h @ w["mlp.output.weight"].T
    if not scored:
        return x, None
    terms = []
    for g, scores in scored.items():
        p = (shares[g] / shares[g].sum()).to(x.device)
        terms.append((p * (p.log() - torch.log_softmax(scores, dim=0))).sum())
    return x, torch.stack(terms).mean()


def _index(
    h: Tensor,
    still: list[Tensor],
    seen: list[int],
    g: int,
    w: Weights,
    config: CompressedConfig,
    m: int,
    choices: Choices | None,
    positive: Tensor | None,
) -> Tensor:
    """Score the entries that group g sees, by the byte that completed the last of them.

    `positive` says which of the (h, E) products the model takes, as a rounding may turn a sign.
    """
    heads, width = config.index_heads, config.index_width
    query = w["attention.indexer.query.weight"] @ h
    q, weight = query[: heads * width].view(heads, width), query[heads * width :]
    q = _turn(_norm(q), g * m - 1, width // 2)
    scores = []
    for j in seen:
        key = w["attention.indexer.key.weight"] @ still[j].detach().flatten()
        key = _turn(_norm(key), j * m, width // 2)
        dots = q @ key
        above = torch.relu(dots)
        if positive is not None:
            wanted, above = above.detach(), dots * positive[:, j]
            choices.products.append((above.detach(), wanted))
        scores.append((weight * above).sum() / (heads * width) ** 0.5)
    return torch.stack(scores)


def _turn(x: Tensor, place: int, turned: int) -> Tensor:
    """Turn the first pairs (i, i + d / 2) of (..., d) as a head of so many numbers turns."""
    angles = torch.zeros(x.shape[-1] // 2, dtype=torch.float64, device=x.device)
    angles[: turned // 2] = rotary_angles(2, turned, x.device)[1] * place
    real, imaginary = x.chunk(2, dim=-1)
    found = torch.complex(real, imaginary) * torch.exp(1j * angles)
    return torch.cat([found.real, found.imag], dim=-1)


def _norm(x: Tensor) -> Tensor:
    return x / (x.square().mean(dim=-1, keepdim=True) + 1e-6).sqrt()
