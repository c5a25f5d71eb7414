"""Mistakes in options and paths are refused before torch is imported, which takes seconds."""

import dataclasses
import json
import os
import re
import subprocess
import sys

import pytest
import typer

from arbcli.base.errors import ArbError
from arbcli.cli import app
from arbcli.commands._options import check_settings
from arbcli.commands._outputs import PICTURES, check_file, check_folder
from arbcli.config.presets import preset

MISTAKES = {
    "train --data nofile": "nothing matches `nofile`",
    "train --data /dev/null": "`/dev/null` is not a regular file",
    "train --init-from x --dim 8": "a saved model keeps its own settings, so `--dim` cannot",
    "train --resume auto": "there is no run in `runs` that has saved",
    f"train --data text.txt --out {'x' * 300}": f"cannot use `{'x' * 300}`: File name too long",
    "train --data text.txt:0.5 text.txt": "`text.txt` has no valid weight",
    "train --data empty.txt": "there is no text in `empty.txt`",
    "train --data chats.jsonl": "`chats.jsonl` has records with `messages`, and no `--field` was"
        " given\nhint: add `--field messages`; or",
    "evaluate run --data pairs.json": "`pairs.json` has records with `prompt`, `completion`, and"
        " no `--field` was given\nhint: add `--field prompt+completion`; or",
    "train --init-from theirs": "`theirs` is a model of Transformers, and no run\nhint: convert it"
        " to one: `arb import theirs`\n",
    "train text.txt": "Got unexpected extra argument(s) (text.txt)\nhint: name texts with `--data`",
    "train --learning-rate 0.1": "No such option: --learning-rate\nhint: use `--lr`\n",
    "generate made --system a": "`--system` only applies with `--chat`",
    "train --data text.txt --field body": "`--field body` only applies to records",
    "train --data shard.bin": "the text is of shards of tokens, and the model reads bytes\nhint:"
        " name the tokenizer that made them: `--tokenizer",
    "train --data tokens.bin": "`tokens.bin` has no header, so that its format is unknown",
    "evaluate run --data tokens.bin --data-format tokens32": "`tokens.bin` has 2 bytes, not a"
        " whole number of tokens of 4",
    "train --data text.txt --data-format bytes": "`--data-format` only applies to .bin files",
    "train --teacher nofile": "there is no run at `nofile`",
    "train --out text.txt": "`text.txt` is a file",
    "train --out run": "`run` already contains a run",
    "train --out made": "`made` already contains weights, which a new run would replace",
    "train --resume run --out other": "`--out` names the folder of the runs for `--resume auto`",
    "train --device tpu": "no device is named `tpu`\nhint: use `cpu`, `cuda`",
    "train --rule [bold]": "`--rule` is `[bold]`\nhint: choose one of: ",
    "train --preset huge": "no preset is named `huge`\nhint: choose one of",
    "train --lr nan --data nofile": "`--lr` is `nan`\nhint: use a number that is finite",
    "train --digits all --weights float": "`--digits` is part of `--weights` now",
    "count-params --mlp-rule nibbel": "`--mlp-rule` is `nibbel`\nhint: choose one of: `moment`,",
    "train --pack --compute fp32": "gates in fp32 cannot be packed\nhint: leave `--pack` out",
    "train --weights anneal --keep-best": "the best checkpoint would be from before the weights are"
        " ternary\nhint: leave `--keep-best` out, or use `--weights int8` or `--weights ternary`\n",
    "train --embedding-dropout 1.5": "`--embedding-dropout` is 1.5\nhint: use a number below 1",
    "train --attention-dropout 0.2 --attention compressed":
        "attention weights of the mixer `compressed` cannot be dropped",
    "train --eval-every 0 --keep-best":
        "a run that is never evaluated has no best checkpoint",
    "train --no-save --keep-best --keep 1":
        "`--keep`, `--keep-best` cannot be combined with `--no-save`",
    "train --data text.txt --plot text.txt": "`--plot` is `text.txt`",
    "train --plot a.png --plot=b.png": "`--plot` is given twice\nhint: name one file\n",
    "train --log paper": "no logger is named `paper`",
    "train --minutes 1 --steps 9": "`--steps` cannot be combined with `--minutes`",
    "train --minutes 1 --set steps=9": "`--steps` cannot be combined with `--minutes`",
    "train --dry-run": "`--dry-run` only applies with `--resume`",
    "train --model model.toml --no-sub-norms": "`--sub-norms/--no-sub-norms` only applies",
    "train --config nofile": "cannot read `nofile`",
    "train --gpus 2": "there is no GPU for `--gpus 2`",
    "train --gpus 2 --device cpu": "`--accum` is 1, which 2 processes",
    "train --stepz 3": "No such option: --stepz (Possible options: --set, --steps, --streams)\n"
        "hint: `arb train --help` lists what there is\n",
    "--quick": "No such option: --quick\nhint: `arb --help` lists what there is\n",
    "generate run --prompt-file nofile": "cannot read `nofile`",
    "generate run --length 16777217": "Invalid value for '--length': ",
    "generate made --kv fp4": "`--kv` is `fp4`",
    "generate made --bytes --json": "`--json` cannot be combined with `--bytes`",
    "generate made --batch 2": "`--batch` only applies with `--prompts`",
    "generate masked --infill a…b --prompt c": "`--prompt` cannot be combined with `--infill`\n"
        "hint: leave `--prompt` out\n",
    "generate masked --prompt a --kv int8": "`--kv` only applies to text that is generated from"
        " left to right\nhint: leave `--kv` out\n",
    "generate fill --steps 3": "`--steps` only applies to masked models",
    "evaluate made --field said": "`--field` only applies with `--data`",
    "evaluate run --data text.txt --field messages --stride 9":
        "`--stride` does not apply to `--field messages`",
    "generate made --chat": "`made` has no chat template",
    "generate made --infill …": "this model predicts the next byte and cannot fill holes",
    "export auto": "Missing option '--to'.\nhint: `arb export --help` lists what there is\n",
    "export made --to onnx": "`--to` is `onnx`",
    "export made --to hf --out run": "`run` exists",
    "export made --to gguf --out text.txt/a": "cannot write `text.txt`: `text.txt` is not a folder",
    "import .": "cannot read `config.json`",
    "import . --budget much": "`--budget` is `much`",
    "import . --budget 24": "`--budget` is 24 bytes\nhint: add the unit, such as `--budget 24GiB`",
    "import run": "`run/config.json` has no `model_type`",
    "train --resume text.txt": "there is no run at `text.txt`",
    "train --resume made": "`made` has weights, and no settings of training",
    "check made": "`made` has weights, and no settings of training",
    "compare made": "`made` has weights, and no settings of training",
    "probe-loss made": "`made` has weights, and no settings of training",
    "generate text.txt": "`text.txt` is not a saved model",
    "compare run --plot a.txt": "`--plot` is `a.txt`",
    "compare run run": "`run` is named twice",
    "verify-kernels nokernel": "no kernel is named `nokernel`",
    "verify-kernels --tscale-type T4 --all-tscale-types":
        "`--tscale-type` cannot be combined with `--all-tscale-types`",
    "audit-memory --budget 6GiB --what-if": "`--budget` cannot be combined with `--what-if`",
    "audit-memory --ranks 2 --what-if": "`--ranks` cannot be combined with `--what-if`",
    "audit-memory --decode 8 --floats": "`--floats` cannot be combined with `--decode`",
    "audit-memory --snapshot text.txt": "`--snapshot` is `text.txt`",
    "audit-memory empty": "cannot read `empty/config.json`",
    "audit-memory run": "`run/config.json` has no whole model",
    "audit-memory run --preset tiny": "`run` and `--preset` or `--model` both name a model",
    "audit-memory --set weights=float": "a float baseline has no integers to audit",
    "count-params --model model.toml --preset tiny": "`--model` and `--preset` both name a model",
    "count-params --model text.txt": "`text.txt` is not TOML",
    "probe-loss --decode 8 --plot a.png": "`--plot` cannot be combined with `--decode`",
    "probe-loss --checkpoint made --rule votes --tscale-type T8 --no-knowledge":
        "a saved model keeps its own settings, so `--tscale-type`, `--rule`, `--knowledge/--no-kno",
    "probe-loss --checkpoint made --field body": "`--field` only applies with `--data`",
} | {
    f"{command} --device cuda": "there is no CUDA device for `cuda`"
    for command in ("train", "generate", "verify-kernels")
} | {
    f"{command} auto{words}": "there is no run in `runs`"
    for command, words in (("evaluate", ""), ("probe-loss", ""), ("export", " --to gguf"),
                           ("audit-memory", ""), ("inspect", ""), ("check", ""), ("compare", ""))
} | {
    f"generate made --prompts text.txt {words}":
        f"`{words.split()[0]}` cannot be combined with `--prompts`\nhint: leave `{words.split()[0]}"
    for words in ("--prompt a", "--bytes", "--chunks", "--json")
} | {
    f"train --resume auto {words}":
        f"`{option or words.split()[0]}` cannot be changed when resuming\nhint: leave it out"
    for words, option in (
        ("--config a.toml", ""), ("--minutes 3", ""), ("--init-from y", ""), ("--lr 1", ""),
        ("--model model.toml", ""), ("--no-moe", "--moe/--no-moe"))
} | {
    f"train --no-save {words}": f"`{words.split()[0]}` cannot be combined with `--no-save`"
    for words in ("--resume auto", "--save-every 1", "--out x", "--profile", "--plot a.svg")
} | {
    f"{command} {words}": said
    for command in ("generate", "evaluate", "export --to gguf", "check", "inspect", "probe-loss")
    for words, said in (
        ("nofile", "there is no run at `nofile`"),
        ("--checkpoint nofile", "there is no run at `nofile`"),
        ("there --checkpoint nofile", "`there` and `--checkpoint` both name a model"))
} | dict.fromkeys(
    ("generate", "evaluate", "export --to gguf", "check", "inspect"), "no saved model is named"
)  # fmt: skip
MODEL = """
[model]
ctx = 16
[model.block.near]
channel = { kind = "mlp", width = 8 }
[[model.stage]]
dim = 32
blocks = "near"
"""


