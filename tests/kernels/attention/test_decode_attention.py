"""One query against a ring: what the cases of the spec do not say."""

import pytest
import torch

from arbcli.kernels.attention import decode_attention as module
from arbcli.kernels.attention.decode_attention import (
    DECODE_ATTENTION,
    DECODE_ATTENTION_8BIT,
    decode_attention,
)
from arbcli.kernels.runtime.backend import use_backend
from arbcli.verify.compare import as_tuple, compare
from arbcli.verify.kernels import copies

BACKENDS = ("torch", "triton" if torch.cuda.is_available() else "interpreter")


def inputs(device, heads=2, window=70, width=12, position=30) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    sizes = ((3, heads, width), (heads, window, width), (heads, window, width))
    parts = [torch.randn(size, generator=generator).to(device) for size in sizes]
    angle = torch.randn(300, width // 2, generator=generator).to(device)
    position = torch.tensor(position, dtype=torch.int32, device=device)
    semaphores = torch.zeros(heads, dtype=torch.int32, device=device)
    return [*parts, position, angle.cos(), angle.sin(), semaphores]


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("position", [5, 69, 70, 200])
def test_only_the_bytes_in_the_window_matter(position, backend, device):
    """Slots that are not written yet, and the one that is overwritten, may hold anything."""
    results = []
    for rubbish in (0.0, 1e6):
        parts = inputs(device, position=position)
        for ring in parts[1:3]:
            ring[:, position % 70] = rubbish
            ring[:, position + 1 :] = rubbish
        with use_backend(backend):
            results.append(decode_attention(*parts, 1e-6))
    assert torch.equal(*results)


@pytest.mark.parametrize("spec", [DECODE_ATTENTION, DECODE_ATTENTION_8BIT], ids=lambda s: s.name)
def test_programs_that_have_several_blocks(spec, device, monkeypatch):
    """As in a ring of 16,384 slots; a program's blocks end before, at and after a slot."""
    monkeypatch.setattr(module, "PROGRAMS", 4)
    monkeypatch.setattr(module, "SLOTS", 8)
    for case in spec.cases(torch.device("cpu"), 32):
        inputs = [part.to(device) if torch.is_tensor(part) else part for part in case.inputs]
        wanted = as_tuple(spec.reference(*copies(inputs)))
        with use_backend(BACKENDS[1]):
            got = as_tuple(spec.triton(*copies(inputs)))
        for result, expected in zip(got, wanted, strict=True):
            assert compare(spec, case.label, result, expected).passed, case.label


def test_tiles_of_a_text_do_not_depend_on_how_many_there_are(device, monkeypatch):
    """With few programs a head has fewer of them the more heads there are."""
    monkeypatch.setattr(module, "PROGRAMS", 8)
    qkv, keys, values, _, cos, sin, semaphores = inputs(device, window=200)
    found = []
    for texts in (2, 7):
        several = [
            torch.stack([part * (1 + text) for text in range(texts)])
            for part in (qkv, keys, values)
        ]
        position = torch.full((texts,), 180, dtype=torch.int32, device=device)
        with use_backend(BACKENDS[1]):
            y = decode_attention(*several, position, cos, sin, semaphores.repeat(texts, 1), 1e-6)
        found.append(y[:2])
    assert torch.equal(*found)
