"""Texts against a naive concatenation of their files, batches against the windows they must be."""

import errno
import gzip
import json
import math
import os
import re
import sysconfig
import zlib
from pathlib import Path

import pytest
import torch

from arbcli.base.errors import ArbError
from arbcli.data import text as data
from arbcli.data.files import Conversion
from arbcli.data.opening import open_text, open_texts
from arbcli.data.text import MAX_OPEN_MAPS, Text, batch_at, batch_starts, digest, entropy

RECORDED = Path(__file__).with_name("opened.txt")


def batch(text: Text, seed: int, step: int, micro: int = 0, size: int = 4) -> tuple:
    return batch_at(text, batch_starts(text, seed, step, micro, size, 8), 8, "cpu")


def random_bytes(num_bytes: int, seed: int = 0) -> bytes:
    generator = torch.Generator().manual_seed(seed)
    return bytes(torch.randint(256, (num_bytes,), generator=generator).tolist())


def write(path: Path, content: bytes) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(content)
    return path


def write_all(folder: Path, contents: list[bytes]) -> list[Path]:
    return [write(folder / f"{i:04}", content) for i, content in enumerate(contents)]


def read_all(text: Text) -> bytes:
    return text.read(0, len(text))


def lines_of(text: Text) -> list[str]:
    return read_all(text).decode().splitlines(keepends=True)


def message_of(error: pytest.ExceptionInfo) -> str:
    """Return the message, once it and its hint are one line each."""
    assert error.value.hint
    assert len(str(error.value).splitlines()) == len(error.value.hint.splitlines()) == 1
    return str(error.value)


def test_read_equals_concatenation(tmp_path):
    contents = [random_bytes(size, seed=size) for size in (5, 0, 1, 1, 33, 0, 7)]
    text = Text(write_all(tmp_path, contents))
    stream = b"".join(contents)
    assert len(text) == len(stream)
    for start in range(len(stream) + 1):
        for stop in range(start, len(stream) + 1):
            assert text.read(start, stop - start) == stream[start:stop]


def test_window_batch_equals_slices(tmp_path):
    stream = random_bytes(50)
    text = Text(write_all(tmp_path, [stream[:20], stream[20:21], stream[21:]]))
    starts = [0, 43, 17, 17, 20]
    windows = text.window_batch(starts, 7)
    assert windows.dtype == torch.uint8
    assert windows.tolist() == [list(stream[start : start + 7]) for start in starts]
    part = Text.from_parts([(text.files[2], 5, 29), (text.files[0], 9, 20)])
    stream = stream[26:50] + stream[9:20]
    windows = part.window_batch([0, 9, 24, 21, 28], 7).tolist()
    assert windows == [list(stream[start : start + 7]) for start in (0, 9, 24, 21, 28)]
    for start in (-9, -1, 29, 35, 36):
        with pytest.raises(ValueError, match="in a text of 35 bytes"):
            part.window_batch([0, start], 7)


def test_batch_never_changes_between_versions(tmp_path):
    text = Text(write_all(tmp_path, [bytes(range(256))]))
    inputs, _ = batch(text, 1, 20, 3)
    assert inputs[:, 0].tolist() == [207, 86, 55, 221]


def test_batch_draws_every_window_alike(tmp_path):
    context, num_windows, expected = 8, 37, 1000
    text = Text(write_all(tmp_path, [bytes(range(num_windows + context))]))
    inputs, targets = batch(text, 0, 0, size=num_windows * expected)
    counts = inputs[:, 0].bincount(minlength=num_windows)
    assert len(counts) == num_windows
    # five standard deviations of a binomial count
    assert (counts - expected).abs().max() < 5 * math.sqrt(expected)
    assert targets.max() == num_windows + context - 1


@pytest.mark.parametrize(("content", "expected"), [
    (b"a" * 33, 0.0), (b"ab" * 33, math.log(2)), (bytes(range(256)) * 3, math.log(256)),
    (b"aaab", 0.25 * math.log(4) + 0.75 * math.log(4 / 3)), (b"", 0.0),
])  # fmt: skip
def test_entropy_equals_formula(tmp_path, content, expected):
    assert entropy(Text(write_all(tmp_path, [content]))) == pytest.approx(expected, abs=1e-12)


