"""Damaged inputs for every parser, thousands of them; a script.

Each is read by a process that is forked from one that has loaded everything. None may end in a
traceback or by a signal, take more than `SECONDS`, or hold more than `HELD_BYTES`.
"""

import gc
import gzip
import json
import os
import random
import resource
import shutil
import sys
from collections import Counter
from importlib.util import find_spec
from pathlib import Path

import torch

from arbcli import cli
from arbcli.train.configure import new_config
from arbcli.train.run import Observer, start_run

SHAPE = {"sub_norms": False, "dim": 32, "layers": 1, "heads": 2, "ffn": 64, "ctx": 16, "batch": 2}
SECONDS = 5.0
HELD_BYTES = 500 * 10**6
TEXT = b"ternary weights learn to read. " * 200
SETTINGS = (
    b'preset = "tiny"\nsteps = 10\nlr = 0.5\nbatch = 4\nrule = "moment"\ndim = 32\nheads = 2\n'
)
MODEL = (
    b'[model]\nctx = 16\n\n[model.block.a]\nmixer = { kind = "attention", heads = 2 }\n'
    b'channel = { kind = "mlp", width = 48 }\n\n[[model.stage]]\ndim = 32\nblocks = "a * 2"\n'
)
TORCH_FORKED = b"Invalid thread pool!"
"""What torch sometimes says in a process that was forked, rarely; it is tried again."""
TOKENS = (
    b"0", b"-1", b"1e999", b"NaN", b"-Infinity", b"null", b"true", b"[]", b"{}", b'""', b"\x00",
    b"\xff\xfe", b"\n", b"\r\n", b'"', b"[" * 3000, b"9" * 5000, b"1e400", b"\x1b]52;c;aGk=\x07",
    b"9223372036854775808", b"\xed\xa0\x80", b"\\ud800", b"2147483648", b"../../etc/passwd",
)  # fmt: skip


def damage(content: bytes, draw: random.Random) -> bytes:
    """Change bytes, cut, repeat, or put in what confuses parsers, up to four times."""
    data = bytearray(content)
    for _ in range(draw.randint(1, 4)):
        # the beginning has the headers
        place = draw.randrange(min(len(data), draw.choice((64, 2000, len(data) + 1))) + 1)
        kind = draw.randrange(6)
        if kind == 0 and place < len(data):
            data[place] ^= 1 << draw.randrange(8)
        elif kind == 1:
            del data[place : place + draw.choice((1, 8, 100))]
        elif kind == 2:
            del data[place:]
        elif kind == 3:
            data[place:place] = data[place : place + draw.choice((4, 50, 2000))]
        elif kind == 4:
            data[place : place + draw.choice((0, 1, 4, 8))] = draw.choice(TOKENS)
        else:
            data[place : place + 8] = draw.choice((0, 1, 2**31, 2**40, 2**63, 2**64 - 1)).to_bytes(
                8, "little"
            )
    return bytes(data)


