"""Products with a packed matrix: y = x @ w.T, and its gradient grad_x = grad_y @ w.

The weights are decoded to a temporary buffer, and torch multiplies. Generation steps, which have
few rows, multiply prepacked matrices instead: see `prepacked`.
"""

from torch import Tensor

from arbcli.kernels.codec.decode_digits import decode_digits
from arbcli.kernels.codec.decode_weight import decode_weight_triton
from arbcli.kernels.codec.packed import Packed
from arbcli.kernels.runtime.operation import Operation


def _ternary_matmul_torch(x: Tensor, packed: Packed) -> Tensor:
    return x @ decode_digits(packed, x.dtype).T


def _ternary_matmul_grad_x_torch(grad_y: Tensor, packed: Packed) -> Tensor:
    return grad_y @ decode_digits(packed, grad_y.dtype)


def _ternary_matmul_triton(x: Tensor, packed: Packed) -> Tensor:
    return x @ decode_weight_triton(packed, x.dtype).T


def _ternary_matmul_grad_x_triton(grad_y: Tensor, packed: Packed) -> Tensor:
    return grad_y @ decode_weight_triton(packed, grad_y.dtype)


ternary_matmul = Operation(
    "ternary_matmul", _ternary_matmul_triton, _ternary_matmul_torch,
    "x: real[M, K]; packed: packed[N, K]",
)  # fmt: skip
"""Multiply activations by a packed matrix.

y[m, n] = sum over k of x[m, k] * w[n, k], accumulated in float32

Args:
    x: (M, K) bfloat16 or float32, any strides.
    packed: w, N rows by K weights.

Returns:
    (M, N) in the dtype of `x`.
"""
ternary_matmul_grad_x = Operation(
    "ternary_matmul_grad_x", _ternary_matmul_grad_x_triton, _ternary_matmul_grad_x_torch,
    "grad_y: real[M, N]; packed: packed[N, K]",
)  # fmt: skip
"""Compute the gradient of x of `ternary_matmul`.

grad_x[m, k] = sum over n of grad_y[m, n] * w[n, k], accumulated in float32

Args:
    grad_y: (M, N) bfloat16 or float32, any strides.
    packed: w, N rows by K weights.

Returns:
    (M, K) in the dtype of `grad_y`.
"""
