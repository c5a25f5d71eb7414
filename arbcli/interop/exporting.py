"""Export of a run to a file or a folder of another program."""

import dataclasses
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from arbcli.base.errors import ArbError, os_errors, quoted
from arbcli.generation.load import load_weights
from arbcli.interop.formats import FORMATS, NAMES, name_of, output_path
from arbcli.interop.gguf import export as gguf
from arbcli.interop.gguf.block_types import TYPES
from arbcli.interop.huggingface import export as hugging_face
from arbcli.model.checkpoint import write_checkpoint
from arbcli.model.rules import FADED

TYPES_OF = {"gguf": tuple(TYPES), "hf": tuple(hugging_face.TYPES), "safetensors": ()}
"""Types of weights that a format has a choice of."""
assert NAMES.keys() == TYPES_OF.keys() == FORMATS.keys()


@dataclass(frozen=True, slots=True, kw_only=True)
class ExportReport:
    """Report of an export."""

    checkpoint: str
    format: str
    path: str
    type: str
    """Type of the matrices."""
    step: int
    num_weights: int
    bytes: int
    """Size in bytes of the file, or of all files of the folder."""
    origin: str
    """Digest of the checkpoint that training wrote."""
    seconds: float


def export(
    source: Path,
    format: str,
    *,
    out: Path | None = None,
    kind: str | None = None,
    note: Callable[[str], None] = lambda message: None,
) -> ExportReport:
    """Write a trained model in another form.

    Args:
        source: a run, or one of its checkpoints, or an export of `safetensors`.
        format: one of `FORMATS`.
        out: the file or folder to write, which must not exist; None is one in the working
            directory, named for the run.
        kind: type of the weights; None is the format's own.
        note: called with a message for each damaged checkpoint that is skipped.

    Raises:
        ArbError: there is no intact checkpoint, the format cannot hold the model, or the place
            cannot be written to.
    """
    if kind is not None and kind not in TYPES_OF[format]:
        known = quoted(TYPES_OF[format])
        raise ArbError(
            f"`--to {format}` has no type `{kind}`",
            f"choose one of: {known}" if known else "leave `--type` out",
        )
    started = time.perf_counter()
    name, path = name_of(source), output_path(source, format, out)
    weights = load_weights(source, note)
    if weights.model.config.digits in FADED:
        raise ArbError(
            f"the weights of `{weights.path}` are fading from all digits to the trit",
            "export a checkpoint of the end of the run",
        )
    if weights.model.config.composite and format == "gguf":
        raise ArbError(
            f"`--to {format}` has no composite head, and this model has one",
            "use `--to safetensors`",
        )
    if weights.model.config.fills and format != "safetensors":
        raise ArbError(
            f"`--to {format}` is for models of the next byte alone, and this one fills holes",
            "use `--to safetensors`",
        )
    with os_errors("make", path.parent, "choose another `--out`"):
        path.parent.mkdir(parents=True, exist_ok=True)
    type_name = "trits" if weights.model.config.digits == "trit" else "all digits"
    if weights.model.config.weights != "ternary":
        type_name = "float32"
        if kind not in (None, "f32"):
            raise ArbError(f"`--type {kind}` would round the float32 weights", "use `--type f32`")
    if format == "gguf":
        type_name = gguf.write_model(path, weights, name, kind).name
    elif format == "hf":
        type_name = hugging_face.write_folder(path, weights, name, kind) or type_name
    else:
        checkpoint = dataclasses.replace(
            weights.checkpoint,
            counters={},
            data=weights.checkpoint.data | {"origin": weights.origin, "compute": weights.compute},
            tensors=weights.model.state_dict(),
        )
        write_checkpoint(path, checkpoint)
    if kind is None and weights.model.config.symbol_digits:
        type_name += ", all digits in embedding and head"
    files = path.iterdir() if path.is_dir() else [path]
    return ExportReport(
        checkpoint=str(weights.path),
        format=format,
        path=str(path),
        type=type_name,
        step=weights.checkpoint.step,
        num_weights=weights.model.num_weights,
        bytes=sum(file.stat().st_size for file in files),
        origin=weights.origin,
        seconds=time.perf_counter() - started,
    )
