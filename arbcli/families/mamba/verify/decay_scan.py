"""Verification of `arbcli.families.mamba.kernels.decay_scan`."""

import torch
from torch import Tensor

from arbcli.families.mamba.kernels.decay_scan import decay_scan
from arbcli.verify.verification import CaseGenerator, Gate, Verification, filled


def decay_scan_reference(q: Tensor, k: Tensor, v: Tensor, g: Tensor, reverse: bool) -> Tensor:
    """Compute the reference result of `decay_scan`, a position at a time in float64."""
    q, k, v, g = (part.double() for part in (q, k, v, g))
    length, y = q.shape[1], torch.zeros(v.shape, dtype=torch.float64, device=v.device)
    state = q.new_zeros(())
    for t in reversed(range(length)) if reverse else range(length):
        step = t + 1 if reverse else t
        if 0 <= step < length:
            state = state * g[:, step, :, None, None].exp()
        state = state + k[:, t, :, :, None] * v[:, t, :, None, :]
        y[:, t] = (q[:, t, :, :, None] * state).sum(dim=2)
    return y


def scan_in_bf16(q: Tensor, k: Tensor, v: Tensor, g: Tensor, reverse: bool) -> Tensor:
    """Attend with scores and decays rounded to bfloat16, as torch would without a kernel."""
    c = g.double().cumsum(1).transpose(1, 2)
    apart = c[..., :, None] - c[..., None, :]
    if reverse:
        apart = -apart
    ones = torch.ones(apart.shape[-2:], dtype=torch.bool, device=g.device)
    seen = ones.triu() if reverse else ones.tril()
    weight = apart.masked_fill(~seen, -torch.inf).exp().float()
    q, k, v = (part.transpose(1, 2) for part in (q, k, v))
    scores = ((q @ k.mT).float() * weight).to(q.dtype)
    return (scores @ v).transpose(1, 2)


def _draw_decays(rng: CaseGenerator, *shape: int) -> Tensor:
    decays = -rng.reals(*shape, dtype=torch.float32).square()
    slow = rng.plain or rng.chance(0.5)  # so that a piece still matters two pieces later
    return rng.view(decays * (0.02 if slow else 1.0))


decay_scan_verification = Verification(
    decay_scan, decay_scan_reference,
    shapes=((0, 3, 1), (150, 9, 1)),
    changed={
        "heads alike": dict.fromkeys("qk", lambda x: x[:, :, :1].expand_as(x)),
        "forgets at once": {"g": filled(-100)}, "forgets nothing": {"g": torch.zeros_like},
    },
    gate=Gate(
        relative=1e-5, peer_slack=1.0,
        reason="float32 sums over the sequence; in bf16 scores and states are rounded, peers' too"
    ),
    sizes={"B": (1, 2), "T": "m", "H": (1, 3), "P": "min(n, 70)", "N": (1, 9, 32)},
    peer=scan_in_bf16, values={"g": _draw_decays, "reverse": (False, True)},
)  # fmt: skip
