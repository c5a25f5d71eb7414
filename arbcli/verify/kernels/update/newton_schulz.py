"""Verification of `arbcli.kernels.update.newton_schulz`."""

from collections.abc import Iterator
from functools import partial

import torch
from torch import Tensor

from arbcli.kernels.runtime._triton import INTERPRETED
from arbcli.kernels.runtime.arguments import normals
from arbcli.kernels.update.newton_schulz import (
    gram,
    gram_polynomial,
    gram_polynomial_triton,
    gram_triton,
)
from arbcli.verify.case_generator import CaseGenerator
from arbcli.verify.timed import MATRIX
from arbcli.verify.verification import Case, Gate, Timing, Verification


def gram_reference(x: Tensor) -> Tensor:
    """Compute the reference result of `gram`, in float64."""
    return torch.einsum("...ik,...jk->...ij", x.double(), x.double())


def gram_polynomial_reference(a: Tensor, alpha: float, beta: float, gamma: float) -> Tensor:
    """Compute the reference result of `gram_polynomial`, in float64."""
    a = a.double()
    square = torch.einsum("...ik,...kj->...ij", a, a)
    return alpha * torch.eye(a.shape[-1], device=a.device) + beta * a + gamma * square


def _gram_cases(device: torch.device, _group_size: int) -> Iterator[Case]:
    generator = torch.Generator().manual_seed(0)
    draw = normals(generator, device)
    for n, m in ((1, 1), (1, 33), (33, 17), (64, 64), (70, 123), (131, 40), (257, 65)):
        yield Case(f"{n}x{m}", (draw(n, m),))
    yield Case("3 of 37x50", (draw(3, 37, 50),))
    yield Case("40x96 transposed", (draw(96, 40).T,))
    yield Case("2 of 36x70 transposed", (draw(2, 70, 36).mT,))
    yield Case("35x41 strided", (draw(105, 83)[::3, 1::2],))
    yield Case("40x64 a row for all", (draw(1, 64).expand(40, 64),))
    yield Case("5x0 nothing to sum", (draw(5, 0),))
    yield Case("0x5 empty", (draw(0, 5),))
    yield Case("40x50 zeros", (draw(40, 50) * 0,))
    if not INTERPRETED:  # Hopper's large tiles, few and many for as many processors as a CPU has
        yield Case("776x8", (draw(776, 8),))
        yield Case("1160x8 transposed", (draw(8, 1160).T,))
    if device.type == "cuda":  # the interpreter's bf16 arithmetic is wrong
        few = ((33, 17), (384, 1024), (768, 2048), (3, 640, 321))
        for shape in (*few, (1544, 1000), (2048, 5632), (8, 2048, 64)):
            x = draw(*shape).bfloat16()
            label = " of ".join(["x".join(map(str, shape[-2:])), *map(str, shape[:-2])])
            yield Case(f"{label} bf16", (x,))
        x = draw(2048, 640).bfloat16()
        yield Case("640x2048 bf16 transposed", (x.T,))


def _polynomial_cases(device: torch.device, group_size: int) -> Iterator[Case]:
    for case in _gram_cases(device, group_size):
        (x,) = case.inputs
        if x.numel():
            a = gram_reference(x / torch.linalg.matrix_norm(x, dim=(-2, -1), keepdim=True))
            a = a.nan_to_num().to(x.dtype)
            a = a.mT if "transposed" in case.label else a
            yield Case(case.label, (a, 3.4445, -4.775, 2.0315))
    a = a[:70, :70].float()
    yield Case(f"{len(a)}x{len(a)} square alone", (a, 0.0, 0.0, 1.0))


_GATE = Gate(
    relative=1e-5, peer_slack=0.1,
    reason="float32 sums; in bf16 no worse than torch's product by 10 %",
)  # fmt: skip


def _gram_timings(device: torch.device, _group_size: int) -> Iterator[Timing]:
    for n, m in ((768, 768), (768, 2048), (2048, 5632), MATRIX[::-1]):
        x = torch.randn(n, m, device=device, dtype=torch.bfloat16)
        peer = partial(gram.torch, x)
        yield Timing(f"{n}x{m} bf16", (x,), gram_triton, peer, "cuBLAS", flops=2 * n * n * m)


def _polynomial_timings(device: torch.device, _group_size: int) -> Iterator[Timing]:
    for n in (768, 2048):
        x = torch.randn(n, n, device=device, dtype=torch.bfloat16)
        inputs = (((x + x.mT) / (4 * n) ** 0.5), 3.4445, -4.775, 2.0315)
        peer = partial(gram_polynomial.torch, *inputs)
        yield Timing(
            f"{n}x{n} bf16", inputs, gram_polynomial_triton, peer, "cuBLAS", flops=2 * n**3
        )


def _draw(rng: CaseGenerator, group_size: int, m: int, n: int, k: int) -> tuple:
    stack = (1 + rng.below(3),) if rng.chance(0.3) else ()
    return (rng.reals(*stack, min(n, k), max(n, k)),)


def _draw_symmetric(rng: CaseGenerator, group_size: int, m: int, n: int, k: int) -> tuple:
    (x,) = _draw(rng, group_size, m, n, k)
    x = x.float() / max(n, k) ** 0.5
    a = x @ x.mT
    return rng.view(((a + a.mT) / 4).to(rng.dtype)), 3.4445, -4.775, 2.0315


gram_verification = Verification(
    gram, gram_reference, _gram_cases, _GATE, triton=gram_triton, draw=_draw, torch_is_peer=True,
    needs_rows=False, timings=_gram_timings,
    not_verified=("kernels of the matrix library, which computes the other shapes",),
)  # fmt: skip
gram_polynomial_verification = Verification(
    gram_polynomial, gram_polynomial_reference, _polynomial_cases, _GATE,
    triton=gram_polynomial_triton, draw=_draw_symmetric, torch_is_peer=True, needs_rows=False,
    timings=_polynomial_timings,
)  # fmt: skip
