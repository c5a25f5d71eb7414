"""Every kernel, in both implementations, against its reference on all the cases of its spec."""

import mmap
import re
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cached_property, lru_cache
from inspect import getmodule, getsource
from itertools import count
from operator import attrgetter

import pytest
import torch
from apparatus.interpreter import arguments_left_in_place, barriers_where_needed, checked_bounds
from apparatus.sampling import sample
from checked import assert_as_wanted, has_one_layout, is_dense, takes_bfloat16

from arbcli.config.layer_spec import SCALE_TYPES
from arbcli.kernels.codec.packed import Packed
from arbcli.kernels.norm.rms_norm import WHOLE_ROW
from arbcli.kernels.runtime import native
from arbcli.kernels.runtime._triton import replaced_launches
from arbcli.kernels.runtime.backend import chunks_of, use_backend
from arbcli.verify.case_generator import CaseGenerator
from arbcli.verify.check_kernels import compare, copies, peers_of, terms_of
from arbcli.verify.compare import as_tuple, poisoned
from arbcli.verify.registry import BY_NAME, KERNELS

BACKENDS = ("torch", "triton" if torch.cuda.is_available() else "interpreter")
NATIVE = [pytest.mark.skipif(not native.available(), reason=native.why_not())]
PLANES = {"decode_weight", "gradient_statistics", "decode_digits"}
"""Kernels with code of its own for groups that are planes of a block, as those of T32 are."""


def cases() -> list:
    """List kernels, scale types and backends; Triton runs scale types of other code only.

    In T6 groups straddle everything. A norm decodes its weights with another kernel, for which T6
    takes long and is checked by itself. Other group sizes than these two run no other code.
    """
    parameters = []
    for spec in KERNELS:
        of_triton = {"T32"} if "norm" in spec.name else {"T6"}
        of_triton |= {"T32"} if spec.name in PLANES or not spec.uses_scales else set()
        for scale_type in ("T6", "T32") if spec.uses_scales else ("T32",):
            backends = ["torch", BACKENDS[1]] if scale_type in of_triton else ["torch"]
            for backend in backends + ["native"] * (spec.native is not None):
                marks = NATIVE if backend == "native" else ()
                name = f"{spec.name}-{scale_type}-{backend}"
                parameters.append(pytest.param(spec, scale_type, backend, marks=marks, id=name))
    return parameters


@pytest.mark.parametrize(("spec", "scale_type", "backend"), cases())
def test_kernel_equals_reference(spec, scale_type, backend, device):
    """On all cases, or on a sample of those that `arb verify-kernels` runs.

    That is in the interpreter, and in scale types that differ only where weights are decoded.
    """
    place = torch.device("cpu") if backend == "native" else device
    answers = answered(spec, place, SCALE_TYPES[scale_type])
    if backend == "interpreter" or (spec.uses_scales and scale_type == "T32"):
        answers = sample(answers, attrgetter("case"))
    assert_reference_is_met(spec, backend, answers)


def assert_reference_is_met(spec, backend, answers) -> None:
    implementation = spec.run(backend)
    for answer in answers:
        with use_backend(backend):
            results = as_tuple(implementation(*copies(answer.case.inputs)))
        dtypes = tuple(result.dtype for result in results)
        answer.dtypes = answer.dtypes or dtypes
        assert dtypes == answer.dtypes, answer.case.label
        wanted = (answer.wanted, answer.peers, answer.terms)
        for result, *others in zip(results, *wanted, strict=True):
            compared = compare(spec, answer.case.label, result, *others)
            assert compared.passed, compared


class Answered:
    """A case, its reference's results, its peer's and their terms, made once for all backends."""

    def __init__(self, spec, case) -> None:
        self.spec, self.case = spec, case
        self.dtypes: tuple = ()
        """Of the results of the first backend that was asked."""

    @cached_property
    def wanted(self) -> tuple:
        return as_tuple(self.spec.reference(*copies(self.case.inputs)))

    @cached_property
    def peers(self) -> tuple:
        return peers_of(self.spec, self.case, len(self.wanted))

    @cached_property
    def terms(self) -> tuple:
        return terms_of(self.spec, self.case, len(self.wanted))