@pytest.mark.parametrize(
    ("size", "seen"), [(12, [*range(12)]), (21, [0, 1, 2, 3, 8, 9, 10, 11, 17, 18, 19, 20])]
)
def test_digest_reads_all_of_a_short_text_and_some_blocks_of_a_long_one(
    size, seen, tmp_path, monkeypatch
):
    monkeypatch.setattr(data, "BLOCK_BYTES", 4)
    monkeypatch.setattr(data, "MAX_BLOCKS", 3)
    contents = [bytes(size), *(bytes(i) + b"x" + bytes(size - 1 - i) for i in range(size))]
    plain, *others = [digest(Text([path])) for path in write_all(tmp_path, contents)]
    assert [i for i, other in enumerate(others) if other != plain] == seen
    assert len({*others} - {plain}) == len(seen)


@pytest.mark.parametrize(("num_files", "num_val"), [(2, 1), (14, 1), (17, 2), (40, 4)])
def test_open_texts_splits_files_into_disjoint_parts_whatever_their_place(
    tmp_path, num_files, num_val
):
    lines, digests = [f"line {i}\n" for i in range(num_files)], set()
    for place in ("here", "there/deep"):
        for i, line in enumerate(lines):
            write(tmp_path / place / str(i % 3) / f"{i}.txt", line.encode())
        entry = str(tmp_path / place.partition("/")[0])
        texts = open_texts([entry], None, seed=3, context=1, split="files")
        assert sorted(lines_of(texts.train) + lines_of(texts.val)) == sorted(lines)
        assert len(texts.val.files) == num_val
        digests.add((digest(texts.train), digest(texts.val)))
    assert len(digests) == 1


@pytest.mark.parametrize(("context", "split"), [(9, "within"), (10, "files"), (11, "files")])
def test_tenths_of_files_that_are_not_a_window_together_are_not_held_out(tmp_path, context, split):
    paths = write_all(tmp_path, [random_bytes(90), random_bytes(19)])
    texts = [open_texts(list(map(str, paths)), None, seed=s, context=context) for s in range(4)]
    assert {parts.split for parts in texts} == {split}
    assert {len(parts.val) for parts in texts} == ({10} if split == "within" else {19, 90})


def test_few_files_are_split_within_if_the_held_out_file_is_of_another_kind(tmp_path):
    prose = b"Ternary weights learn to read, a byte at a time. " * 400
    paths = [str(path) for path in write_all(tmp_path, [prose] * 15 + [random_bytes(len(prose))])]
    splits = {open_texts(paths, None, seed=seed, context=8).split for seed in range(40)}
    assert splits == {"files", "within"}
    for seed in range(40):
        texts = open_texts(paths, None, seed=seed, context=8)
        assert (len(texts.val.files) == 16) == (texts.split == "within")


def test_open_texts_reads_folders_sorted_and_without_hidden_files(tmp_path):
    hidden = (".hidden", ".git/config", "a/.cache/x")
    for name in ("b.txt", "0.txt", "a-0/x", "a/z.txt", "a/y/x", *hidden):
        write(tmp_path / name, f"{name}\n".encode())
    (tmp_path / "broken link").symlink_to(tmp_path / "nowhere")
    texts = open_texts([str(tmp_path)], [str(tmp_path)], seed=0, context=1)
    assert lines_of(texts.train) == ["0.txt\n", "a-0/x\n", "a/y/x\n", "a/z.txt\n", "b.txt\n"]


