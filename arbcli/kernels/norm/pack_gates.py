"""Pack gate and up of an MLP to 12 bits per number, to be kept for the backward pass.

A bfloat16 number has a sign, eight bits of exponent and seven of mantissa. The numbers of a row
have few exponents, so each keeps four bits of it, counted from a base for gate and one for up:

    base = max(largest exponent - 15, 0)
    code = max(128 exponent + mantissa - 128 base, 0), in 11 bits

All bits of a number are kept if it is at least 2**-15 of the largest power of two in its half of
the row. Smaller ones become the smallest that has a code: an error of at most 2**-15 of that power.

    codes   sign and mantissa of gate, D bytes; those of up, D bytes;
            exponents of gate in the low and of up in the high half of D bytes
    bases   of gate and of up

Reason: both halves of a byte belong to the same column, so that a thread writes whole bytes. A base
    of fewer columns would need exchanges between threads.
"""

import torch
from torch import Tensor

from arbcli.kernels.runtime.backend import row_chunks
from arbcli.kernels.runtime.operation import Operation, tl, triton


def pack_gates_torch(gate_up: Tensor) -> tuple[Tensor, Tensor]:
    """Compute `pack_gates` with torch."""
    width = gate_up.shape[1] // 2
    codes, bases = _new_packed(gate_up)
    for part in row_chunks(gate_up):
        bits = gate_up[part].to(torch.bfloat16).view(torch.int16).unflatten(1, (2, width)).int()
        size = bits & 0x7FFF
        base = ((size.amax(dim=2, keepdim=True) >> 7) - 15).clamp(min=0)
        code = (size - (base << 7)).clamp(min=0)
        codes[part, : 2 * width] = ((bits >> 8) & 128 | code & 127).flatten(1)
        codes[part, 2 * width :] = code[:, 0] >> 7 | code[:, 1] >> 7 << 4
        bases[part] = base[:, :, 0]
    return codes, bases


def unpack_gates(codes: Tensor, bases: Tensor) -> Tensor:
    """Return gate and up, (M, 2 D) bfloat16, from the results of `pack_gates`."""
    width = codes.shape[1] // 3
    low, high = codes[:, : 2 * width].unflatten(1, (2, width)).int(), codes[:, 2 * width :].int()
    code = torch.stack((high & 15, high >> 4), dim=1) << 7 | low & 127
    bits = code + (bases.int()[:, :, None] << 7) | (low & 128) << 8
    return bits.to(torch.int16).view(torch.bfloat16).flatten(1)


@triton.jit
def _sizes_of(x, ROUND: tl.constexpr):
    """Return 128 exponent + mantissa of a float32 tile of bfloat16 numbers; of others, rounded."""
    bits = x.to(tl.int32, bitcast=True)
    if ROUND:
        bits += 0x7FFF + ((bits >> 16) & 1)
    return (bits >> 16) & 0x7FFF


@triton.jit
def _bases_of(sizes):
    """Find the base of each row from its largest size."""
    return tl.maximum((sizes >> 7) - 15, 0)


@triton.jit
def _store_packed(codes_ptr, gate, up, base, base_up, offs_m, offs_d, D, ROUND: tl.constexpr):
    """Store the codes of a tile of gate and up, [1, BLOCK_D] float32; bases are [1]."""
    code = tl.maximum(_sizes_of(gate, ROUND) - (base << 7)[:, None], 0)
    code_up = tl.maximum(_sizes_of(up, ROUND) - (base_up << 7)[:, None], 0)
    sign = (gate.to(tl.int32, bitcast=True) >> 24) & 128
    sign_up = (up.to(tl.int32, bitcast=True) >> 24) & 128
    ptrs, mask = codes_ptr + offs_m * (3 * D) + offs_d[None, :], (offs_d < D)[None, :]
    tl.store(ptrs, (sign | (code & 127)).to(tl.uint8), mask=mask)
    tl.store(ptrs + D, (sign_up | (code_up & 127)).to(tl.uint8), mask=mask)
    tl.store(ptrs + 2 * D, ((code >> 7) | ((code_up >> 3) & 240)).to(tl.uint8), mask=mask)


