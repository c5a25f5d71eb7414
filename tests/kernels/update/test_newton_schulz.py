"""Products and inverses of Gram matrices."""

import pytest
import torch
from checked import assert_as_wanted

from arbcli.inspect.trace import no_memory
from arbcli.kernels.runtime import native
from arbcli.kernels.runtime._triton import replaced_launches
from arbcli.kernels.runtime.backend import use_backend
from arbcli.kernels.update import gram_inverses as module
from arbcli.kernels.update import newton_schulz
from arbcli.kernels.update.gram_inverses import gram_inverses
from arbcli.kernels.update.newton_schulz import gram, gram_polynomial, has_aligned_rows
from arbcli.model.optimizers.orthogonal import POLAR_WEIGHTS, SHIFTS
from arbcli.verify.compare import compare, poisoned
from arbcli.verify.kernels.update.newton_schulz import (
    gram_polynomial_verification,
    gram_reference,
    gram_verification,
)

COEFFICIENTS = (3.4445, -4.775, 2.0315)

each_spec = pytest.mark.parametrize(
    "spec", [gram_verification, gram_polynomial_verification], ids=lambda spec: spec.name
)


def gram_inverses_reference(x: torch.Tensor, shifts, weights) -> torch.Tensor:
    """Compute the reference result of `gram_inverses`, in float64, from singular values."""
    left, values, _ = torch.linalg.svd(x.double())
    squares = torch.zeros(x.shape[:-1], dtype=torch.float64)
    squares[..., : values.shape[-1]] = values**2
    size = squares.norm(dim=-1, keepdim=True)
    squares = squares / size
    factors = weights[0] + sum(
        weight / (squares + shift) for shift, weight in zip(shifts, weights[1:], strict=True)
    )
    return (left * (factors / size.sqrt())[..., None, :]) @ left.mT


def draw(shape: tuple[int, ...], seed: int = 0) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


@each_spec
def test_kernel_results_are_exactly_symmetric(spec, device):
    for case in [*spec.cases(device, 32)][::3]:
        result = spec.triton(*case.inputs)
        assert torch.equal(result, result.mT), case.label


@pytest.mark.parametrize(
    ("shape", "programs"),
    [*(((2, 70, 160), n) for n in (1, 7, 72)), ((70, 160), None), ((2, 65, 33), None)],
    ids=str,
)
def test_gram_matrix_is_right_for_any_number_of_programs(shape, programs, monkeypatch, device):
    """The first shape has 12 tiles of 5 steps."""
    if programs:
        monkeypatch.setattr(newton_schulz, "num_processors", lambda _: programs)
    else:
        monkeypatch.setattr(newton_schulz, "MANY", 0)
    x = draw(shape).to(device)
    a = gram_reference(x / 160).float()
    for spec, given in (
        (gram_verification, [x]),
        (gram_polynomial_verification, [a, *COEFFICIENTS]),
    ):
        assert_as_wanted(spec, "", spec.triton(*given), spec.reference(*given))


def test_semaphores_of_a_gram_matrix_begin_at_zero(device):
    ready = []

    def record(kernel, _grid, *args, **_kwargs):
        ready.append(args[kernel.arg_names.index("ready_ptr")])

    with poisoned(), replaced_launches(record):
        gram_verification.triton(torch.ones(70, 160, device=device))
    assert len(ready) == 1
    assert not ready[0].any()


@pytest.mark.parametrize("tiles", [1, 3, 16, 17])
def test_gram_matrix_has_every_tile_of_its_triangle(tiles, device):
    rows = tiles * newton_schulz.OTHER_TILES.block
    x = torch.arange(rows, device=device).remainder(29).float()[:, None] - 7
    assert torch.equal(gram_verification.triton(x), x * x.T)


@pytest.mark.gpu
@pytest.mark.parametrize("rows", [384, 768, 1024, 2048])
def test_public_products_in_bf16_are_as_close_as_the_library(rows, device):
    x = draw((rows, 5120)).to(device).bfloat16() / 72
    a = gram(x)
    compared = compare(gram_verification, "gram", a, gram_reference(x), x @ x.T)
    assert compared.passed, compared
    p = gram_polynomial(a, *COEFFICIENTS)
    spec, given = gram_polynomial_verification, (a, *COEFFICIENTS)
    compared = compare(spec, "", p, spec.reference(*given), spec.torch(*given))
    assert compared.passed, compared


def test_rows_that_the_copy_engine_reads_begin_at_16_bytes_and_have_no_gaps():
    x = torch.zeros(2, 8, 16)
    wide = x[:, ::2, :15]
    for stack, aligned in (
        (x, True), (wide, True), (x.mT, False), (x[..., 1:], False), (x[..., ::2], False),
        (torch.zeros(2, 8, 15), False), (x[:1].expand(2, 8, 16), False),
    ):  # fmt: skip
        assert has_aligned_rows(stack) == aligned


compiled = pytest.mark.skipif(not native.available(), reason=native.why_not())
BACKENDS = ["torch", pytest.param("native", marks=compiled)]
SHAPES = [(1, 1), (1, 5), (33, 7), (32, 128), (63, 129), (70, 311), (3, 33, 40)]


def relative_error(result: torch.Tensor, wanted: torch.Tensor) -> float:
    return float((result - wanted).norm() / wanted.norm())


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_sum_is_that_of_the_inverses(shape, backend):
    """Of every other shape by columns."""
    transposed = SHAPES.index(shape) % 2
    x = draw((*shape[:-2], shape[-1], shape[-2])).mT if transposed else draw(shape)
    shifts, weights = (1e-3, 0.04, 0.5), (0.7, 0.002, -0.05, 1.5)
    with use_backend(backend):
        inverses = gram_inverses(x * 1e-9, shifts, weights)
    assert relative_error(inverses, gram_inverses_reference(x * 1e-9, shifts, weights)) < 1e-4


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
            inverses = gram_inverses(x, SHIFTS, POLAR_WEIGHTS)
        errors[backend] = relative_error(inverses @ x, wanted)
    assert errors["native"] < 1.5 * errors["torch"] + 1e-6


@compiled
def test_bits_do_not_depend_on_the_number_of_threads(monkeypatch):
    monkeypatch.setattr(native, "MIN_ELEMENTS", 0)
    x, inverses = draw((140, 300)), []
    for threads in (1, 2, 5):
        monkeypatch.setattr(torch, "get_num_threads", lambda threads=threads: threads)
        with use_backend("native"):
            inverses.append(gram_inverses(x, SHIFTS, POLAR_WEIGHTS))
    assert torch.equal(inverses[0], inverses[1])
    assert torch.equal(inverses[0], inverses[2])
    assert torch.equal(inverses[0], inverses[0].T)


@compiled
def test_sum_is_right_though_it_was_first_computed_without_memory():
    module._table.cache_clear()
    x, wanted = draw((6, 9)), gram_inverses_reference(draw((6, 9)), SHIFTS, POLAR_WEIGHTS)
    with use_backend("native"):
        with no_memory(torch.device("cpu")):
            gram_inverses(torch.empty(6, 9, device="cpu"), SHIFTS, POLAR_WEIGHTS)
        inverses = gram_inverses(x, SHIFTS, POLAR_WEIGHTS)
    assert relative_error(inverses @ x, wanted @ x.double()) < 1e-4


@pytest.mark.parametrize("backend", BACKENDS)
def test_zeros_give_a_finite_sum_and_non_finite_values_do_not(backend):
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
def test_arguments_that_do_not_fit_are_refused(x, weights, message):
    with pytest.raises(ValueError, match=message):
        gram_inverses(x, (0.1,), weights)
