"""Messages between processes: ownership, how much travels, and errors where processes differ.

Messages are imagined here; `test_shared_run.py` sends real ones.
"""

import re
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist
from made_runs import model_of

from arbcli.base.errors import ArbError
from arbcli.config.presets import preset
from arbcli.model.build import build_model
from arbcli.model.layers.vector import VectorWeight
from arbcli.training.parallel.group import Group, own_device
from arbcli.training.parallel.owners import (
    SUM_FORMATS,
    assign_owners,
    broadcast_buffers,
    owner_buffers,
    plan_buckets,
)
from arbcli.training.parallel.shared_updater import next_exponents, part_limit, sums_for

NONE, NOT_FINITE, LOWEST = -128, 127, -100
"""Exponents that are none, as `test_constants.py` has them."""


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
    talks += [] if late else [lambda: group.gather([tensor]), lambda: group.sum(tensor)]
    for talk in talks:
        with pytest.raises(ArbError, match=r"process of the run is lost.*connection closed"):
            talk()


def test_differing_process_is_named_with_the_difference(monkeypatch):
    group = Group(rank=1, size=3)
    settings = dict.fromkeys("abcdefg", 1)
    monkeypatch.setattr(group, "collect", lambda values: [settings, settings, others])
    others = {**settings}
    group.compare(others, "setting")
    others |= {"c": 2, "z": 1}
    message = "process 2 has another setting than process 0: `c`, `z`"
    with pytest.raises(ArbError, match=re.escape(message)) as caught:
        group.compare(settings | {"z": None}, "setting", "do so")
    assert caught.value.hint == "do so"
    others = dict.fromkeys(settings, 3)
    with pytest.raises(ArbError, match=r"(?m)0: `a`, `b`, `c`, `d`, `e`$") as caught:
        group.compare(settings, "file")
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
    ) as refused:
        own_device(cuda)
    assert "start at most 2" in refused.value.hint


@pytest.mark.parametrize(("reduce_dtype", "micro_batches", "local", "limit", "bits"), [
    ("int8", 1, 1, 127, 8), ("int8", 2, 2, 63, 8), ("int8", 3, 3, 42, 8), ("int8", 4, 4, 31, 8),
    ("int8", 8, 2, 31, 8), ("int8", 5, 5, 31, 12), ("int8", 67, 67, 31, 16),
    ("int12", 1, 1, 2047, 12), ("int12", 4, 1, 511, 12), ("int12", 16, 4, 511, 12),
    ("int12", 5, 5, 511, 16), ("int12", 65, 65, 511, 32),
    ("int16", 1, 1, 32767, 16), ("int16", 4, 4, 8191, 16), ("int16", 16, 16, 2047, 16),
    ("int16", 17, 17, 2047, 32),
])  # fmt: skip
def test_sum_of_parts_is_as_narrow_as_it_can_be_and_never_wraps(
    reduce_dtype, micro_batches, local, limit, bits
):
    assert part_limit(reduce_dtype, micro_batches) == limit
    sums = sums_for(limit, local, micro_batches)
    assert sum(sums.sizes(2, 8)) == 2 * bits
    assert limit * local <= sums.largest < 2 ** (bits - 1)
    assert limit * micro_batches * 64 < 2**31  # and none of what an owner adds up and mixes back


@pytest.mark.parametrize(("before", "fitting", "fall", "after"), [
    (5, 9, 1, 9), (5, 5, 1, 5), (5, 4, 1, 4), (5, -50, 1, 4),  # up at once, down by one
    (5, 9, 0, 9), (5, 4, 0, 5), (5, -50, 0, 5),  # and not in every step
    (LOWEST, -120, 1, LOWEST), (NONE, 7, 1, 7), (NONE, -90, 0, -90),
    (5, NONE, 1, 5), (5, NOT_FINITE, 1, 5),  # of no gradient, or a bad one, nothing is known
])  # fmt: skip
def test_exponents_move_up_at_once_and_down_by_one(before, fitting, fall, after):
    given = (torch.tensor([n], dtype=torch.int8) for n in (before, fitting, fall))
    assert next_exponents(*given).tolist() == [after]


def test_all_parts_of_a_message_begin_at_multiples_of_16_bytes(small_graph):
    """A GPU reads so much at once."""
    with torch.device("meta"):
        model = build_model(model_of(small_graph))
        model.declare_wire()
    tensors = [tensor for tensor in model.weights().values() if not tensor.frozen]
    for sums in SUM_FORMATS:
        buckets = plan_buckets(tensors, assign_owners(tensors, 3), 3, sums)
        begins = [
            begin for b in buckets for member in b.members for begin in (member.up, member.down)
        ]
        assert max(begins) > 0
        assert not any(begin % 16 for begin in begins)


@pytest.mark.parametrize("digits", ["trit", "all", "fade"])
def test_owner_of_a_vector_broadcasts_all_of_its_digits(digits):
    """Each process reads them, whatever the weights of the model are."""
    vector = VectorWeight((1.0, 0.5), preset("tiny", digits=digits).layer_spec(), area="mlp")
    assert {*broadcast_buffers(vector)} >= {"trits", "exponent", "fraction", "remainder"}
    assert {*owner_buffers(vector)} == {"moment", "row_statistic", "column_statistic"}