def test_open_texts_leaves_packages_and_tests_out_of_the_standard_library(tmp_path, monkeypatch):
    lines = [f"{i}\n" for i in range(3)]
    for name, line in zip(("abc.py", "json/decoder.py", "unittest/case.py"), lines, strict=True):
        write(tmp_path / name, line.encode())
    for name in ("site-packages/a.py", "dist-packages/a.py", "test/a.py", "json/tests/a.py"):
        write(tmp_path / name, b"wrong\n")
    write(tmp_path / "__pycache__/abc.pyc", b"wrong\n")
    for number in range(20):  # a tenth of the files is held out, of those that hold something
        write(tmp_path / f"empty{number}/__init__.py", b"")
    monkeypatch.setattr(sysconfig, "get_paths", lambda: {"stdlib": str(tmp_path)})
    texts = open_texts(None, None, seed=0, context=1)
    assert texts.description.startswith("standard library source of Python 3.")
    assert sorted(lines_of(texts.train) + lines_of(texts.val)) == lines
    assert (len(texts.train.files), len(texts.val.files)) == (2, 1)


def test_text_names_missing_and_irregular_files(tmp_path):
    os.mkfifo(tmp_path / "pipe")
    first, second = write_all(tmp_path, [b"abc", b"def"])
    text = Text([first, second])
    second.unlink()
    regular, gone = "`{}` is not a regular file", "cannot read `{}`: No such file or directory"
    for path, words, read in (
        (tmp_path, regular, lambda path: Text([path])),
        (tmp_path / "pipe", regular, lambda path: open_text([str(path)])),
        (tmp_path / "missing", gone, lambda path: Text([path])),
        (second, gone, lambda _: read_all(text)),
    ):
        with pytest.raises(ArbError) as error:
            read(path)
        assert message_of(error) == words.format(path)


@pytest.mark.parametrize("num_bytes", [0, 500, 9_999])
@pytest.mark.parametrize("is_mapped", [False, True])
def test_file_that_has_become_shorter_is_named_and_not_touched(tmp_path, num_bytes, is_mapped):
    """To read a page that is no more would kill the process."""
    (path,) = write_all(tmp_path, [random_bytes(10_000)])
    text = Text.from_parts([(path, 9_000, 10_000)])
    if is_mapped:
        text.read(0, 1)
    os.truncate(path, num_bytes)
    for read in (lambda: text.read(0, 1000), lambda: text.window_batch([0, 1], 1)):
        with pytest.raises(ArbError) as error:
            read()
        assert message_of(error) == f"`{path}` has become shorter since the text was opened"


def test_mixture_draws_by_weight_and_never_across(tmp_path):
    for name, size in (("a", 2000), ("b", 90000)):
        write(tmp_path / name, name.encode() * size)
    texts = open_texts([f"{tmp_path}/a:0.75", f"{tmp_path}/b:.25"], None, seed=0, context=8)
    for text in (texts.train, texts.val):
        inputs, targets = batch(text, 1, 2, size=4000)
        windows = torch.cat([inputs, targets[:, -1:]], dim=1)
        assert (windows == windows[:, :1]).all()
        share = float((windows[:, 0] == ord("a")).float().mean())
        assert share == pytest.approx(0.75, abs=0.03)
    assert torch.equal(batch(texts.val, 1, 2, size=4000)[0], inputs)
    assert len(texts.val) == 9200
    heavier = open_texts([f"{tmp_path}/a:0.8", f"{tmp_path}/b:.25"], None, seed=0, context=8)
    assert digest(heavier.train) != digest(texts.train)


FILES = {
    "a.txt": b"a.txt of " * 60, "b.txt": b"b.txt of " * 31, "empty.txt": b"",
    "home/home.txt": b"at home. " * 9, "packed.gz": gzip.compress(b"zip " * 99),
    "rows.jsonl": b"".join(json.dumps({"body": f"row {n} ", "n": n}).encode() + b"\n"
                           for n in range(40)),
    "deep/c.txt": b"c.txt" * 40, "deep/d.txt": b"d.txt" * 40, "deep/far/e.txt": b"far/e.txt" * 40,
    "deep/.f": b"hidden" * 9, "deep/.g/h.txt": b"hidden" * 9, "deep/binary": bytes(50),
    "deep/step-000001.safetensors": b"saved" * 9,
}  # fmt: skip
OPENED = re.findall(r"^(.*) \|(.*)\n  (.*)$", RECORDED.read_text(), re.MULTILINE)
"""Entries and options, with the description, split, lengths and a checksum of windows; or the
beginning of the error."""


