"""Messages between processes: ownership, how much travels, and errors where processes differ.

Messages are imagined here; `test_shared_run.py` sends real ones.
"""

import ast
import inspect
import re
from types import SimpleNamespace
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from processes import environment

from arbcli.base.errors import ArbError
from arbcli.config.presets import preset
from arbcli.config.training import MOST_PARTS, REDUCE_DTYPES
from arbcli.model.build import build_model
from arbcli.model.layers.table import TableWeight
from arbcli.model.layers.vector import VectorWeight
from arbcli.model.rules import stage_rule
from arbcli.training.parallel import group as groups
from arbcli.training.parallel import owners
from arbcli.training.parallel.group import Group, own_device
from arbcli.training.parallel.owners import (
    SUMS,
    assign_owners,
    broadcast_buffers,
    cost,
    owner_buffers,
    plan,
    rounded_up,
)
from arbcli.training.parallel.replicas import Replicas
from arbcli.training.parallel.shared_updater import next_exponents, part_limit, sums_for
from arbcli.training.step import TrainingStep

NONE, NOT_FINITE, LOWEST = -128, 127, -100
"""Exponents that are none, as `test_constants.py` has them."""


@pytest.fixture
def silent(monkeypatch):
    """Send nothing: what travels stays as it is."""
    done = SimpleNamespace(wait=lambda: None)
    for name in ("all_to_all_single", "broadcast", "all_gather", "all_reduce"):
        monkeypatch.setattr(dist, name, lambda *_, **__: done)


@pytest.mark.parametrize("late", [False, True], ids=["at once", "on the way"])
def test_lost_process_is_reported_by_the_call_that_waits_for_it(late, monkeypatch):
    def gone(*_, **__):
        raise RuntimeError("connection closed by peer")

    work = SimpleNamespace(wait=gone) if late else None
    for name in ("all_to_all_single", "broadcast", "all_gather", "all_reduce"):
        monkeypatch.setattr(dist, name, (lambda *_, **__: work) if late else gone)
    group, tensor = Group(rank=1, size=2), torch.zeros(4, dtype=torch.uint8)
    talks = [lambda: group.send_to_owners(tensor, [2, 2]).wait()]
    talks += [lambda: group.broadcast(tensor, 0).wait()]
    talks += [] if late else [lambda: group.in_order([tensor]), lambda: group.sum(tensor)]
    for talk in talks:
        with pytest.raises(ArbError, match=r"process of the run is lost.*connection closed"):
            talk()


def test_bytes_that_are_received_are_counted_for_all(silent):
    """Of four processes each sends what it has to the three others."""
    group = Group(rank=1, size=4)
    sizes = [16, 32, 0, 48]
    arrived = group.send_to_owners(torch.zeros(96, dtype=torch.uint8), sizes).wait()
    assert arrived.shape == (4, 32)
    assert group.received == 3 * 96
    tensor = torch.zeros(10, dtype=torch.int32)
    steps = {
        lambda: group.broadcast(tensor, 2): 3 * 40,
        lambda: group.in_order([tensor, tensor]): 4 * 3 * 80,
        lambda: group.sum(tensor): 2 * 3 * 40,
        lambda: group.largest(tensor): 2 * 3 * 40,
    }
    for talk, counted in steps.items():
        group.received = 0
        for times in (1, 2):
            assert talk() is not tensor  # which others hold as this process's own
            assert group.received == times * counted
    alone = Group()
    assert torch.equal(alone.send_to_owners(tensor, [40]).wait(), tensor[None])
    for talk in (lambda: alone.broadcast(tensor, 0).wait(), lambda: alone.sum(tensor)):
        assert talk() is tensor
    assert alone.received == 0


@pytest.mark.parametrize("local", [1, 3])
def test_last_micro_batch_of_a_step_brings_the_gradients_of_a_twin(local):
    replicas, brought = Replicas.__new__(Replicas), []
    replicas._local, replicas._micro = local, 0
    replicas._wrapped = mock.Mock(
        side_effect=lambda *_: brought.append(replicas._wrapped.require_backward_grad_sync)
    )
    for _ in range(2 * local):
        replicas("inputs", "targets")
    assert brought == ([False] * (local - 1) + [True]) * 2


