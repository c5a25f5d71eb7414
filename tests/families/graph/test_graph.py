"""Models with codebooks and iterated experts: equations, parts left out, cache, training."""

from dataclasses import replace

import pytest
import torch
from graph_parts import (
    CLOSE,
    assert_same,
    decoded,
    fill_memories,
    graph_config,
    model,
    text,
)
from references import logits_in_parts, reference_logits
from torch.nn.functional import cross_entropy

from arbcli.config.presets import preset
from arbcli.families.compressed.config import CompressedAttentionConfig
from arbcli.model import decoding
from arbcli.model.build import build_model
from arbcli.model.language_model import LanguageModel
from arbcli.training.step import minimised
from arbcli.verify.reference import Reference

PARTS = (
    "attention",
    "sequencer",
    "codebook",
    "knowledge_codebook",
    "moe",
    "graph",
    "router",
    "memgram",
)
LEFT_OUT = [
    {"attention": False, "moe_gate": "softplus", "shared_expert": True},
    {"sequencer": False, "moe_gate": "hash", "moe_clamp": True},
    {"knowledge_codebook": False, "graph_gate": True, "graph_adapters": True},
    {"codebook": False, "graph": False, "router": False},
    {"moe": False, "graph": False, "sub_norms": False},
    dict.fromkeys(PARTS, False),
]
LENGTH = 21


@pytest.mark.parametrize("options", LEFT_OUT, ids=str)
def test_logits_and_gradients_equal_autograd(options):
    lm = model(**options)
    assert_same(lm, (text(2, 8),), lm, lambda w, ids: reference_logits(lm, ids, weights=w))


def test_cached_logits_equal_those_of_the_whole_text():
    """Also of a text longer than the context, in sliding windows."""
    lm, ids = model(), text(1, LENGTH)
    with torch.no_grad():
        expected = reference_logits(lm, ids, weights=decoded(lm))
    logits = logits_in_parts(lm, ids, [3, 1, 7, 2, 8])
    torch.testing.assert_close(logits.double(), expected, **CLOSE)


def assert_twin_agrees_with_the_reference(lm: LanguageModel, *others: str) -> None:
    """Compare the losses of a baseline, `text`, `ponder` and others, and every gradient."""
    ids = text(2, 9)
    leaves = {
        name: part.weight(torch.float32).detach().double().requires_grad_()
        for name, part in lm.weights().items()
    }
    losses = lm.losses(ids[:, :-1], ids[:, 1:])
    minimised(losses, lm.loss_weights).backward()
    memories = dict(lm.named_buffers())
    logits, besides = Reference(leaves, lm.config, memories=memories)(ids[:, :-1])
    of_text = cross_entropy(logits.flatten(0, 1), ids[:, 1:].flatten())
    wanted = {"text": of_text} | besides
    minimised(wanted, lm.loss_weights).backward()
    assert losses.keys() == wanted.keys() == {"text", "ponder", *others}
    for name, loss in losses.items():
        torch.testing.assert_close(loss.double(), wanted[name], **CLOSE)
    for name, part in lm.weights().items():
        assert leaves[name].grad.any(), name
        torch.testing.assert_close(part.latent.grad.double(), leaves[name].grad, **CLOSE, msg=name)


@pytest.mark.parametrize(("weights", "search"), [("ste", "keys"), ("float", "nearest")])
def test_twin_agrees_with_the_reference_in_losses_and_every_gradient(weights, search):
    options = {"graph_gate": True, "graph_adapters": True, "code_search": search}
    others = ["commitment"] if search == "nearest" else []
    assert_twin_agrees_with_the_reference(model(weights=weights, **options), *others)


def test_indexers_before_and_after_the_memories_learn():
    config = graph_config(weights="float")
    main = config.main
    mixer = CompressedAttentionConfig(
        heads=2, head_width=8, ratio=2, top_k=4, window=3, index_heads=2, index_width=8
    )
    blocks = tuple(replace(block, mixer=mixer) for block in main.blocks)
    main = replace(main, blocks=blocks, memories=replace(main.memories, place=1))
    lm = LanguageModel(replace(config, stages=(main,)), torch.float32)
    lm.initialise(0)
    fill_memories(lm)
    assert_twin_agrees_with_the_reference(lm, "indexer")


def test_steps_by_kernels_give_the_logits_of_steps_by_parts(small_graph, monkeypatch):
    given = {k: v for k, v in small_graph.items() if k not in ("preset", "batch")}
    lm = build_model(preset("arb-tiny", **given), torch.bfloat16)
    lm.initialise(0)
    lm.embedding.weight.exponent -= 4  # so what blocks add counts, and so do their norms
    ids = torch.randint(0, 256, (1, 20), generator=torch.Generator().manual_seed(0))

    lengths = [14] + [1] * 6  # a window of 16: the ring comes round
    with lm.prepared_weights():
        monkeypatch.setattr(decoding, "fits_prepacked", lambda *_: False)
        expected = logits_in_parts(lm, ids, lengths)
        monkeypatch.setattr(decoding, "fits_prepacked", lambda x, _: x.shape[1] == 1)
        got = logits_in_parts(lm, ids, lengths)
        kept = [part for part in lm.modules() if getattr(part, "_decoded", None) is not None]
        assert len(kept) == 2
    assert all(part._decoded is None for part in kept)
    # experts, codes and rows are chosen by what is rounded, so few positions may differ by more
    error = (got.float() - expected.float()).norm(dim=-1) / expected.float().norm(dim=-1)
    assert error.median() < 0.02
