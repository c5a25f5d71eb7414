"""Caches of every model that are used again, and blocks that are computed again."""

import pytest
import torch
from cells import FEW
from graph_parts import graph_config
from torch.nn import functional

from arbcli.config.presets import preset
from arbcli.model.build import build_model
from arbcli.model.language_model import LanguageModel
from arbcli.model.layers.products import Product

MODELS = {"graph": graph_config()} | {str(cell): cell.model() for cell in FEW}
"""With all kinds of parts."""


@torch.no_grad()
@pytest.mark.parametrize("name", MODELS)
def test_cache_that_is_reset_begins_a_new_text(name):
    model = LanguageModel(MODELS[name], torch.float32)
    for tensor in model.weights().values():
        tensor.spread = 1.0  # what is zero at the start, too
    model.initialise(0)
    first, second = torch.randint(97, 123, (2, 1, 6), generator=torch.Generator().manual_seed(0))
    used, new = model.new_cache(16), model.new_cache(16)
    for part in first.split([5, 1], dim=1):
        model(part, used)
    used.reset()
    for part in second.split([4, 1, 1], dim=1):
        assert torch.equal(model(part, used), model(part, new))


def test_last_product_of_a_recomputed_block_is_omitted(monkeypatch):
    config = preset("tiny", dim=32, layers=2, heads=2, ffn=48, ctx=24)
    products, gradients = [], {}
    multiply = Product.product
    monkeypatch.setattr(
        Product, "product",
        lambda self, weight, x: products.append(weight) or multiply(self, weight, x),
    )  # fmt: skip
    ids = torch.randint(97, 123, (2, 9), generator=torch.Generator().manual_seed(0))
    for recompute in (False, True):
        model = build_model(config, torch.float32, recompute=recompute)
        products.clear()
        seen = gradients[recompute] = []
        for tensor in model.packed_tensors().values():
            tensor.sink = lambda _tensor, grad, _where=None, seen=seen: seen.append(grad.clone())
        functional.cross_entropy(model(ids[:, :-1]).mT, ids[:, 1:]).backward()
        repeated = [weight for weight in {*products} if products.count(weight) > 1]
        last = {block.mlp.output.weight for block in model.blocks}
        inner = {layer.weight for block in model.blocks for layer in block.linears()} - last
        assert {*repeated} == (inner if recompute else set())
    for kept, recomputed in zip(gradients[False], gradients[True], strict=True):
        assert torch.equal(kept, recomputed)
