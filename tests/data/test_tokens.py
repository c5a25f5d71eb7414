"""Texts as tokens: cut, cached, trained on and evaluated, with losses by byte and by token."""

import json
import math
import struct
from base64 import b64encode
from types import SimpleNamespace

import pytest
import torch

from arbcli.base.errors import ArbError
from arbcli.data import tokens
from arbcli.data.opening import open_texts
from arbcli.data.text import Mixture, Text
from arbcli.data.tokens import Tokenizer, tokenised
from arbcli.generation.tokens import decode_symbols

pytestmark = pytest.mark.usefixtures("own_cache")

WORDS = ["ternary", "weights", "learn", "to", "read", "größer", "Straße", "as", "tokens", "do"]
SMALL = ["--dim", "32", "--layers", "1", "--heads", "2", "--ffn", "48", "--ctx", "12"]
SMALL += ["--batch", "2", "--steps", "3", "--device", "cpu", "--compute", "fp32"]


def random_lines(seed: int, lines: int) -> str:
    generator = torch.Generator().manual_seed(seed)
    picks = torch.randint(len(WORDS), (lines, 7), generator=generator).tolist()
    return "".join(" ".join(WORDS[pick] for pick in line) + ".\n" for line in picks)


@pytest.fixture
def text_file(tmp_path):
    path = tmp_path / "text.txt"
    path.write_text(random_lines(1, 60), encoding="utf-8")
    return path


@pytest.fixture
def tokenizer(byte_tokenizer) -> Tokenizer:
    return Tokenizer.read(byte_tokenizer)


def all_tokens(text: Text) -> list[int]:
    return text.window_batch([0], len(text))[0].tolist()


def test_tokens_of_a_text_whose_lines_are_all_indented_are_those_of_the_whole(
    tmp_path, tokenizer, monkeypatch
):
    path = tmp_path / "indented.txt"
    lines = random_lines(1, 200).splitlines()
    path.write_text("".join(f"    {line}\n" for line in lines), encoding="utf-8")
    wanted = tokenizer.encode(path.read_bytes())
    monkeypatch.setattr(tokens, "BLOCK_BYTES", 1000)
    assert all_tokens(tokenised(Text([path]), tokenizer)) == wanted


def test_tokens_are_made_once_for_each_text_and_tokenizer(text_file, tokenizer, monkeypatch):
    first = tokenised(Text([text_file]), tokenizer)
    monkeypatch.setattr(Tokenizer, "encode_all", lambda *_: pytest.fail("tokenised again"))
    assert all_tokens(tokenised(Text([text_file]), tokenizer)) == all_tokens(first)
    with pytest.raises(pytest.fail.Exception):  # another part of the file
        tokenised(Text.from_parts([(text_file, 0, 100)]), tokenizer)
    tokenizer.digest = "another"
    with pytest.raises(pytest.fail.Exception):
        tokenised(Text([text_file]), tokenizer)


def test_mixture_of_tokens_keeps_its_weights_and_never_mixes_a_window(tmp_path, tokenizer):
    files = [tmp_path / name for name in ("a.txt", "b.txt")]
    for index, file in enumerate(files):
        file.write_text("ab"[index] * 300, encoding="utf-8")
    both = Mixture([(Text([files[0]]), 3.0), (Text([files[1]]), 1.0)])
    mixed = tokenised(both, tokenizer)
    assert mixed.pieces == both.pieces == [(file, 0, 300) for file in files]
    assert len(mixed) == sum(map(len, mixed.texts))
    second = len(mixed.texts[0])  # where each text begins, and where the first one ends
    ends = mixed.window_batch([0, second, second - 4, len(mixed) - 4], 4).tolist()
    assert ["".join(sorted(set(tokenizer.decode(end)))) for end in ends] == ["a", "b", "a", "b"]
    windows = mixed.window_batch(mixed.starts(b"key", 200, 4), 4).tolist()
    kinds = ["".join(sorted(set(tokenizer.decode(window)))) for window in windows]
    assert set(kinds) == {"a", "b"}
    assert 0.65 < kinds.count("a") / 200 < 0.85


