"""Iterations over experts and graph: equations, halting, and that they stay bounded."""

import math
from dataclasses import replace
from itertools import pairwise

import pytest
import torch
from graph_parts import (
    assert_same,
    fill_memories,
    graph_config,
    initialised,
    normal,
    reading,
    site,
    text,
)
from torch import nn

from arbcli.errors import ArbError
from arbcli.model.flow import Reading
from arbcli.model.parts.codebook import Codebook, Found
from arbcli.model.parts.moe_graph import HALT_PRIOR, Iterated, MoEGraph
from arbcli.verify.parts.base import under
from arbcli.verify.parts.memories import iterated

CODES = 32
ROWS, LENGTH = 2, 6


class Both(nn.Module):
    """The iterations, and the codebook whose rows the edges carry."""

    def __init__(self, **options) -> None:
        super().__init__()
        memories, where = graph_config(**options).main.memories, site(**options)
        self.graph = MoEGraph(memories.iterated, where, memories.codebook.width)
        self.codebook = Codebook(replace(memories.codebook, heads=1), where, "codebook")
        initialised(self)
        fill_memories(self)

    def forward(self, x, confidence) -> Iterated:
        return self.graph(x, self.codebook, Found(x, codes(), confidence))


def codes() -> torch.Tensor:
    return torch.arange(ROWS * LENGTH).view(ROWS, LENGTH) * 5 % CODES


def inputs() -> tuple[torch.Tensor, torch.Tensor]:
    return normal(ROWS, LENGTH, 40), normal(ROWS, LENGTH, seed=1).sigmoid()


def joined(x, shares) -> torch.Tensor:
    """Put both results in one tensor, to differentiate both."""
    return torch.cat((x.flatten(0, 1), shares.T), dim=1)


@pytest.mark.parametrize(
    "options",
    [
        {}, {"moe": False}, {"graph": False}, {"graph_gate": True},
        {"graph_adapters": True, "moe": False},
        {"graph_gate": True, "graph_adapters": True, "moe_gate": "softplus"}, {"max_moe_iters": 1},
        {"moe_top_k": 4}, {"moe_gate": "hash", "shared_expert": True, "graph": False},
    ],
    ids=str,
)  # fmt: skip
def test_iterations_and_gradients_equal_autograd(options):
    both = Both(**options)
    used = both if both.graph.config.edges else both.graph
    given = inputs() if used is both else inputs()[:1]

    ids = text(ROWS, LENGTH)

    def run(x, confidence=None):
        if used is both:
            return joined(*both(x, confidence))
        return joined(*both.graph(x, None, None, Reading.of_text(ids, LENGTH)))

    def reference(w, x, confidence=None):
        own, table = under(w, "graph") if used is both else w, w.get("codebook.table")
        found = []
        for row in range(ROWS):
            sure = None if confidence is None else (codes()[row], confidence[row])
            given = reading(both.graph.config, both.graph, ids[row])
            found.append(iterated(own, x[row], sure, table, given))
        y, shares = zip(*found, strict=True)
        return joined(torch.stack(y), torch.cat(shares, dim=1))

    # of the codebook only the table is used here
    for name in ("query", "left", "right", "output"):
        delattr(both.codebook, name)
    assert_same(used, given, run, reference)


