"""Texts of memory-mapped files, and seeded batches of them.

A text is a sequence of files read as one stream of bytes. A batch is a set of windows of it, whose
positions only depend on (seed, step, micro): to resume, a run only needs the number of the step.
"""

import os
import struct
from bisect import bisect_right
from collections import OrderedDict
from collections.abc import Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from hashlib import sha256, shake_256
from itertools import accumulate
from mmap import ACCESS_READ, mmap
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from arbcli.base.errors import ArbError
from arbcli.base.reading import file_size, unreadable

if TYPE_CHECKING:
    import torch
    from torch import Tensor

TOKEN_BYTES = {"bytes": 1, "tokens16": 2, "tokens32": 4}
"""Bytes of a token by the format of a file, the `data_format` of a run."""
MAX_OPEN_MAPS = 64
"""Maximum number of mapped files of a text; each has a descriptor, and some systems allow 256."""
BLOCK_BYTES = 2**20
EVAL_BATCHES = 40
"""Number of batches in an evaluation of a run without accumulation."""
EVAL_SYMBOLS = 2**19
"""Number of symbols in an evaluation beyond which accumulation adds no batches."""
EVAL_SEED = 7
"""Seed of these batches, and of the masks of a masked model in them."""
MAX_BLOCKS = 256
"""Maximum number of blocks that `entropy` and `digest` read; longer texts are sampled."""
FAR_NATS = 0.5
"""Difference of order-0 entropies in nats for texts of different kinds; within a kind, hundredths
are usual."""


class _Piece(NamedTuple):
    path: Path
    start: int
    stop: int


