"""The model of this folder for Transformers, which is plain PyTorch: see `modeling_core.py`.

`arb export --to hf` writes this file, with the classes of the model's parts in `PARTS`.
"""

from typing import Any

import torch
from torch import Tensor
from torch.nn import functional
from transformers import GenerationMixin, PretrainedConfig, PreTrainedModel
from transformers.modeling_outputs import CausalLMOutput

from arbcli.interop.huggingface.modeling_core import PlainModel

PARTS: dict[str, Any] = {}


class ArbConfig(PretrainedConfig):
    """Configuration of a model, as `arb` writes it.

    `model` has its stages and other parts, `storage` is `trits` or `digits`, and `group_size` is
    the number of weights that share a scale.
    """

    model_type = "arb"


class ArbForCausalLM(PlainModel, PreTrainedModel, GenerationMixin):
    """A language model."""

    config_class = ArbConfig
    config: Any
    like: Tensor
    post_init: Any

    def __init__(self, config: ArbConfig) -> None:
        super().__init__(config)
        self.build(config, PARTS)
        self.register_buffer("like", torch.empty(0), persistent=False)  # its dtype follows `to`
        self.post_init()

    @property
    def dtype(self) -> torch.dtype:
        """Dtype of activations; a packed model may have no float parameters."""
        return self.like.dtype

    @property
    def device(self) -> torch.device:
        """Device of the weights."""
        return self.embedding.exponent.device

    def forward(
        self,
        input_ids: Tensor,
        attention_mask: Tensor | None = None,
        labels: Tensor | None = None,
        **_: Any,
    ) -> CausalLMOutput:
        """Compute logits, (B, T, V), of each next symbol.

        Args:
            input_ids: (B, T) int64.
            attention_mask: (B, T), 0 at padding, whose logits are 0.
            labels: (B, T) int64, the text again, for the mean loss in nats; -100 is ignored.
        """
        mask = torch.ones_like(input_ids) if attention_mask is None else attention_mask
        rows = []
        for ids, kept in zip(input_ids, mask.bool(), strict=True):
            read = ids[kept] if kept.any() else ids[:1]  # at least one symbol
            logits = self.read(read, self.dtype)[: int(kept.sum())]
            rows.append(logits.new_zeros(len(ids), logits.shape[-1]).index_put((kept,), logits))
        logits, loss = torch.stack(rows), None
        if labels is not None:
            targets = labels[:, 1:].masked_fill(mask[:, :-1] == 0, -100)
            loss = functional.cross_entropy(
                logits[:, :-1].flatten(0, 1).float(), targets.flatten(), ignore_index=-100
            )
        return CausalLMOutput(loss=loss, logits=logits)

    @classmethod
    def _supports_default_dynamic_cache(cls) -> bool:
        return False

    def prepare_inputs_for_generation(
        self, input_ids: Tensor, attention_mask: Tensor | None = None, **_: Any
    ) -> dict[str, Tensor | None]:
        """Return the inputs of `forward` for the complete text, (B, T), without a cache."""
        return {"input_ids": input_ids, "attention_mask": attention_mask}
