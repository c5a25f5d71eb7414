"""Compressed and structured files are read as their plain bytes, made once and checked."""

import codecs
import errno
import gzip
import json
import os
import sys
import tracemalloc
import zlib
from pathlib import Path
from types import ModuleType
from typing import Any
from unittest.mock import MagicMock

import pytest

from arbcli.base.errors import ArbError
from arbcli.data.conversion import RECORD_BYTES, texts_folder
from arbcli.data.files import DOCUMENTS, Conversion
from arbcli.data.opening import open_text, open_texts, plain_file

TEXT = ("naïve ternary weights\n" * 100).encode()


@pytest.fixture(autouse=True)
def cache(own_cache) -> Path:
    return texts_folder()


def read(path: Path, field: str | None = None) -> bytes:
    return plain_file(path, Conversion(field)).read_bytes()


def test_gzip_is_unpacked_once(tmp_path, cache):
    path = tmp_path / "book.txt.GZ"
    path.write_bytes(gzip.compress(TEXT))
    plain = plain_file(path)
    assert plain.read_bytes() == TEXT
    before = plain.stat().st_mtime_ns
    assert plain_file(path) == plain
    assert plain.stat().st_mtime_ns == before
    plain.write_bytes(TEXT[:-1] + b"!")  # not what was written
    assert read(path) == TEXT
    path.write_bytes(gzip.compress(b"another"))
    assert read(path) == b"another"
    assert not list(cache.glob(".*"))


def test_zstandard_is_unpacked(tmp_path):
    zstandard = pytest.importorskip("zstandard", reason="needs the extra `zst`")
    path = tmp_path / "book.txt.zst"
    path.write_bytes(zstandard.compress(TEXT))
    assert read(path) == TEXT
    path.write_bytes(zstandard.compress(TEXT) * 2)
    assert read(path) == TEXT * 2
    for data in (path.read_bytes()[:-9], b"x" * 50):
        path.write_bytes(data)
        with pytest.raises(ArbError, match="cannot be unpacked"):
            read(path)


@pytest.mark.parametrize("end", ["", "\n", "\n\n"])
@pytest.mark.parametrize("block", [7, 2**20])
@pytest.mark.parametrize("name", ["a.jsonl", "A.JSONL", "a.jsonl.gz"])
def test_field_of_records_is_the_text(tmp_path, name, block, end, monkeypatch):
    monkeypatch.setattr("arbcli.data.conversion.BLOCK_BYTES", block)
    lines = [json.dumps({"text": text, "id": 1}) for text in ("naïve", "two\nlines", "", "é")]
    data = ("\n".join(lines) + end).encode()
    (tmp_path / name).write_bytes(gzip.compress(data) if name.endswith(".gz") else data)
    expected = "naïve\ntwo\nlines\n\né\n".encode()
    assert read(tmp_path / name, "text") == expected
    with pytest.raises(ArbError, match=r"line 1 of .* it has no `body`"):
        read(tmp_path / name, "body")
    with pytest.raises(ArbError, match="it is neither a text nor"):
        read(tmp_path / name, "id")


@pytest.mark.parametrize("mark", [b"", codecs.BOM_UTF8], ids=["plain", "marked"])
@pytest.mark.parametrize("name", ["a.jsonl", "a.ndjson", "a.json", "array.json", "a.json.gz"])
def test_every_form_of_records_has_the_same_text(name, mark, tmp_path):
    records = [{"text": "a\nb", "id": 1}, {"text": "ü"}]
    data = "".join(json.dumps(record) + "\n" for record in records).encode()
    if name == "array.json":
        data = json.dumps(records, indent=2).encode()
    data = mark + data
    (tmp_path / name).write_bytes(gzip.compress(data) if name.endswith(".gz") else data)
    assert read(tmp_path / name, "text") == "a\nb\nü\n".encode()
    whole = plain_file(tmp_path / name, DOCUMENTS).read_bytes().removeprefix(codecs.BOM_UTF8)
    assert [json.loads(line) for line in whole.splitlines()] == records


def test_half_of_a_pair_of_surrogates_is_refused_by_its_line(tmp_path):
    (tmp_path / "a.jsonl").write_text('{"text": "a"}\n{"text": "half \\ud83d"}\n')
    with pytest.raises(ArbError, match=r"line 2 of .*surrogates not allowed"):
        read(tmp_path / "a.jsonl", "text")


