"""Operations are counted by a configuration as torch counts those of its model."""

from dataclasses import replace

import pytest
import torch
from made_runs import model_of
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode

from arbcli.config.model import ModelConfig
from arbcli.config.presets import preset
from arbcli.families.hnet import config as chunking
from arbcli.families.media.config import CompositeConfig
from arbcli.model.build import build_model
from arbcli.model.operations import forward_operations, step_operations

DENSE = {"dim": 32, "layers": 2, "heads": 2, "ffn": 48, "ctx": 16}
GRAPH = ({"memgram": True}, {"codebook": False, "graph": False, "shared_expert": True})
HNET = ({}, {"boundaries": "every"})


def counted(config: ModelConfig, *, backward: bool = False) -> FlopCounterMode:
    """Let torch count; attention is products for it only if it is computed as such."""
    model = build_model(config, torch.float32)
    ids = torch.zeros(1, config.ctx, dtype=torch.int64)
    with (
        FlopCounterMode(display=False) as counter,
        sdpa_kernel(SDPBackend.MATH),
        torch.set_grad_enabled(backward),
    ):
        loss = model.loss(ids, ids)
        if backward:
            loss.backward()
    return counter


@pytest.mark.parametrize("head", [None, CompositeConfig()], ids=["linear", "composite"])
def test_operations_of_a_step_are_those_of_the_float_twin(head):
    config = replace(preset("tiny", **DENSE, weights="float"), composite=head)
    assert counted(config).get_total_flops() == forward_operations(config)
    assert counted(config, backward=True).get_total_flops() == step_operations(config)


@pytest.mark.parametrize("parts", GRAPH, ids=str)
def test_operations_of_a_graph_are_those_that_torch_counts(parts, small_graph):
    config = model_of(small_graph, **parts)
    assert counted(config).get_total_flops() == forward_operations(config)


@pytest.mark.parametrize("parts", HNET, ids=str)
def test_operations_of_chunks_are_those_that_torch_counts(parts, small_hnet, monkeypatch):
    monkeypatch.setattr(chunking, "SPARE_SLOTS", 1)  # slots are computed whether taken or not
    config = model_of(small_hnet, window=24, **parts)
    assert counted(config).get_total_flops() == forward_operations(config)


def test_operations_of_mamba_are_its_projections_and_a_recurrence(small_hnet, monkeypatch):
    monkeypatch.setattr(chunking, "SPARE_SLOTS", 1)
    config = model_of(small_hnet, outer_blocks="mamba", states=5)
    products = counted(config).get_flop_counts()["Global"][torch.ops.aten.mm]
    inner_widths, positions, of_main = (2 * 24, 2 * 32), (24, 8), 4
    scans = sum(2 * 2 * 5 * w * n for w, n in zip(inner_widths, positions, strict=True))
    attention = of_main * 2 * 32 * of_main
    assert 2 * (scans + attention) == forward_operations(config) - products


def test_operations_of_streams_are_those_of_the_mixing_besides():
    """By hand: 64 for each of 24 = 2 * 2 * 4 + 2 + 2 * 3, in 2 blocks at 16 positions."""
    plain, mixed = (preset("tiny", **DENSE, streams=streams) for streams in (1, 2))
    assert forward_operations(mixed) - forward_operations(plain) == 2 * 2 * 16 * 64 * 24


def test_operations_of_compressed_attention_count_attended_positions(small_compressed):
    """By hand: 2 blocks of 32 * 112 and 3 * 32 * 48; of 7 and 9 seen; 8 entries that are scored."""
    config = model_of(small_compressed)
    positions = 2 * (32 * 112 + 3 * 32 * 48) + 2 * 32 * (7 + 9) + 256 * 32
    entries = 32 * (16 + 2) + 16 * 8 + 16 * 8
    assert forward_operations(config) == 2 * (24 * positions + 8 * entries)
