"""Simulation of torch's CUDA allocator: blocks out of segments, and reserved memory.

It tracks sizes and offsets, and allocates no memory. It follows `CUDACachingAllocator.cpp` of torch
2.11 to 2.13 with default settings: no expandable segments, no rounding to powers of two, one stream
for everything that is not captured.
"""

from bisect import bisect_left, insort
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

UNIT = 512
"""Every block is a multiple of these bytes."""
SMALL = 2**20
"""Maximum size of a block in the small pool."""
SMALL_SEGMENT = 2 * 2**20
LARGE_SEGMENT = 20 * 2**20
"""Segment size for a block of the large pool below `OWN_SEGMENT`."""
OWN_SEGMENT = 10 * 2**20
"""Minimum size of a block that gets a segment of its own size."""
SEGMENT_UNIT = 2 * 2**20
"""Multiple that the size of such a segment is rounded up to."""


def round_up(size: int, unit: int) -> int:
    """Return the smallest multiple of `unit` that is at least `size`."""
    return -(-size // unit) * unit


def segment_bytes(size: int) -> int:
    """Return the size of the new segment for a block of `size` bytes."""
    if size <= SMALL:
        return SMALL_SEGMENT
    return LARGE_SEGMENT if size < OWN_SEGMENT else round_up(size, SEGMENT_UNIT)


@dataclass(slots=True, eq=False)
class Block:
    """A part of a segment, in use or free; the parts of a segment are a chain."""

    size: int
    """Size in bytes, a multiple of `UNIT`."""
    address: int
    """The free block of the lowest address is taken if sizes are equal. The driver chooses those of
    segments; here they rise."""
    pool: "_Pool"
    before: "Block | None" = None
    after: "Block | None" = None
    free: bool = False

    @property
    def is_segment(self) -> bool:
        """Whether the block is its whole segment."""
        return self.before is None and self.after is None


@dataclass(slots=True, eq=False)
class _Pool:
    """Free blocks of one kind, the smallest first."""

    small: bool
    free: list[tuple[int, int, Block]] = field(default_factory=list)

    def put(self, block: Block) -> None:
        block.free = True
        insort(self.free, (block.size, block.address, block))

    def remove(self, block: Block) -> None:
        block.free = False
        del self.free[bisect_left(self.free, (block.size, block.address))]

    def take(self, size: int) -> Block | None:
        """Return the smallest sufficient free block, or None."""
        index = bisect_left(self.free, (size,))
        if index == len(self.free):
            return None
        block = self.free.pop(index)[-1]
        block.free = False
        return block


class Allocator:
    """The state of a device's allocator, and its peak.

    Attributes:
        allocated, reserved: bytes in allocated blocks, and bytes reserved from the device.
        peak_reserved: the most reserved so far.
    """

    def __init__(self) -> None:
        self.allocated = self.reserved = self.peak_reserved = 0
        self._shared = self._current = (_Pool(small=True), _Pool(small=False))
        self._end = 0
        """End of the last segment."""

    @property
    def is_capturing(self) -> bool:
        """Whether blocks are given out to a CUDA graph."""
        return self._current is not self._shared

    def allocate(self, size: int) -> Block:
        """Allocate a block for `size` bytes, 1 or more."""
        size = round_up(size, UNIT)
        pool = self._current[size > SMALL]
        block = pool.take(size) or self._reserve(pool, size)
        remainder = block.size - size
        if remainder >= UNIT if pool.small else remainder > SMALL:
            split = Block(remainder, block.address + size, pool, before=block, after=block.after)
            if block.after:
                block.after.before = split
            block.after, block.size = split, size
            pool.put(split)
        self.allocated += block.size
        return block

    def release(self, block: Block) -> None:
        """Free a block, and merge it with free neighbours."""
        self.allocated -= block.size
        before, after, pool = block.before, block.after, block.pool
        if before and before.free:
            pool.remove(before)
            block.size, block.address = block.size + before.size, before.address
            block.before = before.before
            if block.before:
                block.before.after = block
        if after and after.free:
            pool.remove(after)
            block.size += after.size
            block.after = after.after
            if block.after:
                block.after.before = block
        pool.put(block)

    def empty_cache(self) -> None:
        """Return unused segments to the device."""
        for pool in self._shared:
            for _, _, block in pool.free:
                if block.is_segment:
                    self.reserved -= block.size
            pool.free = [entry for entry in pool.free if not entry[-1].is_segment]

    @contextmanager
    def capturing(self) -> Iterator[None]:
        """Allocate from a new private pool inside the context, as a CUDA graph does.

        The stream that it is recorded on has its own blocks too: seed and offset of random numbers,
        which every graph keeps.
        """
        self._current = (_Pool(small=True), _Pool(small=False))
        for _ in range(2):
            self.allocate(8)
        self._current = (_Pool(small=True), _Pool(small=False))
        try:
            yield
        finally:
            self._current = self._shared

    def _reserve(self, pool: _Pool, size: int) -> Block:
        size = segment_bytes(size)
        block = Block(size, self._end, pool)
        self._end += size
        self.reserved += size
        self.peak_reserved = max(self.peak_reserved, self.reserved)
        return block
