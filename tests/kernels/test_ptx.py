"""Kernels as they are compiled for an H200: executed here, see `ptx`."""

import pytest
import torch

from arbcli.kernels.attention.attend_parts import AttentionParts
from arbcli.kernels.matmul import prepacked, prepacked_rows, row_by_row, row_matmul
from arbcli.kernels.matmul.few_rows import few_rows
from arbcli.kernels.runtime.backend import use_backend
from arbcli.verify.check_kernels import KERNELS, copies, find_kernels, peers_of
from arbcli.verify.compare import as_tuple, compare
from arbcli.verify.kernels.codec.decode_digits import decode_digits_reference
from arbcli.verify.kernels.codec.packed import random_packed
from arbcli.verify.kernels.matmul.prepacked import prepacked_reference

pytest.importorskip("triton")
from ptx import emulated

LEFT_OUT = {
    "gram", "gram_polynomial", "causal_attention_backward", "rotary_attention_backward",
    "nearest_codes", "grouped_matmul", "grouped_grad_w",
    "merged_steps", "decode_weights", "keep_accepted",
}  # fmt: skip
"""Four are for the copy engine and one for products of warp groups, which nothing here executes;
the grouped ones pass in 35 s; the last three find addresses in a table, which are others."""
QUICK = {"attend_parts"}
"""It has PTX of its own and shares memory among threads; plain Triton is in the tests below."""


def param(*values, quick: bool):
    """Leave a parameter to `make test-all` unless it is one of the few that tell most."""
    return pytest.param(*values, marks=[] if quick else pytest.mark.slow, id=ids(values))


def ids(values: tuple) -> str:
    return "-".join(map(str, values))


def failures(name: str) -> list[str]:
    (spec,) = find_kernels([name])
    found = []
    for case in spec.cases(torch.device("cpu"), 32):
        wanted = as_tuple(spec.reference(*copies(case.inputs)))
        peers = peers_of(spec, case, len(wanted))
        with emulated(), use_backend("triton"):
            got = as_tuple(spec.triton(*copies(case.inputs)))
        for result, expected, peer in zip(got, wanted, peers, strict=True):
            if not compare(spec, case.label, result, expected, peer).passed:
                found.append(case.label)
    return found


def error(y: torch.Tensor, expected: torch.Tensor) -> float:
    return ((y - expected).abs().max() / expected.abs().max()).item()


def few_rows_error(rows: int, out_features: int, in_features: int, group_size: int) -> float:
    generator = torch.Generator().manual_seed(0)
    packed = random_packed(out_features, in_features, group_size, generator, spread=8)
    x = torch.randn(rows, in_features, generator=generator).bfloat16()
    with emulated():
        y = few_rows(x, packed, torch.float32)
    return error(y, x.double() @ decode_digits_reference(packed).double().T)


def row_error(
    out_features: int, in_features: int, gated: bool, eps: float | None, tiling: tuple,
    heads: int = 0,
) -> float:  # fmt: skip
    generator = torch.Generator().manual_seed(0)
    packed = random_packed(out_features, in_features, 32, generator, spread=8)
    weight = prepacked.prepack(packed, gated)
    x = torch.randn(5 if heads else 1, in_features, generator=generator).bfloat16()
    row = x
    if heads:  # of five parts of attention, three are filled
        totals = torch.rand(5, heads, generator=generator) + 0.1
        x = AttentionParts(x, totals, torch.tensor(95, dtype=torch.int32), 32)
        row = x.average()[None]
    added = torch.randn(1, weight.out_features, generator=generator) if gated else None
    inputs = *weight, eps, added, torch.float32
    with emulated(), pytest.MonkeyPatch.context() as patch:
        patch.setattr(row_matmul, "tiling_of", lambda *_: row_matmul.Tiling(*tiling))
        y = row_matmul.ROW_MATMUL.triton(x, *inputs)
    return error(y, prepacked_reference(row, *inputs))


def rows_error(rows: int, out_features: int, in_features: int, gated: bool, tiling: tuple) -> float:
    generator = torch.Generator().manual_seed(0)
    packed = random_packed(out_features, in_features, 32, generator, spread=8)
    weight = prepacked.prepack(packed, gated)
    x = torch.randn(rows, in_features, generator=generator).bfloat16()
    inputs = x, *weight, 1e-6, None, torch.float32
    with emulated(), pytest.MonkeyPatch.context() as patch:
        patch.setattr(prepacked_rows, "_tiling", lambda *_: prepacked_rows.Tiling(*tiling))
        y = prepacked_rows.PREPACKED_ROWS.triton(*inputs)
    return error(y, prepacked_reference(*inputs))


