"""The library does what its page says, and refuses inputs in a sentence."""

import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch

import arbcli
from arbcli.infer.load import load_model
from arbcli.train.run import Observer, start_run

PAGE = Path(__file__).parents[1] / "docs" / "library.md"
SMALL = {"dim": 16, "layers": 1, "heads": 1, "ffn": 16, "ctx": 8, "batch": 2, "device": "cpu"}


@pytest.fixture(scope="module")
def book(tmp_path_factory) -> Path:
    path = tmp_path_factory.mktemp("library") / "book.txt"
    path.write_bytes(b"It was the best of bytes, it was the worst of bytes. " * 60)
    return path


def test_every_example_of_the_page_runs(book, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("arbcli.train.run.SAMPLE_BYTES", 1)
    monkeypatch.setattr("arbcli.train.trainer.Trainer.evaluate", lambda *_: 3.0)
    (tmp_path / "book.txt").write_bytes(book.read_bytes())
    examples = re.findall(r"```python\n(.*?)```", PAGE.read_text(), re.DOTALL)
    assert len(examples) >= 6
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
        (torch.zeros(3, dtype=torch.int64), r"shape \(batch, length\), and got \(3,\)"),
        (torch.zeros(1, 3), "integers, and got torch.float32"),
        (torch.ones(1, 3, dtype=torch.bool), "integers, and got torch.bool"),
    ],
)
def test_what_is_no_batch_of_bytes_is_refused_in_a_sentence(ids, message, run):
    with pytest.raises(ValueError, match=message):
        load_model(run, device="cpu")(ids)


def test_train_is_called_before_and_after_its_package_is_imported():
    code = (
        "import arbcli, unittest.mock as mock\n"
        "assert callable(arbcli.train) and not hasattr(arbcli.train, 'run')\n"
        "import sys; assert 'torch' not in sys.modules\n"
        "import arbcli.train.run as run\n"
        "with mock.patch.object(run, 'start_run', return_value=5):\n"
        "    assert arbcli.train(None, 'x') == arbcli.train(None) == 5\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


def test_dense_weights_are_what_the_model_multiplies_by(run):
    model = arbcli.load(run, device="cpu")
    dense = arbcli.dense_weights(model)
    assert dense.keys() == model.weights().keys()
    weight = dense["head.weight"]
    assert weight.dtype == torch.float32
    assert torch.equal(weight, model.weights()["head.weight"].weight(torch.float32))
