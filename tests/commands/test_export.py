"""`arb export` as a person or a program meets it."""

import json

import pytest

from arbcli.training.configure import new_config
from arbcli.training.observer import Observer
from arbcli.training.run import start_run

SIZES = {"dim": 32, "layers": 1, "heads": 2, "ffn": 64, "ctx": 16, "batch": 4}


@pytest.fixture(scope="module")
def run(tmp_path_factory) -> str:
    folder = tmp_path_factory.mktemp("trained")
    (folder / "text.txt").write_text("ternary weights learn to read. " * 100)
    text = [str(folder / "text.txt")]
    config = new_config(**SIZES, sub_norms=False, steps=2, device="cpu", data=text)
    start_run(config, folder / "run", Observer())
    return str(folder / "run")


def test_type_that_a_format_has_not_is_refused_in_two_lines(run, arb_here):
    done = arb_here("export", run, "--to", "hf", "--type", "q4_0")
    assert (done.returncode, done.stdout) == (2, "")
    error, _ = done.stderr.splitlines()
    assert "has no type `q4_0`" in error


def test_damaged_checkpoint_is_refused(run, tmp_path, arb_here):
    with open(f"{run}/step-000002.safetensors", "rb") as file:
        data = bytearray(file.read())
    length = int.from_bytes(data[:8], "little")
    moment = json.loads(data[8 : 8 + length])["head.weight.moment"]  # which an export has not
    data[8 + length + moment["data_offsets"][0]] ^= 1
    damaged = tmp_path / "damaged.safetensors"
    damaged.write_bytes(data)
    done = arb_here("export", str(damaged), "--to", "gguf", "--out", str(tmp_path / "x.gguf"))
    assert done.returncode == 2
    assert "`head.weight.moment` was altered" in done.stderr
    assert not (tmp_path / "x.gguf").exists()
