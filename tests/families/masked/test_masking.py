"""Hidden symbols: which ones they are, the bound that they give, and the models that have it."""

import itertools
import math
from functools import cache
from unittest import mock

import pytest
import torch

from arbcli.config.model import BlockConfig, ModelConfig, StageConfig
from arbcli.config.parts.attention import AttentionConfig
from arbcli.config.parts.mlp import MLPConfig
from arbcli.data.opening import open_texts
from arbcli.data.text import Text
from arbcli.families.masked import masking
from arbcli.families.masked.holes import fill
from arbcli.families.masked.masking import hide
from arbcli.generation.evaluation import mean_loss
from arbcli.generation.sampling import Sampling
from arbcli.model.language_model import LanguageModel
from arbcli.training.configure import new_config
from arbcli.training.trainer import Trainer
from arbcli.verify.reference import Reference
from arbcli.verify.subjects import Subject
from arbcli.verify.update_reference import reference_weight

SYMBOLS = LENGTH = 4
TEXTS = torch.tensor([*itertools.product(range(SYMBOLS), repeat=LENGTH)])
"""All of them: (256, 4)."""


def hidden_of(count: int, length: int = 12, **given) -> torch.Tensor:
    about = {"seed": 3, "step": 5, "numbers": range(count), "of": count} | given
    ids = torch.arange(len(about["numbers"]) * length).view(-1, length)
    inputs, targets = hide(ids, -7, **about)
    assert torch.equal(torch.where(targets < 0, inputs, targets), ids)
    assert torch.equal(inputs == -7, targets >= 0)
    return targets >= 0


@pytest.mark.parametrize("step", [0, 1, 7919])
def test_every_number_of_symbols_is_hidden_as_often(step):
    counts = hidden_of(36, step=step).sum(dim=1)
    assert counts.bincount(minlength=13).tolist() == [0, *[3] * 12]


def test_every_symbol_is_hidden_as_often():
    """Of 6,000 windows each symbol is hidden in 6.5 of 12; five standard errors are 193."""
    assert (hidden_of(6000).sum(dim=0) - 6000 * 6.5 / 12).abs().max() < 193
    both = hidden_of(6000)[:, [2, 3]].all(dim=1).sum()  # k (k - 1) / 12 / 11, on average
    assert abs(int(both) - 6000 * sum(k * (k - 1) for k in range(1, 13)) / 12 / 132) < 193


def test_a_window_is_hidden_alike_by_every_process():
    whole = hidden_of(10)
    for some in (range(3), range(1, 10, 2), range(9, 10)):
        assert torch.equal(hidden_of(10, numbers=some), whole[list(some)])
    for other in ({"seed": 4}, {"step": 6}):
        assert not torch.equal(hidden_of(10, **other), whole)


@cache
def toy() -> tuple[LanguageModel, dict[tuple[int, ...], torch.Tensor]]:
    """Make a model of four symbols; and what float64 makes of every text with some hidden.

    These are log probabilities (256, T, V) by the places that are hidden.
    """
    block = BlockConfig(mixer=AttentionConfig(heads=2), channel=MLPConfig(width=16))
    stage = StageConfig(dim=16, blocks=(block,))
    config = ModelConfig(
        ctx=LENGTH, stages=(stage,), vocabulary=SYMBOLS, objective="masked", scale_type="T8"
    )
    lm = Subject("toy", config, 1, torch.float32, torch.device("cpu"), "torch").build()
    weights = {name: reference_weight(tensor) for name, tensor in lm.weights().items()}
    known = {}
    for count in range(1, LENGTH + 1):
        for places in itertools.combinations(range(LENGTH), count):
            ids = TEXTS.index_fill(1, torch.tensor(places), SYMBOLS)
            kinds, index = ids.unique(dim=0, return_inverse=True)
            logits, _ = Reference(weights, config)(kinds)
            known[places] = logits.log_softmax(dim=-1)[index]
    return lm, known


def share_of(count: int) -> float:
    """Integrate t**k (1 - t)**(T - k) / t over t: how much each set of k hidden symbols counts."""
    steps = 20_000
    t = (torch.arange(steps, dtype=torch.float64) + 0.5) / steps
    return float((t ** (count - 1) * (1 - t) ** (LENGTH - count)).mean())


