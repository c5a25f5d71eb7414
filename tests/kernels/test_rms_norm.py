"""The norm and its gradient against float64: real kernels, interpreted where there is no GPU."""

import pytest
import torch
from torch.nn.functional import rms_norm as torch_rms_norm

from arbcli.kernels.backend import use_backend
from arbcli.kernels.decode_weight import random_packed
from arbcli.kernels.packing import pack_trits_reference
from arbcli.kernels.rms_norm import (
    RMS_NORM,
    RMS_NORM_GRAD_X,
    rms_norm,
    rms_norm_grad_x,
    rms_norm_reference,
    ternary_rms_norm,
)
from arbcli.model.config import SCALE_TYPES

KERNEL_BACKEND = "triton" if torch.cuda.is_available() else "interpreter"

each_spec = pytest.mark.parametrize("spec", [RMS_NORM, RMS_NORM_GRAD_X], ids=lambda spec: spec.name)
each_implementation = pytest.mark.parametrize("implementation", ["triton", "torch"])
each_backend = pytest.mark.parametrize("backend", [KERNEL_BACKEND, "torch"])


def relative_error(result, reference):
    assert result.shape == reference.shape
    if not reference.numel():
        return 0.0
    return float((result.double() - reference).norm() / reference.norm())


def norm_state(width, device, group_size=32, seed=0):
    generator = torch.Generator().manual_seed(seed)
    return [t.to(device) for t in random_packed(1, width, group_size, generator, spread=2)]


def randn(*shape, device, seed=1):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(device)


@each_implementation
@each_spec
def test_rms_norm_is_as_close_to_the_reference_as_its_gate_asks(spec, implementation, device):
    for case in spec.cases(device, 32):
        reference = spec.reference(*case.inputs)
        error = relative_error(getattr(spec, implementation)(*case.inputs), reference)
        limit = spec.gate.relative
        if case.peer:
            peer_error = relative_error(case.peer(*case.inputs), reference)
            limit = (1 + spec.gate.peer_slack) * peer_error
        assert error <= limit, f"{case.label}: {error} > {limit}"


@pytest.mark.parametrize("group_size", SCALE_TYPES.values(), ids=SCALE_TYPES)
@each_implementation
@each_spec
def test_rms_norm_reads_every_scale_type(spec, implementation, group_size, device):
    (case,) = (case for case in spec.cases(device, group_size) if case.label == "2x3x165")
    result = getattr(spec, implementation)(*case.inputs)
    assert relative_error(result, spec.reference(*case.inputs)) <= spec.gate.relative


