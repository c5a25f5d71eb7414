"""Sample next bytes with the Gumbel-max trick: argmax of logit / temperature + noise.

Byte i is a candidate if fewer than `top_k` bytes are more likely and their total probability is
below `top_p`; ties go to the smaller byte. The kernel compares all pairs, without a sort.
The noise is -ln(-ln(u)), u = (w + 1/2) / 2**23, w the upper 23 bits of a random word of
(key, position, i). So samples follow the softmax, and the seed determines them.
Source: E. J. Gumbel, "Statistical Theory of Extreme Values and Some Practical Applications", 1954.
"""

import torch
from torch import Tensor

from arbcli.kernels.runtime.operation import Operation, tl, triton
from arbcli.kernels.runtime.overlap import overlap_options, wait_for_last
from arbcli.kernels.update.random_bits import random_bits, random_words

MAX_SYMBOLS = 256
"""Number of bytes; one program holds all logits. With more symbols, a sort is used."""
NONE = tl.constexpr(-1)
"""Value that stands for no repeated byte."""


def choose_byte_torch(
    byte: Tensor, text: Tensor, logits: Tensor, position: Tensor, key: Tensor, temperature: float,
    top_k: int, top_p: float, repeated: Tensor | None = None, equal: Tensor | None = None,
    equal_bonus: float = 0.0,
) -> None:  # fmt: skip
    """Compute `choose_byte_` with torch operations."""
    if logits.dim() == 2:
        for row, (chosen, row_logits) in enumerate(zip(byte.view(-1), logits, strict=True)):
            choose_byte_torch(
                chosen, text, row_logits, position + row, key, temperature, top_k, top_p
            )
        return None
    if logits.shape[-1] > MAX_SYMBOLS:
        return choose_among_many(byte, text, logits, position, key, temperature, top_k, top_p)
    logits = logits.float()
    if repeated is not None and equal is not None:
        is_repeated = torch.arange(len(logits), device=logits.device) == repeated[0]
        logits = logits + torch.where(is_repeated, equal_bonus * equal.float(), 0.0)
    choice = choice_torch(logits, position, key, temperature, top_k, top_p)
    if repeated is not None:
        repeated[1:] = torch.where(choice == repeated[:1], repeated[1:], NONE.value)
    byte.copy_(choice)
    text.index_copy_(0, position.long()[None], choice.to(torch.uint8)[None])
    return None


def choice_torch(
    logits: Tensor, position: Tensor, key: Tensor, temperature: float, top_k: int, top_p: float
) -> Tensor:
    """Sample one of at most `MAX_SYMBOLS` symbols from (V,) float32 logits: an int64 scalar."""
    if temperature == 0:
        return logits.argmax()
    score = (logits - logits.max()) / temperature
    index = torch.arange(len(score), dtype=torch.int32, device=score.device)
    noisy = score + _noise(key, position, index)
    if top_k >= len(score) and top_p == 1:  # all are candidates
        return noisy.argmax()
    rank = index.scatter(0, score.sort(descending=True, stable=True).indices, index)
    kept = rank < top_k
    if top_p < 1:
        share = torch.where(kept, score, -torch.inf).softmax(0)
        kept &= ((rank < rank[:, None]) * share).sum(1) < top_p  # of those that are more likely
    return torch.where(kept, noisy, -torch.inf).argmax()


def choose_among_many(
    byte: Tensor, text: Tensor, logits: Tensor, position: Tensor, key: Tensor,
    temperature: float | Tensor, top_k: int | Tensor, top_p: float | Tensor,
) -> None:  # fmt: skip
    """Compute `choose_byte_` for any number of symbols; options may be scalar tensors."""
    if not isinstance(temperature, Tensor) and temperature == 0:
        choice = logits.argmax()[None]
    else:
        score, symbol = logits.float().sort(descending=True, stable=True)
        score = (score - score[0]) / (temperature + (temperature == 0))
        kept = torch.arange(len(score), device=score.device) < top_k
        # integer sums are the same in any order
        share = (torch.where(kept, score, -torch.inf).softmax(0) * 2.0**40).long()
        limit = top_p.double() * 2**40 if isinstance(top_p, Tensor) else top_p * 2.0**40
        kept &= (share.cumsum(0) - share < limit) | (top_p == 1)
        noise = _noise(key, position, symbol.to(torch.int32)) * (temperature > 0)
        # a zero-dimensional index would be read by the host
        choice = symbol.gather(0, torch.where(kept, score + noise, -torch.inf).argmax()[None])
    byte.copy_(choice.view_as(byte))
    text.index_copy_(0, position.long()[None], choice.to(text.dtype))


def _noise(key: Tensor, position: Tensor, symbol: Tensor) -> Tensor:
    word = random_bits(key, position[None], symbol)[0] >> 9 & 0x7FFFFF
    return -(-((word.float() + 0.5) * 2.0**-23).log()).log()


