"""Models of compressed attention: entries, choices, cache, causality, what is learned."""

from dataclasses import replace

import pytest
import torch
from handed import chosen_by, handed
from made_runs import model_of
from references import assert_agrees, logits_in_parts

from arbcli.config.presets import preset
from arbcli.families.compressed.kernels.choose_entries import choose_entries
from arbcli.families.compressed.kernels.compressed_attention import Sight, compressed_attention
from arbcli.inspect.memory import measure, predict
from arbcli.model.build import build_model
from arbcli.model.language_model import LanguageModel
from arbcli.model.updater import Updater

CTX = 24
CLOSE = {"rtol": 1e-4, "atol": 1e-4}


def model(small_compressed, **options) -> LanguageModel:
    """Make a model whose scales differ.

    With equal ones many sums of products are zero but for their rounding. What is chosen by them
    depends on the order of additions, which processors do not share.
    """
    lm = build_model(model_of(small_compressed, **options, scale_type="T4"), torch.float32)
    generator = torch.Generator().manual_seed(0)
    for weight in lm.weights().values() if lm.config.weights == "ternary" else ():
        if not weight.frozen:
            fraction = torch.randint(0, 128, weight.fraction.shape, generator=generator)
            weight.fraction.copy_(fraction)
    return lm


def text(rows: int = 2, length: int = CTX, seed: int = 0) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(97, 123, (rows, length), generator=generator)


PARTS = {
    "bytes": [1] * CTX,
    "all at once": [CTX],
    "ragged": [5, 1, 6, 1, 2, 9],
    "a prompt of two entries": [10, *[1] * 14],
}


MEANS_AND_GAINS = {"mean_ratio": 6, "key_gain": True}


@pytest.mark.parametrize(
    ("name", "options"),
    [("bytes", {}), ("all at once", {"weights": "ste"}), ("ragged", {"kv_heads": 2}),
     ("a prompt of two entries", MEANS_AND_GAINS), ("bytes", {"top_k": 8, "ratios": (3,)})],
    ids=str,
)  # fmt: skip
def test_cached_logits_equal_those_of_one_forward(name, options, small_compressed):
    lm, ids = model(small_compressed, **options), text(1)
    with torch.no_grad(), chosen_by(lm) as chosen:
        expected = lm(ids)
    with handed(chosen):
        torch.testing.assert_close(logits_in_parts(lm, ids, PARTS[name]), expected, **CLOSE)


@pytest.mark.parametrize(
    ("kv", "options"),
    [("int8-mixed", {}), ("fp8-queries", MEANS_AND_GAINS)],
    ids=str,
)  # fmt: skip
def test_cache_in_eight_bits_gives_the_logits_of_one_forward(kv, options, small_compressed):
    lm, ids = model(small_compressed, **options), text(1)
    plain = lm.new_cache(CTX).nbytes
    with lm.cached_as(kv), torch.no_grad():
        with chosen_by(lm) as chosen:
            expected = lm(ids)
        for name in ("all at once", "ragged", "a prompt of two entries"):
            with handed(chosen):
                torch.testing.assert_close(logits_in_parts(lm, ids, PARTS[name]), expected, **CLOSE)
        # an open block stays as it is, and half of each key turns
        assert lm.new_cache(CTX).nbytes < (0.85 if "-" in kv else 0.75) * plain


def test_text_beyond_the_context_is_read_alike_in_bytes_and_chunks(small_compressed):
    lm, ids = model(small_compressed), text(1, 43)
    in_bytes = logits_in_parts(lm, ids, [1] * 43)
    torch.testing.assert_close(logits_in_parts(lm, ids, [24, 7, 1, 11]), in_bytes, **CLOSE)


def test_byte_is_seen_through_its_entry_once_that_is_complete(small_compressed):
    """A window of one byte: between a byte and what its entry tells of it nobody knows it."""
    lm, ids = model(small_compressed, layers=1, window=1, top_k=99, ratios=(6,)), text(1)
    other = ids.clone()
    other[0, 7] = 32  # of the entry of bytes 6 to 11
    with torch.no_grad():
        moved = (lm(other) != lm(ids)).any(dim=-1)[0].tolist()
    assert moved == [place == 7 or place >= 11 for place in range(CTX)]


