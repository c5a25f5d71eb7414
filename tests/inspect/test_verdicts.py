"""Every verdict rests on the numbers that it says, and is given where its line is crossed."""

import dataclasses
import math

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
    "calm": (report(), {
        "ok": "the held-out loss went from 5.00 to 3.00 nats, and no step flipped more than 8.0% of"
        " all trits"
    }),
    "acausal": (report(acausal_logits=1234), {
        "acausal": "1,234 predictions moved when a byte after them was changed"
    }),
    "leak": (report({8: {"live_bytes": 3345}}), {
        "leak": "live tensors grew by 2,345 bytes from step 4 to 8"
    }),
    "what is made once": (report({step: {"live_bytes": 9000} for step in range(3, 9)}), None),
    "not finite": (report(first_nonfinite="output of `head` by step 3"), {
        "spike": "not finite: output of `head` by step 3"
    }),
    "climb": (report({7: {"val_loss": 2.0}, 8: {"val_loss": 3.51}}), {
        "spike": "the held-out loss climbed from 2.00 nats after step 7 to 3.51 after step 8"
    }),
    "smaller climb": (report({7: {"val_loss": 2.0}, 8: {"val_loss": 3.5}}), None),
    "flips": (report({5: {"flip_share": 0.101, "val_loss": 4.1}}), {
        "spike": "step 5 flipped 10.1% of all trits, and the held-out loss rose"
    }),
    "fewer flips": (report({5: {"flip_share": 0.1, "val_loss": 4.1}}), None),
    "flips that lower the loss": (report({5: {"flip_share": 0.46}}), None),
    "uniform": (report({step: {"val_loss": 5.54} for step in range(9)}), {
        "worse-than-uniform": "the held-out loss is 5.54 nats on average over the last 4 steps, and"
        " guessing costs 5.55"
    }),
    "nearly uniform": (report({step: {"val_loss": 5.53} for step in range(9)}), None),
    "uniform at first": (report({step: {"val_loss": 5.6} for step in range(5)}), None),
    "growth": (report({2: {"residual_growth": 1234.5, "takeoff_layer": 3}}), {
        "residual-growth": "the residual stream grew 1,234 times over the blocks, taking off in"
        " block 3"
    }),
    "slow growth": (report({2: {"residual_growth": 33.0}}), {
        "residual-growth": "the residual stream grew 33 times over the blocks"
    }),
    "less growth": (report({2: {"residual_growth": 32.0, "takeoff_layer": 3}}), None),
    "compressed": (report({0: {"logit_spread": 1.0}, 8: {"logit_spread": 0.24}}), {
        "logits-compressed": "logits of a prediction spread by 0.24, after 1.00 at first, and the"
        " largest stream of a byte is 3"
    }),
    "nearly compressed": (report({8: {"logit_spread": 0.25}}), None),
    "full": (report(tensors=(tensor("a"), full("moment", 0.51))), {
        "saturated": "in `b` 51% of each moment is at an end of its range"
    }),
    "half full": (report(tensors=(tensor("a"), full("scale", 0.5))), None),
    "still": (report(tensors=(tensor("a", changed=False), tensor("b"))), {
        "dead": "no digit of `a` changed"
    }),
    "all still": (report(tensors=tuple(tensor(n, changed=False) for n in "abc")), {
        "dead": "no digit of `a` and 2 more tensors changed"
    }),
    "branches": (report({8: {"channel_rms": (0.5, 0.0036), "mixer_rms": (0.0018, None)}}), {
        "dead": "the mixer of `blocks.0` adds 9e-04 of the stream; the channel mixer of"
        " `blocks.1` adds 9e-04 of the stream"
    }),
    "small branches": (report({8: {"channel_rms": (0.5, 0.004)}}), None),
    "earlier branches": (report({7: {"channel_rms": (0.0, 0.0)}}), None),
}  # fmt: skip
"""A report, and the verdicts on it with what they rest on; None is that nothing is wrong."""


@pytest.mark.parametrize("name", CASES)
def test_verdict_follows_from_its_threshold_and_has_its_numbers(name):
    probe, expected = CASES[name]
    if expected is None:
        assert evidence_of(probe).keys() == {"ok"}
    else:
        assert evidence_of(probe) == expected


def test_gravest_verdict_comes_first():
    worst = report(
        {8: {"live_bytes": 9999, "val_loss": 9.0, "residual_growth": 99.0}},
        acausal_logits=1, tensors=(tensor("a", changed=False), full("scale", 1.0)),
    )  # fmt: skip
    worst = dataclasses.replace(worst, uniform_loss=0.0)
    assert [*evidence_of(worst)] == [
        "acausal", "leak", "spike", "worse-than-uniform", "residual-growth", "saturated", "dead",
    ]  # fmt: skip
