"""Of the benchmarks: the budget of a step, and the law of size and length."""

import math

import pytest

from arbcli.data.opening import open_texts
from arbcli.model.operations import step_operations
from arbcli.training.configure import new_config
from arbcli.training.trainer import Trainer
from benchmarks.fits import Law, fit
from benchmarks.results import load
from benchmarks.step_budget import (
    ATTENTION,
    OF_UPDATE,
    PRODUCTS,
    REST,
    count_step,
    shape_of,
)
from benchmarks.tables.rows import rows_of


@pytest.fixture(scope="module")
def counted(tmp_path_factory):
    path = tmp_path_factory.mktemp("text") / "text"
    path.write_bytes(bytes(range(256)) * 40)
    config = new_config(
        preset="tiny", dim=64, layers=2, heads=2, ffn=96, ctx=32, batch=2, steps=2,
        device="cpu", backend="torch", compute="fp32", data=[str(path)],
    )  # fmt: skip
    texts = open_texts(config.data, None, seed=0, context=32)
    return config, count_step(Trainer(config, texts))


def of_products(work, kind):
    return sum(
        2 * times * math.prod(shape_of(func, args))
        for (where, func, args, _), times in work.products.items()
        if where == kind
    )


def test_products_and_attention_are_those_that_the_model_says(counted):
    config, work = counted
    model, windows = config.model, config.batch
    attention = 12 * windows * 2 * model.ctx**2 * 64
    assert of_products(work, PRODUCTS) == windows * step_operations(model) - attention
    # causal, with seven products for the six of a forward and two backward passes over it
    causal = attention * 7 / 6 * (model.ctx + 1) / (2 * model.ctx)
    assert work.operations[ATTENTION] == pytest.approx(causal)
    assert of_products(work, OF_UPDATE) > 0
    assert work.bytes[REST] > 0


LAW = Law(floor=0.8, of_size=0.25, of_length=0.6, size_exponent=0.35, length_exponent=0.45)


def rows(noise=0.0):
    points = []
    for weights in (0.9e6, 3.3e6, 10.8e6, 25.9e6):
        for steps in (250, 500, 1000, 2000):
            read = 8192 * steps
            loss = LAW.loss(weights, read) * (1 + noise * math.sin(9 * len(points)))
            row = {"weights": weights, "steps": steps, "bytes": read, "held_out_nats": loss}
            points.append(row)
    return points


def test_exact_losses_give_their_law():
    fitted = fit(rows())
    assert fitted.law == pytest.approx(LAW, abs=1e-6)
    assert fitted.residual < 1e-9
    assert max(fitted.errors) < 1e-6


def test_last_bits_of_losses_change_no_digit_of_a_law():
    """As those of a sum do, which depend on a processor's instructions."""
    measured = rows_of(load("scaling"), kind="moment, all digits")
    first = fit(measured)
    for sign in (1, -1):
        changed = [
            row | {"held_out_nats": row["held_out_nats"] * (1 + sign * (index % 3) * 1e-15)}
            for index, row in enumerate(measured)
        ]
        second = fit(changed)
        assert second.law == pytest.approx(first.law, abs=1e-7)
        assert second.errors == pytest.approx(first.errors, abs=1e-7, nan_ok=True)
