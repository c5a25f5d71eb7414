"""Files of a text: which ones a file name, a glob or a folder stands for."""

import glob
import os
import re
import stat
import sysconfig
from collections.abc import Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from arbcli.base.errors import ArbError, optional_module, quoted
from arbcli.base.lazy import imported
from arbcli.base.reading import file_size, shown, unreadable
from arbcli.families import medium_of

COMPRESSED = (".gz", ".zst")
TABLES = (".parquet", ".arrow", ".feather")
"""Suffixes of files with columns."""
TAR = ".tar"
PACKED = (*COMPRESSED, *TABLES, TAR)
"""Suffixes of files that are unpacked: they are binary, but their contents may be text."""
PEEKED_BYTES = 8192
"""Bytes at the start of a file in which a zero byte marks it as binary."""
SAVED = (".safetensors", ".gguf")
"""Suffixes of saved models, which are left out of a folder's texts."""
SHARD = ".bin"
"""Suffix of files that may be shards of tokens: see `arbcli.data.shards`."""
STDIN = "-"
"""Entry of standard input."""
HUB = "hf:"
"""Start of an entry that is a dataset of the hub."""
DATASET_FILES = ("dataset_dict.json", "dataset_info.json", "state.json")
"""Files that describe a dataset, and are not texts of its folder."""
RUN = "config.json", frozenset({"metrics.jsonl", ".lock"})
"""A folder with the first file and any of the others is a run."""
MODEL = "config.json", frozenset({"model.safetensors", "model.safetensors.index.json"})
"""A folder with the first file and any of the others is a model for Transformers."""
RUN_FILES = re.compile(
    r"config\.json|metrics\.jsonl|tokenizer\.json|trace-[0-9]+\.json\.gz"
    r"|.*\.(safetensors|aside)|hugging_face|tensorboard"
)
"""Names of files and folders that a run writes. They are not read as text, so that a run in the
folder of its texts can be resumed."""
MODEL_FILES = re.compile(
    r"README\.md|merges\.txt|\w+\.(json|jinja)|(modeling|tokenization)_\w+\.py|.*\.safetensors"
)
"""Names of files of a model for Transformers, which an export may write there."""
MAX_WEIGHT = 10**9
"""Largest weight of a text in a mixture."""
NOT_TEXT = frozenset({"site-packages", "dist-packages", "test", "tests", "idle_test"})
"""Folders left out of the standard library: installed packages and tests."""


class TextError(ArbError):
    """Entries name no text, or too little of it; the hint is for a new run."""


@dataclass(frozen=True, slots=True)
class Conversion:
    """Options of the conversion of files to bytes."""

    field: str | None = None
    """Field of records with the text; None reads JSON lines as plain text."""
    sound: str | None = None
    """Format of sounds, one of `arbcli.families.SOUND_FORMS`. None leaves sounds in folders
    out, and converts those named explicitly to `mulaw`."""
    picture: str | None = None
    """Format of pictures, see `arbcli.families.media.pictures.FORM`. None leaves pictures in
    folders out, and converts those named explicitly to `rgb`."""
    as_json: bool = False
    """Whether records are kept as lines of JSON, for documents: see `arbcli.data.chats`."""
    data_format: str | None = None
    """Format of `SHARD` files, of `arbcli.data.text.TOKEN_BYTES`; None reads their headers."""

    def takes(self, name: str) -> bool:
        """Return whether a file in a folder is read: sounds and pictures only with a format."""
        kind = medium_of(name)
        return kind is None or getattr(self, kind) is not None


MESSAGES = "messages"
"""Field of records with chats."""
CONVERSATIONS = "conversations"
"""The same with `from` and `value`, as in ShareGPT."""
CHATS = MESSAGES, CONVERSATIONS
JOINED = "+"
"""Separator of the fields of a question and its answer."""
PLAIN = Conversion()
DOCUMENTS = Conversion(as_json=True)
RECORDS = (".jsonl", ".ndjson", ".json")
"""Suffixes of files with an object a line, or, if they begin with `[`, an array of objects."""


def has_documents(field: str | None) -> bool:
    """Return whether the `field` of a run names documents in place of plain text."""
    return field is not None and (field in CHATS or JOINED in field)


def check_packages(field: str | None) -> None:
    """Check that the packages that documents need are installed.

    Raises:
        ArbError: one is missing.
    """
    if field is None or not has_documents(field):
        return
    optional_module("tokenizers", f"--field {field}", "tokenizers", "'arb[chat]'")
    if not field.startswith(JOINED):
        optional_module("jinja2", f"--field {field}", "jinja2", "'arb[chat]'")


def find_files(entries: Sequence[str], left_out: list[str], conversion: Conversion) -> list[Path]:
    """List the files with any bytes that `entries` name, each once, in the order of `entries`.

    Args:
        entries: files, globs and folders.
        left_out: runs, models and binary files of folders are appended to it.
        conversion: conversion of files that are not plain to bytes.

    Raises:
        ArbError: an entry matches no file or cannot be read.
    """
    unique: dict[str, Path] = {}
    for entry in entries:
        for file in _expand(entry, left_out, conversion):
            unique.setdefault(os.path.realpath(file), file)
    files = [file for file in unique.values() if file_size(file)]
    if not files:
        raise _missing_text(entries)
    return files


