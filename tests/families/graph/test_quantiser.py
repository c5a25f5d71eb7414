"""A vector quantiser: choices and gradients, and codes that follow and are revived, in integers."""

from types import SimpleNamespace

import pytest
import torch
from graph_parts import initialised, normal, spec

from arbcli.families.graph.config import QuantiserConfig
from arbcli.families.graph.quantiser import INT8_MAX, MEMORY, UNIT, Quantiser, _random_bits

CONFIG = QuantiserConfig(codes=37, width=12, patience=3)


def part(**options) -> Quantiser:
    quantiser = initialised(Quantiser(CONFIG, spec(**options), "codebook"))
    quantiser.codes.copy_((normal(37, 12, seed=3) * UNIT).round().clamp(-INT8_MAX, INT8_MAX))
    return quantiser


def stepped(tested: Quantiser, q: torch.Tensor, chosen: torch.Tensor) -> None:
    """Do by numbers of Python what a step does, and compare."""
    codes, uses = tested.codes.tolist(), tested.uses[:, 0].tolist()
    lives, hand = tested.lives[:, 0].tolist(), int(tested.hand)
    bits = _random_bits(torch.arange(len(codes)), 12, tested.hand).tolist()
    for code in {*chosen.tolist()}:
        vectors = q[chosen == code].tolist()
        weight = min(uses[code], MEMORY)
        total = weight + len(vectors)
        for column, old in enumerate(codes[code]):
            number = weight * old + sum(row[column] for row in vectors) + bits[code][column] % total
            codes[code][column] = max(-INT8_MAX, min(INT8_MAX, number // total))
        uses[code], lives[code] = min(INT8_MAX, uses[code] + len(vectors)), CONFIG.patience
    for index in range(min(len(q), len(codes))):
        place = (hand + index) % len(codes)
        lives[place] -= lives[place] > 0
        if lives[place] == 0:
            codes[place], uses[place], lives[place] = q[index].tolist(), 1, CONFIG.patience
    tested.records = {"vectors": list(q.split(4)), "chosen": list(chosen.split(4))}
    tested.finish_step()
    tested.finish_step()  # nothing was seen since
    assert tested.codes.tolist() == codes
    assert tested.uses[:, 0].tolist() == uses
    assert tested.lives[:, 0].tolist() == lives
    assert int(tested.hand) == (hand + min(len(q), len(codes))) % len(codes)


@pytest.mark.parametrize("positions", [1, 10, 37, 90])
def test_step_equals_integers(positions):
    tested, generator = part(), torch.Generator().manual_seed(positions)
    for _ in range(12):
        q = torch.randint(-127, 128, (positions, 12), generator=generator, dtype=torch.int8)
        stepped(tested, q, torch.randint(9, (positions,), generator=generator))
    assert (tested.uses.max() > MEMORY) == (positions > 10)


def test_codes_are_rounded_without_bias():
    """10.25 is 11 a fourth of the time: four standard errors are 0.028."""
    steps = [_random_bits(torch.arange(40), 12, torch.tensor([step])) for step in range(4)]
    assert torch.stack(steps).unique().numel() == 40 * 12 * 4
    rows = torch.arange(4000)
    rounded = (4 * 10 + 1 + _random_bits(rows, 1, torch.zeros(1, dtype=torch.int32)) % 4) // 4
    assert {*rounded.flatten().tolist()} == {10, 11}
    assert abs(float((rounded == 11).float().mean()) - 0.25) < 0.028


def test_unused_codes_become_vectors_and_come_into_use():
    tested, dim = part(), spec().dim
    tested.codes.zero_()
    centres = normal(20, dim, seed=5)
    for step in range(60):
        x = centres[torch.randint(20, (1, 40), generator=torch.Generator().manual_seed(step))]
        tested(x + 0.01 * normal(1, 40, dim, seed=step))
        tested.finish_step()
    with torch.no_grad():
        codes = tested(centres[None]).codes.unique()
    assert len(codes) == 20
    assert tested.gauges() == {"alive_codes": pytest.approx(int((tested.uses > 1).sum()) / 37)}


def test_processes_step_by_the_data_of_all():
    alone, others = part(), [part(), part()]
    xs = [normal(1, 6, spec().dim, seed=seed) for seed in (1, 2)]
    for x, other in zip(xs, others, strict=True):
        alone(x)
        other(x)
    seen, chosen = ([other.records[name][0] for other in others] for name in ("vectors", "chosen"))
    alone.finish_step()
    for other in others:
        told = iter((seen, chosen))
        other.join(SimpleNamespace(gather=lambda _own, told=told: next(told)))
        other.finish_step()
        for name, buffer in alone.named_buffers():
            assert torch.equal(buffer, dict(other.named_buffers())[name]), name
