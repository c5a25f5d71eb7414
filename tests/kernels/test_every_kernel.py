"""Every kernel, in both implementations, against its reference on all the cases of its spec."""

import ast
import mmap
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cached_property, lru_cache
from itertools import count
from pathlib import Path

import pytest
import torch
from apparatus.interpreter import arguments_left_in_place, barriers_where_needed, within_arguments
from marks import mostly_slow
from syntax import parsed, walk

import arbcli
from arbcli.config.site import SCALE_TYPES
from arbcli.kernels.codec.packed import Packed
from arbcli.kernels.norm.rms_norm import WHOLE_ROW
from arbcli.kernels.runtime import native
from arbcli.kernels.runtime.backend import chunks_of, use_backend
from arbcli.kernels.runtime.launches import replaced_launches
from arbcli.verify.case_generator import CaseGenerator
from arbcli.verify.check_kernels import KERNELS, compare, copies, peers_of
from arbcli.verify.compare import as_tuple, poisoned
from arbcli.verify.registry import BY_NAME
from arbcli.verify.sample import LONG_CASES, is_long

BACKENDS = ("torch", "triton" if torch.cuda.is_available() else "interpreter")
NATIVE = [pytest.mark.skipif(not native.available(), reason=native.why_not())]
PLANES = {"decode_weight", "decode_e4m3", "gradient_statistics", "decode_digits"}
"""Kernels with code of its own for groups that are planes of a block, as those of T32 are."""


def cases() -> list:
    """List kernels, scale types and backends; interpreted, those that tell most are not slow.

    In T6 groups straddle everything. A norm decodes its weights with another kernel, for which T6
    takes long and is checked by itself. Other group sizes than these two run no other code.
    """
    found = []
    for spec in KERNELS:
        quick = {"T32"} if "norm" in spec.name else {"T6"}
        quick |= {"T32"} if spec.name in PLANES or not spec.uses_scales else set()
        for scale_type in ("T6", "T32") if spec.uses_scales else ("T32",):
            for backend in BACKENDS:
                slow = backend != "torch" and scale_type not in quick
                marks = [pytest.mark.slow] if slow else []
                name = f"{spec.name}-{scale_type}-{backend}"
                found.append(pytest.param(spec, scale_type, backend, marks=marks, id=name))
            if spec.native is not None:
                name, marks = f"{spec.name}-{scale_type}-native", NATIVE
                found.append(pytest.param(spec, scale_type, "native", marks=marks, id=name))
    return found


@pytest.mark.parametrize(("spec", "scale_type", "backend"), cases())
def test_kernel_equals_reference(spec, scale_type, backend, device):
    """But for cases that `arb verify-kernels` leaves out in the interpreter, too."""
    place = torch.device("cpu") if backend == "native" else device
    every = answered(spec, place, SCALE_TYPES[scale_type])
    sample = (c for c in every if backend != "interpreter" or not is_long(spec.name, c.case.label))
    assert_reference_is_met(spec, backend, sample)


@pytest.mark.slow
@pytest.mark.parametrize(
    "spec", [s for s in KERNELS if s.name in LONG_CASES], ids=lambda spec: spec.name
)
def test_kernel_equals_reference_in_cases_that_take_long(spec, device):
    every = answered(spec, device, SCALE_TYPES["T6" if spec.uses_scales else "T32"])
    assert_reference_is_met(
        spec, BACKENDS[1], (c for c in every if is_long(spec.name, c.case.label))
    )


class Answered:
    """A case, and what its reference and its peer return, which are run once for all backends."""

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


@lru_cache(maxsize=1)  # parameters of a kernel and scale type follow one another
def answered(spec, device, group_size) -> list[Answered]:
    return [Answered(spec, case) for case in spec.cases(device, group_size)]


def assert_reference_is_met(spec, backend, chosen) -> None:
    implementation = spec.run(backend)
    for each in chosen:
        with use_backend(backend):
            got = as_tuple(implementation(*copies(each.case.inputs)))
        dtypes = tuple(result.dtype for result in got)
        each.dtypes = each.dtypes or dtypes
        assert dtypes == each.dtypes, each.case.label
        for result, expected, other in zip(got, each.wanted, each.peers, strict=True):
            found = compare(spec, each.case.label, result, expected, other)
            assert found.passed, found