@lru_cache(maxsize=1)  # parameters of a kernel and scale type follow one another
def answered(spec, device, group_size) -> list[Answered]:
    answers = [Answered(spec, case) for case in spec.cases(device, group_size)]
    assert len({answer.case.label for answer in answers}) == len(answers), "labels are not unique"
    return answers


IN_CHUNKS = [
    spec
    for spec in KERNELS
    if re.search(r"(row_chunks|chunk_elements)\(", getsource(getmodule(spec.triton)))
]


@pytest.mark.parametrize("spec", IN_CHUNKS, ids=lambda spec: spec.name)
def test_torch_backend_gives_the_same_in_chunks_of_two_rows(spec):
    """Matrices of real sizes are worked on in parts, and no case of a test is that large."""
    for case in sample(list(spec.cases(torch.device("cpu"), SCALE_TYPES["T6"]))):
        results = []
        for elements in (None, 1):
            with use_backend("torch"), chunks_of(elements):
                results.append(as_tuple(spec.torch(*copies(case.inputs))))
        for whole, parts in zip(*results, strict=True):
            # as close as is asked for, though a peer would allow for more
            assert compare(spec, case.label, parts, whole, None).passed, case.label


@pytest.mark.parametrize(
    "spec",
    [s for s in KERNELS if s.large_reference and s.name != "prepacked_rows"],
    ids=lambda spec: spec.name,
)  # which has the reference of `row_matmul`
def test_reference_of_large_cases_is_the_reference(spec):
    for case in sample(list(spec.cases(torch.device("cpu"), SCALE_TYPES["T6"]))):
        results = [
            as_tuple(run(*copies(case.inputs)))
            for run in (spec.reference, spec.large_reference)
            if not any(isinstance(x, torch.Tensor) and x.numel() == 0 for x in case.inputs)
        ]
        for wanted, got in zip(*results, strict=True) if results else ():
            size = max(wanted.double().nan_to_num(0).abs().flatten().tolist(), default=0)
            close = {"rtol": 1e-9, "atol": 1e-9 * size}
            torch.testing.assert_close(got.double(), wanted.double(), **close, equal_nan=True)


@contextmanager
def watched(backend: str) -> Iterator[None]:
    if backend != "interpreter":
        yield
        return
    with checked_bounds(), barriers_where_needed():
        yield


def assert_triton_agrees(spec, label, inputs) -> None:
    """Run a kernel by Triton in poisoned memory, and compare all that it returns."""
    with poisoned(), use_backend(BACKENDS[1]), watched(BACKENDS[1]):
        got = spec.triton(*copies(inputs))
    assert_as_wanted(spec, label, got, spec.reference(*copies(inputs)))


@pytest.mark.parametrize(
    ("name", "rows", "columns"),
    [("blend_moment", 19, 523), ("unit_gain", 35, 7), ("gradient_statistics", 35, 333)],
)
def test_programs_of_a_large_matrix_take_larger_or_several_tiles(
    name, rows, columns, device, monkeypatch
):
    """No case of a test is of the size from which on that is so."""
    monkeypatch.setattr("arbcli.kernels.runtime.backend.LARGE_ELEMENTS", 1)
    steps = (3, True)  # fewer than for a large matrix, of which an interpreter takes seconds
    monkeypatch.setattr("arbcli.kernels.update.gradient_statistics.LARGE_STEPS", steps)
    rng = CaseGenerator(1, device, torch.float32)
    inputs = BY_NAME[name].drawn(rng, SCALE_TYPES["T32"], 1, rows, columns)
    assert_triton_agrees(BY_NAME[name], name, inputs)


