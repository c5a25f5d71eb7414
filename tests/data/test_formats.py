"""Every form of a text has the windows of the plain text; damaged files are refused in one line."""

import gzip
import io
import json
import random
import sys
import tarfile
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from made_runs import TINY

import arbcli
from arbcli.base.errors import ArbError
from arbcli.data import sources
from arbcli.data.conversion import texts_folder
from arbcli.data.files import DOCUMENTS, Conversion, absolute_entry, check_named, find_files
from arbcli.data.opening import open_text, open_texts, plain_file
from arbcli.data.text import Text, digest
from arbcli.data.tokens import Tokenizer, tokenised
from arbcli.training.directory import read_facts

pytestmark = pytest.mark.usefixtures("own_cache")

DOCUMENTS_OF_TEXT = [f"document {number}: naïve, größer" for number in range(60)]
PLAIN_TEXT = "".join(f"{document}\n" for document in DOCUMENTS_OF_TEXT).encode()


def assert_same_windows(text: Text, expected: Text) -> None:
    assert len(text) == len(expected)
    starts = expected.starts(b"a key", 7, 9)
    assert text.starts(b"a key", 7, 9) == starts
    assert torch.equal(text.window_batch(starts, 9), expected.window_batch(starts, 9))
    everything = text.window_batch([0], len(text)), expected.window_batch([0], len(text))
    assert torch.equal(*everything)


def pipe(content: bytes, monkeypatch) -> None:
    """Make `content` the standard input."""
    sources.stdin_file.cache_clear()
    piped = SimpleNamespace(buffer=io.BytesIO(content), isatty=lambda: False)
    monkeypatch.setattr(sys, "stdin", piped)


@pytest.fixture(autouse=True)
def _no_stdin():
    yield
    sources.stdin_file.cache_clear()


def write_tar(path: Path, members: dict[str, bytes]) -> None:
    with tarfile.open(path, "w:gz" if path.suffix == ".gz" else "w") as archive:
        for name, content in members.items():
            entry = tarfile.TarInfo(name)
            entry.size = len(content)
            archive.addfile(entry, io.BytesIO(content))


def write_table(path: Path, documents: list[str]) -> None:
    arrow = pytest.importorskip("pyarrow", reason="needs the package pyarrow")
    table = arrow.table({"id": range(len(documents)), "text": documents})
    if path.suffix == ".parquet":
        from pyarrow import parquet

        parquet.write_table(table, path)
        return
    new = arrow.ipc.new_stream if "stream" in path.name else arrow.ipc.new_file
    options = arrow.ipc.IpcWriteOptions(compression="lz4" if path.suffix == ".feather" else None)
    with new(str(path), table.schema, options=options) as writer:
        writer.write_table(table, max_chunksize=25)


def saved_dataset(folder: Path) -> str:
    datasets = pytest.importorskip("datasets", reason="needs the package datasets")
    dataset = datasets.Dataset.from_dict({"text": DOCUMENTS_OF_TEXT, "id": [*range(60)]})
    parts = {"train": dataset, "test": dataset.select(range(3))}
    datasets.DatasetDict(parts).save_to_disk(folder / "data", num_shards={"train": 3, "test": 1})
    return str(folder / "data" / "train")


def hub_dataset(folder: Path, monkeypatch) -> str:
    datasets = pytest.importorskip("datasets", reason="needs the package datasets")
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", folder / "hub")
    (folder / "local").mkdir()
    lines = (json.dumps({"text": document}) + "\n" for document in DOCUMENTS_OF_TEXT)
    (folder / "local" / "train.jsonl").write_text("".join(lines), encoding="utf-8")
    return f"hf:{folder / 'local'}:train"


FORMS = (
    "stream.arrow", "file.arrow", "a.feather", "a.parquet", "txt.tar", "txt.tar.gz", "json.tar",
    "-", "saved", "hub",
)  # fmt: skip


