"""A plugin of pytest, under which products and sums of floats differ in their last bits.

    python -m pytest -p tests.noise --noise-seed 3 [--noise-models] TESTS

The last bits of a product depend on the instruction set of a CPU, on the library, and on the
shapes. A test whose verdict hangs on them, for instance because the larger of two almost equal sums
is chosen, may pass on one CPU and fail on another. Here every term of a product or sum in float32
has a relative error of up to 2**-21, so that results differ by about 2**-22. It depends on the
seed, the shapes of a product or the length of a sum, and the place of the term alone. Therefore:

- the same operation on the same numbers gives the same bits twice, and terms that are zero make no
  difference, whatever they are multiplied by;
- the same row among other rows gives other bits in a product, as in libraries, but not in a sum;
- a sum that float32 holds, such as one of small integers, stays what it is, and so does float64,
  which is that of references.

The errors of an even seed are those of the odd one before it with the other sign: a choice between
numbers that are equal but for their rounding is made otherwise by one of the two.

Functions such as the exponential differ by up to one unit in the last place, which depends on the
seed and the result. Operations that write into a tensor, C loops and compiled code are exact.
"""

import sys
import warnings
import zlib
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, nullcontext
from functools import cache
from unittest import mock

import numpy as np
import pytest
import torch
from torch import Tensor

aten = torch.ops.aten
WORK = {torch.bfloat16: torch.float32, torch.float16: torch.float32}
"""Types that products are added in, where these are not their own."""
FUNCTIONS = (
    "exp", "exp2", "expm1", "log", "log2", "log1p", "sin", "cos", "tanh", "sigmoid", "silu",
    "softplus", "erf", "gelu", "logaddexp", "_softmax", "_log_softmax",
)  # fmt: skip
MODELS = (
    "tests/model/test_language_model.py::test_twin", "tests/model/test_cells.py::test_cell_reads",
    "tests/families/compressed/test_compressed.py", "tests/families/experts/test_experts.py",
    "tests/families/graph", "tests/families/hnet/test_hnet.py", "tests/families/latent",
)  # fmt: skip
"""Tests of floats on which a choice may depend: entries, experts, codes and chunks."""
EXACT = (
    "tests/test_portable.py", "tests/inspect/test_audit.py::test_audit_of_many_symbols",
)  # fmt: skip
"""Tests of noise itself, and of a peak in a product, where noise has tensors of its own."""
NOISY = pytest.StashKey[set[str]]()
"""Names of the tests that have noise."""


@cache
def errors_of(seed: int, sizes: tuple[int, ...], shapes: tuple[int, ...] = ()) -> np.ndarray:
    """Draw the relative errors of terms.

    Args:
        sizes: of the dimensions that are added over.
        shapes: of the operands, where libraries add in an order that depends on them.
    """
    pair, sign = (seed + 1) // 2, 1 - 2 * (seed % 2)
    generator = np.random.default_rng(zlib.crc32(repr((pair, sizes, shapes)).encode()))
    return sign * 2.0**-21 * generator.uniform(-1, 1, sizes)


@np.errstate(all="ignore")
def where_rounded(noise: np.ndarray, total: np.ndarray) -> np.ndarray:
    """Keep the noise of sums that are no numbers of float32."""
    rounded = (total != total.astype(np.float32)) & np.isfinite(noise)
    return np.where(rounded, noise, 0).astype(np.float32)


def noise_of_product(seed: int, a: np.ndarray, b: np.ndarray) -> np.ndarray:
    """Draw the noise of (..., M, K) times (..., K, N) in float32."""
    errors = errors_of(seed, a.shape[-1:], (*a.shape, *b.shape))
    a, b = a.astype(np.float64), b.astype(np.float64)
    return where_rounded((a * errors) @ b, a @ b)


