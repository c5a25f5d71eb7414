"""The norm and its gradient against float64: real kernels, interpreted where there is no GPU."""

import pytest
import torch
from torch.nn.functional import rms_norm as torch_rms_norm

from arbcli.kernels.codec.decode_weight import random_packed
from arbcli.kernels.codec.packing import pack_trits_reference
from arbcli.kernels.norm.rms_norm import (
    RMS_NORM,
    RMS_NORM_BACKWARD,
    add_rms_norm,
    rms_norm,
    rms_norm_backward,
    rms_norm_reference,
)
from arbcli.kernels.runtime.backend import use_backend

KERNEL_BACKEND = "triton" if torch.cuda.is_available() else "interpreter"

each_spec = pytest.mark.parametrize(
    "spec", [RMS_NORM, RMS_NORM_BACKWARD], ids=lambda spec: spec.name
)
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
        grad_x, again = rms_norm_backward(torch.ones_like(x), x, packed, scales, scales, 32, 1.0)
    r = (9 / width + 1) ** -0.5
    torch.testing.assert_close(y, x * r)
    torch.testing.assert_close(again, y)
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
def test_rms_norm_gradient_takes_an_expanded_grad_y(backend, device):
    state = norm_state(40, device)
    x = randn(3, 40, device=device)
    one = torch.ones((), device=device)
    with use_backend(backend):
        expanded = rms_norm_backward(one.expand(3, 40), x, *state, 32, 1e-6)
        whole = rms_norm_backward(torch.ones_like(x), x, *state, 32, 1e-6)
    assert torch.equal(expanded[0], whole[0])


@pytest.mark.parametrize("rows", [3, 9])
@each_backend
def test_sum_is_stored_and_normalised(backend, rows, device):
    state = norm_state(165, device)
    x, added = randn(2, rows, 165, device=device)
    with use_backend(backend):
        total, y = add_rms_norm(x, added.T.contiguous().T, *state, 32, 1e-6)
        assert torch.equal(total, x + added)
        assert torch.equal(y, rms_norm(x + added, *state, 32, 1e-6))
        with pytest.raises(ValueError, match="need added like x"):
            add_rms_norm(x, added[:, 1:], *state, 32, 1e-6)


@each_backend
def test_decoded_weights_take_the_place_of_packed_ones(backend, device):
    state = norm_state(165, device)
    x, twos = randn(3, 165, device=device), torch.full((165,), 2.0, device=device)
    expected = 2 * torch_rms_norm(x, (165,), eps=1e-6)
    with use_backend(backend):
        torch.testing.assert_close(rms_norm(x, *state, 32, 1e-6, twos), expected)
        with pytest.raises(ValueError, match="need contiguous float32 weights"):
            rms_norm(x, *state, 32, 1e-6, twos[1:])


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


def test_rms_norm_backward_rejects_a_grad_y_unlike_x(device):
    state = norm_state(33, device)
    x = torch.zeros(2, 33, device=device)
    for grad_y in (x[:1], x.to(torch.bfloat16)):
        with pytest.raises(ValueError, match="need grad_y like x"):
            rms_norm_backward(grad_y, x, *state, 32, 1e-6)
