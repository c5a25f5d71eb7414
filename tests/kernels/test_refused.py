"""Inputs that operations refuse, by type, number of dimensions, size or layout.

A launch that reads beyond its inputs gives numbers all the same, so that no result would tell.
"""

import re
import sys
from collections.abc import Callable, Iterable
from functools import cache

import pytest
import torch
from torch import Tensor

from arbcli.families.ahead.kernels.attend_ahead import keep_accepted_, table_of
from arbcli.families.compressed.kernels.append_position import append_position_
from arbcli.families.compressed.kernels.decode_compressed import decode_compressed
from arbcli.families.compressed.verify.append_position import quantise_inputs
from arbcli.kernels.attention.attend_parts import attend_parts
from arbcli.kernels.attention.decode_attention import SpeculativeRings, decode_attention
from arbcli.kernels.codec.packed import Packed
from arbcli.kernels.matmul.int8_matmul import PrepackedInt8, int8_matmul, prepack_int8
from arbcli.kernels.matmul.prepacked import Prepacked, prepack
from arbcli.kernels.matmul.prepacked_rows import prepacked_rows
from arbcli.kernels.matmul.row_matmul import row_matmul
from arbcli.kernels.rows.table_rows import TouchedRows
from arbcli.kernels.rows.weighted_rows import weighted_rows_grad
from arbcli.kernels.runtime._triton import replaced_launches
from arbcli.kernels.runtime.arguments import compiled_check, declared
from arbcli.kernels.runtime.backend import use_backend
from arbcli.kernels.runtime.operation import Operation
from arbcli.kernels.update.gradient_gains import gradient_gains
from arbcli.kernels.update.gradient_statistics import GradientStatistics
from arbcli.verify.case_generator import CaseGenerator
from arbcli.verify.check_kernels import copies
from arbcli.verify.registry import BY_NAME, KERNELS

ADAPTED = {
    "append_position_8bit": lambda *x: append_position_(*x[:-2], x[-2:]),
    "decode_attention_8bit": decode_attention,
    "prepacked_rows": lambda x, *rest: prepacked_rows(x, Prepacked(*rest[:4]), *rest[4:]),
    "row_matmul": lambda x, *rest: row_matmul(x, Prepacked(*rest[:4]), *rest[4:]),
    "keep_accepted": lambda keys, values, new, *counts: keep_accepted_(
        table_of([SpeculativeRings(keys, values, new)]), *counts
    ),
    "int8_matmul": lambda x, *rest: int8_matmul(x, PrepackedInt8(*rest[:5]), *rest[5:]),
    "weighted_rows_grad": lambda grad_y, weights, tokens, order, bounds, *kind: weighted_rows_grad(
        grad_y, weights, tokens, TouchedRows(order, order, bounds, order), *kind
    ),
    "gradient_gains": lambda *inputs: gradient_gains(GradientStatistics(*inputs[:5]), *inputs[5:]),
}
"""Operations whose arguments are grouped, by the name of the kernel that has them one by one."""


OF_KERNELS = r"arbcli\.(families\.\w+\.)?kernels\."
"""Pattern of the names of modules that declare kernels."""


@cache
def public(name: str) -> Callable:
    """Find the operation that a kernel is of, by its name."""
    modules = [module for module in sys.modules if re.match(OF_KERNELS, module)]
    for module in modules:
        for operation in map(vars(sys.modules[module]).get, (name, f"{name}_")):
            if isinstance(operation, Operation) or getattr(operation, "__module__", None) == module:
                return operation
    raise LookupError(name)


def alterations(x: Tensor) -> dict[str, Tensor]:
    """Make what a tensor is not, by a letter.

    Of another type (t) or bfloat16 (b), of one dimension more (+) or fewer (-), not contiguous (l),
    or one longer in the dimension of that number.
    """
    others = {"t": x.half() if x.dtype != torch.float16 else x.float(), "b": x.bfloat16()}
    others["+"] = x[None]
    if x.dim():
        others |= {"-": x[0], "l": torch.stack([x] * 2, dim=-1)[..., 0]}
    for dim in range(x.dim()):
        others[str(dim)] = x.index_select(dim, torch.tensor([*range(x.shape[dim]), 0]))
    return others


