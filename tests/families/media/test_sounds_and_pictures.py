"""Sounds and pictures: files to bytes and back, where they stand in a text, and what is refused."""

import math
import struct
import zlib
from itertools import pairwise

import numpy as np
import pytest
import torch

from arbcli.base.errors import ArbError
from arbcli.data.files import Conversion
from arbcli.data.opening import open_text, plain_file
from arbcli.data.text import Text
from arbcli.families import SOUND_FORMS
from arbcli.families.media import bounded, pictures, sound
from arbcli.families.media.evaluation import MediaLosses
from arbcli.families.media.spans import PictureHeader, SoundHeader, find_spans
from arbcli.kernels.runtime.device import deterministic

soundfile = pytest.importorskip("soundfile", reason="needs the extra `media`")
Image = pytest.importorskip("PIL.Image", reason="needs the extra `media`")


def tone(frames: int, channels: int = 1) -> np.ndarray:
    """(frames, channels) int16 with the largest and the smallest sample in it."""
    time = np.arange(frames)[:, None] * (1 + np.arange(channels))
    samples = np.rint(20_000 * np.sin(0.2 * time)).astype(np.int16)
    samples[:2] = [[32767], [-32768]]
    return samples


def gradient(height: int, width: int) -> np.ndarray:
    """(height, width, 3) uint8."""
    shades = np.arange(height * width * 3) * 7 % 256
    return shades.reshape(height, width, 3).astype(np.uint8)


@pytest.fixture(autouse=True)
def cache(tmp_path_factory, monkeypatch):
    folder = tmp_path_factory.mktemp("cache")
    monkeypatch.setenv("XDG_CACHE_HOME", str(folder))
    return folder


@pytest.mark.parametrize("name", ["PCM_16.wav", "PCM_16.flac", "FLOAT.wav", "DOUBLE.wav"])
@pytest.mark.parametrize("channels", [1, 2])
def test_sound_is_its_samples_of_16_bits(name, channels, tmp_path):
    path, samples = tmp_path / name, tone(70_000, channels)  # more than a block
    numbers = samples if name.startswith("PCM") else samples / 32768
    soundfile.write(path, numbers, 8000, subtype=path.stem)
    content = plain_file(path, Conversion(sound="pcm16")).read_bytes()
    (span,) = find_spans(content)
    assert span.header == SoundHeader("pcm16", 8000, channels, 70_000)
    assert (span.start, span.stop) == (0, len(content))
    coarse_first = (
        int(sample + 32768).to_bytes(2, "big") for sample in samples[:9].astype(int).flat
    )
    assert content[span.body :].startswith(b"".join(coarse_first))
    assert np.array_equal(sound.decode_samples(content[span.body :], span.header), samples)


def test_mu_law_is_the_nearest_of_its_levels_on_the_curve(tmp_path):
    header = SoundHeader("mulaw", 8000, 1, 256)
    levels = sound.decode_samples(bytes(range(256)), header)[:, 0].astype(int)
    assert np.all(np.diff(levels) > 0)
    assert np.array_equal(levels, -levels[::-1])
    assert levels[-1] == 32767
    # each level is its own code, and a sample is at most one step of the curve from its level
    assert sound.encode_samples(levels[:, None], "mulaw") == bytes(range(256))
    samples = np.arange(-32768, 32768, 37)[:, None].astype(np.int16)
    codes = np.frombuffer(sound.encode_samples(samples, "mulaw"), np.uint8)
    assert np.all(np.diff(codes.astype(int)) >= 0)
    error = np.abs(levels[codes] - samples[:, 0])
    assert np.all(error <= 4 + np.abs(samples[:, 0].astype(int)) * math.log(256) / 250)


@pytest.mark.parametrize("form", SOUND_FORMS)
def test_sound_that_is_written_reads_back_as_the_same_bytes(form, tmp_path, monkeypatch):
    """In blocks, as libsndfile crashes on long ones of Ogg."""
    monkeypatch.setattr(sound, "BLOCK_FRAMES", 500)
    monkeypatch.delattr(soundfile, "write")  # of all samples at once
    body = sound.encode_samples(tone(999, 2), form)
    header = SoundHeader(form, 20_000_000, 2, 999)  # a rate of software-defined radio
    sound.write_sound(tmp_path / "b.wav", body, header)
    content = b"".join(sound.sound_bytes(tmp_path / "b.wav", form))
    assert content == header.encode() + body
    assert [span.header for span in find_spans(content)] == [header]
    # a frame that is cut off is dropped
    assert len(sound.decode_samples(body[:-1], header)) == 998


