"""The expected speed is that of measured steps, and scales with the products of a known GPU."""

import dataclasses
import json
from pathlib import Path
from unittest import mock

import pytest
import torch

from arbcli.config.training import TrainConfig
from arbcli.inspect.speed import expected_speed, step_seconds
from arbcli.training.configure import new_config

with mock.patch.object(torch, "compile", lambda function=None, **_: function or (lambda f: f)):
    from benchmarks import large_tuning  # whose peers compile: to import a compiler takes seconds

RESULTS = Path(large_tuning.__file__).parent / "results" / "large_tuning.json"


def config(preset="1b", device="cuda", **settings) -> TrainConfig:
    given = new_config(preset=preset, device="cpu", compute="bf16")
    return dataclasses.replace(given, device=device, backend="triton", **settings)


def as_if_on(gpu: str, capability: tuple[int, int], monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: gpu != "none")
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda _: gpu)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _: capability)


def test_speed_is_that_of_measured_steps(monkeypatch):
    as_if_on("none", (0, 0), monkeypatch)
    runs = json.loads(RESULTS.read_text())["runs"]
    rows = [row for run in runs for row in run["rows"] if row["predicted_reserved_bytes"]]
    for row in rows:
        rule, direction, *fp8 = row["kind"].split()
        step = config(
            large_tuning.model_config(large_tuning.SHAPES[row["shape"]], rule, direction),
            **{name: row[name] for name in ("batch", "accum", "recompute")},
        )
        step = dataclasses.replace(step, model=dataclasses.replace(step.model, ctx=row["ctx"]))
        speed = expected_speed(step)
        expected = speed.fp8_tokens_per_second if fp8 else speed.tokens_per_second
        assert expected == pytest.approx(row["tokens_per_second"], rel=0.08), row
    assert {row["shape"] for row in rows} == large_tuning.SHAPES.keys()


def test_step_of_a_small_model_takes_the_least_time_of_its_kernels():
    step = config("tiny", batch=16)
    assert step.model.ctx == 64
    assert step_seconds(step) == pytest.approx(6.45e-4, rel=0.08)  # docs/log/runs.md


@pytest.mark.parametrize(("gpu", "capability", "words"), [
    ("none", (0, 0), "about 51,000 tokens/s on an NVIDIA H200, 59,000 with --compute fp8"),
    ("some GPU", (8, 9), "about 51,000 tokens/s on an NVIDIA H200, 59,000 with --compute fp8"),
    ("NVIDIA A30", (8, 0), "about 8,500 tokens/s on an NVIDIA A30"),
])  # fmt: skip
def test_speed_scales_with_the_products_of_a_known_gpu(gpu, capability, words, monkeypatch):
    as_if_on(gpu, capability, monkeypatch)
    step = config(batch=8)
    assert str(expected_speed(step)) == words
    fp8 = expected_speed(dataclasses.replace(step, compute="fp8"))
    assert fp8.fp8_tokens_per_second is None


@pytest.mark.parametrize("settings", [
    {"preset": "hnet-tiny"}, {"preset": "arb-tiny"}, {"compute": "fp32"}, {"device": "cpu"},
])  # fmt: skip
def test_nothing_is_expected_of_what_was_not_measured(settings):
    assert expected_speed(config(**settings)) is None
