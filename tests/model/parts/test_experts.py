"""Experts: which positions they get, what they make of them, and how the load is kept even."""

from itertools import pairwise

import pytest
import torch
from graph_parts import (
    CLOSE,
    assert_same,
    decoded,
    fill_memories,
    graph_config,
    initialised,
    normal,
    reading,
    site,
    text,
)

from arbcli.config.parts import ExpertsConfig
from arbcli.config.presets import preset
from arbcli.kernels.codec.packing import pack_trits
from arbcli.kernels.matmul.round_nvfp4 import round_nvfp4
from arbcli.kernels.matmul.scaled_nvfp4 import nvfp4_matmul
from arbcli.kernels.norm.rms_norm import FEW_ROWS
from arbcli.model.build import build_model
from arbcli.model.flow import Reading
from arbcli.model.layers import expert_weight
from arbcli.model.layers.expert_weight import ExpertWeight
from arbcli.model.layers.norm import ClampedGate, TernaryGate
from arbcli.model.parts.experts import (
    MOST_BALANCE,
    Experts,
    Gate,
    root_softplus,
    route,
)
from arbcli.model.parts.hashed_experts import hashed_experts
from arbcli.model.parts.ngrams import ngram_keys
from arbcli.train.updater import Updater
from arbcli.verify.parts.experts import experts
from arbcli.verify.parts.experts import hashed_experts as experts_by_hash

ITERATED = graph_config().main.memories.iterated
POSITIONS = 7
CHOICE = torch.tensor([[2, 0], [0, 3], [3, 2], [2, 0], [0, 2]])
"""Nobody chooses expert 1."""


def config_of(**options) -> ExpertsConfig:
    return graph_config(**options).main.memories.iterated.experts


def part(**options) -> Experts:
    made = Experts(config_of(**options), site(), ITERATED.expert_dim, ITERATED.gate_dim)
    made = initialised(made)
    fill_memories(made)
    return made


def inputs(seed=0) -> tuple[torch.Tensor, torch.Tensor]:
    shapes = ((POSITIONS, ITERATED.expert_dim), (POSITIONS, ITERATED.gate_dim))
    return tuple(normal(*shape, seed=seed + i) for i, shape in enumerate(shapes))


def reference(tested: Experts, config=None):
    config = config or config_of()
    return lambda w, x, query: experts(w, query, x, reading(config, tested))


def test_route_sorts_slots_by_expert():
    routing = route(CHOICE, 4)
    assert routing.bounds.tolist() == [0, 4, 4, 8, 10]
    assert routing.tokens.tolist() == [0, 1, 3, 4, 0, 2, 3, 4, 1, 2]
    positions = torch.arange(len(CHOICE))[:, None].expand_as(CHOICE)
    assert torch.equal(routing.tokens[routing.positions], positions)
    owners = torch.searchsorted(routing.bounds[1:], routing.positions, right=True)
    assert torch.equal(owners, CHOICE)


@pytest.mark.parametrize("only", [0, 3])
def test_route_to_one_expert(only):
    routing = route(torch.full((5, 1), only), 4)
    assert routing.bounds.tolist() == [0 if e <= only else 5 for e in range(5)]
    assert routing.tokens.tolist() == list(range(5))


@pytest.mark.parametrize("at_once", [1, 2**25], ids=["an expert at a time", "together"])
@pytest.mark.parametrize("top_k", [2, 4])
def test_experts_equal_a_loop_over_positions(top_k, at_once, monkeypatch):
    monkeypatch.setattr(expert_weight, "WEIGHTS_AT_ONCE", at_once)
    tested = part(moe_top_k=top_k)
    assert_same(tested, inputs(), tested.mix, reference(tested, config_of(moe_top_k=top_k)))


