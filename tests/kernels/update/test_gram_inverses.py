"""Sums of inverses of Gram matrices: the native loop and torch's, against singular values."""

import pytest
import torch

from arbcli.directions.orthogonal import POLAR_WEIGHTS, SHIFTS
from arbcli.inspect.trace import without_memory
from arbcli.kernels.runtime import native
from arbcli.kernels.runtime.backend import use_backend
from arbcli.kernels.update import gram_inverses as module
from arbcli.kernels.update.gram_inverses import gram_inverses, gram_inverses_reference

compiled = pytest.mark.skipif(not native.available(), reason=native.why_not())
BACKENDS = ["torch", pytest.param("native", marks=compiled)]
SHAPES = [(1, 1), (1, 5), (33, 7), (32, 128), (63, 129), (70, 311), (3, 33, 40)]


def draw(shape: tuple[int, ...], seed: int = 0) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def relative_error(found: torch.Tensor, wanted: torch.Tensor) -> float:
    return float((found - wanted).norm() / wanted.norm())


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("transposed", [False, True], ids=["", "transposed"])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_sum_is_that_of_the_inverses(shape, transposed, backend):
    x = draw((*shape[:-2], shape[-1], shape[-2])).mT if transposed else draw(shape)
    shifts, weights = (1e-3, 0.04, 0.5), (0.7, 0.002, -0.05, 1.5)
    with use_backend(backend):
        found = gram_inverses(x * 1e-9, shifts, weights)
    assert relative_error(found, gram_inverses_reference(x * 1e-9, shifts, weights)) < 1e-4


@pytest.mark.parametrize("backend", BACKENDS)
def test_rows_of_neither_side_together(backend):
    x = draw((80, 140))[::2, ::3]
    with use_backend(backend):
        found = gram_inverses(x, SHIFTS, POLAR_WEIGHTS)
    wanted = gram_inverses_reference(x, SHIFTS, POLAR_WEIGHTS)
    assert relative_error(found @ x, wanted @ x.double()) < 1e-4


@compiled
@pytest.mark.parametrize("decades", [0, 2, 4])
def test_loop_loses_no_more_than_lapack(decades):
    n, m = 160, 192
    left, right = (torch.linalg.qr(draw((size, n), size))[0] for size in (n, m))
    x = left * torch.logspace(0, -decades, n) @ right.T
    wanted = gram_inverses_reference(x, SHIFTS, POLAR_WEIGHTS) @ x.double()
    errors = {}
    for backend in ("native", "torch"):
        with use_backend(backend):
            found = gram_inverses(x, SHIFTS, POLAR_WEIGHTS)
        errors[backend] = relative_error(found @ x, wanted)
    assert errors["native"] < 1.5 * errors["torch"] + 1e-6


@compiled
def test_bits_do_not_depend_on_the_number_of_threads(monkeypatch):
    monkeypatch.setattr(native, "LEAST_ELEMENTS", 0)
    x, found = draw((140, 300)), []
    for threads in (1, 2, 5):
        monkeypatch.setattr(torch, "get_num_threads", lambda threads=threads: threads)
        with use_backend("native"):
            found.append(gram_inverses(x, SHIFTS, POLAR_WEIGHTS))
    assert torch.equal(found[0], found[1])
    assert torch.equal(found[0], found[2])
    assert torch.equal(found[0], found[0].T)


@compiled
def test_sum_is_right_though_it_was_first_asked_for_without_memory():
    module._table.cache_clear()
    x, wanted = draw((6, 9)), gram_inverses_reference(draw((6, 9)), SHIFTS, POLAR_WEIGHTS)
    with use_backend("native"):
        with without_memory(torch.device("cpu")):
            gram_inverses(torch.empty(6, 9, device="cpu"), SHIFTS, POLAR_WEIGHTS)
        found = gram_inverses(x, SHIFTS, POLAR_WEIGHTS)
    assert relative_error(found @ x, wanted @ x.double()) < 1e-4


@pytest.mark.parametrize("backend", BACKENDS)
def test_zeros_give_a_finite_sum_and_what_is_not_finite_none(backend):
    x = draw((40, 50))
    with use_backend(backend):
        assert gram_inverses(x * 0, SHIFTS, POLAR_WEIGHTS).isfinite().all()
        x[3, 4] = torch.inf
        assert not gram_inverses(x, SHIFTS, POLAR_WEIGHTS).isfinite().any()


@compiled
def test_large_matrices_are_left_to_lapack(monkeypatch):
    x = draw((33, 40))
    with use_backend("torch"):
        wanted = gram_inverses(x, SHIFTS, POLAR_WEIGHTS)
    monkeypatch.setattr(module, "NATIVE_ROWS", 32)
    with use_backend("native"):
        assert torch.equal(gram_inverses(x, SHIFTS, POLAR_WEIGHTS), wanted)


@pytest.mark.parametrize(
    ("x", "weights", "message"),
    [
        (torch.ones(2, 3, dtype=torch.float64), (1.0, 1.0), "x: need float32"),
        (torch.ones(3), (1.0, 1.0), "x: need float32"),
        (torch.ones(2, 3), (1.0,), "need len\\(weights\\)"),
    ],
)
def test_what_does_not_fit_is_refused(x, weights, message):
    with pytest.raises(ValueError, match=message):
        gram_inverses(x, (0.1,), weights)
