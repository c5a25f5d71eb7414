"""Experts: how many are computed at once, bounds of gates, draws by a hash, and their load."""

import pytest
import torch
from graph_parts import graph_config, initialised, normal, spec, text
from references import assert_agrees

from arbcli.config.presets import preset
from arbcli.families.experts import weight as expert_weight
from arbcli.families.experts.config import ExpertsConfig
from arbcli.families.experts.hashed import hashed_experts
from arbcli.families.experts.mixture import Experts, Gate
from arbcli.kernels.codec.packing import pack_trits
from arbcli.kernels.norm.rms_norm import FEW_ROWS
from arbcli.model.build import build_model
from arbcli.model.layers.norm import ClampedGate, TernaryGate
from arbcli.model.ngrams import ngram_keys
from arbcli.model.updater import Updater

ITERATED = graph_config().main.memories.iterated
GOLDEN = 0x9E3779B97F4A7C15


def test_model_with_one_expert_at_a_time_agrees_with_the_reference(monkeypatch, device):
    monkeypatch.setattr(expert_weight, "WEIGHTS_AT_ONCE", 1)
    assert_agrees(graph_config(), device)


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
    later = hashed_experts(ngram_keys(ids)[:, -4:], number, top_k)  # the last of a text
    assert torch.equal(later.view(3, 4, -1), hashed.view(3, 9, -1)[:, -4:])


def gate_that_prefers(expert: int) -> tuple[Gate, torch.Tensor]:
    """Make a gate, and 32 queries for one expert."""
    config = graph_config(moe_top_k=1).main.memories.iterated.experts
    gate = initialised(Gate(config, ITERATED.gate_dim, spec(), "experts"))
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


def test_keys_have_no_gradient_where_each_position_has_one_expert():
    """Its weight is 1; of s / s rounding errors are left, and each step has the same size."""
    config = ExpertsConfig(experts=4, width=7, top_k=1, gate="softplus")
    scores = normal(64, 4).requires_grad_()
    _, weights = Gate(config, 9, spec(), "experts").weigh(scores, None)
    (weights * normal(64, 1)).sum().backward()
    assert weights.eq(1).all()
    assert not scores.grad.any()


@pytest.mark.parametrize("name", ["norm", "sub_norm"])
def test_rows_of_several_texts_are_normalised_few_at_a_time(name, monkeypatch):
    """With more at once, a program has other threads for a row, whose sums have other orders."""
    experts_of_rows = initialised(Experts(ExpertsConfig(experts=4, width=7, top_k=3), spec(), 40))
    seen = []

    def note(x):
        seen.append(len(x))
        return x[:, : 40 if name == "norm" else 7]

    if name == "sub_norm":
        monkeypatch.setattr(experts_of_rows.sub_norm, "forward", note)
    experts_of_rows.step_texts(normal(9, 1, 40), note if name == "norm" else lambda x: x, None)
    assert (sum(seen), max(seen)) == (27, FEW_ROWS)


def test_six_of_384_experts_step_together():
    config = preset(
        "tiny", dim=16, heads=1, layers=1, ffn=4, ctx=8, experts=384, top_k_experts=6,
        direction="factored",
    )  # fmt: skip
    lm = build_model(config, torch.float32)
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