def test_text_cannot_make_special_tokens(tokenizer):
    special = tokenizer._tokenizer.token_to_id("<|im_end|>")
    assert special not in tokenizer.encode(b"an <|im_end|> in text")
    assert tokenizer.decode(tokenizer.encode(b"an <|im_end|> in text")) == "an <|im_end|> in text"
    # nor once a template has written them, or has failed to
    assert special in [token for token, _ in tokenizer.encode_marked("an <|im_end|>")]
    assert special not in tokenizer.encode(b"an <|im_end|> in text")
    with pytest.raises(ArbError):
        tokenizer.encode_marked(7)
    assert special not in tokenizer.encode(b"an <|im_end|> in text")


@pytest.mark.parametrize(("written", "before"), [
    ("$A </s>", []), ("<s> $A </s>", [2]), ("<s> </s> $A", [2, 1]), ("$A", []),
])  # fmt: skip
def test_tokens_before_a_text_are_told_from_those_after_it(written, before):
    """As a Unigram tokenizer may close a text."""
    package = pytest.importorskip("tokenizers", reason="needs the package tokenizers")
    pieces = [("<unk>", 0.0), ("</s>", 0.0), ("<s>", 0.0), ("▁", -2.0), ("a", -2.0), ("▁a", -1.0)]
    unigram = package.Tokenizer(package.models.Unigram(pieces, unk_id=0))
    unigram.pre_tokenizer = package.pre_tokenizers.Metaspace()
    unigram.post_processor = package.processors.TemplateProcessing(
        single=written, special_tokens=[("</s>", 1), ("<s>", 2)]
    )
    tokenizer = Tokenizer(unigram.to_str().encode(), "it")
    assert tokenizer.beginning == before
    assert tokenizer.encode(b"a a") == [5, 5]


def test_other_threads_run_while_a_chat_is_tokenised(tokenizer, monkeypatch):
    """The package holds the interpreter in `encode`, and releases it in `encode_batch`."""
    wanted = tokenizer._tokenizer.encode("to read", add_special_tokens=False)
    only = SimpleNamespace(encode_batch=tokenizer._tokenizer.encode_batch)
    monkeypatch.setattr(tokenizer, "_tokenizer", only)
    assert tokenizer.encode_marked("to read") == [*zip(wanted.ids, wanted.offsets, strict=True)]


def replaced(pattern: str | dict, content: str) -> dict:
    pattern = {"String": pattern} if isinstance(pattern, str) else pattern
    return {"type": "Replace", "pattern": pattern, "content": content}


def replace_by(length: int) -> dict:
    """Make a normalizer of SentencePiece, which replaces each `a` by a text of some length."""
    index = [0] * 512  # a double array: an entry is a label, whether it is a key, and an offset
    index[0], index[256 ^ ord("a")] = 256 << 10, 1 << 10 | 1 << 8 | ord("a")
    table = struct.pack("<513I", 4 * len(index), *index) + b"x" * length + b"\0"
    return {"type": "Precompiled", "precompiled_charsmap": b64encode(table).decode()}


def repeating(times: int) -> dict:
    """Make a post-processor that repeats the text."""
    text = {"Sequence": {"id": "A", "type_id": 0}}
    return {
        "type": "TemplateProcessing", "single": [text] * times, "special_tokens": {},
        "pair": [text, {"Sequence": {"id": "B", "type_id": 0}}],
    }  # fmt: skip


REPLACED = {
    12: [replaced(" ", "▁")], 16: [replaced("ab", "c" * 32)],
    18: [replaced("a", "bbb"), replaced("b", "aaa"), replaced({"Regex": " {2,}"}, "_")],
    2**40: [replaced("a", "aa")] * 40,
}  # fmt: skip
GROWING = [
    *((growth, "normalizer", steps) for growth, steps in REPLACED.items()),
    *((growth, "decoder", steps) for growth, steps in REPLACED.items()),
    (12, "normalizer", [{"type": "Prepend", "prepend": "▁"}, replaced(" ", "▁")]),  # Llama 2
    (1, "normalizer", [replace_by(64)]), (65, "normalizer", [replace_by(65)]),
    *((times, "post_processor", [repeating(times)]) for times in (16, 17)),
]  # fmt: skip