SEVERAL_TILES = {
    "smooth_chunks": (3, 1, 500),
    "pack_trits": (1, 60, 7), "unpack_trits": (1, 60, 7),
    "gather_rows": (5, 9, 500), "scatter_rows": (5, 9, 500), "embedding_rows": (5, 9, 310),
    "causal_conv": (5, 1, 250), "mix_streams": (2, 1, 1000),
    "unit_gain": (1, 1540, 3),
    "gradient_gains": (4090, 3, 5),
}  # fmt: skip
"""Kernels whose cases end within the first half of their second tile, and sizes that do not."""


@pytest.mark.parametrize(
    ("name", "sizes"), [*SEVERAL_TILES.items(), ("embedding_rows", (12, 9, 500))]
)
def test_kernel_writes_every_tile_of_several(name, sizes, device):
    spec = BY_NAME[name]
    rng = CaseGenerator(1, device, torch.float32)
    inputs = BY_NAME[name].drawn(rng, SCALE_TYPES["T32"], *sizes)
    assert_triton_agrees(spec, name, inputs)


IN_TURNS = {
    "sum_choices": {"BLOCK": 2, "BLOCK_G": 8}, "choose_next": {"BLOCK_N": 1},
    "decode_compressed": {"BLOCK_P": 1}, "compressed_attention": {"BLOCK_N": 2},
    "embedding_grad": {"BLOCK": 16},
}  # fmt: skip
"""Kernels of which few cases take several turns, and smaller tiles with which they do.

A tile of one slot ends wherever the slots do, so that none after the last turn is left out.
"""


@pytest.mark.skipif(torch.cuda.is_available(), reason="a product has 16 on every side there")
@pytest.mark.parametrize("name", IN_TURNS)
def test_kernel_takes_several_turns_where_its_tiles_are_smaller(name, device):
    spec, tile = BY_NAME[name], IN_TURNS[name]
    shrunk = set()

    def launch(kernel, grid, *inputs, **options):
        smaller = {size: n for size, n in tile.items() if options.get(size, 0) > n}
        shrunk.update(smaller)
        kernel.run(*inputs, grid=grid, warmup=False, **options | smaller)

    for case in sample(list(spec.cases(device, 32)))[:2]:  # that have most in them
        with replaced_launches(launch):
            assert_triton_agrees(spec, case.label, case.inputs)
    assert shrunk == set(tile)


@pytest.mark.parametrize("name", ["unit_rows", "unit_gain"])
def test_all_of_more_rows_than_a_program_has_get_their_gains(name, device):
    spec = BY_NAME[name]
    generator = torch.Generator().manual_seed(0)
    values, gains = (torch.rand(n, 1027, generator=generator).to(device) for n in (2, 1))
    between = (gains[0], None) if name == "unit_gain" else ()
    inputs = (values.T, *between, torch.ones((), dtype=torch.int32, device=device))
    assert_triton_agrees(spec, name, inputs)


def test_non_finite_row_anywhere_refuses_a_matrix(device):
    """Rows are counted 1,024 at a time, more than any case has."""
    (spec,) = (spec for spec in KERNELS if spec.name == "unit_rows")
    for row in (3, 1025):
        values = torch.ones(2, 1027, device=device).T  # a program has more rows of such
        values[row] = torch.inf
        ok = torch.ones((), dtype=torch.int32, device=device)
        with use_backend(BACKENDS[1]):
            spec.triton(values, ok)
        assert int(ok) == 0


WALKED = ["rms_norm", "add_rms_norm", "rms_norm_backward", "gated_rms_norm"]