@triton.jit
def load_packed(codes_ptr, bases_ptr, offs_m, offs_d, mask, M, D):
    """Load a tile of gate and up as float32, 0 where masked."""
    ptrs = codes_ptr + offs_m * (3 * D) + offs_d[None, :]
    low = tl.load(ptrs, mask=mask, other=0).to(tl.int32)
    low_up = tl.load(ptrs + D, mask=mask, other=0).to(tl.int32)
    high = tl.load(ptrs + 2 * D, mask=mask, other=0).to(tl.int32)
    base = tl.load(bases_ptr + offs_m * 2, mask=offs_m < M, other=0).to(tl.int32)
    base_up = tl.load(bases_ptr + offs_m * 2 + 1, mask=offs_m < M, other=0).to(tl.int32)
    gate = _unpack(low, ((high & 15) << 7) + (base << 7))
    up = _unpack(low_up, ((high >> 4) << 7) + (base_up << 7))
    return tl.where(mask, gate, 0.0), tl.where(mask, up, 0.0)


@triton.jit
def _unpack(low, exponent):
    """Build float32 from signs and mantissas, and from 128 times the exponents."""
    size = exponent + (low & 127)
    return ((size << 16) | ((low & 128) << 24)).to(tl.float32, bitcast=True)


@triton.jit
def _pack_gates_kernel(
    x_ptr, codes_ptr, bases_ptr,
    D,
    stride_xm, stride_xd,
    ROUND: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    """Pack a row."""
    offs_m = tl.program_id(0).to(tl.int64) + tl.zeros((1, 1), tl.int64)
    maximum, maximum_up = tl.zeros((1,), tl.int32), tl.zeros((1,), tl.int32)
    for start in range(0, D, BLOCK_D):
        offs_d = start + tl.arange(0, BLOCK_D)
        gate, up = _load(x_ptr, offs_m, offs_d, D, stride_xm, stride_xd)
        maximum = tl.maximum(maximum, tl.max(_sizes_of(gate, ROUND), axis=1))
        maximum_up = tl.maximum(maximum_up, tl.max(_sizes_of(up, ROUND), axis=1))
    base, base_up = _bases_of(maximum), _bases_of(maximum_up)
    tl.store(bases_ptr + offs_m * 2, base[:, None].to(tl.uint8))
    tl.store(bases_ptr + offs_m * 2 + 1, base_up[:, None].to(tl.uint8))
    for start in range(0, D, BLOCK_D):
        offs_d = start + tl.arange(0, BLOCK_D)
        gate, up = _load(x_ptr, offs_m, offs_d, D, stride_xm, stride_xd)
        _store_packed(codes_ptr, gate, up, base, base_up, offs_m, offs_d, D, ROUND)


@triton.jit
def _load(x_ptr, offs_m, offs_d, D, stride_xm, stride_xd):
    ptrs = x_ptr + offs_m * stride_xm + offs_d.to(tl.int64)[None, :] * stride_xd
    mask = (offs_d < D)[None, :]
    gate = tl.load(ptrs, mask=mask, other=0).to(tl.float32)
    return gate, tl.load(ptrs + D * stride_xd, mask=mask, other=0).to(tl.float32)


def _new_packed(gate_up: Tensor) -> tuple[Tensor, Tensor]:
    """Allocate the results of `pack_gates`."""
    rows, width = len(gate_up), gate_up.shape[1] // 2
    codes = torch.empty(rows, 3 * width, dtype=torch.uint8, device=gate_up.device)
    return codes, torch.empty(rows, 2, dtype=torch.uint8, device=gate_up.device)


def _pack_gates_triton(gate_up: Tensor) -> tuple[Tensor, Tensor]:
    codes, bases = _new_packed(gate_up)
    if codes.numel():
        _pack_gates_kernel[(len(gate_up),)](
            gate_up, codes, bases, gate_up.shape[1] // 2, *gate_up.stride(),
            ROUND=gate_up.dtype != torch.bfloat16, BLOCK_D=2048, num_warps=4,
        )  # fmt: skip
    return codes, bases


pack_gates = Operation(
    "pack_gates", _pack_gates_triton, pack_gates_torch,
    "gate_up: real[M, W]",
    where=("W > 0", "W % 2 == 0"),
)  # fmt: skip
"""Pack gate and up, the halves of the rows of a matrix, each number rounded to bfloat16.

Args:
    gate_up: (M, 2 D) float32 or bfloat16, any strides.

Returns:
    (M, 3 D) uint8 codes, and (M, 2) uint8 bases.
"""
