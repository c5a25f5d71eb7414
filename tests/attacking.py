"""Damaged inputs for every parser, thousands of them; a script.

Each is read by a process that is forked from one that has loaded everything. None may end in a
traceback or by a signal, take more than `SECONDS`, or hold more than `HELD_BYTES`.
"""

import gc
import gzip
import json
import os
import random
import re
import resource
import shutil
import signal
import sys
from collections import Counter
from importlib.util import find_spec
from pathlib import Path

import torch
from folders import plain_folder
from graph_parts import graph_config
from killing import run_arb, write_tokenizer
from safetensors.torch import load_file, save_file

from arbcli.config.model_file import model_lines
from arbcli.training.configure import new_config
from arbcli.training.observer import Observer
from arbcli.training.run import start_run

SHAPE = {"sub_norms": False, "dim": 32, "layers": 1, "heads": 2, "ffn": 64, "ctx": 16, "batch": 2}
CHATML = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
SECONDS = 5.0
HELD_BYTES = 500 * 10**6
FOLDERS = ("run", "hf", "llama", "shards", "chat")
TEXT = b"ternary weights learn to read. " * 200
SETTINGS = (
    b'preset = "tiny"\nsteps = 10\nlr = 0.5\nbatch = 4\nschedule = "wsd"\n\n'
    b'[model]\nrule = "moment"\ndim = 32\nheads = 2\n'
)
MODEL = (
    b'[model]\nctx = 16\n\n[model.block.a]\nmixer = { kind = "attention", heads = 2 }\n'
    b'channel = { kind = "mlp", width = 48 }\n\n[[model.stage]]\ndim = 32\nblocks = "a*2"\n'
)
OF_A_STEP = (
    "--steps 1 --batch 1 --ctx 8 --device cpu --no-save --quiet --eval-every 0 --compute fp32"
)
AUDITED = ("--batch", "1", "--device", "cpu")
OPTIONS = (
    "--lr", "--steps", "--batch", "--accum", "--ctx", "--dim", "--heads", "--layers", "--ffn",
    "--seed", "--final-lr", "--warmup", "--schedule", "--rule", "--weights", "--optimizer",
    "--tscale-type", "--compute", "--reduce-dtype", "--val", "--field", "--data",
    "--save-every", "--keep",
    "--codes", "--knowledge", "--outer-dim", "--chunk-length", "--window", "--edges", "--device",
    "--backend", "--config", "--model", "--tokenizer", "--minutes", "--log", "--weights",
)  # fmt: skip
PATTERNS = (
    "*", "**", "/", "[", "]", "[!", "?", "\n", ":0.5", ":", "..", "~", "{a,b}", "\udc80", " ",
)  # fmt: skip
"""Pieces of a path with wildcards."""
VALUE = re.compile(rb'"[^"]*"|-?\d[\d.e+-]*|true|false|null')
VALUES = (
    b"0", b"-1", b"1", b"2", b"3", b"7", b"64", b"1000", b"65536", b"1000000", b"2147483647",
    b"2147483648", b"9223372036854775808", b"1e999", b"-0.0", b"0.5", b"1e-320", b"NaN", b"null",
    b"true", b"[]", b"{}", b'""', b'"a"', b"[1]", b"[[]]", b'{"kind": 1}', b'"..'  + b'/a"',
    b'"/etc/passwd"', b'"\xff"', b'"\\ud800"', b'"\\u0000"', b'"all"', b'"none"', b"9" * 5000,
    b'"' + b"x" * 70_000 + b'"', b"[" * 70 + b"]" * 70, b'"(a+)+$"', b'"(?=(a|b)*)*"',
)  # fmt: skip
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


def confuse(content: bytes, draw: random.Random) -> bytes:
    """Put values that parsers do not expect in place of values, up to three times.

    The header of safetensors keeps its length right, so what is in it is reached.
    """
    head, text, rest = b"", content, b""
    size = int.from_bytes(content[:8], "little")
    if content[8:9] == b"{" and size < len(content):
        head, text, rest = content[:8], content[8 : 8 + size], content[8 + size :]
    for _ in range(draw.randint(1, 3)):
        if not (places := [*VALUE.finditer(text)]):
            break
        place = draw.choice(places)
        own = draw.random() < 0.2  # another value that the file has itself
        value = draw.choice(places)[0] if own else draw.choice(VALUES)
        text = text[: place.start()] + value + text[place.end() :]
    return (len(text).to_bytes(8, "little") if head else b"") + text + rest


