"""Models of the tests against their float64 references."""

import torch
from torch import Tensor

from arbcli.config.model import ModelConfig
from arbcli.model.language_model import LanguageModel
from arbcli.verify import parity
from arbcli.verify.reference import Reference
from arbcli.verify.subjects import Subject
from arbcli.verify.update_reference import reference_weight


def reference_logits(lm: LanguageModel, ids: Tensor, **options) -> Tensor:
    """Compute logits of (B, T) bytes in float64."""
    weights = {name: reference_weight(tensor) for name, tensor in lm.weights().items()}
    buffers = dict(lm.named_buffers())
    return Reference(weights, lm.config, memories=buffers, **options)(ids)[0]


def assert_agrees(config: ModelConfig, device: torch.device, *checks: str) -> None:
    """Compare a model with its reference, as `arb verify-kernels` does, from the bytes on.

    Args:
        checks: further checks, such as `bits`.
    """
    backend = "triton" if device.type == "cuda" else "torch"
    about = (2, torch.float32, device, backend, ("blocks", "whole", *checks))
    results = parity.check_model(Subject("", config, *about))
    assert not [result for result in results if not result.passed]


@torch.no_grad()
def logits_in_parts(lm: LanguageModel, ids: Tensor, lengths: list[int]) -> Tensor:
    """Read texts (1, T) in pieces of some lengths, each after those before it."""
    cache = lm.new_cache(ids.shape[1])
    return torch.cat([lm(part, cache) for part in ids.split(lengths, dim=1)], dim=1)


def decoded(model: LanguageModel) -> dict[str, Tensor]:
    """Decode all weights as float64 matrices, by their names."""
    return {name: part.weight(torch.float32).double() for name, part in model.weights().items()}


def dense_gradients(model: LanguageModel) -> dict[str, Tensor]:
    """Collect the gradients that a backward hands on, as float64 matrices by names of weights."""
    names = {id(part): name for name, part in model.weights().items()}
    gradients = {
        name: torch.zeros(part.out_features, part.in_features, dtype=torch.float64)
        for name, part in model.weights().items()
    }

    def take(tensor, grad, where=None):
        dense = gradients[names[id(tensor)]]
        if where is None:
            dense += grad
        else:
            dense[tensor.rows_of(where)] += grad.flatten(0, 1)

    for part in model.weights().values():
        part.sink = take
    return gradients