@pytest.mark.parametrize("name", WALKED)
def test_row_that_is_too_wide_for_registers_is_walked(name, device):
    """Where turns begin and end are large numbers: one of 8,000 alike is lost in the tolerance."""
    spec = BY_NAME[name]
    x, grad = torch.randn(2, 1, WHOLE_ROW + 5, generator=torch.Generator().manual_seed(0))
    for values in (x, grad):
        values[:, [0, 1023, 1024, 2047, 2048, 4095, 4096, WHOLE_ROW - 1, WHOLE_ROW, -1]] = 9
    inputs = {"rms_norm": (x,), "gated_rms_norm": (torch.cat((x, grad), 1),)}.get(name, (grad, x))
    inputs = (*inputs, *(() if name == "gated_rms_norm" else (grad[0].abs(),)))
    inputs = (*(part.to(device) for part in inputs), 0.1)
    assert_triton_agrees(spec, name, inputs)


ROWS_APART = {
    "quantise_rows": (0,), "round_nvfp4": (0,), "rms_norm": (0,), "add_rms_norm": (0, 1),
    "rms_norm_backward": (0, 1, 4), "gated_rms_norm": (0,), "gated_rms_norm_backward": (0, 1),
    "gained_rms_norm_backward": (0, 1, 4),
    "rotary_norm_backward": (0, 1, 2),
    "rotary_heads_backward": (0, 1, 2), "causal_attention_backward": (0, 1, 2, 3, 4),
    "rotary_attention_backward": (0, 5), "dropped_attention": (0, 1, 2),
    "dropped_attention_backward": (0, 1, 2, 3, 4),
    "compress_blocks": (0,), "compress_blocks_backward": (2,), "choose_entries": (0, 2),
    "compressed_attention": (0, 1, 2), "compressed_attention_backward": (3, 4, 5),
    "cross_entropy": (0,), "cross_entropy_backward": (0,), "add_symbols": (2,),
    "grade_symbols": (0,), "stream_weights": (0,), "stream_weights_backward": (3,),
    "gradient_statistics": (0, 1), "unit_gain": (0,), "unit_rows": (0,), "step_scales": (0, 1, 2),
    "blend_moment": (0, 1), "step_by_moment": (0, 1, 2), "step_by_direction": (0, 1, 2),
    "decode_weight": (0,), "decode_digits": (0,), "quantise_gradient": (0, 3),
    "grouped_matmul": (0, 1), "grouped_grad_w": (0, 1),
}  # fmt: skip
"""Of kernels that take columns side by side as a case of its own, the inputs of which that is."""


def lay_columns(value):
    """Lay a matrix out column by column."""
    return value.map(lay_columns) if isinstance(value, Packed) else value.mT.contiguous().mT


FAR = 8 if torch.cuda.is_available() else 2**30
"""Least number of elements between rows: on a CPU, rows after the second are beyond int32."""
NOT_FAR = {
    "choose_entries", "decode_weight", "ternary_matmul", "ternary_matmul_grad_x",
}  # fmt: skip
"""Kernels that count rows within a tile, or heads of a position, in int32, which is enough."""
MAP_NORESERVE = 0x4000  # the module has no name for it before Python 3.13


def memory(length: int, like: torch.Tensor) -> torch.Tensor:
    """Return elements of which few pages are ever used, however many there are."""
    if like.is_cuda:
        return torch.empty(length, dtype=like.dtype, device=like.device)
    flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | MAP_NORESERVE
    pages = mmap.mmap(-1, length * like.itemsize, flags)
    return torch.frombuffer(pages, dtype=torch.uint8).view(like.dtype)


def apart(value, number: int, far: int, by: int = 0):
    """Lay rows out far apart, and columns by a step, which is 2 to 4 if it is 0.

    The elements between them are NaN, or 1. Inputs of other numbers, and parts of a matrix, have
    other steps, as a stride is its own.
    """
    if isinstance(value, Packed):
        numbers = count(number)
        return value.map(lambda part: apart(part, next(numbers), far, by))
    if not isinstance(value, torch.Tensor) or not value.dim() or not value.numel():
        return value
    step, (*rows, columns) = by or 2 + number % 3, value.shape
    steps, length = [], far + 8 * number + columns * step
    for size in reversed(rows):
        steps.insert(0, length)
        length *= size + 1
    wide = memory(length, value).as_strided((*rows, columns * step + step), (*steps, 1))
    wide.fill_(torch.nan if value.is_floating_point() else 1)
    return wide[..., step - 1 : columns * step : step].copy_(value)