def noise_of_sum(seed: int, x: np.ndarray, dims: tuple[int, ...], add=np.sum, **how) -> np.ndarray:
    """Draw the noise of a sum over dimensions of an array in float32, or of a cumulative one."""
    errors = errors_of(seed, tuple(x.shape[i] for i in sorted(dims)))
    errors = errors.reshape([n if i in dims else 1 for i, n in enumerate(x.shape)])
    x = x.astype(np.float64)
    return where_rounded(add(x * errors, **how), add(x, **how))


def move_by_a_unit(seed: int, y: np.ndarray) -> None:
    """Move float32 results of a function by a unit, but for those that look exact."""
    bits = y.view(np.int32)
    pair, sign = (seed + 1) // 2, 1 - 2 * (seed % 2)
    hashed = (bits * np.int32(0x2545F491) + np.int32(pair * 7919)) * np.int32(0x1B873593)
    inexact = (bits & 0xFFF) != 0  # the low bits of infinity and NaN are zero
    bits += np.where(inexact, sign * (hashed >> 31 | 1), 0)


def is_noisy(x: Tensor) -> bool:
    return WORK.get(x.dtype, x.dtype) is torch.float32 and x.numel() > 0 and type(x) is Tensor


def kernels(seed: int) -> dict[str, Callable]:
    """Make kernels of a CPU, by the names of torch's operations."""

    def product(name: str, first: int) -> Callable:
        operation = getattr(aten, name).out

        def multiply(*args, **scales) -> Tensor:
            a, b = args[first : first + 2]
            shape = (*a.shape[:-1], b.shape[-1])
            if not is_noisy(a) or a.shape[-1] < 2 or not b.numel():
                return operation(*args, **scales, out=a.new_empty(shape))
            given = [x.float() for x in args]
            result = operation(*given, **scales, out=given[first].new_empty(shape))
            noise = noise_of_product(seed, *(x.detach().numpy() for x in given[first:]))
            result += torch.from_numpy(noise) * scales.get("alpha", 1)
            return result.to(a.dtype)

        return multiply

    def vector_product(a: Tensor, b: Tensor) -> Tensor:
        """Multiply (K) or (M, K) by (K)."""
        result = product("mm", 0)(a.reshape(-1, a.shape[-1]), b[:, None])
        return result.reshape(a.shape[:-1])

    def add(mean: bool) -> Callable:
        operation = aten.mean.out if mean else aten.sum.IntList_out

        def sum_up(x: Tensor, dim, keepdim=False, *, dtype=None) -> Tensor:
            if dtype is None:
                dtype = x.dtype if mean or x.is_floating_point() else torch.int64
            dims = tuple(i % max(1, x.dim()) for i in dim or range(x.dim()))
            shape = [
                1 if i in dims else n for i, n in enumerate(x.shape) if keepdim or i not in dims
            ]
            work = WORK.get(dtype, dtype)
            terms, result = x.to(work), x.new_empty(shape, dtype=work)
            operation(terms, dim, keepdim, dtype=work, out=result)
            if is_noisy(x) and x.dim() and work is torch.float32:
                how = {"axis": dims, "keepdims": keepdim}
                noise = torch.from_numpy(noise_of_sum(seed, terms.detach().numpy(), dims, **how))
                result += noise / (x.numel() / result.numel()) if mean else noise
            return result.to(dtype)

        return sum_up

    def cumulate(x: Tensor, dim: int, *, dtype=None) -> Tensor:
        dtype = dtype or (x.dtype if x.is_floating_point() else torch.int64)
        terms = x.to(WORK.get(dtype, dtype))
        result = aten.cumsum.out(terms, dim, out=torch.empty_like(terms))
        if is_noisy(x) and x.dim() and terms.dtype is torch.float32:
            dim %= x.dim()
            noise = noise_of_sum(seed, terms.detach().numpy(), (dim,), np.cumsum, axis=dim)
            result += torch.from_numpy(noise)
        return result.to(dtype)

    def function(name: str) -> Callable:
        operation = getattr(aten, name).out

        def compute(x: Tensor, *args, **options) -> Tensor:
            widened = bool(args) and name.startswith("_") and args[-1]  # by `half_to_float`
            floating = x.is_floating_point() or x.is_complex()
            dtype = x.dtype if floating else torch.get_default_dtype()
            result = x.new_empty(0, dtype=torch.float32 if widened else dtype)
            operation(x, *args, **options, out=result)
            if result.dtype == torch.float32:
                move_by_a_unit(seed, result.detach().numpy())
            return result

        return compute

    factors = {"mm": 0, "bmm": 0, "addmm": 1, "baddbmm": 1}
    return {
        **{name: product(name, first) for name, first in factors.items()},
        "mv": vector_product, "dot": vector_product,
        "sum.dim_IntList": add(mean=False), "mean.dim": add(mean=True), "cumsum": cumulate,
        **{name: function(name) for name in FUNCTIONS},
    }  # fmt: skip


