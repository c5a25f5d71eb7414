"""Benchmarks of what a model says, and of equal times of training."""

import json

import numpy as np
import pytest

from arbcli.families.media.sound import encode_samples
from arbcli.families.media.spans import SoundHeader
from arbcli.training.configure import new_config
from arbcli.training.trainer import Trainer
from benchmarks import composite_heads, media_equal, said
from benchmarks.said import Said


def vowel(word: str, formant: float, frames: int, pitch: float = 90.0) -> Said:
    """A sound of harmonics of a pitch, the loudest of them near a frequency that rises."""
    time = np.arange(frames) / 4000
    loudest = formant * (1 + 0.3 * time / time[-1])
    tones = [
        np.exp(-(((pitch * turn - loudest) / 200) ** 2)) * np.sin(2 * np.pi * pitch * turn * time)
        for turn in range(1, 20)
    ]
    samples = np.rint(6000 * np.sum(tones, axis=0)).astype(np.int16)
    header = SoundHeader("mulaw", 4000, 1, frames)
    return Said(word, header, encode_samples(samples[:, None], "mulaw"))


WORDS = {"one": 300.0, "two": 700.0, "three": 1200.0}


def test_records_of_words_are_read():
    sounds = [vowel(word, formant, 700) for word, formant in WORDS.items()]
    content = b"".join(one.written for one in sounds)
    assert said.said_in(content) == sounds
    assert said.said_in(content[:-300]) == sounds[:2]
    kept = said.chosen(sounds * 3, {"one", "three"}, 2)
    assert [one.word for one in kept] == ["one", "three"] * 2


@pytest.mark.parametrize(
    ("words", "message"),
    [(["one"], "TEXT needs two words"), ([*WORDS], "REFERENCES lacks readings of: three")],
)
def test_words_without_others_or_readings_are_refused(
    words, message, tmp_path, monkeypatch, capsys
):
    for name, some in (("text", words), ("references", ["one", "two"])):
        content = b"".join(vowel(word, WORDS[word], 700).written for word in some)
        (tmp_path / name).write_bytes(content)
    files = [str(tmp_path / name) for name in ("run", "text", "references")]
    monkeypatch.setattr("sys.argv", ["said", *files])
    with pytest.raises(SystemExit, match="2"):
        said.main()
    assert message in capsys.readouterr().err


def test_words_are_recognised_at_other_speeds_pitches_and_loudness():
    references = [vowel(word, formant, 800) for word, formant in WORDS.items()]
    others = [vowel(word, formant, 500, pitch=110.0) for word, formant in WORDS.items()]
    found = said.recognised(others, references)
    assert [word for word, _ in found] == [*WORDS]
    assert all(ratio < 0.8 for _, ratio in found)
    wrong = [Said("two", one.header, one.body) for one in others[:1]]
    ((nearest, ratio),) = said.recognised(wrong, references)
    assert nearest == "one"
    assert ratio > 1.25
    # a sound of no frame is compared, too
    assert said.cepstra(Said("one", references[0].header, b"")).shape == (1, said.CEPSTRA)


def test_distance_is_that_of_the_best_path():
    dice = np.random.default_rng(0)
    sound, others = dice.normal(size=(5, 2)), [dice.normal(size=(size, 2)) for size in (3, 7)]

    def best(other, i, j):
        if i < 0 or j < 0:
            return 0 if i == j == -1 else np.inf
        before = min(best(other, i - 1, j), best(other, i, j - 1), best(other, i - 1, j - 1))
        return float(np.linalg.norm(sound[i] - other[j])) + before

    wanted = [best(other, 4, len(other) - 1) / max(5, len(other)) for other in others]
    assert said.distances(sound, others) == pytest.approx(wanted)


def test_speed_is_that_of_undisturbed_steps():
    rates = [None, 1.0, 10.0, 2.0, 10.0, 10.0, 1.0, 10.0]
    assert media_equal.speed([{"bytes_per_second": rate} for rate in rates]) == 10