def absolute_entry(entry: str) -> str:
    """Return an entry that names the same text from any folder, and when stdin has been read."""
    name, weight = weight_of(entry)
    if name == STDIN:
        path = str(imported("arbcli.data.sources:stdin_file")())
        return path if weight is None else f"{path}:{weight}"
    if name.startswith(HUB):
        return entry
    is_glob = not _mode(os.path.expanduser(name))
    folder = glob.escape(os.getcwd()) if is_glob else os.getcwd()
    return os.path.normpath(os.path.join(folder, os.path.expanduser(entry)))


def _expand(entry: str, left_out: list[str], conversion: Conversion) -> list[Path]:
    if entry == STDIN:
        return [imported("arbcli.data.sources:stdin_file")()]
    if entry.startswith(HUB):
        return imported("arbcli.data.sources:hub_files")(entry)
    path = os.path.expanduser(entry)
    is_named = _mode(path) != 0
    files, media = [], set[str]()
    for match in [path] if is_named else sorted(set(_matches(path))):
        mode = _mode(match)
        if not is_named and belongs_to_saved(match):
            left_out.append(match)
        elif stat.S_ISDIR(mode) and _has_dataset(match):
            files += imported("arbcli.data.sources:saved_dataset")(Path(match))
        elif stat.S_ISDIR(mode):
            below = _files_below(match, left_out)
            binary = {file for file in below if _is_left_out(file, conversion)}
            left_out += map(str, binary)
            media |= {kind for file in binary if (kind := medium_of(file.name))}
            files += [file for file in below if file not in binary]
        elif is_named or stat.S_ISREG(mode):
            files.append(Path(os.path.abspath(match)))
    if not files:
        raise _missing_files(entry, is_named=is_named, media=media)
    return files


def find_standard_library() -> list[Path]:
    """List the Python files of the standard library, without tests.

    Raises:
        ArbError: this Python has no source of it.
    """
    folder = sysconfig.get_paths()["stdlib"]
    files = [file for file in _files_below(folder, [], NOT_TEXT) if file.suffix == ".py"]
    files = [file for file in files if file_size(file)]
    if len(files) < 2:
        raise TextError(
            f"this Python has no source of its standard library in `{folder}`",
            "name a text with `--data`",
        )
    return files


def check_named(entries: Iterable[str], field: str | None = None) -> None:
    """Check that entries exist, without reading folders or files.

    Args:
        entries: entries of texts, see `open_texts`.
        field: the `--field` of records; None if it was not given.

    Raises:
        ArbError: an entry matches nothing, or is neither a folder nor a readable file; or all
            entries are empty files; or `field` is given and all are files without fields.
    """
    entries, plain, has_bytes = list(entries), [], False
    for entry in entries:
        name = weight_of(entry)[0]
        path, is_file = os.path.expanduser(name), False
        if name.startswith(HUB):
            optional_module("datasets", name, "datasets", "'arb[datasets]'")
        elif name != STDIN:
            mode = _mode(path)
            if not mode and next(_matches(path), None) is None:
                raise _missing_files(name, is_named=False)
            is_file = mode != 0 and not stat.S_ISDIR(mode)
        has_bytes |= not is_file or file_size(Path(path)) > 0  # others are unknown until read
        plain.append(name == STDIN or (is_file and not may_have_records(Path(path))))
    if entries and not has_bytes:
        raise _missing_text(entries)
    if field is not None and plain and all(plain):
        raise ArbError(
            f"`--field {field}` only applies to records, and none of the texts is a .jsonl,"
            " .ndjson, .json, .tar, .parquet or Arrow file",
            "leave `--field` out: plain texts are read as they are",
        )


def check_weights(entries: Sequence[str]) -> None:
    """Check that all entries have a valid weight, or none has one.

    Raises:
        ArbError: only some have weights, or one is 0 or too large.
    """
    weights = [weight_of(entry)[1] for entry in entries]
    if all(weight is None for weight in weights):
        return
    for entry, weight in zip(entries, weights, strict=True):
        if not weight or weight > MAX_WEIGHT:
            raise ArbError(
                f"`{shown(entry)}` has no valid weight, and another text has one",
                f"give all of them one above 0 and up to {MAX_WEIGHT:,}, as in"
                " `--data a.txt:0.7 --data b.txt:0.3`, or none",
            )


def weight_of(entry: str) -> tuple[str, float | None]:
    """Split `book.txt:0.7` into the entry and its weight, unless a file has this name."""
    path, _, weight = entry.rpartition(":")
    is_weight = re.fullmatch(r"[0-9]+(\.[0-9]+)?|\.[0-9]+", weight)
    if not path or not is_weight or _mode(os.path.expanduser(entry)):
        return entry, None
    return path, float(weight)


