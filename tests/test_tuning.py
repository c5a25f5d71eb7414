"""A folder for Transformers is tuned in integers and by its peers, and scored on the same texts."""

import json
import shutil
from dataclasses import replace
from unittest import mock

import pytest
import torch
from safetensors.torch import load_file, save_file

from arbcli.data.text import Text
from arbcli.interop.huggingface.folder import WeightFolder
from benchmarks.code_text import chats
from tests.folders import plain_folder

with mock.patch.object(torch, "compile", lambda function=None, **_: function or (lambda f: f)):
    from benchmarks import tuning

SYMBOLS = 270
TEMPLATE = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
FUNCTION = '''def double(number: int) -> int:
    """Return twice the number, which is the sum of the number and of itself."""
    result = number + number
    if result != 2 * number:
        raise ArithmeticError("the sum is wrong")
    return result
'''


@pytest.fixture(autouse=True)
def eager(monkeypatch):
    """To import a compiler takes seconds."""
    monkeypatch.setattr(torch, "compile", lambda function, **_: function)


@pytest.fixture
def folder(tmp_path, byte_tokenizer):
    pytest.importorskip("jinja2", reason="needs the package jinja2")
    path = tmp_path / "llama"
    plain_folder(path, vocab_size=SYMBOLS, num_key_value_heads=2, tie_word_embeddings=False)
    weights = load_file(path / "model.safetensors")
    weights["lm_head.weight"] *= 20  # so that losses differ
    save_file(weights, path / "model.safetensors")
    shutil.copy(byte_tokenizer, path)
    special = {"eos_token": "<|im_end|>", "chat_template": TEMPLATE}
    (path / "tokenizer_config.json").write_text(json.dumps(special))
    return path


@pytest.fixture
def texts(tmp_path, monkeypatch):
    monkeypatch.setattr(tuning, "TOKENS", replace(tuning.TOKENS, ctx=64, batch=2))
    monkeypatch.setattr(tuning, "EVAL_BATCHES", 2)
    for name, number in (("QUESTIONS", 16), ("PASSAGE", 24), ("CONTINUATION", 8)):
        monkeypatch.setattr(tuning, name, number)
    path = tmp_path / "texts"
    path.mkdir()
    question = {"role": "user", "content": "how"}
    record = {"messages": [question, {"role": "assistant", "content": "I am fine"}]}
    for part in ("train", "val"):
        (path / f"novels-{part}.txt").write_text("how are you, I am fine. " * 40)
        (path / f"code-{part}.txt").write_text(FUNCTION * 8)
        (path / f"chats-{part}.jsonl").write_text((json.dumps(record) + "\n") * 8)
    return path


def job(kind: str, lr: float, text: str = "novels", part: str = "swept") -> tuning.Job:
    return tuning.Job(part=part, kind=kind, lr=lr, steps=5, batch=2, text=text)


def test_every_way_learns_the_new_text_from_the_same_weights(folder, texts):
    begun = tuning.tune(job("float", 0.0, part="begun"), texts, folder, "cpu")
    assert begun.keys() >= {"new", "new_choices", "old", "old_choices", "chats"}
    in_integers = tuning.tune(job("moment", 0.0, part="begun"), texts, folder, "cpu")
    assert in_integers["new"] == pytest.approx(begun["new"], rel=0.01)
    for kind, lr in (("AdamW", 1e-2), ("moment", 0.5), ("LoRA 16, all matrices", 3e-2)):
        row = tuning.tune(job(kind, lr), texts, folder, "cpu")
        assert row["new"] < 0.95 * begun["new"], kind
        if "curve" in row:
            assert [step for step, _ in row["curve"]] == [1, 2, 3, 4, 5]
    chats = tuning.tune(job("moment", 0.5, "chats"), texts, folder, "cpu")
    assert chats["new"] < 0.95 * begun["chats"]
    assert chats.keys() >= {"novels", "novels_choices", "old"}


@torch.no_grad()
def test_adapters_that_are_merged_have_the_loss_of_the_adapted_model(folder):
    torch.manual_seed(0)
    step = tuning.prepare_plain("LoRA 16, all matrices", 1e-3, folder, "cpu")
    windows = torch.randint(SYMBOLS, (8, 1, 9))
    begun, adapted = [], []
    for scale, losses in ((0.0, begun), (1.0, adapted)):
        for pairs in step.model.factors:
            for pair in pairs.values():
                pair["b"].normal_(0, 1).mul_(scale)
        twin = tuning.float_model(folder, tuning.named_weights(step.model).__getitem__, "cpu")
        for ids in windows:
            both = [float(model.loss(ids[:, :-1], ids[:, 1:])) for model in (step.model, twin)]
            assert both[0] == pytest.approx(both[1], rel=0.01)
            losses.append(both[0])
    assert max(abs(a - b) for a, b in zip(begun, adapted, strict=True)) > 0.5


def test_true_continuation_is_chosen_by_the_lowest_loss(tmp_path):
    (tmp_path / "counting").write_bytes(bytes(range(251)) * 40)
    text = Text([tmp_path / "counting"])

    class Counts:
        sign = 1

        def position_losses(self, ids, targets):
            return self.sign * ((targets - ids) % 251 - 1).abs().float()

    model = Counts()
    assert tuning.choose(model, text, "cpu") > 0.98
    model.sign = -1
    assert tuning.choose(model, text, "cpu") < 0.02


def test_chats_ask_for_docstrings():
    (chat,) = chats(FUNCTION.encode())
    question, answer = (message["content"] for message in chat["messages"])
    assert answer == "Return twice the number, which is the sum of the number and of itself."
    assert "result = number + number" in question
    assert answer not in question
    assert not [*chats(b"no Python"), *chats(b"def short(): return 1")]
    assert not [*chats(FUNCTION.replace("wrong", "<|im_end|>").encode())]


def test_adapters_are_not_tuned_on_chats(folder):
    setting = tuning.setting_of(folder)
    kinds = [{job.kind for job in tuning.jobs([0], setting, text)} for text in ("novels", "chats")]
    assert kinds[0] - kinds[1] == {"LoRA 16, all matrices"}
    assert tuning.setting_of(None) is tuning.BYTES


def test_weights_are_named_as_in_the_folder(folder):
    step = tuning.prepare_plain("bf16 AdamW", 1e-3, folder, "cpu")
    stored = WeightFolder(folder)
    for name, weight in tuning.named_weights(step.model).items():
        assert torch.equal(weight.float(), stored.read(name).view_as(weight)), name


def test_model_of_bytes_is_written_as_a_folder_and_tuned(texts, tmp_path, monkeypatch):
    monkeypatch.setattr(tuning, "BYTES", replace(tuning.BYTES, ctx=64, batch=2))
    shape = tuning.Shape(
        layers=1, dim=32, heads=2, kv_heads=2, head_width=16, ffn=48, vocabulary=256, tied=False
    )
    folder = tmp_path / "bytes"
    tuning.pretrain(texts, folder, 2, "cpu", shape=shape, windows=2)
    assert tuning.Shape.read(folder) == shape
    assert tuning.setting_of(folder) is tuning.BYTES
    begun, tuned = (
        tuning.tune(job(kind, 3e-3, part=part), texts, folder, "cpu")
        for kind, part in (("float", "begun"), ("bf16 AdamW", "others"))
    )
    assert tuned["new"] < begun["new"]
    assert {"new", "old"} <= begun.keys()
    assert "chats" not in begun