def test_the_baseline_trains_for_as_long(tmp_path, monkeypatch):
    """Runs are replaced by their records: ternary steps are twice as fast."""
    started = {}

    class Run:
        returncode = 0

        def poll(self):
            return 0

        def wait(self):
            return 0

    def start(folder, name, train, val, steps):
        started[name] = steps
        (folder / name).mkdir()
        rate = 200.0 if name.endswith("ternary") else 100.0
        last = {"bytes_per_second": rate, "val_loss": 2.0, "state_bytes": 1, "peak_bytes": 2}
        (folder / name / "metrics.jsonl").write_text(f"{json.dumps(last)}\n" * 9)
        return Run()

    monkeypatch.setattr(media_equal, "started", start)
    bits = {"units": 3, "bits_per_unit": 1.5}
    monkeypatch.setattr(media_equal, "evaluated", lambda run: bits)
    monkeypatch.setenv("ARB_COMMIT", "0000000")
    words = ["", "a=t,v", "b=t,v", "--steps", "40", "--out", str(tmp_path)]
    monkeypatch.setattr("sys.argv", words)
    media_equal.main()
    assert started == {
        "probe ternary": 150, "probe float": 150,
        "a ternary": 40, "a float": 20, "b ternary": 40, "b float": 20,
    }  # fmt: skip
    runs = json.loads((tmp_path / "media_equal.json").read_text())["runs"]
    rows = {(row["text"], row["weights"]): row for run in runs for row in run["rows"]}
    assert rows["b", "ternary"]["bits_per_unit"] == 1.5
    assert rows["b", "float"]["bits_per_unit"] is None
    assert rows["a", "float"]["steps"] == 20
    started.clear()
    monkeypatch.setattr("sys.argv", ["", "c=t,v", "--steps", "9", "--rates", "3", "1", *words[-2:]])
    media_equal.main()
    assert started == {"c ternary": 9, "c float": 3}


def trained_in_turn(trainers):
    """Take the place of `train_together`, which needs a GPU."""
    for trainer in trainers:
        while trainer.step < trainer.config.steps:
            trainer.train_step()
    return [{trainer.step: 1.0} for trainer in trainers]


def rows_in(folder, name):
    runs = json.loads((folder / f"{name}.json").read_text())["runs"]
    return [row for run in runs for row in run["rows"]]


TINY = {"dim": 32, "layers": 1, "heads": 2, "ffn": 48, "device": "cpu", "steps": 2, "batch": 2}


def test_heads_are_compared_by_kind(tmp_path, monkeypatch):
    monkeypatch.setenv("ARB_COMMIT", "0000000")
    sounds = b"".join(vowel(word, formant, 300).written for word, formant in WORDS.items())
    (tmp_path / "sounds").write_bytes(sounds)
    (tmp_path / "text").write_bytes(b"some plain words of a text\n" * 20)
    heads = []

    def made(config, texts, capture):
        heads.append(config.model.composite)
        return Trainer(config, texts)

    monkeypatch.setattr(composite_heads, "Trainer", made)
    monkeypatch.setattr(
        composite_heads,
        "new_config",
        lambda **given: new_config(**given | TINY | {"preset": "tiny"}),
    )
    monkeypatch.setattr(composite_heads, "train_together", trained_in_turn)
    texts = [f"{tmp_path / name}:0.5,{tmp_path / name}" for name in ("sounds", "text")]
    words = ["", *texts, "--seeds", "1", "--ctx", "16", "--out", str(tmp_path)]
    monkeypatch.setattr("sys.argv", words)
    composite_heads.main()
    assert [head is not None for head in heads] == [False, True]
    plain, composite = rows_in(tmp_path, "composite")
    assert (plain["kind"], composite["kind"]) == ("plain", "composite")
    for row in plain, composite:
        assert min(row["text"], row["sound"], row["all"]) > 3
    assert plain["all"] != composite["all"]
