"""Record the JSON output of commands on small CPU runs, from the first step to an export.

`python tests/commands/json_output.py` writes it to `json_output.txt`, and `test_json_output.py`
compares. Numbers with a decimal point may differ by a relative error, as their last digits depend
on the machine; values that measure the machine are omitted.
"""

import contextlib
import io
import json
import os
import re
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest import mock

from arbcli.cli import main
from arbcli.training import sample
from arbcli.training.trainer import Trainer

WRITTEN = Path(__file__).with_suffix(".txt")
TOLERANCE = 0.1
"""Relative tolerance of numbers with a decimal point: losses after few steps, on any machine."""
MEASURED = re.compile(
    r"seconds|_ms|per_s|time|free|available|peak|threads|machine|version|commit|python|torch|"
    r"triton|digest|sample$|origin|begun|started|live_bytes|octaves|different|largest|num_equal|^text$|created|compiled|loaded|mfu|allocat|reserv|gpu$"
)
"""Names of values that depend on the machine or on versions."""
TINY = ["--preset", "tiny", "--dim", "32", "--layers", "2", "--heads", "2", "--ffn", "48",
        "--ctx", "16", "--no-sub-norms"]  # fmt: skip
PLACE = ["--device", "cpu", "--backend", "torch", "--compute", "fp32"]
RUN = ["--data", "text.txt", "--seed", "5", *PLACE]
SCENES: dict[str, list[str]] = {
    "train": ["train", *TINY, *RUN, "--batch", "3", "--steps", "4", "--warmup", "2",
              "--accum", "2", "--out", "a",
              "--log-every", "2", "--eval-every", "3", "--save-every", "2", "--sample-every", "3",
              "--keep", "2", "--keep-best", "--lr", "0.5", "--schedule", "linear",
              "--final-lr", "0.125"],
    "check": ["check", "a"],
    "resume": ["train", "--resume", "a", "--steps", "5"],
    "check a finished run": ["check", "a"],
    "inspect": ["inspect", "a"],
    "inspect two": ["inspect", "a/step-000004.safetensors", "--diff", "a"],
    "compare": ["compare", "a"],
    "evaluate": ["evaluate", "--checkpoint", "a", "--data", "val.txt", "--stride", "5",
                 "--batch", "2", *PLACE],
    "generate": ["generate", "--checkpoint", "a", "--prompt", "It is ", "--length", "6",
                 "--temperature", "0.5", "--top-k", "40", "--top-p", "0.75", "--seed", "3",
                 "--kv", "int8", *PLACE],
    "generate several": ["generate", "--checkpoint", "a", "--prompts", "prompts.jsonl",
                         "--batch", "2", "--length", "4", "--seed", "7", *PLACE],
    "count": ["count-params", "--preset", "hnet-tiny", "--weights", "anneal"],
    "what if": ["audit-memory", *TINY, "--what-if"],
    "budget": ["audit-memory", *TINY, "--accum", "2", "--budget", "3GiB", "--device", "cpu"],
    "export": ["export", "a", "--to", "gguf", "--type", "bf16", "--out", "a.gguf"],
    "export for Transformers": ["export", "a", "--to", "hf", "--out", "hf"],
    "inspect an export": ["inspect", "a.gguf"],
    "import": ["import", "hf", "--out", "d", "--budget", "1GiB"],
    "inspect an import": ["inspect", "d"],
    "settings": ["train", *TINY, *RUN, "--rule", "nibble", "--print-config"],
    "nothing there": ["evaluate", "--checkpoint", "nowhere", "--data", "text.txt"],
}  # fmt: skip
"""Commands in their order, in a folder with two texts and prompts."""
RECORDS = (
    "a/metrics.jsonl", "a/config.json", "hf/config.json", "hf/generation_config.json",
    "hf/tokenizer_config.json",
)  # fmt: skip


