"""Checks of saved models that do not import torch, which takes seconds."""

from pathlib import Path

from arbcli.base import run_files
from arbcli.base.errors import ArbError
from arbcli.base.reading import LARGEST_FILE, open_regular, parse_json
from arbcli.config.model import ModelConfig
from arbcli.config.presets import config_from_dict


def config_in_header(path: Path) -> ModelConfig | None:
    """Read a model's configuration from the header of its checkpoint, without a checksum.

    Args:
        path: a checkpoint, or a run, whose newest checkpoint is read.

    Returns:
        The configuration; None if it cannot be read, as loading the model reports the reason.
    """
    try:
        file = run_files.checkpoints(path)[0] if path.is_dir() else path
        with open_regular(file) as source:
            size = int.from_bytes(source.read(8), "little")
            header = parse_json(source.read(min(size, LARGEST_FILE)))
        return config_from_dict(parse_json(header["__metadata__"]["arb"].encode())["config"])
    except (ArbError, ValueError, TypeError, LookupError, AttributeError):
        return None


def check_is_model(path: Path) -> None:
    """Check that a folder has a checkpoint, or that a file has the header of a saved model.

    Raises:
        ArbError: `path` is neither a run nor a checkpoint nor an export.
    """
    if path.is_dir():
        if not any(path.glob("*.safetensors*")):
            raise run_files.missing_checkpoint(path)
        return
    with open_regular(path) as file:
        head = file.read(9)
    # the JSON header of a safetensors file follows its 8-byte length
    if not head.startswith(b"GGUF") and head[8:] != b"{":
        raise ArbError(
            f"`{path}` is not a saved model", hint="name a run, a checkpoint or an export"
        )