def test_damaged_array_is_refused(tmp_path):
    (tmp_path / "a.json").write_text('[{"text": "a"}, {')
    with pytest.raises(ArbError, match=r"^`.*a.json`: Expecting property name"):
        read(tmp_path / "a.json", "text")
    (tmp_path / "a.json").write_text('["text"]')
    with pytest.raises(ArbError, match="line 1 of"):
        read(tmp_path / "a.json", "text")


def test_rows_of_a_table_are_documents_without_missing_values(tmp_path):
    arrow = pytest.importorskip("pyarrow", reason="needs the package pyarrow")
    parquet = pytest.importorskip("pyarrow.parquet", reason="needs the package pyarrow")
    records = [
        {"messages": [{"role": "user", "content": "ü"}], "tools": None},
        {"messages": [{"role": "user", "content": "a", "name": "n"}], "tools": ["t"]},
    ]
    parquet.write_table(arrow.Table.from_pylist(records), tmp_path / "a.parquet")
    lines = plain_file(tmp_path / "a.parquet", DOCUMENTS).read_bytes().splitlines()
    del records[0]["tools"]
    assert [json.loads(line) for line in lines] == records
    parquet.write_table(arrow.table({"a": [b"x"]}), tmp_path / "b.parquet")
    with pytest.raises(ArbError, match="a column that JSON has no form for"):
        plain_file(tmp_path / "b.parquet", DOCUMENTS)


def test_replaced_picture_of_a_record_is_read_again(tmp_path):
    pictures = pytest.importorskip("PIL.Image", reason="needs the package Pillow")
    path = tmp_path / "r.jsonl"
    path.write_text('{"parts": [{"text": "a"}, {"picture": "a.png"}]}\n')
    sizes = []
    for width in (4, 4, 6):
        pictures.new("RGB", (width, 4)).save(tmp_path / "a.png")
        sizes.append(len(plain_file(path, Conversion("parts", picture="rgb")).read_bytes()))
    assert sizes[0] == sizes[1] == sizes[2] - 2 * 4 * 3


class Zstandard(ModuleType):
    """The package as it is used here, by zlib: its objects read one frame, and hand on the rest."""

    ZstdError = zlib.error

    class ZstdDecompressor:
        def decompressobj(self) -> Any:
            return zlib.decompressobj()


@pytest.mark.parametrize("block", [1, 5, 2**20])
def test_frames_are_read_one_after_another_in_blocks_of_any_size(tmp_path, block, monkeypatch):
    """Runs without the package."""
    monkeypatch.setitem(sys.modules, "zstandard", Zstandard("zstandard"))
    monkeypatch.setattr("arbcli.data.conversion.BLOCK_BYTES", block)
    path = tmp_path / "book.txt.zst"
    path.write_bytes(zlib.compress(TEXT) + zlib.compress(b"") + zlib.compress(b"the end"))
    assert read(path) == TEXT + b"the end"
    for damaged in (path.read_bytes()[:-9], zlib.compress(TEXT) + b"x" * 50):
        path.write_bytes(damaged)
        with pytest.raises(ArbError, match="cannot be unpacked"):
            read(path)


def peak_of_reading(path: Path, field: str | None = None) -> tuple[int, int]:
    """Return how long a file unpacks to, and the most memory that Python held for it, in bytes."""
    tracemalloc.start()
    try:
        size = plain_file(path, Conversion(field)).stat().st_size
        return size, tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()


def frames(*texts: bytes) -> bytes:
    """Pack texts for `Zstandard`, or for the package itself where it is there."""
    return b"".join(map(zlib.compress, texts))


def test_frame_is_unpacked_a_part_at_a_time(tmp_path, monkeypatch):
    """All of it at once took 2.3 GB, of a file of 98 KB. Runs without the package."""
    monkeypatch.setitem(sys.modules, "zstandard", Zstandard("zstandard"))
    path = tmp_path / "bomb.zst"
    path.write_bytes(frames(b"a" * 40 * 2**20))  # of 40 KB
    size, held = peak_of_reading(path)
    assert size == 40 * 2**20
    assert held < 6 * 2**20


def test_bytes_after_a_frame_are_not_copied_for_each_frame(tmp_path, monkeypatch):
    """It took 58 GB of copies for a file of 2 MB. Runs without the package."""
    copied = []

    class Counted(Zstandard.ZstdDecompressor):
        def decompressobj(self) -> Any:
            frame = zlib.decompressobj()
            counted = MagicMock(wraps=frame)
            counted.decompress = lambda data: copied.append(len(data)) or frame.decompress(data)
            for name in ("eof", "unused_data"):
                setattr(type(counted), name, property(lambda _, name=name: getattr(frame, name)))
            return counted

    package = Zstandard("zstandard")
    package.ZstdDecompressor = Counted
    monkeypatch.setitem(sys.modules, "zstandard", package)
    path = tmp_path / "frames.zst"
    for number in (200, 400):
        path.write_bytes(frames(*[b""] * number, TEXT))
        copied.clear()
        assert read(path) == TEXT
        assert sum(copied) < 100 * path.stat().st_size


