"""Opening of texts: the files that entries name, split into training and validation texts."""

import os
import sys
from collections.abc import Sequence
from hashlib import sha256
from pathlib import Path
from typing import NamedTuple

from arbcli.base.errors import ArbError
from arbcli.base.lazy import imported
from arbcli.base.reading import file_size
from arbcli.data import files as data_files
from arbcli.data.text import FAR_NATS, Mixture, Text, Texts, entropy
from arbcli.families import medium_of

FEW_FILES = 20
"""Minimum number of files of which a tenth is a representative sample."""
USUAL_SHARES = (0.02, 0.3)
"""Usual share of bytes in a tenth of the files; outside of it file sizes are too uneven."""


def open_texts(
    data: Sequence[str] | None,
    val: Sequence[str] | None,
    *,
    seed: int,
    context: int,
    conversion: data_files.Conversion = data_files.PLAIN,
    split: str | None = None,
) -> Texts:
    """Open the files of a run, split into training and validation texts.

    An entry is a file, a glob (`**` for any depth) or a folder: all regular files below it, except
    hidden files, files below links to folders, saved runs and models, and binary files, including
    media unless `conversion` has a format for them. A file named twice counts once. Files that are
    not plain are unpacked: see `plain_text`.

    Entries of the form `book.txt:0.7` are a mixture: windows are drawn from each entry by its
    weight, and each entry is split separately.

    Args:
        data: entries; None is the standard library source of the running Python.
        val: entries of the validation text; all of `data` is then for training. None holds out the
            last tenth of a single file, or a tenth of several files, chosen by a hash of `seed` and
            their relative paths; or the last tenth of each file, if there are few and that sample
            is not representative.
        seed: seed of the split by file.
        context: context in bytes; each text must have one window of `context` + 1.
        conversion: conversion of files that are not plain to bytes.
        split: split of several files, see `Texts.split`; None chooses.

    Raises:
        ArbError: an entry matches no file or cannot be read, or a text is too short.
    """
    left_out: list[str] = []
    if data:
        parts = _find_parts(data, left_out, conversion)
        name = _name(data)
    else:
        parts = [(data_files.find_standard_library(), None)]
        name = f"standard library source of Python {sys.version_info[0]}.{sys.version_info[1]}"
    weights, kind_of_split = [weight for _, weight in parts], None
    if val:
        train = _mix([_plain_text(files, conversion) for files, _ in parts], weights)
        held_out = _plain_text(data_files.find_files(val, left_out, conversion), conversion)
    else:
        split = split if data else "files"
        splits = [_split(files, seed, conversion, split, context) for files, _ in parts]
        train = _mix([text for _, (text, _) in splits], weights)
        held_out = _mix([text for _, (_, text) in splits], weights)
        if len(splits) == 1:  # the texts of a mixture may be split differently
            kind_of_split = splits[0][0]
    for text, role in ((train, "training"), (held_out, "validation")):
        if not text.windows(context + 1):
            shortest = min(map(len, text.texts)) if isinstance(text, Mixture) else len(text)
            raise data_files.TextError(
                f"a context of {context:,} needs a {role} text of {context + 1:,} bytes or more,"
                f" and this one has {shortest:,}",
                "choose a smaller `--ctx`, or name more text with `--data` and `--val`",
            )
    num_files = sum(len(files) for files, _ in parts)
    return Texts(train, held_out, _describe(name, num_files, left_out), kind_of_split)


def open_text(
    entries: Sequence[str], conversion: data_files.Conversion = data_files.PLAIN
) -> tuple[Text, str]:
    """Open the files that `entries` name, with the rules of `open_texts`, as one text.

    Returns:
        The text, and a short description for display.

    Raises:
        ArbError: an entry matches no file or cannot be read.
    """
    left_out: list[str] = []
    files = data_files.find_files(entries, left_out, conversion)
    return _plain_text(files, conversion), _describe(_name(entries), len(files), left_out)


def plain_file(path: Path, conversion: data_files.Conversion = data_files.PLAIN) -> Path:
    """Return the path of a file's plain bytes: `path`, or that of a conversion in the cache.

    Args:
        path: path of the file; its suffix determines the conversion.
        conversion: options of the conversion.

    Raises:
        ArbError: see `arbcli.data.conversion.converted_file`.
    """
    name = path.name.lower()
    if not (medium_of(name) or name.endswith((*data_files.PACKED, *data_files.RECORDS))):
        return path
    from arbcli.data.conversion import converted_file  # plain texts do not need it

    return converted_file(path, conversion)


def _find_parts(
    entries: Sequence[str], left_out: list[str], conversion: data_files.Conversion
) -> list[tuple[list[Path], float | None]]:
    """Return the files and the weight of each text of a mixture, or of one text with weight None.

    Raises:
        ArbError: only some entries have weights, or one is 0.
    """
    data_files.check_weights(entries)
    weighed = [data_files.weight_of(entry) for entry in entries]
    if all(weight is None for _, weight in weighed):
        return [(data_files.find_files(entries, left_out, conversion), None)]
    return [
        (data_files.find_files([entry], left_out, conversion), weight) for entry, weight in weighed
    ]


