"""Verification of `arbcli.families.latent.kernels.decode_latent`."""

import torch
from torch import Tensor

from arbcli.families.latent.kernels.decode_latent import SHARED, decode_latent
from arbcli.kernels.runtime.texts import text_by_text
from arbcli.verify.kernels.attention.rotary_norm import rotate_reference
from arbcli.verify.verification import CaseGenerator, Verification, float32_sums


@text_by_text(5, *SHARED)
def decode_latent_reference(
    row: Tensor, up: Tensor, latent: Tensor, rotated: Tensor, lengths: Tensor, position: Tensor,
    cos: Tensor, sin: Tensor, scale: float, eps: float,
) -> tuple[Tensor, ...]:  # fmt: skip
    """Compute the result and the rings of `decode_latent` in float64, one head at a time."""
    dtype, p, (window, size), heads = row.dtype, int(position), latent.shape, lengths.shape[1]
    rotary, dim = rotated.shape[1], len(row) - size - rotated.shape[1]
    width, slot = dim // heads, p % window
    row, up, latent, rotated, lengths = (x.double() for x in (row, up, latent, rotated, lengths))

    def rotate_here(x: Tensor) -> Tensor:
        rotated = rotate_reference(x, cos[p], sin[p])
        return rotated.to(dtype).double()  # rounded like stored values

    latent[slot], rotated[slot] = row[dim : dim + size], rotate_here(row[dim + size :])
    n = latent / (latent.square().mean(1, keepdim=True) + eps).sqrt()
    seen, y = min(p + 1, window), torch.empty(heads, width, dtype=torch.float64, device=row.device)
    for head in range(heads):
        q = row[head * width : (head + 1) * width]
        q = torch.cat([q[: width - rotary], rotate_here(q[width - rotary :])])
        q = q / (q.square().mean() + eps).sqrt()
        w = up[head * (2 * width - rotary) : (head + 1) * (2 * width - rotary)]
        keys = torch.cat([n @ w[: width - rotary].T, rotated], dim=1)
        lengths[slot, head] = 1 / (keys[slot].square().mean() + eps).sqrt()
        score = keys[:seen] @ q * lengths[:seen, head] * scale
        y[head] = torch.softmax(score, 0) @ n[:seen] @ w[width - rotary :].T
    return y, latent, rotated, lengths


def _draw_rings(rng: CaseGenerator, group_size: int, m: int, n: int, k: int) -> tuple:
    heads, half, still = 1 + rng.integer(3), 1 + min(k // 8, 20), rng.integer(40)
    width, size, position = 2 * half + still, 1 + min(k, 300), rng.integer(3 * n)
    angle = rng.reals(position + 1, half, dtype=torch.float32).contiguous()
    shapes = ((1, heads * width + size + 2 * half), (heads * (width + still), size),
              (n, size), (n, 2 * half))  # fmt: skip
    row, *others = (rng.reals(*shape).contiguous() for shape in shapes)
    others[0] *= size**-0.5  # keys about as long as queries: exp of no score overflows
    lengths = rng.reals(n, heads, dtype=torch.float32).abs().clamp(max=2).contiguous()
    inputs = (
        row[0],
        *others,
        lengths,
        rng.scalar(position),
        angle.cos(),
        angle.sin(),
        width**-0.5,
        0.1,
    )
    return rng.texts(inputs, 5, *SHARED)


decode_latent_verification = Verification(
    decode_latent, decode_latent_reference,
    gate=float32_sums("of up to 512 products", "no worse than torch's by 10 %"),
    compared=("latent", "rotated", "lengths"), draw=_draw_rings, torch_is_peer=True,
    needs_rows=False,
)  # fmt: skip
