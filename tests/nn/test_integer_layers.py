"""Layers of integers give what float layers of the decoded weights give, in every use of torch."""

import copy

import pytest
import torch
from collected import Collected
from states import assert_same
from torch import nn
from torch.utils.checkpoint import checkpoint

from arbcli import nn as integers
from arbcli.base.errors import ArbError

LAYERS = {
    "linear": (lambda: nn.Linear(33, 20), lambda: torch.randn(2, 3, 33)),
    "linear without a bias": (lambda: nn.Linear(33, 1, bias=False), lambda: torch.randn(33)),
    "transposed input": (lambda: nn.Linear(8, 5), lambda: torch.randn(8, 3, 2).transpose(0, 2)),
    "expanded input": (lambda: nn.Linear(8, 5), lambda: torch.randn(1, 8).expand(4, 8)),
    "no rows": (lambda: nn.Linear(8, 5), lambda: torch.randn(0, 8)),
    "embedding with padding": (
        lambda: nn.Embedding(12, 40, padding_idx=3),
        lambda: torch.tensor([[3, 1, 1], [7, 3, 11]], dtype=torch.int32),
    ),
}


def assert_close(a, b):
    torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("name", LAYERS)
def test_layer_equals_a_float_layer_of_the_decoded_weights(name):
    torch.manual_seed(0)
    build, draw = LAYERS[name]
    plain, x = build(), draw()
    layer = getattr(integers, type(plain).__name__).from_float(plain)
    twin, seen = layer.to_float().requires_grad_(), Collected(layer)
    floats = x.is_floating_point()
    ours, theirs = (x.clone().requires_grad_(floats) for _ in range(2))
    y, expected = layer(ours), twin(theirs)
    assert_close(y, expected)
    (y.sin().sum()).backward()
    (expected.sin().sum()).backward()
    if floats:
        assert_close(ours.grad, theirs.grad)
    assert_close(seen.grads["weight"], twin.weight.grad)
    if getattr(twin, "bias", None) is not None:
        assert_close(seen.grads["bias"].flatten(), twin.bias.grad)


@pytest.mark.parametrize("rows", [7, 0])
def test_experts_equal_a_loop_over_experts(rows):
    torch.manual_seed(0)
    gate_up, down = torch.randn(3, 20, 40) / 6, torch.randn(3, 40, 10) / 3
    layer = integers.Experts(gate_up, down)
    seen = Collected(layer)
    a, b = (part.detach().requires_grad_() for part in (layer.gate_up_proj, layer.down_proj))
    x = torch.randn(rows, 40)
    chosen = torch.tensor([[0, 2]] * 4 + [[2, 0]] * 3)[:rows]  # expert 1 has no slot
    shares = torch.rand(rows, 2)
    ours, theirs = x.clone().requires_grad_(), x.clone().requires_grad_()
    expected = 0
    for slot in range(2):
        gate, up = torch.einsum("md,mnd->mn", theirs, a[chosen[:, slot]]).chunk(2, dim=1)
        made = torch.einsum("mi,mdi->md", nn.functional.silu(gate) * up, b[chosen[:, slot]])
        expected = expected + made * shares[:, slot, None]
    y = layer(ours, chosen, shares)
    assert_close(y, expected)
    y.sin().sum().backward()
    expected.sin().sum().backward()
    assert_close(ours.grad, theirs.grad)
    assert_close(seen.grads["gate_up_proj"], a.grad.flatten(0, 1))
    assert_close(seen.grads["down_proj"], b.grad.flatten(0, 1))


def test_weights_that_are_read_have_gradients_too():
    torch.manual_seed(0)
    layer = integers.Linear(16, 4)
    twin, seen = layer.to_float().requires_grad_(), Collected(layer)
    x = torch.randn(5, 16)
    for module in (layer, twin):
        product = module(x) + nn.functional.linear(x, module.weight)  # both uses in one graph
        (product.sin().sum() + module.weight.square().sum()).backward()
    assert seen.calls == 2  # weight and bias, once each
    assert_close(seen.grads["weight"], twin.weight.grad)
    for table in (integers.Embedding(6, 8), integers.Vector(torch.randn(5))):
        seen = Collected(table)
        read = table.weight if isinstance(table, nn.Embedding) else table()
        (3 * read).sum().backward()
        grad = next(iter(seen.grads.values()))
        assert torch.equal(grad, torch.full_like(grad, 3))


def test_vector_keeps_numbers_to_seven_bits():
    values = torch.tensor([1.0, -3e-4, 0.0, 250.0, 0.1])
    vector = integers.Vector(values)
    torch.testing.assert_close(vector().detach(), values, rtol=2**-7, atol=0)
    assert {part.dtype for part in vector.state_dict().values()} == {torch.uint8, torch.int8}


