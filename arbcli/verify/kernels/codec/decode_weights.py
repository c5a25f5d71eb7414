"""Verification of `arbcli.kernels.codec.decode_weights`."""

from collections.abc import Callable

import torch
from torch import Tensor

from arbcli.kernels.codec.decode_digits import decode_digits_torch
from arbcli.kernels.codec.decode_weights import decode_weights_triton
from arbcli.kernels.codec.packed import Packed
from arbcli.kernels.runtime.operation import Operation
from arbcli.verify.kernels.codec.decode_digits import rounded_float32
from arbcli.verify.kernels.codec.decode_weight import decode_weight_verification
from arbcli.verify.verification import CaseGenerator, Verification


def _map_matrices(decode: Callable[..., Tensor]) -> Callable[..., tuple[Tensor, ...]]:
    def run_all(*matrices: Packed) -> tuple[Tensor, ...]:
        return tuple(map(decode, matrices))

    return run_all


def _decode(*matrices: Packed) -> tuple[Tensor, ...]:
    return tuple(decode_weights_triton([*matrices]))


def _decode_in_one_launch(*matrices: Packed) -> tuple[Tensor, ...]:
    decoded = iter(decode_weights_triton([*matrices], torch.float32))

    def decode_next(matrix: Packed, dtype: torch.dtype = torch.float32) -> Tensor:
        return next(decoded)

    return tuple(map(rounded_float32(decode_next), matrices))


def _draw(rng: CaseGenerator, group_size: int, m: int, n: int, k: int) -> tuple:
    shapes = [(n, k), *((1 + rng.integer(n), 1 + rng.integer(k)) for _ in range(rng.integer(4)))]
    return tuple(rng.packed(*shape, group_size, 127, "trit") for shape in shapes)


decode_weights_verification = Verification(
    Operation("decode_weights", _decode, _map_matrices(rounded_float32(decode_digits_torch))),
    _map_matrices(decode_weight_verification.reference), triton=_decode_in_one_launch, draw=_draw,
    needs_rows=False,
    uses_scales=True, scale_path=decode_weight_verification.scale_path,
)  # fmt: skip
