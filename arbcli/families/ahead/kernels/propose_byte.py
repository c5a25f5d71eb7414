"""Propose a byte from a head's logits and from an earlier occurrence of the last bytes.

The logit of the repeated byte is increased in proportion to the number of equal bytes before it. If
another byte is proposed, the repetition ends, and later proposals have no increase.
"""

from collections.abc import Iterator

import torch
from torch import Tensor

from arbcli.kernels.output.choose_byte import (
    CHOICES,
    MAX_SYMBOLS,
    choice_torch,
    choose_byte_reference,
    choose_symbol,
)
from arbcli.kernels.runtime._triton import tl, triton
from arbcli.kernels.runtime.arguments import INT32, INT64, Array, Number
from arbcli.kernels.runtime.operation import EXACT, Case, Operation
from arbcli.kernels.runtime.overlap import overlap_options, wait_for_last

NONE = tl.constexpr(-1)
"""Value that stands for no repeated byte."""


def propose_byte_reference(
    byte: Tensor, repeated: Tensor, equal: Tensor, logits: Tensor, position: Tensor, key: Tensor,
    each: float, temperature: float, top_k: int, top_p: float,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """Compute the reference result of `propose_byte_` in `byte` and `repeated`."""
    logits, favoured, repeated = logits.clone(), int(repeated[0]), repeated.clone()
    if favoured != NONE.value:
        logits[favoured] += each * int(equal)
    text = torch.zeros(int(position) + 1, dtype=torch.uint8)
    byte, _ = choose_byte_reference(byte, text, logits, position, key, temperature, top_k, top_p)
    if int(byte) != favoured:
        repeated[1] = NONE.value
    return byte, repeated


def _propose_byte_torch(
    byte: Tensor, repeated: Tensor, equal: Tensor, logits: Tensor, position: Tensor, key: Tensor,
    each: float, temperature: float, top_k: int, top_p: float,
) -> None:  # fmt: skip
    symbols = torch.arange(len(logits), device=logits.device)
    logits = logits.float() + torch.where(symbols == repeated[0], each * equal.float(), 0.0)
    choice = choice_torch(logits, position, key, temperature, top_k, top_p)
    byte.copy_(choice)
    repeated[1:] = torch.where(choice == repeated[:1], repeated[1:], NONE.value)


@triton.jit
def _propose_byte_kernel(
    byte_ptr, repeated_ptr, equal_ptr, logits_ptr, position_ptr, key_ptr,
    each, temperature, top_k, top_p, V,
    DRAWN: tl.constexpr, SOME: tl.constexpr, BLOCK_V: tl.constexpr, BLOCK_J: tl.constexpr,
    OVERLAP: tl.constexpr,
):  # fmt: skip
    wait_for_last(OVERLAP)
    favoured = tl.load(repeated_ptr).to(tl.int32)
    bonus = each * tl.load(equal_ptr).to(tl.float32)
    choice = choose_symbol(
        logits_ptr, tl.load(position_ptr), tl.load(key_ptr), temperature, top_k, top_p, V,
        DRAWN, SOME, BLOCK_V, BLOCK_J, favoured, bonus,
    )  # fmt: skip
    tl.store(byte_ptr, choice.to(tl.int64))
    tl.store(repeated_ptr + 1, NONE, mask=choice != favoured)


def _propose_byte_triton(
    byte: Tensor, repeated: Tensor, equal: Tensor, logits: Tensor, position: Tensor, key: Tensor,
    each: float, temperature: float, top_k: int, top_p: float,
) -> None:  # fmt: skip
    symbols = len(logits)
    _propose_byte_kernel[(1,)](
        byte, repeated, equal, logits, position, key,
        float(each), float(temperature), top_k, float(top_p), symbols,
        DRAWN=temperature > 0, SOME=top_k < symbols or top_p < 1,
        BLOCK_V=triton.next_power_of_2(symbols), BLOCK_J=32, num_warps=8,
        **overlap_options(logits),
    )  # fmt: skip


def _cases(device: torch.device, _group_size: int) -> Iterator[Case]:
    generator = torch.Generator().manual_seed(0)
    random = 3 * torch.randn(256, generator=generator)
    kinds = {"random": random, "33 symbols": random[:33].clone(), "all equal": torch.zeros(256)}
    for number, (kind, logits) in enumerate(kinds.items()):
        for favoured, equal in ((-1, 9), (7, 0), (7, 3), (32, 16)):
            for choice in CHOICES[:5]:
                numbers = (equal, 3 + number, -(7**number) - int(100 * choice[0]))
                counts = (torch.tensor(each, dtype=torch.int32) for each in numbers)
                count, position, key = (part.to(device) for part in counts)
                byte, repeated = torch.tensor([300]), torch.tensor([favoured, 9])
                inputs = (part.to(device) for part in (byte, repeated))
                label = f"{kind}, {favoured} after {equal}, {choice}"
                how = (count, logits.to(device), position, key, 0.5, *choice)
                yield Case(label, (*inputs, *how))


propose_byte_ = Operation(
    "propose_byte", _propose_byte_triton, _propose_byte_torch, propose_byte_reference, _cases,
    EXACT,
    {
        "byte": Array("1", INT64, dense=True),
        "repeated": Array("2", INT64, dense=True, values=(-1, "V - 1")),
        "equal": Array("", INT32, values=(0, 16)),
        "logits": Array("V", dense=True, values=lambda dice, *shape: 4 * dice.reals(*shape)),
        "position": Array("", INT32, values=(0, 9)),
        "key": Array("", INT32),
        "each": Number((0.0, 0.25, 1.0)),
        "temperature": Number((0.0, 0.5, 1.0, 2.0)),
        "top_k": Number(("1", "(V + 1) // 2", "V")),
        "top_p": Number((1.0, 0.9, 0.3)),
    },
    where=(f"1 <= V <= {MAX_SYMBOLS}",),
    sizes={"V": f"min(k + 1, {MAX_SYMBOLS})"},
    compared=("byte", "repeated"),
)  # fmt: skip
"""Sample a proposal as `choose_byte_` does, with a bonus for the repeated byte, in place.

Args:
    byte: (1,) int64, set to the byte.
    repeated: (2,) int64: the repeated byte, or -1, and that of the next proposal, which is set to
        -1 if another byte is sampled.
    equal: int32 scalar: number of equal bytes before.
    logits: (V,) float32 or bfloat16, contiguous, V at most 256.
    position: int32 scalar: position of the byte. It is read on the device.
    key: int32 scalar tensor: key of the random stream.
    each: bonus of the repeated byte's logit per equal byte.
    temperature: as in `choose_byte_`.
    top_k: likewise.
    top_p: likewise.
"""
