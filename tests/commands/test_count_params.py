"""`arb count-params`: what it prints, and how it fails."""

import json
import subprocess
import sys

import pytest
from typer.testing import CliRunner

from arbcli.cli import app
from arbcli.memory import KINDS, predict
from arbcli.model.config import preset


def run(*arguments):
    return CliRunner().invoke(app, ["count-params", *arguments])


def run_program(*arguments):
    command = [sys.executable, "-m", "arbcli", "count-params", *arguments]
    return subprocess.run(command, check=False, capture_output=True, text=True)


def test_count_params_prints_one_json_object():
    done = run_program("--preset", "1b", "--rule", "nibble", "--json")
    assert done.returncode == 0
    assert done.stderr == ""
    report, expected = json.loads(done.stdout), predict(preset("1b", rule="nibble"))
    assert set(report) == {"config", "areas", "total", "trained_weights", "adamw_bytes"}
    assert report["trained_weights"] == 1_234_173_952
    assert report["total"]["state_bytes"] == expected.total.state_bytes
    part = {"weights", "padding_trits", "bytes_by_kind", "state_bytes", "bytes_per_weight"}
    for area in report["areas"].values():
        assert set(area) == part
        assert tuple(area["bytes_by_kind"]) == KINDS


def test_count_params_takes_every_override():
    options = {
        "--ctx": 99, "--tscale-type": "T6", "--rule": "carry", "--direction": "sign",
        "--dim": 24, "--layers": 3, "--heads": 2, "--ffn": 31,
    }  # fmt: skip
    result = run("--json", *(str(part) for pair in options.items() for part in pair))
    config = json.loads(result.stdout)["config"]
    names = ("ctx", "scale_type", "rule", "direction", "dim", "layers", "heads", "ffn")
    assert [config[name] for name in names] == list(options.values())


def test_count_params_shows_areas_kinds_and_adamw():
    shown = run("--preset", "tiny").stdout
    for word in ("embedding", "mlp", "norms", "trits", "moment", "state", "AdamW", "MB", "MiB"):
        assert word in shown
    assert "votes" not in shown


@pytest.mark.parametrize(
    "arguments",
    [("--preset", "huge"), ("--heads", "7"), ("--rule", "votes", "--direction", "sign")],
    ids=["preset", "heads", "direction"],
)
def test_count_params_fails_in_one_line(arguments):
    done = run_program(*arguments)
    assert done.returncode == 2
    assert done.stdout == ""
    error, hint = done.stderr.splitlines()
    assert error.startswith("error: ")
    assert hint.startswith("hint: ")
