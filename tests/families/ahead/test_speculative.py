"""Text by checks of proposed bytes is the text that is made a byte at a time, bit for bit."""

from dataclasses import replace
from functools import cache
from itertools import product

import pytest
import torch
from marks import mostly_slow

from arbcli.base.errors import ArbError
from arbcli.config.presets import preset
from arbcli.families.ahead.config import AheadConfig
from arbcli.families.ahead.speculation import EACH_EQUAL, can_check
from arbcli.generation.decoder import Decoder
from arbcli.generation.sampling import Sampling
from arbcli.kernels.runtime import native
from arbcli.kernels.runtime.backend import use_backend
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
    lm = LanguageModel(config, dtype)
    lm.initialise(0)
    return lm.cuda() if ON_GPU else lm


def texts(lm, how, length=LENGTH, size=None):
    """Make a text a byte at a time, and by checks; returns both, and the second decoder."""
    found = []
    with lm.prepared_weights():
        for ahead in (1, size or lm.config.ahead.positions):
            decoder = Decoder(lm, length + 11, backend=KERNELS, ahead=ahead)
            decoder.begin(b"hello world", how)
            found.append(b"".join(decoder.stream(length)))
    return *found, decoder


EVERY = list(product(("trit", "all"), DTYPES, (2, 5, 8), WAYS))


@pytest.mark.parametrize(
    ("digits", "dtype", "size", "how"),
    mostly_slow(EVERY, lambda *values: EVERY.index(values) in (1, 9, 34)),
    ids=str,
)
def test_text_is_the_same(digits, dtype, size, how):
    plain, checked, decoder = texts(model(size, dtype, digits=digits, **SMALL), how)
    assert plain == checked
    assert len(plain) == LENGTH
    assert decoder.checks_made > 0
    assert decoder.checks_made <= decoder.checked_bytes <= size * decoder.checks_made
    if how.temperature == 0.8:  # some proposals are right, and some are not
        assert decoder.checks_made < decoder.checked_bytes < size * decoder.checks_made


@pytest.mark.parametrize("how", WAYS[:2])
def test_text_of_a_model_without_the_head_is_the_same(how):
    plain, checked, decoder = texts(model(0, DTYPES[0], **SMALL), how, size=5)
    assert plain == checked
    assert decoder.checks_made > 0


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
        decoder.checks.begin(decoder._byte)
        decoder.checks._propose(decoder._text, decoder._key, (0.0, 256, 1.0))
        assert bytes(decoder.checks._ids[0].tolist()) == wanted


def test_proposals_that_are_right_are_all_accepted(monkeypatch):
    """Proposals are taken from the text that was made before."""
    lm, size = model(4, DTYPES[0], **SMALL), 4
    wanted = texts(lm, WAYS[0])[0]
    with lm.prepared_weights():
        decoder = Decoder(lm, LENGTH + 11, backend=KERNELS, capture=False, ahead=size)
        decoder.begin(b"hello world", WAYS[0])
        known = list(b"hello world" + wanted)
        calls = 0

        def propose(x, byte):
            nonlocal calls
            place = int(decoder.cache.position) + 1 + calls % (size - 1)
            calls += 1
            of_byte = torch.zeros(1, 1, 256, device=x.device)
            of_byte[..., known[place]] = 100  # whatever the text repeats
            return x, of_byte

        for name in ("step", "forward"):
            monkeypatch.setattr(lm.ahead, name, propose)
        assert b"".join(decoder.stream(LENGTH)) == wanted
    assert decoder.checked_bytes == size * decoder.checks_made == LENGTH // size * size


@pytest.mark.parametrize(
    ("name", "changes"),
    [
        ("tiny", SMALL | {"streams": 4}),
        ("tiny", SMALL | {"key_heads": 1}),
        ("tiny", SMALL | {"experts": 3}),
        ("arb-long", SMALL | {"head_width": 16, "rotary": 8, "window": 8, "top_k": 2}),
        ("arb-tiny", SMALL | {"latent": 32, "rotary": 8}),
        ("hnet-tiny", SMALL | HNET),
        ("hnet-tiny", SMALL | HNET | {"outer_blocks": "mamba"}),
    ],
    ids=str,
)
def test_models_that_cannot_check_refuse_it(name, changes):
    lm = model(4, DTYPES[0], name, **changes)
    with lm.prepared_weights(), pytest.raises(ArbError, match="does not support `--ahead`"):
        Decoder(lm, 30, backend=KERNELS, ahead=4)


@pytest.mark.parametrize(
    "other",
    [
        {"beside": (1,)},
        {"reads_text": True},
        {"streams": 2},
        {"memories": 1},
        {"router": 1},
        {"fills": True},
    ],
    ids=str,
)
def test_each_part_of_a_model_that_a_check_does_not_know_is_refused(other):
    """Each alone: a model that has one mostly has others."""
    plain = model(4, DTYPES[0], **SMALL).config
    lm = LanguageModel(plain, DTYPES[0]).to("cuda" if ON_GPU else "cpu")
    lm.initialise(0)

    class Other:
        """A configuration but for some of its fields, or of those of its main stage."""

        def __init__(self, of, fields) -> None:
            self.__dict__ |= {"of": of, **fields}

        def __getattr__(self, name: str):
            return getattr(self.of, name)

    def config(**fields):
        return Other(plain, fields | {"main": Other(plain.main, fields)})

    with lm.prepared_weights(), use_backend(KERNELS):
        lm.config = config()
        assert can_check(lm)
        lm.config = config(**other)
        assert not can_check(lm)


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