@pytest.mark.parametrize(
    "name",
    [param(spec.name, quick=spec.name in QUICK) for spec in KERNELS if spec.name not in LEFT_OUT],
)
def test_compiled_kernel_equals_reference(compiling, name):
    assert compiling(failures, name) == []


@pytest.mark.parametrize(
    "shape",
    [
        param((1, 40, 1000, 32), quick=False),
        param((2, 70, 4000, 96), quick=False),
        param((5, 40, 1000, 32), quick=True),
        param((20, 40, 728, 32), quick=False),
        param((40, 33, 88, 32), quick=False),
    ],
)
def test_few_rows(compiling, shape):
    assert compiling(few_rows_error, *shape) < 1e-6


TILINGS = [
    ((34, 2048), (1, 1, 16, 64)), ((98, 2048), (4, 3, 8)), ((90, 5632), (4, 1, 8)),
    ((130, 1000), (4, 4, 8, 96)), ((18, 328), (1, 1, 4, 64)), ((34, 8200), (4, 1, 16)),
]  # fmt: skip


@pytest.mark.parametrize(
    ("shape", "tiling", "gated", "eps"),
    [
        param(*each, gated, eps, quick=gated and each == TILINGS[1])
        for each in TILINGS
        for gated, eps in ((False, None), (True, 1e-6))
    ],
)
def test_row_matmul(compiling, shape, tiling, gated, eps):
    assert compiling(row_error, *shape, gated, eps, tiling) < 2e-4  # x has 15 bits


def differing_rows(rows: int, shape: tuple, tiling: tuple) -> int:
    """Count the rows of a product that have other bits than each has by itself."""
    generator = torch.Generator().manual_seed(0)
    weight = prepacked.prepack(random_packed(*shape, 32, generator, spread=8), gated=True)
    x = torch.randn(rows, shape[1], generator=generator).bfloat16()
    added = torch.randn(rows, weight.out_features, generator=generator)
    with emulated(), pytest.MonkeyPatch.context() as patch:
        patch.setattr(row_matmul, "tiling_of", lambda *_: row_matmul.Tiling(*tiling))
        together = row_by_row.ROW_BY_ROW.triton(x, *weight, 1e-6, added, torch.float32)
        single = row_matmul.ROW_MATMUL.triton
        alone = [
            single(x[m : m + 1], *weight, 1e-6, added[m : m + 1], torch.float32)
            for m in range(rows)
        ]
    return int((together != torch.cat(alone)).any(dim=1).sum())


@pytest.mark.parametrize(
    ("rows", "shape", "tiling"),
    [
        param(4, (18, 328), (1, 1, 4, 64), quick=True),
        param(3, (34, 1096), (4, 3, 4), quick=False),
        param(5, (34, 640), (4, 4, 8, 96), quick=False),
    ],
)
def test_row_by_row_has_the_bits_of_row_matmul(compiling, rows, shape, tiling):
    assert compiling(differing_rows, rows, shape, tiling) == 0


@pytest.mark.parametrize(
    ("shape", "gated", "tiling"),
    [
        param((11, 72, 600), True, (2, 2, 4, 2, 2), quick=False),
        param((3, 20, 2064), True, (1, 1, 4, 5, 3), quick=True),  # not all is in memory at a time
        param((18, 40, 1496), False, (1, 2, 4, 3, 2), quick=False),
        param((5, 100, 104), True, (4, 1, 4, 1, 1), quick=False),
    ],
)
def test_prepacked_rows(compiling, shape, gated, tiling):
    assert compiling(rows_error, *shape, gated, tiling) < 1e-6


@pytest.mark.parametrize(
    ("in_features", "heads", "tiling"),
    [
        param(2048, 16, (1, 1, 16, 64), quick=False),
        param(192, 3, (4, 1, 8), quick=False),
        param(1280, 10, (4, 2, 4), quick=False),
    ],
)
def test_row_matmul_of_parts_of_attention(compiling, in_features, heads, tiling):
    """An average that is rounded to the other neighbour is off by more than x is."""
    assert compiling(row_error, 34, in_features, False, None, tiling, heads) < 2e-3
