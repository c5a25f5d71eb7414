"""Every mixer with every channel mixer agrees with its reference, in logits and all gradients."""

from dataclasses import replace

import pytest
import torch
from cells import CELLS, CHANNELS, FEW, MIXERS, QUICK, Cell, drop_part, each_cell, pairs

from arbcli.config.model import ModelConfig, StageConfig
from arbcli.config.parts.mlp import MLPConfig
from arbcli.families.hnet.config import ChunkingConfig
from arbcli.verify import parity
from arbcli.verify.reference import Reference
from arbcli.verify.subjects import Subject
from arbcli.verify.update_reference import reference_weight


def subject(cell: Cell, device: torch.device) -> Subject:
    backend = "triton" if device.type == "cuda" else "torch"
    parts = ("blocks", "whole")
    return Subject(str(cell), cell.model(), 2, torch.float32, device, backend, parts)


def test_every_kind_of_part_has_cells():
    assert len(CELLS) == len(set(CELLS)) == 4 * ((len(MIXERS) + 1) * (len(CHANNELS) + 1) - 1)
    assert set().union(*map(pairs, QUICK)) == set().union(*map(pairs, CELLS))
    assert len(QUICK) < len(CELLS) / 3


@each_cell(quick=FEW)
def test_cell_agrees_with_the_reference(cell, device):
    tested = subject(cell, device)
    results = parity.check_model(tested)
    assert not [result for result in results if not result.passed]
    trained = [name for name, w in tested.build().weights().items() if not w.frozen]
    compared = [result.item for result in results if result.check == "whole gradient"]
    assert compared == trained
    assert all(result.cosine > 0 for result in results if result.check == "whole gradient")


def test_lists_without_blocks_agree_with_the_reference(device):
    """Streams of a list are there though nothing reads them, and a head has an MLP by itself."""
    outer = StageConfig(dim=20, streams=2, chunking=ChunkingConfig(length=2))
    stages = outer, StageConfig(dim=24, streams=4)
    config = ModelConfig(ctx=14, stages=stages, head=MLPConfig(width=13))
    tested = replace(subject(CELLS[0], device), config=config, checks=("whole",))
    assert all(result.passed for result in parity.check_model(tested))


@each_cell(quick=FEW)
def test_reference_without_a_part_of_the_cell_disagrees(cell, device):
    tested = subject(cell, device)
    model = tested.build()
    trace = parity.trace(tested, model)
    weights = {name: reference_weight(tensor) for name, tensor in model.weights().items()}
    about = {"memories": dict(model.named_buffers()), "choices": trace.choices}
    passed = {}
    for part in (None, "mixer", "channel"):
        config = drop_part(tested.config, part) if part else tested.config
        with torch.no_grad():
            wanted, _ = Reference(weights, config, **about)(tested.bytes()[0])
        logits = trace.outputs["head"]
        result = tested.result("end to end", "logits", logits, wanted, tested.gate_of_depth)
        passed[part] = result.passed
    assert passed == {None: True, "mixer": cell.mixer == "none", "channel": cell.channel == "none"}


@pytest.mark.slow
@each_cell([cell for cell in CELLS if cell.mixer != "mamba"], quick=FEW)
def test_cell_agrees_with_the_reference_in_bf16(cell, device):
    """Outputs do; gradients that are small differences of large numbers only have the direction."""
    tested = replace(subject(cell, device), dtype=torch.bfloat16)
    for result in parity.check_model(tested):
        # a sink has a number a head: of the two here the cosine was 0.87 on a GPU
        agrees = result.cosine > 0.8 if "gradient" in result.check else result.passed
        assert agrees, result
