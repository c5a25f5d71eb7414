"""Products in four bits: codes by hand, what they lose, and trits, which lose of scales alone."""

import torch

from arbcli.config.presets import preset
from arbcli.families.nvfp4.kernels.round_nvfp4 import round_nvfp4
from arbcli.model.layers.linear import TernaryLinear
from arbcli.model.layers.products import FEW_ROWS


def test_non_finite_row_has_nan_scales():
    x = torch.ones(3, 16)
    for bad in (torch.nan, torch.inf):
        x[1, 3] = bad
        assert round_nvfp4(x)[1].isnan().all()


def test_trits_keep_their_signs_and_zeros():
    layer = TernaryLinear(
        32, 48, preset("tiny", scale_type="T16").layer_spec(), area="mlp", std=0.1
    )
    layer.weight.initialise(seed=0, index=0)
    exact = layer.weight.weight(torch.float32)
    y, g = round_nvfp4(exact)
    assert torch.equal(y.sign(), exact.sign())
    assert ((y * g - exact).abs() <= exact.abs() / 16).all()  # of a scale all but three bits
    layer.weight.number_format = "nvfp4"
    x = torch.randn(70, 48, generator=torch.Generator().manual_seed(1))
    got = layer(x)
    assert (got - x @ exact.T).norm() < 0.15 * (x @ exact.T).norm()


def test_layer_multiplies_both_ways_in_four_bits():
    layer = TernaryLinear(32, 48, preset("tiny").layer_spec(), area="mlp", std=0.1)
    layer.weight.initialise(seed=0, index=0)
    layer.weight.number_format, exact = "nvfp4", layer.weight.weight(torch.float32)
    generator = torch.Generator().manual_seed(1)
    x, grad = (torch.randn(FEW_ROWS + 1, n, generator=generator) for n in (48, 32))
    y = layer(x.requires_grad_())
    y.backward(grad)
    for got, wanted in ((y, x @ exact.T), (x.grad, grad @ exact)):
        assert 0.05 < (got - wanted).norm() / wanted.norm() < 0.2
    few = layer(x[:3])  # a few rows are as exact as ever
    assert (few - (x @ exact.T)[:3]).norm() < 1e-5 * few.norm()
