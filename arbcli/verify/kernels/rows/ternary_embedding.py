"""Verification of `arbcli.kernels.rows.ternary_embedding`."""

from collections.abc import Iterator
from functools import partial

import torch
from torch import Tensor
from torch.nn.functional import embedding

from arbcli.kernels.codec.decode_weight import decode_weight
from arbcli.kernels.codec.packed import Packed
from arbcli.kernels.codec.packing import has_planes
from arbcli.kernels.rows.ternary_embedding import (
    embedding_grad,
    embedding_rows,
    embedding_rows_native,
)
from arbcli.kernels.runtime.arguments import placed
from arbcli.verify.kernels.codec.decode_digits import (
    add_remainders,
    decode_digits_reference,
    rounded_float32,
)
from arbcli.verify.kernels.codec.packed import random_packed
from arbcli.verify.verification import Case, Gate, Timing, Verification


def embedding_rows_reference(ids: Tensor, packed: Packed) -> Tensor:
    """Compute `embedding_rows` by decoding the whole table."""
    table = decode_digits_reference(packed)
    return torch.stack([table[v] for v in ids.tolist()]) if len(ids) else table[:0]


def embedding_grad_reference(grad_y: Tensor, ids: Tensor, num_embeddings: int) -> Tensor:
    """Compute the reference result of `embedding_grad`, in float64."""
    grad = grad_y.new_zeros(num_embeddings, grad_y.shape[1], dtype=torch.float64)
    return grad.index_add_(0, ids, grad_y.double())


def _ids_cases(generator: torch.Generator) -> Iterator[tuple[str, Tensor, int]]:
    """Draw (label, ids, number of embeddings) with awkward ids."""
    yield "duplicates", torch.randint(0, 7, (40,), generator=generator), 11
    yield "one id", torch.full((150,), 3), 5
    yield "last id", torch.tensor([6, 0, 6]), 7
    yield "one row", torch.tensor([0]), 1
    few = torch.cat((torch.tensor([100, 2, 2]), torch.randint(0, 101, (72,), generator=generator)))
    yield "more rows than ids", few, 101
    yield "strided ids", torch.randint(0, 9, (66,), generator=generator)[::2], 9
    yield "no ids", torch.zeros(0, dtype=torch.int64), 4


def _rows_cases(device: torch.device, group_size: int) -> Iterator[Case]:
    generator = torch.Generator().manual_seed(0)
    dims = (33, 123, 165, 1, 5, 323, 40)
    for dim, (label, ids, rows) in zip(dims, _ids_cases(generator), strict=True):
        packed = random_packed(rows, dim, group_size, generator).to(device)
        yield Case(f"{len(ids)} of {rows}x{dim} {label}", (placed(ids, device), packed))
    packed = random_packed(14, 70, group_size, generator).to(device)
    ids = torch.tensor([6, 1, 6], device=device)
    yield Case("3 of 14x70 whole octaves", (ids, packed._replace(fraction=None)))
    yield Case("3 of 7x70 strided table", (ids, packed.rows(slice(None, None, 2))))
    for name, all_digits in add_remainders(packed, generator):
        yield Case(f"3 of 14x70 {name}", (ids, all_digits))


def _grad_cases(device: torch.device, _group_size: int) -> Iterator[Case]:
    generator = torch.Generator().manual_seed(1)
    dims = (33, 3, 64, 1, 31, 65, 40)
    for dim, (label, ids, rows) in zip(dims, _ids_cases(generator), strict=True):
        grad_y = torch.randn(len(ids), dim, generator=generator).to(device)
        yield Case(f"{len(ids)}x{dim} to {rows} {label}", (grad_y, placed(ids, device), rows))
    grad_y = torch.randn(35, 40, generator=generator).to(device).T[::2]
    ids = torch.randint(0, 6, (20,), generator=generator).to(device)
    yield Case("20x35 to 6 strided", (grad_y, ids, 6))
    if device.type == "cuda":  # the interpreter's bf16 arithmetic is wrong
        grad_y = torch.randn(8192, 768, generator=generator).to(device, torch.bfloat16)
        ids = torch.randn(8192, generator=generator).mul(20).add(128).clamp(0, 255).long()
        yield Case("8192x768 to 256 bf16", (grad_y, ids.to(device), 256))


def _rows_timings(device: torch.device, group_size: int) -> Iterator[Timing]:
    ids = torch.randint(256, (16384,), device=device)
    packed = random_packed(256, 2048, group_size, torch.Generator(device))
    yield Timing(
        "16384 of 256x2048 bf16", (ids, packed), peer=partial(embedding, ids, decode_weight(packed))
    )


def _grad_timings(device: torch.device, _group_size: int) -> Iterator[Timing]:
    ids = torch.randn(16384, device=device).mul(20).add(128).clamp(0, 255).long()
    grad_y = torch.randn(16384, 2048, device=device, dtype=torch.bfloat16)
    # the operation that autograd calls for torch's `embedding`; its sums are rounded to bf16
    peer = partial(torch.ops.aten.embedding_dense_backward, grad_y, ids, 256, -1, False)
    yield Timing("16384x2048 to 256 bf16", (grad_y, ids, 256), peer=peer)


embedding_rows_verification = Verification(
    embedding_rows, embedding_rows_reference, _rows_cases,
    triton=rounded_float32(embedding_rows.triton),
    torch=rounded_float32(embedding_rows.torch),
    native=rounded_float32(embedding_rows_native), sizes={"V": "n"}, scale_path=has_planes,
    timings=_rows_timings, values={"ids": (0, "V - 1"), "packed": {"spread": 127}},
)  # fmt: skip

embedding_grad_verification = Verification(
    embedding_grad, embedding_grad_reference, _grad_cases,
    Gate(relative=1e-6, reason="float32 sums of up to thousands of tokens"), timings=_grad_timings,
    values={"ids": (0, "n - 1"), "num_embeddings": ("n",)},
)  # fmt: skip