def honest(folder: Path) -> dict[str, tuple[Path, list[str]]]:
    """Make a file for each parser, and the words of the command that reads it.

    A file of a folder stands for it: the folder is what is copied.
    """
    text = folder / "text.txt"
    text.write_bytes(TEXT)
    run = folder / "run"
    config = new_config(
        **SHAPE, data=[str(text)], device="cpu", steps=6, keep_best=True, eval_every=3
    )
    start_run(config, run, Observer())
    exports = {"gguf": "model.gguf", "hf": "hf", "safetensors": "model.safetensors"}
    for kind, name in exports.items():
        code, *_ = call(
            ["export", str(run), "--to", kind, "--out", str(folder / name)], folder / "log"
        )
        assert code == 0, (folder / "log").read_text()
    newest = max(run.glob("step-*.safetensors"))
    made = {
        "settings": ("settings.toml", SETTINGS, ["train", "--print-config", "--config"]),
        "model": ("model.toml", MODEL, ["count-params", "--model"]),
        "gzip": ("text.gz", gzip.compress(TEXT), ["evaluate", "--checkpoint", str(run), "--data"]),
        "prompts": (
            "prompts.jsonl",
            b'{"prompt": "ab", "length": 2, "seed": 1}\n{"prompt": "c"}\n',
            ["generate", "--checkpoint", str(run), "--length", "1", "--prompts"],
        ),
        "records": (
            "text.jsonl",
            b'{"text": "ternary weights learn to read what there is"}\n' * 9,
            ["evaluate", "--checkpoint", str(run), "--field", "text", "--data"],
        ),
    }
    if find_spec("zstandard"):
        import zstandard

        content = zstandard.ZstdCompressor().compress(TEXT)
        made["zst"] = ("text.zst", content, ["evaluate", "--checkpoint", str(run), "--data"])
    found = {}
    for name, (file, content, words) in made.items():
        (folder / file).write_bytes(content)
        found[name] = (folder / file, words)
    for file in ("config.json", "metrics.jsonl", newest.name):
        for words in (["inspect"], ["check"], ["train", "--dry-run", "--resume"]):
            found[f"{words[0]} {file[:6]}"] = (run / file, words)
    for path in sorted((folder / "hf").iterdir()):
        if path.suffix != ".py":
            found[f"hf {path.name}"] = (path, ["inspect"])
    for kind in ("gguf", "safetensors"):
        found[kind] = (folder / exports[kind], ["inspect"])
    return found


def call(words: list[str], log: Path) -> tuple[int, float, int]:
    """Run `arb` in a forked process; return its status, seconds of processor time and memory."""
    pid = os.fork()
    if not pid:
        target = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
        for descriptor in (1, 2):
            os.dup2(target, descriptor)
        resource.setrlimit(resource.RLIMIT_CPU, (60, 60))
        sys.argv = ["arb", *words]
        try:
            cli.main()
        except SystemExit as stopped:
            os._exit(stopped.code or 0)
        finally:
            os._exit(99)
    _, status, used = os.wait4(pid, 0)
    return os.waitstatus_to_exitcode(status), used.ru_utime + used.ru_stime, used.ru_maxrss << 10


def tell(line: str) -> None:
    sys.stdout.write(f"{line}\n")
    sys.stdout.flush()


def attack(folder: Path, number: int, seed: int) -> int:
    """Try so many damaged inputs; return how many were read badly, and tell which."""
    torch.set_num_threads(1)  # threads do not survive a fork
    parsers, draw, log = honest(folder), random.Random(seed), folder / "log"
    codes: Counter[str] = Counter()
    gc.freeze()  # else a collection in a forked process copies all there is
    worst = most = 0.0
    bad = 0
    for index in range(number):
        name, (path, words) = [*parsers.items()][index % len(parsers)]
        place = folder / "tried"
        shutil.rmtree(place, ignore_errors=True)
        place.mkdir()
        if path.parent != folder:
            whole = shutil.copytree(path.parent, place / path.parent.name)
            tried, given = whole / path.name, whole
        else:
            tried = given = place / path.name
        tried.write_bytes(damage(path.read_bytes(), draw))
        code, seconds, held = call([*words, str(given)], log)
        if TORCH_FORKED in log.read_bytes():
            code, seconds, held = call([*words, str(given)], log)
        worst, most = max(worst, seconds), max(most, held)
        codes[f"{name}: {code}"] += 1
        said = log.read_bytes()
        if code not in (0, 1, 2) or b"Traceback" in said or seconds > SECONDS or held > HELD_BYTES:
            bad += 1
            kept = shutil.copytree(place, folder / f"bad{index}")
            about = [code, round(seconds, 1), held, str(kept), said[-300:].decode(errors="replace")]
            tell(f"{name}: {about}")
    tell(json.dumps(codes))
    tell(f"{number} inputs, {bad} bad, at most {worst:.1f} s and {most / 1e6:.0f} MB")
    return bad


if __name__ == "__main__":
    sys.exit(bool(attack(Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3]))))