@pytest.mark.parametrize("name", ["a.jsonl", "a.jsonl.gz"])
def test_line_that_is_too_long_for_a_record_is_refused_before_it_is_read(name, tmp_path):
    line = b"{" + b"a" * 2 * RECORD_BYTES
    (tmp_path / name).write_bytes(gzip.compress(line, 1) if name.endswith(".gz") else line)
    tracemalloc.start()
    with pytest.raises(ArbError, match="has a line of more than 16,777,216 bytes"):
        read(tmp_path / name, "text")
    assert tracemalloc.get_traced_memory()[1] < RECORD_BYTES + 6 * 2**20
    tracemalloc.stop()


def test_record_as_long_as_may_be_is_read(tmp_path, monkeypatch):
    monkeypatch.setattr("arbcli.data.conversion.RECORD_BYTES", 1000)
    monkeypatch.setattr("arbcli.data.conversion.BLOCK_BYTES", 7)
    path = tmp_path / "a.jsonl"
    for length in (1000, 1001):
        line = b'{"text": "' + b"a" * (length - 12) + b'"}'
        path.write_bytes(b"\n".join([line, b'{"text": ""}'] * 2))
        if length == 1000:
            assert read(path, "text") == (b"a" * 988 + b"\n\n") * 2
    with pytest.raises(ArbError, match="has a line of more than 1,000 bytes"):
        read(path, "text")


def test_file_that_unpacks_to_too_much_is_refused_and_leaves_nothing(tmp_path, cache, monkeypatch):
    monkeypatch.setattr("arbcli.data.conversion.FEWEST_BYTES", 10**6)
    path = tmp_path / "bomb.gz"
    path.write_bytes(gzip.compress(b"a" * 3 * 10**6))  # of 3 KB
    with pytest.raises(ArbError, match="bytes, unpacks to more than 1,000,000") as caught:
        read(path)
    assert "`ARB_UNPACKED_GIB`" in caught.value.hint
    assert list(cache.iterdir()) == []
    monkeypatch.setenv("ARB_UNPACKED_GIB", "1")
    assert len(read(path)) == 3 * 10**6
    monkeypatch.delenv("ARB_UNPACKED_GIB")
    path.write_bytes(gzip.compress(os.urandom(10**5) * 30))  # 30 times its size
    assert len(read(path)) == 3 * 10**6


@pytest.mark.parametrize("value", ["0", "-1", "1.5", "", "x"])
def test_limit_that_is_not_a_number_is_refused(value, tmp_path, monkeypatch):
    monkeypatch.setenv("ARB_UNPACKED_GIB", value)
    (tmp_path / "a.gz").write_bytes(gzip.compress(TEXT))
    with pytest.raises(ArbError, match=f"the environment variable `ARB_UNPACKED_GIB` is `{value}`"):
        read(tmp_path / "a.gz")


def test_full_disk_of_the_cache_is_not_blamed_on_the_text(tmp_path, monkeypatch):
    (tmp_path / "book.gz").write_bytes(gzip.compress(TEXT))
    full = OSError(errno.ENOSPC, "No space left on device")
    monkeypatch.setattr("arbcli.base.caches.os.fsync", MagicMock(side_effect=full))
    with pytest.raises(ArbError, match=r"^cannot write to the cache `.*texts`: No space left"):
        read(tmp_path / "book.gz")