@pytest.mark.parametrize("form", FORMS)
def test_every_form_has_the_windows_of_the_plain_text(form, tmp_path, monkeypatch):
    (tmp_path / "plain.txt").write_bytes(PLAIN_TEXT)
    entry, field = str(tmp_path / form), "text"
    if form == "-":
        pipe(PLAIN_TEXT, monkeypatch)
        entry, field = "-", None
    elif form == "saved":
        entry = saved_dataset(tmp_path)
    elif form == "hub":
        entry = hub_dataset(tmp_path, monkeypatch)
    elif form == "json.tar":
        lines = [json.dumps({"text": document}).encode() for document in DOCUMENTS_OF_TEXT]
        write_tar(tmp_path / form, {f"a/{n:03}.json": line for n, line in enumerate(lines)})
    elif ".tar" in form:
        field = None
        texts = {f"{n:03}.txt": text.encode() for n, text in enumerate(DOCUMENTS_OF_TEXT)}
        # by key, whatever the order in the archive; nothing else is text
        members = dict(reversed(texts.items())) | {"000.jpg": b"\0", ".x.txt": b"x", "a.cls": b"1"}
        write_tar(tmp_path / form, members)
    else:
        write_table(tmp_path / form, DOCUMENTS_OF_TEXT)
    conversion = Conversion(field)
    check_named([entry], field)
    plain, _ = open_text([str(tmp_path / "plain.txt")])
    text, description = open_text([entry], conversion)
    assert_same_windows(text, plain)
    assert description.startswith(entry)
    split = open_texts([entry], None, seed=0, context=8, conversion=conversion)
    if form != "saved":  # of three files
        expected = open_texts([str(tmp_path / "plain.txt")], None, seed=0, context=8)
        assert_same_windows(split.train, expected.train)
        assert_same_windows(split.val, expected.val)
    again = open_texts([absolute_entry(entry)], None, seed=0, context=8, conversion=conversion)
    assert digest(again.train) == digest(split.train)


def test_changed_archive_and_dataset_are_read_again(tmp_path):
    for name in ("a.tar", "a.tar.gz"):
        for content in (b"first", b"second"):
            write_tar(tmp_path / name, {"a.txt": content})
            assert plain_file(tmp_path / name).read_bytes() == content + b"\n"
    for name in ("b.tar", "b.tar.gz"):
        write_tar(tmp_path / name, {"a.txt": b"text", "a.json": b'{"b": "json"}'})
        assert plain_file(tmp_path / name, Conversion("b")).read_bytes() == b"json\n"
        assert plain_file(tmp_path / name).read_bytes() == b"text\n"
        assert plain_file(tmp_path / name, DOCUMENTS).read_bytes() == b'{"b": "json"}\n'


def test_folder_of_a_dataset_is_its_files_without_metadata(tmp_path):
    train = saved_dataset(tmp_path)
    (tmp_path / "other.txt").write_text("other")
    names = [file.name for file in find_files([train], [], Conversion("text"))]
    assert names == [f"data-{number:05}-of-00003.arrow" for number in range(3)]
    everything = find_files([str(tmp_path)], [], Conversion("text"))
    assert [file.name for file in everything] == ["data-00000-of-00001.arrow", *names, "other.txt"]
    with pytest.raises(ArbError, match="has the splits `train`, `test`") as caught:
        find_files([str(tmp_path / "data")], [], Conversion("text"))
    assert f"{tmp_path / 'data'}/train" in caught.value.hint
    (Path(train) / names[1]).unlink()
    with pytest.raises(ArbError, match="data-00001-of-00003"):
        find_files([train], [], Conversion("text"))
    state = Path(train) / "state.json"
    for name in ("../../other.txt", "/etc/passwd", "", None):
        state.write_text(json.dumps({"_data_files": [{"filename": name}]}))
        with pytest.raises(ArbError, match="which is not in its folder"):
            find_files([train], [], Conversion("text"))


def test_dataset_of_the_hub_is_named_exactly(tmp_path, monkeypatch):
    entry = hub_dataset(tmp_path, monkeypatch)
    (only,) = find_files([entry.removesuffix(":train")], [], Conversion("text"))
    assert [only] == find_files([entry], [], Conversion("text"))
    for name in ("hf:", f"{entry}[:1]", f"{entry}+test", f"{entry}:b:c"):
        with pytest.raises(ArbError, match="names no dataset"):
            find_files([name], [], Conversion("text"))
    for name in (f"hf:{tmp_path}/nothing:train", entry.replace("train", "test")):
        with pytest.raises(ArbError, match="cannot be loaded: ") as caught:
            find_files([name], [], Conversion("text"))
        assert "\n" not in str(caught.value)
    monkeypatch.setitem(sys.modules, "datasets", None)
    for look in (lambda: check_named([entry], "text"), lambda: find_files([entry], [], DOCUMENTS)):
        with pytest.raises(ArbError, match="needs the package datasets, which is not installed"):
            look()


