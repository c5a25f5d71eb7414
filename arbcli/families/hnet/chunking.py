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
from arbcli.families.hnet.kernels.route_position import MIN_SHARE
from arbcli.families.hnet.kernels.smooth_chunks import smooth_chunks, smooth_chunks_backward
from arbcli.kernels.rows.table_rows import gather_rows
from arbcli.model.layers.kinds import layers_for


class Chunks(NamedTuple):
    """The chunks of B sequences of T positions, in C slots each."""

    first: Tensor
    """(B, C) int64: first position of each chunk; -1 in unused slots, which are the last ones."""
    owner: Tensor
    """(B, T) int64: slot of each position's chunk."""
    slot: Tensor
    """(B, T) int64: slot of the chunk that starts at a position; -1 if none does."""
    overflow: Tensor
    """(B,) int64: number of boundaries without a chunk, because all slots were used."""


def find_chunks(boundaries: Tensor, capacity: int) -> Chunks:
    """Assign the positions of sequences to chunks, in a fixed number of slots.

    A boundary starts the next chunk. The last slot takes all further chunks, so shapes do not
    depend on the text, and the host never waits for the device.

    Args:
        boundaries: (B, T) bool: whether a chunk starts. One always starts at 0.
        capacity: C, the number of slots per sequence; at least 1.
    """
    begins = boundaries.clone()
    begins[:, :1] = True
    counts = begins.long().cumsum(1)
    numbers = torch.arange(1, capacity + 1, device=counts.device).expand(len(counts), -1)
    first = torch.searchsorted(counts, numbers.contiguous())
    first = torch.where(first < counts.shape[1], first, -1)
    fits = counts <= capacity
    slot = torch.where(begins & fits, counts - 1, -1)
    owner = counts.clamp(max=capacity) - 1
    return Chunks(first, owner, slot, (begins & ~fits).sum(1))


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

    def __init__(self, spec: LayerSpec) -> None:
        super().__init__()
        options = {"area": "chunking", "spread": 0.0, "low_precision": False}
        self.query_key = layers_for(spec).linear(2 * spec.dim, spec.dim, spec, **options)

    def forward(self, x: Tensor) -> Routed:
        """Compute the chunk boundaries of a normalised stream, (B, T, D)."""
        p = _BoundaryScores.apply(x, self.query_key(x))
        return Routed(p, p > 0.5)


def route_every(length: int, positions: Tensor) -> Routed:
    """Begin a chunk at each multiple of `length` among positions, (B, T) int64."""
    begins = positions % length == 0
    return Routed(begins.float(), begins)


def route_words(ids: Tensor, last_byte: Tensor) -> Routed:
    """Begin a chunk at each byte after whitespace that is not whitespace itself.

    Args:
        ids: (B, T) int64 bytes.
        last_byte: (B, 1) int64, the byte before each sequence; negative at the beginning of a text,
            which always begins a chunk.
    """
    previous = torch.cat((last_byte, ids[:, :-1]), dim=1)
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


def spread_chunks(x: Tensor, s: Tensor, owner: Tensor) -> Tensor:
    """Add to every position the vector of its chunk, y[t] = x[t] + s[owner[t]], in float32.

    Args:
        x: (B, T, D) float32 or bfloat16.
        s: (B, C, D) float32.
        owner: (B, T) int64 in 0..C-1.

    Returns:
        (B, T, D) in the dtype of x.
    """
    # `out` rounds the float32 sum without storing it
    rows = s.flatten(0, 1).index_select(0, _row_indices(owner, s.shape[1]))
    return torch.add(x, rows.view(x.shape), out=torch.empty_like(x))


