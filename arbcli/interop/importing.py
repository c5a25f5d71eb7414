"""Import of a Transformers folder to a run with a checkpoint of integer weights."""

import dataclasses
import math
import shutil
import time
from collections.abc import Callable, Collection
from dataclasses import dataclass
from hashlib import sha256
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch

from arbcli.base.atomic_files import write_bytes, write_json
from arbcli.base.errors import ArbError
from arbcli.base.reading import ALTERED, parse_json, read_json
from arbcli.base.run_files import COMPANIONS, CONFIG, TOKENIZER, checkpoints
from arbcli.config.layer_spec import SCALE_TYPES
from arbcli.data.tokens import Tokenizer, byte_symbols
from arbcli.interop.huggingface.companions import copy_companions, read_companion
from arbcli.interop.huggingface.config_json import NAME, TRIT_TYPE, model_name, read_folder_config
from arbcli.interop.huggingface.dense import Part, known_shape, sources
from arbcli.interop.huggingface.folder import WeightFolder, check_tensors
from arbcli.interop.rounding import are_ternary, group_peaks, put, put_trits
from arbcli.kernels.runtime.device import check_room
from arbcli.model.build import build_model
from arbcli.model.checkpoint import TOKENIZER_DIGEST, Checkpoint, save_checkpoint
from arbcli.model.language_model import LanguageModel
from arbcli.model.layers.vector import VectorWeight
from arbcli.model.packed import TernaryTensor

OUTLIER = 8.0
"""Root-mean-squares of a tensor from which on a weight is an outlier."""
READ_AT_ONCE = 1 << 22
"""Number of weights that are in float32 at a time."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TensorReport:
    """Rounding error of a tensor."""

    name: str
    shape: tuple[int, ...]
    relative_error: float
    """Root-mean-square of the differences, over that of the weights; 0 if these are zeros."""
    largest: float
    """Magnitude of the largest weight, in root-mean-squares."""
    outliers: int
    """Weights of at least `OUTLIER` root-mean-squares."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ImportReport:
    """Report of an import: the folder, the model and the errors of its tensors."""

    source: str
    run: str
    checkpoint: str
    model_type: str
    """`model_type` in `config.json`."""
    vocabulary: int
    ctx: int
    num_weights: int
    bytes: int
    """Size of the checkpoint in bytes."""
    relative_error: float
    """Relative error of all matrices together."""
    seconds: float
    tensors: list[TensorReport]


def import_folder(
    source: Path,
    run: Path,
    *,
    ignored: Collection[str] = (),
    on_read: Callable[[str], None] = lambda name: None,
    **storage: str | None,
) -> ImportReport:
    """Read a folder for Transformers into a run, whose weights are all digits.

    Matrices of a BitNet, and of a folder whose matrices are all trits with a scale for each group,
    stay exactly these trits.

    Weights are read a few rows at a time from mapped files; only the packed state is in memory.

    Args:
        source: the folder.
        run: directory to create, without a checkpoint.
        ignored: names of fields of `config.json` that are unknown and decide nothing.
        on_read: called with the name of each tensor before it is read.
        storage: how weights are stored: `rule`, one of `arbcli.model.rules.FADING`; `direction`;
            `scale_type`, by default `T128` for trits, and `T32` for all digits; `attention_rule`
            and `mlp_rule`.

    Raises:
        ArbError: the folder is damaged or its model is not supported, or the run cannot be created.
    """
    started = time.perf_counter()
    if checkpoints(run) or (run / CONFIG).exists() or (run / COMPANIONS).exists():
        raise ArbError(f"`{run}` already contains a run", "choose another `--out`")
    config = read_folder_config(source, ignored, **storage, digits="all")
    values = read_json(source / CONFIG)
    if known_shape(config).sub_norms:
        raise ArbError(
            f"`{source}` is an export of a model with sub-norms",
            "load the checkpoint that it was exported from",
        )
    if (source / TOKENIZER).exists():
        _check_tokens(source / TOKENIZER, config.vocabulary)
    folder = WeightFolder(source)
    with torch.device("meta"):
        shapes = build_model(config, torch.float32)
    check_tensors(folder, shapes)
    trits = storage.get("scale_type") or TRIT_TYPE
    if not known_shape(config).bitnet and _are_trits(folder, shapes, SCALE_TYPES[trits]):
        config = dataclasses.replace(config, digits="trit", scale_type=trits)
        with torch.device("meta"):
            shapes = build_model(config, torch.float32)
    size = sum(part.nbytes for part in shapes.buffers())
    check_room(
        size, f"the state of `{source}`", "use a machine with more memory, or `--rule nibble`"
    )
    model = build_model(config, torch.float32, seed=None)
    own_grid = "arb.origin" in values
    reports, error, squares = [], 0.0, 0.0
    for tensor_source in sources(model):
        tensor = tensor_source.tensor
        assert isinstance(tensor, TernaryTensor), "a run has packed weights, and no ones"
        for buffer in tensor.buffers():
            buffer.zero_()
        for part in tensor_source.parts:
            on_read(part.hugging_face)
            report, of_part = _round(folder, tensor, part, own_grid)
            reports.append(report)
            if len(part.shape) == 2:
                error, squares = error + of_part[0], squares + of_part[1]
        if tensor.direction is not None:
            tensor.direction.start(tensor.state)
    data: dict[str, Any] = {"imported": {"model_type": values["model_type"]}}
    try:
        copy_companions(source, run / COMPANIONS)
        about = {name: value for name, value in values.items() if name not in ignored}
        write_json(run / COMPANIONS / CONFIG, about | {NAME: model_name(source)})
        content = read_companion(source / TOKENIZER) if (source / TOKENIZER).exists() else None
        if content is not None and not (own_grid and _is_byte_tokenizer(content)):
            write_bytes(run / TOKENIZER, content)
            data[TOKENIZER_DIGEST] = sha256(content).hexdigest()
        path = save_checkpoint(
            run, Checkpoint(0, dataclasses.asdict(config), {}, data, model.state_dict())
        )
    except BaseException:  # its companions would be those of another model
        shutil.rmtree(run / COMPANIONS, ignore_errors=True)
        if TOKENIZER_DIGEST in data:
            (run / TOKENIZER).unlink(missing_ok=True)
        raise
    return ImportReport(
        source=str(source),
        run=str(run),
        checkpoint=str(path),
        model_type=values["model_type"],
        vocabulary=config.vocabulary,
        ctx=config.ctx,
        num_weights=model.num_weights,
        bytes=path.stat().st_size,
        relative_error=math.sqrt(error / squares) if squares else 0.0,
        seconds=time.perf_counter() - started,
        tensors=reports,
    )