def test_run_of_stdin_is_resumed_from_the_cache(tmp_path, monkeypatch):
    pipe(PLAIN_TEXT, monkeypatch)
    config = arbcli.configure(data=("-",), **TINY, backend="torch", steps=2)
    arbcli.train(config, out=tmp_path / "run")
    (path,) = read_facts(tmp_path / "run")["text"]["paths"]["data"]
    assert Path(path).parent == texts_folder()
    assert Path(path).read_bytes() == PLAIN_TEXT
    sources.stdin_file.cache_clear()
    monkeypatch.setattr(sys, "stdin", None)
    assert arbcli.resume(tmp_path / "run", steps=3).steps == 3
    with pytest.raises(ArbError, match="nothing is piped"):
        sources.stdin_file()
    pipe(PLAIN_TEXT, monkeypatch)
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.raises(ArbError, match="several processes cannot share"):
        sources.stdin_file()


@pytest.fixture(scope="module")
def tokenizer(byte_tokenizer) -> Tokenizer:
    """A tokenizer of bytes and words, of which some characters are cut into several tokens."""
    return Tokenizer.read(byte_tokenizer)


def header(magic: int, version: int, tokens: int) -> bytes:
    return np.array([magic, version, tokens, *[0] * 253], "<i4").tobytes()


def write_shard(path: Path, tokens: list[int], width: int, *, has_header: bool) -> None:
    magic = (20240520, 1) if width == 2 else (20240801, 7)
    beginning = header(*magic, len(tokens)) if has_header else b""
    path.write_bytes(beginning + np.array(tokens, f"<u{width}").tobytes())


