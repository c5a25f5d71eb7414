"""Experts: who gets which positions, what they make of them, and how the load is kept even."""

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
    text,
)

from arbcli.kernels.codec.packing import pack_trits
from arbcli.model.blocks import experts as experts_module
from arbcli.model.blocks.experts import (
    MOST_BALANCE,
    Experts,
    ExpertWeight,
    Gate,
    root_softplus,
    route,
)
from arbcli.model.blocks.hashed_experts import hashed_experts
from arbcli.model.layers.norm import ClampedGate, TernaryGate
from arbcli.verify.graph_reference import experts, experts_by_hash, ngrams

CONFIG = graph_config()
POSITIONS = 7
CHOICE = torch.tensor([[2, 0], [0, 3], [3, 2], [2, 0], [0, 2]])
"""Nobody chooses expert 1."""


def part(**options) -> Experts:
    made = initialised(Experts(graph_config(**options)))
    fill_memories(made)
    return made


def inputs(seed=0) -> tuple[torch.Tensor, torch.Tensor]:
    shapes = ((POSITIONS, CONFIG.expert_dim), (POSITIONS, CONFIG.gate_dim))
    return tuple(normal(*shape, seed=seed + i) for i, shape in enumerate(shapes))


def reference(tested: Experts, config=CONFIG):
    def run(w, x, query):
        balance = getattr(tested.gate, "balance", None)
        rows = zip(x, query, strict=True)
        return torch.stack([experts(w, *row, config, balance) for row in rows])

    return run


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
    monkeypatch.setattr(experts_module, "WEIGHTS_AT_ONCE", at_once)
    tested = part(moe_top_k=top_k)
    assert_same(tested, inputs(), tested, reference(tested, graph_config(moe_top_k=top_k)))


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
    assert_same(tested, given, tested, reference(tested, graph_config(**options)))


def test_clamp_takes_the_gradient_of_what_is_beyond():
    gate, free = (kind(3, CONFIG, normalise=False) for kind in (ClampedGate, TernaryGate))
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
    config = graph_config(experts=number, moe_top_k=top_k)
    ids = text(rows=3, length=9)
    found = hashed_experts(ids, 9, number, top_k)
    wanted = [experts_by_hash(history, config) for row in ngrams(ids, 3) for history in row]
    assert found.tolist() == wanted
    assert all(len(set(row)) == top_k for row in wanted)
    later = hashed_experts(ids, 4, number, top_k)  # the last ones of a text
    assert torch.equal(later.view(3, 4, -1), found.view(3, 9, -1)[:, -4:])


def test_every_pair_of_hashed_experts_is_as_likely():
    ids = torch.cartesian_prod(*[torch.arange(28)] * 3).view(1, -1)  # 65856 bytes
    first, second = hashed_experts(ids, ids.shape[1], 6, 2).T
    counts = torch.bincount(6 * first + second, minlength=36).view(6, 6)
    assert counts.diagonal().eq(0).all()
    others = counts[~torch.eye(6, dtype=torch.bool)].float()
    assert others.max() / others.min() < 1.5


def test_weight_of_a_single_expert_is_one():
    tested = part(moe_top_k=1)
    assert tested.gate(inputs()[1])[1].eq(1).all()
    expected = reference(tested, graph_config(moe_top_k=1))
    with torch.no_grad():
        twins = [x.double() for x in inputs()]
        torch.testing.assert_close(
            tested(*inputs()).double(), expected(decoded(tested), *twins), **CLOSE
        )


def test_two_uses_give_every_expert_one_gradient():
    tested = part()
    run = reference(tested)

    def twice(call):
        return lambda x, query, y, other: call(call(x, query) + y, other)

    def expected(w, *given):
        return twice(lambda *each: run(w, *each))(*given)

    assert_same(tested, (*inputs(), *inputs(2)), twice(tested), expected)


def test_expert_without_positions_gets_no_gradient():
    weight = initialised(ExpertWeight(4, 5, 6, CONFIG))
    grads = {}
    weight.sink = lambda _, stack, where: grads.update(zip(where, stack, strict=True))
    bounds = torch.tensor([0, 4, 4, 8, 10])
    weight.hand_on(((normal(10, 6), bounds),), normal(10, 5))
    assert sorted(grads) == [0, 1, 2, 3]
    assert grads[1].eq(0).all()
    assert all(grads[expert].ne(0).any() for expert in (0, 2, 3))


def gate_that_prefers(expert: int) -> tuple[Gate, torch.Tensor]:
    """Make a gate, and 32 queries for one expert."""
    gate = initialised(Gate(graph_config(moe_top_k=1)))
    signs = torch.full((4, CONFIG.gate_dim), -1, dtype=torch.int8)
    signs[expert] = 1
    gate.keys.weight.trits.copy_(pack_trits(signs))
    return gate, torch.ones(32, CONFIG.gate_dim)


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
        assert gate.fullest() == 4.0
    assert loads[0] == [0, 0, 32, 0]
    assert loads[-1][2] == 0  # in the end another one has them
    gate.load.zero_()
    assert gate.fullest() == 0  # of no slots at all


def test_balance_saturates():
    gate, query = gate_that_prefers(2)
    gate.keys.weight.exponent += 10  # no balance outweighs such scores
    for _ in range(MOST_BALANCE + 20):
        gate(query)
        gate.after_step()
    assert gate.balance.tolist() == [MOST_BALANCE, MOST_BALANCE, -MOST_BALANCE, MOST_BALANCE]
    assert gate.balance.dtype == torch.int8


def test_even_load_leaves_the_balance():
    gate = initialised(Gate(graph_config(moe_top_k=4)))
    gate(normal(3, CONFIG.gate_dim))
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