class Text:
    """A sequence of files as one stream of bytes.

    Files are mapped when they are first read, at most `MAX_OPEN_MAPS` at once; the least recently
    used is closed first. Empty files are ignored.

    Raises:
        ArbError: a file is missing, unreadable or not regular.
    """

    def __init__(self, paths: Sequence[Path]) -> None:
        self._set_pieces((path, 0, file_size(path)) for path in paths)

    _source: "Text | None" = None
    """The same text as bytes; None if these are its symbols."""
    _original: "Text | None" = None
    """The text of the files; None for `source`."""
    token_bytes = 1
    """Bytes of a token if the files are shards, which `arbcli.data.tokens` reads; 1 for text."""

    @classmethod
    def from_parts(cls, parts: Sequence[tuple[Path, int, int]], token_bytes: int = 1) -> "Text":
        """Create a text from parts of files, each (path, start, stop), in bytes."""
        text = cls([])
        text._set_pieces(parts)
        text.token_bytes = token_bytes
        return text

    def _set_pieces(self, parts: Iterable[tuple[Path, int, int]]) -> None:
        pieces = (_Piece(Path(os.path.abspath(path)), *where) for path, *where in parts)
        self._pieces = [piece for piece in pieces if piece.start < piece.stop]
        self._begins = [0, *accumulate(self.sizes)]
        self._maps: OrderedDict[int, mmap] = OrderedDict()

    def __len__(self) -> int:
        return self._begins[-1]

    @property
    def source(self) -> "Text":
        """The text as bytes, which differs from `self` for texts of tokens."""
        return self if self._source is None else self._source

    @property
    def original(self) -> "Text":
        """The text of `pieces`: `source`, or the shards that it was decoded from."""
        return self.source if self._original is None else self._original

    @property
    def symbol_bytes(self) -> float:
        """Average number of bytes per symbol."""
        return 1.0

    @property
    def pieces(self) -> list[tuple[Path, int, int]]:
        """Parts of files that form `original`: (path, start, stop) each, in bytes."""
        return list(self.original._pieces)

    @property
    def sizes(self) -> list[int]:
        """Sizes of `pieces` in bytes."""
        return [stop - start for _, start, stop in self.pieces]

    @property
    def files(self) -> list[Path]:
        """Paths of `pieces`."""
        return [path for path, _, _ in self.pieces]

    def times(self) -> dict[Path, tuple[int, int]]:
        """Return the size and modification time of each file in bytes and ns, if it exists."""
        times = {}
        for path in self.files:
            with suppress(OSError):
                status = os.stat(path)
                times[path] = status.st_size, status.st_mtime_ns
        return times

    def read(self, offset: int, length: int) -> bytes:
        """Return bytes [offset, offset + length) of the text, across files if needed.

        Raises:
            ArbError: a file has vanished or become shorter.
            ValueError: the range is not inside the text.
        """
        if offset < 0 or length < 0 or offset + length > len(self):
            raise ValueError(f"no {length} bytes at {offset} in a text of {len(self)} bytes")
        parts = []
        index = bisect_right(self._begins, offset) - 1
        while length:
            begin, end = self._begins[index : index + 2]
            count = min(length, end - offset)
            at = self._pieces[index].start + offset - begin
            parts.append(self._open_piece(index)[at : at + count])
            offset, length, index = offset + count, length - count, index + 1
        return b"".join(parts)

    packs = False
    """Whether windows are packed with documents: see `arbcli.data.chats`."""
    cut = 0
    """Number of documents that are longer than a window: truncated, or left out without a loss."""
    template_digest: str | None = None
    """Digest of the template of these documents."""

    def may_contain(self, mark: bytes) -> bool:
        """Return whether the text has a byte, or one of its files begins with it.

        A sound begins with a mark, and a text may have the end of a sound alone.
        """
        size = len(self)
        offsets = range(0, size, BLOCK_BYTES)
        return any(mark in self.read(o, min(BLOCK_BYTES, size - o)) for o in offsets) or any(
            Text.from_parts([(file, 0, 1)]).read(0, 1) == mark for file in self.files
        )

    def windows(self, length: int) -> int:
        """Return the number of windows of `length` bytes."""
        return max(0, len(self) - length + 1)

    def starts(self, key: bytes, count: int, length: int) -> list[int]:
        """Draw the starts of `count` windows of `length` bytes uniformly, by a hash of `key`."""
        draws = shake_256(key).digest(8 * count)
        windows = self.windows(length)
        # the bias of the remainder is below the number of windows / 2**64
        return [draw % windows for draw in struct.unpack(f"<{count}Q", draws)]

    def window_batch(self, starts: Sequence[int], length: int) -> "Tensor":
        """Return the windows that begin at `starts`, (B, length) uint8 on the CPU."""
        import torch  # takes seconds, and is not needed to find files

        windows = bytearray().join(self.read(start, length) for start in starts)
        return torch.frombuffer(windows, dtype=torch.uint8).view(len(starts), length)

    def learnt_symbols(self, starts: Sequence[int], context: int) -> int:
        """Return the number of symbols with a loss in windows with `context` predictions each."""
        return len(starts) * context

    @property
    def pass_symbols(self) -> int:
        """Number of positions in windows that read the text once, with padding."""
        return len(self)

    def window_bytes(self, starts: Sequence[int], context: int) -> int:
        """Return the number of bytes in windows with `context` predictions each, on average."""
        return round(len(starts) * context * self.symbol_bytes)

    def packed_batch(self, starts: Sequence[int]) -> "tuple[Tensor, Tensor, Tensor]":
        """Fill windows with documents; only implemented by `arbcli.data.chats.Chats`.

        Returns:
            Inputs, targets and document numbers, (B, T) int64 each: see `Chats.packed_batch`.

        Raises:
            NotImplementedError: the text is not of documents.
        """
        raise NotImplementedError

    def _open_piece(self, index: int) -> mmap:
        """Map the file of a piece, and check that the file has not become shorter."""
        path, _, stop = self._pieces[index]
        try:
            mapped = self._map(index)
            # reading a page beyond the end of the file would kill the process
            is_shorter = mapped.size() < stop
        except ValueError:  # raised by mmap if the file is shorter
            is_shorter = True
        except OSError as error:
            raise unreadable(path, error) from error
        if is_shorter:
            raise ArbError(
                f"`{path}` has become shorter since the text was opened",
                "restore it, and leave the text alone while it is in use",
            )
        return mapped

    def _map(self, index: int) -> mmap:
        if index in self._maps:
            self._maps.move_to_end(index)
            return self._maps[index]
        if len(self._maps) >= MAX_OPEN_MAPS:
            self._maps.popitem(last=False)[1].close()
        path, _, stop = self._pieces[index]
        with open(path, "rb") as file:
            self._maps[index] = mmap(file.fileno(), stop, access=ACCESS_READ)
        return self._maps[index]