class Twice(nn.Module):
    """A layer that is used twice, with a nonlinearity between."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.layer = integers.Linear(16, 16)
        self.gain = integers.Vector(torch.ones(16))

    def forward(self, x):
        return self.layer((self.layer(x) * self.gain()).tanh())


def gradients(module: nn.Module, run) -> dict:
    seen = Collected(module)
    x = torch.linspace(-1, 1, 48).view(3, 16).requires_grad_()
    run(x).sin().sum().backward()
    return seen.grads | {"x": x.grad, "calls": torch.tensor(seen.calls)}


def test_all_uses_of_a_graph_are_one_gradient_however_it_is_run():
    model = Twice()
    plain = gradients(model, model)
    assert plain["calls"] == 3
    model(torch.randn(3, 16))  # a forward without a backward
    for run in (
        model,
        lambda x: checkpoint(model, x, use_reentrant=False),
        torch.compile(model, backend="eager"),
        copy.deepcopy(model),
    ):
        assert_same(gradients(run if isinstance(run, Twice) else model, run), plain)


def test_a_kept_graph_does_not_delay_gradients():
    torch.manual_seed(0)
    model = nn.Sequential(*(integers.Linear(8, 8, bias=False) for _ in range(3)))
    order, kept = [], []
    for name, part in model.named_modules():
        if hasattr(part, "anchor"):
            part.sink = lambda tensor, grad, where=None, name=name: order.append(name)

    class Noted(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            return x.clone()

        @staticmethod
        def backward(ctx, grad):
            order.append("backward of the first layer")
            return grad

    for _ in range(2):
        order.clear()
        kept.append(model[2](model[1](Noted.apply(model[0](torch.randn(2, 8))))).sum())
        kept[-1].backward()
        assert order[:3] == [
            "2.weight_packed", "1.weight_packed", "backward of the first layer",
        ]  # fmt: skip


def test_reentrant_checkpoints_work_or_are_refused():
    model = integers.Linear(16, 16)
    plain = gradients(model, model)
    assert_same(gradients(model, lambda x: checkpoint(model, x, use_reentrant=True)), plain)
    optimizer = integers.IntegerOptimizer(model)
    x = torch.randn(3, 16, requires_grad=True)
    y = checkpoint(model, checkpoint(model, x, use_reentrant=True), use_reentrant=True)
    with pytest.raises(ArbError, match=r"integer weights|backward 2"):
        y.sum().backward()
    assert optimizer.counters()["refused"] == 0


def test_autocast_multiplies_in_bfloat16():
    layer = integers.Linear(16, 8)
    x = torch.randn(4, 16)
    with torch.autocast("cpu", torch.bfloat16):
        y = layer(x)
    assert y.dtype == torch.bfloat16
    assert torch.equal(y, layer(x.bfloat16()))
    experts = integers.Experts(torch.randn(2, 12, 16), torch.randn(2, 16, 6))
    slots = torch.tensor([[0], [1], [1], [0]]), torch.ones(4, 1)
    with torch.autocast("cpu", torch.bfloat16):
        y = experts(x, *slots)
    assert y.dtype == torch.float32
    assert torch.equal(y, experts(x.bfloat16(), *slots).float())
    for run in (lambda: layer(x), lambda: experts(x, *slots)):
        with torch.autocast("cpu", torch.float16), pytest.raises(ArbError, match="float16"):
            run()


def test_evaluation_records_nothing():
    layer = integers.Linear(16, 8)
    with torch.no_grad():
        assert not layer(torch.randn(1, 16)).requires_grad
    with torch.inference_mode():
        assert not layer(torch.randn(1, 16)).requires_grad
        assert not copy.deepcopy(layer)(torch.randn(1, 16)).requires_grad
    layer.requires_grad_(False)
    assert not layer(torch.randn(1, 16)).requires_grad
    seen = Collected(layer)
    x = torch.randn(1, 16, requires_grad=True)
    layer(x).sum().backward()
    assert seen.calls == 0
    assert_close(x.grad, layer.weight.sum(dim=0)[None])


def test_dtype_changes_what_weights_are_decoded_to():
    layer = integers.Linear(16, 8).to(torch.bfloat16)
    assert layer.weight.dtype == layer.bias.dtype == torch.bfloat16
    assert {part.dtype for part in layer.state_dict().values()} == {torch.uint8, torch.int8}
    table = integers.Embedding(16, 8)
    for convert in (nn.Module.half, nn.Module.double):
        for module in (layer, table):
            with pytest.raises(ArbError, match="compute in bfloat16 or float32"):
                convert(module)
    assert layer.weight.dtype == torch.bfloat16
    assert table(torch.tensor([3])).dtype == torch.float32  # as before the error


def test_wrong_uses_are_refused():
    layer, x = integers.Linear(16, 8), torch.randn(4, 16, requires_grad=True)
    for refused, message in (
        (lambda: torch.autograd.grad(layer(x).sum(), x, create_graph=True), "second derivatives"),
        (lambda: torch.jit.trace(layer, x), "cannot be traced"),
        (lambda: torch.export.export(layer, (x,)), "cannot be traced"),
        (lambda: torch.func.vmap(layer)(x), "cannot be traced"),
        (lambda: integers.Embedding(16, 8)(torch.tensor([1.5])), r"ids are torch\.float32"),
        (lambda: integers.Embedding(16, 8, max_norm=1.0), "has `max_norm`"),
        (lambda: integers.Vector(torch.tensor([torch.nan])), "not finite"),
        (lambda: integers.Linear.from_float(nn.Sequential(layer)), "no float weights of its own"),
    ):
        with pytest.raises(ArbError, match=message):
            refused()
    for name, value in (
        ("weight", nn.Parameter(torch.zeros(8, 16))),
        ("weight", torch.zeros(8, 16)),
        ("out_features", 9),
    ):
        with pytest.raises(ArbError, match="cannot be assigned"):
            setattr(layer, name, value)
