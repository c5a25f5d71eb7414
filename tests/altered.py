"""Record what readers make of files of which one value or byte is another one.

`python tests/altered.py` writes it to `altered.txt`; `test_what_is_read.py` compares. Each field of
a `config.json` of Transformers, of a header of safetensors or of a checkpoint, of the checkpoint's
metadata and of an index gets other values, and each byte at the start of a GGUF file and of a
checkpoint too; both are cut off, and longer. A line has a message, in which numbers are N and names
are `X`, and their number; or how many files are accepted, and a checksum of what is read of
them.
"""

import json
import math
import re
import struct
import tempfile
import zlib
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import chdir
from hashlib import sha256
from io import BytesIO
from pathlib import Path
from typing import Any

import torch

from arbcli.base.errors import ArbError
from arbcli.interop.gguf.block_types import F32, Q8_0
from arbcli.interop.gguf.container import (
    ARRAY,
    FLOAT32,
    STRING,
    UINT32,
    Entry,
    GGUFFile,
    write_gguf,
)
from arbcli.interop.huggingface.config_json import read_config, rope_parameters
from arbcli.interop.huggingface.folder import INDEX, WEIGHTS, WeightFolder
from arbcli.model.checkpoint import Checkpoint, load_checkpoint, save_checkpoint

WRITTEN = Path(__file__).with_suffix(".txt")
VALUES: tuple = (None, -1, 0, 1, 2, 3, 2**40, 0.0, 0.5, 1.0, True, False, "", "x", [], [1], {},
                 {"x": 1})  # fmt: skip
COMMON = {
    "num_attention_heads": 4, "num_hidden_layers": 3, "num_key_value_heads": 2, "head_dim": 8,
    "hidden_size": 32, "intermediate_size": 24, "max_position_embeddings": 40,
    "rms_norm_eps": 1e-5, "vocab_size": 300, "tie_word_embeddings": False, "rope_theta": 10000.0,
    "hidden_act": "silu", "mlp_bias": False, "attention_bias": False, "use_cache": True,
}  # fmt: skip
ROPES: tuple[dict[str, Any], ...] = (
    {"rope_type": "linear", "factor": 2.0},
    {"type": "llama3", "factor": 8.0, "original_max_position_embeddings": 20,
     "low_freq_factor": 1.0, "high_freq_factor": 4.0, "partial_rotary_factor": 1.0},
    {"rope_type": "yarn", "factor": 4.0, "beta_slow": 1.0, "rope_theta": 500.0},
)  # fmt: skip
MODELS: dict[str, dict[str, Any]] = {
    "llama": {"rope_scaling": ROPES[1]}, "mistral": {"sliding_window": 8},
    "qwen2": {"sliding_window": 8, "use_sliding_window": True, "max_window_layers": 1},
    "qwen3": {"layer_types": ["full_attention", "sliding_attention", "full_attention"],
              "sliding_window": 8, "rope_parameters": ROPES[2]},
    "arb_byte_lm": {"auto_map": {"x": "y"}, "rope_parameters": ROPES[0], "rms_norm_eps": 1e-6},
}  # fmt: skip


class _Outcomes:
    """Messages of a reader with their counts, and a checksum of what it accepts."""

    def __init__(self) -> None:
        self.messages: Counter[str] = Counter()
        self.accepted = self.checksum = 0

    def add(self, read: Callable[[], Any], hide: bool = True) -> None:
        try:
            value = read()
        except ArbError as error:
            text = f"{error} ({error.hint})"
            text = re.sub(r"(cannot be read|not JSON|refused: .* header): .*(?= \()", r"\1", text)
            text = re.sub(r"`[^`]*`" if hide else r"(?<=is )`[^`]*`", "`X`", text)
            self.messages[re.sub(r"-?\d[\d,.]*(e[+-]\d+)?", "N", text)] += 1
        else:
            self.accepted += 1
            self.checksum = zlib.crc32(repr(value).encode(), self.checksum)

    def lines(self) -> Iterator[str]:
        yield f"  {self.accepted} accepted, {self.checksum:08x}"
        yield from (f"  {count}: {text}" for text, count in sorted(self.messages.items()))


