"""The library does what its page says, and refuses inputs in a sentence."""

import re
from dataclasses import asdict
from pathlib import Path
from unittest import mock

import pytest
import torch

import arbcli
from arbcli.base.errors import ArbError
from arbcli.data.files import Conversion
from arbcli.generation.load import load_model
from arbcli.kernels.runtime.backend import default_backend
from arbcli.training.observer import Observer
from arbcli.training.run import start_run

PAGE = Path(__file__).parents[1] / "docs" / "library.md"
SMALL = {"dim": 16, "layers": 1, "heads": 1, "ffn": 16, "ctx": 8, "batch": 2, "device": "cpu"}


@pytest.fixture(scope="module")
def book(tmp_path_factory) -> Path:
    path = tmp_path_factory.mktemp("library") / "book.txt"
    path.write_bytes(b"It was the best of bytes, it was the worst of bytes. " * 60)
    return path


def test_every_example_of_the_page_runs(book, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "book.txt").write_bytes(book.read_bytes())
    examples = re.findall(r"```python\n(.*?)```", PAGE.read_text(), re.DOTALL)
    examples = [example for example in examples if "transformers" not in example]
    assert len(examples) >= 10
    names: dict = {}
    for example in examples:
        exec(compile(example, str(PAGE), "exec"), names)


@pytest.fixture(scope="module")
def run(book) -> Path:
    config = arbcli.configure(**SMALL, data=[str(book)], steps=1)
    start_run(config, book.parent / "run", Observer())
    return book.parent / "run"


@pytest.mark.parametrize("dtype", [torch.uint8, torch.int16, torch.int32, torch.int64])
def test_model_takes_any_integers(dtype, run):
    model = load_model(run, device="cpu")
    ids = torch.tensor([list(b"It was")])
    with torch.no_grad():
        assert torch.equal(model(ids.to(dtype)), model(ids))


@pytest.mark.parametrize(
    ("ids", "message"),
    [
        (torch.zeros(3, dtype=torch.int64), r"shape \(batch, length\), got \(3,\)"),
        (torch.zeros(1, 3), "integers, got torch.float32"),
        (torch.ones(1, 3, dtype=torch.bool), "integers, got torch.bool"),
    ],
)
def test_wrong_ids_are_refused_in_a_sentence(ids, message, run):
    with pytest.raises(ValueError, match=message):
        load_model(run, device="cpu")(ids)


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


def test_dense_weights_equal_those_of_the_model(run):
    model = arbcli.load(run, device="cpu")
    dense = arbcli.dense_weights(model)
    assert dense.keys() == model.weights().keys()
    weight = dense["head.weight"]
    assert weight.dtype == torch.float32
    assert torch.equal(weight, model.weights()["head.weight"].weight(torch.float32))


def test_every_argument_is_passed_on(book, monkeypatch):
    def spy(name: str) -> mock.Mock:
        watched = mock.MagicMock()
        monkeypatch.setattr(name, watched)
        return watched

    loads, started = spy("arbcli.generation.load.load_model"), spy("arbcli.training.run.start_run")
    resumed, read = (
        spy("arbcli.training.resume.resume_run"),
        spy("arbcli.generation.load.read_saved"),
    )
    made, measured = (
        spy("arbcli.generation.generation.generate"),
        spy("arbcli.generation.evaluation.evaluate"),
    )
    arbcli.load("a", device="cpu", compute="fp32")
    assert loads.call_args == mock.call("a", device="cpu", compute="fp32")
    observer = Observer()
    arbcli.train("config", "b", minutes=3, init_from="c", observer=observer)
    about = {"minutes": 3, "initial": read.return_value}
    assert started.call_args == mock.call("config", Path("b"), observer, **about)
    assert read.call_args.args[0] == Path("c")
    arbcli.resume("d", steps=7, observer=observer)
    assert resumed.call_args == mock.call(Path("d"), observer, steps=7)
    how = {"temperature": 0.5, "top_k": 3, "top_p": 0.25, "seed": 9}
    arbcli.generate("model", "é", 5, **how, kv="fp8")
    model, prompt, length, sampling = made.call_args.args
    assert (model, prompt, length, asdict(sampling)) == ("model", "é".encode(), 5, how)
    assert made.call_args.kwargs == {"kv": "fp8", "ahead": 1}
    arbcli.generate("model", "é", 5, ahead=4)
    assert made.call_args.kwargs == {"kv": None, "ahead": 4}
    model = mock.Mock(device=torch.device("cpu"))
    arbcli.evaluate(model, [str(book)], stride=3, batch=4, kv="int8")
    assert measured.call_args.args[0] is model
    assert len(measured.call_args.args[2]) == book.stat().st_size
    backend = default_backend(model.device)
    expected = {"stride": 3, "batch": 4, "backend": backend, "kv": "int8"}
    assert measured.call_args.kwargs == expected
    opened = spy("arbcli.data.opening.open_text")
    opened.return_value = ("a text", "its name")
    arbcli.evaluate(model, ["a.jsonl"], field="said")
    assert opened.call_args == mock.call(["a.jsonl"], Conversion("said"))
    assert measured.call_args.args == (model, "", "a text", "its name")


def test_texts_are_made_in_deterministic_mode(monkeypatch):
    modes = []

    def make(*_, **__):
        modes.append(torch.get_deterministic_debug_mode())
        return []

    monkeypatch.setattr("arbcli.generation.generation.generate", make)
    monkeypatch.setattr("arbcli.generation.batch.generate_batch", make)
    assert arbcli.generate("model", "a", 5) == b""
    assert arbcli.generate("model", [], 5) == []
    assert modes == [2, 2]
    with pytest.raises(ArbError, match="`batch` is for a list of prompts"):
        arbcli.generate("model", "a", 5, batch=1)
    with pytest.raises(ArbError, match="`ahead` is for a single prompt"):
        arbcli.generate("model", ["a"], 5, ahead=2)
    with pytest.raises(ArbError, match=r"`ahead` is 2\.5"):
        arbcli.generate("model", "a", 5, ahead=2.5)