def test_indexer_of_eight_bits_chooses_by_rounded_numbers(small_compressed):
    config = model_of(small_compressed, dim=48, ffn=48, ratios=(3,))
    lm = build_model(config, torch.float32, number_format="fp8")
    indexer = lm.blocks[0].attention.indexer
    generator = torch.Generator().manual_seed(0)
    q, keys = (torch.randn(size, generator=generator) for size in ((1, 40, 2, 8), (1, 40, 8)))
    w = torch.ones(1, 40, 2)
    rounded = [part.to(torch.float8_e4m3fn).float() for part in (q, keys)]
    assert indexer.fp8
    choice = indexer.choose(q, w, keys, 1, 99)
    assert torch.equal(choice, choose_entries(rounded[0], w, rounded[1], 1, 99, 2))
    assert not torch.equal(choice, choose_entries(q, w, keys, 1, 99, 2))
    indexer.fp8 = False
    choice = indexer.choose(q, w, keys, 1, 99, low_precision=True)
    assert torch.equal(choice, choose_entries(q, w, rounded[1], 1, 99, 2))
    assert lm(text(1)).isfinite().all()


def test_sink_without_entries_takes_all_weight():
    x = torch.randn(1, 5, 2, 4)
    recent, table = torch.randn(1, 5, 1, 4), torch.ones(5, 2)
    given = (recent[:, :0], None, torch.full((2,), 60.0), table, 0 * table, Sight(3, 9, 1), 1e-6)
    y, logs, _ = compressed_attention(x, recent, *given)
    assert y.abs().max() < 1e-20
    assert torch.allclose(logs, torch.tensor(60.0))


def test_options_agree_with_their_reference(small_compressed, device):
    config = model(small_compressed, **MEANS_AND_GAINS | {"kv_heads": 2}).config
    assert_agrees(replace(config, norm_gain=True), device, "bits")


WIDE = {"heads": 128, "head_width": 512, "kv_heads": 1, "rotary": 64}


def test_ten_bytes_give_two_entries_of_four():
    assert list(Sight(128, 4, 100).groups(10)) == [0, 1, 2]
    lm = build_model(preset("tiny", attention="compressed", ctx=10, layers=1), torch.float32)
    cache = lm.new_cache(10)
    with torch.no_grad():
        lm(text(1, 10), cache)
    assert cache.main.blocks[0].choice[:2].tolist() == [0, 1]
    assert (cache.main.blocks[0].entries.codes.norm(dim=(1, 2)) > 0).sum() == 2


def test_128_heads_of_512_with_one_head_of_keys_are_predicted_and_step():
    large = preset("arb-deep", dim=7168, experts=384, top_k_experts=6, **WIDE)
    assert 1e11 < predict(large).total.weights < 2e11
    small = preset(
        "tiny", attention="compressed", dim=8, layers=1, ffn=8, ctx=8, ratios=(4,), top_k=1,
        index_heads=1, index_width=8, direction="factored", **WIDE,
    )  # fmt: skip
    lm, ids = build_model(small, torch.float32), text(1, 8)
    updater = Updater(lm.weights().values(), 0, torch.float32)
    for weight in lm.weights().values():
        weight.sink = updater
    before = lm.blocks[0].attention.projection.weight.trits.clone()
    with torch.no_grad():
        whole = lm(ids)
    torch.testing.assert_close(logits_in_parts(lm, ids, [5, 1, 1, 1]), whole, **CLOSE)
    updater.begin(0, 16.0)
    sum(lm.losses(ids, ids).values()).backward()
    updater.finish()
    assert not torch.equal(lm.blocks[0].attention.projection.weight.trits, before)
    assert measure(lm).state_bytes == predict(small).total.state_bytes
