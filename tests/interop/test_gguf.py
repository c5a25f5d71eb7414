"""A file for llama.cpp holds the same weights, and llama.cpp computes the same with it."""

import re
import struct
from contextlib import nullcontext
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch

from arbcli.base.atomic_files import write_json
from arbcli.base.errors import ArbError
from arbcli.base.run_files import CONFIG
from arbcli.config.model import ModelConfig
from arbcli.config.presets import preset
from arbcli.data.special_tokens import GENERATION, stop_tokens
from arbcli.data.tokens import Tokenizer, byte_symbols
from arbcli.generation.load import load_model, load_weights
from arbcli.interop.gguf import container
from arbcli.interop.gguf import export as gguf
from arbcli.interop.gguf.block_types import F32
from arbcli.interop.gguf.container import Entry, GGUFFile
from arbcli.interop.gguf.tokens import PATTERNS, _special_ids, token_keys
from arbcli.interop.huggingface.dense import known_shape, read, sources
from arbcli.model.build import build_model

TEXT = b"def main(self):\n    return 1\n"


def write_gguf(saved, path, kind=None, **options):
    weights = load_weights(saved(sub_norms=False, **options), print)
    return weights, gguf.write_model(path, weights, "name", kind)


def test_all_digits_are_off_by_the_rounding_alone(saved, tmp_path):
    path = tmp_path / "model.gguf"
    for kind, bound in ((None, 2**-8), ("bf16", 0)):
        weights, written = write_gguf(saved, path, kind, rule="nibble", digits="all")
        assert written.name == ("BF16" if kind else "Q8_0")
        file = GGUFFile(path)
        for part, weight in (pair for source in sources(weights.model) for pair in read(source)):
            tensor = file.tensor(part.gguf)
            assert torch.equal(tensor.bfloat16().float(), weight), part.gguf
            assert ((tensor - weight).abs() <= bound * weight.abs()).all()


def test_overlapping_tensors_are_refused(tmp_path):
    """A small file could have any number of weights to decode."""
    path, part = tmp_path / "model.gguf", torch.zeros(512, dtype=torch.uint8)
    entries = [Entry(name, (4, 32), F32) for name in ("a", "b")]
    with path.open("wb") as file:
        container.write_gguf(file, {}, entries, [part, part])
    assert [*GGUFFile(path).entries] == ["a", "b"]
    content, of_second = path.read_bytes(), struct.pack("<IQ", F32.type_id, 512)
    assert content.count(of_second) == 1
    path.write_bytes(content.replace(of_second, bytes(12))[:-512])
    with pytest.raises(ArbError, match="overlap"):
        GGUFFile(path)


def test_bytes_are_written_as_byte_level_tokenizers_write_them():
    """Printable bytes stand for themselves; the others follow from 256 on, in their order."""
    symbols = byte_symbols()
    shown = [chr(b).isprintable() and not chr(b).isspace() for b in range(256)]
    assert [len(symbol) for symbol in symbols] == [1] * 256
    assert [symbol == chr(b) for b, symbol in enumerate(symbols)] == shown
    others = [symbol for symbol, is_shown in zip(symbols, shown, strict=True) if not is_shown]
    assert others == [chr(256 + place) for place in range(68)]
    assert [symbols[b] for b in b" \n\x7f\xa0\xad"] == ["Ġ", "Ċ", "ġ", "ł", "Ń"]


@pytest.mark.parametrize(("scale_type", "of_trits", "of_digits"), [
    ("T4", "BF16", "BF16"), ("T16", "BF16", "BF16"), ("T32", "Q4_0", "Q8_0"),
    ("T64", "Q2_0", "Q8_0"), ("T96", "Q4_0", "Q8_0"), ("T128", "Q2_0", "Q8_0"),
])  # fmt: skip
def test_smallest_type_is_that_of_groups_and_digits(scale_type, of_trits, of_digits):
    for digits, name in (("trit", of_trits), ("all", of_digits)):
        config = preset("tiny", scale_type=scale_type, digits=digits)
        assert gguf.smallest_type(config).name == name
    model = build_model(replace(config, digits="trit", symbol_digits="all"))
    tensors = model.embedding.weight, model.head.weight, model.blocks[0].mlp.output.weight
    names = [gguf.smallest_type(model.config, tensor).name for tensor in tensors]
    assert names == [of_digits, of_digits, of_trits]


