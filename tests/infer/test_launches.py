"""A byte of a text takes as many launches as it did before models were assembled from parts."""

from contextlib import ExitStack

import pytest
import torch
from marks import needs_triton

from arbcli.config.presets import preset
from arbcli.kernels.runtime.backend import compile_for, use_backend
from arbcli.kernels.runtime.launches import replaced_launches
from arbcli.model.language_model import LanguageModel

SHAPE = {"dim": 64, "layers": 2, "heads": 2, "ffn": 96, "ctx": 64}
OUTER = {"outer_dim": (32,), "outer_layers": (1,), "outer_heads": (2,), "outer_ffn": (48,)}


@needs_triton
@pytest.mark.parametrize(
    ("name", "options", "most"),
    [
        ("tiny", SHAPE, 12),  # 5 a block, the embedding and the head
        ("arb-long", SHAPE | {"head_width": 32, "rotary": 16}, 17),
        ("hnet-base", SHAPE | OUTER, 27),
        ("arb-tiny", {}, 88),
    ],
)
@torch.no_grad()
def test_byte_takes_so_many_launches(name, options, most, small_graph):
    given = options or {k: small_graph[k] for k in small_graph.keys() - {"preset", "batch"}}
    lm = LanguageModel(preset(name, **given), torch.bfloat16)
    lm.initialise(0)
    launched: list[object] = []
    with ExitStack() as stack:
        for context in (
            lm.prepared_weights(),
            use_backend("interpreter"),
            compile_for((9, 0)),
            replaced_launches(lambda kernel, *_, **__: launched.append(kernel)),
        ):
            stack.enter_context(context)
        phases = lm.step_phases(torch.zeros(1, 1, dtype=torch.int64), lm.new_cache(16))
        for _ in range(2):  # weights are prepacked by the first
            launched.clear()
            for phase in phases:
                phase.run()
    assert len(launched) == most