class Mixture(Text):
    """Texts from which windows are drawn by weights; no window crosses from one to the next.

    Args:
        parts: texts and their weights, which are above 0 and are normalised by their sum.
    """

    def __init__(self, parts: Sequence[tuple[Text, float]]) -> None:
        self.texts, self.weights = zip(*parts, strict=True)
        self.token_bytes = max(text.token_bytes for text in self.texts)
        self._set_pieces(piece for text in self.texts for piece in text.pieces)

    def windows(self, length: int) -> int:
        """Return the number of windows of `length` bytes; 0 if one of the texts has none."""
        counts = [text.windows(length) for text in self.texts]
        return sum(counts) if all(counts) else 0

    def starts(self, key: bytes, count: int, length: int) -> list[int]:
        """Draw a text for each window by the weights, and a start in it, by a hash of `key`."""
        bounds = list(accumulate(self.weights))
        firsts = [0, *accumulate(map(len, self.texts))]
        draws = shake_256(key).digest(16 * count)
        starts = []
        for text_draw, start_draw in struct.iter_unpack("<QQ", draws):
            index = bisect_right(bounds, text_draw / 2**64 * bounds[-1], hi=len(bounds) - 1)
            starts.append(firsts[index] + start_draw % self.texts[index].windows(length))
        return starts


def check_is_bytes(token_bytes: int) -> None:
    """Check that a model of bytes can read a text.

    Args:
        token_bytes: see `Text.token_bytes`.

    Raises:
        ArbError: the text consists of shards of tokens.
    """
    if token_bytes > 1:
        raise ArbError(
            "the text is of shards of tokens, and the model reads bytes",
            "name the tokenizer that encoded them: `--tokenizer tokenizer.json`",
        )


def batch_at(
    text: Text, starts: list[int], context: int, device: "torch.device | str"
) -> "tuple[Tensor, ...]":
    """Read the windows that begin at `starts`.

    Args:
        text: the text.
        starts: starts of B windows.
        context: T, in bytes or tokens.
        device: device of the batch.

    Returns:
        Inputs and targets, (B, T) int64, contiguous; targets are shifted by one byte or token. For
        texts of documents, the result of `packed_batch`.

    Raises:
        ArbError: a file has vanished or become shorter.
    """
    if text.packs:
        return tuple(part.to(device) for part in text.packed_batch(starts))
    windows = text.window_batch(starts, context + 1).to(device)  # (B, T + 1)
    return windows[:, :-1].long(), windows[:, 1:].long()


def batch_starts(
    text: Text, seed: int, step: int, micro: int, batch_size: int, context: int
) -> list[int]:
    """Draw the starts of the windows of a micro-batch, each window of the text equally likely.

    They are a hash of (seed, step, micro), the same on every machine.

    Args:
        text: text of at least `context` + 1 bytes.
        seed: any integer.
        step: number of the update.
        micro: number of the micro-batch within the update.
        batch_size: B, in windows.
        context: T, in bytes or tokens.

    Raises:
        ValueError: the text is too short.
    """
    if not text.windows(context + 1):
        raise ValueError(f"a text of {len(text)} bytes has no window of {context} + 1 bytes")
    # torch.Generator only uses 32 bits of its seed on the CPU, too few for long runs
    return text.starts(f"arb batch {seed} {step} {micro}".encode(), batch_size, context + 1)


