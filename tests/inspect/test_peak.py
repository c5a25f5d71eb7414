"""The predicted peak is the sum of its parts, and near what was measured on a GPU."""

from itertools import product

import pytest

from arbcli.config.presets import PRESETS, preset
from arbcli.inspect import peak as module
from arbcli.inspect.peak import predict_peak
from arbcli.kernels.rows import weighted_rows
from arbcli.model.blocks import experts, sequencer
from arbcli.rules import RULES
from arbcli.train import updater as update


def test_what_is_done_at_once_is_what_the_prediction_says():
    assert module.EXPERTS_AT_ONCE == experts.WEIGHTS_AT_ONCE
    assert module.DECODED == weighted_rows.CHUNK_ELEMENTS
    assert len(sequencer.ORDERS) == module.ORDERS
    assert (module.WIDE, module.WIDE_PRODUCTS) == (update.WIDE, update.WIDE_PRODUCTS)


@pytest.mark.parametrize("recompute", [False, True])
def test_predicted_peak_is_the_sum_of_its_parts(recompute):
    for name, rule, device in product(PRESETS, RULES, ("cpu", "cuda")):
        peak = predict_peak(preset(name, rule=rule), batch=8, device=device, recompute=recompute)
        parts = (peak.state_bytes, peak.saved_bytes, peak.transient_bytes, peak.constant_bytes)
        assert min(parts) > 0
        assert peak.peak_bytes == sum(parts)


@pytest.mark.parametrize(
    ("name", "shape", "batch", "measured"),
    [
        ("arb-3b", {}, 1, 4275),
        ("arb-3b", {}, 64, 12925),
    ],
)
def test_predicted_peak_is_near_what_an_h200_held(name, shape, batch, measured):
    """`max_memory_allocated`, in MiB, of runs whose steps were captured."""
    peak = predict_peak(preset(name, **shape), batch=batch).peak_bytes / 2**20
    assert peak == pytest.approx(measured, rel=0.03)


@pytest.mark.parametrize("name", PRESETS)
@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_predicted_peak_grows_with_the_batch_and_shrinks_by_recomputing(name, device):
    def peak(batch, recompute=False):
        config = preset(name, ctx=128)
        return predict_peak(config, batch=batch, device=device, recompute=recompute).peak_bytes

    assert peak(2) < peak(16) < peak(128)
    assert peak(128, recompute=True) < peak(128)


PARTS = ("attention", "sequencer", "knowledge_codebook", "moe", "graph", "router")


@pytest.mark.parametrize("part", PARTS)
def test_predicted_peak_shrinks_with_every_part_that_is_left_out(part):
    every = {"moe": True, "graph": True}
    whole, without = (
        predict_peak(preset("arb-tiny", **every | {part: on}), batch=16).peak_bytes
        for on in (True, False)
    )
    assert without < whole
