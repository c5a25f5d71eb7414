"""Features of n-grams: the hash to the bit, the text's beginning, and gradients."""

from pathlib import Path

import pytest
import torch
from graph_parts import CLOSE, assert_same, graph_config, initialised, reading, site, text
from torch.nn import functional

from arbcli.model.parts.ngrams import HISTORY, ngram_ids
from arbcli.model.parts.sequencer import ORDERS, TextSequencer
from arbcli.verify.parts.sequencer import ngram_row, ngrams, sequencer

CONFIG = graph_config().beside[0]


def part() -> TextSequencer:
    return initialised(TextSequencer(CONFIG, site()))


def reference(w, ids):
    return torch.stack([sequencer(w, reading(CONFIG, ids=row)) for row in ids])


@pytest.mark.parametrize("rows", [1, 64, 65987, 2**20])
def test_ngrams_are_hashed_as_python_integers_are(rows):
    ids = torch.randint(0, 256, (3, 9), generator=torch.Generator().manual_seed(0))
    ids[0, :4], ids[1] = torch.tensor([0, 255, 0, 255]), 0
    found = ngram_ids(ids, rows, (2, 3, 4, 6))
    for index, order in enumerate((2, 3, 4, 6)):
        expected = [
            [ngram_row(history, rows) for history in ngrams(row, order)] for row in ids.tolist()
        ]
        assert found[..., index].tolist() == expected


def test_ngram_that_begins_before_the_text_has_no_row():
    found = ngram_ids(text(1, 5), 64, ORDERS)[0]
    assert (found < 0).tolist() == [[i + 1 < order for order in ORDERS] for i in range(5)]


@pytest.mark.parametrize("rows", [4096, 16384, 65987])
@pytest.mark.parametrize("order", [2, 3, 4, 6])
def test_rows_of_a_text_spread(order, rows):
    """The n-grams of a text hit nearly as many rows as so many random numbers would."""
    source = Path(functional.__file__).read_bytes()[:200_000]
    found = ngram_ids(torch.tensor([list(source)]), rows, (order,))[0, order - 1 :, 0]
    distinct = len({source[i : i + order] for i in range(len(source) - order + 1)})
    expected = rows * (1 - (1 - 1 / rows) ** distinct)
    assert found.unique().numel() > 0.93 * expected


def test_features_and_gradients_equal_autograd():
    tested = part()
    assert_same(tested, (text(),), lambda ids: tested(ids, ids.shape[1], torch.float32), reference)


def test_history_gives_what_the_whole_text_gives():
    tested, ids = part(), text(1, 9)
    whole = tested(ids, 9, torch.float32)
    last = tested(ids[:, 6 - HISTORY :], 3, torch.float32)
    torch.testing.assert_close(last, whole[:, 6:], **CLOSE)
    padded = torch.cat((torch.full((1, HISTORY), -1), ids), dim=1)
    torch.testing.assert_close(tested(padded, 9, torch.float32), whole, **CLOSE)
