"""Every number of a configuration may go to its limits, and beyond them is refused by name."""

import dataclasses
from math import inf, nan

import pytest
from made_runs import model_of

from arbcli.base.errors import ArbError
from arbcli.config.presets import config_from_dict, preset
from arbcli.config.settings import check_fields
from arbcli.config.training import train_config
from arbcli.families.compressed.config import CompressedAttentionConfig

MOST = 2**31 - 1
RUN = {
    "steps": ((1, MOST), (0, -1, MOST + 1)),
    "batch": ((1, MOST), (0, MOST + 1)),
    "accum": ((1, 5_368_709), (0, 5_368_710)),  # 400 steps of so many are 2**31 - 1 at most
    "save_every": ((1, MOST), (0, MOST + 1)),
    "keep": ((1, MOST), (0, MOST + 1)),
    "eval_every": ((0, MOST), (-1,)),
    "log_every": ((1, 1000), (0, 1001)),
    "sample_every": ((1, MOST), (0,)),
    "warmup": ((0, MOST), (-1, MOST + 1)),
    "lr": ((1e-9, 64), (0.0, -1.0, 64.001, nan, inf, -inf)),
    "final_lr": ((0, 1.0), (-1e-9, 1.001, nan, inf)),
    "seed": ((0, MOST), (-1, MOST + 1)),
}
"""Values that a setting of a run takes, and others that it refuses; the learning rate is 1."""
MODELS = {
    ("tiny", "layers"): ((1, 1024), (0, 1025)),
    ("tiny", "ctx"): ((1, 2**20), (0, 2**20 + 1)),
    ("tiny", "ffn"): ((1, 2**20), (0, 2**20 + 1)),
    ("tiny", "heads"): ((1, 128), (0, 256)),  # of 256 each would have a width of 1
    ("arb-tiny", "moe_top_k"): ((1, 8), (0, 9)),
    ("arb-tiny", "max_moe_iters"): ((1, 256), (0, 257)),
    ("arb-tiny", "ngram_rows"): ((1, MOST), (0, MOST + 1)),
    ("arb-tiny", "memory_rows"): ((1, MOST), (0, MOST + 1)),
    ("hnet-tiny", "chunk_length"): ((2, 2**20), (0, 1, 2**20 + 1)),
    ("hnet-tiny", "outer_layers"): ((1, 256), (0, 257)),
    ("hnet-tiny", "window"): ((1, 2**20), (0, 2**20 + 1)),
    ("hnet-tiny", "states"): ((1, 2**20), (0,)),
}
"""The same of a size of a preset's model."""


def settings(**given):
    place = {"device": "cpu", "backend": "torch", "compute": "fp32"}
    return train_config("tiny", **place, **{"lr": 1.0} | given)


def shown(value: float) -> str:
    return f"{value:,}" if isinstance(value, int) else str(value)


@pytest.mark.parametrize(
    ("kind", "good", "bad"),
    [
        (float, (1, -2, 0.5), (nan, inf, -inf, True, "1", None)),
        (float | None, (None, 1, 0.5), (nan, inf, False, "1")),
        (int, (1, 2**20), (1.0, nan, True, "1", None)),
        (bool, (True, False), (1, 0, None)),
        (str, ("", "a"), (b"a", 1, None)),
        (tuple[int, int], ((1, 2),), ((1,), (1, 2, 3), (1, 2.0), [1, 2])),
        (tuple[float, ...], ((), (1, 2.5)), ((1, nan), (inf,), [1])),
    ],
    ids=str,
)
def test_value_of_no_such_type_is_refused_by_name(kind, good, bad):
    """A file may hold anything: `NaN` and `Infinity` are not numbers to compute with."""
    holder = dataclasses.make_dataclass("Holder", [("size", kind)])
    for value in good:
        check_fields(holder(value))
    for value in bad:
        with pytest.raises(
            ArbError, match=r"(?m)^`size` is `.*`(, which is not of type |$)"
        ) as caught:
            check_fields(holder(value))
        assert caught.value.fields == ("size",)


@pytest.mark.parametrize("name", RUN)
def test_setting_of_a_run_is_taken_to_its_limits(name):
    good, bad = RUN[name]
    for value in good:
        assert getattr(settings(**{name: value}), name) == value
    for value in bad:
        with pytest.raises(ArbError) as caught:
            settings(**{name: value})
        assert name in caught.value.fields
        assert any(text in str(caught.value) for text in (shown(value), str(value)))
        assert caught.value.hint


@pytest.mark.parametrize(("of", "name"), MODELS)
def test_size_of_a_model_is_taken_to_its_limits(of, name):
    good, bad = MODELS[of, name]
    for value in good:
        config = preset(of, **{name: value})
        assert config_from_dict(dataclasses.asdict(config)) == config
    for value in bad:
        with pytest.raises(ArbError) as caught:
            preset(of, **{name: value})
        assert caught.value.hint
        if name != "heads" or value < 1:
            assert name in caught.value.fields
            assert shown(value) in str(caught.value)


def test_bounds_that_follow_from_others():
    assert settings(steps=2**16, accum=2**15 - 1).accum == 2**15 - 1
    with pytest.raises(ArbError, match="65,536 steps of 32,768 batches") as caught:
        settings(steps=2**16, accum=2**15)
    assert caught.value.fields == ("steps", "accum")
    # evaluations are a quarter of a run apart, within bounds
    intervals = {1: 50, 200: 50, 203: 50, 204: 51, 1999: 499, 2004: 500, 10**6: 500}
    assert {steps: settings(steps=steps).eval_interval for steps in intervals} == intervals
    assert settings(steps=204, eval_every=7).eval_interval == 7
    assert CompressedAttentionConfig(heads=4, ratio=2**20).ratio == 2**20
    for ratio in (1, 2**20 + 1):  # of which the setting has one bound, and all sizes the other
        with pytest.raises(ArbError, match="`ratio`"):
            CompressedAttentionConfig(heads=4, ratio=ratio)


@pytest.mark.parametrize(("window", "lengths", "slots", "room"), [
    (24, (3, 2), (24, 12, 9), {(0, 24): 12, (0, 5): 5, (1, 12): 9, (1, 9): 9, (1, 3): 3}),
    (256, (6,), (256, 64), {(0, 256): 64, (0, 64): 64, (0, 65): 64, (0, 63): 63}),
])  # fmt: skip
def test_slots_of_chunks_are_half_again_as_many_as_requested(
    window, lengths, slots, room, small_hnet
):
    given = small_hnet | {"ctx": window, "chunk_length": lengths}
    if len(lengths) == 1:
        given |= {k: v[:1] for k, v in given.items() if k.startswith("outer_")}
    config = model_of(given)
    assert config.slots == slots
    assert {about: config.capacity(*about) for about in room} == room
    every = model_of(given, boundaries="every")
    assert every.slots[1] == -(-window // lengths[0])
