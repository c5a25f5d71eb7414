"""Dynamic chunking of H-Net: boundaries, selection of chunks, and dechunking.

    p[t] = (1 - cos(q[t - 1], k[t])) / 2,   b[t] = p[t] > 1/2,   p[0] = 1                    (4)
    inputs of the main network: the positions with b = 1
    s[j] = P[j] z[j] + (1 - P[j]) s[j - 1],   P the p of a chunk's first position            (5)
    c[t] = p[t] where b[t] = 1, else 1 - p[t]                                                (6)
    y[t] = STE(c[t]) s[chunk of t] + R(x[t]),   STE(c) = 1 with the gradient of c         (7, 8)
    ratio loss = N / (N - 1) ((N - 1) F G + (1 - F) (1 - G)),   F = mean b, G = mean p      (10)

The numbers are those of the source; z is the output of the main network. A boundary without a free
slot does not begin a chunk: its position belongs to the previous chunk, and its c is 1 - p.

Source: S. Hwang et al., "Dynamic Chunking for End-to-End Hierarchical Sequence Modeling",
https://arxiv.org/abs/2507.07955.
"""

from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.autograd import Function

from arbcli.config.layer_spec import LayerSpec
from arbcli.families.hnet.kernels.boundary_scores import boundary_scores, boundary_scores_backward
from arbcli.families.hnet.kernels.find_chunks import Chunks
from arbcli.families.hnet.kernels.gather_chunks import gather_chunks
from arbcli.families.hnet.kernels.route_position import LEAST_SHARE
from arbcli.families.hnet.kernels.smooth_chunks import smooth_chunks, smooth_chunks_backward
from arbcli.families.hnet.kernels.spread_chunks import spread_chunks, spread_chunks_backward
from arbcli.model.layers.kinds import layers_for


class Routed(NamedTuple):
    """Boundaries of chunks in sequences of T positions."""

    p: Tensor
    """(B, T) float32, probability of a boundary."""
    begins: Tensor
    """(B, T) bool, whether a chunk begins."""


class BoundaryRouter(nn.Module):
    """Predicts boundaries from the cosine similarity of projected neighbours.

    The projections are the identity plus packed weights that are initially zero. A packed identity
    would have scales of 1, so that the first off-diagonal trit to change would weigh as much as the
    diagonal.
    """

    def __init__(self, site: LayerSpec) -> None:
        super().__init__()
        options = {"area": "chunking", "spread": 0.0, "low_precision": False}
        self.query_key = layers_for(site).linear(2 * site.dim, site.dim, site, **options)

    def forward(self, x: Tensor) -> Routed:
        """Compute the chunk boundaries of a normalised stream, (B, T, D)."""
        p = _BoundaryScores.apply(x, self.query_key(x))
        return Routed(p, p > 0.5)


def route_every(length: int, positions: Tensor) -> Routed:
    """Begin a chunk at each multiple of `length` among positions, (B, T) int64."""
    begins = positions % length == 0
    return Routed(begins.float(), begins)


def route_words(ids: Tensor, before: Tensor) -> Routed:
    """Begin a chunk at each byte after whitespace that is not whitespace itself.

    Args:
        ids: (B, T) int64 bytes.
        before: (B, 1) int64, the byte before each sequence; negative at the beginning of a text,
            which always begins a chunk.
    """
    previous = torch.cat((before, ids[:, :-1]), dim=1)
    begins = (previous < 0) | (_are_spaces(previous) & ~_are_spaces(ids))
    return Routed(begins.float(), begins)


def _are_spaces(ids: Tensor) -> Tensor:
    """Return a mask of ASCII whitespace: space, tab, line and page breaks."""
    return (ids == 32) | ((ids >= 9) & (ids < 14))


def ratio_loss(routed: Routed, length: int, valid: Tensor | None) -> Tensor:
    """Compute the ratio loss, a scalar that is 1 for chunks of `length` positions on average.

    Args:
        routed: boundaries of all sequences.
        length: target length N.
        valid: (B, T) bool mask of the positions; None for all.
    """
    p, begins = routed.p, routed.begins.float()
    if valid is None:
        f, g = begins.mean(), p.mean()
    else:
        count = valid.sum()
        f, g = (begins * valid).sum() / count, (p * valid).sum() / count
    return length / (length - 1) * ((length - 1) * f * g + (1 - f) * (1 - g))


def take_chunks(x: Tensor, chunks: Chunks) -> Tensor:
    """Select the first position of each chunk from (B, T, D): (B, C, D), zeros in empty slots."""
    return _TakeChunks.apply(x, chunks)


def spread(z: Tensor, p: Tensor, residual: Tensor, chunks: Chunks) -> Tensor:
    """Smooth the chunks' outputs, and add each position's chunk to its residual.

    Args:
        z: (B, C, D), outputs of the main network.
        p: (B, T) float32, boundary probabilities.
        residual: (B, T, D) in the dtype of z.
        chunks: chunks of the positions.

    Returns:
        (B, T, D).
    """
    return _Spread.apply(z, p, residual, chunks)


def share_of(p: Tensor) -> Tensor:
    """Clamp the boundary probability of a chunk's first position away from 0 and 1."""
    return p.clamp(LEAST_SHARE, 1 - LEAST_SHARE)


class _BoundaryScores(Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, qk: Tensor) -> Tensor:
        ctx.save_for_backward(x, qk)
        return boundary_scores(x, qk)

    @staticmethod
    def backward(ctx: Any, grad_p: Tensor) -> tuple[Tensor | None, ...]:
        return boundary_scores_backward(grad_p, *ctx.saved_tensors)


class _TakeChunks(Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, chunks: Chunks) -> Tensor:
        ctx.save_for_backward(chunks.slot)
        return gather_chunks(x, chunks.first)

    @staticmethod
    def backward(ctx: Any, grad_y: Tensor) -> tuple[Tensor | None, ...]:
        return gather_chunks(grad_y, *ctx.saved_tensors), None


class _Spread(Function):
    @staticmethod
    def forward(ctx: Any, z: Tensor, p: Tensor, residual: Tensor, chunks: Chunks) -> Tensor:
        chunk_scores = p.gather(1, chunks.first.clamp(min=0))
        share = share_of(chunk_scores)
        s = smooth_chunks(z, share)
        ctx.save_for_backward(z, share, s, *chunks[:3])
        # clamped probabilities have no gradient
        ctx.clamped = chunk_scores != share if ctx.needs_input_grad[1] else None
        return spread_chunks(residual, s, chunks.owner)

    @staticmethod
    def backward(ctx: Any, grad_y: Tensor) -> tuple[Tensor | None, ...]:
        z, share, s, first, owner, slot = ctx.saved_tensors
        grad_s, grad_c = spread_chunks_backward(grad_y, s, owner, first)
        grad_z, grad_share = smooth_chunks_backward(grad_s, z, share, s)
        grad_p = None
        if ctx.needs_input_grad[1]:
            grad_share = grad_share.masked_fill(ctx.clamped, 0)
            grad_first = grad_c + grad_share.gather(1, slot.clamp(min=0))
            grad_p = torch.where(slot >= 0, grad_first, -grad_c)
        return grad_z, grad_p, grad_y, None
