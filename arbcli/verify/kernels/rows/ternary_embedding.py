"""Verification of `arbcli.kernels.rows.ternary_embedding`."""

from functools import partial

import torch
from torch import Tensor
from torch.nn.functional import embedding

from arbcli.kernels.codec.decode_weight import decode_weight
from arbcli.kernels.codec.packed import Packed
from arbcli.kernels.codec.packing import has_planes
from arbcli.kernels.rows import ternary_embedding
from arbcli.verify.kernels.codec.decode_digits import decode_digits_reference, rounded_float32
from arbcli.verify.verification import Gate, Verification, filled, no_rows


def embedding_rows_reference(ids: Tensor, packed: Packed) -> Tensor:
    """Compute `embedding_rows` by decoding the whole table."""
    table = decode_digits_reference(packed)
    return torch.stack([table[v] for v in ids.tolist()]) if len(ids) else table[:0]


def embedding_grad_reference(grad_y: Tensor, ids: Tensor, num_embeddings: int) -> Tensor:
    """Compute the reference result of `embedding_grad`, in float64."""
    grad = grad_y.new_zeros(num_embeddings, grad_y.shape[1], dtype=torch.float64)
    return grad.index_add_(0, ids, grad_y.double())


def _many_ids(ids: Tensor) -> Tensor:
    """Return enough strided ids that the whole table is decoded."""
    return torch.arange(300, device=ids.device).remainder(17)[::3]


embedding_rows_verification = Verification(
    ternary_embedding.embedding_rows, embedding_rows_reference,
    changed={"no ids": {"ids": no_rows}, "one id": {"ids": filled(3)}, "many": {"ids": _many_ids}},
    triton=rounded_float32(ternary_embedding.embedding_rows.triton),
    torch=rounded_float32(ternary_embedding.embedding_rows.torch),
    native=rounded_float32(ternary_embedding.embedding_rows_native), sizes={"V": "n"},
    library=lambda ids, packed: partial(embedding, ids, decode_weight(packed)),
    scale_path=has_planes, looked_up="packed",
    values={"ids": (0, "V - 1"), "packed": {"spread": 127}},
)  # fmt: skip

embedding_grad_verification = Verification(
    ternary_embedding.embedding_grad, embedding_grad_reference,
    gate=Gate(relative=1e-6, reason="float32 sums of up to thousands of tokens"),
    shapes=((150, 5, 33),),
    changed={"no ids": {"ids": no_rows, "grad_y": no_rows}, "one id": {"ids": filled(3)}},
    values={"ids": (0, "n - 1"), "num_embeddings": ("n",)},
)  # fmt: skip
