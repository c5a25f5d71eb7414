"""Dropout: y[m, k] = x[m, k] / (1 - rate) where h(key, m, k) >= 2**32 rate, else 0.

h is a counter-based random word, so that the mask is a function of the key and of the position of
an element. The backward applies the same function to the gradient, and so saves no mask.
"""

import numpy as np
import torch
from torch import Tensor

from arbcli.kernels.runtime import native
from arbcli.kernels.runtime.operation import Operation, tl, triton
from arbcli.kernels.update.random_bits import random_bits, random_words

_SIGN = -(2**31)


def _threshold(rate: float) -> int:
    """Return the smallest kept word, minus 2**31, so that signed words can be compared."""
    return min(round(rate * 2**32), 2**32 - 1) + _SIGN


def _factor(rate: float) -> float:
    """Return 1 / (1 - rate), rounded to float32."""
    return float(np.float32(1 / (1 - rate)))


def mask_constants(rate: float) -> dict[str, int | float]:
    """Return the constants of kernels that draw a mask: THRESHOLD and FACTOR."""
    return {"THRESHOLD": _threshold(rate), "FACTOR": _factor(rate)}


def _dropout_torch(x: Tensor, key: Tensor, rate: float) -> Tensor:
    rows, columns = (torch.arange(n, dtype=torch.int32, device=x.device) for n in x.shape)
    dropped = random_bits(key, rows, columns).bitwise_xor_(_SIGN) < _threshold(rate)
    return (x.float() * _factor(rate)).masked_fill_(dropped, 0).to(x.dtype)


def _dropout_native(x: Tensor, key: Tensor, rate: float) -> Tensor:
    x = native.as_rows(x)
    y = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    native.call(
        "dropout", x, x.stride(0), x.dtype == torch.bfloat16, int(key), _threshold(rate) - _SIGN,
        _factor(rate), y, *x.shape, native.threads_for(x.numel()),
    )  # fmt: skip
    return y


@triton.jit
def _dropout_kernel(
    x_ptr, key_ptr, y_ptr,
    M, D,
    stride_xm, stride_xd,
    THRESHOLD: tl.constexpr, FACTOR: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    offs_m = (tl.program_id(0).to(tl.int64) * BLOCK_M + tl.arange(0, BLOCK_M))[:, None]
    offs_d = (tl.program_id(1) * BLOCK_D + tl.arange(0, BLOCK_D))[None, :]
    mask = (offs_m < M) & (offs_d < D)
    x_ptrs = x_ptr + offs_m * stride_xm + offs_d.to(tl.int64) * stride_xd
    x = tl.load(x_ptrs, mask=mask, other=0).to(tl.float32)
    words = random_words(tl.load(key_ptr), offs_m, offs_d).to(tl.int32, bitcast=True)
    kept = (words ^ -2147483648) >= THRESHOLD
    y = tl.where(kept, x * FACTOR, 0.0)
    tl.store(y_ptr + offs_m * D + offs_d, y.to(y_ptr.dtype.element_ty), mask=mask)


def _dropout_triton(x: Tensor, key: Tensor, rate: float) -> Tensor:
    y = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    if y.numel():
        M, D = x.shape
        _dropout_kernel[(triton.cdiv(M, 16), triton.cdiv(D, 128))](
            x, key, y, M, D, *x.stride(),
            **mask_constants(rate), BLOCK_M=16, BLOCK_D=128,
        )  # fmt: skip
    return y


dropout = Operation(
    "dropout", _dropout_triton, _dropout_torch,
    "x: real[M, D]; key: int32[]; rate",
    native=_dropout_native, where=("0 <= rate < 1",),
)  # fmt: skip
"""Set random elements to 0, and divide the others by the share that is kept.

The mask is the same for all dtypes, strides, backends and devices.

Args:
    x: (M, D) float32 or bfloat16, any strides.
    key: int32 scalar tensor, from `stream_keys`.
    rate: probability that an element is dropped, at least 0 and below 1.

Returns:
    (M, D) in the dtype of x, contiguous; x times 1 / (1 - rate) rounded to float32, rounded to
    float32 and then to the dtype. A dropped element is 0, whatever its value.
"""
