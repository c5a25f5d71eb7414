"""Propose a byte from a head's logits and from an earlier occurrence of the last bytes.

The logit of the repeated byte is increased in proportion to the number of equal bytes before it. If
another byte is proposed, the repetition ends, and later proposals have no increase.
"""

import torch
from torch import Tensor

from arbcli.kernels.output.choose_byte import MAX_SYMBOLS, choice_torch, choose_symbol
from arbcli.kernels.runtime._triton import tl, triton
from arbcli.kernels.runtime.arguments import INT32, INT64, Array, Number
from arbcli.kernels.runtime.operation import Operation
from arbcli.kernels.runtime.overlap import overlap_options, wait_for_last

NONE = tl.constexpr(-1)
"""Value that stands for no repeated byte."""


def _propose_byte_torch(
    byte: Tensor, repeated: Tensor, equal: Tensor, logits: Tensor, position: Tensor, key: Tensor,
    equal_bonus: float, temperature: float, top_k: int, top_p: float,
) -> None:  # fmt: skip
    symbols = torch.arange(len(logits), device=logits.device)
    logits = logits.float() + torch.where(symbols == repeated[0], equal_bonus * equal.float(), 0.0)
    choice = choice_torch(logits, position, key, temperature, top_k, top_p)
    byte.copy_(choice)
    repeated[1:] = torch.where(choice == repeated[:1], repeated[1:], NONE.value)


@triton.jit
def _propose_byte_kernel(
    byte_ptr, repeated_ptr, equal_ptr, logits_ptr, position_ptr, key_ptr,
    equal_bonus, temperature, top_k, top_p, V,
    DRAWN: tl.constexpr, SOME: tl.constexpr, BLOCK_V: tl.constexpr, BLOCK_J: tl.constexpr,
    OVERLAP: tl.constexpr,
):  # fmt: skip
    wait_for_last(OVERLAP)
    favoured = tl.load(repeated_ptr).to(tl.int32)
    bonus = equal_bonus * tl.load(equal_ptr).to(tl.float32)
    choice = choose_symbol(
        logits_ptr, tl.load(position_ptr), tl.load(key_ptr), temperature, top_k, top_p, V,
        DRAWN, SOME, BLOCK_V, BLOCK_J, favoured, bonus,
    )  # fmt: skip
    tl.store(byte_ptr, choice.to(tl.int64))
    tl.store(repeated_ptr + 1, NONE, mask=choice != favoured)


def _propose_byte_triton(
    byte: Tensor, repeated: Tensor, equal: Tensor, logits: Tensor, position: Tensor, key: Tensor,
    equal_bonus: float, temperature: float, top_k: int, top_p: float,
) -> None:  # fmt: skip
    symbols = len(logits)
    _propose_byte_kernel[(1,)](
        byte, repeated, equal, logits, position, key,
        float(equal_bonus), float(temperature), top_k, float(top_p), symbols,
        DRAWN=temperature > 0, SOME=top_k < symbols or top_p < 1,
        BLOCK_V=triton.next_power_of_2(symbols), BLOCK_J=32, num_warps=8,
        **overlap_options(logits),
    )  # fmt: skip


propose_byte_ = Operation(
    "propose_byte", _propose_byte_triton, _propose_byte_torch,
    {
        "byte": Array("1", INT64, dense=True),
        "repeated": Array("2", INT64, dense=True),
        "equal": Array("", INT32),
        "logits": Array("V", dense=True),
        "position": Array("", INT32),
        "key": Array("", INT32),
        "equal_bonus": Number(),
        "temperature": Number(),
        "top_k": Number(),
        "top_p": Number(),
    },
    where=(f"1 <= V <= {MAX_SYMBOLS}",),
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
    equal_bonus: bonus of the repeated byte's logit per equal byte.
    temperature: as in `choose_byte_`.
    top_k: likewise.
    top_p: likewise.
"""
