"""`HNet` again, in float64 and plain torch, to compare the real one and its cache with.

Written from the equations of `arbcli.model.blocks.chunking`, a text, a position and a chunk at a
time: no kernel is called, no layer of the model, and there are no spare slots.
"""

import torch
from torch import Tensor

from arbcli.config.dense import ModelConfig
from arbcli.config.hnet import HNetConfig
from arbcli.verify.reference import reference_block, reference_logits

Weights = dict[str, Tensor]


def reference_hnet(
    w: Weights, config: HNetConfig, ids: Tensor, *, endless: bool = False
) -> tuple[Tensor, Tensor | None]:
    """Compute what a whole model makes of bytes.

    Args:
        w: its decoded weights by name.
        config: of the model.
        ids: (B, T) bytes.
        endless: whether chunks have as many slots as they need, and attend to as many as a window
            has slots, as in generation.

    Returns:
        (B, T, 256) logits, and the sum of the stages' ratio losses; None where nothing is learned.
    """
    routed: list[list[tuple[Tensor, Tensor]]] = [[] for _ in range(config.stages)]
    rows = []
    for row in ids:
        x = w["embedding.weight"][row][None]
        rows.append(_through(w, config, 0, x, row.tolist(), routed, endless))
    logits = reference_logits(torch.cat(rows), w)
    if config.boundaries != "learned":
        return logits, None
    ratio = 0
    for length, found in zip(config.chunk_length, routed, strict=True):
        p, begins = (torch.cat(part) for part in zip(*found, strict=True))
        f, g = begins.double().mean(), p.mean()
        ratio = ratio + length / (length - 1) * ((length - 1) * f * g + (1 - f) * (1 - g))
    return logits, ratio


def reference_boundaries(
    w: Weights, config: HNetConfig, stage: int, x: Tensor, text: list[int]
) -> tuple[Tensor, list[bool]]:
    """Find how likely a chunk begins at each of the normalised positions (T, D), and where."""
    if config.boundaries == "every":
        begins = [t % config.chunk_length[stage] == 0 for t in range(len(x))]
    elif config.boundaries == "space":
        space = [byte in b" \t\n\v\f\r" for byte in text]
        begins = [t == 0 or (space[t - 1] and not space[t]) for t in range(len(x))]
    else:
        q, k = w[f"stages.{stage}.router.query_key.weight"].chunk(2)
        p = [torch.ones((), dtype=torch.float64, device=x.device)]
        for t in range(1, len(x)):
            u, v = x[t - 1] + q @ x[t - 1], x[t] + k @ x[t]
            p.append((1 - u @ v / ((u @ u + 1e-6) * (v @ v + 1e-6)).sqrt()) / 2)
        return torch.stack(p), [bool(each > 0.5) for each in p]
    return torch.tensor(begins, dtype=torch.float64, device=x.device), begins


def _through(
    w: Weights,
    config: HNetConfig,
    stage: int,
    x: Tensor,
    text: list[int],
    routed: list[list[tuple[Tensor, Tensor]]],
    endless: bool,
) -> Tensor:
    """Pass one text, (1, T, D), through a stage and all inside it."""
    if stage == config.stages:
        own = config.main()
        for index in range(own.layers):
            x = reference_block(x, _under(w, f"blocks.{index}."), own, own.ctx)
        return x
    own, prefix = config.outer(stage), f"stages.{stage}."
    x = _norm(_outer(w, config, f"{prefix}encoder", own, x)[0])
    p, begins = reference_boundaries(w, config, stage, x, text)
    routed[stage].append((p, torch.tensor(begins, device=x.device)))
    starts = [t for t, begin in enumerate(begins) if begin]
    if not endless:
        starts = starts[: config.capacity(stage, config.slots[stage])]
    inward = x[starts] @ w[f"{prefix}inward.weight"].T
    z = _through(w, config, stage + 1, inward[None], text, routed, endless)[0]
    z = _norm(z) * w[f"{prefix}outward_norm.weight"] @ w[f"{prefix}outward.weight"].T
    mean, rows = torch.zeros_like(z[0]), []
    for t in range(len(x)):
        confidence = 1 - p[t]
        if t in starts:
            share = p[t].clamp(1e-4, 1 - 1e-4)
            mean = share * z[starts.index(t)] + (1 - share) * mean
            confidence = p[t]
        straight_through = confidence + (1 - confidence).detach()
        rows.append(straight_through * mean + w[f"{prefix}residual.weight"] @ x[t])
    return _outer(w, config, f"{prefix}decoder", own, torch.stack(rows)[None])


def _outer(w: Weights, config: HNetConfig, prefix: str, own: ModelConfig, x: Tensor) -> Tensor:
    """Pass (1, T, D) through the blocks of an encoder or a decoder."""
    for index in range(own.layers):
        of_block = _under(w, f"{prefix}.{index}.")
        if config.outer_blocks == "mamba":
            x = reference_mamba_block(x, of_block, 2 * own.heads, config.states)
        else:
            x = reference_block(x, of_block, own, config.window)
    return x


def reference_mamba_block(x: Tensor, w: Weights, heads: int, states: int) -> Tensor:
    """Compute a Mamba-2 block's output, (B, T, D), a position, a head and a tap at a time."""
    inner = 2 * x.shape[-1]
    projected = _norm(x) * w["norm.weight"] @ w["mamba.projection.weight"].T
    z, mixed, dt = projected.split((inner, inner + 2 * states, heads), dim=-1)
    taps, rows = w["mamba.taps.weight"], []
    state = torch.zeros(len(x), heads, states, inner // heads, dtype=x.dtype, device=x.device)
    for t in range(x.shape[1]):
        mix = sum(taps[:, i] * mixed[:, t - 3 + i] for i in range(4) if t - 3 + i >= 0)
        mix = mix * torch.sigmoid(mix)
        step = torch.log1p(torch.exp(dt[:, t] + w["mamba.bias.weight"][:, 0]))
        rate = torch.exp(w["mamba.rate.weight"][:, 0])
        b, c = mix[:, inner : inner + states], mix[:, inner + states :]
        u, heard, after = mix[:, :inner].chunk(heads, dim=1), [], []
        for head in range(heads):
            fading = torch.exp(-rate[head] * step[:, head, None, None])
            new = step[:, head, None, None] * b[:, :, None] * u[head][:, None, :]
            after.append(fading * state[:, head] + new)
            y = (c[:, :, None] * after[-1]).sum(dim=1)
            heard.append(y + w["mamba.skip.weight"][head, 0] * u[head])
        state = torch.stack(after, dim=1)
        rows.append(torch.cat(heard, dim=1))
    y = z * torch.sigmoid(z) * torch.stack(rows, dim=1)
    return x + _norm(y) * w["mamba.gate.weight"] @ w["mamba.output.weight"].T


def _under(w: Weights, prefix: str) -> Weights:
    return {name.removeprefix(prefix): part for name, part in w.items() if name.startswith(prefix)}


def _norm(x: Tensor) -> Tensor:
    return x / (x.square().mean(dim=-1, keepdim=True) + 1e-6).sqrt()
