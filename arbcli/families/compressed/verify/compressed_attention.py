"""Verification of `arbcli.families.compressed.kernels.compressed_attention`."""

from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from arbcli.families.compressed.kernels.compressed_attention import Sight, compressed_attention
from arbcli.kernels.runtime.arguments import normals
from arbcli.verify.kernels.attention.rotary_norm import normalise_reference, rotate_reference
from arbcli.verify.verification import CaseGenerator, Gate, Verification


def compressed_attention_reference(
    x: Tensor, recent: Tensor, entries: Tensor, chosen: Tensor | None, sink: Tensor, cos: Tensor,
    sin: Tensor, sight: Sight, eps: float,
) -> tuple[Tensor, Tensor, Tensor | None]:  # fmt: skip
    """Compute `compressed_attention` in float64, one byte at a time."""
    x, recent, entries, sink = (part.double() for part in (x, recent, entries, sink))
    (batch, length, heads, width), lead = x.shape, recent.shape[1] - x.shape[1]
    owner = [head // (heads // recent.shape[2]) for head in range(heads)]
    rows, logs, shares = [], [], None
    if chosen is not None:
        shares = torch.zeros(chosen.shape, dtype=torch.float64, device=x.device)
        picked = chosen.tolist()
    for b in range(batch):
        for t in range(length):
            complete = (sight.start + t + 1) // sight.ratio
            if chosen is None:
                seen = list(range(max(0, complete - sight.max_entries), complete))
            else:
                group = complete - (sight.start + 1) // sight.ratio
                seen = [j for j in picked[b][group] if j >= 0]
            last = lead + t + 1
            q = rotate_reference(normalise_reference(x[b, t], eps), cos[t], sin[t])  # (H, d)
            near = recent[b, max(0, last - sight.window) : last]
            keys = torch.cat((entries[b, seen], near))[:, owner]  # (n, H, d)
            weights = ((keys * q).sum(dim=-1) / width**0.5).exp()
            total = weights.sum(dim=0) + sink.exp()
            y = (weights[..., None] / total[:, None] * keys).sum(dim=0)
            rows.append(rotate_reference(y, cos[t], -sin[t]))
            logs.append(total.log())
            if shares is not None:
                shares[b, group, : len(seen)] += (weights / total)[: len(seen)].sum(dim=1).detach()
    shape = batch, length, heads
    return torch.stack(rows).view(*shape, width), torch.stack(logs).view(shape), shares


def random_sight(
    generator: torch.Generator, sight: Sight, batch: int, length: int, kept: int, shape: tuple
) -> tuple:
    """Draw the inputs of `compressed_attention` without its eps.

    Args:
        generator: a generator of the CPU.
        sight: positions and entries that a byte sees.
        batch: B.
        length: T.
        kept: number of bytes before the first query.
        shape: heads, key heads, head width, and number of selected entries; 0 selects all.
    """
    heads, kv, width, top_k = shape
    normal = normals(generator)
    entries = (sight.start + length) // sight.ratio
    x, angle = normal(batch, length, heads, width), 7 * normal(length, width // 2)
    vectors = [
        functional.rms_norm(normal(batch, number, kv, width), (width,))
        for number in (length + kept, entries)
    ]
    chosen = None
    if top_k:
        groups = sight.groups(length)
        complete = torch.arange(groups.start, groups.stop)[:, None]
        scores = torch.rand(batch, len(groups), entries, generator=generator)
        entry_ids = torch.arange(entries)
        unseen = (entry_ids >= complete) | (entry_ids < complete - sight.max_entries)
        order = scores.masked_fill(unseen, -1).sort(-1, descending=True)
        size = min(top_k, entries)
        indices = torch.where(order.values < 0, entries, order.indices)[..., :size].sort(-1).values
        chosen = torch.where(indices == entries, -1, indices).int()
    return x, *vectors, chosen, normal(heads), angle.cos(), angle.sin(), sight


def _those_there_are(_inputs: tuple, results: tuple[Tensor | None, ...]) -> tuple[Tensor, ...]:
    return tuple(part for part in results if part is not None)


def _reference(*inputs: Any) -> tuple[Tensor, ...]:
    return _those_there_are(inputs, compressed_attention_reference(*inputs))


GATE = Gate(
    relative=1e-5, peer_slack=0.5,
    reason="float32 sums; in bf16 weights are rounded before products, which torch's are not",
)  # fmt: skip


def draw_attention(rng: CaseGenerator, group_size: int, m: int, n: int, k: int) -> tuple:
    """Draw the inputs of `compressed_attention`."""
    ratio, length = 2 + rng.integer(5), 1 + min(m, rng.pick((1, 5, 60)))
    kept, window = rng.pick((0, 3)), rng.pick((1, 4, 200))
    start = kept + rng.integer(9) if kept else 0
    sight = Sight(window, ratio, rng.pick((2, 10**4)), start)
    kv, width = rng.pick((1, 2)), 2 * min(1 + k, rng.pick((1, 9, 32)))
    shape = (kv * rng.pick((1, 3, 8)), kv, width, rng.pick((0, 1, 5, 40)))
    about = rng.seeded()
    x, recent, entries, *rest = random_sight(about, sight, rng.pick((1, 2)), length, kept, shape)
    vectors = (rng.view(part.to(rng.device, rng.dtype)) for part in (x, recent, entries))
    return (*vectors, *(_on(rng.device, part) for part in rest), 1e-6)


def _on(device: torch.device, value: Any) -> Any:
    return value.to(device) if isinstance(value, Tensor) else value


compressed_attention_verification = Verification(
    compressed_attention, _reference, gate=GATE, compared=_those_there_are,
    draw=draw_attention, torch_is_peer=True, needs_rows=True,
)  # fmt: skip
