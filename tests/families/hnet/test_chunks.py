"""Chunks by hand: where they begin, what they hold, and what the kernels refuse."""

import pytest
import torch

from arbcli.families.hnet.kernels.find_chunks import find_chunks
from arbcli.families.hnet.kernels.route_position import route_position_, take_chunk_
from arbcli.families.hnet.kernels.smooth_chunks import smooth_chunks, smooth_chunks_backward
from arbcli.families.hnet.kernels.spread_chunks import spread_chunks_backward
from arbcli.kernels.runtime.backend import use_backend

KERNEL_BACKEND = "triton" if torch.cuda.is_available() else "interpreter"
each_backend = pytest.mark.parametrize("backend", [KERNEL_BACKEND, "torch"])


@each_backend
def test_whole_chain_has_the_gradients_of_plain_torch(backend, device):
    generator = torch.Generator().manual_seed(0)
    z, p = torch.randn(2, 4, 5, generator=generator), torch.rand(2, 4, generator=generator)
    x, grad_y = (torch.randn(2, 9, 5, generator=generator) for _ in range(2))
    marks = torch.rand(2, 9, generator=generator) < 0.3
    z, p, x, grad_y, marks = (part.to(device) for part in (z, p, x, grad_y, marks))
    with use_backend(backend):
        chunks = find_chunks(marks, 4)
        s = smooth_chunks(z, p)
        grad_s, grad_c = spread_chunks_backward(grad_y, s, chunks.owner, chunks.first)
        found = *smooth_chunks_backward(grad_s, z, p, s), grad_c
    leaves = [part.double().requires_grad_() for part in (z, p, torch.ones_like(x[..., 0]))]
    means, last = [], 0
    for j in range(4):
        last = leaves[1][:, j, None] * leaves[0][:, j] + (1 - leaves[1][:, j, None]) * last
        means.append(last)
    rows = torch.arange(2, device=device)[:, None]
    y = x + leaves[2][..., None] * torch.stack(means, dim=1)[rows, chunks.owner]
    y.backward(grad_y.double())
    for got, leaf in zip(found, leaves, strict=True):
        torch.testing.assert_close(got.double(), leaf.grad, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(
    ("router", "text", "wanted"),
    [
        ("every", b"abcdefg", [1, 0, 0, 1, 0, 0, 1]),
        ("space", b"a b\n cd", [1, 0, 1, 0, 0, 1, 0]),
        ("learned", b"aaba bb", [1, 0, 1, 1, 1, 1, 0]),
    ],
)
def test_positions_of_a_text_are_routed_one_by_one(router, text, wanted, device):
    """Vectors of letters are at right angles, so p is 1/2 where they change, and 0 elsewhere."""
    like = {"device": device}
    mean, last = torch.tensor([1.0, 2.0, 3.0], **like), torch.zeros(6, **like)
    byte = torch.zeros(1, 1, dtype=torch.int64, **like)
    encoder, decoder = torch.zeros(2, dtype=torch.int32, **like).unbind()
    vectors = 5 * torch.eye(3, **like)[[b" abcdefg\n".index(each) % 3 for each in text]]
    begun = []
    for x, letter in zip(vectors, text, strict=True):
        # a little of what is against the vector itself makes p more than a half
        rows = torch.cat([-0.01 * x.sum() * torch.ones(3, **like), 0 * x, x])
        rows = rows if router == "learned" else x
        ids = torch.full_like(byte, letter)
        about = (mean, last, byte, ids, encoder, decoder, 3, 1e-6)
        _, begins, y = route_position_(router, x.contiguous(), rows, *about)
        begun.append(int(begins))
        assert torch.equal(y, x + mean)
        assert (int(encoder), int(decoder)) == (len(begun), len(begun) - 1)
    assert begun == wanted


def test_chunk_of_a_position_is_smoothed_in(device):
    z, residual, mean, y = torch.ones(4, 2, device=device).unbind()
    mean, position = 3 * mean, torch.tensor(4, dtype=torch.int32, device=device)
    take_chunk_(z, torch.tensor([0.75], device=device), 2 * residual, mean, y, position)
    assert (mean.tolist(), y.tolist(), int(position)) == ([1.5, 1.5], [3.5, 3.5], 5)
    take_chunk_(z, torch.zeros(1, device=device), residual, mean, y)
    torch.testing.assert_close(mean, torch.full_like(mean, 1.5 - 0.5e-4))
