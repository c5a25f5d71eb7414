"""The model of the CUDA allocator does what torch's own did, and what follows from its rules."""

from base64 import b85decode
from contextlib import ExitStack
from pathlib import Path
from zlib import decompress

import pytest

from arbcli.inspect.allocator import Allocator, segment_bytes

MIB = 2**20
RECORDED = Path(__file__).parent / "recorded_tiny.txt"
"""What torch 2.11 allocated on an H200 from the start of `tiny`, batch 16, to its captured step:
a size, or minus how many allocations ago what is freed was made; `c` where the capture begins."""


@pytest.mark.parametrize(
    ("size", "expected"),
    [
        (512, 2 * MIB), (MIB, 2 * MIB), (MIB + 512, 20 * MIB), (10 * MIB - 512, 20 * MIB),
        (10 * MIB, 10 * MIB), (10 * MIB + 512, 12 * MIB), (33 * MIB, 34 * MIB),
    ],
)  # fmt: skip
def test_segment_bytes_follow_the_block(size, expected):
    assert segment_bytes(size) == expected


def test_blocks_are_multiples_of_512_bytes():
    memory = Allocator()
    for size, total in ((1, 512), (512, 1024), (513, 2048)):
        memory.allocate(size)
        assert memory.allocated == total
    assert memory.reserved == 2 * MIB


def test_a_rest_of_a_large_block_up_to_a_mebibyte_is_given_away():
    memory = Allocator()
    memory.allocate(19 * MIB)
    assert (memory.allocated, memory.reserved) == (20 * MIB, 20 * MIB)
    memory.allocate(18 * MIB)
    assert (memory.allocated, memory.reserved) == (38 * MIB, 38 * MIB)


def test_the_smallest_block_that_fits_is_taken():
    memory = Allocator()
    large, small = memory.allocate(40 * MIB), memory.allocate(30 * MIB)
    memory.release(large)
    memory.release(small)
    memory.allocate(25 * MIB)  # of the 30
    memory.allocate(40 * MIB)
    assert memory.reserved == 70 * MIB
    memory.allocate(6 * MIB)  # only 5 are left together
    assert memory.reserved == 90 * MIB


@pytest.mark.parametrize("order", [(0, 1, 2), (2, 1, 0), (0, 2, 1), (1, 0, 2)])
def test_neighbours_that_are_free_become_one_block(order):
    memory = Allocator()
    parts = [memory.allocate(2 * MIB) for _ in range(3)]
    rest = memory.allocate(14 * MIB)
    for index in order:
        memory.release(parts[index])
    memory.allocate(6 * MIB)
    assert memory.reserved == 20 * MIB
    memory.release(rest)


def test_empty_cache_returns_only_segments_without_a_block_in_use():
    memory = Allocator()
    whole, part, kept = (memory.allocate(size * MIB) for size in (30, 4, 4))
    memory.release(whole)
    memory.release(part)
    assert memory.reserved == 50 * MIB
    memory.empty_cache()
    assert memory.reserved == 20 * MIB
    memory.release(kept)
    memory.empty_cache()
    assert (memory.allocated, memory.reserved, memory.peak_reserved) == (0, 0, 50 * MIB)


def test_a_graph_shares_nothing_with_who_is_not_captured():
    memory = Allocator()
    memory.release(memory.allocate(30 * MIB))
    with memory.capturing():
        inside = memory.allocate(30 * MIB)
        memory.release(inside)
        memory.release(memory.allocate(30 * MIB))
    seeds = 2 * MIB
    assert memory.reserved == 60 * MIB + seeds
    memory.allocate(30 * MIB)
    assert memory.reserved == 60 * MIB + seeds


@pytest.mark.parametrize("seed", [0, 1])
def test_a_recorded_run_reserves_what_torch_reserved(seed):
    memory, blocks = Allocator(seed), []
    with ExitStack() as stack:
        for event in decompress(b85decode(RECORDED.read_text().replace("\n", ""))).split():
            if event == b"c":
                assert memory.peak_reserved == 127_926_272
                memory.empty_cache()
                stack.enter_context(memory.capturing())
            elif event.startswith(b"-"):
                memory.release(blocks[int(event)])
            else:
                blocks.append(memory.allocate(int(event)))
    assert memory.peak_reserved == 199_229_440
    assert memory.peak_allocated == 172_730_880
