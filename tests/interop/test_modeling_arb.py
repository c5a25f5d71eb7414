"""The code that Transformers runs norms before the output projections, and nothing else.

Whether Transformers itself computes the same with it is seen in `test_hugging_face.py`.
"""

import sys
from importlib.util import module_from_spec, spec_from_file_location
from types import ModuleType, SimpleNamespace

import pytest
import torch
from torch import nn

from arbcli.interop.huggingface.export import CODE


class Config:
    """Stands for that of Qwen3."""

    rms_norm_eps = 0.25


class Model(nn.Module):
    """Stands for Qwen3, of two layers."""

    def __init__(self, config: Config) -> None:
        super().__init__()
        about = {"bias": False, "dtype": torch.bfloat16}
        layers = [
            SimpleNamespace(
                self_attn=SimpleNamespace(
                    q_proj=nn.Linear(6, 4, **about), o_proj=nn.Linear(6, 4, **about)
                ),
                mlp=SimpleNamespace(
                    up_proj=nn.Linear(8, 5, **about), down_proj=nn.Linear(8, 5, **about)
                ),
            )
            for _ in range(2)
        ]
        self.model, self.ready = SimpleNamespace(layers=layers), False

    def post_init(self) -> None:
        self.ready = type(self.model.layers[-1].mlp.down_proj) is not nn.Linear


@pytest.fixture
def modeling(monkeypatch) -> ModuleType:
    transformers = ModuleType("transformers")
    transformers.Qwen3Config, transformers.Qwen3ForCausalLM = Config, Model
    monkeypatch.setitem(sys.modules, "transformers", transformers)
    spec = spec_from_file_location(CODE.stem, CODE)
    module = module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_only_output_projections_normalise_their_input(modeling):
    model = modeling.ArbForCausalLM(modeling.ArbConfig())
    assert model.ready
    assert model.config_class is modeling.ArbConfig
    assert modeling.ArbConfig.model_type == "arb_byte_lm"
    for layer in model.model.layers:
        assert type(layer.self_attn.q_proj) is type(layer.mlp.up_proj) is nn.Linear
        for part, shape in ((layer.self_attn.o_proj, (4, 6)), (layer.mlp.down_proj, (5, 8))):
            assert part.bias is None
            assert (part.weight.shape, part.weight.dtype) == (shape, torch.bfloat16)
            nn.init.constant_(part.weight, 0.5)
            x = torch.arange(2.0 * shape[1]).view(2, -1).bfloat16() / 8
            y = part(x)
            exact = x.double()
            normed = exact / (exact.square().mean(dim=-1, keepdim=True) + 0.25).sqrt()
            assert y.dtype == torch.bfloat16
            wanted = (normed.sum(dim=-1, keepdim=True) / 2).expand(2, shape[0])
            torch.testing.assert_close(y.double(), wanted, rtol=0.02, atol=0)
