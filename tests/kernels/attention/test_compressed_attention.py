"""Compressed attention of wide heads in parts, and how closely its gradients agree in bf16."""

from functools import partial

import pytest
import torch
from marks import needs_triton
from torch import Tensor

from arbcli.kernels.attention.choose_entries import choose_entries
from arbcli.kernels.attention.compressed_attention import (
    Sight,
    compressed_attention,
    random_sight,
    tiling,
)
from arbcli.kernels.attention.compressed_attention_backward import (
    compressed_attention_backward,
    rounded_attention_gradients,
)
from arbcli.kernels.runtime._triton import HAS_TRITON
from arbcli.kernels.runtime.backend import use_backend
from arbcli.verify.compare import compare


def drawn(shape: tuple, length: int, dtype: torch.dtype, device: torch.device) -> tuple:
    """Draw what the backward is given, of a text of one."""
    generator = torch.Generator().manual_seed(0)
    parts = random_sight(generator, Sight(5, 4, 99), 1, length, 0, shape)
    parts = [part.to(device) if isinstance(part, Tensor) else part for part in parts]
    inputs = (*(part.to(dtype) for part in parts[:3]), *parts[3:], 1e-6)
    grad = torch.randn(inputs[0].shape, generator=generator).to(device, dtype)
    y, logs, *_ = compressed_attention.torch(*inputs)
    return grad, y, logs, *inputs


@pytest.mark.skipif(not HAS_TRITON, reason="needs triton")
def test_wide_heads_are_shared_among_programs(device):
    """The parts of a group add up: its shares, and what its entries are handed."""
    given = drawn((9, 1, 264, 2), 6, torch.float32, device)
    tile = tiling(given[3], given[4], given[6], given[10])
    assert (tile.rows, tile.parts) == (16, 4)
    for spec, inputs in ((compressed_attention, given[3:]), (compressed_attention_backward, given)):
        for found, wanted in zip(spec.triton(*inputs), spec.torch(*inputs), strict=True):
            torch.testing.assert_close(found, wanted, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("top_k", [5, 0])
def test_gradients_in_bf16_may_be_off_by_their_roundings_alone(top_k):
    given = drawn((4, 2, 32, top_k), 41, torch.bfloat16, torch.device("cpu"))
    spec = compressed_attention_backward
    peers, wanted = rounded_attention_gradients(*given), spec.reference(*given)
    for peer, expected in zip(peers, wanted, strict=True):
        assert compare(spec, "", peer, expected, peer).passed
        assert not compare(spec, "", 1.02 * expected, expected, peer).passed
    close = rounded_attention_gradients(*(
        part.float() if isinstance(part, Tensor) and part.dtype == torch.bfloat16 else part
        for part in given
    ))  # fmt: skip
    of_x, *others = (
        compare(spec, "", *both).relative_error for both in zip(peers, close, strict=True)
    )
    assert 0.002 < of_x < 0.005
    assert max(others) < 0.005


@needs_triton
@pytest.mark.parametrize("first", [1, 2, 3, 17, 18])
def test_last_entry_that_a_tile_of_groups_sees_is_scored(first, device, monkeypatch):
    """Each entry is better than those before it, so that every group takes its last one."""
    groups, entries = 19, 40
    q, w = torch.ones(1, groups, 1, 4, device=device), torch.ones(1, groups, 1, device=device)
    k = torch.arange(1.0, entries + 1, device=device)[None, :, None].expand(1, -1, 4).contiguous()
    # what is not written has no score
    empty = partial(torch.full, fill_value=-2)
    monkeypatch.setattr(torch, "empty", lambda *size, **how: empty(size, **how))
    with use_backend("triton" if device.type == "cuda" else "interpreter"):
        chosen = choose_entries(q, w, k, first, 99, 1)
    assert chosen[0, :, 0].tolist() == [*range(first - 1, first - 1 + groups)]