@pytest.mark.parametrize("spec", KERNELS, ids=lambda spec: spec.name)
def test_torch_backend_gives_the_same_in_chunks_of_two_rows(spec):
    """Matrices of real sizes are worked on in parts, and no case of a test is that large."""
    for case in spec.cases(torch.device("cpu"), SCALE_TYPES["T6"]):
        found = []
        for elements in (None, 1):
            with use_backend("torch"), chunks_of(elements):
                found.append(as_tuple(spec.torch(*copies(case.inputs))))
        for whole, parts in zip(*found, strict=True):
            # as close as is asked for, though a peer would allow for more
            assert compare(spec, case.label, parts, whole, None).passed, case.label


WITH_LARGE = [spec for spec in KERNELS if spec.large_reference]


@pytest.mark.parametrize(
    "spec",
    mostly_slow(WITH_LARGE, lambda spec: spec.name != "prepacked_rows"),
    ids=lambda spec: spec.name,
)  # which has the reference of `row_matmul`
def test_reference_of_large_cases_is_the_reference(spec):
    for case in spec.cases(torch.device("cpu"), SCALE_TYPES["T6"]):
        found = [
            as_tuple(run(*copies(case.inputs)))
            for run in (spec.reference, spec.large_reference)
            if not any(isinstance(x, torch.Tensor) and x.numel() == 0 for x in case.inputs)
        ]
        for wanted, got in zip(*found, strict=True) if found else ():
            size = max(wanted.double().nan_to_num(0).abs().flatten().tolist(), default=0)
            close = {"rtol": 1e-9, "atol": 1e-9 * size}
            torch.testing.assert_close(got.double(), wanted.double(), **close, equal_nan=True)


def test_cases_ask_their_device_and_no_tensor():
    """Fixed cases of a GPU are made on the host, where no tensor is one of a GPU."""
    asked, seen = [], 0
    package = Path(arbcli.__file__).parent
    core, families = package.glob("verify/kernels/*/*.py"), package.glob("families/*/verify/*.py")
    for path in (*core, *families):
        for function in walk(parsed(path)):
            if isinstance(function, ast.FunctionDef) and function.name.endswith("cases"):
                names = {getattr(node, "attr", "") for node in walk(function)}
                asked += [path.name] * ("is_cuda" in names)
                seen += 1
    assert seen > 50
    assert not asked


@contextmanager
def watched(backend: str) -> Iterator[None]:
    if backend != "interpreter":
        yield
        return
    with within_arguments(), barriers_where_needed():
        yield


def assert_triton_agrees(spec, label, inputs) -> None:
    """Run a kernel by Triton in poisoned memory, and compare all that it returns."""
    wanted = as_tuple(spec.reference(*copies(inputs)))
    with poisoned(), use_backend(BACKENDS[1]), watched(BACKENDS[1]):
        got = as_tuple(spec.triton(*copies(inputs)))
    for result, expected in zip(got, wanted, strict=True):
        found = compare(spec, label, result, expected)
        assert found.passed, found


@pytest.mark.parametrize(
    ("name", "rows", "columns"),
    [("blend_moment", 19, 523), ("unit_gain", 35, 7), ("gradient_statistics", 140, 333)],
)
def test_programs_of_a_large_matrix_take_larger_or_several_tiles(
    name, rows, columns, device, monkeypatch
):
    """No case of a test is of the size from which on that is so."""
    monkeypatch.setattr("arbcli.kernels.runtime.backend.LARGE_ELEMENTS", 1)
    (spec,) = (spec for spec in KERNELS if spec.name == name)
    rng = CaseGenerator(1, device, torch.float32)
    inputs = BY_NAME[name].drawn(rng, SCALE_TYPES["T32"], 1, rows, columns)
    assert_triton_agrees(spec, name, inputs)


