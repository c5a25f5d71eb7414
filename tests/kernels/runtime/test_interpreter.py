"""Operators that tests take from numpy at once give what Triton's interpreter gives."""

import pytest
import torch
from interpreter import ARRAYS, BITWISE, OPERATORS
from marks import needs_triton

pytestmark = [
    needs_triton, pytest.mark.skipif(torch.cuda.is_available(), reason="kernels are compiled")
]  # fmt: skip
SHAPES = [(4,), (4,)], [(4, 1), (1, 2)], [(2, 4), ()], [(), (2, 4)], [(), ()], [(4,), (2, 4)]


def drawn(kind, shape: tuple):
    """Make a tensor of small numbers, so that a shift by them is one."""
    from triton import language
    from triton.runtime import interpreter

    numbers = torch.randint(
        0, 31, shape or (1,), generator=torch.Generator().manual_seed(len(shape))
    )
    data = numbers.numpy().astype(ARRAYS[kind.name])
    of = language.block_type(kind, [*shape]) if shape else kind
    return language.tensor(interpreter.TensorHandle(data, kind), of)


@pytest.mark.parametrize("name", OPERATORS)
def test_quick_operator_gives_what_the_interpreter_does(name):
    from triton import language
    from triton.runtime import interpreter

    whole = [language.int32, language.int64, language.uint32]
    kinds = whole + ([] if OPERATORS[name] in BITWISE else [language.float32])
    quick = getattr(language.core.tensor, name)
    both = [(a, b) for a in kinds for b in kinds]
    for (a, b), shapes in ((pair, shapes) for pair in both for shapes in SHAPES):
        first, second = (drawn(kind, shape) for kind, shape in zip((a, b), shapes, strict=True))
        for other in (second, 7, 7.5 if a.is_floating() else 9):
            got, wanted = (
                operate(first, other, _semantic=interpreter.interpreter_semantic)
                for operate in (quick, quick.__wrapped__)
            )
            assert (got.type, got.dtype, got.handle.dtype) == (
                wanted.type, wanted.dtype, wanted.handle.dtype,
            )  # fmt: skip
            assert got.handle.data.dtype == wanted.handle.data.dtype
            assert (got.handle.data == wanted.handle.data).all()
            assert got.handle.data.shape == wanted.handle.data.shape
