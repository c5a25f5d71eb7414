"""Verification of `arbcli.kernels.norm.gated_rms_norm`."""

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from arbcli.kernels.codec.packed import Packed
from arbcli.kernels.codec.packing import has_planes
from arbcli.kernels.norm.gated_rms_norm import (
    gated_rms_norm,
    gated_rms_norm_backward,
    packed_gates_backward,
)
from arbcli.kernels.norm.pack_gates import pack_gates_torch, unpack_gates
from arbcli.verify.case_generator import CaseGenerator
from arbcli.verify.kernels.codec.packed import random_packed
from arbcli.verify.kernels.norm.pack_gates import unpack_gates_reference
from arbcli.verify.kernels.norm.rms_norm import (
    EPS_VALUES,
    ROW_SIZES,
    TIMED_EPS,
    gradient_and_output,
    rms_norm_in_its_dtype,
    rms_norm_reference,
)
from arbcli.verify.timed import Timed
from arbcli.verify.verification import Case, Gate, Timing, Verification


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


def _draw_packed(rng: CaseGenerator, group_size: int, m: int, _n: int, k: int) -> tuple:
    """Draw a case of `packed_gates_backward`; of random codes few numbers would decide all sums."""
    grad_y, gate_up = rng.reals(m, k), 3 * rng.reals(m, 2 * k)
    eps = rng.pick((1e-6 if k > 4 else 0.1, None))
    weight = None if eps is None or rng.chance(0.3) else rng.packed(1, k, group_size, 2)
    return grad_y, *pack_gates_torch(gate_up), weight, eps, rng.chance(0.5)


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
GATED_SIZES = ROW_SIZES | {"W": "2 * k"}

_TIMED = [Timed("16384x5632 bf16", B=(16384,), W=2 * 5632, eps=TIMED_EPS)]

GATED_VALUES = {"weight": {"spread": 2}, "eps": (*EPS_VALUES, *EPS_VALUES, None)}
gated_rms_norm_verification = Verification(
    gated_rms_norm, gated_rms_norm_reference, _cases, _GATE, sizes=GATED_SIZES,
    peer=gated_rms_norm_in_its_dtype, scale_path=has_planes, timed=_TIMED, values=GATED_VALUES,
    long=("2x4096",),
)  # fmt: skip
gated_rms_norm_backward_verification = Verification(
    gated_rms_norm_backward, gated_rms_norm_backward_reference, _backward_cases, _GATE,
    sizes=GATED_SIZES, peer=backward_in_its_dtype, scale_path=has_planes, timed=_TIMED,
    values=GATED_VALUES | {"overwrite": (False, True)},
    long=("1x8209", "2x4096"),
)  # fmt: skip
packed_gates_backward_verification = Verification(
    packed_gates_backward, packed_gates_backward_reference, _packed_backward_cases, _GATE,
    draw=_draw_packed, peer=_packed_backward_in_its_dtype, needs_rows=True, scale_path=has_planes,
    timings=_packed_timings,
)  # fmt: skip