SEVERAL_TILES = {
    "gather_chunks": (5, 1, 500), "smooth_chunks": (3, 1, 500), "spread_chunks": (5, 1, 500),
    "pack_trits": (1, 60, 7), "unpack_trits": (1, 60, 7), "scaled_nvfp4_matmul": (62, 3, 40),
    "gather_rows": (5, 9, 500), "scatter_rows": (5, 9, 500), "embedding_rows": (5, 9, 310),
    "causal_conv": (5, 1, 250), "mix_streams": (2, 1, 1000), "last_bits": (1, 62, 7),
    "take_last_bits": (1, 62, 7), "unit_gain": (1, 1540, 3),
    "gradient_gains": (4090, 3, 5),
}  # fmt: skip
"""Kernels whose cases end within the first half of their second tile, and sizes that do not."""


@pytest.mark.parametrize(
    ("name", "sizes"), [*SEVERAL_TILES.items(), ("embedding_rows", (12, 9, 500))]
)
def test_kernel_writes_every_tile_of_several(name, sizes, device):
    (spec,) = (spec for spec in KERNELS if spec.name == name)
    rng = CaseGenerator(1, device, torch.float32)
    inputs = BY_NAME[name].drawn(rng, SCALE_TYPES["T32"], *sizes)
    assert_triton_agrees(spec, name, inputs)


IN_TURNS = {
    "sum_choices": ("2x37x3 of 9, width 5", {"BLOCK": 2, "BLOCK_G": 8}),
    "choose_next": ("4x32 at 119, 7 of 40 slots", {"BLOCK_N": 1}),
    "decode_compressed": ("3/1x10 at 100, last 33, all of 90 slots", {"BLOCK_P": 1}),
    "compressed_attention": ("1x25 after 21, 6/3x8, 3 of 7 entries of 6, last 4", {"BLOCK_N": 2}),
    "embedding_grad": ("40x33 to 11 duplicates", {"BLOCK": 16}),
}
"""Kernels of which no case takes several turns, and one that does with smaller tiles, by its label.

A tile of one slot ends wherever the slots do, so that none after the last turn is left out.
"""


@pytest.mark.skipif(torch.cuda.is_available(), reason="a product has 16 on every side there")
@pytest.mark.parametrize("name", IN_TURNS)
def test_kernel_takes_several_turns_where_its_tiles_are_smaller(name, device):
    (spec,) = (spec for spec in KERNELS if spec.name == name)
    label, tile = IN_TURNS[name]
    (case,) = (case for case in spec.cases(device, 32) if case.label == label)
    shrunk = set()

    def launch(kernel, grid, *inputs, **options):
        smaller = {size: n for size, n in tile.items() if options.get(size, 0) > n}
        shrunk.update(smaller)
        kernel.run(*inputs, grid=grid, warmup=False, **options | smaller)

    with replaced_launches(launch):
        assert_triton_agrees(spec, case.label, case.inputs)
    assert shrunk == set(tile)


@pytest.mark.parametrize("name", ["unit_rows", "unit_gain"])
def test_all_of_more_rows_than_a_program_has_get_their_gains(name, device):
    (spec,) = (spec for spec in KERNELS if spec.name == name)
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
    """Cases of such rows have weights, which take the interpreter seconds to decode.

    Where turns begin and end are large numbers: one of 8,000 alike is lost in the tolerance.
    """
    (spec,) = (spec for spec in KERNELS if spec.name == name)
    x, grad = torch.randn(2, 1, WHOLE_ROW + 5, generator=torch.Generator().manual_seed(0))
    for values in (x, grad):
        values[:, [0, 1023, 1024, 2047, 2048, 4095, 4096, WHOLE_ROW - 1, WHOLE_ROW, -1]] = 9
    inputs = {"rms_norm": (x,), "gated_rms_norm": (torch.cat((x, grad), 1),)}.get(name, (grad, x))
    inputs = (*(part.to(device) for part in inputs), None, 0.1)
    assert_triton_agrees(spec, name, inputs)


