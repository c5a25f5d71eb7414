"""Product keys: the choice is exact, and the result and its gradients are those of all scores."""

import pytest
import torch
from graph_parts import assert_same, initialised, normal, reading, site

from arbcli.config.parts.memories import CodebookConfig
from arbcli.model.parts.codebook import Codebook, best_pairs
from arbcli.verify.parts.memories import codebook

CONFIG = CodebookConfig(halves=(4, 8), width=12, heads=3, key_width=8, top_k=3)


@pytest.mark.parametrize(("sizes", "top_k"), [((4, 8), 3), ((8, 8), 8), ((5, 1), 1), ((40, 30), 7)])
def test_best_pairs_are_the_best_of_all(sizes, top_k):
    left, right = (normal(9, size, seed=seed) for seed, size in enumerate(sizes))
    scores, pairs = best_pairs(left, right, top_k)
    every = (left[:, :, None] + right[:, None, :]).flatten(1)
    expected = every.topk(top_k)
    assert torch.equal(scores, expected.values)
    assert torch.equal(pairs, expected.indices)


def test_best_pairs_of_ties_are_different_pairs():
    scores, pairs = best_pairs(torch.zeros(2, 4), torch.zeros(2, 8), 3)
    assert scores.eq(0).all()
    assert [len(set(row)) for row in pairs.tolist()] == [3, 3]


def part() -> Codebook:
    return initialised(Codebook(CONFIG, site(), "codebook"))


def reference(w, x):
    """Find rows for each text of (B, T, D)."""
    found = [codebook(w, row, reading(CONFIG)) for row in x]
    return [torch.stack(part) for part in zip(*found, strict=True)]


def test_found_rows_and_gradients_equal_autograd():
    tested, dim = part(), site().dim

    def run(x):
        found = tested(x)
        return torch.cat((found.y, found.confidence[..., None]), dim=-1)

    def expected(w, x):
        y, _, confidence = reference(w, x)
        return torch.cat((y, confidence[..., None]), dim=-1)

    assert_same(tested, (normal(2, 5, dim),), run, expected)


def test_code_is_the_best_row_of_the_first_head():
    tested, x = part(), normal(2, 5, site().dim)
    weights = {
        name.removesuffix(".weight"): weight.weight(torch.float32)
        for name, weight in tested.named_modules()
        if name.endswith(".weight")
    }
    found = tested(x)
    assert torch.equal(found.codes, reference(weights, x)[1])
    assert found.codes.dtype == torch.int64
    assert found.codes.unique().numel() > 3
