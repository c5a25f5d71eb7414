"""Names of the export formats, without importing torch, for the command line."""

from pathlib import Path

from arbcli.base.errors import ArbError
from arbcli.base.run_files import CONFIG, run_of

FORMATS = {
    "gguf": "one file for llama.cpp and what is built on it",
    "hf": "a folder for Transformers",
    "safetensors": "the packed weights alone, for arb",
}
"""Purpose of each."""
TYPES = ("f32", "bf16", "f16", "q8_0", "q4_0", "q2_0")
"""Types of weights; hf has f32 and bf16 of them."""
NAMES = {"gguf": "{}.gguf", "hf": "{}-hf", "safetensors": "{}-weights.safetensors"}
"""Default name of the export of a run, by format."""


def name_of(source: Path) -> str:
    """Return the name of a run, or of the file that was saved if it is in none."""
    run = run_of(source)
    name = run.resolve().name if (run / CONFIG).exists() else source.stem
    return name.encode(errors="replace").decode()  # files of text are UTF-8, names need not be


def output_path(source: Path, format: str, out: Path | None) -> Path:
    """Return where an export is written.

    Args:
        source: a run, or a file that was saved.
        format: one of `FORMATS`.
        out: path that the user chose; None is a name in the current directory.

    Raises:
        ArbError: the path exists.
    """
    path = out or Path(NAMES[format].format(name_of(source)))
    if path.exists():
        raise ArbError(f"`{path}` exists", "remove it, or choose another `--out`")
    return path
