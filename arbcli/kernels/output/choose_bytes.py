"""Batched `choose_byte`: each text has its own position, key and sampling options."""

from collections.abc import Callable, Iterator

import torch
from torch import Tensor

from arbcli.kernels.dice import Dice
from arbcli.kernels.output.choose_byte import (
    CHOICES,
    MAX_SYMBOLS,
    TEXT_FITS,
    choose_among_many,
    choose_byte_reference,
    choose_byte_torch,
    choose_symbol,
)
from arbcli.kernels.runtime._triton import tl, triton
from arbcli.kernels.runtime.arguments import FLOAT, INT32, INT64, Array
from arbcli.kernels.runtime.operation import EXACT, Case, Operation
from arbcli.kernels.runtime.overlap import overlap_options, wait_for_last
from arbcli.kernels.timed import Timed


def choose_bytes_reference(
    byte: Tensor, text: Tensor, logits: Tensor, position: Tensor, key: Tensor, temperature: Tensor,
    top_k: Tensor, top_p: Tensor,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """Compute the reference result of `choose_bytes_` in `byte` and `text`, one text at a time."""
    rows = zip(
        byte, text, logits, position, key,
        temperature.tolist(), top_k.tolist(), top_p.tolist(), strict=True,
    )  # fmt: skip
    found = [choose_byte_reference(*row) for row in rows]
    chosen, texts = zip(*found, strict=True)
    return torch.stack(chosen), torch.stack(texts)


def _choose_bytes_torch(
    byte: Tensor, text: Tensor, logits: Tensor, position: Tensor, key: Tensor, temperature: Tensor,
    top_k: Tensor, top_p: Tensor,
) -> None:  # fmt: skip
    sampling = temperature, top_k, top_p
    if logits.shape[1] > MAX_SYMBOLS:
        for row in zip(byte, text, logits, position, key, *sampling, strict=True):
            choose_among_many(*row)
        return
    numbers = (part.tolist() for part in sampling)
    for one in zip(byte, text, logits, position, key, *numbers, strict=True):
        choose_byte_torch(*one)


@triton.jit
def _choose_bytes_kernel(
    byte_ptr, text_ptr, logits_ptr, position_ptr, key_ptr,
    temperature_ptr, top_k_ptr, top_p_ptr,
    P, V, BLOCK_V: tl.constexpr, BLOCK_J: tl.constexpr, OVERLAP: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    temperature = tl.load(temperature_ptr + row)
    top_k, top_p = tl.load(top_k_ptr + row), tl.load(top_p_ptr + row)
    wait_for_last(OVERLAP)
    position = tl.load(position_ptr + row)
    choice = choose_symbol(
        logits_ptr + row * V, position, tl.load(key_ptr + row), temperature, top_k, top_p, V,
        temperature > 0, (top_k < V) | (top_p < 1), BLOCK_V, BLOCK_J,
    )  # fmt: skip
    tl.store(byte_ptr + row, choice.to(tl.int64))
    tl.store(text_ptr + row * P + position, choice.to(tl.uint8))


def _choose_bytes_triton(
    byte: Tensor, text: Tensor, logits: Tensor, position: Tensor, key: Tensor, temperature: Tensor,
    top_k: Tensor, top_p: Tensor,
) -> None:  # fmt: skip
    texts, symbols = logits.shape
    if symbols > MAX_SYMBOLS:
        return _choose_bytes_torch(byte, text, logits, position, key, temperature, top_k, top_p)
    _choose_bytes_kernel[(texts,)](
        byte, text, logits, position, key, temperature, top_k, top_p, text.shape[1], symbols,
        BLOCK_V=triton.next_power_of_2(symbols), BLOCK_J=32, num_warps=8,
        **overlap_options(logits),
    )  # fmt: skip
    return None


def _cases(device: torch.device, _group_size: int) -> Iterator[Case]:
    generator = torch.Generator().manual_seed(0)
    texts = len(CHOICES)
    random = 3 * torch.randn(texts, 256, generator=generator)
    kinds = {"random": random, "33 symbols": random[:, :33].contiguous(),
             "some equal": random.round(), "all equal": torch.zeros(texts, 5),
             "some excluded": torch.where(random > 0, random, -torch.inf)}  # fmt: skip
    if device.type == "cuda":  # the interpreter's bf16 arithmetic is wrong
        kinds["bf16"] = random.bfloat16()
    for number, (kind, logits) in enumerate(kinds.items()):
        index = torch.arange(texts, dtype=torch.int32)
        heat, top_k, top_p = zip(*CHOICES, strict=True)
        inputs = (
            torch.full((texts, 1), 300), torch.arange(9 * texts).view(texts, 9).byte(), logits,
            (index + number) % 9, -(7**number) - 1000 * index,
            torch.tensor(heat), torch.tensor(top_k, dtype=torch.int32), torch.tensor(top_p),
        )  # fmt: skip
        yield Case(kind, tuple(part.to(device) for part in inputs))


def _picked(*values: float) -> Callable[[Dice, int], Tensor]:
    """Draw a tensor whose elements are picked from a sequence."""
    return lambda dice, texts: torch.tensor(
        [dice.pick(values) for _ in range(texts)], device=dice.device
    )


choose_bytes_ = Operation(
    "choose_bytes", _choose_bytes_triton, _choose_bytes_torch, choose_bytes_reference, _cases,
    EXACT,
    {
        "byte": Array("B, 1", INT64, dense=True),
        "text": Array("B, P", (torch.uint8, torch.int32), dense=True),
        "logits": Array("B, V", dense=True, values=lambda dice, *shape: 4 * dice.reals(*shape)),
        "position": Array("B", INT32, dense=True, values=(0, "P - 1")),
        "key": Array("B", INT32, dense=True),
        "temperature": Array("B", FLOAT, dense=True, values=_picked(0.0, 0.5, 1.0, 2.0)),
        "top_k": Array("B", INT32, dense=True, values=(1, "V")),
        "top_p": Array("B", FLOAT, dense=True, values=_picked(1.0, 0.9, 0.3)),
    },
    where=("V > 0", TEXT_FITS),
    sizes={"B": "1 + m % 5", "V": f"min(k + 1, {MAX_SYMBOLS})", "P": "n"}, needs_rows=False,
    compared=("byte", "text"),
    timed=[Timed("64x256 logits", lambda *given: torch.multinomial(given[2].softmax(1), 1),
                 "torch's multinomial", B=64, P=9, V=256, logits=torch.float32, position=0,
                 temperature=0.95, top_k=40, top_p=0.95)],
)  # fmt: skip
"""Sample the byte or token at `position` of each text from its logits, in place.

With more than 256 symbols, texts are processed one by one with torch operations.

Args:
    byte: (B, 1) int64: set to the samples.
    text: (B, P) uint8, or int32 of more than 256 symbols; in each row the element at its
        position is set.
    logits: (B, V) float32 or bfloat16; finite, or -inf.
    position: (B,) int32 below P. It is read on the device, as are those that follow.
    key: (B,) int32: keys of the random streams.
    temperature: (B,) float32: see `choose_byte_` for this and the following arguments.
    top_k: (B,) int32.
    top_p: (B,) float32.

All are contiguous.
"""