@pytest.mark.parametrize("form", ["rgb", "grey"])
def test_picture_is_its_pixels_in_marked_rows(form, tmp_path):
    pixels = gradient(5, 3) if form == "rgb" else gradient(5, 3)[:, :, 0]
    Image.fromarray(pixels).save(tmp_path / "a.png")
    content = b"".join(pictures.picture_bytes(tmp_path / "a.png", form))
    (span,) = find_spans(content)
    assert span.header == PictureHeader(form, 3, 5)
    assert span.stop == len(content)
    row = span.header.item_bytes
    assert content[span.body + row - 1 :: row] == b"\n" * 5
    assert np.array_equal(pictures.decode_pixels(content[span.body :], span.header), pixels)
    pictures.write_picture(tmp_path / "b.png", content[span.body :], span.header)
    assert b"".join(pictures.picture_bytes(tmp_path / "b.png", form)) == content
    half = pictures.decode_pixels(content[span.body : span.body + 2 * row], span.header)
    assert np.array_equal(half[:2], pixels[:2])
    assert not half[2:].any()


def test_pictures_are_scaled_turned_and_laid_on_white(tmp_path):
    Image.fromarray(gradient(40, 20)).save(tmp_path / "a.jpg")
    (span,) = find_spans(b"".join(pictures.picture_bytes(tmp_path / "a.jpg", "grey:8x6")))
    assert span.header == PictureHeader("grey", 8, 6)
    clear = Image.new("RGBA", (2, 1), (9, 9, 9, 0))
    clear.save(tmp_path / "b.webp", lossless=True)
    # without a channel for it, too: a number of the palette, a shade and a colour
    for mode, transparency in (("P", 9), ("L", 9), ("RGB", (9, 9, 9))):
        plain = Image.new(mode, (2, 1), transparency)
        if mode == "P":
            plain.putpalette(bytes(range(30)))
        plain.save(tmp_path / f"{mode}.png", transparency=transparency)
    for name in ("b.webp", "P.png", "L.png", "RGB.png"):
        content = b"".join(pictures.picture_bytes(tmp_path / name, "rgb"))
        assert content.endswith(b"\xff" * 6 + b"\n"), name
    Image.fromarray(np.arange(0, 2**16, 257, np.uint16)[None]).save(tmp_path / "deep.png")
    content = b"".join(pictures.picture_bytes(tmp_path / "deep.png", "grey"))
    assert content.endswith(bytes(range(256)) + b"\n")
    turned = Image.fromarray(gradient(2, 3))
    about = Image.Exif()
    about[274] = 6  # a quarter turn
    turned.save(tmp_path / "c.png", exif=about)
    (span,) = find_spans(b"".join(pictures.picture_bytes(tmp_path / "c.png", "rgb")))
    assert span.header == PictureHeader("rgb", 2, 3)


def chunk(kind: bytes, content: bytes) -> bytes:
    check = struct.pack(">I", zlib.crc32(kind + content))
    return struct.pack(">I", len(content)) + kind + content + check


def png(width: int, height: int) -> bytes:
    """A PNG whose header names a size, and that has few bytes."""
    size = chunk(b"IHDR", struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0))
    return b"\x89PNG\r\n\x1a\n" + size + chunk(b"IDAT", zlib.compress(b"0" * 99))


