"""What is set before torch loads never makes a float twin slower, nor overrides the user."""

import os
import subprocess
import sys
from unittest import mock

import pytest

from arbcli import environment
from arbcli.environment import set_environment, trains_twin

LINES = {
    "train --ctx 64": False, "train --weights ternary": False, "train --weights float": True,
    "train --ctx 64 --weights ste --optimizer muon": True, "train --weights=float --ctx 64": True,
    "train --weights float --weights ternary": False, "train --weights": False,
    "generate --prompt float": False, "": False,
}  # fmt: skip


@pytest.fixture
def empty(monkeypatch) -> dict[str, str]:
    environment: dict[str, str] = {}
    monkeypatch.setattr(os, "environ", environment)
    return environment


@pytest.mark.parametrize("line", LINES)
def test_threads_of_a_twin_spin_as_libgomp_has_it(line, empty):
    assert trains_twin(line.split()) == LINES[line]
    set_environment(line.split())
    assert ("GOMP_SPINCOUNT" in empty) != LINES[line]
    assert empty["CUBLAS_WORKSPACE_CONFIG"] == ":4096:8"


def test_what_the_user_has_set_stays(empty):
    empty["GOMP_SPINCOUNT"] = "7"
    set_environment(["train"])
    assert empty["GOMP_SPINCOUNT"] == "7"


COUNTS = "cpu  1 2 3\nprocs_running {}\nprocs_blocked 0\n"


@pytest.mark.parametrize(
    ("line", "running", "spins"),
    [("train", (2, 3, 2), "2000"), ("train", (2, 1), "12000"), ("train", ("",), "12000"),
     ("train --weights float", (2,), None), ("generate", (), "12000"), ("", (), "12000")],
)  # fmt: skip
def test_threads_spin_less_beside_other_programs(line, running, spins, empty, monkeypatch):
    counts = iter(running)
    file = mock.Mock(read_text=lambda: COUNTS.format(next(counts)) if running != ("",) else "cpu")
    monkeypatch.setattr(environment, "COUNTS", file)
    set_environment(line.split())
    assert empty.get("GOMP_SPINCOUNT") == spins


def test_system_without_counts_is_taken_to_be_quiet(empty, monkeypatch, tmp_path):
    monkeypatch.setattr(environment, "COUNTS", tmp_path / "none")
    set_environment(["train"])
    assert empty["GOMP_SPINCOUNT"] == "12000"


@pytest.mark.parametrize(
    ("weights", "spins"), [("ternary", ("2000", "12000")), ("float", ("None",))]
)
def test_program_sets_it_by_its_command_line(weights, spins):
    code = (
        "import os, sys\n"
        "import arbcli.cli as cli\n"
        f"sys.argv = ['arb', 'train', '--weights', '{weights}', '--help']\n"
        "try: cli.main()\n"
        "finally: print(os.environ.get('GOMP_SPINCOUNT'))\n"
    )
    environment = {key: os.environ[key] for key in os.environ if key != "GOMP_SPINCOUNT"}
    command = [sys.executable, "-c", code]
    done = subprocess.run(command, capture_output=True, text=True, env=environment, check=False)
    assert done.returncode == 0
    assert done.stdout.splitlines()[-1] in spins
