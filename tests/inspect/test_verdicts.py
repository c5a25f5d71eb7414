"""Every verdict rests on the numbers that it says, and is given where its line is crossed."""

import dataclasses
import math
import re
from pathlib import Path

import pytest
from commands.pages import filled

from arbcli.inspect.verdicts import Histogram, ProbeReport, Reading, TensorReport, judge


def reading(step: int, **changes) -> Reading:
    calm = {
        "step": step, "live_bytes": 1000, "val_loss": 5.0 - step / 4, "flip_share": 0.01 * step,
        "residual_growth": 2.0, "takeoff_layer": None, "residual_rms": (1.0, 2.0, 4.0),
        "mixer_rms": (0.5, None), "channel_rms": (0.5, 0.5), "residual_most": (1.0, 2.0, 3.0),
    }  # fmt: skip
    return filled(Reading, **calm | changes)


def tensor(name: str, **changes) -> TensorReport:
    digits = {
        digit: filled(Histogram, saturated_share=0.25) for digit in ("scale", "remainder", "moment")
    }
    return filled(TensorReport, **{"name": name, "changed": True, "digits": digits} | changes)


def report(steps: dict[int, dict] | None = None, **changes) -> ProbeReport:
    """Make a calm report of eight steps, but for what is changed in readings of some steps."""
    readings = tuple(reading(step, **(steps or {}).get(step, {})) for step in range(9))
    calm = {
        "readings": readings, "tensors": (tensor("a"), tensor("b")), "acausal_logits": 0,
        "acausal_layers": (0, 0, 0), "first_nonfinite": None, "uniform_loss": math.log(256),
    }  # fmt: skip
    return filled(ProbeReport, **calm | changes)


def evidence_of(probe: ProbeReport) -> dict[str, str]:
    return {verdict.name: verdict.evidence for verdict in judge(probe)}


def full(digit: str, share: float) -> TensorReport:
    digits = {digit: filled(Histogram, saturated_share=share)}
    return tensor("b", digits=tensor("b").digits | digits)


CASES = {
    "calm": report(),
    "acausal": report(acausal_logits=1234),
    "leak": report({8: {"live_bytes": 3345}}),
    "what is made once": report({step: {"live_bytes": 9000} for step in range(3, 9)}),
    "not finite": report(first_nonfinite="output of `head` by step 3"),
    "climb": report({7: {"val_loss": 2.0}, 8: {"val_loss": 3.51}}),
    "smaller climb": report({7: {"val_loss": 2.0}, 8: {"val_loss": 3.5}}),
    "flips": report({5: {"flip_share": 0.101, "val_loss": 4.1}}),
    "fewer flips": report({5: {"flip_share": 0.1, "val_loss": 4.1}}),
    "flips that lower the loss": report({5: {"flip_share": 0.46}}),
    "uniform": report({step: {"val_loss": 5.54} for step in range(9)}),
    "nearly uniform": report({step: {"val_loss": 5.53} for step in range(9)}),
    "uniform at first": report({step: {"val_loss": 5.6} for step in range(5)}),
    "growth": report({2: {"residual_growth": 1234.5, "takeoff_layer": 3}}),
    "slow growth": report({2: {"residual_growth": 33.0}}),
    "less growth": report({2: {"residual_growth": 32.0, "takeoff_layer": 3}}),
    "compressed": report({0: {"logit_spread": 1.0}, 8: {"logit_spread": 0.24}}),
    "nearly compressed": report({8: {"logit_spread": 0.25}}),
    "full": report(tensors=(tensor("a"), full("moment", 0.51))),
    "half full": report(tensors=(tensor("a"), full("scale", 0.5))),
    "still": report(tensors=(tensor("a", changed=False), tensor("b"))),
    "all still": report(tensors=tuple(tensor(n, changed=False) for n in "abc")),
    "branches": report({8: {"channel_rms": (0.5, 0.0036), "mixer_rms": (0.0018, None)}}),
    "small branches": report({8: {"channel_rms": (0.5, 0.004)}}),
    "earlier branches": report({7: {"channel_rms": (0.0, 0.0)}}),
}
RECORDED = Path(__file__).with_name("verdicts.txt").read_text(encoding="utf-8")
"""The verdicts on each of these reports, with what they rest on."""


@pytest.mark.parametrize("name", CASES)
def test_verdict_follows_from_its_threshold_and_has_its_numbers(name):
    verdicts = "".join(f"  {word}: {said}\n" for word, said in evidence_of(CASES[name]).items())
    assert f"\n{name}\n{verdicts}" in f"\n{RECORDED}"


def test_every_case_is_recorded_once():
    assert re.findall(r"^\w.*", RECORDED, re.MULTILINE) == [*CASES]


def test_gravest_verdict_comes_first():
    worst = report(
        {8: {"live_bytes": 9999, "val_loss": 9.0, "residual_growth": 99.0}},
        acausal_logits=1, tensors=(tensor("a", changed=False), full("scale", 1.0)),
    )  # fmt: skip
    worst = dataclasses.replace(worst, uniform_loss=0.0)
    assert [*evidence_of(worst)] == [
        "acausal", "leak", "spike", "worse-than-uniform", "residual-growth", "saturated", "dead",
    ]  # fmt: skip
