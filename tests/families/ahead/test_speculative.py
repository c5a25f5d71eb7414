"""Text by checks of proposed bytes is the text that is made a byte at a time, bit for bit."""

from dataclasses import replace
from functools import cache

import pytest
import torch

from arbcli.base.errors import ArbError
from arbcli.config.presets import preset
from arbcli.families.ahead.config import AheadConfig
from arbcli.families.ahead.speculation import EACH_EQUAL
from arbcli.generation.decoder import Decoder
from arbcli.generation.sampling import Sampling
from arbcli.kernels.runtime import native
from arbcli.kernels.runtime.backend import use_backend
from arbcli.model.build import build_model
from arbcli.model.language_model import LanguageModel

ON_GPU = torch.cuda.is_available()
KERNELS = "triton" if ON_GPU else "native"
DTYPES = [torch.bfloat16] if ON_GPU else [torch.float32, torch.bfloat16]
LENGTH = 1500 if ON_GPU else 60
WAYS = [
    Sampling(temperature=0),
    Sampling(temperature=0.8, seed=3),
    Sampling(temperature=0.5, top_k=9, top_p=0.9),
]
DIM = 128 if ON_GPU else 64  # kernels of a GPU have heads of 64
SMALL = {"dim": DIM, "layers": 2, "heads": 2, "ffn": 48}
HNET = {"outer_dim": 32, "outer_layers": 1, "outer_heads": 2, "outer_ffn": 40, "window": 9}
pytestmark = pytest.mark.skipif(
    not ON_GPU and not native.available(), reason="there is no C compiler"
)


@cache
def model(size, dtype, name="tiny", **changes) -> LanguageModel:
    """Make a model of a short context, so that rings come round, with a head that is not trained.

    Where bytes are sampled, half of its proposals are right, as random numbers decide both. Of size
    0 it has no head.
    """
    config = preset(name, **{"ctx": 20} | changes)
    if size:
        config = replace(config, ahead=AheadConfig(positions=size, width=24))
    lm = build_model(config, dtype)
    return lm.cuda() if ON_GPU else lm


def texts(lm, how, length=LENGTH, size=None):
    """Make a text a byte at a time, and by checks; returns both, and the second decoder."""
    drafts = []
    with lm.prepared_weights():
        for ahead in (1, size or lm.config.ahead.positions):
            decoder = Decoder(lm, length + 11, backend=KERNELS, ahead=ahead)
            decoder.begin(b"hello world", how)
            drafts.append(b"".join(decoder.stream(length)))
    return *drafts, decoder


@pytest.mark.parametrize(
    ("digits", "dtype", "size", "how"),
    [
        ("trit", DTYPES[0], 2, WAYS[2]),
        ("trit", DTYPES[-1], 5, WAYS[0]),
        ("all", DTYPES[-1], 8, WAYS[1]),
    ],
    ids=str,
)
def test_text_is_the_same(digits, dtype, size, how):
    plain, checked, decoder = texts(model(size, dtype, digits=digits, **SMALL), how)
    assert plain == checked
    assert len(plain) == LENGTH
    assert decoder.num_checks > 0
    assert decoder.num_checks <= decoder.checked_bytes <= size * decoder.num_checks
    if how.temperature == 0.8:  # some proposals are right, and some are not
        assert decoder.num_checks < decoder.checked_bytes < size * decoder.num_checks


@torch.no_grad()
@pytest.mark.parametrize(
    ("size", "sure", "wanted"), [(0, 0.0, b"two o"), (5, 0.9, b"two o"), (5, 1.1, b"tAAAA")]
)
def test_repeated_text_is_proposed(size, sure, wanted, monkeypatch):
    """Five bytes are equal; a head that is surer than they count has its own way."""
    lm = model(size, DTYPES[0], **SMALL)
    of_head = torch.zeros(1, 1, 256, device=lm.device)
    of_head[..., ord("A")] = sure * 5 * EACH_EQUAL
    for name in ("step", "forward") if size else ():
        monkeypatch.setattr(lm.ahead, name, lambda x, _: (x, of_head))
    with lm.prepared_weights(), use_backend(KERNELS):
        decoder = Decoder(lm, 40, backend=KERNELS, capture=False, ahead=5)
        decoder.begin(b"one two one t", WAYS[0])
        decoder.checks.begin(decoder.last)
        decoder.checks._propose(decoder._text, decoder._key, (0.0, 256, 1.0))
        assert bytes(decoder.checks._ids[0].tolist()) == wanted


@pytest.mark.parametrize(
    ("name", "changes"),
    [
        ("tiny", SMALL | {"streams": 4}), ("tiny", SMALL | {"key_heads": 1}),
        ("tiny", SMALL | {"experts": 3}),
        ("arb-long", SMALL | {"head_width": 16, "rotary": 8, "window": 8, "top_k": 2}),
        ("arb-tiny", SMALL | {"latent": 32, "rotary": 8}), ("hnet-tiny", SMALL | HNET),
        ("hnet-tiny", SMALL | HNET | {"outer_blocks": "mamba"}),
    ],
    ids=str,
)  # fmt: skip
def test_models_that_cannot_check_refuse_it(name, changes):
    lm = model(4, DTYPES[0], name, **changes)
    with lm.prepared_weights(), pytest.raises(ArbError, match="does not support `--ahead`"):
        Decoder(lm, 30, backend=KERNELS, ahead=4)


def test_eight_bits_of_keys_and_torch_alone_are_refused():
    lm = model(4, DTYPES[0], **SMALL)
    with lm.prepared_weights(), pytest.raises(ArbError, match="does not support `--ahead`"):
        Decoder(lm, 30, backend="torch", ahead=4)
    with (
        lm.prepared_weights(),
        lm.cached_as("int8"),
        pytest.raises(ArbError, match="does not work with a cache in int8") as caught,
    ):
        Decoder(lm, 30, backend=KERNELS, ahead=4)
    assert "`--kv`" in str(caught.value.hint)


def test_tokens_and_more_bytes_than_there_are_are_refused():
    """So are they by the command, before torch is imported: `check_ahead`."""
    lm = LanguageModel(replace(preset("tiny", **SMALL), vocabulary=300), DTYPES[0])
    for ahead, message in ((2, "only works with models of bytes"), (9, "`--ahead` is 9")):
        with pytest.raises(ArbError, match=message) as caught:
            Decoder(lm, 30, backend="torch", ahead=ahead)
        assert caught.value.hint
    with pytest.raises(ArbError, match="`--ahead` is for a single text"):
        Decoder(lm, 30, 2, backend="torch", ahead=2)


def test_memory_of_unstored_positions_is_counted():
    lm = model(4, DTYPES[0], **SMALL)
    with lm.prepared_weights():
        plain, checked = (Decoder(lm, 30, backend=KERNELS, ahead=ahead) for ahead in (1, 4))
    new = 2 * 2 * 4 * DIM * DTYPES[0].itemsize  # blocks, keys and values
    assert checked.nbytes - plain.nbytes == new


def test_losses_of_the_head_sum_to_its_weight():
    ahead = AheadConfig(positions=4, width=14, weight=0.3)
    weights = replace(preset("tiny"), ahead=ahead).loss_weights
    assert sum(weights[name] for name in ahead.losses) == pytest.approx(0.3)