def spread_chunks_backward(grad_y: Tensor, s: Tensor, owner: Tensor) -> tuple[Tensor, Tensor]:
    """Compute gradients of `spread_chunks`, except that of x, which is `grad_y`.

    Returns:
        float32 gradients of s, (B, C, D), and, for a straight-through estimator, of a factor of 1
        of the chunk's vector at each position, (B, T).
    """
    total, indices = s.shape[0] * s.shape[1], _row_indices(owner, s.shape[1])
    rows = grad_y.float().flatten(0, 1)
    if rows.is_cuda:  # where `index_add_` sums in any order; positions are in order of chunks
        offsets = torch.searchsorted(indices, torch.arange(total + 1, device=s.device))
        grad_s = torch.segment_reduce(rows, "sum", offsets=offsets, unsafe=True, initial=0)
    else:
        grad_s = s.new_zeros(total, s.shape[2]).index_add_(0, indices, rows)
    products = s.flatten(0, 1).index_select(0, indices).mul_(grad_y.flatten(0, 1))
    return grad_s.view(s.shape), products.sum(dim=1).view(owner.shape)


def _row_indices(owner: Tensor, capacity: int) -> Tensor:
    """Number the chunks of all sequences: (B T,) int64 row of each position's chunk."""
    sequences = torch.arange(len(owner), device=owner.device)[:, None]
    return (owner + sequences * capacity).flatten()


def share_of(p: Tensor) -> Tensor:
    """Clamp probabilities of any shape to `MIN_SHARE`..1 - `MIN_SHARE`.

    They are the boundary probabilities of the first positions of chunks.
    """
    return p.clamp(MIN_SHARE, 1 - MIN_SHARE)


class _BoundaryScores(Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, qk: Tensor) -> Tensor:
        ctx.save_for_backward(x, qk)
        return boundary_scores(x, qk)

    @staticmethod
    def backward(ctx: Any, grad_p: Tensor) -> tuple[Tensor | None, ...]:
        return boundary_scores_backward(grad_p, *ctx.saved_tensors)


def _gather(x: Tensor, index: Tensor) -> Tensor:
    """Gather positions of each sequence: (B, R, D), zeros where an index, (B, R), is -1."""
    starts = torch.arange(len(x), device=x.device)[:, None] * x.shape[1]
    rows = torch.where(index < 0, -1, index + starts)
    values = gather_rows(x.contiguous().view(torch.uint8).flatten(0, 1), rows.flatten())
    return values.view(x.dtype).view(*index.shape, x.shape[2])


class _TakeChunks(Function):
    """A chunk starts at each position at most once, so the backward gathers, too."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, chunks: Chunks) -> Tensor:
        ctx.save_for_backward(chunks.slot)
        return _gather(x, chunks.first)

    @staticmethod
    def backward(ctx: Any, grad_y: Tensor) -> tuple[Tensor | None, ...]:
        return _gather(grad_y, *ctx.saved_tensors), None


class _Spread(Function):
    @staticmethod
    def forward(ctx: Any, z: Tensor, p: Tensor, residual: Tensor, chunks: Chunks) -> Tensor:
        chunk_scores = p.gather(1, chunks.first.clamp(min=0))
        share = share_of(chunk_scores)
        s = smooth_chunks(z, share)
        ctx.save_for_backward(z, share, s, chunks.owner, chunks.slot)
        # clamped probabilities have no gradient
        ctx.clamped = chunk_scores != share if ctx.needs_input_grad[1] else None
        return spread_chunks(residual, s, chunks.owner)

    @staticmethod
    def backward(ctx: Any, grad_y: Tensor) -> tuple[Tensor | None, ...]:
        z, share, s, owner, slot = ctx.saved_tensors
        grad_s, grad_c = spread_chunks_backward(grad_y, s, owner)
        grad_z, grad_share = smooth_chunks_backward(grad_s, z, share, s)
        grad_p = None
        if ctx.needs_input_grad[1]:
            grad_share = grad_share.masked_fill(ctx.clamped, 0)
            grad_first = grad_c + grad_share.gather(1, slot.clamp(min=0))
            grad_p = torch.where(slot >= 0, grad_first, -grad_c)
        return grad_z, grad_p, grad_y, None
