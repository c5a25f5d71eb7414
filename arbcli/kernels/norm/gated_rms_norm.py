"""Activation and norm of a gated MLP: y = rms_norm(silu(gate) * up), with frozen ternary weights.

gate and up are the two halves of a row. With h = silu(gate) * up, s = sigmoid(gate) and grad_h from
the norm: grad_up = grad_h * silu(gate) and grad_gate = grad_h * up * s * (1 + gate * (1 - s)).
Without weights, weights are ones; without an eps there is no norm, and y = h.
"""

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from arbcli.kernels.codec.packed import Packed, random_packed
from arbcli.kernels.codec.packing import in_planes
from arbcli.kernels.dice import Dice
from arbcli.kernels.norm.pack_gates import (
    load_packed,
    pack_gates_torch,
    unpack_gates,
    unpack_gates_reference,
)
from arbcli.kernels.norm.rms_norm import (
    EPS,
    ROW_SIZES,
    TIMED_EPS,
    dense_rows,
    gradient_and_output,
    load_rows,
    load_weight,
    norm_backward_native,
    norm_gradient,
    norm_native,
    norm_weight,
    norm_weight_torch,
    rms_norm_in_its_dtype,
    rms_norm_reference,
    store_rows,
    tiling,
)
from arbcli.kernels.runtime._triton import tl, triton
from arbcli.kernels.runtime.arguments import UINT8, Arguments, Array, Matrix, Number
from arbcli.kernels.runtime.backend import row_chunks
from arbcli.kernels.runtime.operation import Case, Gate, Operation, Timing
from arbcli.kernels.timed import Timed

WHOLE_BACKWARD = 2048
"""Largest row, in columns, for which a backward program keeps all six matrices in registers."""
WIDE_BACKWARD = {"WHOLE": False, "BLOCK_M": 1, "BLOCK_D": 2048, "num_warps": 16}
"""Tile of wider rows, small enough that the second pass reads them from cache."""


def gated_rms_norm_reference(gate_up: Tensor, weight: Packed | None, eps: float | None) -> Tensor:
    """Compute the reference result of `gated_rms_norm`, in float64."""
    gate, up = gate_up.to(torch.float64).chunk(2, dim=-1)
    product = gate / (1 + torch.exp(-gate)) * up
    return product if eps is None else rms_norm_reference(product, weight, eps)


