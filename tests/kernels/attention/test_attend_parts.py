"""Attention of a byte in parts: what the cases of the spec do not say."""

from contextlib import nullcontext

import pytest
import torch

from arbcli.kernels.attention.attend_parts import PASSES, attend_parts, sharing
from arbcli.kernels.runtime.backend import use_backend
from arbcli.kernels.runtime.overlap import overlapping


def inputs(device, heads=1, window=100, width=128, position=99) -> list:
    generator = torch.Generator().manual_seed(0)
    sizes = ((3, heads, width), (heads, window, width), (heads, window, width))
    parts = [torch.randn(size, generator=generator).bfloat16().to(device) for size in sizes]
    angle = torch.randn(300, width // 2, generator=generator).to(device)
    position = torch.tensor(position, dtype=torch.int32, device=device)
    return [*parts, position, angle.cos(), angle.sin(), 1e-6]


@pytest.mark.parametrize("width", [64, 128])
def test_parts_are_few_however_long_the_ring(width):
    for window in (1, 96, 97, 1535, 1536, 1537, 3073, 2**24):
        for max_parts in (1, 16):
            parts, passes, span = sharing(window, width, max_parts)
            assert 1 <= parts <= max_parts
            assert span == passes * 2048 // width
            assert (parts - 1) * span < window
            assert window <= parts * span or (parts, passes) == (max_parts, PASSES[1])


@pytest.mark.gpu
def test_steps_that_overlap_give_the_same_bits():
    """Of two rings, whose new bytes follow each other as in two blocks, in many steps."""
    outputs = []
    for context in (nullcontext, overlapping):
        rings = [inputs("cuda", heads=16, window=180, position=150) for _ in range(2)]
        position = rings[0][3]
        with context(), use_backend("triton"):
            for _ in range(60):
                for ring in rings:
                    parts = attend_parts(*ring[:3], position, *ring[4:])
                position += 1
                outputs.append(parts.combine())
    assert all(map(torch.equal, outputs[:60], outputs[60:]))
