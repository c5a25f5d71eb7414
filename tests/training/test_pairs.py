"""Every two settings of a run that change what is executed, together: trained, resumed, or refused.

A row is a run with one value of each setting. The rows cover every pair of values that is not
refused. `pairs.toml` lists the values and the refused pairs.
"""

import dataclasses
import itertools
import math
import random
import tomllib
from functools import cache
from pathlib import Path
from typing import Any

import pytest
from processes import run_processes

from arbcli.base.errors import ArbError
from arbcli.config.training import COMPUTES, TrainConfig
from arbcli.inspect.memory import predict_run
from arbcli.kernels.runtime import merged, native
from arbcli.model import updater
from arbcli.model.checkpoint import load_checkpoint, save_checkpoint, tensor_digest
from arbcli.model.layers import symbols
from arbcli.training.configure import new_config
from arbcli.training.parallel.group import Group
from arbcli.training.trainer import Trainer, check_shares

Row = tuple[tuple[str, str], ...]
"""Settings, each with the name of a value; those that are left out have their first one."""

BASE = {
    "dim": 32, "layers": 2, "heads": 2, "ffn": 48, "ctx": 13, "batch": 5, "steps": 4, "warmup": 1,
    "seed": 3, "device": "cpu", "backend": "torch", "compute": "fp32",
}  # fmt: skip
"""65 positions: more than products of few rows take."""
MIDDLE = 3
"""The step that is resumed at, where fading weights have faded in part."""
PAIRED = tomllib.loads((Path(__file__).parent / "pairs.toml").read_text())
SETTINGS: dict[str, dict[str, dict[str, Any]]] = PAIRED["settings"]
"""Values of each setting with their arguments of a run, by name; the usual value is the first."""
VOCABULARY = {"tied": 300, "in chunks": 301}
AT_ONCE = 160
"""Symbols of a chunk here."""

BASELINES = ("float", "float by Muon", "straight-through")
QUICK_ROWS = 9
"""That `make test` runs; they have most of the pairs."""


def refused_pairs() -> dict[frozenset, str]:
    """List the pairs of values that cannot be together, with the words of their refusals."""
    return {
        frozenset(zip(refused["pair"], values, strict=True)): refused["said"]
        for refused in PAIRED["refused"]
        for values in itertools.product(*refused["pair"].values())
    }


def fits(chosen: dict[str, str], refused: dict[frozenset, str]) -> bool:
    """Return whether values of some settings can be together."""
    if any(frozenset(pair) in refused for pair in itertools.combinations(chosen.items(), 2)):
        return False
    # several processes step ternary weights by what travelled
    ternary = chosen.get("weights", BASELINES[0]) not in BASELINES
    return not (ternary and chosen.get("processes") == "2" and chosen.get("reduce_dtype") == "none")


@cache
def rows() -> list[Row]:
    """Make rows until every pair that can be has one: each the best of a few drawn greedily."""
    refused, dice, pairs_drawn = refused_pairs(), random.Random(0), []
    waiting = {
        frozenset({(one, x), (other, y)}): None
        for one, other in itertools.combinations(SETTINGS, 2)
        for x, y in itertools.product(SETTINGS[one], SETTINGS[other])
        if fits({one: x, other: y}, refused)
    }
    while waiting:
        best: dict[str, str] = {}
        covered: list[frozenset] = []
        for _ in range(8):
            chosen, settings = dict(next(iter(waiting))), [*SETTINGS]
            dice.shuffle(settings)
            for setting in settings:
                if setting in chosen:
                    continue
                able = [v for v in SETTINGS[setting] if fits(chosen | {setting: v}, refused)]
                news = {
                    value: sum(
                        frozenset({(setting, value), pair}) in waiting for pair in chosen.items()
                    )
                    for value in able
                }
                chosen[setting] = max(able, key=news.__getitem__)
            new = [
                pair
                for pair in map(frozenset, itertools.combinations(chosen.items(), 2))
                if pair in waiting
            ]
            if len(new) > len(covered):
                best, covered = chosen, new
        for pair in covered:
            del waiting[pair]
        pairs_drawn.append(tuple((setting, best[setting]) for setting in SETTINGS))
    return pairs_drawn