def header_of(config):
    """Write the header of a checkpoint, which alone tells what model it is of."""
    about = {"__metadata__": {"arb": json.dumps({"config": dataclasses.asdict(config)})}}
    text = json.dumps(about).encode()
    return len(text).to_bytes(8, "little") + text


def options_of(command: str) -> set[str]:
    subcommand = typer.main.get_command(app).commands.get(command)
    params = subcommand.params if subcommand else ()
    return {name for one in params for name in (*one.opts, *one.secondary_opts)}


def test_mistakes_are_refused_without_torch(monkeypatch, tmp_path):
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    for name, objective in (("made", "next"), ("masked", "masked"), ("fill", "fill")):
        (tmp_path / name).mkdir()
        header = header_of(preset("tiny", objective=objective))
        (tmp_path / name / "step-000001.safetensors").write_bytes(header)
    for name, content in (
        ("chats.jsonl", '\ufeff{"messages": []}\n{'),
        ("pairs.json", '[\n{"prompt": "a", "completion": "b"}]'),
        ("tokens.bin", "\1\0"),
        ("text.txt", "ternary weights"), ("empty.txt", ""), ("model.toml", MODEL),
        ("preset.toml", 'preset = "tiny"\n[model]\nctx = 8'), ("steps.toml", "steps = 3"),
    ):  # fmt: skip
        (tmp_path / name).write_text(content)
    (tmp_path / "shard.bin").write_bytes(b"\x88\xd84\1\1".ljust(1024, b"\0"))
    (tmp_path / "empty").mkdir()
    (tmp_path / "theirs").mkdir()
    (tmp_path / "theirs" / "config.json").write_text('{"model_type": "llama"}')
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "config.json").write_text("{}")
    (tmp_path / "run" / "step-000001.safetensors").write_bytes(b"")
    there = {*tmp_path.rglob("*")}
    code = (
        "import sys; sys.modules |= {'torch': None, 'triton': None}\n"
        "import functools; from typer import main\n"
        "main.get_command = functools.cache(main.get_command)\n"  # a third of a call
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
    lines = done.stderr.splitlines(keepends=True)
    said = ["".join(pair) for pair in zip(lines[::2], lines[1::2], strict=True)]
    for two_lines, (words, message) in zip(said, MISTAKES.items(), strict=True):
        assert two_lines.startswith(f"error: {message}"), words
        assert "\nhint: " in two_lines, words
        named = {*re.findall(r"`(--[a-z-]+)", two_lines.split("\nhint: ")[1])}
        assert named <= {"--help"} | options_of(words.split()[0]), (words, named)
    assert {*tmp_path.rglob("*")} == there


def test_gates_may_be_packed_in_the_dtype_of_the_device():
    check_settings({"pack": True})
    check_settings({"preset": "1b", "pack": True, "compute": "fp8"})


def test_bad_places_are_refused(tmp_path, monkeypatch):
    (tmp_path / "folder.png").mkdir()
    (tmp_path / "text.txt").touch()
    for name in ("text.txt", "none", "folder.png", "nowhere/a.png"):
        with pytest.raises(ArbError):
            check_file(tmp_path / name, "--plot", PICTURES)
    for name in ("text.txt", "text.txt/below"):
        with pytest.raises(ArbError, match="is not a folder"):
            check_folder(tmp_path / name, "--ledger")
    monkeypatch.setattr(os, "access", lambda *_: False)
    with pytest.raises(ArbError, match="Permission denied"):
        check_file(tmp_path / "a.png", "--plot", PICTURES)
    with pytest.raises(ArbError, match="Permission denied"):
        check_folder(tmp_path, "--ledger")
