"""Sounds and pictures through `arb train`, `arb evaluate` and `arb generate`."""

import json
import re
from pathlib import Path

import numpy as np
import pytest
from made_runs import train

from arbcli.training.observer import Observer
from arbcli.training.resume import resume_run

soundfile = pytest.importorskip("soundfile", reason="needs the extra `media`")
Image = pytest.importorskip("PIL.Image", reason="needs the extra `media`")


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A folder with a sound, a picture, a text that joins them, and a run on all three."""
    folder = tmp_path_factory.mktemp("media")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_CACHE_HOME", str(folder / "cache"))
        samples = np.rint(9000 * np.sin(0.3 * np.arange(400))).astype(np.int16)
        soundfile.write(folder / "a.wav", samples, 8000)
        shades = np.arange(12 * 10, dtype=np.uint8).reshape(10, 12)
        Image.fromarray(shades).save(folder / "b.png")
        record = {"parts": [{"text": "a tone "}, {"sound": "a.wav"}]}
        (folder / "c.jsonl").write_text(json.dumps(record))
        data = [str(folder / name) for name in ("a.wav", "b.png", "c.jsonl")]
        forms = {"sound": "pcm16", "picture": "grey:12x10", "field": "parts"}
        train(folder, b"", **forms, steps=4, save_every=2, batch=8, data=data, val=data)
    return folder


@pytest.fixture
def call(folder, arb_here, monkeypatch):
    """Call a command on the run."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(folder / "cache"))
    place = ["--checkpoint", str(folder / "run"), "--device", "cpu"]
    return lambda name, *words: arb_here(name, *place, *words)


def test_evaluate_tells_loss_by_kind_in_the_forms_of_the_run(call, folder):
    report = json.loads(call("evaluate", "--json").stdout)
    by_kind = {kind["kind"]: kind for kind in report["by_kind"]}
    assert by_kind.keys() == {"text", "sound", "picture"}
    assert sum(kind["bytes"] for kind in by_kind.values()) == report["bytes"]
    assert (by_kind["sound"]["units"], by_kind["picture"]["units"]) == (800, 120)
    assert by_kind["sound"]["peer_bits_per_unit"].keys() == {"FLAC"}
    shown = call("evaluate", "--data", str(folder / "b.png"), "--quiet").stdout
    assert "picture: bits a pixel" in shown
    assert "WebP" in shown


def test_held_out_end_of_a_sound_is_a_sound(tmp_path, arb_json, monkeypatch):
    """The byte that marks a sound is before this end, and not in it."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    samples = np.rint(1000 + 100 * np.sin(0.3 * np.arange(400))).astype(np.int16)
    soundfile.write(tmp_path / "a.wav", samples, 8000)
    run = train(tmp_path, b"", steps=1, eval_every=0, data=[str(tmp_path / "a.wav")])
    assert json.loads((run / "metrics.jsonl").read_text())["sample"] in (None, "")
    report = arb_json("evaluate", str(run), "--device", "cpu")
    (sound,) = report["by_kind"]
    assert (sound["kind"], sound["bytes"]) == ("sound", report["bytes"])


def test_resume_reads_the_same_forms(folder, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(folder / "cache"))
    resume_run(folder / "run", Observer(), steps=6)
    assert (folder / "run" / "step-000006.safetensors").exists()


def test_sound_is_continued_and_written(call, folder, tmp_path):
    for words, frames in (([], 400), (["--keep", "1", "--length", "100"], 450),
                          (["--keep", "0.25"], 400)):  # fmt: skip
        done = call("generate", "--prompt-file", str(folder / "a.wav"), "--out",
                    str(tmp_path / "b.flac"), *words)  # fmt: skip
        assert done.returncode == 0, done.stderr
        assert done.stdout == ""
        samples, rate = soundfile.read(tmp_path / "b.flac", dtype="int16")
        first, _ = soundfile.read(folder / "a.wav", dtype="int16")
        kept = {0: 200, 4: 400, 2: 100}[len(words)]
        assert (len(samples), rate) == (frames, 8000)
        assert np.array_equal(samples[:kept], first[:kept])
        assert f"{frames / 8000:.2f} of {frames / 8000:.2f} s" in done.stderr


def test_half_picture_is_completed(call, folder, tmp_path):
    target = tmp_path / "b.png"
    call("generate", "--prompt-file", str(folder / "b.png"), "--out", str(target))
    whole, result = (np.asarray(Image.open(path)) for path in (folder / "b.png", target))
    assert result.shape == (10, 12)
    assert np.array_equal(result[:5], whole[:5])
    # cut off after a row and a half
    done = call("generate", "--prompt-file", str(folder / "b.png"), "--length", "19", "--out",
                str(target))  # fmt: skip
    assert "6 of 10 rows of 12 pixels" in done.stderr
    assert not np.asarray(Image.open(target))[8:].any()


def test_text_follows_a_whole_picture(call, folder):
    words = ["--prompt-file", str(folder / "b.png"), "--keep", "1"]
    report = json.loads(call("generate", *words, "--length", "9", "--json").stdout)
    assert report["prompt"].startswith("\N{REPLACEMENT CHARACTER}picture grey 12 10\n")
    assert report["length"] == 9
    raw = call("generate", *words[:2], "--bytes", "--length", "4")
    assert "4 bytes" in raw.stderr
    assert raw.stdout


RECORDED = Path(__file__).with_name("media_errors.txt").read_text(encoding="utf-8")


@pytest.mark.parametrize(
    ("words", "said"), re.findall(r"^\$ (.*)\n(.*\n.*\n)", RECORDED, re.MULTILINE)
)
def test_mistake_has_a_line_and_a_hint(words, said, arb_error, folder, monkeypatch):
    monkeypatch.chdir(folder)
    monkeypatch.setenv("XDG_CACHE_HOME", str(folder / "cache"))
    assert arb_error(*words.split(), "--device", "cpu") == said
