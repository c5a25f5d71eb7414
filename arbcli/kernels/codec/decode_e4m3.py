"""Decode packed trits and scales to e4m3, for products in eight bits: w ~ q * scale.

scale is one power of two for the matrix. It moves the largest octave to 2**7, as in
`quantise_rows`, or to 2**6 for int8 weights, which are up to three times their scale.
Scales of groups, or int8 weights, are rounded to the three mantissa bits of e4m3, an error
of at most 6 %, identically in the forward and backward pass. Training steps update the exact
digits.
"""

import torch
from torch import Tensor

from arbcli.kernels.codec.decode_digits import decode_digits_torch, decode_tile, tile_grid
from arbcli.kernels.codec.packed import Packed
from arbcli.kernels.matmul.quantise_rows import E4M3, MAX_OCTAVE, has_e4m3
from arbcli.kernels.runtime.operation import Operation, tl, triton

TILE, TRANSPOSED_TILE = (4, 8, 4), (32, 2, 4)
"""Rows, blocks of each, and warps of a program."""


def _decode_e4m3_torch(packed: Packed, transposed: bool = False) -> tuple[Tensor, Tensor]:
    octave = packed.exponent.amax().to(torch.int32) - MAX_OCTAVE
    octave += packed.remainder is not None
    inverse, scale = (((127 + sign * octave) << 23).view(torch.float32) for sign in (-1, 1))
    q = (decode_digits_torch(packed, torch.float32) * inverse).to(E4M3)
    q = q.T.contiguous() if transposed else q
    return q, scale.repeat(1, len(q))


@triton.jit
def _decode_e4m3_kernel(
    packed_ptr, exponent_ptr, fraction_ptr, remainder_ptr, largest_ptr, q_ptr, scale_ptr,
    N, K, blocks, num_scales,
    stride_pn, stride_pb, stride_en, stride_eg, stride_fn, stride_fg,
    stride_an, stride_ak, trit_unit, low_unit,
    stride_qn, stride_qk,
    GROUP: tl.constexpr, HAS_FRACTION: tl.constexpr, INT8: tl.constexpr, NIBBLE: tl.constexpr,
    ROWS: tl.constexpr, ABREAST: tl.constexpr, REST_ROWS: tl.constexpr, SHARE: tl.constexpr,
    NATIVE: tl.constexpr,
):  # fmt: skip
    """Decode a tile; each program stores `SHARE` of the equal scales."""
    octave = tl.load(largest_ptr).to(tl.int32) - (6 if INT8 else 7)
    inverse = ((127 - octave) << 23).to(tl.float32, bitcast=True)
    decode_tile(
        packed_ptr, exponent_ptr, fraction_ptr, remainder_ptr, q_ptr, N, K, blocks,
        stride_pn, stride_pb, stride_en, stride_eg, stride_fn, stride_fg,
        stride_an, stride_ak, trit_unit, low_unit, stride_qn, stride_qk, inverse,
        GROUP, HAS_FRACTION, INT8, NIBBLE, ROWS, ABREAST, REST_ROWS, False, True, NATIVE,
    )  # fmt: skip
    power = ((127 + octave) << 23).to(tl.float32, bitcast=True)
    row = tl.program_id(0) * SHARE + tl.arange(0, SHARE)
    tl.store(scale_ptr + row, tl.zeros(row.shape, tl.float32) + power, mask=row < num_scales)


def _decode_e4m3_triton(packed: Packed, transposed: bool = False) -> tuple[Tensor, Tensor]:
    rows, in_features = packed.out_features, packed.in_features
    shape = (in_features, rows) if transposed else (rows, in_features)
    q = torch.empty(shape, dtype=E4M3, device=packed.trits.device)
    scale = torch.empty(1, len(q), device=packed.trits.device)
    strides = q.stride()[::-1] if transposed else q.stride()
    tile_rows, abreast, warps = TRANSPOSED_TILE if transposed else TILE
    blocks, programs = tile_grid(packed, tile_rows, abreast, tile_rows)
    _decode_e4m3_kernel[(programs,)](
        *packed.all_pointers, packed.exponent.amax(), q.view(torch.uint8), scale,
        rows, in_features, blocks, len(q), *packed.all_strides, *packed.worths, *strides,
        **packed.all_constants, ROWS=tile_rows, ABREAST=abreast, REST_ROWS=tile_rows,
        SHARE=triton.next_power_of_2(triton.cdiv(len(q), programs)), NATIVE=has_e4m3(q),
        num_warps=warps,
    )  # fmt: skip
    return q, scale


decode_e4m3 = Operation(
    "decode_e4m3", _decode_e4m3_triton, _decode_e4m3_torch,
    "packed: packed[N, K]; transposed",
)  # fmt: skip
"""Decode a packed matrix to e4m3.

Args:
    packed: N rows by K weights, not empty.
    transposed: whether to decode w.T.

Returns:
    (N, K) float8_e4m3fn q, or (K, N) if `transposed`, contiguous; and its scale, a power of two,
    repeated for every row of q: (1, N) or (1, K) float32, as scaled matrix products expect.
"""
