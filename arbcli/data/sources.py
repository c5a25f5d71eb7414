"""Texts that are not named by their files: standard input, and datasets of Hugging Face."""

import os
import re
import sys
import tempfile
from functools import cache
from hashlib import sha256
from pathlib import Path

from arbcli.base.caches import is_cached, private_folder, write_cached
from arbcli.base.errors import ArbError, library_errors, optional_module, os_errors, quoted
from arbcli.base.reading import read_json, shown
from arbcli.data.conversion import BLOCK_BYTES, texts_folder
from arbcli.data.files import HUB

DICT, STATE = "dataset_dict.json", "state.json"
NAME = re.compile(r"\w[\w.-]*")
"""Names of splits and of files in a folder of a dataset."""


@cache
def stdin_file() -> Path:
    """Write standard input to a file in the cache, which is named by its digest; once.

    Raises:
        ArbError: it is a terminal, or one of several processes; or the cache cannot be written.
    """
    if sys.stdin is None or sys.stdin.isatty():
        raise ArbError(
            "`-` is standard input, and nothing is piped to it",
            "pipe a text, as in `cat book.txt | arb train --data -`, or name a file",
        )
    if os.environ.get("WORLD_SIZE", "1") != "1":
        raise ArbError("several processes cannot share standard input", "name a file")
    digest = sha256()
    with (
        os_errors("read", "standard input", "free some space, or name a file"),
        tempfile.TemporaryFile(dir=private_folder(texts_folder().name)) as file,
    ):
        while block := sys.stdin.buffer.read(BLOCK_BYTES):
            digest.update(block)
            file.write(block)
        file.seek(0)
        path = texts_folder() / f"stdin-{digest.hexdigest()}"
        if not is_cached(path):
            write_cached(path, iter(lambda: file.read(BLOCK_BYTES), b""))
    return path


def saved_dataset(folder: Path) -> list[Path]:
    """List the Arrow files of a folder that `save_to_disk` of datasets wrote, in their order.

    Raises:
        ArbError: the folder has several splits, or is damaged.
    """
    if (folder / DICT).is_file():
        splits = read_json(folder / DICT, {"splits": list[str]})["splits"]
        if len(splits) != 1:
            raise _several_splits(str(folder), splits, "/")
        _check_name(splits[0], folder / DICT)
        folder /= splits[0]
    files = read_json(folder / STATE, {"_data_files": list[dict]})["_data_files"]
    names = [file.get("filename") for file in files]
    for name in names:
        _check_name(name, folder / STATE)
    return [folder / name for name in names]


def _check_name(name: object, file: Path) -> None:
    if not isinstance(name, str) or not NAME.fullmatch(name):
        raise ArbError(
            f"`{file}` names `{shown(name)}`, which is not in its folder",
            "save the dataset again with `save_to_disk`",
        )


def hub_files(entry: str) -> list[Path]:
    """List the Arrow files of `hf:NAME[:[CONFIG:]SPLIT]`, loaded by the package datasets.

    Raises:
        ArbError: the package is missing, or cannot load the dataset, or it has several splits.
    """
    datasets = optional_module("datasets", entry, "datasets", "'arb[datasets]'")
    name, *others = entry.removeprefix(HUB).split(":")
    config, split = ([None, None, *others])[-2:] if len(others) < 3 else (None, "")
    if not name or (split is not None and not NAME.fullmatch(split)):
        raise ArbError(
            f"`{entry}` names no dataset",
            "write `hf:NAME`, `hf:NAME:SPLIT` or `hf:NAME:CONFIG:SPLIT`",
        )
    hint = "check its name, and the connection to the hub; or name files"
    with library_errors(f"`{entry}` cannot be loaded", hint, (OSError,)):
        loaded = datasets.load_dataset(name, config, split=split, keep_in_memory=False)
    if split is None:
        if len(loaded) != 1:
            raise _several_splits(entry, [*loaded], ":")
        (loaded,) = loaded.values()
    return [Path(file["filename"]) for file in loaded.cache_files]


def _several_splits(name: str, splits: list[str], separator: str) -> ArbError:
    return ArbError(
        f"`{name}` has the splits {quoted(splits) or 'of nothing'}",
        f"name one of them, as in `{name}{separator}train`",
    )
