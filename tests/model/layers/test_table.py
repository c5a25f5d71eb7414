"""Tables: sums of rows and their gradients, and that a step makes nothing of their size."""

import pytest
import torch
from graph_parts import initialised, normal, spec
from operations import NotedOperations
from states import assert_same, state_of

from arbcli.model.layers.table import MAX_USES, TernaryTable
from arbcli.model.rules import RULES
from arbcli.model.updater import Updater

ROWS, DIM = 50, 33
IDS = torch.tensor([[3, 3, 9, -1], [49, 3, 0, 9], [-1, -1, -1, -1], [7, 50, 9, 9]])
"""The same row twice in a sum and in several, and ids that are not rows."""
TOUCHED = [0, 3, 7, 9, 49]


def table(rows=ROWS, **options) -> TernaryTable:
    return initialised(TernaryTable(rows, DIM, spec(**options), area="sequencer"))


def updater_of(part: TernaryTable, **options) -> Updater:
    updater = Updater([part.weight], 0, torch.float32)
    part.weight.sink = updater
    updater.begin(0, lr=4.0)
    return updater


def look_up(part: TernaryTable, ids=IDS, seed=1) -> torch.Tensor:
    return part(ids, normal(*ids.shape, seed=seed), torch.float32)


def test_usage_counts_the_steps_of_a_row():
    part = table()
    part.weight.usage[9] = MAX_USES
    updater_of(part)
    for ids in (IDS, IDS[:1]):
        look_up(part, ids).sum().backward()
    used = {row: int(part.weight.usage[row]) for row in TOUCHED}
    assert used == {0: 1, 3: 2, 7: 1, 9: MAX_USES, 49: 1}
    assert part.weight.alive() == pytest.approx(len(TOUCHED) / ROWS)


def test_ids_that_are_not_rows_change_nothing():
    part = table()
    before = state_of(part.weight)
    updater = updater_of(part)
    look_up(part, torch.full((3, 2), -1)).sum().backward()
    updater.finish()
    assert updater.counters()["nonfinite_steps"] == 0
    assert_same(state_of(part.weight), before)


@pytest.mark.parametrize("rule", RULES)
def test_step_makes_nothing_of_the_size_of_the_table(rule):
    rows, shapes = 100_000, set()
    part = table(rows, rule=rule)
    updater_of(part, rule=rule)
    own = {buffer.data_ptr() for buffer in part.weight.buffers()}

    def note(_, made):
        if made.data_ptr() not in own:
            shapes.add(tuple(made.shape))

    with NotedOperations(note):
        (look_up(part) + look_up(part, IDS * 2000)).sum().backward()
    assert (2 * IDS.numel(), DIM) in shapes  # the update was watched too
    assert not [shape for shape in shapes if max(shape, default=0) >= rows]


@pytest.mark.parametrize("rule", RULES)
def test_only_touched_rows_change(rule):
    part = table(rule=rule)
    before = state_of(part.weight)
    updater_of(part, rule=rule)
    look_up(part).sum().backward()
    others = torch.ones(ROWS, dtype=torch.bool).index_fill(0, torch.tensor(TOUCHED), False)
    for name, buffer in part.weight.named_buffers():
        changed = (buffer != before[name]).any(dim=1)
        if name in ("remainder", "votes", "usage"):
            assert changed[~others].all(), name
        if name != "column_statistic":
            assert not changed[others].any(), name
