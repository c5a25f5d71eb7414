"""Streaming backward: gradients are right, formed once, and nothing weight-shaped is kept."""

from dataclasses import replace

import pytest
import torch

from arbcli.config.layer_spec import MAX_CHUNK
from arbcli.config.parts.mlp import MLPConfig
from arbcli.config.presets import preset
from arbcli.kernels.runtime import native
from arbcli.kernels.runtime.backend import use_backend
from arbcli.model.baselines import FloatWeight
from arbcli.model.build import build_model
from arbcli.model.language_model import LanguageModel
from arbcli.model.layers.bitnet import RoundedGate, RoundedRMSNorm
from arbcli.model.layers.gained_norm import GainedRMSNorm
from arbcli.model.layers.linear import TernaryLinear
from arbcli.model.layers.norm import TernaryGate, TernaryRMSNorm
from arbcli.model.layers.products import FEW_ROWS
from arbcli.model.layers.rotary import rotary_table

TINY = {"dim": 32, "layers": 2, "heads": 2, "ffn": 48, "ctx": 16}


def linear(out_features=24, in_features=33) -> TernaryLinear:
    layer = TernaryLinear(
        out_features, in_features, preset("tiny").layer_spec(), area="mlp", std=0.1
    )
    layer.weight.initialise(seed=0, index=0)
    return layer


def model(**options) -> LanguageModel:
    return build_model(preset("tiny", **TINY, **options), torch.float32)


def collect(module) -> dict[str, list[torch.Tensor]]:
    """Make every weight hand its gradients to a list of its own."""
    gradients: dict[str, list[torch.Tensor]] = {}
    for name, part in module.named_modules():
        if hasattr(part, "sink"):
            gradients[name] = []
            part.sink = lambda _, grad, name=name: gradients[name].append(grad)
    return gradients


def batch(rows=3, length=16) -> tuple[torch.Tensor, torch.Tensor]:
    ids = torch.randint(0, 256, (rows, length + 1), generator=torch.Generator().manual_seed(0))
    return ids[:, :-1], ids[:, 1:]


@pytest.mark.parametrize("vocabulary", [256, MAX_CHUNK + 1])
def test_backward_of_a_head_without_a_sink_warns(vocabulary):
    """It would never be stepped. The gradients of a large one are formed chunk by chunk."""
    lm = build_model(replace(preset("tiny", **TINY), vocabulary=vocabulary), torch.float32)
    for weight in lm.packed_tensors().values():
        weight.sink = lambda *_: None
    lm.head.weight.sink = None
    with pytest.warns(RuntimeWarning, match="no `sink`, so its gradient is discarded"):
        lm.loss(*batch()).backward()


def plain_norm() -> TernaryRMSNorm:
    norm = TernaryRMSNorm(48, preset("tiny").layer_spec())
    norm.weight.fill(1)
    return norm


def normalised_gate() -> TernaryGate:
    gate = TernaryGate(48, preset("tiny").layer_spec(), normalise=True)
    gate.weight.fill(1)
    return gate


def gained_norm_of_all_sizes() -> GainedRMSNorm:
    norm = GainedRMSNorm(48, preset("tiny").layer_spec())
    norm.weight.values = tuple(0.1 * (number - 20) for number in range(48))
    norm.weight.initialise(0, 0)
    return norm