@triton.jit
def choose_symbol(
    logits_ptr, position, key, temperature, top_k, top_p, V, drawn, some,
    BLOCK_V: tl.constexpr, BLOCK_J: tl.constexpr, favoured=-1, bonus=0.0,
):  # fmt: skip
    """Sample the symbol of a position from V logits.

    `drawn` selects sampling instead of argmax, and `some` top-k or top-p. They are constants for
    one text, and values per text for several. `bonus` is added to the logit of symbol `favoured`.
    """
    symbol = tl.arange(0, BLOCK_V)
    kept = symbol < V
    score = tl.load(logits_ptr + symbol, mask=kept, other=float("-inf")).to(tl.float32)
    score += tl.where(symbol == favoured, bonus, 0.0)
    if drawn:
        peak = tl.max(score)
        score = (score - peak) / temperature
        if some:
            # rank of each symbol, and the probability of all likelier ones, relative to the peak
            rank = tl.zeros((BLOCK_V,), dtype=tl.int32)
            before = tl.zeros((BLOCK_V,), dtype=tl.float32)
            for start in range(0, V, BLOCK_J):  # a thread compares one symbol with all others
                rival = start + tl.arange(0, BLOCK_J)[:, None]
                other = tl.load(logits_ptr + rival, mask=rival < V, other=float("-inf"))
                other = other.to(tl.float32) + tl.where(rival == favoured, bonus, 0.0)
                other = (other - peak) / temperature
                tied = (other == score[None, :]) & (rival < symbol[None, :])
                likelier = (other > score[None, :]) | tied  # [BLOCK_J, BLOCK_V]
                rank += tl.sum(likelier.to(tl.int32), axis=0)
                before += tl.sum(tl.where(likelier, tl.exp(other), 0), axis=0)
            # top-k, then top-p of the symbols that are left
            kept &= rank < top_k
            total = tl.sum(tl.where(kept, tl.exp(score), 0))
            kept &= before < tl.where(top_p < 1, top_p, 2.0) * total  # 1 keeps all
        # Gumbel noise
        word = random_words(key, position, symbol)
        uniform = ((word >> 9).to(tl.float32) + 0.5) * 1.1920928955078125e-07  # 2**-23
        score = tl.where(kept, score - tl.log(-tl.log(uniform)), float("-inf"))
    return tl.argmax(score, axis=0)


@triton.jit
def _choose_byte_kernel(
    byte_ptr, text_ptr, logits_ptr, position_ptr, key_ptr, repeated_ptr, equal_ptr,
    temperature, top_k, top_p, equal_bonus, V,
    DRAWN: tl.constexpr, SOME: tl.constexpr, BLOCK_V: tl.constexpr, BLOCK_J: tl.constexpr,
    OVERLAP: tl.constexpr,
):  # fmt: skip
    wait_for_last(OVERLAP)
    row = tl.program_id(0)
    position = tl.load(position_ptr) + row
    favoured, bonus = -1, 0.0
    if repeated_ptr is not None:
        favoured = tl.load(repeated_ptr).to(tl.int32)
        bonus = equal_bonus * tl.load(equal_ptr).to(tl.float32)
    choice = choose_symbol(
        logits_ptr + row * V, position, tl.load(key_ptr), temperature, top_k, top_p, V,
        DRAWN, SOME, BLOCK_V, BLOCK_J, favoured, bonus,
    )  # fmt: skip
    if repeated_ptr is not None:
        tl.store(repeated_ptr + 1, NONE, mask=choice != favoured)
    tl.store(byte_ptr + row, choice.to(tl.int64))
    tl.store(text_ptr + position, choice.to(tl.uint8))


def _choose_byte_triton(
    byte: Tensor, text: Tensor, logits: Tensor, position: Tensor, key: Tensor, temperature: float,
    top_k: int, top_p: float, repeated: Tensor | None = None, equal: Tensor | None = None,
    equal_bonus: float = 0.0,
) -> None:  # fmt: skip
    symbols = logits.shape[-1]
    if symbols > MAX_SYMBOLS:
        return choose_among_many(byte, text, logits, position, key, temperature, top_k, top_p)
    _choose_byte_kernel[(byte.numel(),)](
        byte, text, logits, position, key, repeated, equal,
        float(temperature), top_k, float(top_p), float(equal_bonus), symbols,
        DRAWN=temperature > 0, SOME=top_k < symbols or top_p < 1,
        BLOCK_V=triton.next_power_of_2(symbols), BLOCK_J=32, num_warps=8,
        **overlap_options(logits),
    )  # fmt: skip
    return None


TEXT_FITS = f"(text.dtype == torch.uint8) == (V <= {MAX_SYMBOLS})"
"""Condition on the dtype of a text."""

choose_byte_ = Operation(
    "choose_byte", _choose_byte_triton, choose_byte_torch,
    "byte: int64[*B] dense; text: uint8|int32[P] dense; logits: real[*M, V] dense; position, key: "
    "int32[]; temperature; top_k; top_p; repeated: int64[2]? dense; equal: int32[]?; equal_bonus",
    where=(
        "V > 0", TEXT_FITS, "byte.numel() == logits.numel() // V",
        f"len(M) == 0 or len(M) == 1 and V <= {MAX_SYMBOLS}",
        "(repeated is None) == (equal is None)",
        f"repeated is None or len(M) == 0 and V <= {MAX_SYMBOLS}",
    ),
)  # fmt: skip
"""Sample the byte or token at `position` of `text`, or several from there on, in place.

With more than 256 symbols, candidates are found by sorting, with torch operations on all backends.

Args:
    byte: int64, one element or (M,), contiguous: set to the samples.
    text: (P,) uint8, or int32 for more than 256 symbols, contiguous; elements from `position` on
        are set to the samples.
    logits: (V,) float32 or bfloat16, contiguous, finite or -inf. Or (M, V), V at most 256: one
        row per byte, with the noise of its own position.
    position: int32 scalar tensor, at most P - M. It is read on the device.
    key: int32 scalar tensor: key of the random stream.
    temperature: divisor of the logits; 0 takes the largest logit.
    top_k: number of most likely symbols to keep, at least 1.
    top_p: smallest total probability of the symbols to keep; above 0, and 1 keeps all.
    repeated: (2,) int64, for a single byte: the byte that would repeat an earlier text, or -1, and
        the one after it, which is set to -1 if another byte is sampled. None repeats nothing.
    equal: int32 scalar: number of equal bytes before.
    equal_bonus: bonus of the repeated byte's logit per equal byte.
"""
