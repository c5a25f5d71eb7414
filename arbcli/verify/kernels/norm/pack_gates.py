"""Verification of `arbcli.kernels.norm.pack_gates`."""

from functools import cache

import torch
from torch import Tensor

from arbcli.kernels.norm.pack_gates import pack_gates, pack_gates_torch
from arbcli.verify.verification import Verification


def pack_gates_reference(gate_up: Tensor) -> tuple[Tensor, Tensor]:
    """Compute `pack_gates` one number at a time."""
    width = gate_up.shape[1] // 2
    halves = [
        (half.to(torch.bfloat16).view(torch.int16).int() & 0xFFFF).tolist()
        for half in gate_up.cpu().split(width, dim=1)
    ]
    codes, bases = [], []
    for rows in zip(*halves, strict=True):
        base_row = [max(max(bits >> 7 & 255 for bits in row) - 15, 0) for row in rows]
        code = [
            [max((bits & 0x7FFF) - 128 * base, 0) for bits in row]
            for row, base in zip(rows, base_row, strict=True)
        ]
        low = [
            bits >> 15 << 7 | number & 127
            for row, numbers in zip(rows, code, strict=True)
            for bits, number in zip(row, numbers, strict=True)
        ]
        codes.append(low + [gate >> 7 | up >> 7 << 4 for gate, up in zip(*code, strict=True)])
        bases.append(base_row)
    tensors = (
        torch.tensor(numbers, dtype=torch.uint8).view(len(gate_up), columns)
        for numbers, columns in ((codes, 3 * width), (bases, 2))
    )
    code_tensor, base_tensor = (part.to(gate_up.device) for part in tensors)
    return code_tensor, base_tensor


def unpack_gates_reference(codes: Tensor, bases: Tensor) -> Tensor:
    """Decode codes and bases to (M, 2 D) float64."""
    width = codes.shape[1] // 3
    numbers = torch.empty(len(codes), 2 * width, dtype=torch.float64)
    for row, code_row, (base, base_up) in zip(numbers, codes.tolist(), bases.tolist(), strict=True):
        low, low_up, high = code_row[:width], code_row[width : 2 * width], code_row[2 * width :]
        gate = [_bfloat16(bits, byte % 16 + base) for bits, byte in zip(low, high, strict=True)]
        up = [
            _bfloat16(bits, byte // 16 + base_up) for bits, byte in zip(low_up, high, strict=True)
        ]
        row[:] = torch.tensor(gate + up, dtype=torch.float64)
    return numbers.to(codes.device)


@cache
def _bfloat16(low: int, exponent: int) -> float:
    """Return the bfloat16 number with this biased exponent, and sign and mantissa of `low`."""
    significand = low % 128 + (128 if exponent else 0)
    magnitude = significand * 2.0 ** (max(exponent, 1) - 134)
    return -magnitude if low > 127 else magnitude


def _all_numbers(like: Tensor) -> Tensor:
    """Return all finite numbers of bf16, in rows with both signs."""
    numbers = torch.arange(2**16).to(torch.int16).view(torch.bfloat16)
    numbers = numbers.view(2, 64, 512).transpose(0, 1).reshape(64, 1024)
    return numbers[numbers.isfinite().all(dim=1)].to(like)


pack_gates_verification = Verification(
    pack_gates, pack_gates_reference,
    changed={
        "zeros": {"gate_up": torch.zeros_like}, "all numbers": {"gate_up": _all_numbers},
        "apart": {"gate_up": lambda x: x * torch.exp2(-torch.arange(x.shape[1]).to(x) % 40)},
    },
    sizes={"W": "2 * k"},
    large_reference=pack_gates_torch,
)  # fmt: skip
