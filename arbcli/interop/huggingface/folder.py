"""The weights of a folder for Transformers: safetensors in one file or in shards, mapped.

Nothing of a folder is run, and nothing outside of it is opened: an index names files of the folder
itself. A header is held against its file before a weight is read.
"""

import math
import mmap
import os
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor

from arbcli.base.errors import ArbError
from arbcli.base.reading import check_schema, open_regular, parse_json, read_json, shown
from arbcli.base.run_files import CONFIG
from arbcli.interop.huggingface.dense import HEAD, sources
from arbcli.model.checkpoint import LARGEST_HEADER
from arbcli.model.language_model import LanguageModel

WEIGHTS = "model.safetensors"
INDEX = f"{WEIGHTS}.index.json"
DTYPES = {"BF16": torch.bfloat16, "F16": torch.float16, "F32": torch.float32}
"""Dtypes by their names in a header."""
ENTRY = {"dtype": str, "shape": list[int], "data_offsets": list[int]}
"""Schema of a tensor's entry in a header."""
MOST_SIZES = 8
"""Dimensions of a tensor."""
UNREAD = "rotary_emb.inv_freq"
"""End of the name of angles that an earlier Transformers saved; they follow from the settings."""
HINT = "copy the folder again, or save it with `save_pretrained`"


class Stored(NamedTuple):
    """Location of a tensor in a file."""

    file: Path
    begin: int
    """Offset of the data from the beginning of the file, in bytes."""
    dtype: str
    """A name of `DTYPES`."""
    shape: tuple[int, ...]


class WeightFolder:
    """The tensors of a folder by name, of which any rows can be read.

    Raises:
        ArbError: there are no safetensors, or a file is missing, damaged or leaves the folder.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.tensors: dict[str, Stored] = {}
        """Stored tensors by name."""
        self._maps: dict[Path, mmap.mmap] = {}
        for name, expected in self._files().items():
            found = dict(_read_header(path / name))
            if expected is not None and (missing := sorted(expected - found.keys())):
                raise ArbError(
                    f"`{path / name}` has no `{missing[0]}`, which `{INDEX}` says is there",
                    hint=HINT,
                )
            kept = found.keys() if expected is None else expected
            self.tensors |= {tensor: found[tensor] for tensor in kept}

    def _files(self) -> dict[str, set[str] | None]:
        """List the files, and the tensors of each that an index names; None is all of them."""
        if not (self.path / INDEX).exists():
            if not (self.path / WEIGHTS).exists():
                raise self._without_weights()
            return {WEIGHTS: None}
        index = read_json(self.path / INDEX, {"weight_map": dict[str, str]}, HINT)
        files: dict[str, set[str] | None] = {}
        for tensor, name in index["weight_map"].items():
            if not name.endswith(".safetensors") or Path(name).name != name or "\\" in name:
                raise ArbError(
                    f"`{self.path / INDEX}`: `{shown(name)}` is not a safetensors file there",
                    hint=HINT,
                )
            files[name] = (files.get(name) or set()) | {tensor}
        return files

    def _without_weights(self) -> ArbError:
        """Make the error of a folder without safetensors."""
        with suppress(OSError):
            for name in sorted(os.listdir(self.path)):
                if name.endswith((".bin", ".pt", ".pth", ".ckpt")):
                    return ArbError(
                        f"`{self.path / name}` is a pickle, which runs code when it is read",
                        hint="get the model as safetensors, or save it so with Transformers",
                    )
        return ArbError(
            f"`{self.path}` has no `{WEIGHTS}`", hint="name a folder of a model as safetensors"
        )

    def read(self, name: str, rows: slice = slice(None)) -> Tensor:
        """Read a tensor, or some of its rows, as float32."""
        stored = self.tensors[name]
        start, stop, _ = rows.indices(stored.shape[0] if stored.shape else 1)
        width = math.prod(stored.shape[1:])
        dtype = DTYPES[stored.dtype]
        begin = stored.begin + start * width * dtype.itemsize
        data = bytearray(
            self._map(stored.file)[begin : begin + (stop - start) * width * dtype.itemsize]
        )
        weight = torch.frombuffer(data, dtype=dtype).to(torch.float32)
        return weight.view(stop - start, *stored.shape[1:])

    def _map(self, file: Path) -> mmap.mmap:
        if file not in self._maps:
            with open_regular(file) as opened:
                self._maps[file] = mmap.mmap(opened.fileno(), 0, access=mmap.ACCESS_READ)
        return self._maps[file]


def _read_header(path: Path) -> Iterator[tuple[str, Stored]]:
    """List the tensors of a file, whose bytes they fill without overlapping."""
    where = f"the header of `{path}`"
    with open_regular(path) as file:
        size = os.fstat(file.fileno()).st_size
        length = int.from_bytes(file.read(8), "little")
        if size < 8 or 8 + length > size:
            raise ArbError(f"`{path}` is truncated", hint=HINT)
        if length > LARGEST_HEADER:
            raise ArbError(f"{where} has {length:,} bytes", hint=HINT)
        try:
            header = parse_json(file.read(length))
        except ValueError as error:
            raise ArbError(f"{where} is not JSON: {error}", hint=HINT) from None
    check_schema(header, {}, where, HINT)
    header.pop("__metadata__", None)
    for name, entry in header.items():
        check_schema(entry, ENTRY, f"`{name}` in {where}", HINT)
    end = 0
    for name, entry in sorted(header.items(), key=lambda item: item[1]["data_offsets"]):
        shape, offsets = entry["shape"], entry["data_offsets"]
        if entry["dtype"] not in DTYPES:
            raise ArbError(
                f"`{path}`: `{name}` is {shown(entry['dtype'])}, and arb reads {', '.join(DTYPES)}",
                hint="import a model that is not quantised",
            )
        if len(shape) > MOST_SIZES or min(shape, default=1) < 0:
            raise ArbError(f"`{path}`: `{name}` has the shape {shown(shape)}", hint=HINT)
        wanted = end + math.prod(shape) * DTYPES[entry["dtype"]].itemsize
        if offsets != [end, wanted]:
            raise ArbError(
                f"`{path}`: `{name}` is at the bytes {shown(offsets)}, not {end} to {wanted}",
                hint=HINT,
            )
        yield name, Stored(path, 8 + length + end, entry["dtype"], tuple(shape))
        end = wanted
    if 8 + length + end != size:
        kind = "is truncated" if 8 + length + end > size else "goes on after its last tensor"
        raise ArbError(f"`{path}` {kind}", hint=HINT)


def check_tensors(folder: WeightFolder, model: LanguageModel) -> None:
    """Check that a folder has the tensors of a model, and no others.

    Raises:
        ArbError: one is missing, unknown or of another shape.
    """
    wanted = {part.hugging_face: part.shape for each in sources(model) for part in each.parts}
    for name, shape in wanted.items():
        if name not in folder.tensors:
            raise ArbError(
                f"`{folder.path}` has no `{name}`",
                hint=f"it is in a file that `{INDEX}` or `{WEIGHTS}` should name: copy it again",
            )
        if (found := folder.tensors[name].shape) != shape:
            raise ArbError(
                f"`{folder.path}`: `{name}` is {list(found)}, and by `{CONFIG}` {list(shape)}",
                hint="copy the folder again",
            )
    for name in sorted(folder.tensors.keys() - wanted.keys()):
        tied = model.config.tied and name == f"{HEAD}.weight"
        if not tied and not name.endswith(UNREAD):
            raise ArbError(
                f"`{folder.path}` has `{name}`, which the architecture does not have",
                hint="import a Llama, Mistral, Qwen 2 or Qwen 3 without additions",
            )