@pytest.mark.parametrize(
    ("width", "has_header", "chunk"),
    [(2, True, 3), (2, False, 4096), (4, True, 4096), (4, False, 3)],
)
def test_shard_has_the_windows_of_the_tokenised_text(
    width, has_header, chunk, tokenizer, tmp_path, monkeypatch
):
    monkeypatch.setattr("arbcli.data.shards.CHUNK", chunk)
    (tmp_path / "a.txt").write_bytes(PLAIN_TEXT)
    write_shard(tmp_path / "a.bin", tokenizer.encode(PLAIN_TEXT), width, has_header=has_header)
    conversion = Conversion(data_format=None if has_header else f"tokens{8 * width}")
    shard, _ = open_text([str(tmp_path / "a.bin")], conversion)
    plain, _ = open_text([str(tmp_path / "a.txt")])
    text, expected = tokenised(shard, tokenizer), tokenised(plain, tokenizer)
    assert_same_windows(text, expected)
    assert text.source.read(0, len(text.source)) == PLAIN_TEXT
    assert text.symbol_bytes == expected.symbol_bytes
    assert [path for path, *_ in text.pieces] == [tmp_path / "a.bin"]
    folder = tmp_path / "folder"
    folder.mkdir()
    (tmp_path / "a.bin").rename(folder / "a.bin")
    split = open_texts([str(folder)], None, seed=0, context=8, conversion=conversion)
    parts = [tokenised(part, tokenizer) for part in (split.train, split.val)]
    size = len(text)
    assert [len(part) for part in parts] == [size - size // 10, size // 10]
    joined = torch.cat([part.window_batch([0], len(part))[0] for part in parts])
    assert torch.equal(joined, expected.window_batch([0], size)[0])


def test_documents_of_a_shard_keep_their_end_token(tokenizer, tmp_path):
    end = tokenizer.special("<|im_end|>")
    documents = (tokenizer.encode(text.encode()) for text in DOCUMENTS_OF_TEXT)
    tokens = [token for document in documents for token in (*document, end)]
    digests = set()
    for name, width in (("a.bin", 2), ("b.bin", 4)):
        write_shard(tmp_path / name, tokens, width, has_header=True)
        shard = open_text([str(tmp_path / name)])[0]
        text = tokenised(shard, tokenizer)
        assert text.window_batch([0], len(text))[0].tolist() == tokens
        assert text.source.read(0, len(text.source)) == PLAIN_TEXT
        digests |= {digest(text), digest(shard)}
    assert len(digests) == 2
    (tmp_path / "c.txt").write_bytes(PLAIN_TEXT)
    write_shard(tmp_path / "d.bin", tokens * 2, 2, has_header=False)
    formats = (Conversion(data_format=form) for form in ("bytes", "tokens16", "tokens32"))
    read = [open_text([str(tmp_path / "d.bin")], form)[0] for form in formats]
    assert len({*map(digest, read)}) == 3
    with pytest.raises(ArbError, match="are of different formats"):
        open_text([str(tmp_path / name) for name in ("a.bin", "c.txt")])
    (tmp_path / "a.bin").write_bytes(header(20240520, 1, 8) + SHARD)
    text, _ = open_text([str(tmp_path / "a.bin")], Conversion(data_format="bytes"))
    assert text.read(0, len(text)) == header(20240520, 1, 8) + SHARD
    found = {file.name for file in find_files([str(tmp_path)], [], Conversion())}
    assert found >= {"a.bin", "b.bin", "c.txt"}
    assert "d.bin" not in found  # which has no header


def test_run_of_shards_is_trained_resumed_and_evaluated(tokenizer, tmp_path):
    tokens = tokenizer.encode(PLAIN_TEXT)
    for name in ("train.bin", "val.bin"):
        write_shard(tmp_path / name, tokens, 2, has_header=False)
    data = {"data": (str(tmp_path / "train.bin"),), "val": (str(tmp_path / "val.bin"),)}
    about = TINY | data | {"steps": 2, "backend": "torch", "data_format": "tokens16"}
    arbcli.train(arbcli.configure(**about, tokenizer=tokenizer.name), out=tmp_path / "run")
    assert read_facts(tmp_path / "run")["text"]["train_bytes"] == len(PLAIN_TEXT)
    assert arbcli.resume(tmp_path / "run", steps=3).steps == 3
    model = arbcli.load(tmp_path / "run", device="cpu")
    (tmp_path / "a.txt").write_bytes(PLAIN_TEXT)
    shard = arbcli.evaluate(model, data["val"], data_format="tokens16", batch=99)
    plain = arbcli.evaluate(model, [str(tmp_path / "a.txt")], batch=99)
    assert shard.nats_per_byte == plain.nats_per_byte
    assert (shard.tokens, shard.bytes) == (plain.tokens, plain.bytes)
    with pytest.raises(ArbError, match="the model reads bytes"):
        arbcli.train(arbcli.configure(**about), out=tmp_path / "other")
    (tmp_path / "train.bin").write_bytes((tmp_path / "train.bin").read_bytes()[:-2] + b"\1\0")
    with pytest.raises(ArbError, match="the text is not the one"):
        arbcli.resume(tmp_path / "run", steps=4)


def _link(kind: bytes) -> bytes:
    entry = tarfile.TarInfo("a.txt")
    entry.type, entry.linkname = kind, "/etc/passwd"
    return entry.tobuf() + bytes(1024)


def _entry(size: int, name: str = "a.txt", content: bytes = b"text") -> bytes:
    entry = tarfile.TarInfo(name)
    entry.size = size
    return entry.tobuf() + content.ljust(512, b"\0") + bytes(1024)


def _backwards(name: str, size: int) -> bytes:
    """Return an archive with a member of negative size."""
    entry = bytearray(_entry(4, name))
    entry[124:136] = size.to_bytes(12, "big", signed=True)
    entry[148:156] = b" " * 8
    entry[148:156] = f"{sum(entry[:512]):06o}\0 ".encode()
    return bytes(entry)


SHARD = np.arange(1, 9, dtype="<u2").tobytes()
REFUSED: dict[str, tuple[str, bytes, Conversion, str]] = {
    "symbolic link": ("a.tar", _link(tarfile.SYMTYPE), Conversion(), "`a.txt` in .* not a regular"),
    "hard link": ("a.tar", _link(tarfile.LNKTYPE), Conversion(), "`a.txt` in .* not a regular"),
    "device": ("a.tar", _link(tarfile.CHRTYPE), Conversion(), "`a.txt` in .* not a regular"),
    "large member": ("a.tar", _entry(2**24 + 1), Conversion(), "more than 16,777,216 bytes"),
    "endless member": ("a.tar", _entry(8**11 - 1), Conversion(), "more than 16,777,216 bytes"),
    "cut member": ("a.tar", _entry(9999), Conversion(), "cannot be read"),
    "negative size": ("a.tar", _backwards("b.dat", -1024), Conversion(), "cannot be read"),
    "rest of the file": ("a.tar", _backwards("a.txt", -1), Conversion(), "cannot be read"),
    "no archive": ("a.tar", b"no archive" * 99, Conversion(), "cannot be read"),
    "no packed archive": ("a.tar.gz", b"no archive" * 99, Conversion(), "cannot be unpacked"),
    "packed text": ("a.tar.gz", gzip.compress(b"a" * 999), Conversion(), "gz` cannot be read"),
    "no texts": ("a.tar", _entry(4, "a.jpg"), Conversion(), "no members that end in .txt"),
    "no records": ("a.tar", _entry(4), Conversion("text"), "no members that end in .json"),
    "no JSON": ("a.tar", _entry(4, "a.json"), Conversion("text"), "`a.json` in .*: Expecting"),
    "no Arrow": ("a.arrow", b"no table" * 99, Conversion("text"), "cannot be read"),
    "start of Arrow": ("a.arrow", b"ARROW1\0\0" * 9, Conversion("text"), "cannot be read"),
    "no Feather": ("a.feather", b"FEA1" * 99, Conversion("text"), "cannot be read"),
    "no column": ("a.arrow", b"ARROW1\0\0" * 9, Conversion(), "has columns, and none"),
    "packed Arrow": ("a.arrow.gz", b"a", Conversion("text"), "is a compressed table"),
    "no header": ("a.bin", SHARD, Conversion(), "has no header, so that its format is unknown"),
    "short": ("a.bin", b"a", Conversion(), "has no header, so that its format is unknown"),
    "another version": ("a.bin", header(20240520, 2, 0), Conversion(), "has no header"),
    "fewer tokens": ("a.bin", header(20240520, 1, 9) + SHARD, Conversion(), "header says 9 tokens"),
    "negative": ("a.bin", header(20240520, 1, -1) + SHARD, Conversion(), "says 4,294,967,295"),
    "other width": (
        "a.bin", header(20240520, 1, 8) + SHARD, Conversion(data_format="tokens32"),
        "has a header of llm.c for tokens of 2 bytes",
    ),
    "half a token": ("a.bin", b"abc", Conversion(data_format="tokens16"), "not a whole number"),
    "large token": (
        "a.bin", b"\xff\xff" * 8, Conversion(data_format="tokens16"), "has the token 65,535, and",
    ),
    "packed shard": ("a.bin.gz", gzip.compress(SHARD), Conversion(), "is compressed, and a shard"),
    "shard of records": ("a.bin", SHARD, DOCUMENTS, "has no records"),
}  # fmt: skip


@pytest.mark.parametrize("case", REFUSED)
def test_hostile_file_is_refused_in_one_line(case, tokenizer, tmp_path):
    name, content, conversion, message = REFUSED[case]
    if name.endswith((".arrow", ".feather")):
        pytest.importorskip("pyarrow", reason="needs the package pyarrow")
    (tmp_path / name).write_bytes(content)
    with pytest.raises(ArbError, match=message) as caught:
        tokenised(open_text([str(tmp_path / name)], conversion)[0], tokenizer)
    assert "\n" not in str(caught.value)
    assert not [*texts_folder().glob("*")] or name == "a.tar.gz"


@pytest.mark.parametrize("name", ["stream.arrow", "a.feather", "a.tar"])
def test_altered_file_is_text_or_refused(name, tmp_path):
    if name == "a.tar":
        write_tar(tmp_path / name, {"a.txt": b"text" * 9, "b.txt": b"more" * 200})
    else:
        write_table(tmp_path / name, DOCUMENTS_OF_TEXT)
    content, draws, refused = (tmp_path / name).read_bytes(), random.Random(0), []
    for _ in range(60):
        altered = bytearray(content)
        for _ in range(draws.randint(1, 4)):
            altered[draws.randrange(len(altered))] = draws.randrange(256)
        path = tmp_path / f"altered{Path(name).suffix}"
        path.write_bytes(altered[: draws.choice((None, draws.randrange(len(altered))))])
        try:
            plain_file(path, Conversion(None if name == "a.tar" else "text"))
        except ArbError as error:
            refused.append(str(error))
    assert refused
    assert not any("\n" in line for line in refused)
