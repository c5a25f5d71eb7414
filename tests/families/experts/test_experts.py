"""Experts, their load, and iterations over experts and graph: equations, halting, bounds."""

from dataclasses import replace

import pytest
import torch
from graph_parts import (
    assert_same,
    fill_memories,
    graph_config,
    initialised,
    normal,
    plain,
    spec,
    text,
)
from torch import nn

from arbcli.config.presets import preset
from arbcli.families.experts import weight as expert_weight
from arbcli.families.experts.config import ExpertsConfig
from arbcli.families.experts.hashed import hashed_experts
from arbcli.families.experts.mixture import Experts, Gate
from arbcli.families.graph.codebook import Codebook, Found
from arbcli.families.graph.moe_graph import Iterated, MoEGraph
from arbcli.kernels.codec.packing import pack_trits
from arbcli.kernels.norm.rms_norm import FEW_ROWS
from arbcli.model.build import build_model
from arbcli.model.layers.norm import ClampedGate, TernaryGate
from arbcli.model.ngrams import ngram_keys, reading_of
from arbcli.model.updater import Updater

ITERATED = graph_config().main.memories.iterated
POSITIONS = 7
GOLDEN = 0x9E3779B97F4A7C15


def config_of(**options) -> ExpertsConfig:
    return graph_config(**options).main.memories.iterated.experts


def part(**options) -> Experts:
    experts = Experts(config_of(**options), spec(), ITERATED.expert_dim, ITERATED.gate_dim)
    experts = initialised(experts)
    fill_memories(experts)
    return experts


def inputs(seed=0) -> tuple[torch.Tensor, torch.Tensor]:
    shapes = ((POSITIONS, ITERATED.expert_dim), (POSITIONS, ITERATED.gate_dim))
    return tuple(normal(*shape, seed=seed + i) for i, shape in enumerate(shapes))


def reference(tested: Experts, config=None):
    config = config or config_of()
    return lambda w, x, query: plain(config, w, tested)(query, x, None)


@pytest.mark.parametrize(("top_k", "at_once"), [(2, 1), (4, 2**25)])
def test_experts_equal_a_loop_over_positions(top_k, at_once, monkeypatch):
    monkeypatch.setattr(expert_weight, "WEIGHTS_AT_ONCE", at_once)
    tested = part(moe_top_k=top_k)
    assert_same(tested, inputs(), tested.mix, reference(tested, config_of(moe_top_k=top_k)))


def test_clamp_has_no_gradient_beyond_its_bounds():
    gate, free = (kind(3, spec(), normalise=False) for kind in (ClampedGate, TernaryGate))
    x = torch.tensor([[9.0, 11.0, -11.0, 9.0, 11.0, -11.0]])
    bounded = torch.tensor([[9.0, 10.0, -11.0, 9.0, 10.0, -10.0]])
    assert torch.equal(gate(x), free(bounded))
    ones = torch.ones(1, 3)
    wanted = free.backward(ones, bounded)[0] * torch.tensor([1, 0, 1, 1, 0, 0])
    assert torch.equal(gate.backward(ones, x)[0], wanted)


def drawn_by(row: int, number: int, top_k: int) -> list[int]:
    """Draw experts from those that are left, by Python's integers."""
    left, chosen = list(range(number)), []
    for draw in range(top_k):
        key = (row + draw * 2**40) * GOLDEN % 2**64
        key = (key ^ (key >> 32)) * GOLDEN % 2**64
        chosen.append(left.pop((key >> 32) % 2**31 * len(left) >> 31))
    return chosen


@pytest.mark.parametrize(("number", "top_k"), [(5, 1), (8, 2), (4, 4), (33, 6)])
def test_hashed_experts_are_drawn_from_those_that_are_left(number, top_k):
    ids = text(rows=3, length=9)
    hashed = hashed_experts(ngram_keys(ids), number, top_k)
    wanted = [drawn_by(key, number, top_k) for key in ngram_keys(ids).flatten().tolist()]
    assert hashed.tolist() == wanted
    assert all(len(set(row)) == top_k for row in wanted)
    later = hashed_experts(reading_of(ids, 4).grams, number, top_k)  # the last of a text
    assert torch.equal(later.view(3, 4, -1), hashed.view(3, 9, -1)[:, -4:])


def new_gate(top_k: int) -> Gate:
    return initialised(Gate(config_of(moe_top_k=top_k), ITERATED.gate_dim, spec(), "experts"))


def gate_that_prefers(expert: int) -> tuple[Gate, torch.Tensor]:
    """Make a gate, and 32 queries for one expert."""
    gate = new_gate(1)
    signs = torch.full((4, ITERATED.gate_dim), -1, dtype=torch.int8)
    signs[expert] = 1
    gate.keys.weight.trits.copy_(pack_trits(signs))
    return gate, torch.ones(32, ITERATED.gate_dim)


