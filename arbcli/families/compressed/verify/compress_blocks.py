"""Verification of `arbcli.families.compressed.kernels.compress_blocks`."""

from collections.abc import Iterator

import torch
from torch import Tensor

from arbcli.families.compressed.kernels.compress_blocks import (
    compress_blocks,
    compress_blocks_backward,
    grad_beta,
)
from arbcli.verify.case_generator import CaseGenerator
from arbcli.verify.kernels.attention.rotary_norm import normalise_reference, rotate_reference
from arbcli.verify.timed import Timed
from arbcli.verify.verification import Case, Gate, Verification, cases_of


def compress_blocks_reference(
    x: Tensor, beta: Tensor, cos: Tensor, sin: Tensor, heads: int, eps: float
) -> tuple[Tensor, Tensor, Tensor]:
    """Compute `compress_blocks` in float64, one byte and one block at a time."""
    x, m = x.double(), beta.shape[1]
    batch, length, _ = x.shape
    x, beta = x.view(batch, length, 3, heads, -1), beta.double().view(heads, -1, m)

    def rotated(v: Tensor, t: int) -> Tensor:
        return rotate_reference(v, cos[t], sin[t])

    normal = normalise_reference(x[:, :, 0], eps)
    recent = torch.stack([rotated(normal[:, t], t) for t in range(length)], dim=1)
    still, entries = [], []
    for j in range(length // m):
        weights = torch.stack([(x[:, j * m + i, 2] + beta[..., i]).exp() for i in range(m)])
        values = torch.stack([x[:, j * m + i, 1] for i in range(m)])
        mixed = (weights * values).sum(dim=0) / weights.sum(dim=0)
        still.append(normalise_reference(mixed, eps))
        entries.append(rotated(still[-1], j * m))
    if not still:
        none = recent[:, :0]
        return recent, none, none
    return recent, torch.stack(entries, dim=1), torch.stack(still, dim=1)


def compress_blocks_backward_reference(
    grad_recent: Tensor, grad_entries: Tensor, x: Tensor, beta: Tensor, cos: Tensor, sin: Tensor,
    heads: int, eps: float,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """Compute `compress_blocks_backward` by autograd of the reference."""
    x, beta = (part.double().requires_grad_() for part in (x, beta))
    with torch.enable_grad():
        recent, entries, _ = compress_blocks_reference(x, beta, cos, sin, heads, eps)
        total = (recent * grad_recent).sum() + (entries * grad_entries).sum()
    grad_x, grad_beta = torch.autograd.grad(total, (x, beta), allow_unused=True)
    return grad_x, torch.zeros_like(beta) if grad_beta is None else grad_beta


def rounded_block_gradients(
    grad_recent: Tensor, grad_entries: Tensor, x: Tensor, beta: Tensor, cos: Tensor, sin: Tensor,
    heads: int, eps: float,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """Compute `compress_blocks_backward`, summing rounded gate gradients to that of beta.

    The gradient of a bias after a bf16 product is rounded in the same way.
    """
    grads = compress_blocks_backward.torch(grad_recent, grad_entries, x, beta, cos, sin, heads, eps)
    return grads[0], grad_beta(grads[0], beta)


def _draw(device: torch.device) -> Iterator[tuple[str, tuple]]:
    generator = torch.Generator().manual_seed(0)
    shapes = [(1, 1, 1, 2, 3), (2, 13, 2, 6, 4), (1, 21, 1, 34, 7), (3, 8, 3, 4, 2)]
    dtypes = [torch.float32]
    if device.type == "cuda":  # the interpreter's bf16 arithmetic is wrong
        shapes += [(2, 301, 1, 128, 4), (2, 301, 1, 128, 128), (1, 70, 2, 512, 4)]
        dtypes += [torch.bfloat16]
    for batch, length, heads, width, m in shapes:
        x = torch.randn(batch, length, 5 * heads * width, generator=generator)
        beta = torch.randn(heads * width, m, generator=generator).to(device)
        angle = (7 * torch.randn(length, width // 2, generator=generator)).to(device)
        for dtype in dtypes:
            label = f"{batch}x{length} of {heads}x{width} by {m}"
            label += " bf16" if dtype == torch.bfloat16 else ""
            rows = x.to(device, dtype)[..., 2 * heads * width :]
            yield label, (rows, beta, angle.cos(), angle.sin(), heads, 1e-6)


def _backward_cases(device: torch.device, _group_size: int) -> Iterator[Case]:
    generator = torch.Generator().manual_seed(1)
    for label, inputs in _draw(device):
        x, beta, *_, heads, _ = inputs
        vector = heads, x.shape[2] // 3 // heads
        grads = [
            torch.randn(len(x), count, *vector, generator=generator).to(device)
            for count in (x.shape[1], x.shape[1] // beta.shape[1])
        ]
        yield Case(label, (*grads, *inputs))


_GATE = Gate(
    relative=1e-5, peer_slack=0.5,
    reason="float32 sums over a block; in bf16 what the gradient of beta adds up is rounded",
)  # fmt: skip


def _draw_blocks(rng: CaseGenerator, group_size: int, m: int, n: int, k: int) -> tuple:
    heads, half, ratio = rng.pick((1, 2)), 1 + min(k, 40), 2 + rng.below(7)
    batch, length = rng.pick((1, 2)), 1 + min(m, 60)
    x = rng.reals(batch, length, 6 * heads * half)
    beta = rng.reals(2 * heads * half, ratio, dtype=torch.float32)
    angle = rng.reals(length, half, dtype=torch.float32)
    return x, beta, angle.cos(), angle.sin(), heads, 1e-6


def _draw_backward(rng: CaseGenerator, group_size: int, m: int, n: int, k: int) -> tuple:
    inputs = _draw_blocks(rng, group_size, m, n, k)
    recent, entries, _ = compress_blocks.torch(*inputs)
    return *(rng.reals(*t.shape, dtype=torch.float32) for t in (recent, entries)), *inputs


_TIMED = [
    Timed(
        f"16384 bytes by {m} bf16",
        B=1,
        T=16384,
        X=384,
        M=m,
        heads=1,
        eps=1e-6,
        x=lambda rng, *shape: rng.reals(1, 16384, 1920)[..., 1536:],
        grad_recent=torch.float32,
        grad_entries=torch.float32,
    )
    for m in (4, 128)
]
compress_blocks_verification = Verification(
    compress_blocks, compress_blocks_reference, cases_of(_draw), _GATE, draw=_draw_blocks,
    torch_is_peer=True, needs_rows=True, timed=_TIMED,
)  # fmt: skip
compress_blocks_backward_verification = Verification(
    compress_blocks_backward, compress_blocks_backward_reference, _backward_cases, _GATE,
    draw=_draw_backward, peer=rounded_block_gradients, needs_rows=True, timed=_TIMED,
)  # fmt: skip
