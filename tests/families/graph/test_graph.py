"""Models with codebooks and iterated experts: equations, parts left out, cache, training."""

from dataclasses import replace

import pytest
import torch
from graph_parts import CLOSE, graph_config, model, text
from made_runs import model_of
from references import assert_agrees, logits_in_parts, reference_logits
from torch.nn.functional import cross_entropy

from arbcli.base.errors import ArbError
from arbcli.config.presets import preset
from arbcli.families.compressed.config import CompressedAttentionConfig
from arbcli.model import decoding
from arbcli.model.build import build_model
from arbcli.training.step import total_loss
from arbcli.verify.reference import Reference

PARTS = (
    "attention", "sequencer", "codebook", "knowledge_codebook", "moe", "graph", "router", "memgram",
)  # fmt: skip
LEFT_OUT = [
    {"attention": False, "moe_gate": "softplus", "shared_expert": True},
    {"sequencer": False, "moe_gate": "hash", "moe_clamp": True},
    {"knowledge_codebook": False, "graph_gate": True, "graph_adapters": True},
    {"codebook": False, "graph": False, "router": False},
    {"moe": False, "graph": False, "sub_norms": False},
    dict.fromkeys(PARTS, False),
    {"moe_top_k": 4},
    {"moe": False, "graph_adapters": True, "max_moe_iters": 1},
]
LENGTH = 21


@pytest.mark.parametrize("options", LEFT_OUT, ids=str)
def test_model_agrees_with_the_reference_in_every_gradient(options, device):
    assert_agrees(graph_config(**options), device)


def test_cached_logits_equal_those_of_the_whole_text():
    """Also of a text longer than the context, in sliding windows."""
    lm, ids = model(), text(1, LENGTH)
    with torch.no_grad():
        expected = reference_logits(lm, ids)
    logits = logits_in_parts(lm, ids, [3, 1, 7, 2, 8])
    torch.testing.assert_close(logits.double(), expected, **CLOSE)


@pytest.mark.parametrize(("weights", "search"), [("ste", "keys"), ("float", "nearest")])
def test_twin_agrees_with_the_reference_in_losses_and_every_gradient(weights, search):
    lm = model(weights=weights, graph_gate=True, graph_adapters=True, code_search=search)
    ids = text(2, 9)
    leaves = {
        name: part.weight(torch.float32).detach().double().requires_grad_()
        for name, part in lm.weights().items()
    }
    losses = lm.losses(ids[:, :-1], ids[:, 1:])
    total_loss(losses, lm.loss_weights).backward()
    assert {"edges", "fullest_expert"} <= lm.gauges().keys()
    memories = dict(lm.named_buffers())
    logits, besides = Reference(leaves, lm.config, memories=memories)(ids[:, :-1])
    of_text = cross_entropy(logits.flatten(0, 1), ids[:, 1:].flatten())
    wanted = {"text": of_text} | besides
    total_loss(wanted, lm.loss_weights).backward()
    others = {"commitment"} if search == "nearest" else set()
    assert losses.keys() == wanted.keys() == {"text", "ponder"} | others
    for name, loss in losses.items():
        torch.testing.assert_close(loss.double(), wanted[name], **CLOSE)
    for name, part in lm.weights().items():
        assert leaves[name].grad.any(), name
        torch.testing.assert_close(part.latent.grad.double(), leaves[name].grad, **CLOSE, msg=name)


def test_indexers_before_and_after_the_memories_learn(device):
    config, about = graph_config(), {"head_width": 8, "index_heads": 2, "index_width": 8}
    mixer = CompressedAttentionConfig(heads=2, ratio=2, top_k=4, window=3, **about)
    blocks = tuple(replace(block, mixer=mixer) for block in config.main.blocks)
    memories = replace(config.main.memories, place=1)
    main = replace(config.main, blocks=blocks, memories=memories)
    config = replace(config, stages=(main,))
    assert_agrees(config, device)


def test_steps_by_kernels_give_the_logits_of_steps_by_parts(small_graph, monkeypatch):
    lm = build_model(model_of(small_graph), torch.bfloat16)
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


@pytest.mark.parametrize("option", ["graph_gate", "graph_adapters"])
def test_hint_of_a_missing_graph_leads_to_a_model(option):
    """The preset has `edges`, and no graph."""
    given = {option: True}
    for name in ("graph", "moe")[: 1 + (option == "graph_gate")]:
        with pytest.raises(ArbError, match=f"`{option}` needs `{name}`") as refused:
            preset("arb-tiny", **given)
        assert refused.value.hint.startswith(f"add `{name}=True`")
        given[name] = True
    preset("arb-tiny", **given)