def test_bound_is_that_of_all_that_can_be_hidden(tmp_path, monkeypatch):
    """The texts cost one after another what diffusion in continuous time does, within its error."""
    lm, known = toy()
    exact, second = torch.zeros(256, dtype=torch.float64), torch.zeros(256, dtype=torch.float64)
    for places, logs in known.items():
        of = -logs.gather(2, TEXTS[..., None])[:, list(places), 0]
        exact += share_of(len(places)) * of.sum(dim=1) / LENGTH
        draw = 1 / LENGTH / math.comb(LENGTH, len(places))
        second += draw * of.mean(dim=1) ** 2
    assert float(exact.mean()) > 1.0
    assert float(exact.std()) > 0.1  # some texts are likelier
    # a bound of nats of each text: as probabilities they are no more than one together
    assert float((-LENGTH * exact).exp().sum()) <= 1
    path = tmp_path / "texts"
    path.write_bytes(bytes([0, *TEXTS.flatten().tolist()]))
    draws = 32
    bound = mean_loss(lm, Text([path]), stride=LENGTH, batch=256, draws=draws)
    error = float((second - exact**2).mean() / (256 * draws)) ** 0.5  # of draws that know nothing
    assert error < 0.01 * float(exact.mean())
    assert abs(bound - float(exact.mean())) < 4 * error
    hidden = mock.Mock(side_effect=masking.hide)
    monkeypatch.setattr(masking, "hide", hidden)
    again = mean_loss(lm, Text([path]), stride=LENGTH, batch=100, draws=draws)
    assert [call.kwargs["step"] for call in hidden.call_args_list] == [*range(256)]
    assert again == pytest.approx(bound, rel=1e-5)  # the draws belong to windows


def test_texts_are_drawn_from_the_distribution_of_the_model():
    """Two symbols, hidden in any order, are those of the chain rule in either, half of the time."""
    lm, known = toy()
    row = 27  # 0 1 2 3: places 1 and 2 are hidden
    wanted = torch.zeros(SYMBOLS, SYMBOLS, dtype=torch.float64)
    for a, b in itertools.product(range(SYMBOLS), repeat=2):
        at = 3 + 4 * b + 16 * a
        first, second = known[1, 2][row].exp(), (known[2,][at].exp(), known[1,][at].exp())
        wanted[a, b] = (first[1, a] * second[0][2, b] + first[2, b] * second[1][1, a]) / 2
    assert float(wanted.sum()) == pytest.approx(1)
    counts, times = torch.zeros(SYMBOLS, SYMBOLS), 100
    for seed in range(times):
        text = fill(lm, [0, SYMBOLS, SYMBOLS, 3], 2, Sampling(temperature=1, seed=seed))
        assert text[0] == 0
        assert text[3] == 3
        counts[text[1], text[2]] += 1
    # chi-squared of 15 degrees is beyond 44.3 once in ten thousand
    assert float(((counts - times * wanted) ** 2 / (times * wanted)).sum()) < 44.3


def test_greedy_text_takes_the_surest_symbol_first():
    lm, _ = toy()
    ids, expected = torch.tensor([[SYMBOLS, 1, SYMBOLS, SYMBOLS]]), []
    for _ in range(3):
        with torch.no_grad():
            sure, choice = lm(ids)[0].softmax(dim=-1).max(dim=-1)
        place = int(sure.masked_fill(ids[0] != SYMBOLS, 0).argmax())
        ids[0, place] = choice[place]
        expected.append(place)
    greedy = Sampling(temperature=0)
    assert fill(lm, [SYMBOLS, 1, SYMBOLS, SYMBOLS], 3, greedy) == ids[0].tolist()
    at_once = fill(lm, [SYMBOLS, 1, SYMBOLS], 1, greedy)  # what is after a text stays hidden
    with torch.no_grad():
        logits = lm(torch.tensor([[SYMBOLS, 1, SYMBOLS, SYMBOLS]]))[0]
    assert at_once == [int(logits[0].argmax()), 1, int(logits[2].argmax())]


def test_micro_batches_of_a_step_share_the_hidden_positions(tmp_path):
    path = tmp_path / "text"
    path.write_bytes(bytes(range(32, 112)) * 9)
    sizes = {"dim": 32, "layers": 1, "heads": 2, "ffn": 48, "ctx": 8, "batch": 4, "accum": 2}
    config = new_config(**sizes, steps=3, objective="masked", device="cpu", backend="torch")
    trainer = Trainer(config, open_texts((str(path),), (), seed=0, context=8))
    given = []
    for micro in range(2):
        ids, targets = trainer.fetch(micro, "cpu")
        text = torch.where(targets < 0, ids, targets)
        assert ((text[:, 1:] - text[:, :-1]) % 80 == 1).all()
        given.append((targets >= 0).sum(dim=1))
    assert sorted(torch.cat(given).tolist()) == [*range(1, 9)]
    # each has windows of few and of many: of the numbers in their order every other one
    assert all(len(set((counts % 2).tolist())) == 1 for counts in given)
    losses = []
    trainer.model.loss = lambda ids, targets: losses.append(targets) or torch.zeros(())
    trainer.evaluate(num_batches=3)
    assert all(((targets >= 0).sum(dim=1) > 0).all() for targets in losses)
    assert not torch.equal(losses[0] >= 0, losses[1] >= 0)
