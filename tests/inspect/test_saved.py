"""Whatever is saved can be looked into and compared, and what is damaged is refused."""

import json
from types import SimpleNamespace

import pytest
import torch

from arbcli.base.errors import ArbError
from arbcli.inspect.saved import Difference, compare, open_saved
from arbcli.interop.exporting import export


@pytest.fixture
def forms(saved, tmp_path) -> dict:
    """The same model in every form."""
    paths = {"checkpoint": saved(sub_norms=False)}
    for kind, form in (("weights", "safetensors"), ("gguf", "gguf"), ("hf", "hf")):
        paths[kind] = tmp_path / kind
        export(paths["checkpoint"], form, out=paths[kind])
    return paths


def test_every_form_is_described(forms):
    reports = {kind: open_saved(path, print).report() for kind, path in forms.items()}
    for kind, report in reports.items():
        assert (report.kind, report.step) == (kind, 7)
        assert sum(map(sum, report.trits.values())) == pytest.approx(len(report.trits))
        assert report.trits["mlp"] == reports["checkpoint"].trits["mlp"]
        assert report.digests == ("checked" if kind in ("checkpoint", "weights") else "none")
    assert reports["gguf"].bytes_by_area["norms"].keys() == {"F32"}
    assert reports["gguf"].bytes_by_area["mlp"].keys() == {"Q4_0"}
    kinds = reports["checkpoint"].bytes_by_area["mlp"].keys()
    assert kinds - reports["weights"].bytes_by_area["mlp"].keys() == {"remainder", "moment"}
    origins = {report.origin for kind, report in reports.items() if kind != "checkpoint"}
    assert origins == {reports["checkpoint"].digest}
    assert reports["checkpoint"].octaves["head"] == {-3: 256 * 2}
    for kind in ("gguf", "hf"):  # a scale counts once there, and a weight that is not 0 here
        assert reports[kind].octaves["head"].keys() == {-3}


def test_forms_of_one_model_have_equal_weights(forms):
    opened = {kind: open_saved(path, print) for kind, path in forms.items()}
    for kind in ("gguf", "hf"):
        report = compare(opened["checkpoint"], opened[kind])
        assert (report.compared, report.equal, report.num_equal) == ("weights", True, 16)
    for saved in opened.values():
        assert {read().dtype for read in saved.weights().values()} == {torch.float32}
    report = compare(opened["weights"], opened["checkpoint"])
    assert not report.equal
    assert not report.tensors
    assert set(report.missing.values()) == {"only in the second"}


def test_report_of_a_run_includes_its_files(saved, tmp_path):
    saved()
    text = {"description": "a book"}
    (tmp_path / "config.json").write_text(json.dumps({"text": text}))
    (tmp_path / "metrics.jsonl").write_bytes(b'{"step\xff\n{"step": 5}\n{"step": 7}\n')
    report = open_saved(tmp_path, print).report()
    assert report.bytes == (tmp_path / "step-000007.safetensors").stat().st_size
    assert report.kind == "run"
    assert report.run["last_record"] == {"step": 7}
    assert report.run["text"] == text
    assert report.run["checkpoints"] == ["step-000007.safetensors"]
    (tmp_path / "metrics.jsonl").write_text("")
    (tmp_path / "config.json").unlink()
    run_files = {"checkpoints": ["step-000007.safetensors"], "last_record": None}
    assert open_saved(tmp_path, print).run == run_files


def test_damaged_models_and_other_files_are_refused(forms, tmp_path):
    weights = forms["hf"] / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-1])
    forms["gguf"].write_bytes(forms["gguf"].read_bytes()[:-100])
    forms["weights"].write_bytes(forms["weights"].read_bytes()[:-1] + b"\0")
    (tmp_path / "text").write_text("a text")
    others = [tmp_path / "text", tmp_path / "nowhere"]
    for path in [*others, *(path for kind, path in forms.items() if kind != "checkpoint")]:
        with pytest.raises(ArbError, match=r"refused|there is no|is not a saved model"):
            open_saved(path, print)


def imagined(path: str, **weights) -> SimpleNamespace:
    """Stand in for a saved model of these weights."""
    tensors = {name: torch.tensor(values) for name, values in weights.items()}
    named = {name: lambda tensor=tensor: tensor for name, tensor in tensors.items()}
    return SimpleNamespace(path=path, config={}, settings={}, weights=lambda: named, state=None)


def test_differences_are_measured_against_the_first():
    first = imagined("a", same=[1, 2], other=[3.0, 0.0, 4.0], zero=[0.0, 0.0], gone=[1], wide=[1])
    second = imagined("b", same=[1, 2], other=[3.0, -6.0, 12.0], zero=[0.0, -2.0], new=[1],
                      wide=[1, 2])  # fmt: skip
    report = compare(first, second)
    assert (report.first, report.second, report.compared) == ("a", "b", "weights")
    assert report.missing == {
        "gone": "only in the first", "new": "only in the second", "wide": "[1] and [2]",
    }  # fmt: skip
    assert report.tensors == [
        Difference(name="other", elements=3, different=2, largest=8.0, relative=2.0),
        Difference(name="zero", elements=2, different=1, largest=2.0, relative=None),
    ]
    assert (report.num_equal, report.equal) == (1, False)
    assert compare(first, first).equal
    assert compare(first, first).num_equal == 5
