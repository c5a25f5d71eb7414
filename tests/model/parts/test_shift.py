"""Half of each vector comes from the position before."""

import pytest
import torch

from arbcli.config.model import BlockConfig, ModelConfig, StageConfig
from arbcli.config.parts import ShiftConfig
from arbcli.errors import ArbError
from arbcli.kernels.runtime.backend import use_backend
from arbcli.model.language_model import LanguageModel


def config(dim: int) -> ModelConfig:
    block = BlockConfig(mixer=ShiftConfig())
    return ModelConfig(ctx=7, stages=(StageConfig(dim=dim, blocks=(block, block)),))


@torch.no_grad()
def test_positions_one_by_one_give_what_all_at_once_do():
    lm = LanguageModel(config(16), torch.float32)
    lm.initialise(0)
    ids = torch.tensor([list(b"shifted")])
    with use_backend("torch"):
        whole, cache = lm(ids), lm.new_cache(7)
        for _ in range(2):  # a cache that is reset holds nothing of the text before
            got = torch.cat([lm(part, cache) for part in ids.split([1, 3, 1, 2], dim=1)], dim=1)
            torch.testing.assert_close(got, whole)
            cache.reset()


def test_stream_without_halves_is_refused():
    with pytest.raises(ArbError, match="a stream of 15 has no halves"):
        config(15)