def run_commands() -> list[str]:
    """Run the commands in a new folder; return lines of their output and of their files."""
    before = Path.cwd()
    few = mock.patch.object(Trainer.evaluate.__wrapped__, "__defaults__", (2,))
    short = mock.patch.object(sample, "SAMPLE_BYTES", 4)
    with tempfile.TemporaryDirectory() as folder, mock.patch.dict(os.environ), few, short:
        os.environ |= {"XDG_CACHE_HOME": f"{folder}/cache", "COLUMNS": "100"}
        os.chdir(folder)
        try:
            _write_texts()
            lines: list[str] = []
            for name, words in SCENES.items():
                code, out, err = _run(words if "--prompts" in words else [*words, "--json"])
                lines += ["", f"{name}: {code}", *_output_values(out)]
                lines += [line for line in err.splitlines() if line.startswith(("error", "hint"))]
            for name in RECORDS:
                lines += ["", name, *_output_values(Path(name).read_text())]
            lines += sorted(str(path) for name in ("a", "d", "hf") for path in Path(name).iterdir())
        finally:
            os.chdir(before)
    return [line.replace(folder, "FOLDER") for line in lines]


def differences(lines: list[str], wanted: list[str]) -> list[str]:
    """Return the lines that differ, numbers by more than the tolerance."""
    pairs = zip(lines, wanted, strict=False)
    apart = [f"{one}   for   {other}" for one, other in pairs if not _alike(one, other)]
    return apart + ["lines"] * (len(lines) != len(wanted))


def _alike(one: str, other: str) -> bool:
    (name, _, value), (wanted, _, expected) = one.rpartition(" "), other.rpartition(" ")
    try:
        numbers = float(value), float(expected)
    except ValueError:
        return one == other
    if "." not in value + expected:
        return one == other
    return name == wanted and abs(numbers[0] - numbers[1]) <= TOLERANCE * abs(numbers[1]) + 1e-3


def _write_texts() -> None:
    words = b"It is a text of lines, each with a number: "
    Path("text.txt").write_bytes(b"".join(words + b"%d.\n" % (n * n) for n in range(200)))
    Path("val.txt").write_bytes(b"".join(words + b"%d.\n" % (n * n + 1) for n in range(9)))
    Path("prompts.jsonl").write_text('{"prompt": "one", "top_k": 9}\n"two"\n"three"\n')


def _run(words: list[str]) -> tuple[Any, str, str]:
    out, err = (io.TextIOWrapper(io.BytesIO(), "utf-8", write_through=True) for _ in range(2))
    arguments = mock.patch.object(sys, "argv", ["arb", *words])
    with arguments, contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        try:
            main()
            code: Any = None
        except SystemExit as stopped:
            code = stopped.code
    return code, *(part.buffer.getvalue().decode() for part in (out, err))


def _output_values(text: str) -> Iterator[str]:
    """Yield the values of a JSON object, or of one per line."""
    try:
        objects = [json.loads(text)]
    except ValueError:
        objects = [json.loads(line) for line in text.splitlines()]
    yield f"{len(objects)} of these:"
    for last in objects[-1:]:
        yield from _flat("", last)


def _flat(name: str, value: Any) -> Iterator[str]:
    if name in ("config", "model.stages"):  # those of `config.json` and of `count-params`
        yield f"{name} has {len(value)}"
    elif isinstance(value, dict | list) and value:
        pairs = sorted(value.items()) if isinstance(value, dict) else [*enumerate(value)]
        if isinstance(value, list) and len(pairs) > 2:
            yield f"{name} has {len(pairs)} of these:"
            pairs = pairs[-1:]
        for key, inner in pairs:
            yield from _flat(f"{name}.{key}".lstrip("."), inner)
    elif MEASURED.search(name):
        yield f"{name} {type(value).__name__}"
    else:
        yield f"{name} {f'{value:.4g}' if isinstance(value, float) else json.dumps(value)}"


if __name__ == "__main__":
    WRITTEN.write_text("\n".join(run_commands()) + "\n", encoding="utf-8")
