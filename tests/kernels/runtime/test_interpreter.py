"""Shortcuts of the tests through numpy give the results of Triton's interpreter."""

import pytest
import torch
from apparatus.interpreter import ARRAYS, BITWISE, LOGICAL, OPERATORS
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
def test_quick_operator_equals_the_interpreter(name):
    from triton import language
    from triton.runtime import interpreter

    whole = [language.int32, language.int64, language.uint32]
    whole += [language.int1] if OPERATORS[name] in LOGICAL else []
    kinds = whole + ([] if OPERATORS[name] in BITWISE else [language.float32])
    quick = getattr(language.core.tensor, name)
    both = [(a, b) for a in kinds for b in kinds]
    for (a, b), shapes in ((pair, shapes) for pair in both for shapes in SHAPES):
        first, second = (drawn(kind, shape) for kind, shape in zip((a, b), shapes, strict=True))
        for other in (second, 7, 7.5 if a.is_floating() else 9):
            assert_alike(
                operate(first, other, _semantic=interpreter.interpreter_semantic)
                for operate in (quick, quick.__wrapped__)
            )


def assert_alike(both) -> None:
    got, wanted = both
    assert (got.type, got.dtype, got.handle.dtype) == (
        wanted.type, wanted.dtype, wanted.handle.dtype,
    )  # fmt: skip
    assert got.handle.data.dtype == wanted.handle.data.dtype
    assert (got.handle.data == wanted.handle.data).all()
    assert got.handle.data.shape == wanted.handle.data.shape


@pytest.mark.parametrize("of", ["int8", "int32", "float32", "int64"])
@pytest.mark.parametrize("shape", [(4, 2), ()])
def test_number_is_added_to_pointers(of, shape):
    from triton import language
    from triton.runtime import interpreter

    pointer, add = language.pointer_type(getattr(language, of)), language.core.tensor.__add__
    data = drawn(language.int64, shape).handle.data.astype("uint64")
    kind = language.block_type(pointer, [*shape]) if shape else pointer
    first = language.tensor(interpreter.TensorHandle(data, pointer), kind)
    for other in (0, 5, -1, drawn(language.int32, shape), drawn(language.int64, (4, 2))):
        assert_alike(
            operate(first, other, _semantic=interpreter.interpreter_semantic)
            for operate in (add, add.__wrapped__)
        )


@pytest.mark.parametrize("shape", [(4, 2), ()])
def test_quick_cast_is_that_of_the_interpreter(shape):
    from triton import language
    from triton.runtime import interpreter

    semantic = interpreter.interpreter_semantic
    cast, names = type(semantic).cast, ["int1", "int8", "int32", "int64", "uint32", "float32"]
    for of, into in ((a, b) for a in names for b in names if a != "int8"):
        value = drawn(getattr(language, of), shape)
        assert_alike(
            operate(semantic, value, getattr(language, into))
            for operate in (cast, cast.__wrapped__)
        )
