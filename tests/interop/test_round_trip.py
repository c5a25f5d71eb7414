"""A Llama 3 is imported, tuned, exported, and run elsewhere: the same predictions.

Its tokenizer is trained here, and splits text by the pattern of its kind.
"""

import json
from importlib.util import find_spec

import pytest
import torch
from folders import random_model

from arbcli.base.run_files import COMPANIONS
from arbcli.generation.load import load_model, load_weights
from arbcli.generation.tokens import encode_prompt
from arbcli.interop.gguf.block_types import F32
from arbcli.interop.gguf.container import GGUFFile
from arbcli.interop.gguf.tokens import CONTROL, NORMAL, PATTERNS, UNUSED, token_keys

TEXT = "def main(self):\n    return 1234  # naïve text, that doesn't end\n\n" * 40
PROMPT = "def main 1234 naïve\n  it's"
NUM_IDS = 8
TEMPLATE = "{% for message in messages %}{{ message['content'] }}{% endfor %}"


def make_tokenizer(transformers, rules: str):
    tokenizers = pytest.importorskip("tokenizers", reason="needs the extra `tokens`")
    from tokenizers import decoders, models, pre_tokenizers, processors, trainers

    pattern = next(pattern for pattern, name in PATTERNS.items() if name == rules)
    tokenizer = tokenizers.Tokenizer(models.BPE())
    split = pre_tokenizers.Split(tokenizers.Regex(pattern), "isolated")
    in_bytes = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([split, in_bytes])
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    about = {"vocab_size": 290, "initial_alphabet": alphabet, "show_progress": False}
    tokenizer.train_from_iterator([TEXT], trainers.BpeTrainer(**about))
    tokenizer.add_special_tokens(["<begin>", "<end>"])
    if rules == "llama-bpe":
        begin = [("<begin>", tokenizer.token_to_id("<begin>"))]
        template = processors.TemplateProcessing(single="<begin> $A", special_tokens=begin)
        in_bytes = processors.ByteLevel(trim_offsets=False)
        tokenizer.post_processor = processors.Sequence([in_bytes, template])  # as Llama 3 has it
    whole = transformers.PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, bos_token="<begin>", eos_token="<end>"
    )
    whole.chat_template = TEMPLATE
    return whole


def test_tuned_model_has_the_same_logits_elsewhere(transformers, tmp_path, arb_done, monkeypatch):
    monkeypatch.chdir(tmp_path)
    folder = tmp_path / "folder"
    tokenizer = make_tokenizer(transformers, "llama-bpe")
    random_model(transformers, "Llama 3", bos_token_id=290, eos_token_id=291).save_pretrained(
        folder
    )
    tokenizer.save_pretrained(folder)
    (tmp_path / "text").write_text(TEXT)
    rules = ["--mlp-rule", "nibble"]
    for words in (
        ["import", "folder", "--out", "run", *rules],
        ["train", "--init-from", "run", "--data", "text", "--steps", "10", "--batch", "2", "--ctx",
         "32", "--compute", "fp32", "--device", "cpu", "--out", "tuned", "--eval-every", "0"],
        ["export", "tuned", "--to", "hf", "--out", "back"],
        ["export", "tuned", "--to", "gguf", "--type", "f32", "--out", "back.gguf"],
        ["import", "back", "--out", "again", *rules],
    ):  # fmt: skip
        arb_done(*words)
    ours = load_model(tmp_path / "tuned", device="cpu", compute="fp32")
    before = load_model(tmp_path / "run", device="cpu", compute="fp32")
    again = load_model(tmp_path / "again", device="cpu", compute="fp32")
    back = transformers.AutoTokenizer.from_pretrained(tmp_path / "back")
    ids = back(PROMPT)["input_ids"]
    assert ids == tokenizer(PROMPT)["input_ids"]
    assert back.chat_template == TEMPLATE
    assert encode_prompt(ours, PROMPT.encode()) == ids
    assert len(ours.tokenizer.beginning) == 1
    theirs = transformers.AutoModelForCausalLM.from_pretrained(
        tmp_path / "back", dtype=torch.float32
    )
    assert (theirs.generation_config.bos_token_id, theirs.config.eos_token_id) == (290, 291)
    keys = GGUFFile(tmp_path / "back.gguf").keys
    context = theirs.config.max_position_embeddings
    assert ours.config.ctx == keys["llama.context_length"] == context > 32  # that of tuning
    tokens = theirs.generate(
        torch.tensor([ids]), max_new_tokens=NUM_IDS, do_sample=False, eos_token_id=None
    )
    logits = ours(tokens)
    assert torch.equal(again(tokens), logits)
    assert (before(tokens) - logits).abs().max() > 0.1
    close = {"rtol": 0, "atol": 1e-4}
    torch.testing.assert_close(theirs(tokens).logits, logits, **close)
    scores = logits[0, len(ids) - 1 :].double().log_softmax(-1)
    chosen = scores[:-1].gather(1, tokens[0, len(ids) :, None])
    torch.testing.assert_close(chosen[:, 0], scores[:-1].amax(1), **close)
    compared = arb_done("inspect", "tuned", "--diff", "back.gguf", "--json")
    assert json.loads(compared.stdout)["equal"]  # whatever order rows have there
    if find_spec("xllamacpp") is None:
        pytest.skip("the rest needs the extra `export-test`")
    from benchmarks.llama_cpp import Llama

    llama = Llama(tmp_path / "back.gguf", 64)
    torch.testing.assert_close(llama.scores(tokens[0].tolist()), scores[-1], **close)
    torch.testing.assert_close(llama.scores(ids), scores[0], **close)
    assert llama.scores(PROMPT).equal(llama.scores(ids))  # its own tokens of the text