def _others(values: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
    """Yield an object with each field left out or another value, and those of objects in it."""
    for name, value in values.items():
        yield {other: content for other, content in values.items() if other != name}
        for other in VALUES:
            yield {**values, name: other}
        if isinstance(value, dict):
            yield from ({**values, name: inner} for inner in _others(value))
        if isinstance(value, list):
            for index in range(len(value)):
                for other in VALUES:
                    yield {**values, name: [*value[:index], other, *value[index + 1 :]]}
                yield {**values, name: value[:index]}


def _other_bytes(data: bytes, places: Iterable[int]) -> Iterator[bytes]:
    """Yield data with a byte at each place changed in three ways, cut off there, and longer."""
    for place in places:
        for other in {0, 255, (data[place] + 1) % 256} - {data[place]}:
            yield data[:place] + bytes([other]) + data[place + 1 :]
        yield data[:place]
    yield from (data + b"x", data[:-1])


def _config_outcomes() -> Iterator[tuple[str, _Outcomes]]:
    for model_type, folder in MODELS.items():
        outcomes = _Outcomes()
        for values in _others(COMMON | {"model_type": model_type} | folder):
            outcomes.add(lambda v=values: read_config(v, "it", rule="carry"), hide=False)
        for rope in ROPES:
            values = COMMON | {"model_type": model_type} | folder | {"rope_parameters": rope}
            outcomes.add(lambda v=values: rope_parameters(
                read_config(v, "it").main.blocks[0].mixer.rotary))  # fmt: skip
        yield f"config.json of {model_type}", outcomes


def _gguf_outcomes() -> Iterator[tuple[str, _Outcomes]]:
    outcomes, content, path = _Outcomes(), BytesIO(), Path("model.gguf")
    keys = {"a.name": (STRING, "some"), "a.list": (UINT32, [3, 4]), "a.float": (FLOAT32, 0.5),
            "a.words": (STRING, ["x", "yz"]), "a.number": (UINT32, 7)}  # fmt: skip
    entries = [Entry("one", (2, 32), F32), Entry("two", (3, 64), Q8_0)]
    parts = [torch.zeros(entry.num_bytes, dtype=torch.uint8) for entry in entries]
    write_gguf(content, keys, entries, parts)
    data = content.getvalue()
    head = len(data) - sum(-(-entry.num_bytes // 32) * 32 for entry in entries)

    def read() -> tuple:
        file = GGUFFile(path)
        shapes = [(name, entry.shape, entry.kind.name) for name, entry in file.entries.items()]
        sums = [float(file.tensor(name).sum()) for name in file.entries]
        return list(file.keys.items()), shapes, sums

    assert ARRAY in data[:head]
    for other in _other_bytes(data, range(head)):
        path.write_bytes(other)
        outcomes.add(read)
    yield "a GGUF file", outcomes


def _safetensors_outcomes() -> Iterator[tuple[str, _Outcomes]]:
    def write(name: str, header: Any, data: bytes) -> None:
        text = json.dumps(header).encode()
        Path(name).write_bytes(struct.pack("<Q", len(text)) + text + data)

    def read() -> list:
        folder = WeightFolder(Path())
        return [(name, folder.read(name).sum()) for name in sorted(folder.tensors)]

    header = {
        "one": {"dtype": "F32", "shape": [2, 3], "data_offsets": [0, 24]},
        "two": {"dtype": "BF16", "shape": [4], "data_offsets": [24, 32]},
        "__metadata__": {"format": "pt"},
    }
    outcomes = _Outcomes()
    for other in _others(header):
        write(WEIGHTS, other, bytes(32))
        outcomes.add(read)
    write(WEIGHTS, header, bytes(32))
    whole = Path(WEIGHTS).read_bytes()
    for other in _other_bytes(whole, (*range(8), *range(8, len(whole), 5))):
        Path(WEIGHTS).write_bytes(other)
        outcomes.add(read)
    yield "safetensors", outcomes
    outcomes = _Outcomes()
    Path(WEIGHTS).rename("a.safetensors").write_bytes(whole)
    write("b.safetensors", {"six": header["one"]}, bytes(24))
    index = {"weight_map": {"one": "a.safetensors", "two": "a.safetensors", "six": "b.safetensors"}}
    names = ("a.safetensors", "b.safetensors", "../a.safetensors", "a.bin", "none.safetensors")
    others = [{"weight_map": index["weight_map"] | {"two": name}} for name in names]
    for other in (*_others(index), *others):
        Path(INDEX).write_text(json.dumps(other))
        outcomes.add(read)
    yield "an index", outcomes


def _canonical(value: Any) -> str:
    return json.dumps(value, sort_keys=True, separators=(",", ":"))


def _other_headers(data: bytes) -> Iterator[bytes]:
    """Yield a checkpoint with another header, or with other metadata and the digest of them."""
    end = 8 + int.from_bytes(data[:8], "little")
    header = json.loads(data[8:end])
    metadata, tensor = json.loads(header["__metadata__"]["arb"]), header["a.trits"]
    del metadata["digest"]
    others = [
        tensor | {"shape": [2**40], "data_offsets": [0, 2**40]}, tensor | {"shape": [2**70]},
        tensor | {"shape": [1] * 10_000}, tensor | {"data_offsets": [2**62, 2**62 + 6]},
    ]  # fmt: skip
    headers = [*_others(header), *({**header, "a.trits": other} for other in others)]
    said = ["\ud800", '{"format":NaN}', '{"format":1,"format":1}', "[" * 5000, '{"a":' * 990 + "1"]
    for other in (*_others(metadata), metadata | {"config": {"x": math.nan}}):
        digest = sha256(_canonical(other).encode()).hexdigest()
        said.append(_canonical(other | {"digest": digest}))
    headers += [{**header, "__metadata__": {"arb": text}} for text in said]
    for text in map(_canonical, headers):
        padded = text.encode() + b" " * (-len(text) % 8)
        yield len(padded).to_bytes(8, "little") + padded + data[end:]


def _checkpoint_outcomes() -> Iterator[tuple[str, _Outcomes]]:
    tensors = {"a.trits": torch.arange(6, dtype=torch.uint8).view(2, 3)}
    outcomes = _Outcomes()
    whole = Checkpoint(3, {"x": 1}, {"refused": 2}, {"text": "y"}, tensors)
    path = save_checkpoint(Path(), whole)
    data = path.read_bytes()
    places = (*range(8), *range(8, len(data), 3))
    for other in (*_other_bytes(data, places), *_other_headers(data)):
        path.write_bytes(other)
        outcomes.add(lambda: load_checkpoint(path))
    yield "a checkpoint", outcomes


def altered() -> Iterator[str]:
    """Yield the lines of all kinds of files."""
    with tempfile.TemporaryDirectory() as folder, chdir(folder):
        for kind in (_config_outcomes, _gguf_outcomes, _safetensors_outcomes, _checkpoint_outcomes):
            for name, outcomes in kind():
                yield from (name, *outcomes.lines())


if __name__ == "__main__":
    WRITTEN.write_text("\n".join(altered()) + "\n", encoding="utf-8")
