"""A run in several processes: the same bits as in one, whatever their number."""

import pytest
import torch
from processes import run_processes

from arbcli.base.errors import ArbError
from arbcli.families.experts import weight as expert_weight
from arbcli.model.checkpoint import tensor_digest
from arbcli.model.packed import StateModule
from arbcli.training.configure import new_config
from arbcli.training.parallel import owners
from arbcli.training.parallel.group import Group
from arbcli.training.recent import RecentSteps
from arbcli.training.trainer import Trainer

SMALL = {"dim": 32, "layers": 1, "heads": 2, "ffn": 48, "ctx": 16, "batch": 2}
DECIDED = {
    "lr": 0.5, "accum": 4, "steps": 9, "seed": 3, "reduce_dtype": "int12", "device": "cpu",
    "compute": "fp32",
}  # fmt: skip


def trained(group, texts, given, steps):
    """Train; return digests of the state by name, the losses, and what was counted."""
    trainer = Trainer(new_config(**(DECIDED | given)), texts, group=group)
    recent = RecentSteps(group, {})
    for _ in range(steps):
        recent.add(trainer.train_step(), trainer.updater.flips)
        recent.last(1)
    trainer.check_agreement()
    saved, figures = trainer.checkpoint("text"), recent.as_json(0)
    losses = [*figures["losses"], trainer.evaluate(num_batches=4)]
    digests = {n: tensor_digest(n, part) for n, part in saved.tensors.items()}
    return digests, losses, (saved.counters, figures["flips"]), trainer.shared.bytes_per_weight()


def assert_the_same(texts, given, size=2, steps=2):
    digests, losses, counted, wire = trained(Group(), texts, given, steps)
    assert wire == 0
    results = run_processes(size, trained, texts, given, steps)
    assert {name for name in digests if digests[name] != results[0][0][name]} == set()
    assert all(outcome[1:3] == (losses, counted) for outcome in results)
    assert 0 < results[0][3] <= 1.5
    return digests


def test_four_processes_give_the_bits_of_a_single_process(texts):
    assert_the_same(texts, SMALL, 4)


@pytest.mark.parametrize(
    "given",
    [
        # masks are those of a single process
        {"rule": "nibble", "digits": "all", "weight_decay": 4.0, "dropout": 0.25,
         "attention_dropout": 0.2, "embedding_dropout": 0.1},
        # sums of 16 bits in one process, and of 12 in two
        {"direction": "factored", "accum": 8, "scale_type": "T6"},
    ],
    ids=str,
)  # fmt: skip
def test_masks_and_sums_of_all_widths_give_the_bits_of_one_process(given, texts):
    """`test_pairs.py` has two processes with all other settings."""
    assert_the_same(texts, SMALL | given)


def test_every_buffer_that_a_step_changes_is_sent(texts, small_graph, monkeypatch):
    """All kinds of state move, and are the same in both processes and in one.

    Gradients of experts come one at a time here, each in a message of its own.
    """
    monkeypatch.setattr(expert_weight, "WEIGHTS_AT_ONCE", 1)
    monkeypatch.setattr(owners, "BUCKET_WEIGHTS", 1)
    given = small_graph | {"memgram": True, "batch": 2, "accum": 2, "direction": "factored"}
    after = assert_the_same(texts, given, steps=1)
    trainer = Trainer(new_config(**(DECIDED | given)), texts)
    model = trainer.model
    stacks = [tensor for tensor in trainer.shared.tensors if tensor.matrices > 1]
    members = [m.tensor for bucket in trainer.shared.buckets for m in bucket.members]
    assert [sum(m is stack for m in members) for stack in stacks] == [s.matrices for s in stacks]
    assert stacks
    before = {name: tensor_digest(name, part) for name, part in model.state_dict().items()}
    moved = {name for name in after if before[name] != after[name]}
    modules = {name: part for name, part in model.named_modules() if isinstance(part, StateModule)}
    kinds = {
        f"{name}.{buffer}": kind
        for name, part in modules.items()
        for buffer, kind in part.kinds.items()
    }
    assert {kinds[name] for name in moved} == set(kinds.values())
    for name, part in modules.items():
        if part in stacks:  # they come in a way of their own
            assert {f"{name}.remainder", f"{name}.moment", f"{name}.fraction"} <= moved, name


