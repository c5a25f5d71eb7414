"""Files of commit 324cb7e4 are loaded, resumed and exported as that commit did it.

`old_files.tar.xz` has runs of four steps without their last checkpoint, a Llama that was imported,
and exports of one of the runs. `logits.safetensors` has every 16th logit of `INPUTS`, as a CPU
computed them then. These files are never written anew: they stand for those that users keep.
"""

import shutil
import tarfile
from importlib.util import find_spec
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

import arbcli
from arbcli.training.observer import Observer

ARCHIVE = Path(__file__).parent / "old_files.tar.xz"
TEXT_IDS = [[*b"the cat "]]
INPUTS = {"imported": [[0, 7, 14, 21, 28, 35, 42, 49]]}
"""Ids that a model was given, if not `TEXT_IDS`."""
with tarfile.open(ARCHIVE) as archive:
    RUNS = sorted({Path(name).parts[0] for name in archive.getnames() if "step-000002" in name})
NEEDS_TOKENIZERS = pytest.mark.skipif(not find_spec("tokenizers"), reason="needs tokenizers")
LOADED = [*RUNS, pytest.param("imported", marks=NEEDS_TOKENIZERS), "exported.safetensors"]
STEPS = 3


class Start(Observer):
    """Copies the state of a run before its next step."""

    def started(self, run, trainer, facts):
        self.step = trainer.step
        self.state = {name: part.clone() for name, part in trainer.model.state_dict().items()}


@pytest.fixture(scope="module")
def files(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("old")
    with tarfile.open(ARCHIVE) as archive:
        archive.extractall(folder, filter="data")
    return folder


@pytest.fixture
def own_files(files, tmp_path, monkeypatch) -> Path:
    """Copy the files, whose runs name their texts relative to the current folder."""
    folder = tmp_path / "old"
    shutil.copytree(files, folder)
    monkeypatch.chdir(folder)
    return folder


def test_every_family_is_among_the_files():
    families = {"hnet", "hnet-mamba", "experts-streams", "compressed", "graph", "votes"}
    assert families | {"masked", "ahead", "composite", "anneal", "moment"} <= {*RUNS}


@pytest.mark.parametrize("name", LOADED)
def test_logits_are_those_of_then(name, files):
    model = arbcli.load(files / name, device="cpu", compute="fp32")
    ids = torch.tensor(INPUTS.get(name, TEXT_IDS))
    with torch.no_grad():
        logits = model(ids)[0, :, ::16]
    recorded = load_file(files / "logits.safetensors")[name]
    torch.testing.assert_close(logits, recorded, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("name", RUNS)
def test_run_resumes_from_the_state_in_its_file(name, own_files):
    saved = load_file(own_files / name / "step-000002.safetensors")
    start = Start()
    report = arbcli.resume(own_files / name, steps=STEPS, observer=start)
    assert start.step == 2
    assert start.state.keys() == saved.keys()
    for tensor, part in saved.items():
        assert start.state[tensor].dtype == part.dtype, tensor
        assert torch.equal(start.state[tensor], part), tensor
    assert (report.steps, report.stopped_by) == (STEPS, None)
    trained = load_file(own_files / name / f"step-{STEPS:06d}.safetensors")
    assert [*trained] == [*saved]
    assert any(not torch.equal(trained[tensor], part) for tensor, part in saved.items())


def test_exports_are_the_same_bytes(own_files, arb_done):
    for kind, old in {
        "hf": "exported-hf", "gguf": "exported.gguf", "safetensors": "exported.safetensors",
    }.items():  # fmt: skip
        new = own_files / f"new-{old}"
        arb_done("export", "moment", "--to", kind, "--out", str(new))
        if kind == "gguf":
            assert new.read_bytes() == (own_files / old).read_bytes()
            continue
        file = "model.safetensors" if kind == "hf" else ""
        theirs, ours = load_file(own_files / old / file), load_file(new / file)
        assert [*ours] == [*theirs]
        for tensor, part in theirs.items():
            assert ours[tensor].dtype == part.dtype, tensor
            assert torch.equal(ours[tensor], part), tensor


@NEEDS_TOKENIZERS
def test_imported_model_of_then_is_tuned(own_files, arb_done):
    words = ("--steps", "2", "--batch", "2", "--device", "cpu", "--warmup", "0", "--out", "tuned")
    texts = ("--data", "text.txt", "--val", "text.txt", "--eval-every", "0")
    arb_done("train", "--init-from", "imported", *texts, *words)
    first = load_file(own_files / "tuned" / "step-000000.safetensors")
    old = load_file(own_files / "imported" / "step-000000.safetensors")
    weights = [name for name in old if name.endswith(".trits")]
    assert weights
    assert all(torch.equal(first[name], old[name]) for name in weights)
