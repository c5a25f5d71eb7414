"""Models of tokens: vocabularies of other sizes than that of bytes."""

import pytest
import torch
from references import dense_gradients

from arbcli.config.model import BlockConfig, ModelConfig, StageConfig
from arbcli.config.parts.attention import AttentionConfig
from arbcli.config.parts.mlp import MLPConfig
from arbcli.inspect.memory import predict_parts
from arbcli.kernels.runtime.backend import use_backend
from arbcli.model.build import build_model
from arbcli.model.layers import symbols

DIM, CTX = 24, 10
SMALL, LARGE = 301, 5003


def model_config(vocabulary: int, **options) -> ModelConfig:
    block = BlockConfig(mixer=AttentionConfig(heads=2), channel=MLPConfig(width=16))
    stage = StageConfig(dim=DIM, blocks=(block,) * 2)
    return ModelConfig(ctx=CTX, stages=(stage,), vocabulary=vocabulary, **options)


def build(vocabulary: int, dtype=torch.float32, recompute=False, **options):
    return build_model(model_config(vocabulary, **options), dtype, recompute=recompute)


def text(vocabulary: int) -> torch.Tensor:
    return torch.randint(vocabulary, (3, CTX + 1), generator=torch.Generator().manual_seed(0))


@pytest.mark.parametrize("tied", [False, True])
def test_logits_that_a_forward_keeps_give_the_same_gradients(tied, monkeypatch):
    chunk = 3 * CTX * 2560 * 4  # bytes of the logits of one of two chunks
    score, kept, gradients = symbols.SymbolWeight.score, [], []

    def record(*arguments):
        scored = score(*arguments)
        kept.append([logits.shape[1] for logits in scored[2]])
        return scored

    monkeypatch.setattr(symbols.SymbolWeight, "score", record)
    monkeypatch.setattr(symbols, "KEPT_BYTES", {False: 2 * chunk, True: chunk})
    for recompute in (False, True):
        model, ids = build(LARGE, recompute=recompute, tied=tied), text(LARGE)
        grads = dense_gradients(model)
        with use_backend("torch"):
            model.loss(ids[:, :-1], ids[:, 1:]).backward()
            with torch.no_grad():
                model.loss(ids[:, :-1], ids[:, 1:])
        gradients.append(grads)
    assert kept == [[2560, LARGE - 2560], [], [2560], []]
    for others in gradients[1:]:
        assert all(torch.equal(grad, others[name]) for name, grad in gradients[0].items())


def test_shared_weight_is_counted_once():
    report = predict_parts(model_config(SMALL, tied=True))
    assert sum(part.weights for part in report.parts if not part.depth) == report.total.weights
    (head,) = (part for part in report.parts if part.path == "head")
    assert (head.kind, head.weights) == ("head", 0)
