"""Files of bytes, mapped and never loaded whole, to seeded batches.

A text is a sequence of files seen as one stream of bytes. A batch is a set of windows of it, whose
places follow from (seed, step, micro) alone: to resume at a step, nothing but the step is needed.
"""

import glob
import os
import re
import stat
import struct
import sys
import sysconfig
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

from arbcli.errors import ArbError
from arbcli.plain_text import MEDIA, PLAIN, Conversion, may_have_records, plain_file
from arbcli.reading import shown

if TYPE_CHECKING:
    import torch
    from torch import Tensor

PACKED = (".gz", ".zst", ".parquet")
"""Ends of names of files that are unpacked: their bytes are not text, but their contents are."""
PEEKED_BYTES = 8192
"""Of a file, in which a byte 0 tells that it is not text."""
SAVED = (".safetensors", ".gguf")
"""Ends of names of models, which no text of a folder is."""
RUN = "config.json", frozenset({"metrics.jsonl", ".lock"})
"""A folder with the first and any of the others is a run."""
MAX_OPEN_MAPS = 64
"""Files that one text keeps mapped; each holds a descriptor, and some systems grant only 256."""
BLOCK_BYTES = 2**20
MAX_BLOCKS = 256
"""Blocks that `entropy` and `digest` read: a text of more than 256 MiB is sampled."""
FEW_FILES = 20
"""With more of them a tenth of the files is a fair sample."""
USUAL_SHARES = (0.02, 0.3)
"""Of all bytes, that a tenth of the files has unless some are much larger than others."""
MOST_WEIGHT = 10**9
"""Of a text of a mixture."""
FAR_NATS = 0.5
"""Difference of order-0 entropies; parts of one kind of text differ by hundredths."""
NOT_TEXT = frozenset({"site-packages", "dist-packages", "test", "tests", "idle_test"})
"""Folders left out of the standard library: what was installed, and tests."""


class _Piece(NamedTuple):
    path: Path
    start: int
    stop: int


