"""The first example of the library's page, and the example in `examples/`, run on tiny models."""

import re
import runpy
import sys
from pathlib import Path

import pytest
import tiny

ROOT = Path(__file__).parents[2]


@pytest.fixture
def folder(tmp_path, monkeypatch, transformers) -> Path:
    """A folder `Qwen3-0.6B` with a tiny model and a tokenizer, in the current directory."""
    folder = tmp_path / "Qwen3-0.6B"
    tiny.tokenizer().save_pretrained(folder)
    tiny.build("qwen3").save_pretrained(folder)
    monkeypatch.chdir(tmp_path)
    return folder


def test_first_example_of_the_page_runs(folder, tmp_path):
    pytest.importorskip("accelerate", reason="needs the extra `trainers`")
    page = (ROOT / "docs" / "library.md").read_text()
    example, *_ = re.findall(r"```python\n(.*?)```", page, re.DOTALL)
    assert len([line for line in example.splitlines() if line and "import" not in line]) <= 10
    names = {"data": [{"input_ids": row, "labels": row} for row in tiny.batch(8, 12)]}
    exec(compile(example.replace("500", "2"), "library.md", "exec"), names)
    assert (tmp_path / "qwen3-tuned" / "model.safetensors").exists()
    assert names["optimizer"].step_number == 2


def test_example_tunes_a_model(folder, tmp_path, monkeypatch, capsys):
    text = tmp_path / "text.txt"
    text.write_text(" ".join(f"w{3 + number % 7}" for number in range(200)))
    script = ROOT / "examples" / "tune_any_model.py"
    options = ["--out", "tuned", "--steps", "6", "--ctx", "16", "--lr", "0.1"]
    monkeypatch.setattr(sys, "argv", [str(script), str(folder), str(text), *options])
    runpy.run_path(str(script), run_name="__main__")
    losses = [float(loss) for loss in re.findall(r"step \d: ([\d.]+)", capsys.readouterr().out)]
    assert len(losses) == 6
    assert losses[-1] < losses[0]
    assert (tmp_path / "tuned" / "model.safetensors").exists()
    assert (tmp_path / "tuned" / "tokenizer.json").exists()
