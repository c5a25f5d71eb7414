"""Qwen3 with a norm before the output projections, for Transformers: `trust_remote_code=True`.

`arb export --to hf` copies this file next to the weights of a model that has such norms.
"""

from torch import Tensor, nn
from torch.nn import functional
from transformers import Qwen3Config, Qwen3ForCausalLM


class ArbConfig(Qwen3Config):
    """Configuration of Qwen3 with its own model type, so that only this code loads the model."""

    model_type = "arb_byte_lm"


class NormedLinear(nn.Linear):
    """Linear layer with an RMS norm of its input."""

    def __init__(self, plain: nn.Linear, eps: float) -> None:
        factory = {"device": plain.weight.device, "dtype": plain.weight.dtype}
        super().__init__(plain.in_features, plain.out_features, bias=False, **factory)
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        """Normalise (..., K) in float32, and multiply it to (..., N)."""
        return super().forward(functional.rms_norm(x.float(), x.shape[-1:], eps=self.eps).to(x))


class ArbForCausalLM(Qwen3ForCausalLM):
    """A dense model with sub-norms."""

    config_class = ArbConfig

    def __init__(self, config: ArbConfig) -> None:
        super().__init__(config)
        for layer in self.model.layers:
            attention, mlp = layer.self_attn, layer.mlp
            attention.o_proj = NormedLinear(attention.o_proj, config.rms_norm_eps)
            mlp.down_proj = NormedLinear(mlp.down_proj, config.rms_norm_eps)
        self.post_init()
