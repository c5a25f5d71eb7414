"""A float baseline: its exports hold the weights that it multiplies by, and reports count them."""

import pytest
import torch
from made_runs import train

from arbcli.base.errors import ArbError
from arbcli.generation.load import load_weights
from arbcli.inspect.probe import open_saved as open_to_probe
from arbcli.inspect.saved import open_saved
from arbcli.interop.exporting import export
from arbcli.interop.gguf.container import GGUFFile
from arbcli.interop.gguf.export import read_reordered
from arbcli.interop.huggingface.export import ModelFolder

TEXT = b"a float baseline learns to read. " * 20


@pytest.fixture(scope="module", params=["float", "ste"])
def run(request, tmp_path_factory):
    folder = tmp_path_factory.mktemp("baseline")
    return train(folder, TEXT, weights=request.param, steps=2, sub_norms=False)


def test_exports_have_the_weights_of_the_forward_pass_in_float32(run, tmp_path):
    model = load_weights(run, pytest.fail).model
    mlp = model.blocks[0].mlp
    expected = {"output.weight": model.head.weight, "blk.0.ffn_down.weight": mlp.output.weight}
    assert export(run, "hf", out=tmp_path / "hf").type == "F32"
    assert export(run, "gguf", out=tmp_path / "model.gguf").type == "F32"
    gguf, folder = GGUFFile(tmp_path / "model.gguf"), ModelFolder(tmp_path / "hf")
    for name, weight in expected.items():
        assert torch.equal(folder.tensor(name), weight.weight(torch.float32))
        assert torch.equal(read_reordered(gguf, name), weight.weight(torch.float32))
    for to, kind in (("hf", "bf16"), ("gguf", "f16"), ("gguf", "q8_0")):
        with pytest.raises(ArbError, match=f"`--type {kind}` would round the float32 weights"):
            export(run, to, kind=kind, out=tmp_path / "rounded")
    assert export(run, "safetensors", out=tmp_path / "model.safetensors").type == "float32"
    again = load_weights(tmp_path / "model.safetensors", pytest.fail).model
    ids = torch.arange(12)[None]
    assert torch.equal(again(ids), model(ids))


def test_report_of_a_baseline_counts_its_weights_and_a_probe_is_refused(run, monkeypatch):
    report = open_saved(run, pytest.fail).report()
    tables, blocks = 256 * 32, 4 * 32 * 32 + 3 * 32 * 48
    weights = 2 * tables + blocks
    assert report.num_weights == weights
    assert report.bytes_by_area == {"float32": {"float32": 4 * weights}}
    parts = {part.kind: (part.weights, part.bytes // 4) for part in report.parts if not part.depth}
    numbers = {"embedding": tables, "stage": blocks, "norm": 0, "head": tables}
    assert parts == {kind: (number, number) for kind, number in numbers.items()}
    # there is room for the weights, which are read without moments, and for the model
    monkeypatch.setattr("arbcli.kernels.runtime.device.available_bytes", lambda: 2 * 4 * weights)
    with pytest.raises(ArbError, match="no integers to probe"):
        open_to_probe(run, steps=1, note=pytest.fail)


@pytest.mark.parametrize("to", ["hf", "gguf"])
def test_baseline_that_no_architecture_holds_is_only_written_as_safetensors(to, tmp_path):
    run = train(tmp_path, TEXT, weights="float", steps=2, experts=2)
    with pytest.raises(ArbError, match="no architecture") as caught:
        export(run, to, out=tmp_path / "out")
    assert caught.value.hint.partition(";")[0] == "use `--to safetensors`"
