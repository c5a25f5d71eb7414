"""Verification of `arbcli.families.hnet.kernels.route_position`."""

import torch
from torch import Tensor

from arbcli.families.hnet.kernels.route_position import ROUTERS, route_position_, take_chunk_
from arbcli.kernels.runtime.texts import stacked_texts, text_by_text
from arbcli.verify.verification import CaseGenerator, Verification, filled, float32_sums


@text_by_text(7)
def route_position_reference(
    router: str, x: Tensor, rows: Tensor, mean: Tensor, last: Tensor, byte: Tensor, ids: Tensor,
    encoder: Tensor, decoder: Tensor, length: int, eps: float, handle: Tensor | None,
    active: Tensor | None = None,
) -> tuple[Tensor, ...]:  # fmt: skip
    """Compute the results and buffers of `route_position_`, in float64.

    p, a small difference of large numbers, is returned as 1 + p, and `begins` as a float.
    """
    width, position, goes = len(x), int(encoder), 1 if active is None else int(active)
    previous_last, p = last.double(), float(position == 0)
    last = last.clone()
    if router == "learned":
        q, k = rows.double()[: 2 * width].split(width)
        x = x.double()
        n = x / (x.square().mean() + eps).sqrt()
        u, v = last.double()[:width] + last.double()[width:], n + k
        lengths = ((u * u).sum() + 1e-6).sqrt() * ((v * v).sum() + 1e-6).sqrt()
        if position:
            p = float((1 - (u * v).sum() / lengths) / 2)
        last = torch.cat((n, q))
    elif router == "every":
        p = float(position % length == 0)
    elif position:
        before, now = (int(part) in (9, 10, 11, 12, 13, 32) for part in (byte, ids))
        p = float(before and not now)
    return (
        torch.tensor([1 + p], device=x.device),
        torch.tensor([int(p > 0.5) * goes], device=x.device),
        rows.double()[-width:] + mean, last if goes else previous_last,
        ids.clone() if goes or router != "space" else byte.clone(), encoder + goes, encoder.clone(),
    )  # fmt: skip


def take_chunk_reference(
    z: Tensor, p: Tensor, residual: Tensor, mean: Tensor, y: Tensor, position: Tensor | None,
    begins: Tensor | None = None,
) -> tuple[Tensor, ...]:  # fmt: skip
    """Compute the buffers of `take_chunk_`, in float64."""
    one = z.dim() == 1
    share = p.double().clamp(1e-4, 1 - 1e-4)
    smoothed = share * z.double() + (1 - share) * mean
    taken = torch.ones_like(p) if begins is None else begins[:, None]
    y = torch.where(taken > 0, residual.double() + smoothed, y.double())
    mean = torch.where(taken > 0, smoothed, mean.double())
    if position is None:
        return y, mean
    return y, mean, position + (1 if one or begins is None else begins)


_GATE = float32_sums("over a row", "one rounding, as torch has")


def _routed(inputs: tuple, results: tuple[Tensor, Tensor, Tensor]) -> tuple[Tensor, ...]:
    router, _, _, _, last, byte, ids, encoder, decoder, *_ = inputs
    p, begins, y = results
    return 1 + p, begins.long(), y, last, byte if router == "space" else ids, encoder, decoder


def _draw_route(rng: CaseGenerator, _group_size: int, m: int, n: int, k: int) -> tuple:
    router = rng.pick(ROUTERS)
    texts = [_draw_text(rng, router, m, n, k) for _ in range(3 if rng.chance(0.4) else 1)]
    if len(texts) == 1:
        return texts[0]
    return *stacked_texts(texts), rng.integers(0, 1, 3, dtype=torch.int32).contiguous()


def _draw_text(rng: CaseGenerator, router: str, m: int, n: int, k: int) -> tuple:
    rows = rng.reals((3 if router == "learned" else 1) * k).contiguous()
    x, last = rng.reals(k).contiguous(), rng.reals(2 * k).contiguous()
    mean = rng.reals(k, dtype=torch.float32).contiguous()
    byte, ids = (torch.tensor([[rng.integer(48)]], device=rng.device) for _ in range(2))
    places = rng.scalar(rng.pick((0, 1, m, 4 * n))), rng.scalar(7)
    return router, x, rows, mean, last, byte, ids, *places, 4, 0.1, None


route_position_verification = Verification(
    route_position_, route_position_reference, gate=_GATE, compared=_routed,
    draw=_draw_route, torch_is_peer=True,
    values={"length": (2, 4, 7), "eps": (0.1,)},
)  # fmt: skip
take_chunk_verification = Verification(
    take_chunk_, take_chunk_reference, gate=_GATE,
    changed={f"p {p}": {"p": filled(p)} for p in (0.0, 1.0)}, compared=("y", "mean", "position"),
    sizes={"T": ("()", "(m,)")}, torch_is_peer=True, needs_rows=False,
    values={"p": CaseGenerator.shares, "position": (0, 99), "begins": (0, 1)},
)  # fmt: skip
