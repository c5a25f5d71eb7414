"""The GGUF container: metadata and tensors, written one at a time.

    magic    "GGUF", version 3, numbers of tensors and of keys
    keys     a name, the type of its value, the value
    tensors  a name, dimensions with the innermost first, a type, the offset of its bytes
    data     the tensors, each aligned to 32 bytes

All integers are little-endian. Source: docs/gguf.md of ggml.

The package gguf is not used: version 0.19 cannot write an empty list, such as the merges of a model
of bytes, and lacks Q2_0. It takes 30 s and 494 MiB to read a vocabulary of 151,936 tokens with
merges (here 1.1 s and 29 MiB, on one core of an EPYC), and hangs on a header with a list of 2^40
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
from arbcli.interop.gguf.block_types import TYPE_BY_ID, BlockType

MAGIC, VERSION, ALIGNMENT = b"GGUF", 3, 32
UINT32, INT32, FLOAT32, BOOL, STRING, ARRAY, UINT64 = 4, 5, 6, 7, 8, 9, 10
_FORMATS = {
    0: "<B", 1: "<b", 2: "<H", 3: "<h", UINT32: "<I", INT32: "<i", FLOAT32: "<f", BOOL: "<?",
    UINT64: "<Q", 11: "<q", 12: "<d",
}  # fmt: skip
"""Struct formats of scalar values, by the number of the type."""
MAX_ENTRIES = 1 << 20
"""Maximum number of keys, tensors or elements of a list that the reader accepts."""
MAX_DIMS = 4
"""Maximum number of dimensions of a tensor."""


@dataclass(frozen=True, slots=True)
class Entry:
    """Name, shape and type of a tensor in a file."""

    name: str
    shape: tuple[int, ...]
    """Shape in torch's order, rows first."""
    kind: BlockType

    @property
    def num_bytes(self) -> int:
        """Size in bytes."""
        return self.kind.num_bytes(math.prod(self.shape))


def write_gguf(
    file: BufferedIOBase,
    keys: dict[str, tuple[int, Any]],
    entries: Sequence[Entry],
    tensors: Iterable[Tensor],
) -> None:
    """Write a file.

    Args:
        file: file to write, at position 0.
        keys: metadata by name: the number of the type of a value, or of a list's elements, and it.
        entries: entries of the tensors.
        tensors: bytes of the tensors, uint8 of any shape, in the same order.
    """
    header = bytearray(MAGIC + struct.pack("<IQQ", VERSION, len(entries), len(keys)))
    for name, (kind, value) in keys.items():
        header += _encode_string(name) + _encode_value(kind, value)
    offset = 0
    for entry in entries:
        dims = entry.shape[::-1]
        header += _encode_string(entry.name) + struct.pack(f"<I{len(dims)}Q", len(dims), *dims)
        header += struct.pack("<IQ", entry.kind.type_id, offset)
        offset += _align(entry.num_bytes)
    file.write(header + bytes(_align(len(header)) - len(header)))
    for entry, tensor in zip(entries, tensors, strict=True):
        assert tensor.nbytes == entry.num_bytes, entry.name
        file.write(tensor.contiguous().view(-1).numpy().data)
        file.write(bytes(_align(entry.num_bytes) - entry.num_bytes))