ROWS_APART = {
    "quantise_rows": (0,), "round_nvfp4": (0,), "rms_norm": (0, 1), "add_rms_norm": (0, 1, 2),
    "rms_norm_backward": (0, 1, 2, 4), "gated_rms_norm": (0, 1), "gated_rms_norm_backward": (0, 1),
    "gained_rms_norm": (0,), "add_gained_rms_norm": (0, 1), "gained_rms_norm_backward": (0, 1, 4),
    "rms_norm_e4m3": (0, 1), "gated_rms_norm_e4m3": (0, 1), "rotary_norm_backward": (0, 1, 2),
    "rotary_heads_backward": (0, 1, 2), "causal_attention_backward": (0, 1, 2, 3, 4),
    "rotary_attention_backward": (0, 5),
    "compress_blocks": (0,), "compress_blocks_backward": (2,), "choose_entries": (0, 2),
    "compressed_attention": (0, 1, 2), "compressed_attention_backward": (3, 4, 5),
    "cross_entropy": (0,), "cross_entropy_backward": (0,), "add_symbols": (2,),
    "grade_symbols": (0,), "stream_weights": (0,), "stream_weights_backward": (3,),
    "gradient_statistics": (0, 1), "unit_gain": (0,), "unit_rows": (0,), "step_scales": (0, 1, 2),
    "blend_moment": (0, 1), "step_by_moment": (0, 1, 2), "step_by_direction": (0, 1, 2),
    "decode_weight": (0,), "decode_digits": (0,), "quantise_gradient": (0, 3), "last_bits": (0, 1),
    "take_last_bits": (0, 1, 2), "grouped_matmul": (0, 1), "grouped_grad_w": (0, 1),
}  # fmt: skip
"""Of kernels that take columns side by side as a case of its own, the inputs of which that is."""


def apart(value, more=3):
    """Lay rows out in a wider matrix, of what is not a number or of ones; each part in its own."""
    if isinstance(value, Packed):
        numbers = count(more)
        return value.map(lambda part: apart(part, next(numbers)))
    wide = torch.full((*value.shape[:-1], value.shape[-1] + more), 1, dtype=value.dtype)
    wide = wide.fill_(torch.nan) if value.is_floating_point() else wide
    return wide.to(value.device)[..., :-more].copy_(value)


def by_columns(value):
    """Lay a matrix out column by column."""
    return value.map(by_columns) if isinstance(value, Packed) else value.mT.contiguous().mT


def inputs_to_lay_out(spec, device) -> tuple:
    rng = CaseGenerator(
        40, device, torch.float32
    )  # a seed that shows a moment, and steps that change octaves
    inputs = spec.drawn(rng, SCALE_TYPES["T6"], 5, 7, 37)
    return inputs


def check_laid_out(spec, backend, inputs, wanted):
    with poisoned(), use_backend(backend), watched(backend):
        got = as_tuple(spec.run(backend)(*copies(inputs)))
    for result, expected in zip(got, wanted, strict=True):
        found = compare(spec, f"{spec.name} {backend}", result, expected)
        assert found.passed, found


@pytest.mark.parametrize("name", ROWS_APART)
def test_rows_whose_columns_lie_side_by_side_may_lie_apart(name, device):
    """Where columns lie apart, too, matrices are copied, and their rows are dense again."""
    (spec,) = (spec for spec in KERNELS if spec.name == name)
    inputs = inputs_to_lay_out(spec, device)
    wanted = as_tuple(spec.reference(*copies(inputs)))
    assert all(part.numel() for part in wanted)
    laid_out = [apart(x, 3 + i) if i in ROWS_APART[name] else x for i, x in enumerate(inputs)]
    native_too = ["native"] if spec.native and device.type == "cpu" and native.available() else []
    for backend in (*BACKENDS, *native_too):
        check_laid_out(spec, backend, laid_out, wanted)


@pytest.mark.skipif(not native.available(), reason=native.why_not())
@pytest.mark.parametrize(
    "spec",
    [spec for spec in KERNELS if spec.native and spec.name in ROWS_APART],
    ids=lambda spec: spec.name,
)
def test_columns_of_any_one_input_of_a_loop_in_c_may_lie_apart(spec):
    """Loops need them side by side, and leave what is not so to torch, or copy it."""
    inputs = inputs_to_lay_out(spec, torch.device("cpu"))
    wanted = as_tuple(spec.reference(*copies(inputs)))
    for place in ROWS_APART[spec.name]:
        by_column = by_columns(inputs[place])
        laid_out = (*inputs[:place], by_column, *inputs[place + 1 :])
        check_laid_out(spec, "native", laid_out, wanted)


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
    if spec.name not in NOT_ANYWHERE
    and (not digits or spec.name in READ_WITH_DIGITS)
    and (scale_type == "T6" or spec.name in PLANES)
]


