"""The composite head: what it predicts, the loss of each head, and the kinds that say which."""

import itertools
from dataclasses import replace

import torch
from torch.nn import functional

from arbcli.config.presets import preset
from arbcli.data.opening import open_texts
from arbcli.data.text import Mixture, Text
from arbcli.families.media.byte_kinds import ByteKinds
from arbcli.families.media.config import CompositeConfig
from arbcli.families.media.spans import PictureHeader, SoundHeader
from arbcli.generation.decoder import Decoder
from arbcli.generation.sampling import Sampling
from arbcli.model.build import build_model
from arbcli.training.configure import new_config
from arbcli.training.step import total_loss
from arbcli.training.trainer import Trainer

SIZES = {"dim": 32, "layers": 1, "heads": 2, "ffn": 48, "ctx": 16}
SOUND = SoundHeader("mulaw", 8000, 1, 20).encode() + bytes(range(100, 120))
PICTURE = PictureHeader("grey", 3, 2).encode() + b"abc\ndef\n"


def config(**given):
    plain = preset("tiny", **SIZES, **given)
    return replace(plain, composite=CompositeConfig(text=0.5, sound=2.0, picture=0.25))


def test_absent_kind_has_no_loss():
    lm = build_model(config(), torch.float32)
    ids = torch.arange(16)[None]
    losses = lm.losses(ids, ids)
    assert all(float(losses[f"of_{kind}"].detach()) == 0.0 for kind in ("sound", "picture"))
    assert float(losses["of_text"].detach()) > 5
    assert CompositeConfig(text=0, sound=10).loss_weights["of_sound"] == 10
    total_loss(losses, lm.loss_weights).backward()


def test_a_text_is_made_by_steps_as_it_is_scored():
    lm = build_model(config(), torch.float32)
    text = [1, 2, 3]
    for _ in range(9):
        with torch.no_grad():
            text.append(int(lm(torch.tensor([text]))[0, -1].argmax()))
    with torch.no_grad(), lm.prepared_weights():
        decoder = Decoder(lm, 12)
        decoder.begin(bytes(text[:3]), Sampling(temperature=0))
        assert [*itertools.chain(*decoder.stream(9))] == text[3:]


def test_kinds_are_those_of_sounds_and_pictures(tmp_path):
    content = [b"one ", SOUND, b" two", PICTURE, b"three ", PICTURE[:-1]]
    kinds = [0, 1, 0, 2, 0, 0]  # a picture that is cut off is text
    wanted = [kind for part, kind in zip(content, kinds, strict=True) for _ in part]
    path, plain = tmp_path / "media", tmp_path / "plain"
    path.write_bytes(b"".join(content))
    plain.write_bytes(b"no sound")
    whole = Text([path])
    kinds_of_text = ByteKinds(whole)
    for length in (1, 7, len(wanted)):
        starts = [*range(0, len(wanted) - length + 1, 3)]
        expected = [wanted[start : start + length] for start in starts]
        assert kinds_of_text.windows(starts, length).tolist() == expected
    late = Text.from_parts([(path, 30, len(wanted))])
    assert ByteKinds(late).windows([0], len(late)).tolist() == [wanted[30:]]
    mixed = Mixture([(Text([plain]), 1), (whole, 2)])
    assert ByteKinds(mixed).windows([0], len(mixed)).tolist() == [[0] * 8 + wanted]
    assert ByteKinds(Text([plain])).windows([2], 3).tolist() == [[0, 0, 0]]


def test_a_step_and_an_evaluation_know_the_kinds(tmp_path):
    path = tmp_path / "text"
    path.write_bytes((b"some words before a sound: " + SOUND + PICTURE) * 40)
    options = new_config(preset=config(), batch=2, accum=2, steps=3, device="cpu", backend="torch")
    trainer = Trainer(options, open_texts((str(path),), (), seed=0, context=16))
    kinds = ByteKinds(trainer.texts.train).windows([0], len(trainer.texts.train))[0]
    content = torch.frombuffer(bytearray(path.read_bytes()), dtype=torch.uint8).long()
    for micro in range(2):
        ids, targets = trainer.fetch(micro, "cpu")
        assert torch.equal(ids[:, 1:], targets[:, :-1] % 256)
        windows = content[: len(kinds)].unfold(0, 16, 1), kinds.unfold(0, 16, 1)
        for row in targets:
            places = (windows[0] == row % 256).all(dim=1)
            assert (windows[1][places] == row // 256).all(dim=1).any()
    losses = []
    trainer.model.loss = lambda ids, targets: losses.append(targets) or torch.zeros(())
    trainer.evaluate(num_batches=3)
    assert {int(kind) for targets in losses for kind in (targets // 256).unique()} == {0, 1, 2}
    del trainer.model.loss
    trainer.train_step()
    assert trainer.loss_parts.keys() == {"text", "of_text", "of_sound", "of_picture"}
    assert functional.relu(trainer.loss_parts["of_sound"]) > 1