@pytest.mark.parametrize("width", [1024, 1025, 8192, 8229])
@each_backend
def test_rms_norm_walks_wide_rows_to_their_end(backend, width, device):
    # one element has all of the mean square, so to miss it would change every other
    x = torch.zeros(2, width, device=device)
    x[:, -1] = 3.0
    packed = pack_trits_reference(torch.ones(1, width, dtype=torch.int8)).to(device)
    scales = torch.zeros(1, -(-width // 32), dtype=torch.int8, device=device)
    with use_backend(backend):
        y = rms_norm(x, packed, scales, scales, 32, 1.0)
        grad_x = rms_norm_grad_x(torch.ones_like(x), x, packed, scales, scales, 32, 1.0)
    r = (9 / width + 1) ** -0.5
    torch.testing.assert_close(y, x * r)
    expected = torch.full_like(x, r)
    expected[:, -1] -= r**3 * 9 / width
    torch.testing.assert_close(grad_x, expected)


@each_backend
def test_rms_norm_takes_whole_octaves(backend, device):
    packed, exponent, fraction = norm_state(165, device)
    x = randn(3, 165, device=device)
    with use_backend(backend):
        y = rms_norm(x, packed, exponent, None, 32, 1e-6)
        assert torch.equal(y, rms_norm(x, packed, exponent, fraction * 0, 32, 1e-6))


@each_backend
def test_ternary_rms_norm_gradient_equals_autograd_of_the_reference(backend, device):
    state = norm_state(123, device)
    x = randn(5, 2, 123, device=device).requires_grad_()
    grad_y = randn(5, 2, 123, device=device, seed=2)
    with use_backend(backend):
        y = ternary_rms_norm(x, *state, 32, 1e-6)
        y.backward(grad_y)
    wide = x.detach().double().requires_grad_()
    reference = rms_norm_reference(wide, *state, 32, 1e-6)
    reference.backward(grad_y.double())
    assert relative_error(y.detach(), reference.detach()) < 1e-5
    assert relative_error(x.grad, wide.grad) < 1e-5


@each_backend
def test_rms_norm_gradient_takes_an_expanded_grad_y(backend, device):
    state = norm_state(40, device)
    x = randn(3, 40, device=device).requires_grad_()
    with use_backend(backend):
        ternary_rms_norm(x, *state, 32, 1e-6).sum().backward()
        grad_x = rms_norm_grad_x(torch.ones_like(x), x.detach(), *state, 32, 1e-6)
    assert torch.equal(x.grad, grad_x)


@each_backend
def test_ternary_rms_norm_saves_its_input_and_nothing_else(backend, device):
    saved = []
    x = randn(3, 40, device=device).requires_grad_()
    hooks = torch.autograd.graph.saved_tensors_hooks(lambda t: saved.append(t) or t, lambda t: t)
    with use_backend(backend), hooks:
        ternary_rms_norm(x, *norm_state(40, device), 32, 1e-6)
    assert [t.data_ptr() for t in saved] == [x.data_ptr()]


@each_implementation
@each_spec
def test_rms_norm_is_deterministic(spec, implementation, device):
    case = list(spec.cases(device, 32))[4]
    run = getattr(spec, implementation)
    assert torch.equal(run(*case.inputs), run(*case.inputs))


def test_rms_norm_of_bf16_rounds_once_on_the_torch_backend():
    state = norm_state(1311, "cpu")
    x = randn(9, 1311, device="cpu").to(torch.bfloat16)
    with use_backend("torch"):
        y = rms_norm(x, *state, 32, 1e-6)
    reference = rms_norm_reference(x, *state, 32, 1e-6)
    assert y.dtype == torch.bfloat16
    # a float32 value beside a rounding boundary may land on the other side of it
    assert (y == reference.to(torch.bfloat16)).float().mean() > 0.999


def test_rms_norm_equals_that_of_torch_for_unit_weights(device):
    x = randn(7, 33, device=device)
    packed = pack_trits_reference(torch.ones(1, 33, dtype=torch.int8)).to(device)
    scales = torch.zeros(1, 2, dtype=torch.int8, device=device)
    y = RMS_NORM.triton(x, packed, scales, scales, 32, 1e-6)
    torch.testing.assert_close(y, torch_rms_norm(x, (33,), eps=1e-6))


def test_rms_norm_rejects_what_does_not_fit(device):
    packed, exponent, fraction = norm_state(33, device)
    x = torch.zeros(2, 33, device=device)
    with pytest.raises(ValueError, match=r"float32 or bfloat16 rows, got torch\.float64"):
        rms_norm(x.double(), packed, exponent, fraction, 32, 1e-6)
    with pytest.raises(ValueError, match=r"float32 or bfloat16 rows, got torch\.int8"):
        rms_norm(x.to(torch.int8), packed, exponent, fraction, 32, 1e-6)
    with pytest.raises(ValueError, match="one packed row"):
        rms_norm(x, packed.repeat(2, 1), exponent, fraction, 32, 1e-6)
    with pytest.raises(ValueError, match="not rows of 32 weights"):
        rms_norm(x[:, :32], packed[:, 1:2], exponent, fraction, 32, 1e-6)
    with pytest.raises(ValueError, match="need a uint8 matrix"):
        rms_norm(x, packed.to(torch.int8), exponent, fraction, 32, 1e-6)
    with pytest.raises(ValueError, match="need int8 scales"):
        rms_norm(x, packed, exponent, fraction[:, 1:], 32, 1e-6)


def test_rms_norm_grad_x_rejects_a_grad_y_unlike_x(device):
    state = norm_state(33, device)
    x = torch.zeros(2, 33, device=device)
    for grad_y in (x[:1], x.to(torch.bfloat16)):
        with pytest.raises(ValueError, match="need grad_y like x"):
            rms_norm_grad_x(grad_y, x, *state, 32, 1e-6)
