"""Train byte-level language models whose whole persistent state is packed trits and int8."""

from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from arbcli.model.language_model import LanguageModel

__version__ = "0.1.0"


def load(
    run: Path | str, *, device: str | None = None, compute: str | None = None
) -> "LanguageModel":
    """Load the model of a run, or of one checkpoint: see `arbcli.infer.load`."""
    from arbcli.infer.load import load_model  # torch takes seconds to import, so not for `--help`

    return load_model(run, device=device, compute=compute)
