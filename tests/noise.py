"""A plugin of pytest, under which products and sums of floats differ in their last bits.

    python -m pytest -p tests.noise --noise-seed 3 [--noise-models] TESTS

The last bits of a product depend on the instruction set of a CPU, on the library, and on the
shapes. A test whose verdict hangs on them, for instance because the larger of two almost equal sums
is chosen, may pass on one CPU and fail on another. Here every term of a product or sum has a
relative error of up to 2**-21 in float32, so that results differ by about 2**-22. It depends on the
seed, the shapes of a product or the length of a sum, and the place of the term alone. Therefore:

- the same operation on the same numbers gives the same bits twice, and terms that are zero make no
  difference, whatever they are multiplied by;
- the same row among other rows gives other bits in a product, as in libraries, but not in a sum;
- a sum that no order of additions rounds, such as one of small integers, stays what it is.

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
PRECISION = {np.dtype(np.float32): 24, np.dtype(np.float64): 53}
"""Bits of a significand."""
INTEGERS = {np.dtype(np.float32): np.int32, np.dtype(np.float64): np.int64}
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
def errors_of(
    seed: int, dtype: np.dtype, sizes: tuple[int, ...], shapes: tuple[int, ...] = ()
) -> np.ndarray:
    """Draw the relative errors of terms.

    Args:
        sizes: of the dimensions that are added over.
        shapes: of the operands, where libraries add in an order that depends on them.
    """
    pair, sign = (seed + 1) // 2, 1 - 2 * (seed % 2)
    generator = np.random.default_rng(zlib.crc32(repr((pair, sizes, shapes)).encode()))
    unit = sign * 2.0 ** (3 - PRECISION[dtype])
    return (unit * generator.uniform(-1, 1, sizes)).astype(dtype)


def lowest_bits(x: np.ndarray) -> np.ndarray:
    """Find the value of the lowest bit of each number; infinity for zero."""
    bits = np.ascontiguousarray(x).view(INTEGERS[x.dtype])
    stored = (1 << (PRECISION[x.dtype] - 1)) - 1
    lowest = np.abs(x - (bits & (bits - 1)).view(x.dtype))
    np.copyto(lowest, np.abs(x), where=(bits & stored) == 0)
    lowest[x == 0] = np.inf
    return lowest


def noise_where_rounded(
    noise: np.ndarray, total: np.ndarray, number: np.ndarray, lowest: np.ndarray
) -> np.ndarray:
    """Keep the noise of sums that some order of additions rounds.

    Args:
        noise: the sums of the terms' errors.
        total: sums of the terms' magnitudes.
        number: how many terms are not zero.
        lowest: a value of which every term is a multiple.
    """
    rounded = (number > 1) & (total >= 2.0 ** PRECISION[noise.dtype] * lowest)
    return np.where(rounded & np.isfinite(noise), noise, 0)


@np.errstate(all="ignore")
def noise_of_product(seed: int, a: np.ndarray, b: np.ndarray) -> np.ndarray:
    """Draw the noise of (..., M, K) times (..., K, N), both in float32 or both in float64."""
    noise = (a * errors_of(seed, a.dtype, a.shape[-1:], (*a.shape, *b.shape))) @ b
    number = (a != 0).astype(a.dtype) @ (b != 0).astype(a.dtype)
    lowest = lowest_bits(a).min(-1, keepdims=True) * lowest_bits(b).min(-2, keepdims=True)
    return noise_where_rounded(noise, np.abs(a) @ np.abs(b), number, lowest)


@np.errstate(all="ignore")
def noise_of_sum(seed: int, x: np.ndarray, dims: tuple[int, ...], keep: bool) -> np.ndarray:
    """Draw the noise of a sum over dimensions of an array in float32 or float64."""
    errors = errors_of(seed, x.dtype, tuple(x.shape[i] for i in sorted(dims)))
    errors = errors.reshape([n if i in dims else 1 for i, n in enumerate(x.shape)])
    noise = (x * errors).sum(dims, keepdims=keep)
    number, total = ((x != 0).sum(dims, keepdims=keep), np.abs(x).sum(dims, keepdims=keep))
    return noise_where_rounded(noise, total, number, lowest_bits(x).min(dims, keepdims=keep))


@np.errstate(all="ignore")
def noise_of_scan(seed: int, x: np.ndarray, dim: int) -> np.ndarray:
    """Draw the noise of a cumulative sum of an array in float32 or float64."""
    errors = errors_of(seed, x.dtype, x.shape[dim : dim + 1])
    errors = errors.reshape([n if i == dim else 1 for i, n in enumerate(x.shape)])
    noise = (x * errors).cumsum(dim)
    number, total = (x != 0).cumsum(dim), np.abs(x).cumsum(dim)
    lowest = np.minimum.accumulate(lowest_bits(x), dim)
    return noise_where_rounded(noise, total, number, lowest)


def move_by_a_unit(seed: int, y: np.ndarray) -> None:
    """Move results of a function by a unit in the last place, but for those that look exact."""
    bits = y.view(INTEGERS[y.dtype])
    low = bits.astype(np.int32)
    pair, sign = (seed + 1) // 2, 1 - 2 * (seed % 2)
    hashed = (low * np.int32(0x2545F491) + np.int32(pair * 7919)) * np.int32(0x1B873593)
    unit = sign * (hashed >> 31 | 1)
    inexact = (low & 0xFFF) != 0  # the low bits of infinity and NaN are zero
    bits += np.where(inexact, unit, 0)


def to_numpy(x: Tensor) -> np.ndarray:
    return x.detach().numpy()


def is_noisy(x: Tensor) -> bool:
    return x.is_floating_point() and x.itemsize > 1 and x.numel() > 0 and type(x) is Tensor


def kernels(seed: int) -> dict[str, Callable]:
    """Make kernels of a CPU, by the names of torch's operations."""

    def product(name: str, first: int) -> Callable:
        operation = getattr(aten, name).out

        def multiply(*args, **scales) -> Tensor:
            a, b = factors = args[first : first + 2]
            shape = (*a.shape[:-1], b.shape[-1])
            if not is_noisy(a) or a.shape[-1] < 2 or not b.numel():
                return operation(*args, **scales, out=a.new_empty(shape))
            work = WORK.get(a.dtype, a.dtype)
            a, b = factors = [x.to(work) for x in factors]
            given = [x.to(work) for x in args[:first]] + factors
            result = operation(*given, **scales, out=a.new_empty(shape))
            noise = torch.from_numpy(noise_of_product(seed, to_numpy(a), to_numpy(b)))
            result += noise * scales.get("alpha", 1)
            return result.to(args[first].dtype)

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
            result = x.new_empty(shape, dtype=work)
            operation(x if work is dtype else x.to(work), dim, keepdim, dtype=work, out=result)
            if is_noisy(x) and x.dim() and work.is_floating_point:
                noise = noise_of_sum(seed, to_numpy(x.to(work)), dims, keepdim)
                noise = torch.from_numpy(np.asarray(noise))
                result += noise / (x.numel() / result.numel()) if mean else noise
            return result.to(dtype)

        return sum_up

    def cumulate(x: Tensor, dim: int, *, dtype=None) -> Tensor:
        dtype = dtype or (x.dtype if x.is_floating_point() else torch.int64)
        work = WORK.get(dtype, dtype)

        terms = x.to(work)
        result = aten.cumsum.out(terms, dim, out=torch.empty_like(terms))
        if is_noisy(x) and x.dim() and work.is_floating_point:
            result += torch.from_numpy(noise_of_scan(seed, to_numpy(terms), dim % x.dim()))
        return result.to(dtype)

    def function(name: str) -> Callable:
        operation = getattr(aten, name).out

        def compute(x: Tensor, *args, **options) -> Tensor:
            widened = bool(args) and name.startswith("_") and args[-1]  # by `half_to_float`
            floating = x.is_floating_point() or x.is_complex()
            dtype = x.dtype if floating else torch.get_default_dtype()
            result = x.new_empty(0, dtype=torch.float32 if widened else dtype)
            operation(x, *args, **options, out=result)
            if result.dtype in (torch.float32, torch.float64):
                move_by_a_unit(seed, to_numpy(result))
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
            result.handle.data = result.handle.data + noise_of_sum(seed, x, dims, self.keep_dims)
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
