"""Texts that are read byte by byte, or in chunks, against one forward over the whole text."""

import pytest
import torch
from references import logits_in_parts

from arbcli.base.errors import ArbError
from arbcli.config.presets import preset
from arbcli.kernels.runtime import native
from arbcli.kernels.runtime.backend import use_backend
from arbcli.model.build import build_model
from arbcli.model.language_model import LanguageModel
from arbcli.model.layers import attend as attend_module
from arbcli.model.layers.linear import TernaryLinear
from arbcli.model.parts.attention import KVCache
from arbcli.model.parts.cached import CacheFormat

WINDOW = 8
SHAPE = {"dim": 32, "layers": 2, "heads": 2, "ffn": 48, "ctx": WINDOW}
compiled = pytest.mark.skipif(not native.available(), reason=native.why_not())
KERNELS = "triton" if torch.cuda.is_available() else "interpreter"


def model(device, dtype=torch.float32, **options) -> LanguageModel:
    with torch.device(device):
        return build_model(preset("tiny", **SHAPE | options), dtype)


def text(length: int, device, seed: int = 0) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(0, 256, (1, length), generator=generator).to(device)


def forward_in_windows(lm, ids, monkeypatch) -> torch.Tensor:
    """Run one forward in which every byte attends to itself and the `WINDOW` - 1 before it."""
    attend = torch.nn.functional.scaled_dot_product_attention
    band = torch.ones(ids.shape[1], ids.shape[1], dtype=torch.bool, device=ids.device)
    band = band.tril().triu(1 - WINDOW)

    class Functional:
        @staticmethod
        def scaled_dot_product_attention(q, k, v, *, is_causal):
            assert is_causal
            return attend(q, k, v, attn_mask=band)

    with monkeypatch.context() as patch, torch.no_grad():
        patch.setattr(attend_module, "functional", Functional)
        return lm(ids)


PARTS = {
    "a byte at a time": [1] * 21,
    "a window, then bytes": [WINDOW, *[1] * 13],
    "ragged chunks and bytes": [3, 1, 7, 2, 8],
}


@pytest.mark.parametrize("name", [*PARTS, "by kernels"])
def test_cached_logits_equal_those_of_one_forward(name, device, monkeypatch):
    by_kernels = name == "by kernels"
    storage = {"digits": "all", "mlp_rule": "nibble", "layers": 1} if by_kernels else {}
    lm, ids = model(device, **storage), text(21, device)
    expected = forward_in_windows(lm, ids, monkeypatch)
    with use_backend(KERNELS if by_kernels else "torch"):
        got = logits_in_parts(lm, ids, PARTS.get(name, PARTS["ragged chunks and bytes"]))
    torch.testing.assert_close(got, expected, rtol=1e-4, atol=1e-4)


@compiled
@pytest.mark.parametrize(
    ("name", "storage", "dtype"),
    [
        ("a byte at a time", {}, torch.float32),
        ("ragged chunks and bytes", {}, torch.bfloat16),
        ("ragged chunks and bytes", {"digits": "all"}, torch.float32),
        ("a byte at a time", {"digits": "all", "mlp_rule": "nibble"}, torch.bfloat16),
    ],
    ids=str,
)
def test_loops_give_the_logits_of_one_forward(name, storage, dtype, monkeypatch):
    """Also of several positions at once, which no product of decoded weights is needed for."""
    lm, ids = model("cpu", dtype, **storage), text(21, "cpu")
    if storage:  # with scales of a power of two, weights of all digits need no rounding to bf16
        for weight in lm._matrices():
            weight.fraction.zero_()
    expected = forward_in_windows(lm, ids, monkeypatch)
    with lm.prepared_weights(1 << 30), use_backend("native"):
        got = logits_in_parts(lm, ids, PARTS[name])
        assert prepacked(lm) == 2 * 4 + 1
        assert all(weight._kept is None for weight in lm._matrices())
    error = (got.float() - expected.float()).norm() / expected.float().norm()
    assert error < (2e-4 if dtype == torch.float32 else 0.02)  # activations of 16 bits, and bf16


def prepacked(lm) -> int:
    """Count the matrices that are prepacked."""
    layers = [part for part in lm.modules() if isinstance(part, TernaryLinear)]
    return sum(part._prepacked is not None for part in layers)


def test_too_many_bytes_at_once_are_refused(device):
    lm = model(device)
    with pytest.raises(ValueError, match="no room for 9 bytes at 0"):
        lm(text(9, device), lm.new_cache(20))
    with pytest.raises(ValueError, match="no room for 6 bytes at 0 of 5"):
        lm(text(6, device), lm.new_cache(5))


KEPT = ["fp8", "int8"]


@pytest.mark.parametrize("kv", KEPT)
@torch.no_grad()
def test_prompt_in_eight_bits_is_read_as_byte_by_byte(kv, device):
    lm, ids = model(device), text(21, device)
    with lm.cached_as(kv):
        one_by_one = logits_in_parts(lm, ids, [1] * 21)
        for name in ("a window, then bytes", "ragged chunks and bytes"):
            got = logits_in_parts(lm, ids, PARTS[name])
            torch.testing.assert_close(got, one_by_one, rtol=1e-4, atol=1e-4)
        plain = lm(ids[:, :WINDOW])
    torch.testing.assert_close(one_by_one[:, :WINDOW], plain, rtol=1e-4, atol=1e-4)
    assert not torch.equal(lm(ids[:, :WINDOW]), plain)


def test_unsupported_cache_dtype_is_refused(device):
    lm = model(device)
    with pytest.raises(ArbError, match="needs activations in bf16"), lm.cached_as("bf16"):
        pass
    with pytest.raises(RuntimeError), lm.cached_as("int8"):
        raise RuntimeError
    assert lm.cache_dtype == "fp32"
    assert all(block.attention.cache_format == CacheFormat() for block in lm.blocks)


def one_position(lm, x, position: int) -> torch.Tensor:
    """Mix a position in the first block of a model, whose ring other bytes have filled."""
    cache = lm.new_cache(250)
    cache.position.fill_(position)
    generator = torch.Generator().manual_seed(1)
    block = cache.main.blocks[0]
    for ring in (block.keys.codes, block.values.codes):
        ring.copy_(torch.randn(ring.shape, generator=generator))
    with use_backend(KERNELS), torch.no_grad():
        return lm.blocks[0].attention.step(x, block, x)


def test_product_of_parts_has_the_bits_of_that_of_their_mean(device, monkeypatch):
    """Of a full part and one that is not, which is what the ring of a single text is left in."""
    lm = model(device, torch.bfloat16, dim=64, heads=1, layers=1, ctx=220)
    x = torch.randn(1, 1, 64, generator=torch.Generator().manual_seed(2)).bfloat16().to(device)
    product, attend, combined = one_position(lm, x, 200), KVCache.attend_split, []

    def attend_and_combine(*arguments):
        combined.append(attend(*arguments).combine())
        return combined[-1].view(1, 1, -1)

    monkeypatch.setattr(KVCache, "attend_split", attend_and_combine)
    assert torch.equal(one_position(lm, x, 200), product)
    assert len(combined) == 1
