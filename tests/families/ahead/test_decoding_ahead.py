"""Weights of a block that are decoded in one launch: the same bits, and never old ones."""

import pytest
import torch
from states import assert_same

from arbcli.config.presets import preset
from arbcli.kernels.runtime.backend import use_backend
from arbcli.model.build import build_model
from arbcli.model.language_model import LanguageModel
from arbcli.model.layers import decoded_groups, group_product

SIZES = {"dim": 8, "layers": 1, "heads": 2, "ffn": 8, "ctx": 65, "sub_norms": False}


@pytest.fixture
def backend(device):
    with use_backend("triton" if device.type == "cuda" else "interpreter"):
        yield


def build(device, layers: int = 1) -> LanguageModel:
    with torch.device(device):
        return build_model(preset("tiny", **SIZES | {"layers": layers}), torch.float32, seed=3)


def step(model: LanguageModel, device) -> dict[str, torch.Tensor]:
    gradients = {}
    for name, weight in model.weights().items():
        weight.sink = lambda _, grad, name=name: gradients.update({name: grad})
    ids = (torch.arange(66, device=device) * 7 % 256)[None]
    loss = model.loss(ids[:, :-1], ids[:, 1:])
    loss.backward()
    return gradients | {"loss": loss.detach()}


def test_decoding_ahead_changes_no_bit_and_saves_launches(device, backend, monkeypatch):
    groups, decode = [], group_product.decode_weights_triton
    monkeypatch.setattr(
        group_product,
        "decode_weights_triton",
        lambda matrices, dtype: groups.append(len(matrices)) or decode(matrices, dtype),
    )
    together, alone = build(device, 3), build(device, 3)
    for weight in alone.weights().values():
        weight.group = None
    first = step(together, device)
    assert groups == [13, 9]
    assert_same(step(alone, device), first)


def test_decoded_weights_are_not_used_after_a_change(device, backend):
    model = build(device)
    attention, x = model.blocks[0].attention, torch.ones(65, 8, device=device)
    for change in ("updates", "trits"):
        attention.qkv.weight.multiply(x, None)
        weight = attention.output.weight
        assert weight._ready is not None  # it waits for its use
        if change == "updates":
            weight.trits.data[:] = 121  # zeros, uncounted as a kernel's
            weight.updates += 1
        else:
            weight.trits[:] = 121
        assert not weight.multiply(x, None).any()
        weight.initialise(3, 5)


def weights_of(model: LanguageModel) -> list:
    parts = [(block.attention, block.mlp) for block in model.blocks]
    layers = [(a.qkv, a.output, mlp.gate_up, mlp.output) for a, mlp in parts]
    return [layer.weight for block in layers for layer in block] + [model.head.weight]


def test_a_forward_keeps_what_its_backward_begins_with(device, backend, monkeypatch):
    model = build(device, layers=2)
    weights = weights_of(model)
    assert [weight.group.kept_for_backward for weight in weights] == [False] * 5 + [True] * 4
    ids = (torch.arange(66, device=device) * 7 % 256)[None]
    with torch.no_grad():
        model.loss(ids[:, :-1], ids[:, 1:])
    assert all(weight._ready is None for weight in weights)
    model.loss(ids[:, :-1], ids[:, 1:]).backward()
    assert all(weight._ready is None for weight in weights)
    model.loss(ids[:, :-1], ids[:, 1:])
    assert [weight._ready is not None for weight in weights] == [False] * 5 + [True] * 4
    monkeypatch.setattr(decoded_groups, "MAX_KEPT", 4 * 8 * 8)
    assert not any(weight.group.kept_for_backward for weight in weights_of(build(device, layers=2)))
