"""Memories and windows of symbols: rows of n-grams, steps, and attention in pieces."""

import pytest
import torch
from graph_parts import initialised, spec, text
from torch.nn import functional

from arbcli.families.graph.config import MemGramConfig
from arbcli.families.graph.memgram import INT8_MAX, ORDER, MemGram
from arbcli.model.ngrams import ngram_ids
from arbcli.model.parts.window import attend_in_window

LONG = 14
GOLDEN = 0x9E3779B97F4A7C15


def ngrams(text: list[int], order: int) -> list[list[int]]:
    """List the n-gram that ends at each byte; -1 is before the text."""
    padded = [-1] * (order - 1) + text
    return [padded[end : end + order] for end in range(len(text))]


def ngram_row(history: list[int], num_rows: int) -> int:
    """Hash the bytes of one n-gram by Python's integers; -1 if one of them is before the text."""
    if min(history) < 0:
        return -1
    key = 0
    for byte in reversed(history):
        key = key * 257 + byte + 1
    mixed = (key + (len(history) << 40)) * GOLDEN % 2**64
    return ((mixed >> 32) % 2**31 * num_rows) >> 31


@pytest.mark.parametrize("rows", [8, 64])
def test_steps_equal_a_dictionary(rows):
    memory, slow = initialised(MemGram(MemGramConfig(rows=rows), spec())), {}
    for index in range(40):
        texts = text(2, LONG, seed=2 * index), text(3, 9, seed=2 * index + 1)
        last = {}
        for ids in texts:
            memory(ids, ids.shape[1], torch.float32)
            for histories, row in ((ngrams(row, ORDER), row) for row in ids.tolist()):
                for history, following in zip(histories, row[1:], strict=False):
                    last[ngram_row(history, rows)] = following
        memory.finish_step()
        last.pop(-1, None)
        for entry, symbol in last.items():
            held, strength = slow.get(entry, (None, 0))
            if held == symbol:
                slow[entry] = symbol, min(strength + 1, INT8_MAX)
            elif strength > 1:
                slow[entry] = held, strength - 1
            else:
                slow[entry] = symbol, 1
        known = memory.strength.nonzero()[:, 0].tolist()
        got = {i: (int(memory.symbol[i]) + 128, int(memory.strength[i])) for i in known}
        assert got == slow, index
    assert len({strength for _, strength in slow.values()}) > 1


@pytest.mark.parametrize("rows", [64, 65987])
def test_ngrams_are_hashed_as_python_integers_are(rows):
    ids = torch.randint(0, 256, (3, 9), generator=torch.Generator().manual_seed(0))
    ids[0, :4], ids[1] = torch.tensor([0, 255, 0, 255]), 0
    hashed = ngram_ids(ids, rows, (2, 3, 4, 6))
    for index, order in enumerate((2, 3, 4, 6)):
        expected = [
            [ngram_row(history, rows) for history in ngrams(row, order)] for row in ids.tolist()
        ]
        assert hashed[..., index].tolist() == expected


def masked(q, k, v, window):
    place = torch.arange(q.shape[2], device=q.device)
    distance = place[:, None] - place
    mask = (distance >= 0) & (distance < window)
    return functional.scaled_dot_product_attention(q, k, v, attn_mask=mask)


def compare(length, window, width, dtype, device, bound):
    generator = torch.Generator().manual_seed(0)
    shape = (2, 3, length, width)
    q, k, v = (
        torch.randn(shape, generator=generator).to(device, dtype).requires_grad_() for _ in range(3)
    )
    twins = [part.detach().double().requires_grad_() for part in (q, k, v)]
    grad = torch.randn(shape, generator=generator).to(device)
    y, wanted = attend_in_window(q, k, v, window), masked(*twins, window)
    y.backward(grad.to(dtype))
    wanted.backward(grad.to(dtype).double())
    pairs = [
        (y, wanted),
        *((part.grad, twin.grad) for part, twin in zip((q, k, v), twins, strict=True)),
    ]
    for got, expected in pairs:  # with a window of 1 the gradients of q and k are 0
        size = expected.norm() or grad.norm()
        assert (got.double() - expected).norm() <= bound * size


@pytest.mark.parametrize(
    ("length", "window"), [(2, 1), (7, 3), (12, 4), (33, 32), (50, 7)], ids=str
)
def test_pieces_equal_masked_attention(length, window, device):
    compare(length, window, 6, torch.float32, device, 1e-5)


@pytest.mark.gpu
@pytest.mark.parametrize(("length", "window"), [(7, 3), (130, 128), (1000, 64)], ids=str)
def test_flash_attention_equals_masked_attention(length, window, device):
    compare(length, window, 64, torch.bfloat16, device, 0.01)