def gated_rms_norm_backward_reference(
    grad_y: Tensor, gate_up: Tensor, weight: Packed | None, eps: float | None,
    _overwrite: bool = False,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """Compute the reference result of `gated_rms_norm_backward`: autograd through the reference."""
    inputs = grad_y.double(), gate_up.double(), weight, eps
    return gradient_and_output(gated_rms_norm_reference, *inputs)


def packed_gates_backward_reference(
    grad_y: Tensor, codes: Tensor, bases: Tensor, weight: Packed | None, eps: float | None,
    _overwrite: bool = False,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """Compute the reference result of `packed_gates_backward`, in float64."""
    gate_up = unpack_gates_reference(codes, bases)
    return gated_rms_norm_backward_reference(grad_y, gate_up, weight, eps)


def _gated_rms_norm_torch(gate_up: Tensor, weight: Packed | None, eps: float | None) -> Tensor:
    width, factors = gate_up.shape[-1] // 2, norm_weight_torch(weight)
    y = torch.empty(*gate_up.shape[:-1], width, dtype=gate_up.dtype, device=gate_up.device)
    gate_up, out = gate_up.reshape(-1, 2 * width), y.view(-1, width)
    for rows in row_chunks(gate_up):
        gate, up = gate_up[rows].chunk(2, dim=-1)
        product = functional.silu(gate.float()).mul_(up)
        if eps is not None:
            product = functional.rms_norm(product, (width,), factors, eps)
        out[rows] = product
    return y


def _place_of(x: Tensor, overwrite: bool) -> Tensor:
    """Return the buffer of a result like x: x itself (in place), or a new tensor."""
    if overwrite and x.is_contiguous():
        return x
    return torch.empty(x.shape, dtype=x.dtype, device=x.device)


def _gated_rms_norm_backward_torch(
    grad_y: Tensor, gate_up: Tensor, weight: Packed | None, eps: float | None,
    overwrite: bool = False,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    width, factors = grad_y.shape[-1], norm_weight_torch(weight)
    grad_gate_up = _place_of(gate_up, overwrite)
    y = torch.empty(grad_y.shape, dtype=gate_up.dtype, device=gate_up.device)
    gate_up, grad_y = gate_up.reshape(-1, 2 * width), grad_y.reshape(-1, width)
    grads, out = grad_gate_up.view(-1, 2 * width), y.view(-1, width)
    for rows in row_chunks(gate_up):
        gate, up = gate_up[rows].to(torch.float32, copy=overwrite).chunk(2, dim=-1)
        share = torch.sigmoid(gate)
        silu = gate * share
        grad, product = grad_y[rows].float(), silu * up
        if eps is not None:
            grad, product = norm_gradient(grad, product, factors, eps)
        out[rows] = product
        grads[rows, width:] = torch.mul(silu, grad, out=product)
        slope = silu.neg_().add_(gate).add_(1).mul_(share)  # of silu
        grads[rows, :width] = slope.mul_(up).mul_(grad)
    return grad_gate_up, y


def _packed_gates_backward_torch(
    grad_y: Tensor, codes: Tensor, bases: Tensor, weight: Packed | None, eps: float | None,
    overwrite: bool = False,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    gate_up = unpack_gates(codes, bases).to(grad_y.dtype)
    return _gated_rms_norm_backward_torch(grad_y, gate_up, weight, eps, overwrite=True)


def _gated_rms_norm_native(gate_up: Tensor, weight: Packed | None, eps: float | None) -> Tensor:
    return norm_native(gate_up, weight, eps, gated=True)


def _gated_rms_norm_backward_native(
    grad_y: Tensor, gate_up: Tensor, weight: Packed | None, eps: float | None,
    overwrite: bool = False,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    place = _place_of(gate_up, overwrite)
    return norm_backward_native(grad_y, gate_up, weight, eps, gated=True, grad_x=place)


@triton.jit
def _gated_rms_norm_kernel(
    gate_ptr, up_ptr, weight_ptr, y_ptr,
    M, D, eps, one,
    stride_xm,
    HAS_NORM: tl.constexpr, HAS_WEIGHT: tl.constexpr,
    WHOLE: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    offs_m = (tl.program_id(0).to(tl.int64) * BLOCK_M + tl.arange(0, BLOCK_M))[:, None]
    if WHOLE:  # rows stay in registers
        offs_d = tl.arange(0, BLOCK_D)
        mask = (offs_m < M) & (offs_d < D)[None, :]
        gate = load_rows(gate_ptr, offs_m, offs_d, mask, stride_xm)
        up = load_rows(up_ptr, offs_m, offs_d, mask, stride_xm)
        if HAS_NORM:
            weight = load_weight(weight_ptr, offs_d, D, one, HAS_WEIGHT)
        y = gate * sigmoid(gate) * up
        if HAS_NORM:
            y *= tl.rsqrt(tl.sum(y * y, axis=1) / D + eps)[:, None] * weight
        store_rows(y_ptr, y, offs_m, offs_d, mask, D)
    else:
        squares = tl.zeros((BLOCK_M,), dtype=tl.float32)
        if HAS_NORM:
            for start in range(0, D, BLOCK_D):
                offs_d = start + tl.arange(0, BLOCK_D)
                mask = (offs_m < M) & (offs_d < D)[None, :]
                gate = load_rows(gate_ptr, offs_m, offs_d, mask, stride_xm)
                up = load_rows(up_ptr, offs_m, offs_d, mask, stride_xm)
                product = gate * sigmoid(gate) * up
                squares += tl.sum(product * product, axis=1)
        r = tl.rsqrt(squares / D + eps)[:, None]
        for start in range(0, D, BLOCK_D):
            offs_d = start + tl.arange(0, BLOCK_D)
            mask = (offs_m < M) & (offs_d < D)[None, :]
            gate = load_rows(gate_ptr, offs_m, offs_d, mask, stride_xm)
            up = load_rows(up_ptr, offs_m, offs_d, mask, stride_xm)
            y = gate * sigmoid(gate) * up
            if HAS_NORM:
                y *= r * load_weight(weight_ptr, offs_d, D, one, HAS_WEIGHT)
            store_rows(y_ptr, y, offs_m, offs_d, mask, D)


@triton.jit
def _gated_rms_norm_backward_kernel(
    grad_y_ptr, gate_ptr, up_ptr, weight_ptr, grad_gate_ptr, grad_up_ptr, y_ptr,
    M, D, eps, one,
    stride_ym, stride_xm,
    HAS_NORM: tl.constexpr, HAS_WEIGHT: tl.constexpr, PACKED: tl.constexpr,
    WHOLE: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    """Compute gradients from gate and up, or from the codes and bases of `pack_gates`."""
    offs_m = (tl.program_id(0).to(tl.int64) * BLOCK_M + tl.arange(0, BLOCK_M))[:, None]
    r = tl.zeros((BLOCK_M, 1), dtype=tl.float32)
    mean = r
    if HAS_NORM and not WHOLE:
        squares = tl.zeros((BLOCK_M,), dtype=tl.float32)
        products = tl.zeros((BLOCK_M,), dtype=tl.float32)
        for start in range(0, D, BLOCK_D):
            offs_d = start + tl.arange(0, BLOCK_D)
            mask = (offs_m < M) & (offs_d < D)[None, :]
            gate, up = _load_gates(gate_ptr, up_ptr, offs_m, offs_d, mask, M, D, stride_xm, PACKED)
            y = gate * sigmoid(gate) * up
            grad = load_rows(grad_y_ptr, offs_m, offs_d, mask, stride_ym)
            squares += tl.sum(y * y, axis=1)
            weight = load_weight(weight_ptr, offs_d, D, one, HAS_WEIGHT)
            products += tl.sum(y * grad * weight, axis=1)
        r = tl.rsqrt(squares / D + eps)
        mean = (products * r / D)[:, None]
        r = r[:, None]
    for start in range(0, D, BLOCK_D):  # only once, if a tile has the whole row
        offs_d = start + tl.arange(0, BLOCK_D)
        mask = (offs_m < M) & (offs_d < D)[None, :]
        gate, up = _load_gates(gate_ptr, up_ptr, offs_m, offs_d, mask, M, D, stride_xm, PACKED)
        grad = load_rows(grad_y_ptr, offs_m, offs_d, mask, stride_ym)
        share = sigmoid(gate)
        silu = gate * share
        y = silu * up
        if HAS_NORM:
            weight = load_weight(weight_ptr, offs_d, D, one, HAS_WEIGHT)
            grad *= weight
            if WHOLE:
                squares, products = tl.split(tl.sum(tl.join(y * y, y * grad), axis=1))
                r = tl.rsqrt(squares / D + eps)[:, None]
                mean = (products[:, None] * r) / D
                # times 1, which no compiler knows: products are computed again and not kept
                share *= one
                silu = gate * share
                y = silu * up
            y *= r
            grad = r * (grad - y * mean)
            y *= weight
        store_rows(y_ptr, y, offs_m, offs_d, mask, D)
        store_rows(grad_up_ptr, grad * silu, offs_m, offs_d, mask, 2 * D)
        slope = share * (1 + gate - silu)
        store_rows(grad_gate_ptr, grad * up * slope, offs_m, offs_d, mask, 2 * D)


@triton.jit
def _load_gates(gate_ptr, up_ptr, offs_m, offs_d, mask, M, D, stride_xm, PACKED: tl.constexpr):
    """Load tiles of gate and up; of codes and bases, if these are packed."""
    if PACKED:
        gate, up = load_packed(gate_ptr, up_ptr, offs_m, offs_d, mask, M, D)
    else:
        gate = load_rows(gate_ptr, offs_m, offs_d, mask, stride_xm)
        up = load_rows(up_ptr, offs_m, offs_d, mask, stride_xm)
    return gate, up


@triton.jit
def sigmoid(x):
    """Compute 1 / (1 + exp(-x))."""
    return 1 / (1 + tl.exp(-x))


def _gated_rms_norm_triton(gate_up: Tensor, weight: Packed | None, eps: float | None) -> Tensor:
    width = gate_up.shape[-1] // 2
    y = torch.empty(*gate_up.shape[:-1], width, dtype=gate_up.dtype, device=gate_up.device)
    if y.numel():
        gate_up, decoded = dense_rows(gate_up), norm_weight(weight)
        grid, tile = tiling(len(gate_up), width)
        _gated_rms_norm_kernel[grid](
            gate_up, gate_up[:, width:], y if decoded is None else decoded, y,
            len(gate_up), width, eps or 0.0, 1.0, gate_up.stride(0),
            HAS_NORM=eps is not None, HAS_WEIGHT=decoded is not None, **tile,
        )  # fmt: skip
    return y


def _gated_rms_norm_backward_triton(
    grad_y: Tensor, gate_up: Tensor, weight: Packed | None, eps: float | None,
    overwrite: bool = False,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    # a program reads its rows before it writes to them
    y, grad_gate_up = (_place_of(x, overwrite) for x in (grad_y, gate_up))
    if y.numel():
        gate_up = dense_rows(gate_up)
        parts = gate_up, gate_up[:, y.shape[-1] :]
        _launch_backward(grad_y, parts, weight, eps, grad_gate_up, y, packed=False)
    return grad_gate_up, y


def _packed_gates_backward_triton(
    grad_y: Tensor, codes: Tensor, bases: Tensor, weight: Packed | None, eps: float | None,
    overwrite: bool = False,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    y, (rows, width) = _place_of(grad_y, overwrite), grad_y.shape
    grad_gate_up = torch.empty(rows, 2 * width, dtype=grad_y.dtype, device=grad_y.device)
    if y.numel():
        _launch_backward(grad_y, (codes, bases), weight, eps, grad_gate_up, y, packed=True)
    return grad_gate_up, y


def _launch_backward(
    grad_y: Tensor, parts: tuple[Tensor, Tensor], weight: Packed | None, eps: float | None,
    grad_gate_up: Tensor, y: Tensor, *, packed: bool,
) -> None:  # fmt: skip
    width, decoded, grad_y = y.shape[-1], norm_weight(weight), dense_rows(grad_y)
    grid, tile = _backward_tiling(len(grad_y), width, normalised=eps is not None)
    if packed and not tile["WHOLE"]:
        tile = tile | {"num_warps": 8}  # eight bytes of codes per thread
    grads = grad_gate_up.view(-1, 2 * width)
    _gated_rms_norm_backward_kernel[grid](
        grad_y, *parts, y if decoded is None else decoded, grads, grads[:, width:], y,
        len(grad_y), width, eps or 0.0, 1.0, grad_y.stride(0), parts[0].stride(0),
        HAS_NORM=eps is not None, HAS_WEIGHT=decoded is not None, PACKED=packed, **tile,
    )  # fmt: skip


def _backward_tiling(
    rows: int, width: int, *, normalised: bool
) -> tuple[tuple[int], dict[str, int]]:
    if normalised and width > WHOLE_BACKWARD:
        return (rows,), WIDE_BACKWARD
    elements = 16 if normalised and width > WHOLE_BACKWARD // 2 else 8
    return tiling(rows, width, elements, WHOLE_BACKWARD)


def gated_rms_norm_in_its_dtype(
    gate_up: Tensor, weight: Packed | None, eps: float | None
) -> Tensor:
    """Compute with torch operations, each rounded, as the peer for bf16."""
    gate, up = gate_up.chunk(2, dim=-1)
    product = functional.silu(gate) * up
    return product if eps is None else rms_norm_in_its_dtype(product, weight, eps)


def _cases(device: torch.device, group_size: int) -> Iterator[Case]:
    generator = torch.Generator().manual_seed(0)

    def case(
        label: str, shape: tuple[int, ...], view: Callable[[Tensor], Tensor] = lambda x: x,
        dtype: torch.dtype = torch.float32, eps: float | None = 1e-6, ones: bool = False,
    ) -> Case:  # fmt: skip
        gate_up = view((3 * torch.randn(shape, generator=generator)).to(device, dtype))
        drawn = random_packed(1, gate_up.shape[-1] // 2, group_size, generator, spread=2)
        weight = None if ones or eps is None else drawn.to(device)
        return Case(label, (gate_up, weight, eps))

    yield case("5x1", (5, 2), eps=0.1)  # with a small eps the gradient cancels
    for rows, width in ((7, 33), (3, 123), (9, 1311), (2, 4096), (1, 8209)):
        # wide rows take seconds in the interpreter
        if width <= 4096 or device.type == "cuda" or group_size == 6:
            yield case(f"{rows}x{width}", (rows, 2 * width))
    yield case("3x123 no norm", (3, 246), eps=None)
    yield case("7x33 ones", (7, 66), ones=True)
    yield case("2x2100 ones", (2, 4200), ones=True)
    yield case("2x3x165", (2, 3, 330))
    yield case("3x165 strided", (6, 661), lambda x: x[1::2, 1::2])
    yield case("4x20 transposed", (40, 4), lambda x: x.T)
    yield case("3x40 saturated", (3, 80), lambda x: 40 * x)
    yield case("0x40 empty", (0, 80))
    if device.type == "cuda":  # the interpreter's bf16 arithmetic is wrong
        for shape in ((5, 33), (4096, 2048), (1025, 5632)):
            label = f"{shape[0]}x{shape[1]} bf16"
            wide = shape[0], 2 * shape[1]
            yield case(label, wide, dtype=torch.bfloat16)
            yield case(f"{label} ones", wide, dtype=torch.bfloat16, ones=True)
        yield case("300x704 bf16 no norm", (300, 1408), dtype=torch.bfloat16, eps=None)


def _backward_cases(device: torch.device, group_size: int) -> Iterator[Case]:
    generator = torch.Generator().manual_seed(1)
    for case in _cases(device, group_size):
        gate_up = case.inputs[0]
        shape = (*gate_up.shape[:-1], gate_up.shape[-1] // 2)
        grad_y = torch.randn(shape, generator=generator).to(device, gate_up.dtype)
        yield Case(case.label, (grad_y, *case.inputs))
        if "x123" in case.label or "2100" in case.label or "2048" in case.label:
            yield Case(f"{case.label} overwritten", (grad_y, *case.inputs, True))


def _packed_backward_cases(device: torch.device, group_size: int) -> Iterator[Case]:
    generator = torch.Generator().manual_seed(2)
    for case in _cases(device, group_size):
        gate_up, weight, eps = case.inputs
        if gate_up.dim() > 2 or (device.type != "cuda" and gate_up.numel() >= 16000):
            continue
        shape = len(gate_up), gate_up.shape[1] // 2
        grad_y = torch.randn(shape, generator=generator).to(device, gate_up.dtype)
        inputs = grad_y, *pack_gates_torch(gate_up), weight, eps
        yield Case(case.label, inputs)
        if "x123" in case.label or "2100" in case.label or "2048" in case.label:
            yield Case(f"{case.label} overwritten", (*inputs, True))


def _draw_packed(dice: Dice, group_size: int, m: int, _n: int, k: int) -> tuple:
    """Draw a case of `packed_gates_backward`; of random codes few numbers would decide all sums."""
    grad_y, gate_up = dice.reals(m, k), 3 * dice.reals(m, 2 * k)
    eps = dice.pick((1e-6 if k > 4 else 0.1, None))
    weight = None if eps is None or dice.chance(0.3) else dice.packed(1, k, group_size, 2)
    return grad_y, *pack_gates_torch(gate_up), weight, eps, dice.chance(0.5)


def _packed_timings(device: torch.device, _group_size: int) -> Iterator[Timing]:
    grad_y, gate, up = torch.randn(3, 16384, 5632, device=device, dtype=torch.bfloat16)
    packed = pack_gates_torch(torch.cat((gate, up), dim=1))
    yield Timing("16384x5632 bf16", (grad_y, *packed, None, TIMED_EPS))


def _packed_backward_in_its_dtype(
    grad_y: Tensor, codes: Tensor, bases: Tensor, *others: Any
) -> tuple[Tensor, Tensor]:
    gate_up = unpack_gates(codes, bases).to(grad_y.dtype)
    return backward_in_its_dtype(grad_y, gate_up, *others)


def backward_in_its_dtype(*inputs: Any) -> tuple[Tensor, Tensor]:
    """Compute with torch operations, in the dtype of `gate_up`, out of place."""
    return gradient_and_output(gated_rms_norm_in_its_dtype, *inputs[:4])


_GATE = Gate(
    relative=1e-5, peer_slack=0.1,
    reason="float32 sums of up to 8192 squares; in bf16 one rounding, where torch has several",
)  # fmt: skip

GATED_ARGUMENTS: Arguments = {
    "gate_up": Array("*B, W"),
    "weight": Matrix("1, W // 2", optional=True, spread=2),
    "eps": Number((*EPS.drawn, *EPS.drawn, None)),
}
GATED_WHERE = ("W % 2 == 0", "weight is None or eps is not None")
GATED_SIZES = ROW_SIZES | {"W": "2 * k"}


_TIMED = [Timed("16384x5632 bf16", B=(16384,), W=2 * 5632, eps=TIMED_EPS)]

gated_rms_norm = Operation(
    "gated_rms_norm", _gated_rms_norm_triton, _gated_rms_norm_torch, gated_rms_norm_reference,
    _cases, _GATE, GATED_ARGUMENTS, where=GATED_WHERE, sizes=GATED_SIZES, scale_path=in_planes,
    peer=gated_rms_norm_in_its_dtype, timed=_TIMED, native=_gated_rms_norm_native,
)  # fmt: skip
"""Multiply silu of the first half of every row by the second half, and apply RMS norm.

Args:
    gate_up: (..., 2 D) float32 or bfloat16, any strides.
    weight: packed weights of the norm, one row of D; None is ones, with the same bits.
    eps: added to the mean square; None omits the norm, and requires no weights.

Returns:
    (..., D) in the dtype of `gate_up`, contiguous; computed in float32 and rounded once.
"""
gated_rms_norm_backward = Operation(
    "gated_rms_norm_backward", _gated_rms_norm_backward_triton, _gated_rms_norm_backward_torch,
    gated_rms_norm_backward_reference, _backward_cases, _GATE,
    {"grad_y": Array("*B, W // 2"), **GATED_ARGUMENTS, "overwrite": Number((False, True))},
    where=GATED_WHERE, sizes=GATED_SIZES, scale_path=in_planes,
    peer=backward_in_its_dtype, timed=_TIMED, native=_gated_rms_norm_backward_native,
)  # fmt: skip
"""Compute the gradient of `gate_up` in `gated_rms_norm`, and recompute its result.

`grad_y` is (..., D) in the dtype of `gate_up`, with any strides. With `overwrite`, the gradient may
be written to `gate_up`, and y to `grad_y`, if these are contiguous. The other arguments are those
of `gated_rms_norm`.

Returns:
    The gradient, (..., 2 D) like `gate_up`, and y, (..., D) like the result of `gated_rms_norm`.
"""
packed_gates_backward = Operation(
    "packed_gates_backward", _packed_gates_backward_triton, _packed_gates_backward_torch,
    packed_gates_backward_reference, _packed_backward_cases, _GATE,
    {
        "grad_y": Array("M, D"),
        "codes": Array("M, 3 * D", UINT8, dense=True),
        "bases": Array("M, 2", UINT8, dense=True),
        "weight": Matrix("1, D", optional=True, spread=2),
        "eps": Number((*EPS.drawn, *EPS.drawn, None)),
        "overwrite": Number((False, True)),
    },
    where=("D > 0", "weight is None or eps is not None"), scale_path=in_planes,
    draw=_draw_packed, needs_rows=True, peer=_packed_backward_in_its_dtype,
    timings=_packed_timings,
)  # fmt: skip
"""Compute `gated_rms_norm_backward` from the codes and bases of `pack_gates`.

`grad_y` is (M, D) float32 or bfloat16, with any strides. With `overwrite`, y is written to it if it
is contiguous.

Returns:
    The gradient of gate and up, (M, 2 D), and y, (M, D), in the dtype of `grad_y`.
"""