def test_every_key_has_its_value(saved, tmp_path):
    heads = {"attention.heads": 4, "attention.kv_heads": 2, "attention.head_width": 24}
    settings = {"layers": 3, "ctx": 48, "fields": heads | {"attention.rotary.base": 500.0}}
    weights, _ = write_gguf(saved, tmp_path / "model.gguf", **settings)
    keys = GGUFFile(tmp_path / "model.gguf").keys
    tokens = keys.pop("tokenizer.ggml.tokens")
    assert [tokens.index(letter) for letter in "!~¡ÿĀ"] == [0x21, 0x7E, 0xA1, 0xFF, 0]
    assert keys.pop("tokenizer.ggml.token_type") == [1] * 256
    assert keys.pop("qwen3.attention.layer_norm_rms_epsilon") == pytest.approx(1e-6)
    assert keys == {
        "general.architecture": "qwen3", "general.name": "name", "general.quantization_version": 2,
        "qwen3.context_length": 48, "qwen3.embedding_length": 64, "qwen3.block_count": 3,
        "qwen3.feed_forward_length": 192, "qwen3.attention.head_count": 4,
        "qwen3.attention.head_count_kv": 2, "qwen3.attention.key_length": 24,
        "qwen3.attention.value_length": 24, "qwen3.rope.freq_base": 500.0,
        "qwen3.vocab_size": 256, "tokenizer.ggml.model": "gpt2", "tokenizer.ggml.pre": "gpt-2",
        "tokenizer.ggml.merges": [], "tokenizer.ggml.bos_token_id": 0,
        "tokenizer.ggml.eos_token_id": 0, "tokenizer.ggml.add_bos_token": False,
        "tokenizer.ggml.add_eos_token": False, "arb.step": 7,
        "arb.origin": weights.checkpoint.digest,
    }  # fmt: skip


def biased(**about) -> ModelConfig:
    config = preset("tiny", sub_norms=False)
    mixer = {"bias": True, "output_bias": True, "query_key_norm": "none"} | about
    blocks = (replace(block, mixer=replace(block.mixer, **mixer)) for block in config.main.blocks)
    return replace(config, stages=(replace(config.main, blocks=tuple(blocks)),))


def test_rows_of_queries_and_keys_are_turned_with_their_biases():
    config = biased()
    shape = known_shape(config)
    assert shape.architecture.interleaved
    with torch.device("meta"):
        model = build_model(config)
    orders = [gguf._row_orders(source, shape, shape.architecture) for source in sources(model)]
    assert {name for order in orders for name in order} == {
        f"blk.{index}.attn_{part}.{kind}"
        for index in range(config.layers) for part in "qk" for kind in ("weight", "bias")
    }  # fmt: skip


def test_heads_of_another_width_and_bounds_of_yarn_are_refused_where_llama_cpp_has_none(
    saved, tmp_path
):
    for width in (None, 16):
        config = biased(output_bias=False, head_width=width)
        architecture = known_shape(config).architecture
        assert architecture.gguf == "qwen2"
        said = pytest.raises(ArbError, match="no heads of 16 numbers") if width else nullcontext()
        with said:
            gguf.check_architecture(config, architecture)
    with pytest.raises(ArbError, match="no bounds of yarn other than 1 and 32"):
        write_gguf(saved, tmp_path / "model.gguf", **rotary(**YARN, low=0.5))


YARN = {"scaling": "yarn", "factor": 4.0, "original_ctx": 256}
"""Of a model with a context of 32: some pairs are scaled in part, others wholly or not at all."""


def rotary(**fields):
    return {"fields": {f"attention.rotary.{name}": value for name, value in fields.items()}}


