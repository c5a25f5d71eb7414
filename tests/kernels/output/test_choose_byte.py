"""Bytes are chosen as often as they ought to be, and only those that are kept."""

import pytest
import torch

from arbcli.kernels.output.choose_byte import choose_byte_
from arbcli.verify.kernels.output.choose_byte import choose_byte_reference


def chosen(logits: torch.Tensor, *how, count: int) -> torch.Tensor:
    """Count the bytes that are chosen at each of many positions."""
    place = {"dtype": torch.int32, "device": logits.device}
    key, positions = torch.tensor(12345, **place), torch.arange(count, **place)
    byte = torch.zeros(1, dtype=torch.int64, device=logits.device)
    text = torch.zeros(count, dtype=torch.uint8, device=logits.device)
    for position in positions:
        choose_byte_(byte, text, logits, position, key, *how)
    assert int(byte) == int(text[-1])
    return text.long().bincount(minlength=256)


def logits_of(device, spread: float = 3.0) -> torch.Tensor:
    return spread * torch.randn(256, generator=torch.Generator().manual_seed(0)).to(device)


def test_bytes_come_as_often_as_their_probabilities_say(device):
    temperature, count, logits = 2.0, 1500, logits_of(device)
    share = (logits.double() / temperature).softmax(0)
    counts = chosen(logits, temperature, 256, 1.0, count=count)
    deviation = (counts - count * share) / (count * share * (1 - share)).sqrt().clamp(min=1)
    assert deviation.abs().max() < 5
    assert deviation.square().mean() < 1.5


@pytest.mark.parametrize(("p", "top_k"), [(0.3, 5), (0.8, 256)])
def test_top_p_keeps_the_fewest_that_reach_the_share(p, top_k, device):
    logits = logits_of(device)
    order = logits.argsort(descending=True)[:top_k]
    share = logits[order].double().softmax(0).cumsum(0)
    kept = order[: int((share < p).sum()) + 1]
    counts = chosen(logits, 1.0, top_k, p, count=500)
    assert set(counts.nonzero()[:, 0].tolist()) <= set(kept.tolist())
    assert counts[kept[-1]] > 0


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
