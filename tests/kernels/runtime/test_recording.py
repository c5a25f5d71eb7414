"""Loops that are recorded and computed again in one call."""

import ctypes

import pytest
import torch

from arbcli.config.presets import preset
from arbcli.infer.generation import Decoder, Sampling
from arbcli.kernels.attention.decode_attention import count_on_
from arbcli.kernels.codec.packed import random_packed
from arbcli.kernels.matmul.prepacked import prepack
from arbcli.kernels.matmul.prepacked_rows import prepacked_rows
from arbcli.kernels.runtime import native
from arbcli.kernels.runtime.backend import use_backend
from arbcli.model.language_model import LanguageModel

pytestmark = pytest.mark.skipif(not native.available(), reason=native.why_not())


@pytest.fixture(autouse=True)
def by_loops():
    with use_backend("native"), torch.no_grad():
        yield


def model(**options) -> LanguageModel:
    shape = {"dim": 32, "layers": 2, "heads": 2, "ffn": 48, "ctx": 8}
    lm = LanguageModel(preset("tiny", **shape | options), torch.float32)
    lm.initialise(0)
    return lm


@pytest.mark.parametrize("threads", [1, 3])
def test_a_recording_computes_again_from_what_its_tensors_hold(threads, monkeypatch):
    monkeypatch.setattr(native, "LEAST_ELEMENTS", 0)
    monkeypatch.setattr(torch, "get_num_threads", lambda: threads)
    generator = torch.Generator().manual_seed(0)
    first, second = (prepack(random_packed(*s, 32, generator, 4)) for s in ((96, 40), (56, 96)))
    x, position = torch.randn(1, 40, generator=generator), torch.zeros((), dtype=torch.int32)
    step = native.Recording()
    with step:
        y = prepacked_rows(prepacked_rows(x, first, 1e-6), second, 1e-6)
        count_on_(position, 1)
    for seed in range(5):
        x.normal_(generator=generator.manual_seed(seed))
        step.replay()
        assert torch.equal(y, prepacked_rows(prepacked_rows(x, first, 1e-6), second, 1e-6))
        assert position == seed + 2


def test_every_replay_counts_anew_what_is_done():
    """Threads go on to the next loop where as many shares are done as there are."""
    position, step = torch.zeros((), dtype=torch.int32), native.Recording()
    with step:
        count_on_(position, 1)
    step.replay()
    step.replay()
    entries, number = (ctypes.c_int64 * 2).from_address(step._made.value)
    *_, shares, _next, done = (ctypes.c_int64 * 7).from_address(entries)
    assert (number, position, done) == (1, 3, shares)


def test_what_is_no_loop_is_not_recorded():
    x = torch.ones(4)
    with pytest.raises(native.NotRecorded, match="mul"), native.Recording():
        x.view(2, 2).mul(2)
    with pytest.raises(native.NotRecorded, match="rotary_norm"), native.Recording():
        native.call("rotary_norm", x)
    assert torch.equal(x * 2, torch.full((4,), 2.0))  # outside nothing is refused


@pytest.mark.parametrize("options", [{}, {"digits": "all"}, {"sub_norms": False}], ids=str)
def test_a_recorded_step_gives_the_bytes_of_one_that_is_not(options):
    lm, texts = model(**options), []
    with lm.prepared_weights():
        for capture in (None, False):
            decoder = Decoder(lm, 60, Sampling(seed=3), capture=capture)
            assert decoder.recorded == (capture is None)
            decoder.read(b"recorded, in pieces")
            texts.append(b"".join(decoder.stream(20)))
            decoder.read(b" and on")
            texts[-1] += b"".join(decoder.stream(9))
    assert texts[0] == texts[1]


@pytest.mark.parametrize("name", ["arb-tiny", "hnet-tiny"])
def test_a_model_that_needs_more_than_loops_is_not_recorded(name):
    lm = LanguageModel(preset(name, ctx=16), torch.float32)
    lm.initialise(0)
    with lm.prepared_weights():
        assert not Decoder(lm, 8).recorded