def assert_layout_changes_nothing(spec, backend: str, inputs, wanted) -> None:
    with arguments_left_in_place(), poisoned(), use_backend(backend), watched(backend):
        results = spec.run(backend)(*inputs)
    assert_as_wanted(spec, f"{spec.name} {backend}", results, wanted)


@pytest.mark.skipif(not native.available(), reason=native.why_not())
@pytest.mark.parametrize("name", [name for name in ROWS_APART if BY_NAME[name].native])
def test_columns_of_any_one_input_of_a_loop_in_c_may_lie_apart(name):
    """Loops need them side by side, and leave what is not so to torch, or copy it."""
    spec, rng = BY_NAME[name], CaseGenerator(40, torch.device("cpu"), torch.float32)
    inputs = spec.drawn(rng, SCALE_TYPES["T6"], 5, 7, 37)
    wanted = as_tuple(spec.reference(*copies(inputs)))
    for place in ROWS_APART[name]:
        laid_out = [lay_columns(x) if i == place else x for i, x in enumerate(copies(inputs))]
        assert_layout_changes_nothing(spec, "native", laid_out, wanted)


NOT_ANYWHERE = {
    "choose_entries", "smooth_chunks", "smooth_chunks_backward", "fp8_matmul",
    "gradient_gains", "row_matmul", "prepacked_rows", "int8_matmul",
    "merged_steps", "decode_weights", "keep_accepted",
    *(spec.name for spec in KERNELS if "rms_norm" in spec.name), *IN_TURNS,
} - {"compressed_attention"}  # fmt: skip
"""Those that take long, copy their rows first, are watched elsewhere, or know addresses alone."""
READ_WITH_DIGITS = PLANES | {"weighted_rows_grad_weights", "embedding_rows"}
"""Kernels that read remainders; others have them decoded first, or share the code of these."""
ANYWHERE = [
    (spec, scale_type, digits)
    for spec in KERNELS
    for scale_type, digits in (("T6", False), ("T6", True), ("T32", False))
    if spec.name not in NOT_ANYWHERE - {*ROWS_APART}
    and (not digits or spec.name in READ_WITH_DIGITS)
    and (scale_type == "T6" or spec.name in PLANES)
]


def all_digits(value, device):
    """Give a packed matrix remainders."""
    if not isinstance(value, Packed):
        return value
    shape, about = (value.out_features, value.in_features), torch.Generator().manual_seed(1)
    remainder = torch.randint(-128, 128, shape, generator=about).to(device, torch.int8)
    return value._replace(remainder=remainder, radix=64, nibble=False)


@pytest.mark.parametrize(
    ("spec", "scale_type", "digits"), ANYWHERE, ids=lambda value: getattr(value, "name", None)
)
def test_elements_of_every_input_may_lie_anywhere(spec, scale_type, digits, device):
    """Random cases have steps in some dimensions of some inputs; here they have them in all.

    Rows whose columns must lie side by side are far apart, too: with steps between columns, as some
    random cases have them, a matrix is copied. Wherever it lies, nothing else is read: a mask that
    is too wide may change no result.
    """
    by_rows = ROWS_APART.get(spec.name, ())
    # seeds that show every input, several sequences and experts, a moment, and steps of octaves
    seed = 40 if by_rows else 0 if "grouped" in spec.name else 30
    sizes = (7 if has_one_layout(spec) else 5, 7, 37)  # several texts
    if scale_type == "T32":
        sizes = 2, 3, 197  # a block of planes and some
    inputs = spec.drawn(CaseGenerator(seed, device, torch.float32), SCALE_TYPES[scale_type], *sizes)
    if digits:
        inputs = [all_digits(x, device) for x in inputs]
    wanted = as_tuple(spec.reference(*copies(inputs)))
    assert all(part.numel() for part in wanted)
    kinds = enumerate(spec.arguments.values())
    dense = {i for i, kind in kinds if has_one_layout(spec) or is_dense(kind)}
    if spec.name in NOT_ANYWHERE:
        dense |= {*range(len(inputs))}
    far = 8 if spec.name in NOT_FAR else FAR
    native_too = spec.native and by_rows and device.type == "cpu" and native.available()
    for backend in (BACKENDS[1], *["native"] * bool(native_too)):
        laid_out = [
            apart(x, i, far, by=int(i in by_rows)) if i in by_rows or i not in dense else x
            for i, x in enumerate(copies(inputs))
        ]
        assert_layout_changes_nothing(spec, backend, laid_out, wanted)


