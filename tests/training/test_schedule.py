"""Settings of a run that follow from others: its rate, its device, and texts hardly meant."""

import math
from itertools import pairwise

import pytest

from arbcli.config.training import SCHEDULES
from arbcli.data.opening import open_texts
from arbcli.data.tokens import Tokenizer
from arbcli.training.configure import new_config
from arbcli.training.schedule import learning_rate
from arbcli.training.text_warnings import lost_text, text_warnings


@pytest.mark.parametrize("steps", [1, 7, 400, 1311])
def test_default_is_the_cosine_to_the_bit(steps):
    config = new_config(device="cpu", steps=steps, lr=0.6)
    warmup = min(100, steps // 2)
    for step in range(steps):
        rise = min(1.0, (step + 1) / warmup) if warmup else 1.0
        share = rise * (0.05 + 0.95 * (1 + math.cos(math.pi * step / steps)) / 2)
        assert learning_rate(config, step) == 0.6 * share


@pytest.mark.parametrize("final_lr", [0.2, 0.0])
@pytest.mark.parametrize("shape", SCHEDULES)
def test_rate_falls_from_the_first_to_the_final_rate(shape, final_lr):
    given = {} if shape == "constant" else {"final_lr": final_lr}
    config = new_config(device="cpu", steps=1000, lr=0.8, warmup=0, schedule=shape, **given)
    rates = [learning_rate(config, step) for step in range(1001)]
    assert rates[0] == 0.8
    assert all(a >= b for a, b in pairwise(rates))
    assert rates[-1] == pytest.approx(given.get("final_lr", 0.8))


PROSE = b"Ternary weights learn to read, a byte at a time, and then another one. " * 200


def warnings(folder, **contents: bytes) -> list[str]:
    for name, content in contents.items():
        (folder / f"{name}.txt").write_bytes(content)
    return text_warnings(open_texts([str(folder / "data*")], [str(folder / "val*")], **WHERE))


WHERE = {"seed": 0, "context": 8}


def test_files_with_bytes_of_0_are_named(tmp_path):
    (one,) = warnings(tmp_path, data1=PROSE, data2=PROSE[:99] + bytes(3), val=PROSE)
    assert "data2.txt`, which may be binary" in one
    (one,) = warnings(tmp_path, data2=PROSE[:500], data3=bytes(1) + PROSE, val=PROSE)
    assert "data3.txt`, which may be binary" in one
    (one,) = warnings(tmp_path, data1=bytes(1) + PROSE, val=PROSE)
    assert "data1.txt` and 1 more, which may be binary" in one
    (tmp_path / "both.txt").write_bytes((bytes(1) + PROSE[:99]) * 200)
    (one,) = text_warnings(open_texts([str(tmp_path / "both.txt")], None, **WHERE))
    assert "both.txt`, which may be binary" in one


def test_held_out_text_of_another_kind_is_reported(tmp_path):
    (one,) = warnings(tmp_path, data=PROSE, val=bytes(range(1, 256)) * 50)
    assert "its order-0 entropy is 5.54 nats, not 2." in one
    assert "`--val`" in one


def test_text_that_a_tokenizer_loses_is_said(byte_tokenizer):
    package = pytest.importorskip("tokenizers", reason="needs the package tokenizers")
    tokenizer = package.Tokenizer(package.models.BPE())
    tokenizer.pre_tokenizer, tokenizer.decoder = (
        package.pre_tokenizers.Metaspace(), package.decoders.Metaspace()
    )  # fmt: skip
    trainer = package.trainers.BpeTrainer(vocab_size=60, show_progress=False)
    tokenizer.train_from_iterator(["the cat sat on the mat "] * 20, trainer)
    lossy = Tokenizer(tokenizer.to_str().encode(), "lossy.json")
    assert lost_text(b" the cat sat on the mat", lossy) == []
    (warning,) = lost_text(b"the cat, 12", lossy)
    assert "11 characters come back from tokens as 8 that differ" in warning
    bytewise = Tokenizer.read(byte_tokenizer)
    assert lost_text("naïve \ufffd".encode(), bytewise) == []
    assert lost_text("naïve".encode()[:3], bytewise) == []  # it ends within a character
    (warning,) = lost_text("où élève".encode("latin-1"), bytewise)
    assert "is not UTF-8: of its first 8 bytes 3 become U+FFFD" in warning


def test_text_that_is_both_trained_on_and_held_out_is_noted(tmp_path):
    for name, times in (("a", 900), ("b", 200)):
        (tmp_path / name).write_text(f"words of the text {name}. " * times)
    both, other = ([str(tmp_path / name)] for name in ("a", "b"))
    (warning,) = text_warnings(open_texts(both, both, **WHERE))
    assert f"`{both[0]}` is both training and held-out text" in warning
    mixed = open_texts([f"{tmp_path}:0.5", f"{other[0]}:0.5"], None, **WHERE, split="files")
    assert f"`{other[0]}` is both" in text_warnings(mixed)[0]
    assert not any(text_warnings(open_texts(both, val, **WHERE)) for val in (other, []))