@pytest.mark.parametrize(("size", "gradient"), [(1, 2.5), (2, 2.0)])
def test_gradient_of_a_twin_is_the_mean_of_its_process_and_the_loss_that_of_all(
    size, gradient, monkeypatch
):
    """The mean over processes is all that is left to torch."""
    weight = torch.ones((), requires_grad=True)
    model = mock.Mock(losses=lambda ids, _: {"text": weight * ids})
    group = Group(0, size)
    monkeypatch.setattr(group, "in_order", lambda own: own + [torch.tensor(0.75)] * 2)
    batches = [(torch.tensor(x), None) for x in (1.0, 3.0, 5.0, 1.0)[: 4 // size]]
    step = TrainingStep(model, mock.Mock(averages=False), 4, group)
    assert float(step(batches)["text"]) == 2.5
    assert float(weight.grad) == gradient


@pytest.mark.parametrize(("number", "size"), [(1, 1), (8, 1), (8, 2), (12, 4), (40, 8)])
def test_micro_batches_are_dealt_out_once_and_in_their_order(number, size):
    parts = [[*Group(rank, size).local(number)] for rank in range(size)]
    assert [micro for part in parts for micro in part] == [*range(number)]
    assert {len(part) for part in parts} == {number // size}
    assert [Group(rank, size).first for rank in range(size)] == [True] + [False] * (size - 1)


def test_differing_process_is_named_with_the_difference(monkeypatch):
    group = Group(rank=1, size=3)
    own = dict.fromkeys("abcdefg", 1)
    monkeypatch.setattr(group, "collect", lambda values: [own, own, found])
    found = {**own}
    group.compare(found, "setting")
    found |= {"c": 2, "z": 1}
    message = "process 2 has another setting than process 0: `c`, `z`"
    with pytest.raises(ArbError, match=re.escape(message)) as caught:
        group.compare(own | {"z": None}, "setting", "do so")
    assert caught.value.hint == "do so"
    found = dict.fromkeys(own, 3)
    with pytest.raises(ArbError, match=r"0: `a`, `b`, `c`, `d`, `e`$") as caught:
        group.compare(own, "file")
    assert "the same arguments" in caught.value.hint


def test_each_process_has_a_gpu_of_its_own(monkeypatch):
    about = {"RANK": "5", "WORLD_SIZE": "8", "LOCAL_RANK": "1", "MASTER_ADDR": "a"}
    cpu, cuda = torch.device("cpu"), torch.device("cuda")
    chosen = []
    monkeypatch.setattr(torch.cuda, "set_device", chosen.append)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    for name, value in about.items():
        monkeypatch.setenv(name, value)
    assert own_device(cuda) == cuda  # nothing says where they meet
    monkeypatch.setenv("MASTER_PORT", "1")
    assert (own_device(cpu), own_device(cuda)) == (cpu, torch.device("cuda:1"))
    assert chosen == [1]
    monkeypatch.setenv("LOCAL_RANK", "2")
    with pytest.raises(
        ArbError, match="process 2 of this machine has no GPU: there are 2"
    ) as found:
        own_device(cuda)
    assert "start at most 2" in found.value.hint


def test_single_process_is_a_group_of_size_1(monkeypatch):
    monkeypatch.setattr(dist, "init_process_group", lambda **_: pytest.fail("joined"))
    for name, value in environment(0, 1, 1).items():
        monkeypatch.setenv(name, value)
    device = torch.device("cuda", 1)
    with groups.joined(device, "train") as group:
        assert (group.rank, group.size, group.device) == (0, 1, device)


@pytest.mark.parametrize(("reduce_dtype", "micro_batches", "local", "limit", "bits"), [
    ("int8", 1, 1, 127, 8), ("int8", 2, 2, 63, 8), ("int8", 3, 3, 42, 8), ("int8", 4, 4, 31, 8),
    ("int8", 8, 2, 31, 8), ("int8", 5, 5, 31, 12), ("int8", 67, 67, 31, 16),
    ("int12", 1, 1, 2047, 12), ("int12", 4, 1, 511, 12), ("int12", 16, 4, 511, 12),
    ("int12", 5, 5, 511, 16), ("int12", 65, 65, 511, 32),
    ("int16", 1, 1, 32767, 16), ("int16", 4, 4, 8191, 16), ("int16", 5, 5, 8191, 32),
])  # fmt: skip
def test_sum_of_parts_is_as_narrow_as_it_can_be_and_never_wraps(
    reduce_dtype, micro_batches, local, limit, bits
):
    assert part_limit(reduce_dtype, micro_batches) == limit
    sums = sums_for(limit, local, micro_batches)
    assert sum(sums.sizes(2, 8)) == 2 * bits
    assert limit * local <= sums.largest < 2 ** (bits - 1)
    assert limit * micro_batches * 64 < 2**31  # and none of what an owner adds up and mixes back


@pytest.mark.parametrize("reduce_dtype", REDUCE_DTYPES)
def test_as_many_parts_as_a_run_may_have_can_be_added_up(reduce_dtype):
    most = MOST_PARTS[reduce_dtype]
    limit = part_limit(reduce_dtype, most)
    assert sums_for(limit, most, most).largest >= limit * most
    assert limit * most * 64 < 2**31 <= limit * most * 64 * 1.1


def test_more_parts_than_can_be_added_up_are_refused():
    with pytest.raises(ValueError, match="5000 parts of 8191 are too many"):
        sums_for(8191, 1, 5000)


@pytest.mark.parametrize(("before", "fitting", "fall", "after"), [
    (5, 9, 1, 9), (5, 5, 1, 5), (5, 4, 1, 4), (5, -50, 1, 4),  # up at once, down by one
    (5, 9, 0, 9), (5, 4, 0, 5), (5, -50, 0, 5),  # and not in every step
    (LOWEST, -120, 1, LOWEST), (NONE, 7, 1, 7), (NONE, -90, 0, -90),
    (5, NONE, 1, 5), (5, NOT_FINITE, 1, 5),  # of no gradient, or a bad one, nothing is known
])  # fmt: skip
def test_exponents_move_up_at_once_and_down_by_one(before, fitting, fall, after):
    given = (torch.tensor([n], dtype=torch.int8) for n in (before, fitting, fall))
    assert next_exponents(*given).tolist() == [after]


def test_row_without_any_gradient_takes_the_largest_exponent():
    before = torch.tensor([NONE, 3, NONE, NONE], dtype=torch.int8)
    fitting = torch.tensor([NONE, 1, 6, NOT_FINITE], dtype=torch.int8)
    fall = torch.ones(1, dtype=torch.int8)
    assert next_exponents(before, fitting, fall).tolist() == [6, 2, 6, 6]


def tensors_of(small_graph: dict) -> list:
    given = {key: value for key, value in small_graph.items() if key not in ("preset", "batch")}
    with torch.device("meta"):
        model = build_model(preset("arb-tiny", **given))
        model.declare_wire()
    return [tensor for tensor in model.weights().values() if not tensor.frozen]


@pytest.mark.parametrize("size", [1, 2, 3, 8])
def test_work_is_dealt_out_evenly_from_the_last_tensor_on(size, small_graph):
    tensors = tensors_of(small_graph)
    dealt = assign_owners(tensors, size)
    assert dealt[id(tensors[-1])] == 0
    assert set(dealt.values()) == set(range(size))
    loads = [0.0] * size
    for tensor in reversed(tensors):  # the one that has had the least is next, at every moment
        assert loads[dealt[id(tensor)]] == min(loads)
        loads[dealt[id(tensor)]] += cost(tensor)


def test_cost_of_a_tensor_is_of_its_direction(small_graph):
    for tensor in tensors_of(small_graph):
        small = min(tensor.out_features // tensor.matrices, tensor.in_features)
        passes = 1.0
        if type(tensor.direction).__name__ == "Orthogonal":
            passes += small / 100
        assert cost(tensor) == pytest.approx(passes * tensor.num_weights)


@pytest.mark.parametrize("digits", ["trit", "all", "fade"])
def test_owner_of_a_vector_broadcasts_all_of_its_digits(digits):
    """Each process reads them, whatever the weights of the model are."""
    vector = VectorWeight((1.0, 0.5), preset("tiny", digits=digits).site(), area="mlp")
    assert {*broadcast_buffers(vector)} >= {"trits", "exponent", "fraction", "remainder"}
    assert {*owner_buffers(vector)} == {"moment", "row_statistic", "column_statistic"}


@pytest.mark.parametrize("size", [1, 3])
@pytest.mark.parametrize(("sums", "digits"), [(0, "trit"), (1, "trit"), (2, "trit"), (3, "all")])
def test_nothing_that_travels_overlaps(size, sums, digits, small_graph, monkeypatch):
    monkeypatch.setattr(owners, "BUCKET_WEIGHTS", 3000)
    tensors = tensors_of(small_graph | {"digits": digits})
    dealt = assign_owners(tensors, size)
    buckets = plan(tensors, dealt, size, SUMS[sums], 0.35, 0.0)
    assert len(buckets) > 5
    seen: dict[int, list[int]] = {}
    for bucket in buckets:
        assert bucket.rows == sum(member.shape[0] for member in bucket.members)
        ends = {(way, rank): 0 for way in ("up", "down") for rank in range(size)}
        for member in bucket.members:
            assert member.owner == dealt[id(member.tensor)]
            seen.setdefault(id(member.tensor), []).extend(member.matrices)
            rows, columns = member.shape
            up = rounded_up(rows * columns * (1, 1, 2, 4)[sums]) + rounded_up(rows)
            up += rounded_up((rows + 1) // 2 * columns) if sums == 1 else 0
            by_bits = digits == "all" and not isinstance(member.tensor, TableWeight)
            assert member.by_bits == by_bits
            down = sum(rounded_up(part.nbytes) for part in member.copied())
            down += rounded_up((rows + 1) // 2 * columns) if by_bits else 0
            for way, begin, length in (("up", member.up, up), ("down", member.down, down)):
                assert begin == ends[way, member.owner]  # one after the other, each at a multiple
                assert begin % 16 == 0
                ends[way, member.owner] += length
        assert bucket.up_sizes == [ends["up", rank] for rank in range(size)]
        assert bucket.down_sizes == [ends["down", rank] for rank in range(size)]
    for tensor in tensors:
        assert sorted(seen[id(tensor)]) == [*range(tensor.matrices)]
        names = broadcast_buffers(tensor).keys() | owner_buffers(tensor).keys()
        assert not broadcast_buffers(tensor).keys() & owner_buffers(tensor).keys()
        assert names >= tensor.state.keys()


@pytest.mark.parametrize("rule", ["moment", "nibble"])
def test_the_same_is_broadcast_while_weights_fade(rule, small_graph):
    """An owner's message has one layout all through a run."""
    for tensor in tensors_of(small_graph | {"rule": rule, "digits": "fade"}):
        before = broadcast_buffers(tensor).keys()
        assert ("remainder" in before) == tensor.reads_digits
        tensor.rule = stage_rule(rule, "trit")
        assert broadcast_buffers(tensor).keys() == before


@pytest.mark.parametrize(("size", "expected"), [(0, 0), (1, 16), (16, 16), (17, 32)])
def test_places_in_a_message_are_rounded_up(size, expected):
    assert rounded_up(size) == expected


def test_every_message_to_other_processes_explains_their_loss():
    """One that does not is a traceback where a process was killed."""

    def calls(node, explains: bool):
        if isinstance(node, ast.With):
            explains |= "explained_loss()" in map(ast.unparse, (i.context_expr for i in node.items))
        if isinstance(node, ast.Call) and ast.unparse(node.func).startswith("dist."):
            yield ast.unparse(node.func), explains
        for child in ast.iter_child_nodes(node):
            yield from calls(child, explains)

    found = dict.fromkeys(calls(ast.parse(inspect.getsource(groups)), False))
    assert len(found) > 8
    # groups end otherwise, and a caller explains the first
    plain = {name.removeprefix("dist.") for name, explains in found if not explains}
    assert plain == {"batch_isend_irecv", "destroy_process_group"}
