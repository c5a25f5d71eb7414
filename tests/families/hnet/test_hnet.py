"""Models with chunks: boundaries, cache, causality, what it trains to and what it keeps."""

import pytest
import torch
from references import logits_in_parts, reference_logits
from torch.nn import functional

from arbcli.config.layer_spec import NORM_EPS
from arbcli.config.model import ModelConfig
from arbcli.config.presets import preset
from arbcli.families.hnet.boundaries import chunk_depths, chunk_starts
from arbcli.generation.decoder import Decoder
from arbcli.generation.sampling import Sampling
from arbcli.model.language_model import LanguageModel
from arbcli.model.layers.linear import TernaryLinear

SHAPE = {
    "dim": 32, "layers": 1, "heads": 2, "ffn": 40, "ctx": 24, "outer_dim": (24,),
    "outer_layers": (1,), "outer_heads": (2,), "outer_ffn": (36,), "chunk_length": (3,),
    "window": 5,
}  # fmt: skip
TWO_STAGES = {
    "outer_dim": (24, 28), "outer_layers": (1, 1), "outer_heads": (2, 2), "outer_ffn": (36, 36),
    "chunk_length": (2, 2),
}  # fmt: skip
KINDS = {
    "learned": {}, "every": {"boundaries": "every"}, "space": {"boundaries": "space"},
    "two stages": TWO_STAGES, "mamba": {"outer_blocks": "mamba", "states": 7},
    "every, two stages": TWO_STAGES | {"boundaries": "every"},
}  # fmt: skip
"""Options by what says where chunks begin."""
each_kind = pytest.mark.parametrize("kind", KINDS)
each_other_kind = pytest.mark.parametrize("kind", ["every", "two stages", "mamba"])
"""Where all take the same way through the stages, but for the part that says where chunks begin."""
CLOSE = {"rtol": 1e-4, "atol": 5e-5}


def config(kind: str = "learned", **options) -> ModelConfig:
    return preset("hnet-tiny", **SHAPE | KINDS[kind] | options)


def model(kind: str = "learned", *, drawn: bool = True, **options) -> LanguageModel:
    """Make a model; `drawn` fills what is zero at the start, too."""
    lm = LanguageModel(config(kind, **options), torch.float32)
    for tensor in lm.weights().values() if drawn else ():
        tensor.spread = 1.0
    lm.initialise(0)
    return lm


def text(rows: int = 2, length: int = 24, seed: int = 0) -> torch.Tensor:
    """Draw words of a few letters."""
    generator = torch.Generator().manual_seed(seed)
    ids = torch.randint(97, 123, (rows, length), generator=generator)
    return torch.where(torch.rand(rows, length, generator=generator) < 0.25, 32, ids)


@each_other_kind
def test_text_longer_than_the_context_is_read_as_by_the_reference(kind):
    lm, ids = model(kind, ctx=12), text(1, 31)
    wanted = reference_logits(lm, ids, endless=True)
    got = logits_in_parts(lm, ids, [4, *[1] * 9, 2, *[1] * 16])
    torch.testing.assert_close(got.double(), wanted, **CLOSE)


@each_other_kind
def test_steps_in_fused_kernels_make_the_text_of_whole_forwards(kind, monkeypatch):
    """Only products are fused here, in torch: what is around them is wired as on a GPU."""

    def fused(self, x, *, normalise, gated=False, added=None, also=None, early=True):
        # the kernel after it reads what was computed before it
        assert not (early and any(self is layer for layer in awaited))
        x = functional.rms_norm(x, x.shape[-1:], eps=NORM_EPS) if normalise else x
        y = self(x) if also is None else torch.cat((self(x), also(x)), dim=-1)
        if self is lm.head:
            of_steps.append(y)
        if gated:
            gate, up = y.chunk(2, dim=-1)
            y = functional.silu(gate) * up
        return y if added is None else added + y

    monkeypatch.setattr(TernaryLinear, "fused", fused)
    monkeypatch.setattr("arbcli.model.decoding.fuses", lambda *_: True)
    lm, prompt, of_steps = model(kind), bytes(text(1, 5)[0].tolist()), []
    awaited = [stage.outward for stage in lm.stages]
    awaited += [s.router.query_key if s.router else s.residual for s in lm.stages]
    with lm.prepared_weights(), torch.no_grad():
        decoder = Decoder(lm, 24, capture=False)
        decoder.begin(prompt, Sampling(temperature=0))
        made = prompt + b"".join(decoder.stream(19))
        logits = lm(torch.tensor([list(made)]))
    assert made[5:] == bytes(logits[0].argmax(dim=1).tolist())[4:-1]
    torch.testing.assert_close(torch.cat(of_steps)[:, 0], logits[0, 4:23], **CLOSE)


@pytest.mark.gpu
@each_kind
def test_captured_phases_make_the_text_of_phases_one_by_one(kind, device, monkeypatch):
    """As one graph with conditional nodes, and as graphs between which the host decides."""
    with torch.device(device):
        lm = LanguageModel(config(kind), torch.bfloat16)
    for tensor in lm.weights().values():
        tensor.spread = 1.0
    lm.initialise(0)
    texts = []
    for capture, joined in ((False, False), (True, True), (True, False)):
        if not joined:
            monkeypatch.setattr("arbcli.families.hnet.stage.has_conditions", lambda _: False)
        with lm.prepared_weights():
            decoder = Decoder(lm, 200, capture=capture)
            decoder.begin(b"the text ", Sampling(seed=2))
            texts.append(b"".join(decoder.stream(180)))
        monkeypatch.undo()
    assert texts[0] == texts[1] == texts[2]


def test_words_begin_after_spaces():
    lm = model("space")
    assert chunk_depths(lm, b"a bc  d\n\te ", "torch") == [1, 0, 1, 0, 0, 0, 1, 0, 0, 1, 0]


def test_new_model_has_an_identity_for_projections_and_no_residual():
    lm, ids = model(drawn=False), text()
    assert not lm.stages[0].router.query_key.weight.weight().any()
    assert not lm.stages[0].residual.weight.weight().any()
    x = torch.nn.functional.rms_norm(torch.randn(1, 1, 24), (24,)).expand(1, 6, 24)
    routed = lm.stages[0].router(x)
    torch.testing.assert_close(routed.p, torch.tensor([[1.0, 0, 0, 0, 0, 0]]), atol=1e-6, rtol=0)
    assert lm(torch.full((1, 6), 97)).isfinite().all()
    assert lm(ids).isfinite().all()


def test_too_many_chunks_join_the_last_and_are_counted():
    lm = model("space", chunk_length=(12,))  # 3 slots for 24 bytes
    ids = torch.tensor([list(b"a b c d e f g h i j k l ")])
    lm.losses(ids, ids)
    assert lm.gauges() == {"chunk_length": 8.0, "joined": 9 / 12}
    assert chunk_starts(lm, ids)[0].nonzero()[:, 1].tolist() == [0, 2, 4]
