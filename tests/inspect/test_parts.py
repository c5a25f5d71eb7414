"""The tree of a model names every part, and what its parts take adds up to what it takes."""

import pytest
from cells import QUICK

from arbcli.config.presets import PRESETS, preset
from arbcli.inspect.memory import predict, predict_parts
from arbcli.inspect.parts import list_parts
from arbcli.model.build import build_model

MODELS = {
    **{name: PRESETS[name] for name in ("tiny", "arb-long", "arb-deep-small", "hnet-two-stage")},
    "all parts": preset("arb-tiny", moe=True, graph=True, memgram=True),
    "streams": preset("hnet-tiny", streams=4, experts=3),
    "quantisers": preset("arb-tiny", code_search="nearest"),
    **{"-".join(map(str, cell)): cell.model() for cell in QUICK},
}


@pytest.mark.parametrize("name", MODELS)
def test_parts_add_up_to_their_parents_and_to_the_model(name):
    report = predict_parts(MODELS[name])
    plain = predict(report.config)
    assert report.total == plain.total
    for field, total in (("weights", plain.total.weights), ("bytes", plain.total.state_bytes)):
        assert sum(getattr(part, field) for part in report.parts if not part.depth) == total
        for index, part in enumerate(report.parts):
            inside = []
            for other in report.parts[index + 1 :]:
                if other.depth <= part.depth:
                    break
                if other.depth == part.depth + 1:
                    inside.append(getattr(other, field))
            assert sum(inside) in ((0,) if not inside else (getattr(part, field),))


def test_equal_blocks_that_follow_one_another_are_one_part():
    parts = {part.path: part for part in predict_parts(preset("arb-long", ratios=(4, 4, 8))).parts}
    assert [path for path in parts if path.count(".") == 1] == [
        "blocks.0-1", "blocks.2-11 by 3", "blocks.3-9 by 3", "blocks.4-10 by 3",
    ]  # fmt: skip
    pair, turns = parts["blocks.0-1.mlp"], parts["blocks.2-11 by 3.mlp"]
    assert (pair.count, turns.count) == (2, 4)
    assert (turns.weights, turns.bytes) == (2 * pair.weights, 2 * pair.bytes)


def test_each_stage_has_its_own_width_and_chunks():
    sizes = {"outer_dim": (192, 256), "chunk_length": (3, 5)}
    parts = predict_parts(preset("hnet-two-stage", **sizes)).parts
    assert [part.shape for part in parts if part.kind == "stage"] == [
        "dim 192, boundaries learned, length 3", "dim 256, boundaries learned, length 5", "dim 768",
    ]  # fmt: skip


def test_parts_of_a_graph_are_named_with_their_values():
    parts = predict_parts(MODELS["all parts"]).parts
    assert [part.path for part in parts if not part.depth] == [
        "embedding", "sequencer", "memgram", "blocks", "codebook", "knowledge", "moe_graph",
        "router", "byte_norm", "byte_mlp", "norm", "head",
    ]  # fmt: skip
    shapes = {part.path: part.shape for part in parts}
    assert shapes["moe_graph"].startswith("iterations 4, adapter rank 16, experts (experts 8, ")
    assert shapes["memgram"] == ""
    assert "halves 64 x 64" in shapes["codebook"]


def test_weights_without_training_state_are_smaller():
    model = build_model(preset("tiny", dim=32, layers=2, heads=2, ffn=48))
    before = list_parts(model)
    model.drop_training_state()
    after = list_parts(model)
    assert [part.weights for part in after] == [part.weights for part in before]
    assert sum(part.bytes for part in after) < sum(part.bytes for part in before)
