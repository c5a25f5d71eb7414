"""The weights of a folder for Transformers: safetensors in one file or in shards, mapped.

Nothing of a folder is run, and nothing outside of it is opened: an index names files of the folder
itself. The package safetensors checks a header against its file before a weight is read.
"""

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
from arbcli.interop.huggingface.dense import HEAD, sources
from arbcli.model.language_model import LanguageModel

WEIGHTS = "model.safetensors"
INDEX = f"{WEIGHTS}.index.json"
DTYPES = ("BF16", "F16", "F32")
"""Dtypes of weights by their names in a header."""
UNREAD = "rotary_emb.inv_freq"
"""End of the name of angles that an earlier Transformers saved; they follow from the settings."""
HINT = "copy the folder again, or save it with `save_pretrained`"


class Stored(NamedTuple):
    """A tensor in a file."""

    rows: Any
    """Reads rows of the tensor, as a slice of safetensors."""
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
        for name, expected in self._files().items():
            tensors = dict(_stored(path / name))
            if expected is not None and (missing := sorted(expected - tensors.keys())):
                raise ArbError(
                    f"`{path / name}` has no `{missing[0]}`, which `{INDEX}` says is there",
                    hint=HINT,
                )
            kept = tensors.keys() if expected is None else expected
            self.tensors |= {tensor: tensors[tensor] for tensor in kept}

    def _files(self) -> dict[str, set[str] | None]:
        """List the files, and the tensors of each that an index names; None is all of them."""
        if not (self.path / INDEX).exists():
            if not (self.path / WEIGHTS).exists():
                raise self._missing_weights()
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

    def _missing_weights(self) -> ArbError:
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
        return self.tensors[name].rows[rows].to(torch.float32)


def _stored(path: Path) -> Iterator[tuple[str, Stored]]:
    """Yield the tensors of a file by name."""
    check_regular(path)
    with library_errors(f"`{path}` cannot be read", HINT):
        file = safe_open(path, framework="pt")
        tensors = [(name, file.get_slice(name)) for name in file.keys()]  # noqa: SIM118
    for name, rows in tensors:
        if (dtype := rows.get_dtype()) not in DTYPES:
            raise ArbError(
                f"`{path}`: `{name}` is {dtype}, and arb reads {', '.join(DTYPES)}",
                hint="import a model that is not quantised",
            )
        yield name, Stored(rows, dtype, tuple(rows.get_shape()))


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
                hint=f"it is in a file that `{INDEX}` or `{WEIGHTS}` should name: copy it again",
            )
        if (stored := folder.tensors[name].shape) != shape:
            raise ArbError(
                f"`{folder.path}`: `{name}` is {list(stored)}, and by `{CONFIG}` {list(shape)}",
                hint="copy the folder again",
            )
    for name in sorted(folder.tensors.keys() - shapes.keys()):
        tied = model.config.tied and name == f"{HEAD}.weight"
        if not tied and not name.endswith(UNREAD):
            raise ArbError(
                f"`{folder.path}` has `{name}`, which the architecture does not have",
                hint="import a Llama, Mistral, Qwen 2 or Qwen 3 without additions",
            )