def _mix(texts: list[Text], weights: list[float | None]) -> Text:
    if weights == [None]:
        return texts[0]
    return Mixture([(text, weight or 0.0) for text, weight in zip(texts, weights, strict=True)])


def _plain_text(files: Sequence[Path], conversion: data_files.Conversion) -> Text:
    return _joined([_part(file, conversion) for file in files])


class _Part(NamedTuple):
    """A part of a file of plain bytes, or of a shard: see `Text.from_parts`."""

    path: Path
    start: int
    stop: int
    token_bytes: int


def _part(file: Path, conversion: data_files.Conversion) -> _Part:
    """Return the whole of a file's plain bytes, or of a shard's tokens."""
    if data_files.may_be_shard(file, conversion.data_format):
        if conversion.as_json:
            raise ArbError(f"`{file}` has no records", "leave `--field` out")
        layout = imported("arbcli.data.shards:shard_layout")(file, conversion.data_format)
        return _Part(file, layout[0], file_size(file), layout[1])
    plain = plain_file(file, conversion)
    return _Part(plain, 0, file_size(plain), 1)


def _joined(parts: Sequence[_Part]) -> Text:
    """Join parts to one text.

    Raises:
        ArbError: there are shards and other files, or shards of both kinds.
    """
    widths = {part.token_bytes: part.path for part in parts}
    if len(widths) > 1:
        first, second = [*widths.values()][:2]
        raise ArbError(
            f"`{first}` and `{second}` are of different formats, and cannot be one text",
            "give each of them a weight, as in `--data a.bin:0.7 --data b.txt:0.3`",
        )
    return Text.from_parts([part[:3] for part in parts], *widths)


def _name(entries: Sequence[str]) -> str:
    return entries[0] if len(entries) == 1 else f"{entries[0]} and {len(entries) - 1} more"


def _describe(name: str, num_files: int, left_out: Sequence[str]) -> str:
    saved = sum(
        path.endswith(data_files.SAVED) or os.path.isdir(path) or data_files.belongs_to_saved(path)
        for path in set(left_out)
    )
    kinds = {"saved by arb": saved, "binary": len(set(left_out)) - saved}
    counts = " and ".join(f"{count:,} {kind}" for kind, count in kinds.items() if count)
    more = f"; {counts} left out" if counts else ""
    return f"{name} ({num_files:,} file{'' if num_files == 1 else 's'}{more})"


def _split(
    files: list[Path], seed: int, conversion: data_files.Conversion, split: str | None, context: int
) -> tuple[str | None, tuple[Text, Text]]:
    """Hold out the last tenth of a single file, or a tenth of several files.

    Args:
        files: one or more files.
        seed: seed of a split by file.
        conversion: conversion of files that are not plain to bytes.
        split: split of several files, see `Texts.split`; None chooses.
        context: context in bytes.

    Returns:
        The split of several files, or None for a single one; and the training and validation texts.
    """
    wholes = {file: _part(file, conversion) for file in files}
    if len(files) > 1 and split != "within":
        train, val = (
            _joined([wholes[file] for file in part]) for part in _split_files(files, seed)
        )
        if split == "files" or len(files) >= FEW_FILES or _are_alike(train, val):
            return "files", (train, val)
    cuts = []
    for part in wholes.values():
        tokens = (part.stop - part.start) // part.token_bytes
        cuts.append((part, part.stop - tokens // 10 * part.token_bytes))
    within = (
        _joined([part._replace(stop=cut) for part, cut in cuts]),
        _joined([part._replace(start=cut) for part, cut in cuts]),
    )
    if len(files) == 1:
        return None, within
    if split is None and len(within[1]) <= context:  # the ends of the files are too short
        return "files", (train, val)
    return "within", within


def _are_alike(train: Text, val: Text) -> bool:
    """Return whether the size and entropy of a held-out text fit those of the training text."""
    lowest, highest = USUAL_SHARES
    share = len(val) / max(1, len(train) + len(val))
    return lowest <= share <= highest and abs(entropy(train) - entropy(val)) <= FAR_NATS


def _split_files(files: list[Path], seed: int) -> tuple[list[Path], list[Path]]:
    """Choose a tenth of two or more files, at least one, for validation."""
    root = os.path.commonpath([file.parent for file in files])

    def rank(file: Path) -> bytes:
        # fsencode, as names may not be valid UTF-8
        return sha256(b"%d/" % seed + os.fsencode(file.relative_to(root).as_posix())).digest()

    val = set(sorted(files, key=rank)[: max(1, round(len(files) / 10))])
    return [file for file in files if file not in val], [file for file in files if file in val]
