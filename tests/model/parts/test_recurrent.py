"""A gated linear recurrence."""

import torch

from arbcli.config.model import BlockConfig, ModelConfig, StageConfig
from arbcli.config.parts import RecurrentConfig
from arbcli.kernels.runtime.backend import use_backend
from arbcli.model.language_model import LanguageModel


@torch.no_grad()
def test_positions_one_by_one_give_what_all_at_once_do():
    block = BlockConfig(mixer=RecurrentConfig(heads=2))
    config = ModelConfig(ctx=9, stages=(StageConfig(dim=16, blocks=(block, block)),))
    lm = LanguageModel(config, torch.float32)
    lm.initialise(0)
    ids = torch.tensor([list(b"recurrent")])
    with use_backend("torch"):
        whole, cache = lm(ids), lm.new_cache(9)
        for _ in range(2):  # a cache that is reset holds nothing of the text before
            got = torch.cat([lm(part, cache) for part in ids.split([1, 3, 1, 4], dim=1)], dim=1)
            torch.testing.assert_close(got, whole)
            cache.reset()
