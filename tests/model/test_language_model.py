"""What every model has: parts that can be left out, and weights that are prepared once."""

import pytest
import torch
from twins import losses_of_steps

from arbcli.config.presets import preset
from arbcli.kernels.update.gradient_gains import UNSET
from arbcli.model.baselines import FloatWeight
from arbcli.model.build import build_model
from arbcli.model.layers.linear import LinearWeight

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


@pytest.mark.parametrize("weights", ["ternary", "float", "ste"])
@pytest.mark.parametrize("kind", [kind for kind in KINDS if kind != "graph"])
def test_norms_inside_of_branches_can_be_left_out(kind, weights, build):
    models = [build(kind, weights=weights, sub_norms=on) for on in (True, False)]
    modules = [{name for name, _ in model.named_modules()} for model in models]
    assert modules[1] < modules[0]
    if weights == "ternary":
        norms = [[n for n in model.state_dict() if "sub_norm" in n] for model in models]
        assert norms[0]
        assert not norms[1]


@pytest.mark.parametrize("kind", KINDS)
def test_directions_begin_without_a_gradient_seen(kind, build):
    model = build(kind, direction="factored")
    for tensor in model.weights().values():
        for buffer in tensor.buffers():
            buffer.zero_()
    model.initialise(0)
    tensors = [tensor for tensor in model.weights().values() if not tensor.frozen]
    found = [part for t in tensors for name, part in t.named_buffers() if "statistic" in name]
    assert found
    assert all((part[:, 0] == UNSET).all() for part in found)


@pytest.mark.parametrize("missing", [0, 1])
def test_weights_are_kept_decoded_where_there_is_room(missing, build):
    """All of them or none; afterwards none, and their like of a twin are cast again, too."""
    model = build("dense")
    matrices = [part for part in model.modules() if isinstance(part, LinearWeight)]
    size = sum(4 * m.out_features * m.in_features for m in matrices)
    assert model.decoded_bytes == size
    ids = torch.zeros(1, 3, dtype=torch.int64)
    for _ in range(2):
        with model.prepared_weights(size - missing), torch.no_grad():
            assert model.weights_are_prepared
            model(ids)
            assert {m.keeps_decoded for m in matrices} == {not missing}
            assert {m._kept is not None for m in matrices} == {not missing}
        assert not model.weights_are_prepared
        assert not any(m.keeps_decoded or m._kept is not None for m in matrices)


def test_weights_of_a_twin_are_cast_once():
    model = build_model(preset("tiny", dim=32, layers=1, heads=2, ffn=48, ctx=8, weights="ste"))
    model.initialise(0)
    weights = [part for part in model.modules() if isinstance(part, FloatWeight)]
    with model.prepared_weights():
        with model.prepared_weights():
            pass
        assert model.weights_are_prepared  # by what is around it
    with model.prepared_weights():
        for part in weights:
            assert torch.equal(part._cast, part.weight(torch.bfloat16))
            assert part._cast.dtype == torch.bfloat16
    assert all(part._cast is None for part in weights)


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
    [("streams", "float"), ("compressed", "ste"), ("compressed", "float"), ("graph", "float"),
     ("hnet", "ste"), ("mamba", "float")],
)  # fmt: skip
def test_twin_learns_and_reads_by_its_cache(kind, weights, build):
    model = build(kind, weights=weights)
    model.initialise(0)
    ids = torch.randint(97, 123, (4, 17), generator=torch.Generator().manual_seed(0))
    first, *_, last = losses_of_steps(model, ids, 3e-3, 12)
    assert last["text"] < 0.8 * first["text"]
    remembered = {"memgram.strength", "moe_graph.edges.score"} if kind == "graph" else ()
    assert all(model.get_buffer(name).any() for name in remembered)
    if kind == "graph":
        assert model.gauges().keys() == {"edges", "fullest_expert"}
    with model.prepared_weights(), torch.no_grad():
        cache = model.new_cache(16)
        found = torch.cat([model(part, cache) for part in ids[:1, :16].split(1, dim=1)], dim=1)
        torch.testing.assert_close(found, model(ids[:1, :16]), rtol=1e-4, atol=1e-4)
