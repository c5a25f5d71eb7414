"""Numbers that a checkpoint or a curve depends on, and that no comparison of two codes can tell.

Where model, kernels and their references share a constant, a wrong one is wrong everywhere alike.
So each is written a second time here. To change one is to change the format, or what is learnt.
"""

from importlib import import_module

import pytest

from arbcli.config.presets import preset
from arbcli.model import language_model
from arbcli.model.rules import DIRECTION, LR, RULES, find_rule

CONSTANTS = {
    "kernels.codec.packing": {"TRITS_PER_BYTE": 5, "PLANE": 32, "BLOCK": 160, "MAX_BYTE": 242},
    "families.streams.kernels.stream_weights": {"ROUNDS": 20, "SHIFT": 2.0, "LIMIT": 16.0,
        "SLACK": 2.0**-21},
    "families.nvfp4.kernels.round_nvfp4": {"BLOCK": 16, "OCTAVE": 10, "SIXTH": 1 / 6,
        "MAX_SCALE": 448.0},
    "model.ngrams": {"KEY_ORDER": 3, "KEY_BITS": 31, "HISTORY": 5},
    "kernels.codec.packed": {"OCTAVE": 128, "LOWEST_EXPONENT": -96, "HIGHEST_EXPONENT": 31},
    "kernels.matmul.quantise_rows": {"MAX_OCTAVE": 7},
    "kernels.update.random_bits": {"GOLDEN": 2654435769},
    "kernels.update.direction": {"UNIT": 65536},
    "kernels.update.blend_moment": {"DIRECTION_LIMIT": 32 * 65536},
    "families.votes.kernels.cast_votes": {"SCALE_THRESHOLD": 4},
    "kernels.update.gradient_gains": {"UNSET": -128, "LOWEST": -16256, "HIGHEST": 16383,
        "FLOOR": 2.0**-120},
    "kernels.update.quantise_gradient": {"NONE": -128, "NOT_FINITE": 127, "LOWEST": -100,
        "HIGHEST": 100,
        "MAX_PLANE_SUM": 2047},
    "kernels.update.hadamard": {"MAX_BLOCK": 64},
    "kernels.update.step_scales": {"CLIP": 3 * 65536, "LOWEST": -12288, "HIGHEST": 4095},
    "kernels.update.step_trits": {"CLIP": 4 * 65536, "MAX_GAIN": 8388608,
        "MAX_DECAY": 2097152},
    "model.optimizers.newton_schulz": {"COEFFICIENTS": (3.4445, -4.7750, 2.0315), "STEPS": 5,
        "RUNS": (3, 2)},
    "model.initial": {"REFERENCE_WIDTH": 384, "HEAD": 0.25},
    "model.rules.base": {"STEP_CLIP": 4, "STEP_OF_RADIX": 0.0625, "SCALE_STEP": 4, "NUM_STREAMS": 5,
        "DECAY_OF_LR": 0.0078125},
    "model.rules.moment": {"BETA": 0.9},
    "model.step_parameters": {"ROW_CLIP": 2},
    "training.float_optimizer": {"BETAS": (0.9, 0.95), "CLIP_NORM": 1.0,
        "MOMENTUM": 0.95, "NEWTON_SCHULZ": (3.4445, -4.7750, 2.0315), "NEWTON_SCHULZ_STEPS": 5},
    "model.layers.norm": {"NORM_EPS": 1e-6},
    "model.layers.table": {"SPARSE_SPREAD": 0.2, "MAX_USES": 127},
    "families.latent.attention": {"SHARPNESS": 2.0},
    "families.experts.mixture": {"BALANCE_UNIT": 0.125, "MAX_BALANCE": 127},
    "families.graph.router": {"ROUTER_BIAS": 3.0},
    "families.graph.edges": {"INT8_MAX": 127, "NEW_SCORE": 16, "NEW_SIGN": 64},
    "families.graph.sequencer": {"ORDERS": (2, 3, 4)},
    "families.graph.memgram": {"ORDER": 6, "INT8_MAX": 127},
    "families.graph.moe_graph": {"HALT_SUM": 0.99, "HALT_BIAS": -1.0, "HALT_PRIOR": 0.25,
        "KEEP": 0.95},
}  # fmt: skip


@pytest.mark.parametrize("name", CONSTANTS)
def test_constants_are_pinned(name):
    assert CONSTANTS[name].items() <= vars(import_module(f"arbcli.{name}")).items()


def test_rules_are_pinned():
    rules = {name: find_rule(name) for name in RULES}
    assert {
        name: (rule.radix, rule.remainder_max, rule.moment_range, LR[name], DIRECTION[name])
        for name, rule in rules.items()
    } == {
        "moment": (64, 127, 0.5, 0.7, "orthogonal"),
        "nibble": (14, 7, 0.35, 0.4, "orthogonal"),
        "carry": (32, 127, 0.0, 1.0, "factored"),
        "votes": (32, 127, 0.0, 1.0, None),
    }


def test_weights_of_the_losses_are_pinned():
    assert language_model.TEACHER_WEIGHT == 1
    for name, weights in (
        ("tiny", {}), ("hnet-tiny", {"ratio": 0.3}), ("arb-long", {"indexer": 1.0}),
        ("arb-3b", {"ponder": 0.01}),
    ):  # fmt: skip
        assert preset(name).loss_weights == weights
    nearest = preset("arb-tiny", code_search="nearest")
    assert nearest.loss_weights == {"commitment": 0.25}
