"""The tree of a model names every part, and what its parts take adds up to what it takes."""

from pathlib import Path

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


TEXT = Path(__file__).with_name("parts.txt").read_text(encoding="utf-8")
RECORDED = dict(part.split("\n", 1) for part in TEXT.rstrip().split("\n\n"))
LISTED = {
    "equal blocks in turns": preset("arb-long", ratios=(4, 4, 8)),
    "stages": preset("hnet-two-stage", outer_dim=(192, 256), chunk_length=(3, 5)),
    "all parts": MODELS["all parts"],
}


@pytest.mark.parametrize("name", LISTED)
def test_parts_are_those_of_the_record(name):
    """Equal blocks that follow one another are one part, and a stage has its width and chunks."""
    lines = [
        f"{'  ' * part.depth}{part.path}: {part.kind}, {part.count} of {part.weights:,} weights in"
        f" {part.bytes:,} bytes; {part.shape}".rstrip("; ")
        for part in predict_parts(LISTED[name]).parts
    ]
    assert "\n".join(lines) == RECORDED[name]


def test_weights_without_training_state_are_smaller():
    model = build_model(preset("tiny", dim=32, layers=2, heads=2, ffn=48))
    before = list_parts(model)
    model.drop_training_state()
    after = list_parts(model)
    assert [part.weights for part in after] == [part.weights for part in before]
    assert sum(part.bytes for part in after) < sum(part.bytes for part in before)