def damaged(content: bytes, draw: random.Random) -> bytes:
    """Damage a file, or confuse it where it holds values as text."""
    readable = content[:1] in b"[{p#" or content[8:9] == b"{"
    return (confuse if readable and draw.random() < 0.6 else damage)(content, draw)


def honest(folder: Path) -> dict[str, tuple[Path, list[str]]]:
    """Make a file for each parser, and the words of the command that reads it.

    A file of a folder stands for it: the folder is what is copied. `PLACE` in the words is an empty
    folder.
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
        must(["export", str(run), "--to", kind, "--out", str(folder / name)], folder / "log")
    newest = max(run.glob("step-*.safetensors"))
    evaluate = ["evaluate", "--checkpoint", str(run), "--device", "cpu"]
    train = ["train", *OF_A_STEP.split(), "--data", str(text)]
    records = b'{"text": "ternary weights learn to read what there is"}\n' * 9
    assembled = "\n".join(model_lines(graph_config())).encode()
    made = {
        "settings": ("settings.toml", SETTINGS, ["train", "--print-config", "--config"]),
        "model": ("model.toml", MODEL, ["count-params", "--model"]),
        "model trained": ("trained.toml", MODEL, [*train, "--model"]),
        "model of parts": ("parts.toml", assembled, ["count-params", "--model"]),
        "model audited": ("audited.toml", assembled, ["audit-memory", *AUDITED, "--model"]),
        "gzip": ("text.gz", gzip.compress(TEXT), [*evaluate, "--data"]),
        "plain": ("plain.txt", TEXT, [*evaluate, "--data"]),
        "prompts": (
            "prompts.jsonl",
            b'{"prompt": "ab", "length": 2, "seed": 1}\n{"prompt": "c"}\n',
            ["generate", "--checkpoint", str(run), "--length", "1", "--prompts"],
        ),
        "records": ("text.jsonl", records, [*evaluate, "--field", "text", "--data"]),
        "packed records": (
            "text.jsonl.gz", gzip.compress(records), [*evaluate, "--field", "text", "--data"],
        ),
    }  # fmt: skip
    if find_spec("zstandard"):
        import zstandard

        content = zstandard.ZstdCompressor().compress(TEXT)
        made["zst"] = ("text.zst", content, [*evaluate, "--data"])
    if find_spec("pyarrow"):
        import pyarrow
        from pyarrow import parquet

        table = pyarrow.table({"text": ["ternary weights learn to read"] * 90, "n": [*range(90)]})
        parquet.write_table(table, folder / "made.parquet", row_group_size=40)
        content = (folder / "made.parquet").read_bytes()
        made["parquet"] = ("text.parquet", content, [*evaluate, "--field", "text", "--data"])
    found = {}
    if find_spec("tokenizers"):
        write_tokenizer(folder / "tokenizer.json")
        content = (folder / "tokenizer.json").read_bytes()
        made["tokenizer"] = ("made.json", content, [*train, "--tokenizer"])
        if find_spec("jinja2"):
            made |= chats(folder)
            for path in sorted((folder / "chat").iterdir()):
                words = [*of_chats(folder), "--data", str(folder / "honest.jsonl"), "--tokenizer"]
                found[f"chat {path.name}"] = (path, words)
    if find_spec("soundfile") and find_spec("PIL"):
        made |= media(folder, evaluate)
    for name, (file, content, words) in made.items():
        (folder / file).write_bytes(content)
        found[name] = (folder / file, words)
    for file in ("config.json", "metrics.jsonl", newest.name):
        for words in (["inspect"], ["check"], ["train", "--dry-run", "--resume"]):
            found[f"{words[0]} {file[:6]}"] = (run / file, words)
        found[f"resume {file[:6]}"] = (run / file, ["train", "--steps", "7", "--resume"])
        found[f"export {file[:6]}"] = (run / file, ["export", "--to", "hf", "--out", "PLACE/hf"])
    found["config of a run"] = (run / "config.json", ["train", "--print-config", "--config"])
    for path in sorted((folder / "hf").iterdir()):
        if path.suffix != ".py":
            found[f"hf {path.name}"] = (path, ["inspect"])
    plain_folder(folder / "llama")
    in_shards(folder / "llama", folder / "shards")
    for source in ("llama", "shards"):
        for path in sorted((folder / source).iterdir()):
            found[f"import {source} {path.name}"] = (path, ["import", "--out", "PLACE/run"])
    for kind in ("gguf", "safetensors"):
        found[kind] = (folder / exports[kind], ["inspect"])
    return found


def of_chats(folder: Path) -> list[str]:
    return ["train", *OF_A_STEP.split(), "--ctx", "32", "--field", "messages"]


def chats(folder: Path) -> dict[str, tuple[str, bytes, list[str]]]:
    """Make records of chats, of questions and of documents, and a tokenizer with its template."""
    (folder / "chat").mkdir()
    tokenizer = folder / "chat" / "tokenizer.json"
    write_tokenizer(tokenizer, ("<|im_start|>", "<|im_end|>"))
    (folder / "chat" / "chat_template.jinja").write_text(CHATML)
    about = {"eos_token": "<|im_end|>", "chat_template": CHATML}
    (folder / "chat" / "tokenizer_config.json").write_text(json.dumps(about))
    said = [{"role": "user", "content": "ab?"}, {"role": "assistant", "content": "c"}]
    lines = {
        "messages": {"messages": said},
        "prompt+completion": {"prompt": "ab?", "completion": "c"},
        "+text": {"text": "ternary weights"},
    }
    made = {}
    for field, record in lines.items():
        words = of_chats(folder)
        words[words.index("messages")] = field
        words += ["--tokenizer", str(tokenizer), "--data"]
        made[f"chats {field}"] = (f"{len(made)}.jsonl", json.dumps(record).encode() + b"\n", words)
    (folder / "honest.jsonl").write_text(f"{json.dumps(lines['messages'])}\n" * 20)
    return {name: (file, line * 20, words) for name, (file, line, words) in made.items()}


def media(folder: Path, evaluate: list[str]) -> dict[str, tuple[str, bytes, list[str]]]:
    """Make sounds and pictures, and records that join them with text."""
    import soundfile
    from PIL import Image

    made = {}
    for suffix in ("wav", "flac", "ogg"):
        soundfile.write(folder / f"made.{suffix}", [0.1, -0.2, 0.3] * 200, 8000)
    for suffix in ("png", "jpg", "webp"):
        Image.new("RGB", (24, 20), (200, 10, 90)).save(folder / f"made.{suffix}")
    for suffix in ("wav", "flac", "ogg", "png", "jpg", "webp"):
        content = (folder / f"made.{suffix}").read_bytes()
        made[f"media {suffix}"] = (f"a.{suffix}", content, [*evaluate, "--data"])
        if suffix in ("wav", "png"):
            words = ["generate", *evaluate[1:], "--length", "1", "--bytes", "--prompt-file"]
            made[f"prompt {suffix}"] = (f"b.{suffix}", content, words)
    parts = [{"text": "a "}, {"sound": str(folder / "made.wav")}]
    parts.append({"picture": str(folder / "made.png")})
    record = json.dumps({"parts": parts}).encode() + b"\n"
    made["joined"] = ("joined.jsonl", record * 3, [*evaluate, "--field", "parts", "--data"])
    return made


def in_shards(source: Path, target: Path) -> None:
    """Write a folder for Transformers again, its weights in two files with an index."""
    weights = load_file(source / "model.safetensors")
    files = [f"model-0000{number}-of-00002.safetensors" for number in (1, 2)]
    of = {name: files[index % 2] for index, name in enumerate(sorted(weights))}
    target.mkdir()
    for file in files:
        save_file({n: weights[n] for n, its in of.items() if its == file}, target / file)
    index = {"metadata": {"total_size": 1}, "weight_map": of}
    (target / "model.safetensors.index.json").write_text(json.dumps(index))
    shutil.copy(source / "config.json", target)


def arguments(folder: Path, draw: random.Random) -> list[str]:
    """Draw options, or paths, that somebody may type or a script may make."""
    value = draw.choice((*VALUES, *TOKENS, b"1", b"32", b"0.5", b"1,2,3", b"32,32"))
    word = value.replace(b"\x00", b"").decode(errors="surrogateescape")
    if draw.random() < 0.3:
        pieces = (*PATTERNS, word, str(folder), str(folder / "text.txt"), "run")
        word = "".join(draw.choices(pieces, k=draw.randint(1, 5))).replace("\x00", "")
        return ["evaluate", "--checkpoint", str(folder / "run"), "--data", word]
    options = [
        "train",
        "--print-config",
        "--preset",
        draw.choice(["tiny", "hnet-tiny", "arb-tiny"]),
    ]
    for option in draw.sample(OPTIONS, draw.randint(1, 2)):
        options += [option, word]
    return options


def must(words: list[str], log: Path) -> None:
    """Run a command that has to work.

    Raises:
        AssertionError: it does not.
    """
    code, *_ = call(words, log)
    assert code == 0, log.read_text()


def call(words: list[str], log: Path) -> tuple[int, float, int]:
    """Run `arb` in a forked process; return its status, seconds of processor time and memory."""
    pid = os.fork()
    if not pid:
        target = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
        for descriptor in (1, 2):
            os.dup2(target, descriptor)
        resource.setrlimit(resource.RLIMIT_CPU, (60, 60))
        signal.alarm(180)  # ends what waits for ever
        run_arb(words)
    _, status, used = os.wait4(pid, 0)
    return os.waitstatus_to_exitcode(status), used.ru_utime + used.ru_stime, used.ru_maxrss << 10


def tell(line: str) -> None:
    sys.stdout.write(f"{line}\n")
    sys.stdout.flush()


def attack(folder: Path, number: int, seed: int, *only: str) -> int:
    """Try so many damaged inputs; return how many were read badly, and tell which.

    Args:
        folder: for files; those that were read badly stay.
        number: of inputs.
        seed: of the random choices.
        only: parsers to try, by the beginnings of their names; none are all.
    """
    torch.set_num_threads(1)  # threads do not survive a fork
    os.environ["XDG_CACHE_HOME"] = str(folder / "cache")
    os.environ["TOKENIZERS_PARALLELISM"] = "false"  # else it complains of the fork
    parsers, draw, log = honest(folder), random.Random(seed), folder / "log"
    names = [n for n in (*parsers, "arguments") if not only or n.startswith(only)]
    for name in names:
        if name != "arguments":  # whatever is refused is refused for its damage
            must(damaged_copy(*parsers[name], folder / "tried", None), log)
    tell(f"{len(names)} parsers")
    codes: Counter[str] = Counter()
    gc.freeze()  # else a collection in a forked process copies all there is
    worst = most = 0.0
    bad = 0
    for index in range(number):
        name, place = names[index % len(names)], folder / "tried"
        if name == "arguments":
            words = arguments(folder, draw)
        else:
            words = damaged_copy(*parsers[name], place, draw)
        code, seconds, held = call(words, log)
        worst, most = max(worst, seconds), max(most, held)
        codes[f"{name}: {code}"] += 1
        said = log.read_bytes()
        if code not in (0, 1, 2) or b"Traceback" in said or seconds > SECONDS or held > HELD_BYTES:
            bad += 1
            kept = folder / f"bad{index}"
            if place.exists():
                shutil.copytree(place, kept)
            about = [code, round(seconds, 1), held, str(kept), said[-300:].decode(errors="replace")]
            tell(f"{name}: {about} {[word[:200] for word in words]!a}")
        if index % 100 == 99:
            tell(f"after {index + 1}: {bad} bad, at most {worst:.1f} s and {most / 1e6:.0f} MB")
    tell(json.dumps(codes))
    tell(f"{number} inputs, {bad} bad, at most {worst:.1f} s and {most / 1e6:.0f} MB")
    return bad


def damaged_copy(
    path: Path, words: list[str], place: Path, draw: random.Random | None
) -> list[str]:
    """Copy a file, or the folder it stands for, damaged if `draw` is; return words that name it."""
    shutil.rmtree(place, ignore_errors=True)
    (place / "made").mkdir(parents=True)
    if path.parent.name in FOLDERS:
        whole = shutil.copytree(path.parent, place / path.parent.name)
        tried, named = whole / path.name, whole
        if "--config" in words:
            named = tried
        elif words[-1] == "--tokenizer":
            named = whole / "tokenizer.json"
    else:
        tried = named = place / path.name
        shutil.copy(path, tried)
    if draw is not None:
        tried.write_bytes(damaged(path.read_bytes(), draw))
    return [*(word.replace("PLACE", str(place / "made")) for word in words), str(named)]


if __name__ == "__main__":
    sys.exit(bool(attack(Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3]), *sys.argv[4:])))
