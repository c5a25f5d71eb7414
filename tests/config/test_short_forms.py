"""Options of presets, and the parts that they turn into."""

import pytest

from arbcli.config.parts import ExpertsConfig
from arbcli.config.presets import SHORT_FORMS, config_from_dict, preset
from arbcli.errors import ArbError

WITH_BLOCKS = [name for name, short in SHORT_FORMS.items() if short.family != "graph"]


@pytest.mark.parametrize("name", WITH_BLOCKS)
def test_experts_stand_in_the_innermost_blocks_and_are_as_wide_as_their_mlp(name):
    before, after = preset(name), preset(name, experts=6, top_k_experts=3)
    assert after.outer == before.outer
    expected = ExpertsConfig(experts=6, top_k=3, width=before.main.blocks[0].channel.width)
    assert {block.channel for block in after.main.blocks} == {expected}
    mixers = [[block.mixer for block in each.main.blocks] for each in (before, after)]
    assert mixers[0] == mixers[1]
    assert preset(name, experts=6).main.blocks[0].channel.top_k == 2


def test_experts_of_a_position_have_two_names_with_a_graph():
    assert preset("arb-3b", top_k_experts=3) == preset("arb-3b", moe_top_k=3)
    with pytest.raises(ArbError, match="both say how many") as caught:
        preset("arb-3b", top_k_experts=3, moe_top_k=3)
    assert caught.value.fields == ("top_k_experts", "moe_top_k")


@pytest.mark.parametrize(("given", "says"), [
    ({"top_k_experts": 3}, "`top_k_experts` is 3, and the model has no experts"),
    ({"top_k_experts": 5, "experts": 4}, "`top_k_experts` is 5 of 4 experts"),
    ({"experts": 1}, "`top_k_experts` is 2 of 1 experts"),
    ({"experts": 0}, "`experts` is 0"),
])  # fmt: skip
def test_experts_that_cannot_be_are_refused(given, says):
    with pytest.raises(ArbError, match=says) as caught:
        preset("tiny", **given)
    assert set(caught.value.fields) <= {"experts", "top_k_experts"}
    assert caught.value.hint


@pytest.mark.parametrize("name", SHORT_FORMS)
def test_fields_that_were_saved_before_are_read_with_the_same_meaning(name):
    family, values = SHORT_FORMS[name]
    for saved in (dict(values), values | {"kind": family}):
        assert config_from_dict(saved) == preset(name)
