"""The library does what its page says, and refuses inputs in a sentence."""

import re
from functools import partial
from pathlib import Path

import pytest
import torch
from states import default_dtype

import arbcli
from arbcli.base.errors import ArbError
from arbcli.generation.load import load_model

PAGE = Path(__file__).parents[1] / "docs" / "library.md"
SMALL = {"dim": 16, "layers": 1, "heads": 1, "ffn": 16, "ctx": 8, "batch": 2, "device": "cpu"}


def test_every_example_of_the_page_but_the_first_runs(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "book.txt").write_bytes(b"It was the best of bytes, it was the worst. " * 60)
    _, *examples = re.findall(r"```python\n(.*?)```", PAGE.read_text(), re.DOTALL)
    assert len(examples) >= 10
    names: dict = {}
    for example in examples:
        exec(compile(example, str(PAGE), "exec"), names)


def test_model_takes_any_integers_and_refuses_other_ids_in_a_sentence(finished_run):
    model = load_model(finished_run, device="cpu")
    ids = torch.tensor([list(b"It was")])
    with torch.no_grad():
        for dtype in (torch.uint8, torch.int16, torch.int32):
            assert torch.equal(model(ids.to(dtype)), model(ids))
    for wrong, message in (
        (ids[0], r"shape \(batch, length\), got \(6,\)"),
        (ids.float(), "integers, got torch.float32"), (ids > 0, "integers, got torch.bool"),
    ):  # fmt: skip
        with pytest.raises(ValueError, match=message):
            model(wrong)
    dense = arbcli.dense_weights(model)
    assert dense.keys() == model.weights().keys()
    assert torch.equal(dense["head.weight"], model.weights()["head.weight"].weight(torch.float32))


CONTRADICTIONS = (
    {"tscale_type": "T8", "scale_type": "T32"}, {"wire": "int8", "reduce_dtype": "int12"},
    {"weights": "int8", "digits": "trit"}, {"optimizer": "sign", "direction": "factored"},
    {"direction": "factored", "optimizer": "muon"},
)  # fmt: skip


@pytest.mark.parametrize("given", CONTRADICTIONS)
def test_names_of_one_setting_have_one_value(given):
    told = " and ".join(f"`{name}={value}`" for name, value in given.items())
    with pytest.raises(ArbError, match=told) as caught:
        arbcli.configure(**SMALL, **given)
    assert caught.value.hint == "give one of them"


def test_texts_are_made_in_deterministic_mode(monkeypatch):
    modes = []

    def make(*_, **__):
        modes.append(torch.get_deterministic_debug_mode())
        return []

    monkeypatch.setattr("arbcli.generation.generation.generate", make)
    monkeypatch.setattr("arbcli.generation.batch.generate_batch", make)
    assert arbcli.generate("model", "", 5) == b""  # a tokenizer may have tokens before it
    assert arbcli.generate("model", [], 5) == []
    assert modes == [2, 2]


def test_options_reach_the_evaluation_and_the_generation(finished_run, text):
    model = arbcli.load(finished_run, device="cpu", compute="bf16")
    report = arbcli.evaluate(model, text, stride=12, batch=64, kv="int8")
    assert (report.stride, report.kv) == (12, "int8")
    generate = partial(arbcli.generate, model, "It was", 9)
    with default_dtype(torch.bfloat16):  # on which no text depends
        texts = generate(), arbcli.generate(model, ["It was"], 9)
    assert texts == (generate(), arbcli.generate(model, ["It was"], 9))
    likeliest = generate(temperature=0)
    for choice in ({"top_k": 1}, {"top_p": 1e-9}):
        assert generate(temperature=9, **choice) == likeliest
    assert len({likeliest, generate(temperature=9), generate(temperature=9, seed=1)}) == 3
    for refused, message in (
        (partial(arbcli.evaluate, model, text, batch=0), "`batch` is 0"),
        (partial(arbcli.evaluate, model, text, kv="int4"), "`kv` is `int4`"),
        (partial(arbcli.evaluate, model, text, field="text"), "only applies to records"),
        (partial(generate, kv="int8-keys"), "`kv` is `int8-keys`"),
        (partial(generate, batch=1), "`batch` is for a list of prompts"),
        (partial(generate, ahead=2.5), r"`ahead` is 2\.5"),
        (partial(arbcli.generate, model, ["a"], 5, ahead=2), "`ahead` is for a single prompt"),
        (partial(arbcli.generate, model, "a", -1), "`length` is -1"),
        (partial(arbcli.configure, no_sub_norms=True), "no setting is named `no_sub_norms`"),
    ):
        with pytest.raises(ArbError, match=message):
            refused()
    assert arbcli.configure(**SMALL, data=text, val=str(text)).data == (str(text),)
