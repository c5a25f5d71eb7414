"""Hyper-connections: one stream is the plain block, and several are mixed without gain or loss."""

import pytest
import torch

from arbcli.config.presets import preset
from arbcli.families.streams.kernels.stream_weights import SLACK
from arbcli.model.build import build_model
from arbcli.model.language_model import LanguageModel

SHAPE = {"dim": 32, "layers": 2, "heads": 2, "ffn": 48, "ctx": 9}
IDS = torch.randint(256, (2, 9), generator=torch.Generator().manual_seed(0))


def model(dtype=torch.float32, **options) -> LanguageModel:
    return build_model(preset("tiny", **SHAPE | options), dtype)


def stirred(lm: LanguageModel) -> LanguageModel:
    """Give the projections weights, which are zero at first."""
    for index, (name, tensor) in enumerate(lm.weights().items()):
        if name.endswith("projection.weight"):
            tensor.spread, tensor.std = 1.0, 0.3
            tensor.initialise(1, index)
    return lm


def check_sums(b: torch.Tensor) -> None:
    """Check that the rows and columns of matrices (M, n, n) sum to one within rounding errors.

    What is missing from a row, r of S in all rows, is filled to r C / (S + SLACK), with C of all
    columns. The sum of a row or column has an error of up to SLACK, so that C - S, which is zero
    but for these, is up to 2 n SLACK; with the denominator's and that of the row itself (2 n + 2).
    """
    for dim in (1, 2):
        assert (b.double().sum(dim) - 1).abs().max() < (2 * b.shape[1] + 2) * SLACK


@pytest.mark.parametrize("weights", ["ternary", "float", "ste"])
def test_streams_begin_as_a_single_stream(weights):
    """The projection is zero, and c is 1, packed within half a percent."""
    several, one = (model(streams=streams, weights=weights) for streams in (4, 1))
    one.load_state_dict({name: several.state_dict()[name] for name in one.state_dict()})
    with torch.no_grad():
        bound = 0.03 if weights == "ternary" else 1e-3
        torch.testing.assert_close(several(IDS), one(IDS), rtol=bound, atol=bound)


@pytest.mark.parametrize("streams", [2, 4, 8])
def test_rows_and_columns_sum_to_one(streams):
    lm, seen = stirred(model(streams=streams)), []
    connection = lm.blocks[1].mlp_streams
    connection.register_forward_pre_hook(lambda _, inputs: seen.append(inputs[0].flatten(0, 1)))
    with torch.no_grad():
        lm(IDS)
        a, b, c = connection.weights(seen[0])
    assert b.std() > 0.01
    check_sums(b)
    assert b.min() >= 0
    assert 0 < a.min() < a.max() < 1
    assert 0 < c.min() < c.max() < 2
