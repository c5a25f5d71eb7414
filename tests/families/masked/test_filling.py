"""Holes that come after both of their sides: windows, losses, and the models that fill them."""

import math

import pytest
import torch

from arbcli.config.presets import preset
from arbcli.families.masked.filling import EXTRA, LEAD, cut, lay_out, led_in
from arbcli.families.masked.holes import fill_in_order
from arbcli.generation.sampling import Sampling
from arbcli.model.build import build_model

SIZES = {"dim": 32, "layers": 1, "heads": 2, "ffn": 48}
SUFFIX, PREFIX, MIDDLE = 256, 257, 258


def apart(row: list[int]) -> tuple[list[int], list[int], list[int]]:
    """Take a window apart to what is before, in and after its hole."""
    places = [row.index(mark) for mark in (SUFFIX, PREFIX, MIDDLE)]
    assert places[0] == 0
    after, before, hole = row[3 : places[1]], row[places[1] + 1 : places[2]], row[places[2] + 1 :]
    assert row[1] * 256 + row[2] == len(hole)
    return before, hole, after


SIZES_OF_PARTS = [(2, 3, 4), (0, 1, 0), (5, 300, 0), (LEAD + 3, 2, 4), (LEAD, 1, 0), (3, 5, 2)]


@pytest.mark.parametrize("sizes", SIZES_OF_PARTS)
@pytest.mark.parametrize(("arrange", "lead"), [(lay_out, 0), (led_in, LEAD)])
def test_a_hole_comes_after_both_sides_and_the_end_of_the_text_before_it(arrange, lead, sizes):
    before, hole, after = torch.arange(sum(sizes)).remainder(251).split(sizes)
    row = arrange(before, hole, after, 256)
    assert len(row) == sum(sizes) + EXTRA
    text, cut_at = [*before.tolist(), *hole.tolist()], max(0, len(before) - lead)
    assert apart(row.tolist()) == (text[:cut_at], text[cut_at:], after.tolist())


def test_every_other_window_has_a_hole_anywhere_and_of_any_length():
    count, size = 2000, 60
    ids = torch.arange(size + EXTRA).repeat(count, 1)
    given, targets = cut(ids, 256, seed=3, step=4, numbers=range(count))
    assert torch.equal(given[0::2], ids[0::2, :-1])
    assert torch.equal(targets[0::2], ids[0::2, 1:])
    lengths, begins = [], []
    for row, learnt in zip(given[1::2].tolist(), targets[1::2].tolist(), strict=True):
        whole = [*row, learnt[-1]]
        before, hole, after = apart(whole)
        assert [*before, *hole, *after] == [*range(size)]
        wanted = [one if one < 256 and index > 2 else -1 for index, one in enumerate(whole)]
        assert learnt == wanted[1:]
        lengths.append(len(hole))
        begins.append(len(before) / max(1, size - len(hole)))
    # a length up to n has a share of ln(n + 1) / ln(61); four standard errors are 0.063
    for most in (1, 7, 59):
        share = sum(length <= most for length in lengths) / len(lengths)
        assert abs(share - math.log(most + 1) / math.log(size + 1)) < 0.063
    assert (min(lengths), max(lengths)) == (1, size)
    assert abs(sum(begins) / len(begins) - 0.5) < 0.05
    # a hole of one symbol of two is either of them; four standard errors are 0.127
    given, _ = cut(ids[:800, : 2 + EXTRA], 256, seed=3, step=4, numbers=range(800))
    lone = given[1::2][given[1::2, 2] == 1]
    assert abs(float((lone[:, 4] == PREFIX).float().mean()) - 0.5) < 0.127


def test_a_window_is_cut_alike_by_every_process():
    ids = torch.arange(30).repeat(8, 1)
    whole = cut(ids, 256, seed=3, step=1, numbers=range(8))
    for number in range(8):
        part = cut(ids[:1], 256, seed=3, step=1, numbers=[number])
        assert all(torch.equal(one[0], of[number]) for one, of in zip(part, whole, strict=True))
    for other in ({"seed": 4, "step": 1}, {"seed": 3, "step": 2}):
        assert not torch.equal(cut(ids, 256, **other, numbers=range(8))[0], whole[0])


def test_holes_are_filled_one_after_another():
    lm = build_model(preset("tiny", **SIZES, ctx=24, objective="fill"), torch.float32)
    parts = [[1, 2, 3], [4, 5, 7, 8], [6]]
    text, length = list(parts[0]), 2
    for part, lead in zip(parts[1:], (3, LEAD), strict=True):  # of texts of 3 and 9 symbols
        begin, end = text[: len(text) - lead], text[len(text) - lead :]
        given = [SUFFIX, 0, lead + length, *part, PREFIX, *begin, MIDDLE, *end]
        for _ in range(length):
            with torch.no_grad():
                given.append(int(lm(torch.tensor([given]))[0, -1].argmax()))
        text += [*given[-length:], *part]
    assert fill_in_order(lm, parts, length, Sampling(temperature=0), "torch") == text
