"""The weights of a folder for Transformers: safetensors in one file or in shards, mapped.

Nothing of a folder is run, and nothing outside of it is opened: an index names files of the folder
itself. The package safetensors checks a header against its file before a weight is read.
"""

import math
import os
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple

import torch
from safetensors import safe_open
from torch import Tensor

from arbcli.base.errors import ArbError, library_errors
from arbcli.base.reading import check_regular, read_json, shown
from arbcli.base.run_files import CONFIG
from arbcli.interop.huggingface.config_json import QUANTIZATION, divides_by_scale
from arbcli.interop.huggingface.dense import HEAD, sources
from arbcli.model.language_model import LanguageModel
from arbcli.model.layers.bitnet import MIN_PEAK

WEIGHTS = "model.safetensors"
INDEX = f"{WEIGHTS}.index.json"
DTYPES = ("BF16", "F16", "F32")
"""Dtypes of weights by their names in a header."""
PACKED = "U8"
"""Dtype of packed trits. Of N = 4 n rows, a byte of row i has t + 1 of the rows i, i + n, i + 2 n
and i + 3 n, in two bits each, the lowest first."""
SCALE = "_scale"
"""End of the name of the one scale of packed trits, after that of their tensor."""
EMBEDDING = "model.embed_tokens.weight"
ROWS_AT_ONCE = 1024
"""Rows of two tensors that are compared at a time."""
UNREAD = "rotary_emb.inv_freq"
"""End of the name of angles that an earlier Transformers saved; they follow from the settings."""
HINT = "copy the folder again, or save it with `save_pretrained`"


class Stored(NamedTuple):
    """A tensor in a file."""

    rows: Any
    """Reads rows of the tensor, as a slice of safetensors."""
    dtype: str
    """A name of `DTYPES`, or `PACKED`."""
    shape: tuple[int, ...]
    scale: float | None = None
    """The scale of packed trits, a factor; None for numbers."""


class PackedTrits:
    """Rows of packed trits of N by K weights, which are read as a slice of safetensors is.

    Args:
        bytes: (N / 4, K) uint8.
    """

    def __init__(self, bytes: Any) -> None:
        self.bytes, self.count = bytes, bytes.get_shape()[0]

    def __getitem__(self, rows: slice) -> Tensor:
        """Unpack rows: (R, K) int8."""
        start, stop, _ = rows.indices(4 * self.count)
        parts = []
        for shift in range(4):
            first = shift * self.count
            here = slice(max(start - first, 0), min(stop - first, self.count))
            if here.start < here.stop:
                parts.append((self.bytes[here] >> 2 * shift & 3).to(torch.int8) - 1)
        return torch.cat(parts)


def pack_rows(trits: Tensor) -> Tensor:
    """Pack (N, K) int8 trits, whose rows are a multiple of four, as (N / 4, K) uint8."""
    parts = (trits + 1).to(torch.uint8).chunk(4)
    return parts[0] | parts[1] << 2 | parts[2] << 4 | parts[3] << 6


