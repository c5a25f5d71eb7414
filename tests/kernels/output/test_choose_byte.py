"""Choices among more tokens than the cases of the spec have."""

import pytest
import torch

from arbcli.kernels.output.choose_byte import choose_byte_
from arbcli.verify.kernels.output.choose_byte import choose_byte_reference


@pytest.mark.parametrize(
    ("kind", "how"),
    [("random", (0.0, 9, 1.0)), ("some equal", (0.0, 9, 1.0)), ("random", (1.0, 3000, 1.0)),
     ("some equal", (0.7, 5, 1.0)), ("random", (4.0, 900, 0.3))],
)  # fmt: skip
def test_token_of_many_equals_that_of_the_reference(kind, how, device):
    logits = 3 * torch.randn(3000, generator=torch.Generator().manual_seed(1))
    logits = logits.round() if kind == "some equal" else logits
    key, place = torch.tensor([12345, 2], dtype=torch.int32).unbind()
    byte, text = torch.zeros(1, dtype=torch.int64), torch.zeros(4, dtype=torch.int32)
    wanted = choose_byte_reference(byte, text, logits, place, key, *how)
    got = [tensor.to(device) for tensor in (byte, text, logits, place, key)]
    choose_byte_(*got, *how)
    assert torch.equal(got[0].cpu(), wanted[0])
    assert torch.equal(got[1].cpu(), wanted[1])


def test_token_that_crosses_the_share_is_among_those_of_many_that_are_kept(device):
    """Of shares 0.4, 0.4 and 0.2 a half is the first two."""
    logits = torch.full((1000,), -torch.inf, device=device)
    logits[torch.tensor([900, 7, 500])] = torch.tensor([0.4, 0.4, 0.2], device=device).log()
    key, byte = (torch.zeros(1, dtype=kind, device=device) for kind in (torch.int32, torch.int64))
    text = torch.zeros(60, dtype=torch.int32, device=device)
    for place in torch.arange(len(text), dtype=torch.int32, device=device):
        choose_byte_(byte, text, logits, place, key[0], 1.0, 1000, 0.5)
    assert set(text.tolist()) == {7, 900}
