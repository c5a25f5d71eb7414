"""Numbers that a checkpoint or a curve depends on, and that no comparison of two codes can tell.

Where model, kernels and their references share a constant, a wrong one is wrong everywhere alike.
So each is written a second time here. To change one is to change the format, or what is learnt.
"""

import pytest
import torch

from arbcli.config.presets import preset
from arbcli.families.experts import mixture as experts
from arbcli.families.graph import edges, memgram, moe_graph, router, sequencer
from arbcli.families.latent import attention as latent_attention
from arbcli.families.nvfp4.kernels import round_nvfp4
from arbcli.families.streams.kernels import stream_weights
from arbcli.families.votes.kernels import cast_votes
from arbcli.kernels.codec import packed, packing
from arbcli.kernels.matmul import quantise_rows
from arbcli.kernels.update import (
    blend_moment,
    direction,
    gradient_gains,
    hadamard,
    quantise_gradient,
    random_bits,
    step_scales,
    step_trits,
)
from arbcli.model import initial, language_model, ngrams, step_parameters
from arbcli.model.layers import norm, table
from arbcli.model.optimizers import newton_schulz as iterations
from arbcli.model.rules import DIRECTION, LR, RULES, base, find_rule, moment
from arbcli.training import float_optimizer

CONSTANTS = {
    packing: {"TRITS_PER_BYTE": 5, "PLANE": 32, "BLOCK": 160, "LARGEST_BYTE": 242},
    stream_weights: {"ROUNDS": 20, "SHIFT": 2.0, "LIMIT": 16.0, "SLACK": 2.0**-21},
    round_nvfp4: {"BLOCK": 16, "OCTAVE": 10, "SIXTH": 1 / 6, "LARGEST_SCALE": 448.0},
    ngrams: {"KEY_ORDER": 3, "KEY_BITS": 31, "HISTORY": 5},
    packed: {"OCTAVE": 128, "LOWEST_EXPONENT": -96, "HIGHEST_EXPONENT": 31},
    quantise_rows: {"LARGEST_OCTAVE": 7}, random_bits: {"GOLDEN": 2654435769},
    direction: {"UNIT": 65536}, blend_moment: {"DIRECTION_LIMIT": 32 * 65536},
    cast_votes: {"SCALE_THRESHOLD": 4},
    gradient_gains: {"UNSET": -128, "LOWEST": -16256, "HIGHEST": 16383, "FLOOR": 2.0**-120},
    quantise_gradient: {"NONE": -128, "NOT_FINITE": 127, "LOWEST": -100, "HIGHEST": 100,
        "LARGEST_OF_PLANES": 2047, },
    hadamard: {"LARGEST_BLOCK": 64},
    step_scales: {"CLIP": 3 * 65536, "LOWEST": -12288, "HIGHEST": 4095},
    step_trits: {"CLIP": 4 * 65536, "LARGEST_GAIN": 8388608, "LARGEST_DECAY": 2097152},
    iterations: {"COEFFICIENTS": (3.4445, -4.7750, 2.0315), "STEPS": 5, "RUNS": (3, 2)},
    initial: {"REFERENCE_WIDTH": 384, "HEAD": 0.25},
    base: {"STEP_CLIP": 4, "STEP_OF_RADIX": 0.0625, "SCALE_STEP": 4, "NUM_STREAMS": 5,
        "DECAY_OF_LR": 0.0078125},
    moment: {"BETA": 0.9}, step_parameters: {"ROW_CLIP": 2},
    float_optimizer: {"BETAS": (0.9, 0.95), "CLIP_NORM": 1.0,
        "MOMENTUM": 0.95, "NEWTON_SCHULZ": (3.4445, -4.7750, 2.0315), "NEWTON_SCHULZ_STEPS": 5, },
    norm: {"NORM_EPS": 1e-6}, table: {"SPARSE_SPREAD": 0.2, "MOST_USES": 127},
    latent_attention: {"SHARPNESS": 2.0}, experts: {"BALANCE_UNIT": 0.125, "MOST_BALANCE": 127},
    router: {"ROUTER_BIAS": 3.0}, edges: {"MOST": 127, "NEW_SCORE": 16, "NEW_SIGN": 64},
    sequencer: {"ORDERS": (2, 3, 4)}, memgram: {"ORDER": 6, "MOST": 127},
    moe_graph: {"HALT_AT": 0.99, "HALT_BIAS": -1.0, "HALT_PRIOR": 0.25, "KEEP": 0.95},
}  # fmt: skip


@pytest.mark.parametrize("module", CONSTANTS, ids=lambda module: module.__name__)
def test_constants_are_pinned(module):
    assert {name: getattr(module, name) for name in CONSTANTS[module]} == CONSTANTS[module]


def test_rules_are_pinned():
    rules = {name: find_rule(name) for name in RULES}
    assert {
        name: (rule.radix, rule.remainder_max, rule.moment_range, LR[name], DIRECTION[name])
        for name, rule in rules.items()
    } == {
        "moment": (64, 127, 0.5, 0.7, "orthogonal"),
        "nibble": (14, 7, 0.6, 0.4, "orthogonal"),
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


def test_trits_lie_in_the_bytes_where_they_lay():
    """Of 167 weights, in turns 1, 0, -1, 1, 0, ..., the bytes of a full and of a short block."""
    trits = torch.tensor([1 - k % 3 for k in range(167)], dtype=torch.int8)[None]
    block_bytes = packing.pack_trits(trits)[0].tolist()
    whole = [sum((2 - (32 * d + j) % 3) * 3**d for d in range(5)) for j in range(32)]
    rest = [1 - k % 3 for k in range(160, 167)] + [0] * 3
    short = [sum((rest[2 * d + j] + 1) * 3**d for d in range(5)) for j in range(2)]
    assert block_bytes == whole + short
