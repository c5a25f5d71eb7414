"""Fields of a model that are set by their path."""

import pytest

from arbcli.config.fields import change_fields
from arbcli.config.model import ModelConfig
from arbcli.config.presets import preset

HNET = preset("hnet-tiny")


def values(config: ModelConfig, name: str) -> list:
    """List a field of the mixers of the outer and of the innermost stage."""
    blocks = (config.stages[0].before[0], config.stages[0].after[0], *config.main.blocks)
    return [getattr(block.mixer, name) for block in blocks]


@pytest.mark.parametrize(("path", "heads"), [
    ("heads", [2] * 5),
    ("attention.heads", [2] * 5),
    ("mixer.heads", [2] * 5),
    ("stages.0.heads", [2, 2, 4, 4, 4]),
    ("stages.0.before.attention.heads", [2, 4, 4, 4, 4]),
    ("blocks.1.heads", [4, 4, 4, 2, 4]),
    ("stages.1.blocks.2.mixer.heads", [4, 4, 4, 4, 2]),
])  # fmt: skip
def test_field_is_set_in_the_parts_on_its_path(path, heads):
    assert values(HNET, "heads") == [4] * 5
    changed = change_fields(HNET, {path: 2})
    assert values(changed, "heads") == heads
    assert values(changed, "rule") == values(HNET, "rule")


def test_part_is_set_by_a_table_and_removed_by_none_and_fields_are_set_together():
    changed = change_fields(HNET, {"channel": {"kind": "experts", "experts": 3, "width": 8}})
    assert changed.main.blocks[0].channel.experts == 3
    assert change_fields(changed, {"blocks.0.channel": "none"}).main.blocks[0].channel is None
    needed = {"kv_heads": 3, "attention.heads": 6, "head_width": 32}  # by each other
    mixer = change_fields(preset("tiny"), needed).main.blocks[-1].mixer
    assert (mixer.heads, mixer.kv_heads, mixer.head_width) == (6, 3, 32)