def test_halting_does_not_depend_on_other_positions():
    both = Both(graph=False)
    x = inputs()[0]
    whole = both.graph(x, None, None)
    alone = both.graph(x[1:, 2:3], None, None)
    torch.testing.assert_close(alone.x[0, 0], whole.x[1, 2], rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(alone.shares[:, 0], whole.shares[:, LENGTH + 2])


def test_ponder_cost_is_finite_where_all_halt_at_once():
    shares = torch.zeros(3, 5)
    shares[0] = 1
    shares.requires_grad_()
    cost = Iterated(torch.empty(0), shares).ponder_cost()
    cost.backward()
    assert cost.item() == pytest.approx(-math.log(HALT_PRIOR))
    assert shares.grad.isfinite().all()


def test_many_iterations_stay_bounded():
    both = Both(max_moe_iters=64)
    x, confidence = inputs()
    streams = []
    inward = both.graph.inward.forward
    both.graph.inward.forward = lambda x, norm: streams.append(x) or inward(x, norm)
    with torch.no_grad():
        y = both(x, confidence).x
    away = torch.stack([(s - streams[0]).norm(dim=1) for s in streams]).amax(dim=1)
    assert len(streams) == 64
    assert y.isfinite().all()
    # a change is of a normalised vector, so its size is bounded, and 3/4 of the way is kept
    changes = [b - streams[0] - 0.75 * (a - streams[0]) for a, b in pairwise(streams)]
    step = torch.stack(changes).norm(dim=-1)
    assert away[-1] <= 4 * step.max()
    assert away[32:].max() < 1.5 * away[8:32].max()


def test_gradient_of_many_iterations_is_finite():
    both = Both(max_moe_iters=64)
    x = inputs()[0].requires_grad_()
    found = both(x, inputs()[1])
    (found.x.sum() + found.ponder_cost()).backward()
    assert x.grad.isfinite().all()


def test_evaluation_notes_nothing():
    both = Both()
    before = {name: buffer.clone() for name, buffer in both.named_buffers()}
    with torch.no_grad():
        both(*inputs())
    both.graph.edges.after_step()
    both.graph.experts.gate.after_step()
    for name, buffer in both.named_buffers():
        assert torch.equal(buffer, before[name]), name


def test_edges_that_were_used_are_voted_on():
    both = Both()
    before = both.graph.edges.sign.clone()
    both(*inputs()).x.sum().backward()
    both.graph.edges.after_step()
    assert (both.graph.edges.sign != before).any()


@pytest.mark.parametrize("options", [{}, {"graph_gate": True}], ids=str)
def test_filled_graph_changes_the_first_choice_where_edges_enter_the_query(options):
    both, made = Both(**options), {}
    assert (both.graph.edges.score > 0).any()
    for state in ("filled", "empty"):
        keep = made.setdefault(state, []).append
        hook = both.graph.experts.gate.register_forward_hook(lambda *call, keep=keep: keep(call[2]))
        both(*inputs())
        hook.remove()
        both.graph.edges.score.zero_()
    (filled, _), (empty, _) = made["filled"][0], made["empty"][0]
    assert torch.equal(filled, empty) == (not options)
    assert not torch.equal(made["filled"][1][0], made["empty"][1][0])  # through the stream


def test_filled_graph_scales_adapters_and_an_empty_one_does_not():
    options = {"moe": False, "max_moe_iters": 1}
    both, plain = Both(**options, graph_adapters=True), Both(**options)
    state = both.state_dict()
    plain.load_state_dict({name: state[name] for name in plain.state_dict()})
    for silent in (both, plain):
        silent.graph.message.weight.trits.fill_(121)  # zeros: messages carry nothing
    assert not torch.equal(both(*inputs()).x, plain(*inputs()).x)
    both.graph.edges.score.zero_()
    assert torch.equal(both(*inputs()).x, plain(*inputs()).x)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"graph_gate": True, "graph": False}, "`graph_gate` needs `edges`"),
        ({"graph_gate": True, "moe": False}, "`graph_gate` needs `experts`"),
        ({"graph_adapters": True, "graph": False}, "`graph_adapters` needs `edges`"),
    ],
)
def test_what_reads_no_graph_is_refused(options, message):
    with pytest.raises(ArbError, match=message):
        graph_config(**options)


def test_codes_that_followed_become_edges():
    both = Both()
    for buffer in both.graph.edges.buffers():
        buffer.zero_()
    both(*inputs()).x.sum().backward()
    both.graph.edges.after_step()
    leaving = both.graph.edges.find(codes()[:, :-1].flatten())[0]
    following = codes()[:, 1:].reshape(-1, 1)
    assert (leaving == following).any(dim=1).float().mean() > 0.5