def anywhere(value, number=0):
    """Lay elements out at a step of two to four in every dimension; the last one ends memory.

    Inputs of other numbers, and parts of a matrix, have other steps: a stride is its own.
    """
    if isinstance(value, Packed):
        numbers = count(number)
        return value.map(lambda part: anywhere(part, next(numbers)))
    if not isinstance(value, torch.Tensor):
        return value
    steps = [2 + (dim + number) % 3 for dim in range(value.dim())]
    sizes = [step * size for step, size in zip(steps, value.shape, strict=True)]
    wide = torch.ones(sizes, dtype=value.dtype, device=value.device)
    wide = wide.fill_(torch.nan) if value.is_floating_point() else wide
    return wide[tuple(slice(step - 1, None, step) for step in steps)].copy_(value)


def all_digits(value, device):
    """Give a packed matrix remainders."""
    if not isinstance(value, Packed):
        return value
    shape, about = (value.out_features, value.in_features), torch.Generator().manual_seed(1)
    remainder = torch.randint(-128, 128, shape, generator=about).to(device, torch.int8)
    return value._replace(remainder=remainder, radix=64, nibble=False)


def inputs_to_lay_anywhere(spec, scale_type: str, device) -> tuple:
    # seeds that show every input, several sequences and several experts
    rng = CaseGenerator(0 if "grouped" in spec.name else 30, device, torch.float32)
    sizes = (7 if spec.one_layout else 5, 7, 37)  # several texts
    if scale_type == "T32":
        sizes = 2, 3, 197  # a block of planes and some
    return spec.drawn(rng, SCALE_TYPES[scale_type], *sizes)


def places_that_are_dense(spec, inputs):
    return range(len(inputs)) if spec.one_layout else spec.dense


@pytest.mark.parametrize(
    ("spec", "scale_type", "digits"), ANYWHERE, ids=lambda value: getattr(value, "name", None)
)
def test_elements_of_every_input_may_lie_anywhere(spec, scale_type, digits, device):
    """Random cases have steps in some dimensions of some inputs; here they have them in all.

    Wherever it lies, nothing else is read: a mask that is too wide may change no result.
    """
    inputs = inputs_to_lay_anywhere(spec, scale_type, device)
    if digits:
        inputs = [all_digits(x, device) for x in inputs]
    dense = places_that_are_dense(spec, inputs)
    laid_out = [x if place in dense else anywhere(x, place) for place, x in enumerate(inputs)]
    wanted = as_tuple(spec.reference(*copies(inputs)))
    check_laid_out(spec, BACKENDS[1], laid_out, wanted)


FAR = 2**30 + 8
"""Elements from one row to the next, so many that those before the third row do not fit int32."""
NOT_FAR = {
    "decode_weight", "decode_e4m3", "ternary_matmul", "ternary_matmul_grad_x", "choose_entries",
}  # fmt: skip
"""Kernels that count rows within a tile, or heads of a position, in int32, which is enough."""
FAR_ROWS = {spec.name for spec, *_ in ANYWHERE if not spec.one_layout}
FAR_ROWS |= {*ROWS_APART}
MAP_NORESERVE = 0x4000  # the module has no name for it before Python 3.13


def far_apart(value):
    """Lay rows out so far apart that int32 does not count it; few pages of that are ever used."""
    if isinstance(value, Packed):
        return value.map(far_apart)
    if not isinstance(value, torch.Tensor) or value.dim() < 2 or not value.numel():
        return value
    sizes = value.shape[:-1]
    steps = [FAR * sizes[dim + 1 :].numel() for dim in range(len(sizes))]
    length = sizes.numel() * FAR * value.element_size()
    memory = mmap.mmap(-1, length, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | MAP_NORESERVE)
    wide = torch.frombuffer(memory, dtype=torch.uint8).view(value.dtype)
    return wide.as_strided(value.shape, (*steps, 1)).copy_(value)