def differing(group, texts):
    values = {"steps": 3, "lr": group.rank}
    with pytest.raises(ArbError, match="process 1 has another setting than process 0: `lr`"):
        group.compare(values, "setting")
    trainer = Trainer(new_config(**(DECIDED | SMALL)), texts, group=group)
    trainer.check_agreement()
    if group.rank:
        trainer.model.head.weight.trits[0, 0] ^= 1
    with pytest.raises(ArbError, match="process 1 has another state than process 0: `head"):
        trainer.check_agreement()
    return group.agree(group.rank, 5), group.broadcast_object(group.rank)


def test_processes_that_differ_are_refused(texts):
    assert run_processes(2, differing, texts) == [([1, 5], 0)] * 2


def test_batches_that_cannot_be_dealt_out_are_refused(texts):
    config = new_config(**(DECIDED | SMALL | {"reduce_dtype": None}))
    with pytest.raises(ArbError, match="cannot be shared across processes"):
        Trainer(config, texts, group=Group(0, 2))


def test_non_finite_gradient_is_counted_once_by_any_number_of_processes(texts):
    """The first process writes down what it counts, also of others' tensors."""

    def step(group):
        trainer = Trainer(new_config(**(DECIDED | SMALL)), texts, group=group)
        trainer.train_step()
        model, sink = trainer.model, trainer.shared
        bad = model.blocks[0].mlp.output.weight
        if group.rank == group.size - 1:  # in the last micro-batch

            def spoil(tensor, grad, where=None):
                wrong = tensor is bad and sink.last
                sink(tensor, grad.fill_(torch.nan) if wrong else grad, where)

            bad.sink = spoil
        trainer.train_step()
        saved, owned = trainer.checkpoint("text"), sink.owners[id(bad)]
        digests = {n: tensor_digest(n, part) for n, part in saved.tensors.items()}
        sink.restore(saved.counters)  # as a run does that goes on
        return digests, (saved.counters, sink.counters()), owned

    digests, counters, _ = step(Group())
    assert counters == ({"nonfinite_steps": 1, "refused": 1},) * 2
    if not torch.cuda.is_available():  # else processes are not forked, and know no inner function
        first, second = run_processes(2, step)
        assert first == (digests, counters, 1)  # which process 1 owns
        assert second[1] == counters


@pytest.mark.parametrize("reduce_dtype", ["int8", "int12"])  # sums of one part, and of two
def test_tensor_without_a_gradient_in_a_step_does_not_change(reduce_dtype, texts):
    """Others of its message step, and of its exponents nothing is known."""
    trainer = Trainer(new_config(**(DECIDED | SMALL | {"reduce_dtype": reduce_dtype})), texts)
    trainer.train_step()
    mlp = trainer.model.blocks[0].mlp
    before = [
        {name: part.clone() for name, part in matrix.weight.named_buffers()}
        for matrix in (mlp.output, mlp.gate_up)
    ]
    mlp.output.weight.sink = None
    trainer.train_step()
    moved = [
        {name for name, part in matrix.weight.named_buffers() if not torch.equal(part, old[name])}
        for matrix, old in zip((mlp.output, mlp.gate_up), before, strict=True)
    ]
    assert moved[0] == set() < {"trits", "remainder", "moment"} <= moved[1]
    assert "wire_exponent" in before[0]
    assert trainer.updater.counters() == {"nonfinite_steps": 0, "refused": 1}


def test_exponents_of_the_wire_fall_in_one_step_of_sixteen(texts, monkeypatch):
    """Exponents that are too large fall; `test_group.py` tests the size of a fall."""
    trainer = Trainer(new_config(**(DECIDED | SMALL | {"steps": 40})), texts)
    weight = trainer.model.blocks[0].mlp.output.weight
    fell = []
    for step in (14, 15, 16):
        weight.wire_exponent.fill_(60)
        trainer.step = step
        trainer.train_step()
        fell.append((60 - weight.wire_exponent).unique().tolist())
    assert fell == [[0], [1], [0]]