SEEDS = {
    "row_matmul": 1, "int8_matmul": 1, "decode_attention": 1, "decode_attention_8bit": 1,
    "compress_blocks_backward": 6, "choose_entries": 1, "take_chunk": 1, "gradient_gains": 1,
    "unit_gain": 2, "step_by_direction": 3, "sum_gradients": 1,
}  # fmt: skip
"""Of those draws that have every input, or several heads, where the first has not."""
NAMES = {spec.name for spec in KERNELS} - {"merged_steps", "decode_weights"}
"""These are lists of launches, each of which is checked by itself."""
SAID = r"^(?!.*to unpack)"
"""By the operation, and not by a tuple of another length."""


def flat(inputs: tuple) -> list:
    """Write pairs of inputs one by one."""
    return [part for x in inputs for part in (x if type(x) is tuple else (x,))]


def drawn(name: str) -> list:
    rng = CaseGenerator(SEEDS.get(name, 0), torch.device("cpu"), torch.float32)
    return flat(BY_NAME[name].drawn(rng, 32, 5, 7, 37))


def run(name: str, inputs: Iterable, backend: str = "torch") -> None:
    with use_backend(backend):
        (ADAPTED.get(name) or public(name))(*inputs)


def assert_refused(name: str, inputs: list) -> None:
    with pytest.raises(ValueError, match=SAID):
        run(name, inputs)