def held_out_batch(
    text: Text, number: int, batch_size: int, context: int, device: "torch.device | str"
) -> "tuple[Tensor, ...]":
    """Read a held-out batch, (B, T) each, always the same: see `evaluation_starts`."""
    return batch_at(text, evaluation_starts(text, number, batch_size, context), context, device)


def num_evaluation_batches(batch_size: int, accumulation: int, context: int) -> int:
    """Return the number of batches in an evaluation: the windows of `EVAL_BATCHES` steps.

    With accumulation they are at most those of `EVAL_SYMBOLS`, as an evaluation would take long,
    unless as many batches without accumulation have more.
    """
    maximum = max(EVAL_BATCHES, EVAL_SYMBOLS // (batch_size * context))
    return min(EVAL_BATCHES * accumulation, maximum)


def evaluation_starts(
    text: Text, number: int, batch_size: int, context: int, parts: int = 1
) -> list[int]:
    """Draw the starts of a held-out batch.

    Args:
        text: held-out text.
        number: number of the batch, from 0.
        batch_size: B, in windows.
        context: T, in symbols.
        parts: number of consecutive batches that divide the windows of one draw, so that as many
            windows in smaller batches are the same windows.
    """
    step, part = divmod(number, parts)
    return batch_starts(text, EVAL_SEED, step, 0, batch_size * parts, context)[part::parts]


def entropy(text: Text) -> float:
    """Measure the order-0 entropy in nats per byte: -sum over bytes b of p(b) ln p(b).

    A text of tokens has the entropy of its bytes. A text above 256 MiB is sampled by 256 blocks of
    1 MiB, evenly spaced from the first to the last.
    """
    import torch

    counts = torch.zeros(256, dtype=torch.int64)
    for block in _blocks(text.source):
        # a writable copy, as torch warns about read-only buffers
        counts += torch.frombuffer(bytearray(block), dtype=torch.uint8).bincount(minlength=256)
    shares = counts.double() / counts.sum().clamp(min=1)
    return float(torch.special.entr(shares).sum())


def digest(text: Text) -> str:
    """Return the SHA-256 of the files' sizes and bytes, without their names, in hexadecimal.

    For a mixture the sizes and weights of its texts are hashed between them. A text above 256 MiB
    is sampled as in `entropy`: a change between these blocks that keeps all sizes is not detected.
    A text of tokens has the digest of its bytes, or of its shards.
    """
    text = text.original
    hasher = sha256(" ".join(map(str, text.sizes)).encode() + b"\n")
    if isinstance(text, Mixture):
        parts = [(len(part), weight) for part, weight in zip(text.texts, text.weights, strict=True)]
        hasher.update(repr(parts).encode())
    if text.token_bytes > 1:
        widths = [part.token_bytes for part in getattr(text, "texts", [text])]
        hasher.update(f"tokens of {widths} bytes".encode())
    for block in _blocks(text):
        hasher.update(block)
    return hasher.hexdigest()


def _blocks(text: Text) -> Iterator[bytes]:
    starts: Sequence[int] = range(0, len(text), BLOCK_BYTES)
    if len(starts) > MAX_BLOCKS:
        last = len(text) - BLOCK_BYTES
        starts = [i * last // (MAX_BLOCKS - 1) for i in range(MAX_BLOCKS)]
    for start in starts:
        yield text.read(start, min(BLOCK_BYTES, len(text) - start))


@dataclass(frozen=True)
class Texts:
    """Texts of a run."""

    train: Text
    val: Text
    """Held-out text, disjoint from `train` unless the user named the same files twice."""
    description: str
    """Short description for display: the first entry and the number of files."""
    split: str | None = None
    """Split of several files: `files` (whole files are held out) or `within` (the end of each
    file); None for one file or a mixture."""
    tokenizer: Any = None
    """The `arbcli.data.tokens.Tokenizer` of texts of tokens; None for bytes."""
