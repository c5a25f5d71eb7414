"""Losses and gradients are means over learnt symbols, of micro-batches, batches and processes."""

import pytest
import torch

from arbcli.data.text import EVAL_SEED, Text, Texts, batch_starts
from arbcli.kernels.runtime.backend import use_backend
from arbcli.model.updater import Updater
from arbcli.training.configure import new_config
from arbcli.training.trainer import Trainer

SIZES = {"preset": "tiny", "dim": 32, "layers": 1, "heads": 2, "ffn": 48, "ctx": 60}
COUNTS = 3, 57


class Windows(Text):
    """Windows of one document each, of which the first symbols or all others are learnt."""

    packs = True

    def __init__(self) -> None:
        super().__init__([])
        self.ids = torch.randint(256, (2, 61), generator=torch.Generator().manual_seed(1))

    def windows(self, _length: int) -> int:
        return 2

    def learnt_symbols(self, starts, _context: int) -> int:
        return sum(COUNTS[start] for start in starts)

    def window_bytes(self, starts, _context: int) -> int:
        return sum(10 + start for start in starts)

    def packed_batch(self, starts):
        ids, targets = self.ids[[*starts], :-1], self.ids[[*starts], 1:].clone()
        for row, start in enumerate(starts):
            targets[row, COUNTS[start] :] = -1
        return ids, targets, torch.zeros_like(ids)


def trainer_of(texts: Windows, **options) -> Trainer:
    config = new_config(
        **SIZES, batch=1, steps=9, device="cpu", backend="torch", compute="fp32", **options
    )
    return Trainer(config, Texts(texts, texts, "windows"))


def step_with_both_windows(trainer: Trainer) -> int:
    text, config = trainer.texts.train, trainer.config
    for step in range(20):
        starts = [batch_starts(text, config.seed, step, micro, 1, 60)[0] for micro in range(2)]
        if starts == [0, 1]:
            return step
    raise AssertionError("no step has both windows")


def exact(trainer: Trainer) -> tuple[float, dict[int, torch.Tensor]]:
    """Compute the loss of both windows together, and its gradients of dense tensors."""
    gradients = {}

    def note(tensor, grad, where=None):
        if where is None:
            gradients[id(tensor)] = grad.clone()

    tensors = trainer.model.packed_tensors().values()
    sinks = {tensor: tensor.sink for tensor in tensors if hasattr(tensor, "sink")}
    for tensor in sinks:
        tensor.sink = note
    loss = trainer.model.loss(*trainer.texts.train.packed_batch([0, 1]))
    loss.backward()
    trainer.model.forget_uses()
    for tensor, sink in sinks.items():
        tensor.sink = sink
    return float(loss.detach()), gradients


def test_gradients_between_processes_weigh_by_learnt_symbols(monkeypatch):
    """The sum that a tensor steps by is the gradient of the mean over all symbols."""
    trainer = trainer_of(Windows(), accum=2, reduce_dtype="int16")
    trainer.step = step_with_both_windows(trainer)
    loss, wanted = exact(trainer)
    sums = {}

    def note(_updater, tensor, grad, where=None):
        if where is None:
            sums[id(tensor)] = grad.float().clone()

    monkeypatch.setattr(Updater, "__call__", note)
    assert float(trainer.train_step()) == pytest.approx(loss, rel=1e-5)
    assert sums.keys() & wanted.keys()
    for key in sums.keys() & wanted.keys():
        similarity = torch.cosine_similarity(sums[key].flatten(), wanted[key].flatten(), dim=0)
        assert similarity > 0.999


def test_gradients_of_a_baseline_weigh_by_learnt_symbols():
    trainer = trainer_of(Windows(), accum=2, weights="float")
    trainer.step = step_with_both_windows(trainer)
    loss = trainer.model.loss(*trainer.texts.train.packed_batch([0, 1]))
    names, parameters = zip(*trainer.model.named_parameters(), strict=True)
    wanted = torch.autograd.grad(loss, parameters)
    trainer.optimizer.finish = lambda: None
    assert float(trainer.train_step()) == pytest.approx(float(loss.detach()), rel=1e-5)
    for name, parameter, grad in zip(names, parameters, wanted, strict=True):
        torch.testing.assert_close(parameter.grad, grad, rtol=1e-3, atol=1e-7, msg=name)


def test_counts_of_holes_are_those_of_the_targets(tmp_path):
    path = tmp_path / "text"
    path.write_bytes(bytes(range(256)) * 3)
    trainer = trainer_of(Text([path]), accum=3, objective="fill")
    for trainer.step in range(4):
        counts = [int((trainer.fetch(micro, "cpu")[1] >= 0).sum()) for micro in range(3)]
        assert trainer._learnt_symbols() == counts
        assert len({*counts}) == 2


@torch.no_grad()
def test_held_out_loss_is_the_mean_over_learnt_symbols():
    trainer = trainer_of(Windows())
    text = trainer.texts.val
    total, count = 0.0, 0
    for step in range(5):
        (start,) = batch_starts(text, EVAL_SEED, step, 0, 1, 60)
        total += float(trainer.model.loss(*text.packed_batch([start]))) * COUNTS[start]
        count += COUNTS[start]
    assert count % sum(COUNTS)  # both windows are drawn, not equally often
    assert trainer.evaluate(num_batches=5) == pytest.approx(total / count, rel=1e-5)


@torch.no_grad()
def test_equal_numbers_of_learnt_symbols_change_no_bit_of_the_held_out_loss(monkeypatch):
    monkeypatch.setitem(globals(), "COUNTS", (23, 23))
    trainer = trainer_of(Windows())
    text = trainer.texts.val
    starts = [batch_starts(text, EVAL_SEED, step, 0, 1, 60) for step in range(5)]
    with use_backend("torch"):
        losses = torch.stack([trainer.model.loss(*text.packed_batch(each)) for each in starts])
    assert trainer.evaluate(num_batches=5) == float(losses.mean())