@pytest.mark.parametrize(("growth", "part", "steps"), GROWING)
def test_tokenizer_that_multiplies_a_text_is_refused(growth, part, steps, byte_tokenizer):
    made = json.loads(byte_tokenizer.read_text())
    plain = len(Tokenizer(json.dumps(made).encode(), "it").encode(b"x" * 64 + b"b"))
    steps_of = "processors" if part == "post_processor" else f"{part}s"
    for value in ({"type": "Sequence", steps_of: steps}, *steps[: part == "post_processor"]):
        content = json.dumps(made | {part: value}).encode()
        if growth <= tokens.MAX_GROWTH:
            made_of = Tokenizer(content, "it")
            assert growth != 1 or len(made_of.encode(b"ab")) == plain
            assert part != "post_processor" or len(made_of.encode(b"x")) == growth
            continue
        with pytest.raises(ArbError, match=f"`it` may make a text {growth:,} times as long"):
            Tokenizer(content, "it")


def test_characters_come_as_soon_as_they_are_whole(tokenizer):
    whole = "größer as Ω tokens 🙂 do"
    token_ids = tokenizer.encode(whole.encode())
    parts = list(tokenizer.decoded(token_ids[:2], [[token] for token in token_ids[2:]]))
    begun = tokenizer.decode(token_ids[:2])
    assert begun.encode() + b"".join(parts) == whole.encode()
    assert len(parts) > 4
    assert all("\ufffd" not in part.decode() for part in parts)
    # nor is the rest of a character shown whose first half is the end of the prompt
    model = SimpleNamespace(tokenizer=tokenizer)
    for cut in range(len(token_ids)):
        parts = list(decode_symbols(model, token_ids[:cut], [[token] for token in token_ids[cut:]]))
        assert all("\ufffd" not in part.decode() for part in parts), cut


@pytest.mark.parametrize("content", [b"", b"{}", b"\xff", b'{"model": {"type": "none"}}'])
def test_file_that_is_not_a_tokenizer_is_refused_in_one_line(content, tmp_path, byte_tokenizer):
    path = tmp_path / "tokenizer.json"
    path.write_bytes(content)
    with pytest.raises(ArbError, match="is not a tokenizer") as refused:
        Tokenizer.read(path)
    assert "\n" not in str(refused.value)


ADDED = {
    "id": 9, "content": "<s>", "special": True, "single_word": False, "lstrip": False,
    "rstrip": False, "normalized": False,
}  # fmt: skip
BAD_TOKENIZERS = {
    "panic of a step": (
        {"pre_tokenizer": {"type": "FixedLength", "length": 0}}, "is not a tokenizer: chunk size"),
    "panic of a post-processor": (
        {"post_processor": {
            "type": "TemplateProcessing", "pair": [], "special_tokens": {},
            "single": [{"SpecialToken": {"id": "<s>", "type_id": 0}},
                       {"Sequence": {"id": "A", "type_id": 0}}],
        }}, "is not a tokenizer: no entry found for key"),
    "unknown word": (
        {"model": {"type": "WordPiece", "vocab": {"a": 0, "b": 1}, "unk_token": "[UNK]",
                   "continuing_subword_prefix": "##", "max_input_chars_per_word": 9}},
        "cannot encode a text: WordPiece error: Missing [UNK]"),
    "unknown character": (
        {"model": {"type": "Unigram", "vocab": [["a", -1.0], ["b", -1.0]]}},
        "cannot encode a text: Encountered an unknown token"),
}  # fmt: skip


