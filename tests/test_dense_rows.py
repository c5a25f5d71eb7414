"""The peer of generation multiplies rows by dense weights, and otherwise is our own decoder."""

import pytest
import torch
from torch.nn import functional

from arbcli.config.presets import preset
from arbcli.infer.generation import Decoder
from arbcli.model.language_model import LanguageModel
from arbcli.model.layers.linear import TernaryLinear
from arbcli.model.layers.norm import NORM_EPS
from benchmarks.dense_rows import dense_row, read_dense


@pytest.mark.parametrize(("gated", "normalise", "adds"), [(False, True, True), (True, True, False),
                                                          (False, False, False)])  # fmt: skip
def test_row_is_multiplied_as_torch_does(gated, normalise, adds, device):
    x, weight = (torch.randn(*shape, device=device) for shape in ((2100,), (14, 2100)))
    added = torch.randn(7 if gated else 14, device=device) if adds else None
    wanted = functional.rms_norm(x, x.shape, eps=NORM_EPS) if normalise else x
    wanted = weight.double() @ wanted.double()
    if gated:
        wanted = functional.silu(wanted[:7]) * wanted[7:]
    wanted = wanted if added is None else wanted + added
    found = dense_row(x, weight, gated, normalise, added)
    torch.testing.assert_close(found.double(), wanted, rtol=1e-4, atol=1e-4)


@pytest.mark.gpu
def test_decoder_writes_the_same_text_from_dense_weights():
    torch.manual_seed(0)
    texts, read = [], []
    for dense in (False, True):
        model = LanguageModel(preset("tiny", layers=2)).cuda()
        model.initialise(0)
        read.append(read_dense(model) if dense else 0)
        with model.prepared_weights():
            decoder = Decoder(model, 48)
            decoder.read(b"\n")
            texts.append(b"".join(decoder.stream(40)))
    assert texts[0][:8] == texts[1][:8]  # sums differ in their last bits
    linear = [part.weight for part in model.modules() if isinstance(part, TernaryLinear)]
    assert read[1] == 2 * sum(weight.num_weights for weight in linear)