def test_balance_moves_against_the_load():
    gate, query = gate_that_prefers(2)
    loads = []
    for _ in range(400):
        gate(query)
        gate.finish_step()
        loads.append(gate.load.tolist())
        if loads[-1][2] < 32:
            break
        assert gate.balance.tolist() == [len(loads), len(loads), -len(loads), len(loads)]
        assert gate.gauges() == {"fullest_expert": 4.0}
    assert loads[0] == [0, 0, 32, 0]
    assert loads[-1][2] == 0  # in the end another one has them
    gate.load.zero_()
    assert gate.gauges() == {"fullest_expert": 0}  # of no slots at all


@pytest.mark.parametrize("name", ["norm", "sub_norm"])
def test_rows_of_several_texts_are_normalised_few_at_a_time(name, monkeypatch):
    """With more at once, a program has other threads for a row, whose sums have other orders."""
    experts_of_rows, seen = (
        initialised(Experts(ExpertsConfig(experts=4, width=7, top_k=3), spec(), 40)),
        [],
    )

    def note(x):
        seen.append(len(x))
        return x[:, : 40 if name == "norm" else 7]

    if name == "sub_norm":
        monkeypatch.setattr(experts_of_rows.sub_norm, "forward", note)
    experts_of_rows.step_texts(normal(9, 1, 40), note if name == "norm" else lambda x: x, None)
    assert (sum(seen), max(seen)) == (27, FEW_ROWS)


CODES = 32
ROWS, LENGTH = 2, 6


class Both(nn.Module):
    """The iterations, and the codebook whose rows the edges carry."""

    def __init__(self, **options) -> None:
        super().__init__()
        memories, where = graph_config(**options).main.memories, spec(**options)
        self.graph = MoEGraph(memories.iterated, where, memories.codebook.width)
        self.codebook = Codebook(replace(memories.codebook, heads=1), where, "codebook")
        initialised(self)
        fill_memories(self)

    def forward(self, x, confidence) -> Iterated:
        return self.graph(x, self.codebook, Found(x, codes(), confidence))


def codes() -> torch.Tensor:
    return torch.arange(ROWS * LENGTH).view(ROWS, LENGTH) * 5 % CODES


def iterated_inputs() -> tuple[torch.Tensor, torch.Tensor]:
    return normal(ROWS, LENGTH, 40), normal(ROWS, LENGTH, seed=1).sigmoid()


def test_six_of_384_experts_step_together():
    config = preset(
        "tiny", dim=16, heads=1, layers=1, ffn=4, ctx=8, experts=384, top_k_experts=6,
        direction="factored",
    )  # fmt: skip
    lm = build_model(config, torch.float32)
    lm.initialise(0)
    (experts,) = (part for part in lm.modules() if isinstance(part, Experts))
    assert experts.down.matrices == 384
    for weight in lm.weights().values():
        weight.sink = lambda *_: None
    experts.down.sink = updater = Updater([experts.down], 0, torch.float32)
    before = experts.down.trits.clone()
    updater.begin(0, 16.0)
    lm.loss(text(2, 8), text(2, 8)).backward()
    updater.finish()
    lm.finish_step()
    gate = experts.gate
    assert gate.load.sum() == 2 * 8 * 6
    moved = (experts.down.trits != before).view(384, -1).any(dim=1)
    assert moved.any()
    assert not moved[gate.load == 0].any()


@pytest.mark.parametrize("options", [{}, {"graph_gate": True}], ids=str)
def test_filled_graph_changes_the_first_choice_where_edges_enter_the_query(options):
    both, outputs = Both(**options), {}
    assert (both.graph.edges.score > 0).any()
    for state in ("filled", "empty"):
        keep = outputs.setdefault(state, []).append
        hook = both.graph.experts.gate.register_forward_hook(lambda *call, keep=keep: keep(call[2]))
        both(*iterated_inputs())
        hook.remove()
        both.graph.edges.score.zero_()
    (filled, _), (empty, _) = outputs["filled"][0], outputs["empty"][0]
    assert torch.equal(filled, empty) == (not options)
    assert not torch.equal(outputs["filled"][1][0], outputs["empty"][1][0])  # through the stream


def test_filled_graph_scales_adapters_and_an_empty_graph_does_not():
    options = {"moe": False, "max_moe_iters": 1}
    both, plain = Both(**options, graph_adapters=True), Both(**options)
    state = both.state_dict()
    plain.load_state_dict({name: state[name] for name in plain.state_dict()})
    for silent in (both, plain):
        silent.graph.message.weight.trits.fill_(121)  # zeros: messages carry nothing
    assert not torch.equal(both(*iterated_inputs()).x, plain(*iterated_inputs()).x)
    both.graph.edges.score.zero_()
    assert torch.equal(both(*iterated_inputs()).x, plain(*iterated_inputs()).x)
