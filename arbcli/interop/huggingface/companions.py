"""Companion files of a model: configuration, settings, chat template.

A run stores copies in its folder `COMPANIONS`, and a run that begins with its weights copies them.
All are unchanged but `config.json`, which gets the name of the model. The tokenizer is stored in
the run itself, as in every run.
"""

from hashlib import sha256
from pathlib import Path

from arbcli.base.atomic_files import make_folder, write_bytes
from arbcli.base.errors import ArbError
from arbcli.base.reading import read_small
from arbcli.base.run_files import COMPANIONS, CONFIG, TOKENIZER
from arbcli.config.model import VOCABULARY, ModelConfig
from arbcli.data.chat_template import OLD_TEMPLATE, TEMPLATE
from arbcli.data.special_tokens import GENERATION, MAP, SETTINGS
from arbcli.generation.load import Weights
from arbcli.interop.huggingface.config_json import read_folder_config
from arbcli.interop.huggingface.dense import shape_of
from arbcli.model.checkpoint import TOKENIZER_DIGEST

NAMES = (
    CONFIG, GENERATION, TEMPLATE, SETTINGS, MAP, OLD_TEMPLATE, "added_tokens.json", "vocab.json",
    "merges.txt", "tokenizer.model",
)  # fmt: skip
"""Names of companion files, which are copied if they exist."""
MAX_BYTES = 2**27
"""Maximum size of a companion file in bytes."""


def copy_companions(source: Path, target: Path) -> None:
    """Copy the companions of a folder, byte for byte.

    Raises:
        ArbError: a file cannot be read or written, or is larger than `MAX_BYTES`.
    """
    names = [name for name in NAMES if (source / name).exists()]
    if not names:
        return
    make_folder(target)
    for name in names:
        write_bytes(target / name, read_companion(source / name))


def read_companion(path: Path) -> bytes:
    """Read a file that comes with a model, of at most `MAX_BYTES` bytes.

    Raises:
        ArbError: the file cannot be read, or is larger than `MAX_BYTES`.
    """
    return read_small(path, MAX_BYTES, "remove it, if it is not needed")


def companions_of(run: Path, config: ModelConfig) -> Path | None:
    """Return the folder of a run's companion files; None if it has none.

    Raises:
        ArbError: they belong to another model.
    """
    folder = run / COMPANIONS
    if not (folder / CONFIG).exists():
        return None
    source_shape = shape_of(read_folder_config(folder))
    shape = shape_of(config)
    if shape is None or source_shape is None or source_shape._replace(ctx=shape.ctx) != shape:
        raise ArbError(
            f"`{folder}` belongs to another model than `{run}`",
            "restore the folder that the import made",
        )
    return folder


def tokenizer_of(weights: Weights) -> Path | None:
    """Return the path of a model's `tokenizer.json`; None if it reads bytes or has none.

    Raises:
        ArbError: it is missing or has changed, and no other file has the tokens.
    """
    config, digest = weights.model.config, weights.checkpoint.data.get(TOKENIZER_DIGEST)
    if digest is None and config.vocabulary == VOCABULARY:
        return None
    path = weights.path.with_name(TOKENIZER)
    if not path.exists():
        if digest is None and (weights.path.parent / COMPANIONS).exists():
            return None
        raise ArbError(
            f"the model reads {config.vocabulary:,} tokens, and there is no `{path}`",
            "put its own tokenizer there, or use `--to safetensors`",
        )
    if digest not in (None, sha256(read_companion(path)).hexdigest()):
        raise ArbError(
            f"`{path}` is not the tokenizer of `{weights.path}`", "restore it from a copy"
        )
    return path