def zeros(*sizes: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.zeros(sizes, dtype=dtype)


def matrix(rows: int, columns: int) -> Packed:
    return CaseGenerator(0, torch.device("cpu"), torch.float32).packed(rows, columns, 32)


BOOL, HALF, INT8, INT64 = torch.bool, torch.bfloat16, torch.int8, torch.int64


def test_argument_that_its_declaration_does_not_allow_is_refused():
    arguments = declared(
        "x: real[*B, D] rows; y: real[*B, D]; gate: real[*B, H]; gain: any_real[D]? dense;"
        "w: packed[N, D]; planes: int8|uint8[2, N] parts; bounds: int64[N + 1];"
        "at: int32[*B] one; how: a|b"
    )
    check = compiled_check("it", arguments, ("len(x) < 4",))
    x, gain, at = torch.ones(2, 3, 8), torch.ones(8), zeros(2, 3, dtype=torch.int32)
    planes, bounds = zeros(2, 5, dtype=INT8), zeros(6, dtype=INT64)
    given = {"x": x, "y": x, "gate": x[..., :4], "gain": gain, "w": matrix(5, 8), "planes": planes,
             "bounds": bounds, "at": at, "how": "b"}  # fmt: skip
    for fitting in (
        {}, {"gain": None}, {"gain": gain.bfloat16()}, {"y": x.mT.contiguous().mT},
        dict.fromkeys(("x", "y", "gate"), x.bfloat16()), {"planes": planes.to(torch.uint8)},
        {"x": x[0], "y": x[0], "gate": x[0], "at": at[0]}, {"at": at.flatten()},
    ):  # fmt: skip
        check(**given | fitting)
    for name, letters in (
        ("x", "tl2"), ("y", "tb+-012"), ("gate", "tb+-01"), ("gain", "t+-l0"),
        ("planes", "tb+-l01"), ("bounds", "tb+-0"), ("at", "tb-l01"),
    ):  # fmt: skip
        for letter in letters:
            with pytest.raises(ValueError, match=r"^it: [a-z]+: need"):
                check(**given | {name: alterations(given[name])[letter]})
    for name, other in (("w", matrix(4, 8)), ("w", matrix(5, 9)), ("how", "c"), ("gain", x[0])):
        with pytest.raises(ValueError, match=r"^it: [a-z]+: need"):
            check(**given | {name: other})
    more = dict.fromkeys(("x", "y", "gate"), zeros(4, 3, 8))
    with pytest.raises(ValueError, match=r"need len\(x\) < 4, got x = a tensor of shape"):
        check(**given | more | {"at": zeros(4, 3).int()})


@pytest.mark.parametrize("name", sorted(NAMES))
def test_input_of_another_type_is_refused(name):
    """By the declarations of all operations, which say more."""
    inputs = drawn(name)
    run(name, copies(inputs))  # which fit
    for place, x in enumerate(inputs):
        if isinstance(x, Packed):
            other = x._replace(exponent=x.exponent.short())
        elif isinstance(x, Tensor):
            other = torch.zeros_like(x, dtype=torch.complex64)
        else:
            continue
        assert_refused(name, [*inputs[:place], other, *inputs[place + 1 :]])


@pytest.mark.parametrize("name", sorted(NAMES - {"gram", "gram_polynomial", "decode_digits"}))
def test_operation_launches_a_kernel_on_a_gpu_and_none_by_torch(name):
    """Results do not tell: those of the torch backend are as good. Products pay on a GPU only.

    All digits are decoded by `decode_weight` there.
    """
    inputs, launched = drawn(name), []
    with replaced_launches(lambda kernel, *_, **__: launched.append(kernel)):
        run(name, copies(inputs), "torch")
        assert not launched
        run(name, copies(inputs), "interpreter")
    assert launched


VALUES = {
    "causal_attention_backward": (dict.fromkeys(range(5), zeros(1, 2, 3, 12)) | {5: zeros(1, 2,
        3)}, dict.fromkeys(range(5), zeros(1, 2, 3, 8)) | {5: zeros(1, 2, 3)}),
    "expert_combine": ({1: zeros(1, 17, dtype=INT64), 2: None},
        {1: zeros(1, 0, dtype=INT64), 2: None}, {0: zeros(1, 37)}),
    "decode_digits": ({1: torch.float16},), "decode_weight": ({1: torch.float64},),
    "embedding_rows": ({2: torch.float16},),
    "fp8_matmul": ({0: zeros(5, 40).to(torch.float8_e4m3fn), 2: matrix(32, 40), 3: False},
        {4: torch.float16}),
    "gradient_gains": ({6: None}, {3: zeros(0, 7)}, {4: zeros(0, 37)}),
    "weighted_rows": ({3: torch.float16},), "weighted_rows_grad": ({5: torch.float64},),
    "append_position": ({1: zeros(0, 1, 76)}, {2: zeros(0, 1, 76)},
        {3: zeros(2, 0, 76), 4: zeros(76, 0)}),
    "append_position_8bit": ({1: zeros(3, 2, 76), 2: zeros(4, 2, 76)},),
    "attend_ahead": ({1: zeros(3, 6, 128, dtype=HALF), 2: zeros(3, 6, 128, dtype=HALF)},
        {0: zeros(1, 3, 3, 128, dtype=HALF), 3: zeros(2, 1, 3, 128, dtype=HALF)}),
    "prepacked_rows": ({6: None, 7: torch.float16}, {0: zeros(0, 40, dtype=HALF), 6: None},
        {0: zeros(65, 40, dtype=HALF), 6: None}, {0: zeros(5, 36, dtype=HALF), 3: 36}),
    "row_matmul": ({6: None, 7: torch.int32}, {0: zeros(9, 40, dtype=HALF), 6: None},
        {0: zeros(5, 36, dtype=HALF), 3: 36},
        {0: zeros(5, 17_928, dtype=HALF), 1: zeros(1, 141, 640, dtype=torch.uint8), 3: 17_928}),
    "blend_moment": ({7: -1}, {7: 2**16 + 1}),
    "cast_trit_votes": ({1: zeros(7, 37)}, {5: zeros(7, 37)}, {5: zeros(7, 38, dtype=BOOL)}),
    "causal_conv": ({1: zeros(37, 0)}, {1: zeros(37, 9)}), "causal_conv_grad_w": ({2: 0}, {2: 9}),
    "choose_byte": ({2: zeros(0)}, {2: zeros(257)}), "choose_next": ({2: zeros(0, 40)},),
    "choose_bytes": ({2: zeros(1, 0)}, {2: zeros(1, 257)}),
    "cross_entropy": ({0: zeros(5, 0)}, {0: zeros(5, 4097)}),
    "add_symbols": ({2: zeros(5, 0)}, {2: zeros(5, 4097)}),
    "grade_symbols": ({0: zeros(5, 0)}, {0: zeros(5, 4097)}),
    "decode_attention": ({1: zeros(1, 7, 76), 2: zeros(1, 7, 76)}, {1: zeros(2, 7, 78),
        2: zeros(2, 7, 78)}, {1: zeros(2, 0, 76), 2: zeros(2, 0, 76)}, {1: zeros(2, 76),
        2: zeros(2, 76)}, {1: zeros(2, 7, 76, dtype=HALF), 2: zeros(2, 7, 76, dtype=HALF)},
        {1: zeros(2, 14, 76)[:, ::2], 2: zeros(2, 14, 76)[:, ::2]}),
    "decode_attention_8bit": ({1: zeros(1, 7, 76, dtype=INT8), 2: zeros(1, 7, 76, dtype=INT8)},
        {1: zeros(2, 7, 76), 2: zeros(2, 7, 76)}, {1: zeros(2, 7, 76, dtype=INT8),
        2: zeros(2, 7, 76, dtype=torch.float8_e4m3fn)}, {1: zeros(2, 0, 76, dtype=INT8),
        2: zeros(2, 0, 76, dtype=INT8), 9: zeros(2, 2, 0, dtype=INT8)}),
    "decode_compressed": ({1: zeros(28, 1, 76)}, {2: zeros(41, 1, 76)}),
    "decode_latent": ({3: zeros(7, 0)}, {3: zeros(7, 3)},
        {2: zeros(0, 38), 3: zeros(0, 10), 4: zeros(0, 3)}),
    "int8_matmul": ({7: None, 8: torch.float16}, {0: zeros(0, 40, dtype=HALF), 7: None},
        {0: zeros(65, 40, dtype=HALF), 7: None}),
    "gated_rms_norm": ({0: zeros(3, 5)},),
    "gradient_statistics": ({0: zeros(0, 37)},),
    "grouped_grad_w": ({0: zeros(5, 0)}, {1: zeros(5, 0)}, {2: zeros(1, dtype=INT64)},
        {2: zeros(258, dtype=INT64)}),
    "grouped_matmul": ({1: zeros(1, 0, 37)}, {3: zeros(5, 8)}, {3: zeros(4, 7)},
        {3: zeros(5, 7, dtype=HALF)}),
    "mamba_step": ({1: zeros(3, 23), 3: zeros(23, 3)}, {1: zeros(0, 23), 3: zeros(23, 0)}),
    "mix_streams": ({0: zeros(5, 5, 37), 1: zeros(5, 8, 5)}, {1: zeros(5, 5, 1), 3: zeros(5, 5)},
        {2: None}, {3: None}),
    "quantise_gradient": ({6: 0}, {6: 2**15}, {7: 0}, {7: 3}, {7: 2},
        {3: zeros(7, 37, dtype=INT8), 4: zeros(4, 37, dtype=INT8)}),
    "quantise_rows": ({0: zeros(5, 0)},), "rms_norm": ({0: zeros()},),
    "route_position": ({0: "none"},),
    "stream_weights": ({0: zeros(5, 15), 1: zeros(15)}, {0: zeros(5, 25), 1: zeros(25)}, {2: 0}),
    "sum_choices": ({0: zeros(1, 1, 2**15, 0), 1: zeros(1, 1, 2**15, dtype=torch.int32)},),
    "sum_gradients": ({4: 0}, {4: 3}, {4: 2}, {5: torch.float16},
        {0: zeros(0, 7, 37, dtype=torch.int32), 3: zeros(0, 7, dtype=INT8)}),
    "unit_gain": ({1: None},),
}  # fmt: skip
"""Inputs that do not fit together, by their places."""


@pytest.mark.parametrize("name", VALUES)
def test_values_that_inputs_cannot_have_are_refused(name):
    inputs = drawn(name)
    for others in VALUES[name]:
        assert_refused(name, [*({**dict(enumerate(inputs)), **others}).values()])


def test_codes_are_read_with_exponents_that_fit_them():
    plain = drawn("decode_compressed")[:12]
    *inputs, exponents = quantise_inputs(tuple(plain), INT8)
    decode_compressed(*inputs, *exponents)
    for place in range(2):
        for wrong in alterations(exponents[place]).values():
            others = [wrong if i == place else right for i, right in enumerate(exponents)]
            with pytest.raises(ValueError, match=r"(recent|entry)_exponents: need contiguous"):
                decode_compressed(*inputs, *others)
    for mixed in (plain, *exponents), (inputs,), (inputs, exponents[0]):
        with pytest.raises(ValueError, match="decode_compressed: "):
            decode_compressed(*mixed[0], *mixed[1:])


def test_parts_of_attention_that_do_not_belong_together_are_not_multiplied():
    with use_backend("torch"):
        parts = attend_parts(*drawn("attend_parts"))
    packed = CaseGenerator(0, torch.device("cpu"), torch.float32).packed(7, 384, 32, 8, "trit")
    weight = prepack(packed)
    row_matmul(parts, weight)
    for name, letters in (("values", "t+-l01"), ("totals", "tb+-l0"), ("position", "t+")):
        others = alterations(getattr(parts, name))
        for letter in letters:
            with pytest.raises(ValueError, match=SAID):
                row_matmul(parts._replace(**{name: others[letter]}), weight)


def test_matrix_that_has_no_digits_in_planes_is_not_prepacked():
    for group_size, gated, digits in ((6, False, "all"), (32, False, "trit"), (32, True, "all")):
        packed = CaseGenerator(0, torch.device("cpu"), torch.float32).packed(
            7, 40, group_size, 8, digits
        )
        with pytest.raises(ValueError, match="packed weights: need"):
            prepack_int8(packed, gated)
