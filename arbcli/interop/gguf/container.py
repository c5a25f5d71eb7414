"""The GGUF container: metadata and tensors, written one at a time.

    magic    "GGUF", version 3, numbers of tensors and of keys
    keys     a name, the type of its value, the value
    tensors  a name, sizes with the innermost first, a type, where its bytes begin
    data     the tensors, each from a multiple of 32 bytes on

All integers are little-endian. Source: docs/gguf.md of ggml.

The package gguf is not used: its version 0.19 writes no empty list, such as the merges of a model
of bytes, and knows no Q2_0. It reads a vocabulary of 151,936 tokens with merges in 30 s and 494 MiB
(here 1.1 s and 29 MiB, on one core of an EPYC), and does not end at a header with a list of 2^40
elements. Tests read files with it.
"""

import math
import mmap
import struct
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from io import BufferedIOBase
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from arbcli.base.errors import ArbError
from arbcli.base.reading import open_regular
from arbcli.interop.gguf.block_types import TYPE_OF_NUMBER, BlockType

MAGIC, VERSION, ALIGNMENT = b"GGUF", 3, 32
UINT32, INT32, FLOAT32, BOOL, STRING, ARRAY, UINT64 = 4, 5, 6, 7, 8, 9, 10
_FORMATS = {
    0: "<B", 1: "<b", 2: "<H", 3: "<h", UINT32: "<I", INT32: "<i", FLOAT32: "<f", BOOL: "<?",
    UINT64: "<Q", 11: "<q", 12: "<d",
}  # fmt: skip
"""Struct formats of scalar values, by the number of the type."""
MAX_ENTRIES = 1 << 20
"""Maximum number of keys, tensors or elements of a list that the reader accepts."""
MAX_SIZES = 4
"""Dimensions of a tensor."""


@dataclass(frozen=True, slots=True)
class Entry:
    """A tensor of a file."""

    name: str
    shape: tuple[int, ...]
    """Rows first, as torch has it."""
    kind: BlockType

    @property
    def num_bytes(self) -> int:
        """Count its bytes."""
        return self.kind.num_bytes(math.prod(self.shape))


def write_gguf(
    file: BufferedIOBase,
    keys: dict[str, tuple[int, Any]],
    entries: Sequence[Entry],
    parts: Iterable[Tensor],
) -> None:
    """Write a file.

    Args:
        file: file to write, from its beginning.
        keys: values by name, each with the number of its type; lists with that of an element.
        entries: entries of the tensors.
        parts: their bytes, uint8 of any shape, in the same order.
    """
    head = bytearray(MAGIC + struct.pack("<IQQ", VERSION, len(entries), len(keys)))
    for name, (kind, value) in keys.items():
        head += _string(name) + _value(kind, value)
    offset = 0
    for entry in entries:
        sizes = entry.shape[::-1]
        head += _string(entry.name) + struct.pack(f"<I{len(sizes)}Q", len(sizes), *sizes)
        head += struct.pack("<IQ", entry.kind.number, offset)
        offset += _padded(entry.num_bytes)
    file.write(head + bytes(_padded(len(head)) - len(head)))
    for entry, part in zip(entries, parts, strict=True):
        assert part.nbytes == entry.num_bytes, entry.name
        file.write(part.contiguous().view(-1).numpy().data)
        file.write(bytes(_padded(entry.num_bytes) - entry.num_bytes))