def config_of(row: Row) -> TrainConfig:
    """Configure the run of a row.

    Raises:
        ArbError: its values do not fit each other.
    """
    given, chosen = dict(BASE), dict(row)
    for setting, value in row:
        given |= SETTINGS[setting][value]
    if given["backend"] == "native" and not native.available():
        given["backend"] = "torch"
    config = new_config(**given)
    check_shares(config, int(chosen.get("processes", "1")))
    if (kind := chosen.get("symbols", "bytes")) != "bytes":
        tied = kind == "tied"
        model = dataclasses.replace(config.model, vocabulary=VOCABULARY[kind], tied=tied)
        config = dataclasses.replace(config, model=model)
    return config


def trained(group: Group, config: TrainConfig, texts, steps: int, saved=None):
    """Train; return the losses, of steps and of an evaluation, and digests of what is saved."""
    trainer = Trainer(config, texts, group=group)
    if saved is not None:
        trainer.restore(load_checkpoint(saved))
    losses = [float(trainer.train_step()) for _ in range(steps)]
    losses.append(trainer.evaluate(num_batches=1))
    checkpoint = trainer.checkpoint("of a text")
    digests = {name: tensor_digest(name, part) for name, part in checkpoint.tensors.items()}
    return losses, digests | checkpoint.counters


def check_row(config: TrainConfig, processes: int, texts, folder, monkeypatch) -> None:
    whole, is_float = Trainer(config, texts), config.model.weights != "ternary"
    assert is_float or whole.state_bytes() == predict_run(config).total.state_bytes
    losses = [whole.train_step() for _ in range(MIDDLE)]
    assert all(map(math.isfinite, losses))
    saved = save_checkpoint(folder, whole.checkpoint("of a text"))
    losses = [float(whole.train_step()) for _ in range(config.steps - MIDDLE)]
    losses.append(whole.evaluate(num_batches=1))
    assert all(map(math.isfinite, losses))
    last = whole.checkpoint("of a text")
    digests = {name: tensor_digest(name, part) for name, part in last.tensors.items()}
    goes_on = (config, texts, config.steps - MIDDLE, saved)
    if processes == 1:
        # gradients wait for others, as on a GPU, and step one by one all the same
        monkeypatch.setattr(updater, "backend_of", lambda tensor: "triton")
        monkeypatch.setattr(merged, "merge_launches", lambda parts, _: [part() for part in parts])
        outcomes = [trained(Group(), *goes_on)]
    else:
        outcomes = run_processes(processes, trained, *goes_on)
    if is_float and processes > 1:  # gradients are summed in bfloat16
        assert all(again == pytest.approx(losses, rel=0.02) for again, _ in outcomes)
        return
    assert all(again == losses for again, _ in outcomes)
    assert outcomes[0][1] == digests | last.counters


@pytest.mark.parametrize(
    "row",
    [
        pytest.param(row, marks=[pytest.mark.slow] * (index >= QUICK_ROWS), id=f"row{index}")
        for index, row in enumerate(rows())
    ],
)
def test_row_trains_goes_on_to_the_bit_and_has_the_state_that_is_predicted(
    row, texts, tmp_path, monkeypatch
):
    if dict(row)["symbols"] == "in chunks":
        monkeypatch.setattr(symbols, "MAX_CHUNK", AT_ONCE)
    config, processes = config_of(row), int(dict(row)["processes"])
    check_row(config, processes, texts, tmp_path, monkeypatch)


def test_pairs_without_a_row_are_refused_in_a_line():
    for pair, words in refused_pairs().items():
        with pytest.raises(ArbError) as refusal:
            config_of(tuple(pair))
        assert words in str(refusal.value)
        assert "\n" not in str(refusal.value)


def test_every_compute_is_paired():
    assert {*SETTINGS["compute"]} == {*COMPUTES}