def _check_tokens(path: Path, vocabulary: int) -> None:
    """Check that a model has a row for every token of its tokenizer.

    Raises:
        ArbError: it has not, or the tokenizer is damaged.
    """
    try:
        content = parse_json(read_companion(path))
        words = content["model"]["vocab"]
        added = [token["id"] for token in content.get("added_tokens") or ()]
        last = max([*(words.values() if isinstance(words, dict) else [len(words) - 1]), *added])
        is_larger = last >= vocabulary
    except (ValueError, KeyError, TypeError, AttributeError):
        raise ArbError(f"`{path}` is not a tokenizer", ALTERED) from None
    if is_larger:
        raise ArbError(
            f"`{path}` has tokens up to {last:,}, and the model has rows for {vocabulary:,}",
            "remove the token that was added without a row, or resize the embedding",
        )
    if find_spec("tokenizers"):  # importing needs it for no more than this check
        Tokenizer.read(path)


def _is_byte_tokenizer(content: bytes) -> bool:
    """Return whether a `tokenizer.json` maps the 256 bytes, as in exports of byte models."""
    vocabulary = parse_json(content)["model"]["vocab"]
    return vocabulary == {symbol: byte for byte, symbol in enumerate(byte_symbols())}


def _are_trits(folder: WeightFolder, model: LanguageModel, group_size: int) -> bool:
    """Return whether all matrices of a folder are trits with a scale for each group."""
    return all(
        are_ternary(folder.read(part.hugging_face, chunk), group_size)
        for source in sources(model)
        for part in source.parts
        if len(part.shape) == 2
        for chunk in _chunks(part, part.shape[1])
    )


def _round(
    folder: WeightFolder, tensor: TernaryTensor, part: Part, own_grid: bool
) -> tuple[TensorReport, tuple[float, float]]:
    """Round the weights of a part of a tensor.

    Returns:
        Its report; and the sums of the squared differences, and of the squared weights.
    """
    width = tensor.in_features
    error = squares = largest = 0.0
    scale = torch.tensor(folder.scale(part.hugging_face)) if tensor.fixed_scales else None
    for chunk in _chunks(part, width):
        weight = folder.read(part.hugging_face, chunk).view(-1, width)
        if not weight.isfinite().all():
            raise ArbError(
                f"`{folder.path}`: `{part.hugging_face}` has a weight that is not finite",
                "get the model again: it is damaged, or its training failed",
            )
        rows = slice(part.rows.start + chunk.start, part.rows.start + chunk.stop)
        if tensor.reads_digits or isinstance(tensor, VectorWeight):
            apart = put(tensor, rows, weight, own_grid) - weight
        else:
            peaks = group_peaks(weight, tensor.group_size) if scale is None else scale
            apart = put_trits(tensor, rows, weight, peaks)
        error += float(apart.double().square_().sum())
        squares += float(weight.double().square_().sum())
        largest = max(largest, float(weight.abs().max()))
    size = math.sqrt(squares / math.prod(part.shape))
    outliers = 0
    if largest >= OUTLIER * size > 0:
        for chunk in _chunks(part, width):
            outliers += int((folder.read(part.hugging_face, chunk).abs() >= OUTLIER * size).sum())
    report = TensorReport(
        name=part.hugging_face,
        shape=part.shape,
        relative_error=math.sqrt(error / squares) if squares else 0.0,
        largest=largest / size if size else 0.0,
        outliers=outliers,
    )
    return report, (error, squares)


def _chunks(part: Part, width: int) -> list[slice]:
    """Cut the rows of a part into some of `READ_AT_ONCE` weights."""
    rows, step = part.shape[0], max(1, READ_AT_ONCE // width)
    return [slice(at, min(at + step, rows)) for at in range(0, rows, step)]