class WeightFolder:
    """The tensors of a folder by name, of which any rows can be read.

    Raises:
        ArbError: there are no safetensors, or a file is missing, damaged or leaves the folder.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.tensors: dict[str, Stored] = {}
        """Stored tensors by name."""
        for name, expected in self._files().items():
            tensors = dict(_stored(path / name))
            if expected is not None and (missing := sorted(expected - tensors.keys())):
                raise ArbError(
                    f"`{path / name}` has no `{missing[0]}`, which `{INDEX}` says is there", HINT
                )
            names = tensors.keys() if expected is None else expected
            self.tensors |= {tensor: tensors[tensor] for tensor in names}
        for name, stored in [*self.tensors.items()]:
            if stored.dtype not in DTYPES:
                self._unpack(name, stored)

    def _unpack(self, name: str, stored: Stored) -> None:
        """Replace packed trits and their scale by an object that reads them.

        Raises:
            ArbError: they have no scale, or the dtype is another one.
        """
        scale = self.tensors.pop(name + SCALE, None)
        if stored.dtype != PACKED or scale is None or scale.shape != (1,) or len(stored.shape) != 2:
            raise ArbError(
                f"`{self.path}`: `{name}` is {stored.dtype}, and arb reads {', '.join(DTYPES)}",
                "import a model that is not quantised, or a BitNet",
            )
        value = float(scale.rows[:])
        if not 0 < value < math.inf:
            raise ArbError(f"`{self.path}`: `{name + SCALE}` is {value}", HINT)
        if divides_by_scale(read_json(self.path / CONFIG, {QUANTIZATION: dict})):
            value = 1 / value
        shape = 4 * stored.shape[0], stored.shape[1]
        self.tensors[name] = Stored(PackedTrits(stored.rows), PACKED, shape, value)

    def _files(self) -> dict[str, set[str] | None]:
        """List the files, and the tensors of each that an index names; None is all of them."""
        if (self.path / WEIGHTS).exists():  # Transformers does not read the index of shards then
            return {WEIGHTS: None}
        if not (self.path / INDEX).exists():
            raise self._missing_weights()
        index = read_json(self.path / INDEX, {"weight_map": dict[str, str]}, HINT)
        files: dict[str, set[str] | None] = {}
        for tensor, name in index["weight_map"].items():
            if not name.endswith(".safetensors") or Path(name).name != name or "\\" in name:
                raise ArbError(
                    f"`{self.path / INDEX}`: `{shown(name)}` is not a safetensors file there", HINT
                )
            files[name] = (files.get(name) or set()) | {tensor}
        return files

    def _missing_weights(self) -> ArbError:
        """Make the error of a folder without safetensors."""
        with suppress(OSError):
            for name in sorted(os.listdir(self.path)):
                if name.endswith((".bin", ".pt", ".pth", ".ckpt")):
                    return ArbError(
                        f"`{self.path / name}` is a pickle, which runs code when it is read",
                        "get the model as safetensors, or save it so with Transformers",
                    )
        return ArbError(
            f"`{self.path}` has no `{WEIGHTS}`", "name a folder of a model as safetensors"
        )

    def read(self, name: str, rows: slice = slice(None)) -> Tensor:
        """Read a tensor as float32 on the CPU; the matrix of a BitNet is multiplied by its scale.

        Args:
            name: name in the folder.
            rows: rows to read, (R, ...) of (N, ...).
        """
        stored = self.tensors[name]
        weight = stored.rows[rows].to(torch.float32)
        return weight if stored.scale is None else weight * stored.scale

    def scale(self, name: str) -> float:
        """Return the scale of a BitNet's matrix; that of floats is their mean magnitude."""
        scale = self.tensors[name].scale
        return max(float(self.read(name).abs().mean()), MIN_PEAK) if scale is None else scale


def _stored(path: Path) -> Iterator[tuple[str, Stored]]:
    """Yield the tensors of a file by name."""
    check_regular(path)
    with library_errors(f"`{path}` cannot be read", HINT):
        file = safe_open(path, framework="pt")
        tensors = [(name, file.get_slice(name)) for name in file.keys()]  # noqa: SIM118
    for name, rows in tensors:
        yield name, Stored(rows, rows.get_dtype(), tuple(rows.get_shape()))


def check_tensors(folder: WeightFolder, model: LanguageModel) -> None:
    """Check that a folder has the tensors of a model, and no others.

    Raises:
        ArbError: one is missing, unknown or of another shape.
    """
    shapes = {part.hugging_face: part.shape for source in sources(model) for part in source.parts}
    for name, shape in shapes.items():
        if name not in folder.tensors:
            raise ArbError(
                f"`{folder.path}` has no `{name}`",
                f"it is in a file that `{INDEX}` or `{WEIGHTS}` should name: copy it again",
            )
        if (stored := folder.tensors[name].shape) != shape:
            raise ArbError(
                f"`{folder.path}`: `{name}` is {list(stored)}, and by `{CONFIG}` {list(shape)}",
                "copy the folder again",
            )
    for name in sorted(folder.tensors.keys() - shapes.keys()):
        if model.config.tied and name == f"{HEAD}.weight":
            _check_tied(folder, name)
        elif not name.endswith(UNREAD):
            raise ArbError(
                f"`{folder.path}` has `{name}`, which the architecture does not have",
                "import a Llama, Mistral, Qwen 2 or Qwen 3 without additions",
            )


def _check_tied(folder: WeightFolder, head: str) -> None:
    """Check that a head is the embedding: Transformers ties no others, whatever the settings.

    Raises:
        ArbError: they differ.
    """
    shape = folder.tensors[EMBEDDING].shape
    is_same = folder.tensors[head].shape == shape
    for start in range(0, shape[0], ROWS_AT_ONCE):
        rows = slice(start, start + ROWS_AT_ONCE)
        is_same = is_same and torch.equal(folder.read(head, rows), folder.read(EMBEDDING, rows))
    if not is_same:
        raise ArbError(
            f"`{folder.path}`: `{head}` differs from `{EMBEDDING}`, and `{CONFIG}` ties them",
            f"set `tie_word_embeddings` to false in `{CONFIG}`, or remove `{head}` from the file",
        )
