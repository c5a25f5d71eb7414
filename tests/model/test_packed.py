"""The packed tensor: what it holds, how it starts, and that it is nothing but integers."""

import math

import pytest
import torch

from arbcli.config.layer_spec import SCALE_TYPES
from arbcli.config.presets import preset
from arbcli.kernels.codec.packing import illegal_bytes, pack_trits, unpack_trits
from arbcli.model.packed import TernaryTensor

TINY = {"dim": 32, "layers": 1, "heads": 2, "ffn": 48, "ctx": 16}


def tensor(rows: int, columns: int, std: float = 0.1, **options) -> TernaryTensor:
    spec = preset("tiny", **TINY, **options).layer_spec()
    return TernaryTensor(rows, columns, spec, area="mlp", std=std)


@pytest.mark.parametrize("scale_type", SCALE_TYPES)
def test_state_has_a_scale_for_every_started_group(scale_type):
    state = tensor(3, 131, scale_type=scale_type)
    assert state.exponent.shape == (3, math.ceil(131 / SCALE_TYPES[scale_type]))


@pytest.mark.parametrize("rule", ["moment", "nibble", "carry"])
def test_initialise_writes_legal_digits(rule):
    state = tensor(33, 323, rule=rule)
    state.initialise(seed=0, index=0)
    assert illegal_bytes(state.trits) == 0
    assert torch.equal(pack_trits(unpack_trits(state.trits, 323)), state.trits)
    low = state.remainder.to(torch.int32)
    low = (low << 28 >> 28) if rule == "nibble" else low
    z = unpack_trits(state.trits, 323).to(torch.int32) * state.rule.radix + low
    trits = torch.sign(z) * (z.abs() > state.rule.radix // 2)
    assert torch.equal(trits.to(torch.int8), unpack_trits(state.trits, 323))


@pytest.mark.parametrize(("std", "octave"), [(0.1, -3), (0.075, -3), (0.07, -4), (1.0, 0)])
def test_scales_of_whole_octaves_begin_at_the_nearest(std, octave):
    state = tensor(16, 165, std, rule="votes")
    state.initialise(0, 0)
    assert state.exponent.unique().tolist() == [octave]


def test_initialise_does_not_depend_on_the_block_size(monkeypatch):
    first, second = tensor(70, 165), tensor(70, 165)
    first.initialise(seed=5, index=2)
    monkeypatch.setattr(
        "arbcli.model.packed.row_chunks", lambda m, _: (slice(i, i + 1) for i in range(len(m)))
    )
    second.initialise(seed=5, index=2)
    for a, b in zip(first.buffers(), second.buffers(), strict=True):
        assert torch.equal(a, b)
