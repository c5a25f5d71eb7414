"""The fixes of the rule `votes`: what each changes in a step, and that none of them is the rule."""

import math

import pytest
import torch
from states import assert_same, state_of

from arbcli.config.presets import preset
from arbcli.families.votes.kernels.cast_votes import cast_scale_votes
from arbcli.families.votes.rule import FIRST_VOTES
from arbcli.families.votes.verify.cast_votes import (
    cast_scale_votes_reference,
    cast_trit_votes_reference,
)
from arbcli.kernels.codec.packing import unpack_trits
from arbcli.model.packed import TernaryTensor
from arbcli.model.rules import VOTES_FIXES
from arbcli.model.updater import Updater
from arbcli.verify.kernels.update.gradient_statistics import gradient_statistics_reference

SHAPE = 33, 123


def build(device, *fixes: str) -> tuple[TernaryTensor, Updater]:
    config = preset("tiny", rule="votes", votes_fixes=fixes)
    with torch.device(device):
        tensor = TernaryTensor(*SHAPE, config.layer_spec(), area="mlp", std=0.1)
    tensor.initialise(seed=0, index=0)
    return tensor, Updater([tensor], seed=3, dtype=torch.float32)


def gradient(device, seed: int = 0) -> torch.Tensor:
    return torch.randn(SHAPE, generator=torch.Generator().manual_seed(seed)).to(device)


def flips(tensor: TernaryTensor, updater: Updater, grads: list[torch.Tensor], first=0) -> list[int]:
    """Count the trits that flip with each gradient of a run that is at step `first`."""
    counts = []
    for step, grad in enumerate(grads, first):
        before = int(updater.flips)
        updater.begin(step, 1.0)
        updater(tensor, grad.clone())
        counts.append(int(updater.flips) - before)
    return counts


def test_threshold_falls_while_votes_gather(device):
    """Six votes are there after step 24, and the threshold of step 25 is six."""
    tensor, updater = build(device, "threshold")
    assert flips(tensor, updater, [gradient(device)] * 5, 20) == [0] * 5
    assert flips(tensor, updater, [gradient(device)], 25)[0] > 0


def test_first_votes_are_small_and_random(device):
    plain, _ = build(device)
    tensor, _ = build(device, "start")
    assert not plain.votes.any()
    assert torch.equal(tensor.trits, plain.trits)
    assert not tensor.scale_votes.any()
    counts = torch.bincount(tensor.votes.cpu().flatten().long() + FIRST_VOTES)
    wanted = tensor.num_weights / 5
    assert len(counts) == 5
    assert ((counts - wanted).abs() < 5 * math.sqrt(wanted)).all()
    trits = unpack_trits(tensor.trits, SHAPE[1]).double().cpu().flatten()
    both = torch.stack([trits, tensor.votes.double().cpu().flatten()])
    assert torch.corrcoef(both)[0, 1].abs() < 5 / math.sqrt(tensor.num_weights)


@pytest.mark.parametrize("fixes", [(), VOTES_FIXES], ids=["none", "all"])
def test_size_of_a_gradient_is_not_read(fixes, device):
    """So nothing is left of the proposal to normalise once: there is no normalisation at all."""
    grads = [gradient(device, seed // 4) for seed in range(12)]
    states = []
    for factor in (1.0, 2.0**-20, 1e4):
        tensor, updater = build(device, *fixes)
        flips(tensor, updater, [grad * factor for grad in grads])
        states.append(state_of(tensor))
    for other in states[1:]:
        assert_same(other, states[0])


@pytest.mark.parametrize("fixes", [("scales",), ("scales", "order")])
def test_held_scales_change_neither_scales_nor_flips(fixes, device):
    plain, updater = build(device)
    tensor, holding = build(device, *fixes)
    grads = [gradient(device)] * 5
    assert flips(tensor, holding, grads) == flips(plain, updater, grads)
    assert not tensor.scale_votes.any()
    assert torch.equal(tensor.exponent, build(device)[0].exponent)
    assert not torch.equal(plain.exponent, tensor.exponent)


@pytest.mark.parametrize("fixes", [(), ("order",)])
def test_scales_vote_before_or_after_the_trits(fixes, device):
    tensor, updater = build(device, *fixes)
    assert tensor.rule.reads_signs == (not fixes)  # the slope of new trits needs the gradient
    grad, one = gradient(device), torch.tensor(1, dtype=torch.int32)
    flips(tensor, updater, [grad] * 2)
    before = {name: part.cpu().clone() for name, part in tensor.state.items()}
    count, trits, votes = cast_trit_votes_reference(
        before["trits"], before["votes"], grad.cpu(), one, 3 * one
    )
    packed = tensor.packed._replace(
        trits=trits if fixes else before["trits"], exponent=before["exponent"]
    )
    slope, *_ = gradient_statistics_reference(grad.cpu(), packed, factored=False, signs=True)
    scales = cast_scale_votes_reference(before["exponent"], before["scale_votes"], slope, one)
    assert flips(tensor, updater, [grad], 2) == [int(count)]
    wanted = {"trits": trits, "votes": votes, "exponent": scales[0], "scale_votes": scales[1]}
    for name, part in wanted.items():
        assert torch.equal(tensor.state[name].cpu(), part), name


@pytest.mark.parametrize("ok", [0, 1])
@pytest.mark.parametrize("exponent", [-96, 0, 31])
def test_scale_votes_equal_the_reference(ok, exponent, device):
    generator = torch.Generator().manual_seed(1)
    votes = torch.randint(-3, 4, (40, 5), generator=generator, dtype=torch.int8)
    slope = torch.randn(40, 5, generator=generator).round()  # zeros too
    inputs = torch.full_like(votes, exponent), votes, slope, torch.tensor(ok, dtype=torch.int32)
    wanted = cast_scale_votes_reference(*inputs)
    placed = [part.to(device, copy=True) for part in inputs]
    cast_scale_votes(*placed)
    assert torch.equal(placed[0].cpu(), wanted[0])
    assert torch.equal(placed[1].cpu(), wanted[1])