class Text:
    """A sequence of files as one stream of bytes, or the range [start, stop) of that stream.

    Files are mapped when they are first read, at most `MAX_OPEN_MAPS` at once; the one read longest
    ago is closed first. Empty files count for nothing.

    Raises:
        ArbError: a file is missing, unreadable or not regular.
    """

    def __init__(self, paths: Sequence[Path], *, start: int = 0, stop: int | None = None) -> None:
        self._pieces: list[_Piece] = []
        begin = 0
        for path in paths:
            size = _file_bytes(path)
            end = size if stop is None else min(size, stop - begin)
            piece = _Piece(Path(os.path.abspath(path)), max(0, start - begin), end)
            if piece.start < piece.stop:
                self._pieces.append(piece)
            begin += size
        self._begins = [0, *accumulate(self.sizes)]
        self._maps: OrderedDict[int, mmap] = OrderedDict()

    @classmethod
    def of_parts(cls, parts: Sequence[tuple[Path, int, int]]) -> "Text":
        """Make one of parts of files: (path, start, stop) each, in bytes."""
        text = cls([])
        pieces = (_Piece(Path(os.path.abspath(path)), *where) for path, *where in parts)
        text._pieces = [piece for piece in pieces if piece.start < piece.stop]
        text._begins = [0, *accumulate(text.sizes)]
        return text

    def __len__(self) -> int:
        return self._begins[-1]

    @property
    def source(self) -> "Text":
        """The same text as bytes, which it is unless it is one of tokens."""
        return self

    @property
    def symbol_bytes(self) -> float:
        """Bytes for each symbol, on average."""
        return 1.0

    @property
    def pieces(self) -> list[tuple[Path, int, int]]:
        """List the files that hold any of the text, and which of their bytes."""
        return list(self._pieces)

    @property
    def num_files(self) -> int:
        """Count these files."""
        return len(self.pieces)

    @property
    def sizes(self) -> list[int]:
        """List the bytes that each of these files gives to the text."""
        return [stop - start for _, start, stop in self.pieces]

    @property
    def files(self) -> list[Path]:
        """List these files."""
        return [path for path, _, _ in self.pieces]

    def times(self) -> dict[Path, tuple[int, int]]:
        """Return size and time of the last change of each file; a file that is gone has neither."""
        found = {}
        for path in self.files:
            with suppress(OSError):
                status = os.stat(path)
                found[path] = status.st_size, status.st_mtime_ns
        return found

    def read(self, offset: int, length: int) -> bytes:
        """Copy bytes [offset, offset + length) of the text, across files where need be.

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
            taken = min(length, end - offset)
            parts.append(self._read_piece(index, offset - begin, taken))
            offset, length, index = offset + taken, length - taken, index + 1
        return b"".join(parts)

    packs = False
    """Whether windows hold documents: see `arbcli.chats`."""

    def windows(self, length: int) -> int:
        """Count the windows of `length` bytes."""
        return max(0, len(self) - length + 1)

    def starts(self, key: bytes, count: int, length: int) -> list[int]:
        """Draw where windows of `length` bytes begin, each equally likely, by a hash of `key`."""
        draws = shake_256(key).digest(8 * count)
        # the bias of the remainder is below the number of windows / 2**64
        return [draw % self.windows(length) for draw in struct.unpack(f"<{count}Q", draws)]

    def window_batch(self, starts: Sequence[int], length: int) -> "Tensor":
        """Copy the windows that begin at `starts` to (B, length) uint8 on the CPU."""
        import torch  # takes seconds, and to find files needs none

        windows = bytearray().join([self.read(start, length) for start in starts])
        return torch.frombuffer(windows, dtype=torch.uint8).view(len(starts), length)

    def packed_batch(self, starts: Sequence[int]) -> "tuple[Tensor, Tensor, Tensor]":
        """Fill windows with documents: of `arbcli.chats.Chats` alone."""
        raise NotImplementedError

    def _read_piece(self, index: int, offset: int, length: int) -> bytes:
        path, start, stop = self._pieces[index]
        try:
            mapped = self._map(index)
            # touching a page that the file no longer has would kill the process
            is_shorter = mapped.size() < stop
        except ValueError:  # mmap refuses a file of fewer bytes
            is_shorter = True
        except OSError as error:
            raise _unreadable(path, error.strerror) from error
        if is_shorter:
            raise ArbError(
                f"`{path}` has become shorter since the text was opened",
                hint="restore it, and leave the text alone while it is in use",
            )
        return mapped[start + offset : start + offset + length]

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
    """Texts, and the share of the windows that each gives; no window goes from one to the next.

    Args:
        parts: texts and their weights, which are above 0 and are divided by their sum.
    """

    def __init__(self, parts: Sequence[tuple[Text, float]]) -> None:
        super().__init__([])
        self.texts, self.weights = zip(*parts, strict=True)
        self._pieces = [piece for text in self.texts for piece in text._pieces]
        self._begins = [0, *accumulate(self.sizes)]

    def windows(self, length: int) -> int:
        """Count the windows of `length` bytes; none if one of the texts has none."""
        counts = [text.windows(length) for text in self.texts]
        return sum(counts) if all(counts) else 0

    def starts(self, key: bytes, count: int, length: int) -> list[int]:
        """Draw a text for each window by the weights, and then where in it, by a hash of `key`."""
        bounds = list(accumulate(self.weights))
        firsts = [0, *accumulate(map(len, self.texts))]
        draws = shake_256(key).digest(16 * count)
        starts = []
        for which, where in struct.iter_unpack("<QQ", draws):
            index = bisect_right(bounds, which / 2**64 * bounds[-1], hi=len(bounds) - 1)
            starts.append(firsts[index] + where % self.texts[index].windows(length))
        return starts


def batch(
    text: Text,
    *,
    seed: int,
    step: int,
    micro: int,
    batch_size: int,
    context: int,
    device: "torch.device | str",
) -> "tuple[Tensor, ...]":
    """Draw one micro-batch, each window of the text equally likely.

    The starts of the windows are a hash of (seed, step, micro), the same on every machine.

    Args:
        text: at least `context` + 1 bytes.
        seed: any integer.
        step: number of the update.
        micro: number of the micro-batch within the update.
        batch_size: B, in windows.
        context: T, in bytes.
        device: where the batch goes.

    Returns:
        Inputs and targets, (B, T) int64, contiguous; targets are one byte, or token, further on. Of
        documents also what `packed_batch` gives besides.

    Raises:
        ArbError: a file has vanished or become shorter.
        ValueError: the text is too short.
    """
    starts = batch_starts(text, seed, step, micro, batch_size, context)
    if text.packs:
        return tuple(part.to(device) for part in text.packed_batch(starts))
    windows = text.window_batch(starts, context + 1).to(device).long()  # (B, T + 1) int64
    return windows[:, :-1].contiguous(), windows[:, 1:].contiguous()


def batch_starts(
    text: Text, seed: int, step: int, micro: int, batch_size: int, context: int
) -> list[int]:
    """Draw where the windows of a micro-batch begin: see `batch`."""
    if not text.windows(context + 1):
        raise ValueError(f"a text of {len(text)} bytes has no window of {context} + 1 bytes")
    # not torch.Generator: on the CPU it keeps 32 bits of its seed, too few for long runs
    key = f"arb batch {seed} {step} {micro}".encode()
    return text.starts(key, batch_size, context + 1)


def evaluation_batches(
    text: Text,
    *,
    num_batches: int = 40,
    seed: int = 7,
    batch_size: int,
    context: int,
    device: "torch.device | str",
) -> Iterator["tuple[Tensor, ...]"]:
    """Draw the batches of steps 0 to `num_batches` - 1, the same on every call."""
    sizes = {"batch_size": batch_size, "context": context}
    for step in range(num_batches):
        yield batch(text, seed=seed, step=step, micro=0, **sizes, device=device)


def entropy(text: Text) -> float:
    """Measure the order-0 entropy in nats per byte: -sum over bytes b of p(b) ln p(b).

    Of a text of tokens it is that of its bytes.

    Of a text above 256 MiB it reads 256 blocks of 1 MiB, evenly spaced from the first to the last.
    """
    import torch

    counts = torch.zeros(256, dtype=torch.int64)
    for block in _blocks(text):
        # a writable copy, as torch warns of any other buffer
        counts += torch.frombuffer(bytearray(block), dtype=torch.uint8).bincount(minlength=256)
    shares = counts.double() / counts.sum().clamp(min=1)
    return float(torch.special.entr(shares).sum())


def digest(text: Text) -> str:
    """Hash the sizes of the files and then their bytes, but no names, to the hex of a SHA-256.

    Of a mixture the sizes and weights of the texts come between.

    Of a text above 256 MiB it reads what `entropy` reads: a change between these blocks that
    leaves every size as it was is not seen. A text of tokens has the digest of its bytes.
    """
    text = text.source
    hasher = sha256(" ".join(map(str, text.sizes)).encode() + b"\n")
    if isinstance(text, Mixture):
        parts = [(len(part), weight) for part, weight in zip(text.texts, text.weights, strict=True)]
        hasher.update(repr(parts).encode())
    for block in _blocks(text):
        hasher.update(block)
    return hasher.hexdigest()


def _blocks(text: Text) -> Iterator[bytes]:
    text = text.source
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
    """Not part of `train`, unless the caller named it so."""
    description: str
    """A few words for people: what was named, and its number of files."""
    split: str | None = None
    """How several files were split: by `files`, or `within` each; None if there was no choice."""
    tokenizer: Any = None
    """The `arbcli.tokens.Tokenizer` that made tokens of them; None if they are bytes."""


def open_texts(
    data: Sequence[str] | None,
    val: Sequence[str] | None,
    *,
    seed: int,
    context: int,
    conversion: Conversion = PLAIN,
    split: str | None = None,
) -> Texts:
    """Find the files of a run and split them into training and validation.

    An entry is a file, a glob (`**` for any depth) or a folder: all regular files below it, except
    hidden ones, those that a link to a folder leads to, saved runs and models, and binary files,
    with media unless `conversion` has a form for them. A file named twice counts once.
    Files that are not plain are unpacked: see `plain_text`.

    Entries of the form `book.txt:0.7` are a mixture: windows are drawn from each by its weight, and
    each is split for itself.

    Args:
        data: entries; None is the standard library source of the running Python.
        val: entries that are the validation, all of `data` being training. None is the last tenth
            of a single file, or a tenth of several files, chosen by a hash of `seed` and their
            paths within their common folder. If that is much more or less than a tenth of few
            files, or another kind of text, it is the last tenth of each of them.
        seed: seed of the split by file.
        context: in bytes; each text must hold one window of `context` + 1.
        conversion: of files that are not plain to bytes.
        split: how several files are split, as `Texts.split` has it; None chooses.

    Raises:
        ArbError: an entry names nothing, or what cannot be read; a text is too short.
    """
    left_out: list[str] = []
    if data:
        parts = _find_parts(data, left_out, conversion)
        name = _name(data)
    else:
        parts = [(_find_standard_library(), None)]
        name = f"standard library source of Python {sys.version_info[0]}.{sys.version_info[1]}"
    weights, found = [weight for _, weight in parts], None
    if val:
        train = _mix([_plain_text(files, conversion) for files, _ in parts], weights)
        held_out = _plain_text(_find_files(val, left_out, conversion), conversion)
    else:
        how = split if data else "files"
        each = [_split(files, seed, conversion, how, context) for files, _ in parts]
        train = _mix([text for _, (text, _) in each], weights)
        held_out = _mix([text for _, (_, text) in each], weights)
        if len(each) == 1:  # texts of a mixture are each split in their own way, found again
            found = each[0][0]
    for text, role in ((train, "training"), (held_out, "validation")):
        if not text.windows(context + 1):
            shortest = min(map(len, text.texts)) if isinstance(text, Mixture) else len(text)
            raise ArbError(
                f"a context of {context:,} needs a {role} text of {context + 1:,} bytes or more,"
                f" and this one has {shortest:,}",
                hint="choose a smaller `--ctx`, or name more text with `--data` and `--val`",
            )
    num_files = sum(len(files) for files, _ in parts)
    return Texts(train, held_out, _describe(name, num_files, left_out), found)


def open_text(entries: Sequence[str], conversion: Conversion = PLAIN) -> tuple[Text, str]:
    """Find the files that `entries` name, as `open_texts` does, and read them as one text.

    Returns:
        The text, and a few words for people.

    Raises:
        ArbError: an entry names nothing, or what cannot be read.
    """
    left_out: list[str] = []
    files = _find_files(entries, left_out, conversion)
    return _plain_text(files, conversion), _describe(_name(entries), len(files), left_out)


def _find_parts(
    entries: Sequence[str], left_out: list[str], conversion: Conversion
) -> list[tuple[list[Path], float | None]]:
    """Find the files of each text of a mixture, and its weight; of no mixture one text, and None.

    Raises:
        ArbError: only some entries have weights, or one is 0.
    """
    check_weights(entries)
    weighed = [_weight(entry) for entry in entries]
    if all(weight is None for _, weight in weighed):
        return [(_find_files(entries, left_out, conversion), None)]
    return [(_find_files([entry], left_out, conversion), weight) for entry, weight in weighed]


def check_weights(entries: Sequence[str]) -> None:
    """Refuse texts of which only some have a weight, or one has a weight of 0.

    Raises:
        ArbError: they are such.
    """
    weights = [_weight(entry)[1] for entry in entries]
    if all(weight is None for weight in weights):
        return
    for entry, weight in zip(entries, weights, strict=True):
        if not weight or weight > MOST_WEIGHT:
            raise ArbError(
                f"`{shown(entry)}` has no valid weight, and another text has one",
                hint=f"give all of them one above 0 and up to {MOST_WEIGHT:,}, as in"
                " `--data a.txt:0.7 --data b.txt:0.3`, or none",
            )


def _weight(entry: str) -> tuple[str, float | None]:
    """Split `book.txt:0.7` into the entry and its weight; a file may be called so, too."""
    path, _, weight = entry.rpartition(":")
    is_weight = re.fullmatch(r"[0-9]+(\.[0-9]+)?|\.[0-9]+", weight)
    if not path or not is_weight or _mode(os.path.expanduser(entry)):
        return entry, None
    return path, float(weight)


def _mix(texts: list[Text], weights: list[float | None]) -> Text:
    if weights == [None]:
        return texts[0]
    return Mixture([(text, weight or 0.0) for text, weight in zip(texts, weights, strict=True)])


def _plain_text(files: Sequence[Path], conversion: Conversion) -> Text:
    return Text([plain_file(file, conversion) for file in files])


def _name(entries: Sequence[str]) -> str:
    return entries[0] if len(entries) == 1 else f"{entries[0]} and {len(entries) - 1} more"


def _describe(name: str, num_files: int, left_out: Sequence[str]) -> str:
    saved = sum(path.endswith(SAVED) or os.path.isdir(path) for path in set(left_out))
    kinds = {"saved by arb": saved, "binary": len(set(left_out)) - saved}
    counts = " and ".join(f"{count:,} {kind}" for kind, count in kinds.items() if count)
    more = f"; {counts} left out" if counts else ""
    return f"{name} ({num_files:,} file{'' if num_files == 1 else 's'}{more})"


def _split(
    files: list[Path], seed: int, conversion: Conversion, how: str | None, context: int
) -> tuple[str | None, tuple[Text, Text]]:
    """Hold out the last tenth of a single file, or a tenth of several, and tell how of these.

    Args:
        files: one or more.
        seed: of a split by file.
        conversion: of files that are not plain to bytes.
        how: several files are split, see `Texts.split`; None chooses.
        context: in bytes.
    """
    plain = {file: plain_file(file, conversion) for file in files}
    if len(files) > 1 and how != "within":
        train, val = (Text([plain[file] for file in part]) for part in _split_files(files, seed))
        if how == "files" or len(files) >= FEW_FILES or _are_alike(train, val):
            return "files", (train, val)
    sizes = [(path, _file_bytes(path)) for path in plain.values()]
    cuts = [(path, size - size // 10, size) for path, size in sizes]
    within = Text.of_parts([(path, 0, cut) for path, cut, _ in cuts]), Text.of_parts(cuts)
    if len(files) == 1:
        return None, within
    if how is None and len(within[1]) <= context:  # files of a few bytes
        return "files", (train, val)
    return "within", within


def _are_alike(train: Text, val: Text) -> bool:
    """Return whether one text may be held out of the other: by its size and its entropy."""
    least, most = USUAL_SHARES
    share = len(val) / max(1, len(train) + len(val))
    return least <= share <= most and abs(entropy(train) - entropy(val)) <= FAR_NATS


def _split_files(files: list[Path], seed: int) -> tuple[list[Path], list[Path]]:
    """Choose a tenth of two or more files, at least one, for validation."""
    root = os.path.commonpath([file.parent for file in files])

    def rank(file: Path) -> bytes:
        # fsencode, as a name need not be valid UTF-8
        return sha256(b"%d/" % seed + os.fsencode(file.relative_to(root).as_posix())).digest()

    val = set(sorted(files, key=rank)[: max(1, round(len(files) / 10))])
    return [file for file in files if file not in val], [file for file in files if file in val]


def _find_standard_library() -> list[Path]:
    folder = sysconfig.get_paths()["stdlib"]
    files = [file for file in _files_below(folder, [], NOT_TEXT) if file.suffix == ".py"]
    files = [file for file in files if _file_bytes(file)]
    if len(files) < 2:
        raise ArbError(
            f"this Python has no source of its standard library in `{folder}`",
            hint="name a text with `--data`",
        )
    return files


def _find_files(entries: Sequence[str], left_out: list[str], conversion: Conversion) -> list[Path]:
    """List the files with any bytes that `entries` name, each once, in the order of `entries`.

    What a folder has of runs, models and binary files is added to `left_out`.
    """
    unique: dict[str, Path] = {}
    for entry in entries:
        for file in _expand(entry, left_out, conversion):
            unique.setdefault(os.path.realpath(file), file)
    files = [file for file in unique.values() if _file_bytes(file)]
    if not files:
        raise _without_text(entries)
    return files


def _expand(entry: str, left_out: list[str], conversion: Conversion) -> list[Path]:
    path = os.path.expanduser(entry)
    is_named = _mode(path) != 0
    files = []
    for match in [path] if is_named else sorted(set(_matches(path))):
        mode = _mode(match)
        if stat.S_ISDIR(mode):
            below = _files_below(match, left_out)
            binary = {file for file in below if _is_left_out(file, conversion)}
            left_out += map(str, binary)
            files += [file for file in below if file not in binary]
        elif is_named or stat.S_ISREG(mode):
            files.append(Path(os.path.abspath(match)))
    if not files:
        raise _without_files(entry, is_named=is_named)
    return files


def check_named(entries: Iterable[str], field: str | None = None) -> None:
    """Refuse what names nothing; what a folder has, or a file, is not looked at.

    Args:
        entries: of texts.
        field: of records, that was asked for.

    Raises:
        ArbError: an entry names nothing, or what is neither a folder nor a file that can be read;
            or all of them are files that are empty, or that have no fields.
    """
    entries, plain, has_bytes = list(entries), [], False
    for entry in entries:
        path = os.path.expanduser(_weight(entry)[0])
        mode = _mode(path)
        if mode and not stat.S_ISDIR(mode):
            has_bytes |= _file_bytes(Path(path)) > 0
            plain.append(not may_have_records(Path(path)))
        elif not mode and next(_matches(path), None) is None:
            raise _without_files(_weight(entry)[0], is_named=False)
        else:
            plain.append(False)
            has_bytes = True  # perhaps
    if entries and not has_bytes:
        raise _without_text(entries)
    if field is not None and plain and all(plain):
        raise ArbError(
            f"`--field {field}` only applies to records, and none of the texts is a .jsonl or"
            " .parquet file",
            hint="leave `--field` out: plain texts are read as they are",
        )


def _without_text(entries: Iterable[str]) -> ArbError:
    names = ", ".join(f"`{entry}`" for entry in entries)
    return ArbError(f"there is no text in {names}", hint="name files that are not empty")


def _without_files(entry: str, *, is_named: bool) -> ArbError:
    return ArbError(
        f"the folder `{entry}` has no files of text" if is_named else f"nothing matches `{entry}`",
        hint="name a file, a glob in quotes, or a folder with files that are neither hidden nor"
        " binary",
    )


def _matches(pattern: str) -> Iterator[str]:
    """Find what a glob names, as `glob` does, but for folders that links lead back to.

    Each `**` goes through a folder once, by whichever path comes first.
    """
    if re.search(r"(^|/)\*\*$", pattern):
        pattern += "/*"
    before, deep, after = pattern.partition("**/")
    if not deep or not (before.endswith("/") or not before):
        yield from glob.iglob(pattern, recursive=True)
        return
    while after.startswith("**/"):
        after = after.removeprefix("**/")
    for folder in sorted(glob.glob(before) if before else ["."]):
        for below in _folders_below(folder):
            base = glob.escape(os.path.join(below, "") if before else os.path.join(below, "")[2:])
            yield from _matches(base + after)


def _folders_below(folder: str) -> Iterator[str]:
    """List a folder and all below it, also through links, but for hidden ones; each once."""
    seen: set[tuple[int, int]] = set()
    for parent, folders, _ in os.walk(folder, followlinks=True):
        status = os.stat(parent)
        if (key := (status.st_dev, status.st_ino)) in seen:
            folders.clear()
            continue
        seen.add(key)
        folders[:] = sorted(name for name in folders if name[0] != ".")
        yield parent


def _files_below(
    folder: str, left_out: list[str], skip: frozenset[str] = frozenset()
) -> list[Path]:
    """List the regular files below a folder, sorted, without hidden ones and folders in `skip`.

    Runs and models that were saved below it are not text, and are added to `left_out`.
    """

    def refuse(error: OSError) -> None:
        raise _unreadable(error.filename, error.strerror) from error

    files = []
    top = os.path.abspath(folder)
    for parent, folders, names in os.walk(top, onerror=refuse):
        folders[:] = [name for name in folders if name[0] != "." and name not in skip]
        if parent != top and RUN[0] in names and not RUN[1].isdisjoint(names):
            left_out.append(parent)
            folders.clear()
            continue
        left_out += [os.path.join(parent, name) for name in names if name.endswith(SAVED)]
        names = [name for name in names if not name.endswith(SAVED)]
        paths = [Path(parent, name) for name in names if name[0] != "."]
        files += [path for path in paths if stat.S_ISREG(_mode(path))]
    return sorted(files, key=Path.as_posix)


def _is_left_out(path: Path, conversion: Conversion) -> bool:
    """Return whether a file of a folder is binary, by a byte 0 where it begins, or unwanted."""
    name = path.name.lower()
    if name.endswith(MEDIA):
        return not conversion.takes(name)
    if name.endswith(PACKED):
        return False
    try:
        with path.open("rb") as file:
            return b"\0" in file.read(PEEKED_BYTES)
    except OSError as error:
        raise _unreadable(path, error.strerror) from error


def _mode(path: str | Path) -> int:
    """Return the mode of what a path leads to, 0 for nothing."""
    try:
        return os.stat(path).st_mode
    except (FileNotFoundError, NotADirectoryError, ValueError):  # the last of a byte 0 in it
        return 0
    except OSError as error:
        raise _unreadable(path, error.strerror) from error


def _file_bytes(path: Path) -> int:
    """Return the size of a file, which must be regular and readable."""
    try:
        status = os.stat(path)
    except OSError as error:
        raise _unreadable(path, error.strerror) from error
    if not stat.S_ISREG(status.st_mode):
        raise ArbError(
            f"`{path}` is not a regular file",
            hint="texts are memory-mapped: write it to a file first, and name that file",
        )
    if not os.access(path, os.R_OK):
        raise _unreadable(path, "Permission denied")
    return status.st_size


def _unreadable(path: str | Path, reason: str | None) -> ArbError:
    return ArbError(
        f"cannot read `{path}`: {reason}", hint="check that it is there and that you may read it"
    )
