"""Read the configuration of a saved model without importing torch."""

from pathlib import Path

from arbcli import run_files
from arbcli.config.model import ModelConfig
from arbcli.config.presets import config_from_dict
from arbcli.errors import ArbError
from arbcli.reading import LARGEST_FILE, open_regular, parse_json


def saved_config(path: Path) -> ModelConfig | None:
    """Read the configuration of a saved model off the header of its file, which is not checked.

    Args:
        path: of a run, whose newest checkpoint is looked at, or of a checkpoint.

    Returns:
        None if it cannot be told: what loads the model says why.
    """
    try:
        file = run_files.checkpoints(path)[0] if path.is_dir() else path
        with open_regular(file) as source:
            size = int.from_bytes(source.read(8), "little")
            header = parse_json(source.read(min(size, LARGEST_FILE)))
        return config_from_dict(parse_json(header["__metadata__"]["arb"].encode())["config"])
    except (ArbError, ValueError, TypeError, LookupError, AttributeError):
        return None
