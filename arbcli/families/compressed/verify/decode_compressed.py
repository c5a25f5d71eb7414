"""Verification of `arbcli.families.compressed.kernels.decode_compressed`."""

import torch
from torch import Tensor
from torch.nn import functional

from arbcli.families.compressed.kernels.decode_compressed import SHARED, decode_compressed
from arbcli.kernels.attention.eight_bits import quantise_entries
from arbcli.kernels.runtime.arguments import normals
from arbcli.kernels.runtime.texts import text_by_text
from arbcli.model.parts.cached import FORMATS
from arbcli.verify.kernels.attention.eight_bits import decode_entries_reference
from arbcli.verify.kernels.attention.rotary_norm import normalise_reference, rotate_reference
from arbcli.verify.verification import CaseGenerator, Verification, float32_sums


@text_by_text(5, *SHARED)
def decode_compressed_reference(
    x: Tensor, recent: Tensor, entries: Tensor, choice: Tensor | None, sink: Tensor,
    position: Tensor, cos: Tensor, sin: Tensor, semaphores: Tensor, m: int, max_entries: int,
    eps: float, recent_exponents: Tensor | None = None, entry_exponents: Tensor | None = None,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """Compute the result and the `semaphores` of `decode_compressed`, in float64."""
    p, (heads, width) = int(position), x.shape
    if recent_exponents is not None and entry_exponents is not None:
        recent = decode_entries_reference(recent, recent_exponents)
        entries = decode_entries_reference(entries, entry_exponents)
    x, recent, entries = (part.double() for part in (x, recent, entries))
    complete = (p + 1) // m
    seen = range(max(0, complete - max_entries), complete) if choice is None else choice.tolist()
    numbers = [j for j in seen if j >= 0]
    rows = []
    for head in range(heads):
        kv_head = head // (heads // recent.shape[1])
        near = range(max(0, p - len(recent) + 1), p + 1)
        keys = torch.stack(
            [entries[j % len(entries), kv_head] for j in numbers]
            + [recent[i % len(recent), kv_head] for i in near]
        )
        q = rotate_reference(normalise_reference(x[head], eps), cos[p], sin[p])
        weights = (keys @ q / width**0.5).exp()
        y = weights / (weights.sum() + sink[head].double().exp()) @ keys
        rows.append(rotate_reference(y, cos[p], -sin[p]))
    return torch.stack(rows), torch.zeros_like(semaphores)


def attention_of_byte(
    generator: torch.Generator, device: torch.device, dtype: torch.dtype, heads: int, kv: int,
    width: int, ring: int, slots: int, size: int, m: int, max_entries: int, position: int,
) -> tuple:  # fmt: skip
    """Draw the inputs of `decode_compressed`; `size` 0 stands for no selection."""
    normal = normals(generator)
    vectors = [functional.rms_norm(normal(n, kv, width), (width,)) for n in (ring, slots)]
    complete, choice = (position + 1) // m, None
    if size:
        seen = torch.arange(max(0, complete - max_entries), complete)
        picked = seen[torch.randperm(len(seen), generator=generator)[: size - 1]].sort().values
        choice = functional.pad(picked, (0, size - len(picked)), value=-1).int().to(device)
    angle = (7 * normal(position + 1, width // 2)).to(device)
    place = torch.tensor(position, dtype=torch.int32, device=device)
    semaphores = torch.zeros(heads, dtype=torch.int32, device=device)
    tensors = (part.to(device, dtype) for part in (normal(heads, width), *vectors))
    sink = normal(heads).to(device)
    rest = place, angle.cos(), angle.sin(), semaphores, m, max_entries, 0.1
    return (*tensors, choice, sink, *rest)


def _draw(rng: CaseGenerator, group_size: int, m: int, n: int, k: int) -> tuple:
    ratio, max_entries, kv = 2 + rng.integer(4), 1 + rng.integer(60), rng.pick((1, 2))
    inputs = attention_of_byte(
        rng.seeded(), rng.device, rng.dtype, kv * rng.pick((1, 3, 8)), kv,
        2 * (1 + min(k, 63)), 1 + rng.integer(70), max_entries + 1, rng.pick((0, 2, 9, 40)), ratio,
        max_entries, rng.integer(2 * max_entries * ratio),
    )  # fmt: skip
    if rng.chance(0.3):
        stored = rng.pick((*FORMATS.values(),))
        codes, exponents = zip(*(quantise_entries(x, stored) for x in inputs[1:3]), strict=True)
        inputs = (inputs[0], *codes, *inputs[3:], *exponents)
    return rng.texts(inputs, 5, *SHARED)


decode_compressed_verification = Verification(
    decode_compressed, decode_compressed_reference,
    gate=float32_sums("", "no worse than torch by 10 %"),
    compared=("semaphores",), draw=_draw, torch_is_peer=True, needs_rows=False,
)  # fmt: skip
