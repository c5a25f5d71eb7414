"""The law of size and length is found again, and its errors say how well."""

import math

import pytest

from benchmarks.fits import FEWEST, Law, between, fit

LAW = Law(floor=0.8, of_size=0.25, of_length=0.6, size_exponent=0.35, length_exponent=0.45)


def rows(noise=0.0):
    found = []
    for weights in (0.9e6, 3.3e6, 10.8e6, 25.9e6):
        for steps in (250, 500, 1000, 2000):
            read = 8192 * steps
            loss = LAW.loss(weights, read) * (1 + noise * math.sin(9 * len(found)))
            row = {"weights": weights, "steps": steps, "bytes": read, "held_out_nats": loss}
            found.append(row)
    return found


def test_exact_losses_give_their_law():
    found = fit(rows())
    assert found.law == pytest.approx(LAW, abs=0.02)
    assert found.residual < 1e-3
    assert max(found.errors) < 0.02


def test_errors_grow_with_the_noise():
    small, large = fit(rows(0.001)), fit(rows(0.01))
    assert large.residual > 3 * small.residual
    assert large.errors.length_exponent > small.errors.length_exponent
    assert fit(rows()[: FEWEST - 1]) is None


def test_loss_between_two_lengths_is_between_theirs():
    some = rows()[:4]
    losses = [row["held_out_nats"] for row in some]
    assert between(some, 500) == pytest.approx(losses[1])
    middle = math.sqrt(losses[1] * losses[2])
    assert between(some, math.sqrt(500 * 1000)) == pytest.approx(middle)
    assert between(some, 9000) == pytest.approx(losses[3])
