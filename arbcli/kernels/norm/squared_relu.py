"""Squared rectified linear unit: y = max(x, 0)**2.

Source: D. So et al., "Primer", https://arxiv.org/abs/2109.08668.
"""

from collections.abc import Iterator

import torch
from torch import Tensor

from arbcli.kernels.runtime._triton import tl, triton
from arbcli.kernels.runtime.arguments import Array
from arbcli.kernels.runtime.operation import Case, Gate, Operation
from arbcli.kernels.timed import Timed


def squared_relu_reference(x: Tensor) -> Tensor:
    """Compute y in float64."""
    return torch.where(x > 0, x.double() ** 2, 0)


def _squared_relu_torch(x: Tensor) -> Tensor:
    return x.float().relu().square().to(x.dtype)


@triton.jit
def _squared_relu_kernel(
    x_ptr, y_ptr, M, D, stride_xm, stride_xd, BLOCK_M: tl.constexpr, BLOCK_D: tl.constexpr
):  # fmt: skip
    m = (tl.program_id(0).to(tl.int64) * BLOCK_M + tl.arange(0, BLOCK_M))[:, None]
    d = (tl.program_id(1).to(tl.int64) * BLOCK_D + tl.arange(0, BLOCK_D))[None, :]
    mask = (m < M) & (d < D)
    x = tl.load(x_ptr + m * stride_xm + d * stride_xd, mask=mask, other=0).to(tl.float32)
    y = tl.where(x > 0, x * x, 0.0)
    tl.store(y_ptr + m * D + d, y.to(y_ptr.dtype.element_ty), mask=mask)


def _squared_relu_triton(x: Tensor) -> Tensor:
    rows, width = x.shape
    y = torch.empty(rows, width, dtype=x.dtype, device=x.device)
    if y.numel():
        grid = triton.cdiv(rows, 4), triton.cdiv(width, 256)
        _squared_relu_kernel[grid](x, y, rows, width, *x.stride(), BLOCK_M=4, BLOCK_D=256)
    return y


def _cases(device: torch.device, _group_size: int) -> Iterator[Case]:
    generator = torch.Generator().manual_seed(0)
    for rows, width in ((1, 1), (3, 33), (7, 300), (0, 9), (5, 0)):
        yield Case(f"{rows}x{width}", (torch.randn(rows, width, generator=generator).to(device),))
    x = torch.randn(40, 18, generator=generator).to(device)
    yield Case("9x20 strided", (x.T[::2, ::2],))


squared_relu = Operation(
    "squared_relu", _squared_relu_triton, _squared_relu_torch, squared_relu_reference, _cases,
    Gate(relative=1e-6, rounded=True, reason="a result in bf16 is rounded once"),
    {"x": Array("M, D")},
    timed=[Timed("8192x5632 bf16", lambda x: x.relu().square(), M=8192, D=5632)],
)  # fmt: skip
"""Compute the squared rectified linear unit.

Args:
    x: (M, D) float32 or bfloat16, any strides.

Returns:
    (M, D) like x.
"""
