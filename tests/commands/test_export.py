"""`arb export` as a person or a program meets it."""

import pytest

from arbcli.train.configure import new_config
from arbcli.train.run import Observer, start_run

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