@pytest.mark.parametrize("gated", [False, True])
def test_rounded_norm_has_the_gradient_of_its_norm(gated):
    """The gradient ignores the rounding of the result, which the next layer's weights see."""
    norm = (RoundedGate if gated else RoundedRMSNorm)(48, preset("tiny").layer_spec())
    norm.weight.values = tuple(0.1 * (number - 20) for number in range(48))
    norm.weight.initialise(0, 0)
    gains = collect(norm)
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(5, 96 if gated else 48, generator=generator)
    grad_y = torch.randn(5, 48, generator=generator)
    grad_x, again = norm.backward(grad_y, x)
    there, gain = x.double().requires_grad_(), norm.weight.weight(torch.float32).double().flatten()
    product = there[:, :48].relu() ** 2 * there[:, 48:] if gated else there
    plain = torch.nn.functional.rms_norm(product, (48,), gain.requires_grad_(), 1e-6)
    plain.backward(grad_y.double())
    torch.testing.assert_close(grad_x.double(), there.grad, rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(gains["weight"][0].double()[:, 0], gain.grad, rtol=1e-4, atol=1e-5)
    step = plain.detach().abs().amax(dim=1, keepdim=True) / 127
    y = norm(x)
    assert torch.equal(y, again)
    assert ((y - plain).abs() <= 0.501 * step).all()
    assert ((y / step - (y / step).round()).abs() < 1e-3).all()
    total, of_sum = norm.add_and_norm(x, x) if not gated else (2 * x, norm(2 * x))
    assert torch.equal(total, 2 * x)
    assert torch.equal(of_sum, norm(2 * x))


def test_input_of_a_bitnet_before_the_head_is_rounded():
    config = replace(preset("tiny", **TINY), head=MLPConfig(width=8, bitnet=True), norm_gain=True)
    assert isinstance(build_model(config).byte_norm, RoundedRMSNorm)


@pytest.mark.parametrize("number_format", ["bf16", "fp8", "fp8-backward"])
@pytest.mark.parametrize("needed", [True, False])
@pytest.mark.parametrize("norm", [None, plain_norm, normalised_gate, gained_norm_of_all_sizes])
def test_weight_has_one_gradient_whether_or_not_its_input_needs_one(norm, needed, number_format):
    layer, norm = linear(32, 48), norm and norm()
    layer.weight.number_format = number_format
    grads = collect(layer)
    rows = 5 if number_format == "bf16" else FEW_ROWS + 1
    generator = torch.Generator().manual_seed(0)
    gated = isinstance(norm, TernaryGate)
    # of the size of eps, where a norm is not what it is of its own result
    x = 2e-3 * torch.randn(rows, 96 if gated else 48, generator=generator)
    if gated:
        x[:, 48:] *= 1e3
    grad_y = torch.randn(rows, 32, generator=generator)
    y = layer(x.requires_grad_(needed), norm)
    y.backward(grad_y)
    normal = x.detach().double()
    if gated:
        normal = torch.nn.functional.silu(normal[:, :48]) * normal[:, 48:]
    if norm:
        normal = torch.nn.functional.rms_norm(normal, (48,), eps=1e-6)
        normal = normal * norm.weight.weight(torch.float32).double().view(1, -1)
    wanted = normal @ layer.weight.weight(torch.float32).double().T
    assert (y - wanted).norm() < (0.05 if number_format == "fp8" else 1e-5) * wanted.norm()
    (grad,) = grads["weight"]
    # the last bits of the product, and of the input's norm, move each term by up to 2**-21
    terms = grad_y.double().abs().T @ normal.abs()
    rounding = 2**-3 if number_format == "fp8-backward" else 2**-20
    assert ((grad - grad_y.double().T @ normal).abs() <= rounding * terms).all()
    assert layer.weight.quantised_grad is None


@pytest.mark.skipif(not native.available(), reason="no C compiler")
@pytest.mark.parametrize("digits", ["trit", "all"])
def test_rows_of_a_prompt_are_one_product_of_the_loops_with_the_bits_of_each(digits, monkeypatch):
    layer = TernaryLinear(24, 40, preset("tiny", digits=digits).layer_spec(), area="mlp", std=0.1)
    layer.weight.initialise(seed=0, index=0)
    x = torch.randn(1, 21, 40, generator=torch.Generator().manual_seed(0))
    with use_backend("native"):
        alone = torch.cat([layer.fused(row[None, None], normalise=True) for row in x[0]], dim=1)
        calls, call = [], native.call
        monkeypatch.setattr(native, "call", lambda *given: calls.append(given[0]) or call(*given))
        together = layer.fused(x, normalise=True)
    assert torch.equal(together, alone)
    assert calls == ["multiply_rows"]


def test_weight_used_twice_gets_one_gradient_after_its_last_use():
    """It does not change while the backward needs it."""
    layer, grads = linear(33, 33), []

    def step(tensor, grad):
        grads.append(grad)
        tensor.trits.fill_(121)  # all zeros

    layer.weight.sink = step
    x, other = (torch.ones(5, 33).cumsum(1).div(33).requires_grad_() for _ in range(2))
    weight = layer.weight.weight(torch.float32).requires_grad_()
    layer(layer(x)).sum().backward()
    (other @ weight.T @ weight.T).sum().backward()
    assert torch.allclose(x.grad, other.grad, rtol=1e-4, atol=1e-4)
    assert len(grads) == 1
    assert torch.allclose(grads[0], weight.grad, rtol=1e-4, atol=1e-4)


def test_backward_saves_nothing_weight_shaped():
    lm = model()
    shapes = {tuple(weight.weight().shape) for weight in lm.weights().values()}
    shapes |= {shape[::-1] for shape in shapes}
    saved = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: saved.append(t) or t, lambda t: t):
        lm.loss(*batch(rows=3, length=13))  # 39 rows: no activation has the shape of a weight
    assert saved
    assert not [t for t in saved if tuple(t.shape) in shapes]


@pytest.mark.parametrize("length", [64, 2**17])
def test_angles_are_those_of_float64(length):
    """The angle of the last position, rounded to float32, would be off by more."""
    table = torch.cat(rotary_table(length, 32, torch.device("cpu")), dim=1)
    rates = 10000.0 ** (-torch.arange(16, dtype=torch.float64) / 16)
    angles = torch.outer(torch.arange(length, dtype=torch.float64), rates)
    assert (table - torch.cat((angles.cos(), angles.sin()), dim=1)).abs().max() < 1e-7


def test_straight_through_weights_are_rounded_in_units_of_their_mean():
    part = FloatWeight(1, 4, preset("tiny", weights="ste").layer_spec(), std=0.1)
    with torch.no_grad():
        part.latent.copy_(torch.tensor([[0.1, 0.35, -1.25, 0.3]]))  # 0.5 in the mean
    weight = part.weight(torch.float32)
    assert weight.tolist() == [[0.0, *map(pytest.approx, (0.5, -0.5, 0.5))]]
    weight.backward(torch.tensor([[1.0, 2.0, 3.0, 4.0]]))
    assert part.latent.grad.tolist() == [[1.0, 2.0, 3.0, 4.0]]
