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
from arbcli.verify.kernels.codec.decode_digits import (
    decode_digits_reference,
    rounded_float32,
)
from arbcli.verify.kernels.codec.packed import random_packed
from arbcli.verify.verification import Gate, Timing, Verification, filled, nothing


def embedding_rows_reference(ids: Tensor, packed: Packed) -> Tensor:
    """Compute `embedding_rows` by decoding the whole table."""
    table = decode_digits_reference(packed)
    return torch.stack([table[v] for v in ids.tolist()]) if len(ids) else table[:0]


def embedding_grad_reference(grad_y: Tensor, ids: Tensor, num_embeddings: int) -> Tensor:
    """Compute the reference result of `embedding_grad`, in float64."""
    grad = grad_y.new_zeros(num_embeddings, grad_y.shape[1], dtype=torch.float64)
    return grad.index_add_(0, ids, grad_y.double())


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


def _many(ids: Tensor) -> Tensor:
    """Return so many strided ids that the whole table is decoded."""
    return torch.arange(300, device=ids.device).remainder(17)[::3]


embedding_rows_verification = Verification(
    embedding_rows, embedding_rows_reference,
    changed={"no ids": {"ids": nothing}, "one id": {"ids": filled(3)}, "many": {"ids": _many}},
    triton=rounded_float32(embedding_rows.triton),
    torch=rounded_float32(embedding_rows.torch),
    native=rounded_float32(embedding_rows_native), sizes={"V": "n"}, scale_path=has_planes,
    timings=_rows_timings, values={"ids": (0, "V - 1"), "packed": {"spread": 127}},
)  # fmt: skip

embedding_grad_verification = Verification(
    embedding_grad, embedding_grad_reference,
    gate=Gate(relative=1e-6, reason="float32 sums of up to thousands of tokens"),
    shapes=((150, 5, 33),),
    changed={"no ids": {"ids": nothing, "grad_y": nothing}, "one id": {"ids": filled(3)}},
    timings=_grad_timings,
    values={"ids": (0, "n - 1"), "num_embeddings": ("n",)},
)  # fmt: skip
