"""Compressed and structured files are read as their plain bytes, made once and checked."""

import codecs
import gzip
import json
import os
import sys
import tracemalloc
import zlib
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from arbcli.base.errors import ArbError
from arbcli.data.conversion import RECORD_BYTES, texts_folder
from arbcli.data.files import DOCUMENTS, Conversion
from arbcli.data.opening import plain_file

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


@pytest.mark.parametrize("mark", [b"", codecs.BOM_UTF8], ids=["plain", "marked"])
@pytest.mark.parametrize("end", ["", "\n", "\n\n"])
@pytest.mark.parametrize("block", [7, 2**20])
@pytest.mark.parametrize("name", ["A.JSONL", "a.jsonl.gz", "a.ndjson", "a.json", "array.json"])
def test_field_of_records_is_the_text(tmp_path, name, block, end, mark, monkeypatch):
    monkeypatch.setattr("arbcli.data.conversion.BLOCK_BYTES", block)
    texts = "naïve", "two\nlines", None, "", "é"
    records = [{"text": text, "id": 1} for text in texts]
    data = "\n".join(json.dumps(record) for record in records) + end
    if name == "array.json":
        data = json.dumps(records, indent=2)
    data = mark + data.encode()
    path = tmp_path / name
    path.write_bytes(gzip.compress(data) if name.endswith(".gz") else data)
    assert read(path, "text") == "naïve\ntwo\nlines\n\né\n".encode()
    whole = plain_file(path, DOCUMENTS).read_bytes().removeprefix(codecs.BOM_UTF8)
    assert [json.loads(line) for line in whole.splitlines() if line] == records
    with pytest.raises(ArbError, match=r"line 1 of .* it has no `body`") as caught:
        read(path, "body")
    assert caught.value.hint.startswith("its fields are `text`, `id`: ")
    with pytest.raises(ArbError, match="it is neither a text nor"):
        read(path, "id")


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
    columns = {"a": [b"x"], "b": [float("nan")], "c": arrow.array([0], arrow.date32())}
    parquet.write_table(arrow.table(columns), tmp_path / "b.parquet")
    line = plain_file(tmp_path / "b.parquet", DOCUMENTS).read_bytes()
    assert line == b'{"a": null, "b": null, "c": "1970-01-01"}\n'


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


def test_frame_is_unpacked_a_part_at_a_time(tmp_path, monkeypatch):
    """All of it at once took 2.3 GB, of a file of 98 KB. Runs without the package."""
    monkeypatch.setitem(sys.modules, "zstandard", Zstandard("zstandard"))
    path = tmp_path / "bomb.zst"
    path.write_bytes(zlib.compress(b"a" * 16 * 2**20))  # of 16 KB
    tracemalloc.start()
    assert plain_file(path).stat().st_size == 16 * 2**20
    assert tracemalloc.get_traced_memory()[1] < 6 * 2**20
    tracemalloc.stop()


@pytest.mark.parametrize("name", ["a.jsonl", "a.jsonl.gz"])
def test_line_that_is_too_long_for_a_record_is_refused_before_it_is_read(name, tmp_path):
    line = b"{" + b"a" * 2 * RECORD_BYTES
    (tmp_path / name).write_bytes(gzip.compress(line, 1) if name.endswith(".gz") else line)
    tracemalloc.start()
    with pytest.raises(ArbError, match="has a line of more than 16,777,216 bytes"):
        read(tmp_path / name, "text")
    assert tracemalloc.get_traced_memory()[1] < RECORD_BYTES + 6 * 2**20
    tracemalloc.stop()


def test_file_that_unpacks_to_too_much_is_refused_and_leaves_nothing(tmp_path, cache, monkeypatch):
    monkeypatch.setattr("arbcli.data.conversion.MIN_LIMIT", 10**6)
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


def test_zstandard_is_unpacked(tmp_path):
    zstandard = pytest.importorskip("zstandard", reason="needs the extra `zst`")
    path = tmp_path / "book.txt.zst"
    path.write_bytes(zstandard.compress(TEXT) * 2)
    assert read(path) == TEXT * 2
    path.write_bytes(path.read_bytes()[:-9])
    with pytest.raises(ArbError, match="cannot be unpacked"):
        read(path)