ROUNDED_ELSEWHERE = {
    "append_position", "append_position_8bit", "choose_entries", "choose_next", "compress_blocks",
    "compress_blocks_backward", "compressed_attention", "compressed_attention_backward",
    "decode_compressed", "sign_gradient", "sum_choices",
}  # fmt: skip
"""Kernels that round on the way, or not at all: their own tests have them in bfloat16."""
IN_BFLOAT16 = [s.name for s in KERNELS if takes_bfloat16(s) and s.name not in ROUNDED_ELSEWHERE]
SEVERAL_ROUNDINGS = {
    "causal_attention_backward", "dropped_attention_backward", "gram_polynomial",
    "decode_attention", "decode_attention_8bit", "row_matmul",
}  # fmt: skip
"""Those whose results, or what the reference did not round, are rounded to bfloat16 once more; or
whose results are so few that the rounding of one of them, of up to 3.9e-3, may be all there is."""


IN_BOTH = [(name, "torch") for name in IN_BFLOAT16] + [
    pytest.param(spec.name, "native", marks=NATIVE)
    for spec in KERNELS
    if spec.native and spec.name in IN_BFLOAT16
]


@pytest.mark.parametrize(("name", "backend"), IN_BOTH)
def test_backend_of_a_cpu_in_bfloat16_is_off_by_its_rounding_only(name, backend):
    """Against float64, with no peer: one rounding to bfloat16 is 1.7e-3, and float32 is 1e-7."""
    spec = BY_NAME[name]
    for seed, (m, n, k) in enumerate(((7, 33, 165), (16, 64, 64))):
        rng = CaseGenerator(seed, torch.device("cpu"), torch.bfloat16)
        inputs = BY_NAME[name].drawn(rng, SCALE_TYPES["T6"], m, n, k)
        dtypes = {value.dtype for value in inputs if isinstance(value, torch.Tensor)}
        assert torch.bfloat16 in dtypes
        wanted = as_tuple(spec.reference(*copies(inputs)))
        with use_backend(backend):
            results = as_tuple(spec.run(backend)(*copies(inputs)))
        for got, expected in zip(results, wanted, strict=True):
            if not got.is_floating_point():
                assert torch.equal(got.long(), expected.long())
            elif got.numel():
                low = 6e-3 if name in SEVERAL_ROUNDINGS else 2.5e-3
                # seven rounds forth and back are 29 sums one after another, each off by 2^-22
                high = 2.0**-17 if name.startswith("stream_weights") else 1e-6
                bound = low if got.dtype == torch.bfloat16 else high
                error = (got.double() - expected.double()).norm()
                assert error <= bound * expected.double().norm()


@pytest.mark.gpu  # the interpreter runs programs in order
@pytest.mark.parametrize("spec", KERNELS, ids=lambda spec: spec.name)
def test_kernel_is_deterministic(spec, device):
    *_, case = spec.cases(device, 32)
    first, second = (as_tuple(spec.triton(*copies(case.inputs))) for _ in range(2))
    for a, b in zip(first, second, strict=True):
        assert torch.equal(a, b)