@pytest.mark.parametrize(("kind", "options", "bound"), [
    ("f32", {}, 1e-5), ("f32", {"scale_type": "T6"}, 1e-5), ("bf16", {}, 0.05),
    ("f16", {}, 0.01), ("q8_0", {}, 0.1), ("q4_0", {}, 0.1), ("q2_0", {"scale_type": "T64"}, 0.1),
    ("f32", rotary(**YARN), 1e-5),
], ids=str)  # fmt: skip
def test_llama_cpp_predicts_the_same(saved, tmp_path, kind, options, bound):
    pytest.importorskip("xllamacpp", reason="needs the extra `export-test`")
    from benchmarks.llama_cpp import Llama

    path = tmp_path / "model.gguf"
    write_gguf(saved, path, kind, **options)
    model = load_model(tmp_path, device="cpu", compute="fp32")
    with torch.no_grad():
        ours = model(torch.tensor([list(TEXT)])).double().log_softmax(-1)[0]
    llama = Llama(path, 64)
    for length in (1, 2, len(TEXT)):
        assert (llama.log_probabilities(TEXT[:length]) - ours[length - 1]).abs().max() < bound


@pytest.mark.parametrize(("name", "options", "said"), [
    ("tiny", {}, "--no-sub-norms"),
    ("arb-tiny", "graph", "--to hf` or `--to safetensors"),
    ("tiny", {"streams": 2, "sub_norms": False}, "--to safetensors"),
    ("tiny", {"bias": True}, "norms of queries and keys, and biases of the projections to them al"),
    ("tiny", {"output_bias": True}, "biases of the output projection alone"),
    ("tiny", {"sink": True}, "with sinks"),
    ("tiny", {"rotary.share": 0.5}, "rotary positions that are partial"),
])  # fmt: skip
def test_model_that_gguf_cannot_hold_is_refused(saved, tmp_path, small_graph, name, options, said):
    if options == "graph":
        options = {k: small_graph[k] for k in small_graph.keys() - {"preset", "batch"}}
    elif options and "streams" not in options:
        fields = {f"attention.{field}": value for field, value in options.items()}
        options = {"fields": fields, "sub_norms": False}
    weights = load_weights(saved(name, **options), print)
    with pytest.raises(ArbError, match="GGUF has no architecture") as caught:
        gguf.write_model(tmp_path / "model.gguf", weights, "name", None)
    assert said in f"{caught.value} {caught.value.hint}"
    assert not (tmp_path / "model.gguf").exists()


def test_ends_of_texts_are_those_that_generation_has(tmp_path):
    """It says by which tokens an answer ends; what it leaves out the model's own settings say."""
    of_model = {"bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0}
    write_json(tmp_path / CONFIG, of_model)
    assert _special_ids(tmp_path) == {"bos": 1, "eos": 2, "padding": 0}
    write_json(tmp_path / GENERATION, {"eos_token_id": [7, 2], "bos_token_id": -1})
    assert _special_ids(tmp_path) == {"bos": 1, "eos": 7, "padding": 0}


BYTEWISE = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": False,
            "use_regex": True}  # fmt: skip
SPLIT = {"type": "Split", "pattern": {"Regex": [*PATTERNS][1]}, "behavior": "Isolated",
         "invert": False}  # fmt: skip
TOKENIZER = {
    "version": "1.0", "truncation": None, "padding": None, "added_tokens": [], "normalizer": None,
    "pre_tokenizer": BYTEWISE, "post_processor": None, "decoder": BYTEWISE,
    "model": {"type": "BPE", "dropout": None, "unk_token": None, "continuing_subword_prefix": None,
              "end_of_word_suffix": None, "fuse_unk": False, "byte_fallback": False, "merges": [],
              "vocab": {symbol: index for index, symbol in enumerate(gguf.byte_symbols())}},
}  # fmt: skip
END = {"id": 256, "content": "<end>", "single_word": False, "lstrip": False, "rstrip": False,
       "normalized": False, "special": True}  # fmt: skip


def sequence(*steps):
    return {"type": "Sequence", "pretokenizers": [*steps]}


