"""Mistakes in options and paths are refused before torch is imported, which takes seconds."""

import dataclasses
import json
import subprocess
import sys

import pytest
from typer.testing import CliRunner

from arbcli.cli import app
from arbcli.config.presets import preset
from arbcli.config.training import train_config_from
from arbcli.errors import ArbError

MISTAKES = {
    "train --data nofile": "nothing matches `nofile`",
    "train --val nofile*": "nothing matches `nofile*`",
    "train --data /dev/null": "`/dev/null` is not a regular file",
    "train --dim 33": "4 heads do not divide a width of 33",
    "train --print-config --dim 33": "4 heads do not divide a width of 33",
    "train --init-from nofile": "there is no run at `nofile`",
    "train --resume auto --out nofile": "there is no run in `nofile`",
    "train --out text.txt/run": "cannot write `text.txt/run`",
    "train --data text.txt:0.5 text.txt": "`text.txt` has no weight above 0",
    "train --data empty.txt": "there is no text in `empty.txt`",
    "evaluate run --data empty.txt": "there is no text in `empty.txt`",
    "train --data text.txt --field body": "`--field body` is of records",
    "train --init-from run --data text.txt --field body": "`--field body` is of records",
    "evaluate run --data text.txt --field body": "`--field body` is of records",
    "train --tokenizer nofile": "cannot read `nofile`",
    "train --teacher nofile": "there is no run at `nofile`",
    "train --out text.txt": "`text.txt` is a file",
    "train --out run": "`run` holds a run already",
    "train --backend triton": "the `triton` backend needs a CUDA device",
    "train --lr nan --data nofile": "`--lr` is `nan`",
    "train --model nofile": "cannot read `nofile`",
    "train --config nofile": "cannot read `nofile`",
    "train --resume nofile": "there is no run at `nofile`",
    "train --gpus 2": "there is no GPU for `--gpus 2`",
    "train --gpus 2 --device cpu": "`--accum` is 1, which 2 processes",
    "generate --checkpoint nofile": "there is no run at `nofile`",
    "generate --checkpoint auto": "there is no run in `runs`",
    "generate run --prompt-file nofile": "cannot read `nofile`",
    "generate run --prompts nofile": "cannot read `nofile`",
    "evaluate --checkpoint nofile": "there is no run at `nofile`",
    "evaluate run --data nofile": "nothing matches `nofile`",
    "evaluate made --stride 65": "`--stride` is 65, and a window has 64 bytes",
    "evaluate made --draws 3": "`--draws` is of a masked model",
    "generate made --ahead 2": "the model has no head that proposes bytes",
    "generate made --chat": "`made` has no chat template",
    "generate made --steps 9": "`--steps` is of a masked model",
    "generate made --infill …": "the model predicts the next byte, and fills no holes",
    "generate made/step-000001.safetensors --chat": "`made` has no chat template",
    "generate made --backend interpreter": "the `interpreter` backend was not asked for",
    "export nofile --to gguf": "there is no run at `nofile`",
    "export run --to gguf --out text.txt": "`text.txt` exists",
    "import .": "cannot read `config.json`",
    "import run": "`run/config.json` has no `model_type`",
    "check nofile": "there is no run at `nofile`",
    "inspect nofile": "there is no run at `nofile`",
    "inspect run --diff nofile": "there is no run at `nofile`",
    "verify-kernels --targets sm_1": "no target is named `sm_1`",
    "verify-kernels --compare nofile": "cannot read `nofile`",
    "verify-kernels nokernel": "no kernel is named `nokernel`",
    "audit-memory --budget much": "`--budget` is `much`",
    "audit-memory --dim 33": "4 heads do not divide a width of 33",
    "count-params --dim 33": "4 heads do not divide a width of 33",
    "count-params --preset huge": "no preset is named `huge`",
    "probe-loss --dim 33": "4 heads do not divide a width of 33",
    "probe-loss --checkpoint nofile": "there is no run at `nofile`",
    "probe-loss --data nofile": "nothing matches `nofile`",
    "probe-loss --plot a.gif": "`--plot` is `a.gif`",
} | {
    f"{command} --device cuda": "there is no CUDA device for `cuda`"
    for command in ("train", "generate", "audit-memory", "probe-loss", "verify-kernels")
}


def header_of(config):
    """Write the header of a checkpoint, which alone tells what model it is of."""
    about = {"__metadata__": {"arb": json.dumps({"config": dataclasses.asdict(config)})}}
    text = json.dumps(about).encode()
    return len(text).to_bytes(8, "little") + text


def test_mistakes_are_refused_without_torch(monkeypatch, tmp_path):
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    (tmp_path / "made").mkdir()
    header = header_of(preset("tiny"))
    (tmp_path / "made" / "step-000001.safetensors").write_bytes(header)
    (tmp_path / "text.txt").write_bytes(b"ternary weights")
    (tmp_path / "empty.txt").touch()
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "config.json").write_text("{}")
    (tmp_path / "run" / "step-000001.safetensors").write_bytes(b"")
    code = (
        "import sys; sys.modules['torch'] = None\n"
        "from arbcli import cli; from arbcli.commands import _options\n"
        "_options.may_have_gpu = lambda: False\n"
        "sys.modules['arbcli.commands.train'].may_have_gpu = lambda: False\n"
        f"for words in {[*MISTAKES]}:\n"
        "    sys.argv = ['arb', *words.split()]\n"
        "    try: cli.main()\n"
        "    except SystemExit as ended: print(ended.code)\n"
    )
    command = [sys.executable, "-c", code]
    done = subprocess.run(command, capture_output=True, text=True, check=False, cwd=tmp_path)
    assert done.returncode == 0, done.stderr[-2000:]
    assert done.stdout.split() == ["2"] * len(MISTAKES)
    errors = [line for line in done.stderr.splitlines() if line.startswith("error: ")]
    for error, (words, said) in zip(errors, MISTAKES.items(), strict=True):
        assert error.startswith(f"error: {said}"), words
    assert "Traceback" not in done.stderr


@pytest.mark.parametrize(
    "command", ["generate", "evaluate", "export --to gguf", "check", "inspect", "probe-loss"]
)
def test_saved_model_is_named_by_an_argument_or_an_option(command):
    both = "`there` and `--checkpoint` both name a model"
    for words, said in (
        ("nofile", "there is no run at `nofile`"),
        ("--checkpoint nofile", "there is no run at `nofile`"),
        ("there --checkpoint nofile", both),
        ("", "no saved model is named"),
    ):
        if words or command != "probe-loss":  # which makes a new one then
            result = CliRunner().invoke(app, [*command.split(), *words.split()])
            assert isinstance(result.exception, ArbError), (words, result.output)
            assert str(result.exception) == said


def test_model_of_a_run_that_is_no_object_is_told_in_words():
    with pytest.raises(ArbError, match=r"a model is `\[1\]`, and not values by name"):
        train_config_from({"config": {"model": [1]}})


def test_plain_text_is_told_from_a_damaged_model(tmp_path):
    (tmp_path / "a.txt").write_bytes(b"ternary weights learn to read")
    result = CliRunner().invoke(app, ["inspect", str(tmp_path / "a.txt")])
    assert str(result.exception) == f"`{tmp_path / 'a.txt'}` is not a saved model"