def test_file_describes_the_tokens(transformers, tmp_path, arb_done, monkeypatch):
    monkeypatch.chdir(tmp_path)
    tokenizer = make_tokenizer(transformers, "llama-bpe")
    model = random_model(transformers, "Llama 3", bos_token_id=290, eos_token_id=[291, 3])
    model.save_pretrained(tmp_path / "folder")
    tokenizer.save_pretrained(tmp_path / "folder")
    arb_done("import", "folder", "--out", "run")
    arb_done("export", "run", "--to", "gguf", "--out", "it.gguf")
    file = GGUFFile(tmp_path / "it.gguf")
    assert file.entries["rope_freqs.weight"].kind is F32
    keys = file.keys
    tokens = keys["tokenizer.ggml.tokens"]
    assert len(tokens) == 320
    assert [tokens[index] for index in (290, 291, 292, 319)] == [
        "<begin>", "<end>", "[PAD292]", "[PAD319]"
    ]  # fmt: skip
    kinds = keys["tokenizer.ggml.token_type"]
    assert kinds == [NORMAL] * 290 + [CONTROL] * 2 + [UNUSED] * 28
    of_bpe = json.loads(tokenizer.backend_tokenizer.to_str())["model"]
    assert all(tokens[index] == text for text, index in of_bpe["vocab"].items())
    assert keys["tokenizer.ggml.merges"] == [" ".join(pair) for pair in of_bpe["merges"]]
    ends = [keys[f"tokenizer.ggml.{name}_token_id"] for name in ("bos", "eos")]
    assert ends == [290, 291]
    assert keys["tokenizer.ggml.add_bos_token"] is True
    assert keys["tokenizer.chat_template"] == TEMPLATE
    assert (keys["tokenizer.ggml.model"], keys["tokenizer.ggml.pre"]) == ("gpt2", "llama-bpe")

    path, companions = tmp_path / "run" / "tokenizer.json", tmp_path / "run" / COMPANIONS
    config = load_weights(tmp_path / "run", print).model.config
    for companion in [*companions.iterdir()]:  # each may be absent
        if companion.name != "config.json":
            companion.unlink()
            has_template = "tokenizer.chat_template" in token_keys(path, companions, config)
            assert has_template == (companions / "chat_template.jinja").exists()


def test_model_of_tokens_from_scratch_is_exported(transformers, tmp_path, arb_here, monkeypatch):
    monkeypatch.chdir(tmp_path)
    tokenizer = make_tokenizer(transformers, "qwen2")
    tokenizer.save_pretrained(tmp_path / "folder")
    (tmp_path / "text").write_text(TEXT)
    model = "--preset tiny --layers 1 --dim 64 --heads 2 --ffn 96 --ctx 32 --no-sub-norms"
    for words in (
        f"train {model} --tokenizer folder/tokenizer.json --data text --steps 2 --batch 2"
        " --compute fp32 --device cpu --weights int8 --out run --eval-every 0",
        "export run --to hf --out far/back",
        "export run --to gguf --type f32 --out far/back.gguf",
    ):
        done = arb_here(*words.split())
        assert done.returncode == 0, done.stderr
    ours = load_model(tmp_path / "run", device="cpu", compute="fp32")
    back = transformers.AutoTokenizer.from_pretrained(tmp_path / "far" / "back")
    ids = back(PROMPT)["input_ids"]
    assert ids == encode_prompt(ours, PROMPT.encode()) == tokenizer(PROMPT)["input_ids"]
    theirs = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "far" / "back")
    assert theirs.config.vocab_size == ours.config.vocabulary
    end = tokenizer.convert_tokens_to_ids("<end>")
    assert (back.eos_token, theirs.generation_config.eos_token_id) == ("<end>", [end])
    (tmp_path / "run" / "tokenizer.json").write_text("{}")
    done = arb_here("export", "run", "--to", "hf", "--out", "other")
    assert "is not the tokenizer of" in done.stderr