@pytest.mark.parametrize(
    ("changed", "outcome"),
    [
        ({}, "gpt-2"),
        ({"normalizer": {"type": "NFC"}}, "gpt-2"),
        ({"pre_tokenizer": sequence(SPLIT, BYTEWISE | {"use_regex": False})}, "qwen2"),
        ({"pre_tokenizer": sequence({"type": "Digits", "individual_digits": True}, BYTEWISE)},
         "smollm"),
        ({"pre_tokenizer": BYTEWISE | {"add_prefix_space": True}}, "pre_tokenizer"),
        ({"pre_tokenizer": BYTEWISE | {"use_regex": False}}, "pre_tokenizer"),
        ({"pre_tokenizer": sequence({"type": "Digits", "individual_digits": False}, BYTEWISE)},
         "pre_tokenizer"),
        ({"pre_tokenizer": sequence(SPLIT, BYTEWISE)}, "pre_tokenizer"),
        ({"pre_tokenizer": sequence(SPLIT, SPLIT, BYTEWISE | {"use_regex": False})},
         "pre_tokenizer"),
        ({"pre_tokenizer": sequence(SPLIT | {"behavior": "Removed"},
                                    BYTEWISE | {"use_regex": False})}, "pre_tokenizer"),
        ({"normalizer": {"type": "Lowercase"}}, "a normalizer `Lowercase`"),
        ({"model": TOKENIZER["model"] | {"end_of_word_suffix": "</w>"}}, "`end_of_word_suffix`"),
        ({"added_tokens": [END | {"rstrip": True}]}, "`rstrip` of a token"),
        ({"pre_tokenizer": {"type": "Whitespace"}}, "no rules"),
        ({"model": TOKENIZER["model"] | {"type": "Unigram"}}, "not byte-level BPE"),
        ({"model": TOKENIZER["model"] | {"byte_fallback": True}}, "not byte-level BPE"),
        ({"model": TOKENIZER["model"] | {"vocab": {"a": 257}}}, "that the model lacks"),
    ],
    ids=str,
)  # fmt: skip
def test_what_gguf_cannot_hold_of_a_tokenizer_is_refused(changed, outcome, tmp_path):
    pytest.importorskip("tokenizers", reason="needs the package tokenizers")
    path = tmp_path / "tokenizer.json"
    write_json(path, TOKENIZER | changed)
    config = SimpleNamespace(vocabulary=257)
    if outcome in ("gpt-2", "qwen2", "smollm"):
        assert token_keys(path, None, config)["tokenizer.ggml.pre"][1] == outcome
    else:
        with pytest.raises(ArbError, match=re.escape(outcome)):
            token_keys(path, None, config)


def test_template_and_ends_of_a_tokenizer_are_those_that_arb_reads(tmp_path):
    """Also of a list of templates, and of tokens that only the settings name."""
    pytest.importorskip("tokenizers", reason="needs the package tokenizers")
    path = tmp_path / "tokenizer.json"
    write_json(path, TOKENIZER | {"added_tokens": [END, END | {"id": 257, "content": "<turn>"}]})
    templates = [{"name": "default", "template": "a"}, {"name": "rag", "template": "b"}]
    write_json(
        tmp_path / "tokenizer_config.json", {"eos_token": "<end>", "chat_template": templates}
    )
    write_json(tmp_path / GENERATION, {"eos_token_id": [257, 256]})
    config = SimpleNamespace(vocabulary=258)
    keys = token_keys(path, None, config)
    named = {name: keys[f"tokenizer.ggml.{name}_token_id"][1] for name in ("eos", "eot")}
    assert named == {"eos": 256, "eot": 257}
    assert keys["tokenizer.chat_template"][1] == "a"
    assert keys["tokenizer.ggml.add_bos_token"][1] is False
    assert stop_tokens(Tokenizer.read(path), path) == [256, 257]
    for name, end in ("tokenizer_config.json", 257), (GENERATION, 256):  # the first special token
        (tmp_path / name).unlink()
        assert token_keys(path, None, config)["tokenizer.ggml.eos_token_id"][1] == end
    write_json(path, TOKENIZER)
    keys = token_keys(path, None, SimpleNamespace(vocabulary=len(TOKENIZER["model"]["vocab"])))
    assert keys["tokenizer.ggml.eos_token_id"][1] == TOKENIZER["model"]["vocab"]["Ā"]