def _align(size: int) -> int:
    return -(-size // ALIGNMENT) * ALIGNMENT


def _encode_string(text: str) -> bytes:
    data = text.encode()
    return struct.pack("<Q", len(data)) + data


def _encode_value(kind: int, value: Any) -> bytes:
    if isinstance(value, list):
        header = struct.pack("<IIQ", ARRAY, kind, len(value))
        return header + b"".join(_encode_scalar(kind, element) for element in value)
    return struct.pack("<I", kind) + _encode_scalar(kind, value)


def _encode_scalar(kind: int, value: Any) -> bytes:
    return _encode_string(value) if kind == STRING else struct.pack(_FORMATS[kind], value)


class GGUFFile:
    """A memory-mapped GGUF file for reading.

    Raises:
        ArbError: it is not a GGUF file, or is truncated or damaged.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        with open_regular(path) as file:
            if not file.read(1):
                raise self._error("it is empty")
            self._data = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
        self._position = 0
        self.keys: dict[str, Any] = {}
        """Metadata of the model."""
        self.entries: dict[str, Entry] = {}
        """The tensors by name."""
        self._offsets: dict[str, int] = {}
        try:
            self._read_header()
        except (struct.error, UnicodeDecodeError, RecursionError) as error:
            raise self._error(f"its header cannot be read: {error}") from None

    def tensor(self, name: str) -> Tensor:
        """Decode a tensor to float32 on the CPU, in the shape of its entry.

        Raises:
            KeyError: the file has no tensor of this name.
        """
        entry = self.entries[name]
        start = self._offsets[name]
        data = bytearray(self._data[start : start + entry.num_bytes])
        shape = entry.shape if len(entry.shape) == 2 else (1, math.prod(entry.shape))
        return entry.kind.decode(torch.frombuffer(data, dtype=torch.uint8), shape).view(entry.shape)

    def _read_header(self) -> None:
        if self._data[:4] != MAGIC:
            raise self._error("it does not begin with `GGUF`")
        self._position = 4
        (version,) = self._unpack("<I")
        if version != VERSION:
            raise self._error(f"its version is {version}, not {VERSION}")
        num_tensors, num_keys = self._unpack("<QQ")
        for _ in range(self._check_count(num_keys)):
            name = self._read_string()
            self.keys[name] = self._read_value(*self._unpack("<I"))
        offsets = {}
        for _ in range(self._check_count(num_tensors)):
            name = self._read_string()
            (num_dims,) = self._unpack("<I")
            if num_dims > MAX_DIMS:
                raise self._error(f"`{name}` has {num_dims:,} dimensions")
            dims = self._unpack(f"<{num_dims}Q")
            type_id, offset = self._unpack("<IQ")
            if type_id not in TYPE_BY_ID:
                raise self._error(f"`{name}` has a type that arb does not write: {type_id}")
            kind = TYPE_BY_ID[type_id]
            if not dims or not all(dims) or dims[0] % kind.block_size:
                raise self._error(f"`{name}` has rows that are not whole blocks")
            self.entries[name] = Entry(name, dims[::-1], kind)
            offsets[name] = offset
        start = _align(self._position)
        for name, entry in self.entries.items():
            self._offsets[name] = start + offsets[name]
            if self._offsets[name] + entry.num_bytes > len(self._data):
                raise self._error(f"it is truncated: `{name}` ends beyond it")
        if sum(entry.num_bytes for entry in self.entries.values()) > len(self._data):
            raise self._error("its tensors overlap")

    def _unpack(self, layout: str) -> tuple:
        values = struct.unpack_from(layout, self._data, self._position)
        self._position += struct.calcsize(layout)
        return values

    def _read_string(self) -> str:
        (length,) = self._unpack("<Q")
        if self._position + length > len(self._data):
            raise self._error("it is truncated in its header")
        self._position += length
        return self._data[self._position - length : self._position].decode()

    def _check_count(self, number: int) -> int:
        if number > MAX_ENTRIES:
            raise self._error(f"it has {number} entries, and at most {MAX_ENTRIES} are read")
        return number

    def _read_value(self, kind: int) -> Any:
        if kind == STRING:
            return self._read_string()
        if kind == ARRAY:
            kind, count = self._unpack("<IQ")
            return [self._read_value(kind) for _ in range(self._check_count(count))]
        if kind not in _FORMATS:
            raise self._error(f"its header has a value of the unknown type {kind}")
        (value,) = self._unpack(_FORMATS[kind])
        if isinstance(value, float) and not math.isfinite(value):
            raise self._error("its header has a value that is not finite")
        return value

    def _error(self, why: str) -> ArbError:
        return ArbError(f"`{self.path}`: refused: {why}", "name a GGUF file of `arb export`")
