"""Models with drawn weights, saved as a run saves them."""

import dataclasses
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from arbcli.checkpoint import Checkpoint, save_checkpoint
from arbcli.config.presets import preset
from arbcli.model.build import build_model

SIZES = {"dim": 64, "layers": 2, "heads": 2, "ffn": 192, "ctx": 32}


@pytest.fixture
def saved(tmp_path) -> Callable[..., Path]:
    """Save a model whose scales differ from group to group, as after training."""

    def save(name: str = "tiny", **options) -> Path:
        config = preset(name, **{**(SIZES if name == "tiny" else {}), **options})
        model = build_model(config, torch.float32)
        model.initialise(3)
        generator = torch.Generator().manual_seed(0)
        for weight in model.weights().values():
            if not weight.frozen and weight.scales[1] is not None:
                shape = weight.fraction.shape
                weight.fraction.copy_(torch.randint(0, 128, shape, generator=generator))
        checkpoint = Checkpoint(
            step=7,
            config=dataclasses.asdict(config),
            counters={"nonfinite_steps": 0},
            data={"digest": "of a text", "seed": 3, "position": 7},
            tensors=model.state_dict(),
        )
        return save_checkpoint(tmp_path, checkpoint)

    return save