@pytest.mark.parametrize("transposed", [False, True])
@pytest.mark.parametrize("at_once", [1, 2**25], ids=["an expert at a time", "together"])
def test_products_in_four_bits_are_those_of_each_matrix(at_once, transposed, monkeypatch):
    monkeypatch.setattr(expert_weight, "WEIGHTS_AT_ONCE", at_once)
    weight = initialised(ExpertWeight(4, 48, 32, site(), area="experts"))
    weight.exponent[48:96] -= 5  # experts of other sizes
    slots, bounds = 70, torch.tensor([0, 30, 30, 41, 70])
    x = normal(slots, 48 if transposed else 32)
    exact = weight.product(x, bounds, transposed=transposed)
    weight.nvfp4 = True
    found = weight.product(x, bounds, transposed=transposed)
    q, scale = round_nvfp4(x)
    for expert, (first, last) in enumerate(pairwise(bounds.tolist())):
        packed = weight.packed.rows(slice(48 * expert, 48 * expert + 48))
        wanted = nvfp4_matmul(q[first:last].contiguous(), scale, packed, transposed, x.dtype)
        assert torch.equal(found[first:last], wanted)
    assert 0.02 < (found - exact).norm() / exact.norm() < 0.2
    few = torch.tensor([0, 1, 1, 1, 2])
    weight.nvfp4 = False
    exact = weight.product(x[:2], few, transposed=transposed)
    weight.nvfp4 = True
    assert torch.equal(weight.product(x[:2], few, transposed=transposed), exact)


def test_six_of_384_experts_step_together():
    config = preset(
        "tiny", dim=16, heads=1, layers=1, ffn=4, ctx=8, experts=384, top_k_experts=6,
        direction="factored",
    )  # fmt: skip
    lm = build_model(config, torch.float32)
    lm.initialise(0)
    (experts,) = (part for part in lm.modules() if isinstance(part, Experts))
    assert experts.gate_up.matrices == 384
    updater = Updater(lm.weights().values(), 0, torch.float32)
    for weight in lm.weights().values():
        weight.sink = updater
    before = experts.down.trits.clone()
    updater.begin(0, 16.0)
    lm.loss(text(2, 8), text(2, 8)).backward()
    updater.finish()
    lm.after_step()
    gate = experts.gate
    assert gate.load.sum() == 2 * 8 * 6
    moved = (experts.down.trits != before).view(384, -1).any(dim=1)
    assert moved.any()
    assert not moved[gate.load == 0].any()


KINDS = (
    {"moe_gate": "softplus"},
    {"shared_expert": True},
    {"moe_gate": "softplus", "shared_expert": True, "moe_clamp": True, "moe_top_k": 3},
)


@pytest.mark.parametrize("options", KINDS, ids=str)
def test_other_gates_and_experts_equal_a_loop_over_positions(options):
    tested = part(**options)
    x, query = inputs()
    given = 30 * x if "moe_clamp" in options else x, query  # a few products are beyond the clamp
    assert_same(tested, given, tested.mix, reference(tested, config_of(**options)))


def test_clamp_takes_the_gradient_of_what_is_beyond():
    gate, free = (kind(3, site(), normalise=False) for kind in (ClampedGate, TernaryGate))
    x = torch.tensor([[9.0, 11.0, -11.0, 9.0, 11.0, -11.0]])
    bounded = torch.tensor([[9.0, 10.0, -11.0, 9.0, 10.0, -10.0]])
    assert torch.equal(gate(x), free(bounded))
    ones = torch.ones(1, 3)
    wanted = free.backward(ones, bounded)[0] * torch.tensor([1, 0, 1, 1, 0, 0])
    assert torch.equal(gate.backward(ones, x)[0], wanted)


def test_roots_and_their_gradients_are_finite():
    z = torch.tensor([-1e4, -200.0, -100.0, 0.0, 100.0, 1e4], requires_grad=True)
    s = root_softplus(z)
    s.sum().backward()
    assert (s > 0).all()
    assert z.grad.isfinite().all()
    torch.testing.assert_close(s[4:], z.detach()[4:].sqrt())


@pytest.mark.parametrize(("number", "top_k"), [(5, 1), (8, 2), (4, 4), (33, 6)])
def test_hashed_experts_are_those_of_the_reference(number, top_k):
    config = config_of(experts=number, moe_top_k=top_k)
    ids = text(rows=3, length=9)
    found = hashed_experts(ngram_keys(ids), number, top_k)
    wanted = [chosen for row in ids for chosen in experts_by_hash(reading(config, ids=row))]
    assert found.tolist() == wanted
    assert all(len(set(row)) == top_k for row in wanted)
    later = hashed_experts(Reading.of_text(ids, 4).grams, number, top_k)  # the last of a text
    assert torch.equal(later.view(3, 4, -1), found.view(3, 9, -1)[:, -4:])