def _missing_text(entries: Iterable[str]) -> TextError:
    return TextError(f"there is no text in {quoted(entries)}", "name files that are not empty")


def _missing_files(
    entry: str, *, is_named: bool, media: Collection[str] = frozenset()
) -> TextError:
    """Return the error of an entry without texts, with the kinds of media that it has."""
    if media:
        options = {"sound": "`--sound mulaw`", "picture": "`--picture rgb`"}
        return TextError(
            f"`{entry}` has no texts, only {' and '.join(f'{kind}s' for kind in sorted(media))}",
            f"train with {' or '.join(options[kind] for kind in sorted(media))}, or name a"
            " model that was",
        )
    return TextError(
        f"the folder `{entry}` has no text files" if is_named else f"nothing matches `{entry}`",
        "name a file, a glob in quotes, or a folder with files that are neither hidden nor binary",
    )


def _matches(pattern: str) -> Iterator[str]:
    """Yield the paths that a glob matches, like `glob.iglob`, but safe for cyclic links.

    `**` visits each folder once, by the first path that leads to it.
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
    """Yield a folder and all below it, also through links, except hidden ones; each once."""
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

    Runs and models below it are appended to `left_out`.
    """

    def refuse(error: OSError) -> None:
        raise unreadable(error.filename, error) from error

    files = []
    top = os.path.abspath(folder)
    for parent, folders, names in os.walk(top, onerror=refuse):
        folders[:] = [name for name in folders if name[0] != "." and name not in skip]
        saved = {name for name in names if name.endswith(SAVED)}
        if (written := _saved_files(parent)) is not None:
            if parent != top:
                left_out.append(parent)
                folders.clear()
                continue
            saved |= {name for name in (*folders, *names) if written.fullmatch(name)}
            folders[:] = [name for name in folders if name not in saved]
        left_out += [os.path.join(parent, name) for name in saved]
        about = DATASET_FILES if _has_dataset(parent) else ()
        names = [name for name in names if name not in saved and name not in about]
        paths = [Path(parent, name) for name in names if name[0] != "."]
        files += [path for path in paths if stat.S_ISREG(_mode(path))]
    return sorted(files, key=Path.as_posix)


def _saved_files(folder: str) -> re.Pattern[str] | None:
    """Return a pattern of the files of a run or a model for Transformers; None if it is neither."""
    for (config, others), written in ((RUN, RUN_FILES), (MODEL, MODEL_FILES)):
        names = (os.path.join(folder, name) for name in others)
        if os.path.isfile(os.path.join(folder, config)) and any(map(os.path.isfile, names)):
            return written
    return None


def belongs_to_saved(path: str) -> bool:
    """Return whether a path is a run or a model, or a file in one or in a folder of one."""
    parent, name = os.path.split(path)
    places = (name, parent), (os.path.basename(parent), os.path.dirname(parent))
    patterns = [(name, _saved_files(folder)) for name, folder in places]
    written = any(pattern is not None and pattern.fullmatch(name) for name, pattern in patterns)
    return written or _saved_files(path) is not None


def _has_dataset(folder: str) -> bool:
    """Return whether a folder is a dataset, or several splits of one, that datasets saved."""
    splits, *state = (os.path.isfile(os.path.join(folder, name)) for name in DATASET_FILES)
    return splits or all(state)


def _is_left_out(path: Path, conversion: Conversion) -> bool:
    """Return whether a file of a folder is binary (has a zero byte at its start) or unwanted."""
    name = path.name.lower()
    if medium_of(name):
        return not conversion.takes(name)
    if name.endswith(PACKED):
        return False
    if name.endswith(SHARD) and conversion.data_format not in (None, "bytes"):
        return False
    try:
        with path.open("rb") as file:
            content = file.read(PEEKED_BYTES)
    except OSError as error:
        raise unreadable(path, error) from error
    is_shard = name.endswith(SHARD) and imported("arbcli.data.shards:header_width")(content)
    return b"\0" in content and not is_shard


def may_have_records(path: Path) -> bool:
    """Return whether a file may have records, by its suffix."""
    return name_inside(path).endswith((*RECORDS, *TABLES, TAR))


def may_be_shard(path: Path, data_format: str | None) -> bool:
    """Return whether a file is to be read as a shard of tokens, by its suffix."""
    return name_inside(path).endswith(SHARD) and data_format != "bytes"


def name_inside(path: Path) -> str:
    """Return the file's name in lower case, without suffixes of compression."""
    name = path.name.lower()
    for suffix in COMPRESSED:
        name = name.removesuffix(suffix)
    return name


def _mode(path: str | Path) -> int:
    """Return the mode of a path with links followed, 0 if it does not exist."""
    try:
        return os.stat(path).st_mode
    except (FileNotFoundError, NotADirectoryError, ValueError):  # ValueError: path with a NUL
        return 0
    except OSError as error:
        raise unreadable(path, error) from error
