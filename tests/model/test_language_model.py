"""Parts of every model: those that can be left out, and weights that are prepared once."""

import pytest
import torch
from handed import chosen_by, handed
from torch.nn import functional
from twins import losses_of_steps

from arbcli.config.presets import preset
from arbcli.model.build import build_model
from arbcli.model.layers.products import Product

KINDS = ("dense", "streams", "compressed", "graph", "hnet", "mamba")


@pytest.fixture
def build(small_graph, small_hnet, small_compressed):
    dense = {name: small_compressed[name] for name in ("dim", "layers", "heads", "ffn", "ctx")}
    options = {
        "dense": dense | {"preset": "tiny"},
        "streams": dense | {"preset": "tiny", "streams": 2},
        "compressed": small_compressed,
        "graph": small_graph | {"memgram": True},
        "hnet": small_hnet,
        "mamba": small_hnet | {"outer_blocks": "mamba", "states": 8},
    }

    def build(kind: str, recompute: bool = False, **given):
        given = {**options[kind], **given}
        given.pop("batch", None)
        config = preset(given.pop("preset"), **given)
        return build_model(config, torch.float32, recompute=recompute)

    return build


@torch.no_grad()
@pytest.mark.parametrize("kind", KINDS)
def test_cache_that_is_reset_begins_a_new_text(kind, build):
    model = build(kind)
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


@pytest.mark.parametrize(
    ("kind", "weights"),
    [("streams", "float"), ("compressed", "ste"), ("graph", "float"), ("hnet", "ste"),
     ("mamba", "float")],
)  # fmt: skip
def test_twin_learns_and_reads_by_its_cache(kind, weights, build):
    model = build(kind, weights=weights)
    model.initialise(0)
    ids = torch.randint(97, 123, (4, 17), generator=torch.Generator().manual_seed(0))
    first, *_, last = losses_of_steps(model, ids, 0.01, 6)
    assert last["text"] < 0.8 * first["text"]
    remembered = {"memgram.strength", "moe_graph.edges.score"} if kind == "graph" else ()
    assert all(model.get_buffer(name).any() for name in remembered)
    if kind == "graph":
        assert model.gauges().keys() == {"edges", "fullest_expert"}
    with model.prepared_weights(), torch.no_grad():
        with chosen_by(model) as chosen:
            whole = model(ids[:1, :9])
        cache = model.new_cache(16)
        with handed(chosen):
            in_bytes = [model(part, cache) for part in ids[:1, :9].split(1, dim=1)]
        torch.testing.assert_close(torch.cat(in_bytes, dim=1), whole, rtol=1e-4, atol=1e-4)


def test_last_product_of_a_recomputed_block_is_omitted(build, monkeypatch):
    products, gradients = [], {}
    multiply = Product.product
    monkeypatch.setattr(
        Product, "product",
        lambda self, weight, x: products.append(weight) or multiply(self, weight, x),
    )  # fmt: skip
    ids = torch.randint(97, 123, (2, 9), generator=torch.Generator().manual_seed(0))
    for recompute in (False, True):
        model = build("dense", recompute=recompute)
        model.initialise(0)
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