@contextmanager
def noisy_interpreter(seed: int) -> Iterator[None]:
    """Let products and sums of Triton's interpreter, which are numpy's, differ too."""
    interpreter = sys.modules.get("triton.runtime.interpreter")
    if interpreter is None:
        yield
        return
    builder, reduction = interpreter.InterpreterBuilder, interpreter.ReduceOps
    multiply, add = builder.create_dot, reduction.sum

    def create_dot(self, a, b, d, *how):
        result = multiply(self, a, b, d, *how)
        if result.data.dtype == a.data.dtype == b.data.dtype == "float32":
            result.data = result.data + noise_of_product(seed, a.data, b.data)
        return result

    def sum_up(self, input):
        result, x = add(self, input), input.handle.data
        if x.dtype == "float32" and x.size:
            dims = tuple(range(x.ndim)) if self.axis is None else (self.axis % x.ndim,)
            how = {"axis": dims, "keepdims": self.keep_dims}
            result.handle.data = result.handle.data + noise_of_sum(seed, x, dims, **how)
        return result

    with (
        mock.patch.object(builder, "create_dot", create_dot),
        mock.patch.object(reduction, "sum", sum_up),
    ):
        yield


@contextmanager
def noisy(seed: int) -> Iterator[None]:
    """Let results of a CPU's products, sums and functions differ in their last bits."""
    library = torch.library.Library("aten", "IMPL")
    fused = torch.backends.cuda.flash_sdp_enabled()
    with ExitStack() as stack:
        stack.callback(library._destroy)
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", "Warning only once", UserWarning)
            for name, kernel in kernels(seed).items():
                library.impl(name, kernel, "CPU", allow_override=True)
        # attention is then one of products
        stack.callback(torch.backends.cuda.enable_flash_sdp, fused)
        torch.backends.cuda.enable_flash_sdp(False)
        stack.enter_context(noisy_interpreter(seed))
        yield


def pytest_addoption(parser: pytest.Parser) -> None:
    group = parser.getgroup("noise")
    group.addoption("--noise-seed", type=int, required=True, help="seed of the last bits")
    group.addoption(
        "--noise-models",
        action="store_true",
        help="noise in tests of models alone, with each third parameter, by the seed",
    )


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    seed, only = map(config.getoption, ("--noise-seed", "--noise-models"))
    cases, step = defaultdict(list), 3 if only else 1
    for item in items:
        if item.nodeid.startswith(MODELS) if only else not item.nodeid.startswith(EXACT):
            cases[item.nodeid.partition("[")[0]].append(item.nodeid)
    config.stash[NOISY] = {
        name for names in cases.values() for name in names[seed % min(step, len(names)) :: step]
    }


def pytest_report_header(config: pytest.Config) -> str:
    return f"noise in last bits by seed {config.getoption('--noise-seed')}"


@pytest.hookimpl(wrapper=True)
def pytest_runtest_protocol(item: pytest.Item) -> Iterator[None]:
    noise = noisy(item.config.getoption("--noise-seed"))
    with noise if item.nodeid in item.config.stash[NOISY] else nullcontext():
        return (yield)
