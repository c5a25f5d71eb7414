"""Baselines and decoders that measurements compare with compute what the baseline computes."""

import pytest
import torch

from arbcli.config.presets import preset
from arbcli.model.build import build_model
from arbcli.model.language_model import LanguageModel
from benchmarks import quality, scaling
from benchmarks.bare_twin import Model
from benchmarks.float_decoder import MODES, FloatDecoder

NAMES = {
    "attention.qkv": "qkv", "attention.output": "out", "mlp.gate_up": "up", "mlp.output": "down",
}  # fmt: skip


def test_loss_is_that_of_the_float_twin():
    shape = {"dim": 64, "layers": 2, "heads": 2, "ffn": 96, "ctx": 32}
    twin = build_model(preset("tiny", weights="float", sub_norms=False, **shape), torch.float32)
    state = twin.state_dict()
    state["head.weight.latent"].mul_(30)  # so that losses differ where anything does
    bare = Model(64, 2, 2, 96, 32)
    renamed = {"embedding.weight": state["embedding.weight.latent"],
             "head.weight": state["head.weight.latent"]}  # fmt: skip
    for index in range(2):
        for name, ours in NAMES.items():
            renamed[f"blocks.{index}.{ours}.weight"] = state[f"blocks.{index}.{name}.weight.latent"]
    bare.load_state_dict(renamed | {"cos": bare.cos, "sin": bare.sin})
    ids = torch.arange(64).view(2, 32) * 5 % 256
    with torch.no_grad(), torch.autocast("cpu", torch.bfloat16):
        losses = [twin.loss(ids, 255 - ids), bare(ids, 255 - ids)]
    assert float(losses[1]) == pytest.approx(float(losses[0]), rel=2e-3)  # one is in bf16


TWIN = {"dim": 64, "layers": 2, "heads": 2, "ffn": 96, "ctx": 16}


def twin(**given) -> LanguageModel:
    return build_model(preset("tiny", **TWIN | given, weights="float"), torch.float32)


@pytest.mark.parametrize("sub_norms", [True, False])
@pytest.mark.parametrize("length", [5, 40], ids=["in the window", "past the window"])
@pytest.mark.parametrize("mode", MODES)
def test_float_decoder_has_the_logits_of_the_twin(sub_norms, length, mode):
    model = twin(sub_norms=sub_norms)
    decoder = FloatDecoder(model, 2, length, dtype=torch.float32, mode=mode, compiled=False)
    caches = [model.new_cache(length) for _ in range(2)]
    ids = torch.randint(0, 256, (length, 2, 1), generator=torch.Generator().manual_seed(0))
    for both in ids:
        decoder.byte.copy_(both)
        with torch.no_grad():
            pairs = zip(both, caches, strict=True)
            expected = [model(byte.view(1, 1), cache)[0, 0] for byte, cache in pairs]
        assert torch.allclose(decoder.compute_logits(), torch.stack(expected), atol=1e-4)


def test_benchmark_of_sizes_trains_a_baseline(monkeypatch):
    monkeypatch.setitem(scaling.SHAPES, "tiny", TWIN | {"device": "cpu"})
    assert scaling.measure("Muon", "tiny", 1, {"data": [__file__], "val": [__file__]}, seed=0)


def test_benchmark_of_losses_reads_any_options_of_training():
    text = ["--data", __file__, "--val", __file__, "--device", "cpu"]
    trainer = quality.trainer_of("--set symbol_digits=all --no-sub-norms", "--dim 64", text, seed=0)
    assert trainer.config.model.symbol_digits == "all"
