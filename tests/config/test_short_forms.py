"""Options of presets, and the parts that they turn into."""

from dataclasses import replace

import pytest

from arbcli.config.parts import ExpertsConfig
from arbcli.config.presets import SHORT_FORMS, config_from_dict, preset
from arbcli.errors import ArbError

WITH_BLOCKS = [name for name, short in SHORT_FORMS.items() if short.family != "graph"]


@pytest.mark.parametrize("name", WITH_BLOCKS)
def test_experts_stand_in_the_innermost_blocks_and_are_as_wide_as_their_mlp(name):
    before, after = preset(name), preset(name, experts=6, top_k_experts=3)
    assert after.outer == before.outer
    for old, new in zip(before.main.blocks, after.main.blocks, strict=True):
        expected = ExpertsConfig(experts=6, top_k=3, width=old.channel.width)
        if isinstance(old.channel, ExpertsConfig):
            expected = replace(old.channel, experts=6, top_k=3)
        assert new.channel == expected
    mixers = [[block.mixer for block in each.main.blocks] for each in (before, after)]
    assert mixers[0] == mixers[1]
    assert preset(name, experts=6).main.blocks[0].channel.top_k == 2


def test_experts_of_a_position_have_two_names_with_a_graph():
    assert preset("arb-3b", top_k_experts=3) == preset("arb-3b", moe_top_k=3)
    with pytest.raises(ArbError, match="both say how many") as caught:
        preset("arb-3b", top_k_experts=3, moe_top_k=3)
    assert caught.value.fields == ("top_k_experts", "moe_top_k")


@pytest.mark.parametrize(("given", "says"), [
    ({"top_k_experts": 3}, "`top_k_experts` is of experts, and the model has none"),
    ({"top_k_experts": 5, "experts": 4}, "`top_k_experts` is 5 of 4 experts"),
    ({"experts": 1}, "`top_k_experts` is 2 of 1 experts"),
    ({"experts": 0}, "`experts` is 0"),
    ({"shared_expert": True}, "`shared_expert` is of experts, and the model has none"),
    ({"hash_layers": 1}, "`hash_layers` is of experts, and the model has none"),
    ({"experts": 4, "moe_gate": "soft"}, "`moe_gate` is `soft`"),
])  # fmt: skip
def test_experts_that_cannot_be_are_refused(given, says):
    with pytest.raises(ArbError, match=says) as caught:
        preset("tiny", **given)
    assert set(caught.value.fields) <= {"experts", "top_k_experts", *given}
    assert caught.value.hint


def test_first_blocks_choose_experts_by_a_hash():
    model = preset("tiny", experts=4, hash_layers=3, moe_gate="softplus", shared_expert=True)
    assert [block.channel.gate for block in model.main.blocks] == ["hash"] * 3 + ["softplus"]
    assert all(block.channel.shared for block in model.main.blocks)


@pytest.mark.parametrize("name", SHORT_FORMS)
def test_fields_that_were_saved_before_are_read_with_the_same_meaning(name):
    family, values = SHORT_FORMS[name]
    for saved in (dict(values), values | {"kind": family}):
        assert config_from_dict(saved) == preset(name)
