"""The law of size and length is found again, and its errors say how well."""

import math

import pytest

from benchmarks.fits import FEWEST, Law, between, fit
from benchmarks.results import load
from benchmarks.tables import rows_of

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
    assert found.law == pytest.approx(LAW, abs=1e-6)
    assert found.residual < 1e-9
    assert max(found.errors) < 1e-6


def test_errors_grow_with_the_noise():
    small, large = fit(rows(0.001)), fit(rows(0.01))
    assert large.residual > 3 * small.residual
    assert large.errors.length_exponent > small.errors.length_exponent
    assert fit(rows()[: FEWEST - 1]) is None


def test_number_that_the_points_do_not_determine_without_one_has_no_error():
    """With two sizes any exponent has an E and an A that give the same losses; so with lengths."""
    three_sizes = [row for row in rows() if row["weights"] < 25e6]
    lone_size = [row for row in three_sizes if row["weights"] != 3.3e6 or row["steps"] == 500]
    errors = fit(lone_size).errors
    assert [math.isnan(error) for error in errors] == [True, True, False, True, False]
    three_lengths = [row for row in rows() if row["steps"] > 250]
    lone_length = [row for row in three_lengths if row["steps"] != 500 or row["weights"] == 3.3e6]
    errors = fit(lone_length).errors
    assert [math.isnan(error) for error in errors] == [True, False, True, False, True]


@pytest.mark.parametrize("kind", ["AdamW", "Muon", "moment, all digits", "nibble, all digits"])
def test_last_bits_of_losses_change_no_digit_of_a_law(kind):
    """As those of a sum do, which depend on a processor's instructions."""
    measured = rows_of(load("scaling"), kind=kind)
    first = fit(measured)
    for sign in (1, -1):
        changed = [
            row | {"held_out_nats": row["held_out_nats"] * (1 + sign * (index % 3) * 1e-15)}
            for index, row in enumerate(measured)
        ]
        second = fit(changed)
        assert second.law == pytest.approx(first.law, abs=1e-7)
        assert second.errors == pytest.approx(first.errors, abs=1e-7, nan_ok=True)


def test_loss_between_two_lengths_is_between_theirs():
    some = rows()[:4]
    losses = [row["held_out_nats"] for row in some]
    assert between(some, 500) == pytest.approx(losses[1])
    middle = math.sqrt(losses[1] * losses[2])
    assert between(some, math.sqrt(500 * 1000)) == pytest.approx(middle)
    assert between(some, 9000) == pytest.approx(losses[3])