@pytest.mark.parametrize(("entries", "options", "wanted"), OPENED)
@pytest.mark.usefixtures("own_cache")
def test_entries_open_the_same_texts_in_all_versions(
    entries, options, wanted, tmp_path, monkeypatch
):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    for name, content in FILES.items():
        write(Path(name), content)
    os.symlink("..", "deep/far/up")
    given = dict(option.split("=") for option in options.split())
    val, seed = given.pop("val", "").split(), int(given.pop("seed", 0))
    conversion = Conversion(field=given.pop("field", None))
    try:
        texts = open_texts(
            entries.split(), val, seed=seed, context=7, conversion=conversion, **given
        )
    except ArbError as error:
        opened = str(error)
    else:
        parts = texts.train, texts.val
        windows = [part.window_batch(part.starts(b"a key", 5, 8), 8).numpy() for part in parts]
        checksum = zlib.crc32(b"".join(part.tobytes() for part in windows))
        sizes = " and ".join(str(len(part)) for part in parts)
        opened = f"{texts.description}; {texts.split}; {sizes}; {checksum:08x}"
    assert opened.startswith(wanted)


RUN_FILES = (
    "config.json", "metrics.jsonl", "tokenizer.json", "trace-000006.json.gz",
    "metrics.jsonl.aside", "step-000000.safetensors", "hugging_face/config.json",
)  # fmt: skip
EXPORTED = "config.json", "model.safetensors", "README.md", "modeling_arb.py", "merges.txt"


@pytest.mark.parametrize("names", [RUN_FILES, EXPORTED], ids=["run", "export"])
@pytest.mark.parametrize("run", ["", "run"])
@pytest.mark.parametrize("entry", ["", "/*", "/**/*"])
def test_text_stays_the_same_when_a_run_lies_in_its_folder(entry, run, names, tmp_path):
    """A run could not be resumed if its own files or exports became text."""
    for name in ("a.txt", "deep/b.json"):
        write(tmp_path / name, b"words " * 50)
    settings = {"val": None, "seed": 0, "context": 8}
    before = open_texts([f"{tmp_path}{entry}"], **settings)
    for name in names:
        write(tmp_path / run / name, b"saved " * 50)
    after = open_texts([f"{tmp_path}{entry}"], **settings)
    assert after.train.files == before.train.files
    assert " saved by arb left out" in after.description
    assert "binary" not in after.description


@pytest.mark.parametrize(
    ("function", "refused"),
    [("scandir", "folder"), ("stat", "folder/a.txt"), ("access", "folder/a.txt")],
)
def test_open_texts_leaves_nothing_out_that_may_not_be_read(
    function, refused, tmp_path, monkeypatch
):
    write(tmp_path / "b.txt", b"words")
    write(tmp_path / "folder" / "a.txt", b"words")
    call, place = getattr(os, function), str(tmp_path / refused)

    def refusing(path, *args, **kwargs):
        if str(path) != place:
            return call(path, *args, **kwargs)
        if function == "access":
            return False
        raise PermissionError(errno.EACCES, "Permission denied", place)

    monkeypatch.setattr(os, function, refusing)
    with pytest.raises(ArbError) as error:
        open_texts([str(tmp_path)], [str(tmp_path)], seed=0, context=1)
    assert message_of(error) == f"cannot read `{place}`: Permission denied"


@pytest.mark.skipif(not Path("/dev/fd").exists(), reason="no list of open descriptors")
def test_text_bounds_open_files(tmp_path):
    text = Text(write_all(tmp_path, [b"abc"] * (2 * MAX_OPEN_MAPS)))
    before = len(os.listdir("/dev/fd"))
    read_all(text)
    assert len(os.listdir("/dev/fd")) - before == MAX_OPEN_MAPS