def test_rows_without_a_text_are_left_out(tmp_path, monkeypatch):
    """Runs without the package."""
    data = {"text": ["naïve", None, b"two"], "id": [1, 2, 3]}
    arrow, parquet = ModuleType("pyarrow"), MagicMock()
    arrow.ArrowException = KeyError
    table = parquet.ParquetFile.return_value.__enter__.return_value
    parquet.read_schema.return_value.names = [*data]
    arrow.types = MagicMock(**{"is_nested.return_value": False})

    def batches(batch_size, columns):
        for value in data[columns[0]]:  # one row at a time
            rows = MagicMock()
            rows.column(0).__iter__.return_value = [MagicMock(as_py=lambda value=value: value)]
            yield rows

    table.iter_batches = batches
    monkeypatch.setitem(sys.modules, "pyarrow", arrow)
    monkeypatch.setitem(sys.modules, "pyarrow.parquet", parquet)
    path = tmp_path / "a.parquet"
    path.write_bytes(b"a table")
    assert read(path, "text") == "naïve\ntwo\n".encode()
    for field, message in ((None, "has columns"), ("body", "no column `body`"), ("id", "no text")):
        with pytest.raises(ArbError, match=message):
            read(path, field)
    parquet.ParquetFile.side_effect = arrow.ArrowException("cut")
    for error in (arrow.ArrowException("cut"), UnicodeDecodeError("utf-8", b"", 0, 1, "cut")):
        parquet.ParquetFile.side_effect = error
        with pytest.raises(ArbError, match=r"cannot be read: .*cut"):
            read(path, "id")
    parquet.ParquetFile.side_effect = arrow.ArrowException("two\nlines")
    with pytest.raises(ArbError, match=r"cannot be read: [^\n]*lines"):
        read(path, "id")


def test_column_of_a_table_is_the_text(tmp_path):
    arrow = pytest.importorskip("pyarrow", reason="needs the extra `parquet`")
    from pyarrow import parquet

    path = tmp_path / "a.parquet"
    parquet.write_table(arrow.table({"text": ["naïve", None, "two"], "id": [1, 2, 3]}), path)
    assert read(path, "text") == "naïve\ntwo\n".encode()
    for field, message in ((None, "has columns"), ("body", "no column `body`"), ("id", "no text")):
        with pytest.raises(ArbError, match=message):
            read(path, field)
    path.write_bytes(path.read_bytes()[:-9])
    with pytest.raises(ArbError, match="cannot be read"):
        read(path, "text")
    parquet.write_table(arrow.table({"text": ["naïve"]}), path, compression="none")
    path.write_bytes(path.read_bytes().replace("naïve".encode(), b"na\x80\x80ve"))
    with pytest.raises(ArbError, match="a value of `text` is not UTF-8"):
        read(path, "text")
    parquet.write_table(arrow.table({"text": [["naïve"]]}), path)
    with pytest.raises(ArbError, match="has no text"):
        read(path, "text")


@pytest.mark.parametrize("cut", [5, -3])
def test_damaged_file_leaves_nothing(tmp_path, cache, cut):
    path, packed = tmp_path / "book.gz", gzip.compress(TEXT)
    for damaged in (packed[:cut], packed[:10] + b"\xff" * 8 + packed[18:], b"x" + packed):
        path.write_bytes(damaged)
        with pytest.raises(ArbError, match="cannot be unpacked"):
            read(path)
        assert list(cache.iterdir()) == []


def test_link_leads_to_the_cached_file(tmp_path):
    (tmp_path / "book.gz").write_bytes(gzip.compress(TEXT))
    (tmp_path / "link.gz").symlink_to("book.gz")
    assert plain_file(tmp_path / "link.gz") == plain_file(tmp_path / "book.gz")


@pytest.mark.parametrize(("name", "package"), [("a.zst", "zstandard"), ("a.parquet", "pyarrow")])
def test_missing_package_is_one_clear_line(tmp_path, monkeypatch, name, package):
    (tmp_path / name).write_bytes(TEXT)
    monkeypatch.setitem(__import__("sys").modules, package, None)
    with pytest.raises(ArbError, match=f"needs the package {package}") as caught:
        read(tmp_path / name, "text")
    assert caught.value.hint == f"install it: `pip install {package}`"


def test_cache_that_cannot_be_written_is_reported(tmp_path, monkeypatch):
    (tmp_path / "book.gz").write_bytes(gzip.compress(TEXT))
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))
    with pytest.raises(ArbError, match="cannot write to the cache") as caught:
        read(tmp_path / "book.gz")
    assert "XDG_CACHE_HOME" in caught.value.hint


def test_texts_are_split_as_if_they_were_plain(tmp_path):
    packed, plain = tmp_path / "packed", tmp_path / "plain"
    for folder in (packed, plain):
        folder.mkdir()
    for index in range(12):
        part = TEXT[: 100 + index]
        (packed / f"{index}.gz").write_bytes(gzip.compress(part))
        (plain / f"{index}.gz.txt").write_bytes(part)
    texts = [open_texts([str(folder)], None, seed=0, context=8) for folder in (packed, plain)]
    assert [len(text.train) + len(text.val) for text in texts] == [12 * 100 + 66] * 2
    assert len(open_text([str(packed)])[0]) == 12 * 100 + 66
    single = open_texts([str(packed / "3.gz")], None, seed=0, context=8)
    assert (len(single.train), len(single.val)) == (93, 10)
