"""Baselines and decoders that measurements compare with compute what the baseline computes."""

import pytest
import torch
from torch.nn import functional

from arbcli.config.presets import preset
from arbcli.generation.decoder import Decoder
from arbcli.generation.sampling import Sampling
from arbcli.model.build import build_model
from arbcli.model.language_model import LanguageModel
from arbcli.model.layers.linear import TernaryLinear
from arbcli.model.layers.norm import NORM_EPS
from benchmarks.bare_twin import LR, Model, orthogonalise, step_by_muon
from benchmarks.dense_rows import dense_row, read_dense
from benchmarks.float_decoder import FloatDecoder
from benchmarks.float_several import MODES, BatchFloatDecoder

NAMES = {
    "attention.qkv": "qkv", "attention.output": "out", "mlp.gate_up": "up", "mlp.output": "down",
}  # fmt: skip


def test_loss_is_that_of_the_float_twin():
    shape = {"dim": 64, "layers": 2, "heads": 2, "ffn": 96, "ctx": 32}
    twin = build_model(preset("tiny", weights="float", sub_norms=False, **shape), torch.float32)
    twin.initialise(0)
    state = twin.state_dict()
    state["head.weight.latent"].mul_(30)  # so that losses differ where anything does
    bare = Model(64, 2, 2, 96, 32)
    taken = {"embedding.weight": state["embedding.weight.latent"],
             "head.weight": state["head.weight.latent"]}  # fmt: skip
    for index in range(2):
        for name, ours in NAMES.items():
            taken[f"blocks.{index}.{ours}.weight"] = state[f"blocks.{index}.{name}.weight.latent"]
    bare.load_state_dict(taken | {"cos": bare.cos, "sin": bare.sin})
    ids = torch.arange(64).view(2, 32) * 5 % 256
    with torch.no_grad(), torch.autocast("cpu", torch.bfloat16):
        losses = [twin.loss(ids, 255 - ids), bare(ids, 255 - ids)]
    assert float(losses[1]) == pytest.approx(float(losses[0]), rel=2e-3)  # one is in bf16


def test_muon_steps_along_orthogonal_matrices():
    generator = torch.Generator().manual_seed(0)
    gradients = [torch.randn(48, 32, generator=generator) for _ in range(3)]
    values = torch.linalg.svdvals(orthogonalise(torch.stack(gradients)).float())
    assert values.min() > 0.5
    assert values.max() < 1.4
    weights = [torch.zeros(48, 32) for _ in range(3)]
    moments = torch.zeros(3, 48, 32)
    step_by_muon(weights, gradients, moments)
    assert torch.equal(moments, torch.stack(gradients))
    along = [float((w * g).sum()) for w, g in zip(weights, gradients, strict=True)]
    assert all(value < 0 for value in along)
    assert float(weights[0].abs().max()) < 0.2 * 48**0.5 * LR


@pytest.mark.parametrize(("gated", "normalise", "adds"), [(False, True, True), (True, True, False),
                                                          (False, False, False)])  # fmt: skip
def test_row_is_multiplied_as_torch_does(gated, normalise, adds, device):
    x, weight = (torch.randn(*shape, device=device) for shape in ((2100,), (14, 2100)))
    added = torch.randn(7 if gated else 14, device=device) if adds else None
    wanted = functional.rms_norm(x, x.shape, eps=NORM_EPS) if normalise else x
    wanted = weight.double() @ wanted.double()
    if gated:
        wanted = functional.silu(wanted[:7]) * wanted[7:]
    wanted = wanted if added is None else wanted + added
    found = dense_row(x, weight, gated, normalise, added)
    torch.testing.assert_close(found.double(), wanted, rtol=1e-4, atol=1e-4)


@pytest.mark.gpu
def test_decoder_writes_the_same_text_from_dense_weights():
    torch.manual_seed(0)
    texts, read = [], []
    for dense in (False, True):
        model = LanguageModel(preset("tiny", layers=2)).cuda()
        model.initialise(0)
        read.append(read_dense(model) if dense else 0)
        with model.prepared_weights():
            decoder = Decoder(model, 48)
            decoder.begin(b"\n")
            texts.append(b"".join(decoder.stream(40)))
    assert texts[0][:8] == texts[1][:8]  # sums differ in their last bits
    linear = [part.weight for part in model.modules() if isinstance(part, TernaryLinear)]
    assert read[1] == 2 * sum(weight.num_weights for weight in linear)


TWIN = {"dim": 64, "layers": 2, "heads": 2, "ffn": 96, "ctx": 16}
PROMPT = b"once upon a time"


def twin(**given) -> LanguageModel:
    model = LanguageModel(preset("tiny", **TWIN | given, weights="float"), torch.float32)
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
    expected = Decoder(model, 40)
    expected.begin(PROMPT, how)
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
    decoder = BatchFloatDecoder(model, 2, 20, dtype=torch.float32, mode=mode, compiled=False)
    caches = [model.new_cache(20) for _ in range(2)]
    ids = torch.randint(0, 256, (2, 20), generator=torch.Generator().manual_seed(0))
    for place in range(20):
        decoder.byte.copy_(ids[:, place : place + 1])
        with torch.no_grad():
            expected = [model(row[None, place, None], cache)[0, 0]
                        for row, cache in zip(ids, caches, strict=True)]  # fmt: skip
        assert torch.allclose(decoder.compute_logits(), torch.stack(expected), atol=1e-4)