def rows_to_lay_out(spec) -> tuple[tuple, set[int]]:
    """Give inputs, and the places of those whose rows may lie apart."""
    if spec.name in ROWS_APART:
        return inputs_to_lay_out(spec, torch.device("cpu")), {*ROWS_APART[spec.name]}
    inputs = inputs_to_lay_anywhere(spec, "T6", torch.device("cpu"))
    return inputs, {*range(len(inputs))} - {*places_that_are_dense(spec, inputs)}


@pytest.mark.skipif(torch.cuda.is_available(), reason="a GPU has all the memory that is asked for")
@pytest.mark.parametrize("name", sorted(FAR_ROWS - NOT_FAR))
def test_elements_between_rows_may_be_more_than_an_int32_counts(name):
    (spec,) = (spec for spec in KERNELS if spec.name == name)
    inputs, places = rows_to_lay_out(spec)
    wanted = as_tuple(spec.reference(*copies(inputs)))
    native_too = ["native"] if spec.native and name in ROWS_APART and native.available() else []
    for backend in ("interpreter", *native_too):
        laid_out = [far_apart(x) if i in places else x for i, x in enumerate(copies(inputs))]
        with arguments_left_in_place(), poisoned(), use_backend(backend), watched(backend):
            got = as_tuple(spec.run(backend)(*laid_out))
        for result, expected in zip(got, wanted, strict=True):
            found = compare(spec, f"{name} {backend}", result, expected)
            assert found.passed, found


ROUNDED_ELSEWHERE = {
    "append_position", "append_position_8bit", "choose_entries", "choose_next", "compress_blocks",
    "compress_blocks_backward", "compressed_attention", "compressed_attention_backward",
    "decode_compressed", "encode_nvfp4", "sign_gradient", "sum_choices",
}  # fmt: skip
"""Kernels that round on the way, or not at all: their own tests have them in bfloat16."""
OF_BFLOAT16 = {"gradient_gains": (), "rms_norm": (0,), "cast_trit_votes": (2,), "pack_trits": ()}
"""Places of inputs that may be bfloat16, of some kernels."""


@pytest.mark.parametrize("name", OF_BFLOAT16)
def test_places_of_bfloat16_are_those_of_values(name):
    (spec,) = (spec for spec in KERNELS if spec.name == name)
    assert spec.bfloat16 == OF_BFLOAT16[name]


IN_BFLOAT16 = [s.name for s in KERNELS if s.bfloat16 and s.name not in ROUNDED_ELSEWHERE]
SEVERAL_ROUNDINGS = {
    "causal_attention_backward",
    "gram_polynomial",
    "decode_attention",
    "decode_attention_8bit",
    "row_matmul",
}
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
    (spec,) = (spec for spec in KERNELS if spec.name == name)
    for seed, (m, n, k) in enumerate(((7, 33, 165), (16, 64, 64), (33, 31, 200))):
        rng = CaseGenerator(seed, torch.device("cpu"), torch.bfloat16)
        inputs = BY_NAME[name].drawn(rng, SCALE_TYPES["T6"], m, n, k)
        dtypes = {value.dtype for value in inputs if isinstance(value, torch.Tensor)}
        assert torch.bfloat16 in dtypes
        wanted = as_tuple(spec.reference(*copies(inputs)))
        with use_backend(backend):
            found = as_tuple(spec.run(backend)(*copies(inputs)))
        for got, expected in zip(found, wanted, strict=True):
            if not got.is_floating_point():
                assert torch.equal(got.long(), expected.long())
            elif got.numel():
                low = 6e-3 if name in SEVERAL_ROUNDINGS else 2.5e-3
                bound = low if got.dtype == torch.bfloat16 else 1e-6
                error = (got.double() - expected.double()).norm()
                assert error <= bound * expected.double().norm()


@pytest.mark.slow  # the interpreter runs programs in order: what may differ does on a GPU
@pytest.mark.parametrize("spec", KERNELS, ids=lambda spec: spec.name)
def test_kernel_is_deterministic(spec, device):
    *_, case = spec.cases(device, 32)
    first, second = (spec.triton(*copies(case.inputs)) for _ in range(2))
    if isinstance(first, torch.Tensor):
        first, second = (first,), (second,)
    for a, b in zip(first, second, strict=True):
        assert torch.equal(a, b)
