"""From a configuration to its model: the one place that knows which architecture is whose."""

import dataclasses
from typing import Any

import torch

from arbcli.model.config import GraphConfig, ModelConfig
from arbcli.model.graph_lm import GraphLM
from arbcli.model.language_model import LanguageModel
from arbcli.model.lm import ByteLM


def build_model(
    config: ModelConfig, compute_dtype: torch.dtype = torch.bfloat16, *, recompute: bool = False
) -> LanguageModel:
    """Make the model of a configuration, its weights not yet set."""
    kind = GraphLM if isinstance(config, GraphConfig) else ByteLM
    return kind(config, compute_dtype, recompute=recompute)


def model_config_from(values: dict[str, Any]) -> ModelConfig:
    """Rebuild a configuration from its fields, as JSON holds them.

    Raises:
        TypeError: they are of another version.
    """
    of_graph = {field.name for field in dataclasses.fields(GraphConfig)}
    of_dense = {field.name for field in dataclasses.fields(ModelConfig)}
    kind = GraphConfig if set(values) & (of_graph - of_dense) else ModelConfig
    return kind(**values)
