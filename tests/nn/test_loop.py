"""Losses without logits, and steps that a GPU replays."""

import pytest
import torch
from states import assert_same
from torch import nn
from torch.nn import functional

import arbcli
from arbcli.base.errors import ArbError
from arbcli.nn.weights import Anchored


class Tied(nn.Module):
    """An embedding and a head that share a weight, of a vocabulary in chunks."""

    def __init__(self, vocabulary: int = 5000):
        super().__init__()
        torch.manual_seed(0)
        self.embedding = nn.Embedding(vocabulary, 16)
        self.inner = nn.Linear(16, 16)
        self.head = nn.Linear(16, vocabulary, bias=False)
        self.head.weight = self.embedding.weight

    def forward(self, ids):
        return self.inner(self.embedding(ids))


def test_loss_without_logits_equals_that_of_logits():
    model = Tied()
    arbcli.to_integers(model)
    ids = torch.tensor([[3, 4999, 17, 0, 17]])
    targets = torch.tensor([[4999, 17, -100, 4200, 5]])
    outcomes = []
    for loss_of in (
        lambda: arbcli.nn.linear_cross_entropy(model.head, model(ids), targets),
        lambda: functional.cross_entropy(model.head(model(ids)).flatten(0, 1), targets.flatten()),
    ):
        grads = {}
        for name, part in model.named_modules():
            if isinstance(part, Anchored):
                part.sink = lambda tensor, grad, where=range(1), name=name, grads=grads: (
                    grads.update({f"{name}.{where.start}": grad})
                )
        loss = loss_of()
        loss.backward()
        outcomes.append(grads | {"loss": loss.detach()})
    ours, theirs = outcomes
    assert {*ours} == {*theirs}
    assert len(ours) == 5  # two chunks of the table, weight and bias, and the loss
    for name, value in theirs.items():
        torch.testing.assert_close(ours[name], value, rtol=1e-4, atol=1e-6)


def test_wrong_targets_and_micro_batches_are_refused():
    model = Tied()
    optimizer = arbcli.to_integers(model, accumulation=2)
    for target in (5000, -1):
        with pytest.raises(ArbError, match=r"outside of 0\.\.4999"):
            arbcli.nn.linear_cross_entropy(model.head, torch.randn(1, 16), torch.tensor([target]))
    step = arbcli.nn.CapturedStep(optimizer, lambda ids: model(ids).sum())
    with pytest.raises(ArbError, match="has 2 micro-batches, and 1 were passed"):
        step((torch.tensor([1, 2]),))


def test_loss_of_other_heads_is_that_of_torch():
    head = arbcli.nn.Linear(16, 12)
    x, targets = torch.randn(5, 16), torch.tensor([3, 0, -100, 11, 5])
    wanted = functional.cross_entropy(head(x), targets)
    assert torch.equal(arbcli.nn.linear_cross_entropy(head, x, targets), wanted)


def steps(captured: bool, device: torch.device) -> tuple[nn.Module, list]:
    model = Tied(200).to(device)
    optimizer = arbcli.to_integers(model, lr=0.2, accumulation=2)
    schedule = torch.optim.lr_scheduler.StepLR(optimizer, 2, gamma=0.5)
    generator = torch.Generator().manual_seed(2)

    def loss(ids, targets):
        return arbcli.nn.linear_cross_entropy(model.head, model(ids), targets)

    run, losses = arbcli.nn.CapturedStep(optimizer, loss), []
    for _ in range(6):
        drawn = torch.randint(200, (2, 2, 3, 7), generator=generator).to(device)
        if captured:
            losses.append(run(*map(tuple, drawn)).item())
        else:
            parts = [loss(*inputs) for inputs in map(tuple, drawn[:1])]
            parts[0].backward()
            parts.append(loss(*drawn[1]))
            parts[1].backward()
            optimizer.step()
            losses.append(sum(part.item() for part in parts) / 2)
        schedule.step()
    assert optimizer.step_number == 6
    return model, losses


def test_captured_steps_equal_those_of_a_plain_loop(device):
    plain, losses = steps(False, device)
    captured, captured_losses = steps(True, device)
    assert captured_losses == pytest.approx(losses, rel=1e-6)
    assert_same(captured.state_dict(), plain.state_dict())