def damaged(tmp_path) -> dict[str, bytes]:
    soundfile.write(tmp_path / "whole.wav", tone(4000), 8000)
    soundfile.write(tmp_path / "whole.flac", tone(40_000), 8000)
    Image.fromarray(gradient(60, 50)).save(tmp_path / "whole.png")
    wav, flac, picture = (
        (tmp_path / f"whole.{kind}").read_bytes() for kind in ("wav", "flac", "png")
    )
    soundfile.write(tmp_path / "many.wav", np.zeros((9, 3), np.int16), 8000)
    return {
        "cut.wav": wav[:3000], "no.flac": b"fLaC" + b"x" * 99, "cut.flac": flac[: len(flac) // 2],
        "no.ogg": b"no", "many.wav": (tmp_path / "many.wav").read_bytes(),
        "cut.png": picture[:-200], "no.png": b"no", "large.png": png(100_000, 100_000),
        "wide.png": png(40_000, 2), "no.jpg": b"\xff\xd8\xff", "no.webp": b"RIFF\0\0\0\0WEBP",
    }  # fmt: skip


def test_damaged_and_oversized_files_are_one_line(tmp_path, cache):
    for name, content in damaged(tmp_path).items():
        path = tmp_path / name
        path.write_bytes(content)
        with pytest.raises(ArbError) as caught:
            plain_file(path)
        assert str(path) in str(caught.value), name
        assert "\n" not in f"{caught.value}{caught.value.hint}", name
        assert caught.value.hint, name
        if name in ("large.png", "wide.png"):
            assert caught.value.hint == pictures.SCALE_HINT
    assert not list(cache.rglob("texts/*"))


def endless(size: int) -> dict[str, bytes]:
    """Starts of files of `size` bytes that make a decoder read on and on."""
    header = png(60, 50)[:33]
    rate = struct.pack(">Q", 8000 << 44 | 15 << 36 | 10**6)  # 16 bits a sample, a channel
    info = b"fLaC\0\0\0\x22\x10\0\x10\0" + bytes(6) + rate + bytes(16)
    riff = b"RIFF" + struct.pack("<I", size - 8)
    canvas, vp8l = b"\x9f\x86\1" * 2, b"VP8L" + struct.pack("<I", size - 20)
    return {
        "remark.png": header + struct.pack(">I", size - 99) + b"tEXt",
        "unknown.png": header + struct.pack(">I", size - 99) + b"abCd",
        "profile.png": header + struct.pack(">I", size - 99) + b"iCCP",
        "pixels.png": header + struct.pack(">I", size - 99) + b"IDAT",
        "no.jpg": b"\xff\xd8\xff\xe0\xff", "canvas.webp": riff + b"WEBPVP8X" + bytes(8) + canvas,
        "pixels.webp": riff + b"WEBP" + vp8l + b"/" + bytes(4),
        "remark.flac": info + b"\1\xff\xff\xff", "frames.flac": info + b"\x81\0\0\0",
        "no.flac": b"fLaC" + b"\xff" * 99, "text.flac": b"no", "text.ogg": b"no",
        "no.ogg": b"OggS" + bytes(60), "riff.wav": riff + b"WAVE",
        "remark.wav": riff + b"WAVELIST" + struct.pack("<I", size - 20),
    }  # fmt: skip


def test_no_more_than_a_bound_is_read_of_a_file_that_makes_decoders_read_on(
    tmp_path, cache, monkeypatch
):
    size, reads = 2**28, list[int]()
    limit = bounded.HEADER_BYTES + pictures.MAX_PIXEL_BYTES * 60 * 50
    read = bounded.BoundedFile.read

    def noted(self, size=-1):
        content = read(self, size)
        reads.append(len(content))
        return content

    monkeypatch.setattr(bounded.BoundedFile, "read", noted)
    for name, start in endless(size).items():
        path = tmp_path / name
        with path.open("wb") as file:
            file.write(start)
            file.truncate(size)
        reads.clear()
        with pytest.raises(ArbError, match=str(path)) as caught:
            plain_file(path)
        assert "\n" not in f"{caught.value}{caught.value.hint}", name
        assert sum(reads) <= limit, (name, sum(reads))
        assert len(reads) <= limit // bounded.MIN_READ, name
    assert not list(cache.rglob("texts/*"))


@pytest.mark.parametrize("mode", ["L", "RGB", "RGBA"])
@pytest.mark.parametrize("lossless", [False, True])
@pytest.mark.parametrize("more", [{}, {"exif": b"Exif\0\0MM\0*\0\0\0\x08\0\0"}])
def test_size_of_webp_is_that_of_its_pixels(mode, lossless, more, tmp_path):
    pixels = np.zeros((33, 70, len(mode)), np.uint8).squeeze()
    Image.fromarray(pixels).save(tmp_path / "a.webp", lossless=lossless, **more)
    with bounded.BoundedFile(tmp_path / "a.webp", bounded.HEADER_BYTES) as content:
        assert pictures.webp_size(content) == (70, 33)
        assert content.tell() == 0


def test_folder_has_its_sounds_and_pictures_only_on_request(tmp_path):
    soundfile.write(tmp_path / "a.wav", tone(40), 8000)
    Image.fromarray(gradient(3, 3)).save(tmp_path / "b.png")
    (tmp_path / "c.txt").write_text("text")
    expected = {(None, None): 1, ("mulaw", None): 2, (None, "rgb"): 2, ("mulaw", "grey:2x2"): 3}
    for (samples, pixels), files in expected.items():
        text, _ = open_text([str(tmp_path)], Conversion(None, samples, pixels))
        assert len(text.files) == files
    text, _ = open_text([str(tmp_path / "*.*")])  # as they were named
    assert len(text.files) == 3
    # each form has a file of its own
    both = {plain_file(tmp_path / "a.wav", Conversion(sound=form)) for form in SOUND_FORMS}
    assert len(both) == 2


def test_record_joins_text_sound_and_picture(tmp_path):
    soundfile.write(tmp_path / "a.wav", tone(40), 8000)
    Image.fromarray(gradient(3, 3)).save(tmp_path / "b.png")
    (tmp_path / "r.jsonl").write_text(
        '{"say": [{"text": "one "}, {"sound": "a.wav"}]}\n{"say": "two"}\n'
        '{"say": [{"picture": "b.png"}, {"text": "three"}]}\n'
    )
    content = plain_file(tmp_path / "r.jsonl", Conversion("say", "pcm16", "grey")).read_bytes()
    a, b = find_spans(content)
    assert content[: a.start] == b"one "
    assert content[a.stop : b.start] == b"\ntwo\n"
    assert content[b.stop :] == b"three\n"
    assert (a.header.form, b.header.mode) == ("pcm16", "grey")
    for parts in ('{"smell": "x"}', '{"sound": "b.png"}', "3", '{"sound": "gone.wav"}',
                  '{"text": "a", "sound": "a.wav"}'):  # fmt: skip
        (tmp_path / "r.jsonl").write_text(f'{{"say": [{parts}]}}')
        with pytest.raises(ArbError, match="line 1 of") as caught:
            plain_file(tmp_path / "r.jsonl", Conversion("say"))
        assert ("cannot read `gone.wav`" in str(caught.value)) == (parts == '{"sound": "gone.wav"}')


@pytest.mark.parametrize("cuts", [(), (100,), (13, 60, 333)])
def test_losses_are_summed_by_kind_of_byte(cuts, tmp_path, device):
    """Every byte costs a number of its own, and the text is in several pieces of a file."""
    samples, pixels = tone(50, 2), gradient(4, 5)
    parts = [
        b"text before ",
        SoundHeader("pcm16", 8000, 2, 50).encode() + sound.encode_samples(samples, "pcm16"),
        b" and between ", PictureHeader("rgb", 5, 4).encode() + pictures._encode_rows(pixels),
        b" and after",
    ]  # fmt: skip
    path = tmp_path / "mixed"
    path.write_bytes(b"".join(parts))
    size = path.stat().st_size
    edges = [0, *cuts, size]
    pieces = [(path, start, stop) for start, stop in pairwise(edges)]
    # every second piece is left out, so that sounds begin before and end after theirs
    text = Text.from_parts(pieces[1::2] or pieces)
    costs = torch.rand(len(text), generator=torch.Generator().manual_seed(0)).double()
    losses = MediaLosses(text, device)
    width, count = 7, len(text) - 1
    rows = torch.nn.functional.pad(costs[1:], (0, -count % width)).view(-1, width)
    is_counted = (torch.arange(rows.numel()) < count).view_as(rows)
    with deterministic():
        losses.add(range(0, count, width), rows.to(device), is_counted.to(device))
    costs[0] = math.log(256)
    kinds = [kind for part, kind in zip(parts, "tstpt", strict=True) for _ in part]
    places = [i for _, start, stop in text.pieces for i in range(start, stop)]
    begin, end = kinds.index("p"), len(kinds) - kinds[::-1].index("p")
    if not any(start <= begin and end <= stop for _, start, stop in text.pieces):
        kinds[begin:end] = "t" * (end - begin)  # a picture that is cut is text
    reports = {kind.kind: kind for kind in losses.report()}
    for letter, name in {"t": "text", "s": "sound", "p": "picture"}.items():
        chosen = [j for j, i in enumerate(places) if kinds[i] == letter]
        assert (name in reports) == bool(chosen)
        if chosen:
            assert reports[name].bytes == len(chosen)
            total = float(costs[chosen].sum())
            assert reports[name].nats_per_byte * len(chosen) == pytest.approx(total, rel=1e-12)
    if not cuts:
        assert reports["sound"].units == 100
        assert reports["picture"].units == 20
        per = 8 * sound.flac_bytes(samples, 8000) / 100
        assert sound.flac_bytes(samples, 10**6) > 100 * per / 8  # beyond the rates of FLAC
        assert reports["sound"].peer_bits_per_unit == {"FLAC": per}
        assert reports["picture"].peer_bits_per_unit.keys() == {"PNG", "WebP"}
        bits = reports["picture"].nats_per_byte * reports["picture"].bytes / math.log(2) / 20
        assert reports["picture"].bits_per_unit == pytest.approx(bits)


def test_losses_are_next_to_formats_that_hold_all_pictures(tmp_path):
    """WebP has no picture of more than 16,383 pixels in a row."""
    rows = [PictureHeader("grey", width, 1).encode() + bytes(width) for width in (9, 2**14)]
    (tmp_path / "rows").write_bytes(b"\n".join([*rows, b""]))
    (kind,) = MediaLosses(Text([tmp_path / "rows"]), torch.device("cpu")).report()
    assert kind.peer_bits_per_unit.keys() == {"PNG"}
