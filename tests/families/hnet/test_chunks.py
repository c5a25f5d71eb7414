"""Chunks by hand: where they begin, what they hold, and what the kernels refuse."""

import pytest
import torch

from arbcli.families.hnet.kernels.route_position import route_position_


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