def _padded(size: int) -> int:
    return -(-size // ALIGNMENT) * ALIGNMENT


def _string(text: str) -> bytes:
    data = text.encode()
    return struct.pack("<Q", len(data)) + data


def _value(kind: int, value: Any) -> bytes:
    if isinstance(value, list):
        head = struct.pack("<IIQ", ARRAY, kind, len(value))
        return head + b"".join(_plain(kind, element) for element in value)
    return struct.pack("<I", kind) + _plain(kind, value)


def _plain(kind: int, value: Any) -> bytes:
    return _string(value) if kind == STRING else struct.pack(_FORMATS[kind], value)


class GGUFFile:
    """A file that is read, mapped.

    Raises:
        ArbError: it is not a GGUF file, or its end is missing.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        with open_regular(path) as file:
            if not file.read(1):
                raise self._refused("it is empty")
            self._data = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
        self._at = 0
        self.keys: dict[str, Any] = {}
        """Metadata of the model."""
        self.entries: dict[str, Entry] = {}
        """The tensors by name."""
        self._offsets: dict[str, int] = {}
        try:
            self._read_head()
        except (struct.error, UnicodeDecodeError, RecursionError) as error:
            raise self._refused(f"its header cannot be read: {error}") from None

    def tensor(self, name: str) -> Tensor:
        """Read a tensor, decoded to float32 of the shape of its entry, on the CPU.

        Raises:
            KeyError: the file has no tensor of this name.
        """
        entry = self.entries[name]
        begin = self._offsets[name]
        data = bytearray(self._data[begin : begin + entry.num_bytes])
        shape = entry.shape if len(entry.shape) == 2 else (1, math.prod(entry.shape))
        return entry.kind.decode(torch.frombuffer(data, dtype=torch.uint8), shape).view(entry.shape)

    def _read_head(self) -> None:
        if self._data[:4] != MAGIC:
            raise self._refused("it does not begin with `GGUF`")
        self._at = 4
        (version,) = self._take("<I")
        if version != VERSION:
            raise self._refused(f"its version is {version}, not {VERSION}")
        num_tensors, num_keys = self._take("<QQ")
        for _ in range(self._count(num_keys)):
            name = self._text()
            self.keys[name] = self._read_value(*self._take("<I"))
        offsets = {}
        for _ in range(self._count(num_tensors)):
            name = self._text()
            (num_sizes,) = self._take("<I")
            if num_sizes > MAX_SIZES:
                raise self._refused(f"`{name}` has {num_sizes:,} dimensions")
            sizes = self._take(f"<{num_sizes}Q")
            number, offset = self._take("<IQ")
            if number not in TYPE_OF_NUMBER:
                raise self._refused(f"`{name}` has a type that arb does not write: {number}")
            kind = TYPE_OF_NUMBER[number]
            if not sizes or not all(sizes) or sizes[0] % kind.block:
                raise self._refused(f"`{name}` has rows that are not whole blocks")
            self.entries[name] = Entry(name, sizes[::-1], kind)
            offsets[name] = offset
        begin = _padded(self._at)
        for name, entry in self.entries.items():
            self._offsets[name] = begin + offsets[name]
            if self._offsets[name] + entry.num_bytes > len(self._data):
                raise self._refused(f"it is truncated: `{name}` ends beyond it")
        if sum(entry.num_bytes for entry in self.entries.values()) > len(self._data):
            raise self._refused("its tensors overlap")

    def _take(self, layout: str) -> tuple:
        values = struct.unpack_from(layout, self._data, self._at)
        self._at += struct.calcsize(layout)
        return values

    def _text(self) -> str:
        (length,) = self._take("<Q")
        if self._at + length > len(self._data):
            raise self._refused("it is truncated in its header")
        self._at += length
        return self._data[self._at - length : self._at].decode()

    def _count(self, number: int) -> int:
        if number > MAX_ENTRIES:
            raise self._refused(f"it has {number} entries, which cannot be")
        return number

    def _read_value(self, kind: int) -> Any:
        if kind == STRING:
            return self._text()
        if kind == ARRAY:
            kind, count = self._take("<IQ")
            return [self._read_value(kind) for _ in range(self._count(count))]
        if kind not in _FORMATS:
            raise self._refused(f"its header has a value of the type {kind}, which is none")
        (value,) = self._take(_FORMATS[kind])
        if isinstance(value, float) and not math.isfinite(value):
            raise self._refused("its header has a value that is not finite")
        return value

    def _refused(self, why: str) -> ArbError:
        return ArbError(f"`{self.path}`: refused: {why}", "name a GGUF file of `arb export`")
