"""The float peer of tuning in integers is the Qwen 3 of Transformers."""

from unittest import mock

import pytest
import torch

with mock.patch.object(torch, "compile", lambda function=None, **_: function or (lambda f: f)):
    from benchmarks import float_qwen

MODULES = {
    "q": "self_attn.q_proj", "k": "self_attn.k_proj", "v": "self_attn.v_proj",
    "o": "self_attn.o_proj", "q_norm": "self_attn.q_norm", "k_norm": "self_attn.k_norm",
    "gate": "mlp.gate_proj", "up": "mlp.up_proj", "down": "mlp.down_proj",
    "norm": "input_layernorm", "ffn_norm": "post_attention_layernorm",
}  # fmt: skip
"""Submodules of a layer by the names of the peer's weights."""


@pytest.mark.parametrize("tied", [False, True])
def test_loss_is_that_of_transformers(tied, monkeypatch):
    transformers = pytest.importorskip("transformers", reason="needs the extra `export-test`")
    monkeypatch.setattr(torch, "compile", lambda function, **_: function)  # compiles for seconds
    monkeypatch.setattr(float_qwen, "COMPUTE", torch.float32)
    monkeypatch.setattr(float_qwen, "LOGITS_AT_ONCE", 5 * 64)
    torch.manual_seed(0)
    shape = float_qwen.Shape(
        layers=2, dim=64, heads=4, kv_heads=2, head_width=32, ffn=96, vocabulary=64, tied=tied,
        theta=1e3,
    )  # fmt: skip
    config = transformers.Qwen3Config(**shape.hugging_face())
    theirs = transformers.Qwen3ForCausalLM(config)
    ours = float_qwen.FloatQwen(shape, torch.float32, recompute=False, device="cpu")
    with torch.no_grad():
        for weight in theirs.parameters():
            weight.normal_(1, 0.2) if weight.ndim == 1 else weight.normal_(0, 0.1)
        for block, layer in zip(ours.matrices, theirs.model.layers, strict=True):
            for name, weight in block.items():
                weight.copy_(layer.get_submodule(MODULES[name]).weight)
        ours.embedding.copy_(theirs.model.embed_tokens.weight)
        ours.norm.copy_(theirs.model.norm.weight)
        ours.head.copy_(theirs.lm_head.weight)
    ids = torch.randint(64, (2, 17))
    loss = ours.loss(ids[:, :-1], ids[:, 1:])
    expected = theirs(ids, labels=ids).loss
    assert loss.item() == pytest.approx(expected.item(), rel=1e-5)
    (grad,) = torch.autograd.grad(loss, ours.matrices[0]["k"])
    (expected,) = torch.autograd.grad(expected, theirs.model.layers[0].self_attn.k_proj.weight)
    torch.testing.assert_close(grad, expected, rtol=1e-4, atol=1e-6)
