"""The memory of n-grams against a dictionary, and what it gives the model."""

import pytest
import torch
from graph_parts import CLOSE, assert_same, fill_memories, initialised, reading, site, text

from arbcli.config.parts import MemGramConfig
from arbcli.model.parts.memgram import MOST, ORDER, MemGram
from arbcli.verify.parts.memgram import memgram
from arbcli.verify.parts.sequencer import ngram_row, ngrams

LONG = 14


def part(*, filled=True, rows=64) -> MemGram:
    made = initialised(MemGram(MemGramConfig(rows=rows), site()))
    if filled:
        fill_memories(made)
    return made


def see(memory: MemGram, *texts: torch.Tensor) -> None:
    """Take one step's texts in."""
    for ids in texts:
        memory(ids, ids.shape[1], torch.float32)
    memory.after_step()


def test_recalled_and_gradients_equal_autograd():
    tested = part()
    assert_same(
        tested,
        (text(2, LONG),),
        lambda ids: tested(ids, LONG, torch.float32),
        lambda w, ids: torch.stack(
            [memgram(w, reading(MemGramConfig(), tested, row)) for row in ids]
        ),
    )


def test_history_gives_what_the_whole_text_gives():
    tested, ids = part(), text(1, LONG)
    whole = tested(ids, LONG, torch.float32)
    torch.testing.assert_close(tested(ids[:, 3:], 4, torch.float32), whole[:, -4:], **CLOSE)


@pytest.mark.parametrize("rows", [8, 64])
def test_steps_equal_a_dictionary(rows):
    memory, slow = part(filled=False, rows=rows), {}
    for index in range(40):
        texts = text(2, LONG, seed=2 * index), text(3, 9, seed=2 * index + 1)
        see(memory, *texts)
        last = {}
        for ids in texts:
            for histories, row in ((ngrams(row, ORDER), row) for row in ids.tolist()):
                for history, following in zip(histories, row[1:], strict=False):
                    last[ngram_row(history, rows)] = following
        last.pop(-1, None)
        for entry, symbol in last.items():
            held, strength = slow.get(entry, (None, 0))
            if held == symbol:
                slow[entry] = symbol, min(strength + 1, MOST)
            elif strength > 1:
                slow[entry] = held, strength - 1
            else:
                slow[entry] = symbol, 1
        known = memory.strength.nonzero()[:, 0].tolist()
        got = {i: (int(memory.symbol[i]) + 128, int(memory.strength[i])) for i in known}
        assert got == slow, index
    assert len({strength for _, strength in slow.values()}) > 1


def test_strength_saturates():
    memory = part(filled=False)
    for _ in range(MOST + 10):
        see(memory, torch.tensor([[*b"context", 255]]))
    assert memory.strength.max() == MOST
    assert memory.symbol.dtype == memory.strength.dtype == torch.int8


def test_stronger_memories_say_more():
    """The vector of a byte seen once is less than that of one seen often."""
    memory, ids = part(filled=False), torch.tensor([[*b"context"]])
    see(memory, torch.tensor([[*b"context", 255]]))
    sizes = []
    for strength in (1, MOST):
        memory.strength.copy_((memory.strength > 0) * strength)
        with torch.no_grad():
            sizes.append(memory(ids, 7, torch.float32)[0, -1].norm().item())
    assert sizes[0] < sizes[1] / 2


def test_empty_memory_adds_nothing():
    assert part(filled=False)(text(2, LONG), LONG, torch.float32).eq(0).all()


def test_a_byte_is_learnt_after_the_step_and_not_by_reading():
    memory, ids = part(filled=False), text(1, LONG)
    first = memory(ids, LONG, torch.float32)
    assert first.eq(0).all()
    memory.forget()
    with torch.no_grad():
        memory(ids, LONG, torch.float32)
    memory.after_step()
    assert memory.strength.eq(0).all()
    see(memory, ids)
    assert memory(ids, LONG, torch.float32).ne(0).any()


def test_text_of_one_byte_teaches_nothing():
    memory = part(filled=False)
    see(memory, text(2, 1))
    assert memory.strength.eq(0).all()