def test_every_pair_of_hashed_experts_is_as_likely():
    ids = torch.cartesian_prod(*[torch.arange(28)] * 3).view(1, -1)  # 65856 bytes
    first, second = hashed_experts(ngram_keys(ids), 6, 2).T
    counts = torch.bincount(6 * first + second, minlength=36).view(6, 6)
    assert counts.diagonal().eq(0).all()
    others = counts[~torch.eye(6, dtype=torch.bool)].float()
    assert others.max() / others.min() < 1.5


def test_weight_of_a_single_expert_is_one():
    tested = part(moe_top_k=1)
    assert tested.gate(inputs()[1])[1].eq(1).all()
    expected = reference(tested, config_of(moe_top_k=1))
    with torch.no_grad():
        twins = [x.double() for x in inputs()]
        torch.testing.assert_close(
            tested.mix(*inputs()).double(), expected(decoded(tested), *twins), **CLOSE
        )


def test_two_uses_give_every_expert_one_gradient():
    tested = part()
    run = reference(tested)

    def twice(call):
        return lambda x, query, y, other: call(call(x, query) + y, other)

    def expected(w, *given):
        return twice(lambda *each: run(w, *each))(*given)

    assert_same(tested, (*inputs(), *inputs(2)), twice(tested.mix), expected)


def test_expert_without_positions_gets_no_gradient():
    weight = initialised(ExpertWeight(4, 5, 6, site(), area="experts"))
    grads = {}
    bounds = torch.tensor([0, 4, 4, 8, 10])

    def sink(_, stack, where):
        grads.update(zip(where, stack, strict=True))

    weight.hand_on(sink, ((normal(10, 6), bounds),), normal(10, 5))
    assert sorted(grads) == [0, 1, 2, 3]
    assert grads[1].eq(0).all()
    assert all(grads[expert].ne(0).any() for expert in (0, 2, 3))


def new_gate(top_k: int) -> Gate:
    return initialised(Gate(config_of(moe_top_k=top_k), ITERATED.gate_dim, site(), "experts"))


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
        gate.after_step()
        loads.append(gate.load.tolist())
        if loads[-1][2] < 32:
            break
        assert gate.balance.tolist() == [len(loads), len(loads), -len(loads), len(loads)]
        assert gate.gauges() == {"fullest_expert": 4.0}
    assert loads[0] == [0, 0, 32, 0]
    assert loads[-1][2] == 0  # in the end another one has them
    gate.load.zero_()
    assert gate.gauges() == {"fullest_expert": 0}  # of no slots at all


def test_balance_saturates():
    gate, query = gate_that_prefers(2)
    gate.keys.weight.exponent += 10  # no balance outweighs such scores
    for _ in range(MOST_BALANCE + 20):
        gate(query)
        gate.after_step()
    assert gate.balance.tolist() == [MOST_BALANCE, MOST_BALANCE, -MOST_BALANCE, MOST_BALANCE]
    assert gate.balance.dtype == torch.int8


def test_even_load_leaves_the_balance():
    gate = new_gate(4)
    gate(normal(3, ITERATED.gate_dim))
    gate.after_step()
    assert gate.balance.eq(0).all()


def test_load_of_a_step_adds_up_and_is_forgotten():
    gate, query = gate_that_prefers(0)
    gate(query)
    gate.forget()
    with torch.no_grad():
        gate(query)
    gate.after_step()
    assert gate.load.sum() == 0
    gate(query)
    gate(query[:3])
    gate.after_step()
    assert gate.load.sum() == 35


def test_balance_chooses_and_does_not_weigh():
    tested = part()
    query = inputs()[1]
    tested.gate.balance.fill_(0)
    chosen, gates = tested.gate(query)
    tested.gate.balance.fill_(50)  # for all alike
    assert torch.equal(tested.gate(query)[0], chosen)
    assert torch.equal(tested.gate(query)[1], gates)


@pytest.mark.parametrize("name", ["norm", "sub_norm"])
def test_rows_of_several_texts_are_normalised_few_at_a_time(name, monkeypatch):
    """With more at once, a program has other threads for a row, whose sums have other orders."""
    own, seen = initialised(Experts(ExpertsConfig(experts=4, width=7, top_k=3), site(), 40)), []

    def note(x):
        seen.append(len(x))
        return x[:, : 40 if name == "norm" else 7]

    if name == "sub_norm":
        monkeypatch.setattr(own.sub_norm, "forward", note)
    own.step_texts(normal(9, 1, 40), note if name == "norm" else lambda x: x, None)
    assert (sum(seen), max(seen)) == (27, FEW_ROWS)
