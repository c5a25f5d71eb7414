"""The float decoder that generation is compared with computes what the twin computes."""

import pytest
import torch

from arbcli.config.presets import preset
from arbcli.infer.generation import Decoder, Sampling
from arbcli.model.language_model import LanguageModel
from benchmarks.float_decoder import FloatDecoder
from benchmarks.float_several import MODES, SeveralFloatDecoder

SHAPE = {"dim": 64, "layers": 2, "heads": 2, "ffn": 96, "ctx": 16}
PROMPT = b"once upon a time"


def twin(**given) -> LanguageModel:
    model = LanguageModel(preset("tiny", **SHAPE | given, weights="float"), torch.float32)
    model.initialise(0)
    return model


@pytest.mark.parametrize("sub_norms", [True, False])
@pytest.mark.parametrize("length", [5, 40], ids=["in the window", "past the window"])
def test_float_decoder_has_the_logits_of_the_twin(sub_norms, length):
    model = twin(sub_norms=sub_norms)
    decoder = FloatDecoder(model, length, dtype=torch.float32)
    cache = model.new_cache(length)
    ids = torch.randint(0, 256, (length,), generator=torch.Generator().manual_seed(0))
    for byte in ids:
        decoder.byte.fill_(byte)
        with torch.no_grad():
            expected = model(byte.view(1, 1), cache)[0, 0]
        assert torch.allclose(decoder.compute_logits(), expected, atol=1e-4)


def test_float_decoder_writes_the_text_of_the_twin():
    model, how = twin(), Sampling(temperature=0.8, seed=3)
    expected = Decoder(model, 40, how)
    expected.read(PROMPT)
    decoder = FloatDecoder(model, 40, how, dtype=torch.float32)
    decoder.read(PROMPT)
    text = b"".join(expected.stream(24))
    for _ in range(24):
        decoder.step()
    assert bytes(decoder.text.tolist()) == PROMPT + text


def test_float_decoder_reads_every_matrix_once_a_byte():
    model = twin()
    count = sum(parameter.numel() for parameter in model.parameters())
    embedding = model.embedding.weight.latent.numel()
    decoder = FloatDecoder(model, 8)
    assert decoder.read_bytes == 2 * (count - embedding)


@pytest.mark.parametrize("mode", MODES)
def test_several_float_texts_have_the_logits_of_the_twin(mode):
    model = twin()
    decoder = SeveralFloatDecoder(model, 2, 20, dtype=torch.float32, mode=mode, compiled=False)
    caches = [model.new_cache(20) for _ in range(2)]
    ids = torch.randint(0, 256, (2, 20), generator=torch.Generator().manual_seed(0))
    for place in range(20):
        decoder.byte.copy_(ids[:, place : place + 1])
        with torch.no_grad():
            expected = [model(row[None, place, None], cache)[0, 0]
                        for row, cache in zip(ids, caches, strict=True)]  # fmt: skip
        assert torch.allclose(decoder.compute_logits(), torch.stack(expected), atol=1e-4)
