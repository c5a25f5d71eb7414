"""Files of the cache are used only if they are intact and no other user can have written them."""

import errno
import gzip
import json
import os
import pwd
import stat
import tempfile
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from unittest import mock

import numpy as np
import pytest

from arbcli.base import caches as cached_files
from arbcli.base.caches import cache_folder, is_cached, private_folder, read_cached, write_cached
from arbcli.base.errors import ArbError
from arbcli.data.chats import Chats
from arbcli.data.opening import plain_file
from arbcli.data.text import Text
from arbcli.data.tokens import TokenText

CONTENT = b"ternary weights\n" * 1000


@pytest.fixture(autouse=True)
def path(tmp_path, monkeypatch) -> Path:
    """Write a file to a cache of its own."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    path = cache_folder() / "texts" / "file"
    write_cached(path, [CONTENT[:7], b"", CONTENT[7:]])
    return path


def owned_by_another(path: Path, monkeypatch) -> None:
    """Let a file have an owner that does not run the tests."""
    number = path.lstat().st_ino

    def seen_by(real: Callable[..., os.stat_result]) -> Callable[..., os.stat_result]:
        def status(*given, **how) -> os.stat_result:
            status = real(*given, **how)
            others = os.stat_result((*status[:4], os.geteuid() + 1, *status[5:]))
            return others if status.st_ino == number else status

        return status

    for name in ("stat", "fstat"):
        monkeypatch.setattr(os, name, seen_by(getattr(os, name)))


DAMAGE = {
    "missing": lambda path, digest: path.unlink(),
    "without a digest": lambda path, digest: digest.unlink(),
    "truncated": lambda path, digest: os.truncate(path, 100),
    "altered": lambda path, digest: path.write_bytes(CONTENT[:-1] + b"?"),
    "empty digest": lambda path, digest: digest.write_bytes(b""),
    "writable by the group": lambda path, digest: path.chmod(0o620),
    "writable by all": lambda path, digest: path.chmod(0o602),
    "digest writable by all": lambda path, digest: digest.chmod(0o602),
    "folder writable by all": lambda path, digest: path.parent.chmod(0o702),
    "folder": lambda path, digest: (path.unlink(), path.mkdir()),
    "link": lambda path, digest: (path.rename(path.with_name("other")), path.symlink_to("other")),
    "FIFO": lambda path, digest: (path.unlink(), os.mkfifo(path, 0o600)),
}


@pytest.mark.parametrize("name", DAMAGE)
def test_file_that_is_not_intact_is_not_used_and_is_written_again(name, path):
    DAMAGE[name](path, path.with_name("file.sha256"))
    assert not is_cached(path)
    assert read_cached(path) is None
    if name == "folder":
        path.rmdir()
    write_cached(path, [CONTENT])
    assert read_cached(path) == CONTENT


@pytest.mark.parametrize("name", ["file", "file.sha256", "."])
def test_file_of_another_user_is_not_used(name, path, monkeypatch):
    owned_by_another(path.parent / name, monkeypatch)
    assert not is_cached(path)
    assert read_cached(path) is None
    monkeypatch.undo()
    assert is_cached(path)


@pytest.fixture
def folder(tmp_path, monkeypatch) -> Path:
    """Return the cache of a user without a home, which is not yet made."""
    monkeypatch.delenv("XDG_CACHE_HOME")
    monkeypatch.delenv("HOME", raising=False)
    monkeypatch.setattr(pwd, "getpwuid", mock.Mock(side_effect=KeyError))
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    monkeypatch.chdir(tmp_path)
    return tmp_path / f"arb-{os.geteuid()}"


def test_user_without_a_home_caches_in_an_own_temporary_folder(folder):
    path = cache_folder() / "file"
    write_cached(path, [CONTENT])
    assert private_folder("modules") == folder / "modules"
    assert is_cached(path)
    assert read_cached(folder / "file") == CONTENT
    for made in (folder, folder / "modules"):
        assert stat.S_IMODE(made.stat().st_mode) == 0o700
    assert sorted(file.name for file in folder.iterdir()) == ["file", "file.sha256", "modules"]
    for file in (folder / "file", folder / "file.sha256"):
        assert stat.S_IMODE(file.stat().st_mode) == 0o600
    assert not Path("~").exists()


@pytest.mark.parametrize("kind", ["folder", "link"])
def test_temporary_folder_of_another_user_is_not_used(kind, folder, monkeypatch):
    if kind == "folder":
        folder.mkdir(mode=0o755)
        monkeypatch.setattr(os, "chmod", mock.Mock(side_effect=PermissionError))
    else:
        Path("own").mkdir(mode=0o700)
        folder.symlink_to("own")
    owned_by_another(folder, monkeypatch)
    assert private_folder("modules") is None
    with pytest.raises(ArbError, match="cannot write to the cache"):
        write_cached(folder / "file", [CONTENT])
    assert list(folder.iterdir()) == []


def test_failed_write_keeps_the_previous_file(path):
    full = OSError(errno.ENOSPC, "No space left on device")

    def blocks():
        yield b"half"
        raise full

    with pytest.raises(ArbError, match=r"to the cache `.*texts`: No space left on device") as told:
        write_cached(path, blocks())
    assert "set `XDG_CACHE_HOME`" in told.value.hint
    assert read_cached(path) == CONTENT
    assert len(list(path.parent.iterdir())) == 2
    with pytest.raises(ArbError, match="cannot write to the cache"):
        write_cached(path / "below" / "file", [CONTENT])


def test_file_is_on_the_disk_before_it_has_its_name(path, monkeypatch):
    done = []
    for name in ("fsync", "replace"):
        real = getattr(os, name)
        call = lambda *given, name=name, real=real: (done.append(name), real(*given))[1]  # noqa: E731
        monkeypatch.setattr(cached_files.os, name, call)
    # it is renamed within a folder: another file system would refuse
    monkeypatch.setattr(tempfile, "tempdir", str(path / "elsewhere"))
    write_cached(path, [CONTENT])
    assert done == ["fsync", "replace", "fsync"] * 2


BYTES = SimpleNamespace(
    digest="bytes", dtype=np.dtype("<u2"), beginning=[], specials={},
    encode=list, encode_all=lambda texts: [[*text] for text in texts],
    encode_marked=lambda text, specials: [(ord(x), (n, n + 1)) for n, x in enumerate(text)],
)  # fmt: skip
"""A tokenizer."""


def unpacked(path: Path, start: int, stop: int) -> bytes:
    packed = path.with_suffix(f".{start}.gz")
    packed.write_bytes(gzip.compress(path.read_bytes()[start:stop], 0, mtime=0))
    os.utime(packed, ns=(0, path.stat().st_mtime_ns))
    return Text([plain_file(packed)]).read(0, stop - start)


def tokens_of(path: Path, start: int, stop: int) -> bytes:
    text = TokenText(Text.from_parts([(path, start, stop)]), BYTES)
    return bytes(text.window_batch([0], len(text))[0].tolist())


def documents_of(path: Path, start: int, stop: int) -> bytes:
    chats = Chats(Text.from_parts([(path, start, stop)]), "+t", BYTES, None, 64)
    targets = chats.packed_batch([0])[1]
    return bytes(targets[targets >= 0].tolist())


@pytest.mark.parametrize("read", [unpacked, tokens_of, documents_of])
def test_file_is_not_taken_for_another_of_its_name_size_or_time(read, tmp_path, monkeypatch):
    """Nor is a part of a file, as a held-out one, for another part."""
    path = Path("text")
    for folder in "ab":
        (tmp_path / folder).mkdir()
        monkeypatch.chdir(tmp_path / folder)
        for letter, time in ((folder, 5), (folder.upper(), 6), (f"{folder}z", 6)):
            texts = [3 * letter + number for number in "12"]
            lines = [json.dumps({"t": text}).encode() + b"\n" for text in texts]
            path.write_bytes(b"".join(lines))
            os.utime(path, ns=(time, time))
            for text, line, start in zip(texts, lines, (0, len(lines[0])), strict=True):
                wanted = text[1:].encode() if read is documents_of else line
                assert read(path, start, start + len(line)) == wanted