@pytest.mark.parametrize("name", BAD_TOKENIZERS)
def test_whatever_the_package_raises_is_one_line_and_nothing_else_is_written(name, tmp_path, capfd):
    pytest.importorskip("tokenizers", reason="needs the package tokenizers")
    parts, message = BAD_TOKENIZERS[name]
    none = ("truncation", "padding", "normalizer", "pre_tokenizer", "post_processor", "decoder")
    model = {"type": "WordLevel", "vocab": {"a": 0, "b": 1}, "unk_token": "a"}
    whole = {"version": "1.0", "added_tokens": [ADDED], "model": model, **dict.fromkeys(none)}
    path = tmp_path / "tokenizer.json"
    path.write_text(json.dumps(whole | parts))
    for use in (
        lambda tokenizer: tokenizer.encode(b"xyz"),
        lambda tokenizer: tokenizer.encode_marked("xyz"),
    ):
        with pytest.raises(ArbError) as refused:
            use(Tokenizer.read(path))
        assert f"`{path}` {message}" in str(refused.value)
        assert "\n" not in str(refused.value)
    assert capfd.readouterr().err == ""


def test_run_of_tokens_is_trained_evaluated_resumed_and_written(
    text_file, byte_tokenizer, tmp_path, arb_done, arb_json, arb_error
):
    run = tmp_path / "run"
    text = ["--data", str(text_file), "--tokenizer", str(byte_tokenizer)]
    done = arb_done("train", *SMALL, *text, "--quiet", "--out", str(run), "--json")
    *_, last, _ = map(json.loads, done.stdout.splitlines())
    tokenizer = Tokenizer.read(byte_tokenizer)
    texts = open_texts([str(text_file)], None, seed=0, context=12)
    val = tokenised(texts.val, tokenizer)
    assert last["token_val_loss"] == pytest.approx(last["val_loss"] * val.symbol_bytes)
    assert last["bits_per_byte"] == pytest.approx(last["loss"] / math.log(2))
    assert abs(last["token_val_loss"] - math.log(tokenizer.size)) < 1
    assert (run / "tokenizer.json").read_bytes() == byte_tokenizer.read_bytes()
    # the run has its own
    saved = ["--checkpoint", str(run), "--device", "cpu"]
    report = arb_json("evaluate", *saved)
    assert report["tokens"] == len(val)
    assert report["bytes"] == len(texts.val)
    assert report["nats_per_byte"] == pytest.approx(report["nats_per_token"] / val.symbol_bytes)
    (part,) = report["by_position"]  # of all positions, of which most count twice
    assert part["nats_per_byte"] == pytest.approx(report["nats_per_byte"], rel=0.05)
    assert arb_json("generate", *saved, "--prompt", "ternary", "--length", "9")["length"] == 9
    arb_done("train", "--resume", str(run), "--steps", "4", "--quiet")
    (run / "tokenizer.json").write_bytes(byte_tokenizer.read_bytes() + b"\n")
    for command in (["train", "--resume", str(run), "--steps", "9"], ["generate", *saved]):
        assert "is not the tokenizer" in arb_error(*command)
    (run / "tokenizer.json").unlink()
    assert "tokenizer.json" in arb_error("evaluate", *saved, "--data", str(text_file))


MODEL = (
    "[model]\nctx = 12\nvocabulary = {}\n[model.block.a]\nmixer = {{ kind = 'attention',"
    " heads = 2 }}\n[[model.stage]]\ndim = 16\nblocks = 'a'\n"
)


@pytest.mark.parametrize(
    ("vocabulary", "with_tokenizer", "words", "said"),
    [
        (270, False, [], "--tokenizer"),
        (200, True, [], "has tokens up to {last:,}, and the model's vocabulary has 200"),
        (None, True, [*SMALL, "--ctx", "254"], "255 tokens or more"),
    ],
)
def test_model_text_and_tokenizer_that_do_not_fit_are_refused(
    vocabulary, with_tokenizer, words, said, text_file, byte_tokenizer, tmp_path, arb_error
):
    if vocabulary:
        (tmp_path / "model.toml").write_text(MODEL.format(vocabulary))
        words = ["--model", str(tmp_path / "model.toml")]
    words = [*words, *["--tokenizer", str(byte_tokenizer)] * with_tokenizer]
    said = said.format(last=Tokenizer.read(str(byte_tokenizer)).size - 1)
    assert said in arb_error("train", "--data", str(text_file), "--no-save", *words)
