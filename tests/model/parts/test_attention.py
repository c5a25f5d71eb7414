"""Attention of shapes that kernels have not, and its cache in eight bits."""

import pytest
import torch
from references import assert_agrees, logits_in_parts

from arbcli.config.model import BlockConfig, ModelConfig, StageConfig
from arbcli.config.parts.attention import AttentionConfig
from arbcli.config.parts.mlp import MLPConfig
from arbcli.config.parts.rotary import RotaryConfig
from arbcli.model.build import build_model
from arbcli.model.layers.vector import VectorWeight

CTX, LENGTH, DIM, WINDOW = 12, 29, 48, 5
LONGER = {"base": 50.0, "factor": 8.0, "original_ctx": 40}
SHAPES = {
    "plain": {}, "fewer heads of keys": {"kv_heads": 2},
    "one head of keys, in a window": {"kv_heads": 1, "window": WINDOW},
    "wide heads": {"head_width": 14},
    "half of a head": {"rotary": RotaryConfig(base=500.0, share=0.5)},
    "interpolated": {"rotary": RotaryConfig(scaling="linear", factor=4.0)},
    "llama3": {"rotary": RotaryConfig(scaling="llama3", **LONGER)},
    "yarn": {"rotary": RotaryConfig(scaling="yarn", high=8.0, **LONGER)},
    "gains": {"query_key_norm": "gain"}, "no norm": {"query_key_norm": "none"},
    "biases": {"bias": True, "output_bias": True}, "output bias": {"output_bias": True},
    "sinks": {"sink": True}, "sinks in a window": {"sink": True, "window": WINDOW},
    "all": {"kv_heads": 2, "head_width": 8, "query_key_norm": "gain", "bias": True,
        "output_bias": True, "sink": True, "window": WINDOW,
        "rotary": RotaryConfig(scaling="yarn", **LONGER, share=0.5), },
}  # fmt: skip
KERNELS = ("plain", "wide heads", "half of a head", "interpolated", "llama3")
"""Shapes that kernels have."""
PARTS = {"a byte at a time": [1] * LENGTH, "ragged": [3, 1, 5, 2, 1, 5, 4, 1, 1, 5, 1]}


def model_config(name: str, more: dict | None = None, **options) -> ModelConfig:
    mixer = AttentionConfig(heads=4, **SHAPES[name] | (more or {}))
    block = BlockConfig(mixer=mixer, channel=MLPConfig(width=16))
    stage = StageConfig(dim=DIM, blocks=(block,) * 2)
    return ModelConfig(**{"ctx": CTX, "stages": (stage,)} | options)


def build(name: str, device, dtype=torch.float32, **options):
    """Make a model whose vectors have values that show."""
    with torch.device(device):
        lm = build_model(model_config(name, **options), dtype)
    generator = torch.Generator().manual_seed(1)
    for tensor in lm.weights().values():
        if isinstance(tensor, VectorWeight):
            values = torch.randn(tensor.out_features, generator=generator)
            tensor.values = tuple((values + tensor.values[0]).tolist())
    lm.initialise(0)
    return lm


def text(device) -> torch.Tensor:
    generator = torch.Generator().manual_seed(3)
    return torch.randint(256, (1, LENGTH), generator=generator).to(device)


@pytest.mark.parametrize(
    ("name", "norm_gain"),
    [("one head of keys, in a window", False), ("interpolated", False), ("all", True)],
)
def test_shape_agrees_with_its_reference(name, norm_gain, device):
    assert_agrees(model_config(name, norm_gain=norm_gain), device, "bits")


@pytest.mark.parametrize(
    ("name", "kv"),
    [("plain", "fp8-mixed"), ("half of a head", "int8-mixed"), ("all", "fp8-queries")],
)
@torch.no_grad()
def test_rotated_numbers_of_keys_are_not_rounded_in_an_eight_bit_cache(name, kv, device):
    lm, ids = build(name, device), text(device)
    layer, width = lm.blocks[0].attention, lm.blocks[0].attention.width
    errors = {}
    exact = lm(ids[:, :CTX])
    for kept in (kv, kv.split("-")[0]):
        with lm.cached_as(kept):
            whole = lm(ids[:, :CTX])
            errors[kept] = (whole - exact).norm()
            assert lm.cache_dtype == kept
            for lengths in PARTS.values() if kept == kv else ():
                logits = logits_in_parts(lm, ids, lengths)[:, :CTX]
                # a code may be the next one, where products of other shapes add in another order
                torch.testing.assert_close(logits, whole, rtol=0, atol=0.05)
    assert 0 < errors[kv] != errors[kv.split("-")[0]]
    keys = torch.randn(5, width)
    with lm.cached_as(kv):
        (rounded,) = layer.cache_format.round(keys, rotated=layer.rotated)
        half, still = layer.rotated // 2, slice(layer.rotated // 2, width // 2)
        for first, after in zip(keys.chunk(2, dim=1), rounded.chunk(2, dim=1), strict=True):
            assert torch.equal(first[:, :half], after[:, :half])
            assert first[:, still].numel() == 0 or not torch.equal(first[:, still], after[:, still])
        rings = lm.new_cache(LENGTH).main.blocks[0]
        sizes = {part.dtype.itemsize for part in rings.tensors()}
    assert sizes == {1, 4}


def test_other_shapes_than_those_of_kernels_take_plain_operations():
    with torch.device("meta"):
        models = {name: build_model(model_config(name), torch.float32) for name in SHAPES}
    fitting = {name for name, model in models.items() if model.blocks[0].attention.fits_kernels}
    assert fitting == {*KERNELS, "output bias"}
