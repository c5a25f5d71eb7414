"""Addresses that kernels load 16 bytes from are multiples of 16: a GPU refuses it, and Triton's
interpreter does not."""

import re

import pytest
import torch
from marks import needs_triton
from syntax import kernel_files

from arbcli.kernels.codec.decode_weight import _has_wide_loads
from arbcli.kernels.runtime._triton import replaced_launches
from arbcli.kernels.runtime.backend import compile_for, use_backend
from arbcli.verify.case_generator import CaseGenerator
from arbcli.verify.registry import KERNELS

WIDE = {
    "attend_ahead": ("qkv", "cos", "sin"), "attend_parts": ("qkv", "cos", "sin"),
    "causal_attention_backward": ("grad_y", "q", "k", "v", "y"),
    "dropped_attention_backward": ("grad_y", "q", "k", "v", "y"), "int8_matmul": ("x",),
    "gram": ("x",), "grouped_matmul": ("w",), "prepacked_rows": ("x",),
    "rotary_attention_backward": ("grad_y", "qkv", "y"), "row_matmul": ("x",),
}  # fmt: skip
"""By kernel: arguments that may begin anywhere and are loaded so; attention refuses other rings."""

BORROWED = {
    "dropped_attention_backward", "gram", "int8_matmul", "rotary_attention_backward",
}  # fmt: skip
"""Operations that launch kernels of another one's file."""
HELPERS = {"_triton", "ptx"}
OWN = {"newton_schulz"}
"""Files that have a function for it, with a test of its own."""


def shifted(x: torch.Tensor) -> torch.Tensor:
    """Copy to an address that 8 divides and 16 does not."""
    buffer = torch.empty(x.numel() + 16, dtype=x.dtype)
    begin = (24 - buffer.data_ptr() % 16) // x.itemsize
    y = torch.as_strided(buffer, x.shape, x.contiguous().stride(), begin).copy_(x)
    assert y.data_ptr() % 16 == 8
    return y


@needs_triton
@pytest.mark.parametrize(("name", "argument"), [(n, a) for n in WIDE for a in WIDE[n]])
def test_unaligned_tensors_are_copied(name, argument):
    (spec,) = (spec for spec in KERNELS if spec.name == name)
    inputs = next(c.inputs for c in spec.cases(torch.device("cpu"), 32) if len(c.inputs[0]))
    place, launched = [*spec.arguments].index(argument), []
    given = [shifted(x) if i == place else x for i, x in enumerate(inputs)]

    def record(_kernel, _grid, *args, **kwargs):
        launched.extend(getattr(x, "base", x) for x in (*args, *kwargs.values()))

    with use_backend("interpreter"), compile_for((9, 0)), replaced_launches(record):
        spec.triton(*given)
    passed = [x for x in launched if isinstance(x, torch.Tensor)]
    assert passed
    memory = given[place].untyped_storage().data_ptr()
    assert all(x.untyped_storage().data_ptr() != memory for x in passed)


def test_no_kernel_that_loads_so_is_left_out():
    loads = re.compile(r"\b(load_constant|load_new|load_where|described)\(")
    files = kernel_files()
    names = {file.stem for file in files if loads.search(file.read_text())}
    assert names - HELPERS - OWN == WIDE.keys() - BORROWED


def test_weights_are_stored_by_16_bytes_where_rows_begin_at_multiples():
    rng, columns = CaseGenerator(0, torch.device("cpu"), torch.float32), range(320, 340)
    by_block = [_has_wide_loads(rng.packed(3, number, 32, digits="trit")) for number in columns]
    assert by_block == [number * torch.bfloat16.itemsize % 16 == 0 for number in columns]
