"""Attention to compressed positions against a softmax in float64: cosines, by width and length.

Texts of up to 16,384 bytes are read whole on a GPU, and their last bytes on a CPU.
"""

import pytest
import torch
from torch.nn import functional

from arbcli.families.compressed.kernels.compressed_attention import Sight, compressed_attention
from arbcli.families.compressed.kernels.decode_compressed import decode_compressed
from arbcli.families.compressed.verify.compressed_attention import (
    compressed_attention_reference,
    random_sight,
)
from arbcli.kernels.runtime.backend import use_backend

WIDTHS = [64, 128, 512]
DTYPES = {torch.float32: 0.999993, torch.bfloat16: 0.9999}
KINDS = {"chosen": (4, 7), "all": (128, 0)}
"""Bytes of an entry, and how many entries are chosen; 0 is all."""
LONG = 16384
SAMPLED = 64
"""Queries of a text that are compared, at most."""


def in_float64(inputs: tuple, places: torch.Tensor) -> torch.Tensor:
    """Attend with the queries at some places, each as if it came alone: (B, n, H, d)."""
    x, recent, entries, chosen, sink, cos, sin, sight = inputs
    lead, rows = recent.shape[1] - x.shape[1], []
    for t in places.tolist():
        here, at = slice(t, t + 1), sight._replace(start=sight.start + t)
        group = at.group(0) - sight.group(0)
        of_group = None if chosen is None else chosen[:, group : group + 1]
        vectors = x[:, here], recent[:, : lead + t + 1], entries, of_group
        y, *_ = compressed_attention_reference(*vectors, sink, cos[here], sin[here], at, 1e-6)
        rows.append(y)
    return torch.cat(rows, dim=1)


def drawn(width: int, length: int, kind: str, dtype: torch.dtype, start: int, device) -> tuple:
    """Draw four heads and two of keys, after `start` bytes."""
    m, top_k = KINDS[kind]
    generator = torch.Generator().manual_seed(width + length)
    sight = Sight(100, m, LONG // m, start)
    kept = min(start, 99)
    *parts, sight = random_sight(generator, sight, 1, length, kept, (4, 2, width, top_k))
    real = [part.to(device, dtype) for part in parts[:3]]
    rest = [None if part is None else part.to(device) for part in parts[3:]]
    return *real, *rest, sight


def cosine_of(got: torch.Tensor, wanted: torch.Tensor) -> float:
    return float(functional.cosine_similarity(got.double().flatten(), wanted.flatten(), 0))


def check(width, length, kind, dtype, start, device) -> None:
    inputs = drawn(width, length, kind, dtype, start, device)
    places = torch.linspace(0, length - 1, min(length, SAMPLED), device=device).long()
    got = compressed_attention(*inputs, 1e-6)[0][:, places]
    wanted = in_float64(inputs, places)
    assert cosine_of(got, wanted) >= DTYPES[dtype]
    by_byte = functional.cosine_similarity(got.double().flatten(2), wanted.flatten(2), dim=2)
    assert by_byte.min() >= DTYPES[dtype] - 1e-4  # no byte is hidden by the others


@pytest.mark.gpu
@pytest.mark.parametrize("length", [1, 33, 1311, 4099, LONG])
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("width", WIDTHS)
def test_kernel_is_close_to_float64_at_all_lengths(width, dtype, kind, length, device):
    check(width, length, kind, dtype, 0, device)


@pytest.mark.parametrize(
    ("width", "dtype", "kind"),
    [(64, torch.float32, "all"), (128, torch.bfloat16, "chosen"), (512, torch.float32, "chosen")],
)
def test_one_byte_at_the_end_is_close_to_float64(width, dtype, kind, device):
    on_gpu = device.type == "cuda"
    inputs = drawn(width, 1, kind, dtype, LONG - 1, device)
    x, recent, entries, chosen, sink, cos, sin, sight = inputs
    ring = torch.roll(recent[0], LONG % 100, 0).contiguous()  # where bytes are in it
    slots = functional.pad(entries[0], (0, 0, 0, 0, 0, 1))
    table = [part.expand(LONG, -1).contiguous() for part in (cos, sin)]
    position = torch.tensor(LONG - 1, dtype=torch.int32, device=device)
    semaphores = torch.zeros(4, dtype=torch.int32, device=device)
    choice = None if chosen is None else chosen[0, -1].contiguous()
    about = (sink, position, *table, semaphores, sight.ratio, sight.max_entries, 1e-6)
    with use_backend("triton" if on_gpu else "torch"):
        got = decode_compressed(x[0, 0].contiguous(), ring, slots, choice, *about)
    wanted = in_float64(inputs, torch.zeros(1, dtype=torch.int64))
    assert cosine_of(got, wanted[0, 0]) >= DTYPES[dtype]
