"""Description and comparison of saved models: runs, checkpoints and exports."""

import dataclasses
import re
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from arbcli.base.errors import ArbError
from arbcli.base.reading import check_schema, open_regular, read_json
from arbcli.base.run_files import CONFIG, checkpoints
from arbcli.generation.load import empty_model, read_saved
from arbcli.inspect.memory import sizes_by_area
from arbcli.inspect.parts import PartReport, list_parts
from arbcli.interop.gguf.container import MAGIC, GGUFFile
from arbcli.interop.gguf.export import read_reordered
from arbcli.interop.huggingface.dense import shape_of, sources
from arbcli.interop.huggingface.export import ModelFolder
from arbcli.interop.huggingface.folder import INDEX, WEIGHTS
from arbcli.kernels.codec.packing import unpack_trits
from arbcli.kernels.runtime.backend import row_chunks
from arbcli.model.checkpoint import Checkpoint, is_export
from arbcli.model.packed import Weight
from arbcli.training.directory import FACTS
from arbcli.training.record import METRICS, finite, read_all_records

Decoders = Mapping[str, Callable[[], Tensor]]
"""Functions that decode each weight, by name."""
ORIGIN = {"step": int | None, "origin": str | None}
"""Metadata of the checkpoint in an export."""
_AREAS = {"attn": "attention", "ffn": "mlp", "token": "embedding", "output": "head"}
"""Areas of GGUF matrices, by the start of the name after the number of the block."""
FLOATS = "float32"
"""Area of the weights of a float baseline."""
_OTHER = "other"
"""Area of matrices with unknown names."""


@dataclass(frozen=True, kw_only=True)
class SavedFacts:
    """Metadata of a saved model."""

    kind: str
    """`run`, `checkpoint`, `weights` (of `arb export --to safetensors`), `gguf` or `hf`."""
    step: int | None
    digests: str
    """Whether digests of tensors were verified: `checked`, or `none` if the file has none."""
    digest: str | None = None
    """Digest of a complete checkpoint."""
    origin: str | None
    """Digest of the exported checkpoint."""
    config: dict[str, Any]
    """Configuration of the model."""
    settings: dict[str, Any] = field(default_factory=dict)
    """Settings of the run that wrote the checkpoint; empty for checkpoints of early versions."""
    run: dict[str, Any] = field(default_factory=dict)
    """Facts about a run: its text, versions, checkpoints and last record."""


@dataclass(frozen=True, kw_only=True)
class SavedReport(SavedFacts):
    """Description of a saved model."""

    path: str
    num_weights: int
    """Number of logical weights; for GGUF and Hugging Face exports, elements of the matrices."""
    bytes: int
    """Size in bytes of the file, or of all files of the folder."""
    bytes_by_area: dict[str, dict[str, int]]
    """Bytes by area of the model, then by purpose; for GGUF and Hugging Face exports by type."""
    trits: dict[str, list[float]]
    """Shares of the weights below, at and above 0, by area."""
    octaves: dict[str, dict[int, int]]
    """Number of scales in [2**E, 2**(E + 1)) by area and E; of weights for other exports."""
    parts: tuple[PartReport, ...] = ()
    """Parts of the model, for a checkpoint or its weights."""


Histograms = tuple[dict[str, list[int]], dict[str, Counter]]
"""Counts of weights below, at and above 0, and of octaves, by area."""


@dataclass(frozen=True, eq=False, kw_only=True)
class Saved(SavedFacts):
    """An open saved model."""

    path: Path
    weights: Callable[[], Decoders]
    """Lists the matrices; those of dense blocks have the names of GGUF."""
    state: Callable[[], Decoders] | None = None
    """Lists all tensors of a checkpoint, with trits unpacked; None for other files."""
    bytes_by_area: Callable[[], dict[str, Counter]]
    histograms: Callable[[], Histograms]
    parts: Callable[[], tuple[PartReport, ...]] = tuple
    """Lists the parts of the model; none if the file has only matrices."""

    def report(self) -> SavedReport:
        """Return the complete report."""
        signs, octaves = self.histograms()
        files = [path for path in self.path.rglob("*") if path.is_file()]
        return SavedReport(
            **{fact.name: getattr(self, fact.name) for fact in dataclasses.fields(SavedFacts)},
            path=str(self.path),
            num_weights=sum(map(sum, signs.values())),
            bytes=sum(file.stat().st_size for file in files or [self.path]),
            bytes_by_area={area: dict(kinds) for area, kinds in self.bytes_by_area().items()},
            trits={area: [n / sum(counts) for n in counts] for area, counts in signs.items()},
            octaves={area: dict(sorted(counts.items())) for area, counts in octaves.items()},
            parts=self.parts(),
        )


def _open_packed(path: Path, checkpoint: Checkpoint) -> Saved:
    """Open a checkpoint or exported weights, and verify their digests."""
    settings = checkpoint.data.get("settings")
    if isinstance(settings, dict):
        settings = settings | {"seed": checkpoint.data.get("seed")}
    model = empty_model(checkpoint)
    model.load_state_dict(checkpoint.tensors, assign=True)
    packed = model.packed_tensors()

    def weights() -> Decoders:
        if shape_of(model.config) is None:
            return {name: _new_decoder(weight) for name, weight in model.weights().items()}
        return {
            part.gguf: _new_decoder(source.tensor, part.rows)
            for source in sources(model)
            for part in source.parts
            if len(part.shape) == 2 and source.tensor is not None
        }

    def state() -> Decoders:
        widths = {f"{name}.trits": tensor.in_features for name, tensor in packed.items()}
        return {
            name: partial(unpack_trits, tensor, widths[name])
            if name in widths
            else partial(Tensor.detach, tensor)
            for name, tensor in checkpoint.tensors.items()
        }

    def bytes_by_area() -> dict[str, Counter]:
        floats = sum(weight.nbytes for weight in model.parameters())
        return sizes_by_area(model) | ({FLOATS: Counter({FLOATS: floats})} if floats else {})

    def histograms() -> Histograms:
        signs: dict[str, list[int]] = {}
        octaves: dict[str, Counter] = {}
        for tensor in packed.values():
            for rows in row_chunks(tensor.trits):
                trits = unpack_trits(tensor.trits[rows], tensor.in_features)
                _count_signs(signs, tensor.area, trits)
            _count_values(octaves, tensor.area, tensor.exponent)
        for weight in model.parameters():  # of a float baseline
            _count_numbers((signs, octaves), FLOATS, weight)
        return signs, octaves

    return Saved(
        path=path,
        kind="weights" if is_export(checkpoint) else "checkpoint",
        step=checkpoint.step,
        digests="checked",
        digest=checkpoint.digest,
        origin=checkpoint.data.get("origin"),
        config=checkpoint.config,
        settings=settings if isinstance(settings, dict) else {},
        weights=weights,
        state=state,
        bytes_by_area=bytes_by_area,
        histograms=histograms,
        parts=partial(list_parts, model),
    )


def _open_plain(path: Path, kind: str, file: GGUFFile | ModelFolder) -> Saved:
    """Open an export with plain or block-quantised numbers: GGUF, or a Hugging Face folder."""
    metadata = {name: file.keys.get(f"arb.{name}") for name in ("step", "origin")}
    check_schema(metadata, ORIGIN, f"`{path}`: `arb`", "name an export of `arb export`")
    read = partial(read_reordered, file) if isinstance(file, GGUFFile) else file.tensor
    matrices = [entry.name for entry in file.entries.values() if len(entry.shape) == 2]

    def bytes_by_area() -> dict[str, Counter]:
        sizes: dict[str, Counter] = {}
        for entry in file.entries.values():
            area = _area(entry.name) if len(entry.shape) == 2 else "norms"
            sizes.setdefault(area, Counter())[entry.kind.name] += entry.num_bytes
        return sizes

    def histograms() -> Histograms:
        counts: Histograms = {}, {}
        for name in matrices:
            _count_numbers(counts, _area(name), read(name))
        return counts

    return Saved(
        path=path,
        kind=kind,
        digests="none",
        step=metadata["step"],
        origin=metadata["origin"],
        config={name: value for name, value in file.keys.items() if not isinstance(value, list)},
        weights=lambda: {name: partial(read, name) for name in matrices},
        bytes_by_area=bytes_by_area,
        histograms=histograms,
    )


def open_saved(path: Path, note: Callable[[str], None]) -> Saved:
    """Open a run, checkpoint or export, and verify its digests.

    Args:
        path: a run, a checkpoint, or an export.
        note: called with a message for each damaged checkpoint that is skipped.

    Raises:
        ArbError: arb did not write it, or it is damaged.
    """
    if not path.exists():
        raise ArbError(f"there is no `{path}`", "name a run, a checkpoint or an export")
    if path.is_dir() and any((path / name).exists() for name in (WEIGHTS, INDEX)):
        return _open_plain(path, "hf", ModelFolder(path))
    saved = partial(read_saved, path, note)
    if path.is_dir():
        return dataclasses.replace(_open_packed(*saved()), kind="run", run=_run_facts(path, note))
    with open_regular(path) as file:
        start = file.read(len(MAGIC))
    if start == MAGIC:
        return _open_plain(path, "gguf", GGUFFile(path))
    return _open_packed(*saved())


def _run_facts(run: Path, note: Callable[[str], None]) -> dict[str, Any]:
    """Read facts from the other files of a run; missing files are left out."""
    facts: dict[str, Any] = {"checkpoints": [path.name for path in checkpoints(run)]}
    if (run / CONFIG).exists():
        settings = read_json(run / CONFIG, {name: kind | None for name, kind in FACTS.items()})
        facts |= {
            name: settings[name] for name in ("text", "versions", "started") if name in settings
        }
    records, bad = read_all_records(run)
    facts["last_record"] = records[-1] if records else None
    if bad:
        note(f"{bad:,} lines of `{run / METRICS}` are torn or altered, and left out")
    return facts


def _new_decoder(weight: Weight, rows: slice = slice(None)) -> Callable[[], Tensor]:
    return lambda: weight.weight(torch.float32).detach()[rows]


def _area(name: str) -> str:
    rest = re.sub(r"^blk\.[0-9]+\.", "", name)
    return _AREAS.get(re.split("[_.]", rest)[0], _OTHER)


def _count_numbers(counts: Histograms, area: str, weight: Tensor) -> None:
    signs, octaves = counts
    _count_signs(signs, area, weight.sign())
    _count_values(octaves, area, torch.frexp(weight[weight != 0]).exponent - 1)


def _count_signs(counts: dict[str, list[int]], area: str, signs: Tensor) -> None:
    sign_counts = [int((signs == sign).sum()) for sign in (-1, 0, 1)]
    before = counts.setdefault(area, [0, 0, 0])
    counts[area] = [a + b for a, b in zip(before, sign_counts, strict=True)]


def _count_values(counts: dict[str, Counter], area: str, values: Tensor) -> None:
    distinct, numbers = values.unique(return_counts=True)
    pairs = zip(distinct.tolist(), numbers.tolist(), strict=True)
    counts.setdefault(area, Counter()).update(dict(pairs))


@dataclass(frozen=True, slots=True, kw_only=True)
class Difference:
    """Difference of a tensor between two models."""

    name: str
    elements: int
    different: int
    """Number of elements that differ."""
    largest: float | None
    """Maximum absolute difference; None if it is not finite, as in an export with NaN."""
    relative: float | None
    """Norm of the difference relative to that of the first tensor; None if the latter is 0, or if
    either is not finite."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DifferenceReport:
    """Differences of two saved models."""

    first: str
    second: str
    compared: str
    """`state`: all tensors of two checkpoints; or `weights`: decoded matrices."""
    config: dict[str, list[Any]]
    """Differing fields of the configurations of two checkpoints, with both values."""
    settings: dict[str, list[Any]]
    """Differing settings of the runs, if both checkpoints have them."""
    missing: dict[str, str]
    """Tensors that one model lacks, or whose shapes differ, with the reason."""
    tensors: list[Difference]
    """Tensors that differ."""
    num_equal: int
    """Number of tensors that are equal."""
    equal: bool
    """Whether both models have the same tensors with equal values."""


def compare(first: Saved, second: Saved) -> DifferenceReport:
    """Compare the state of two checkpoints, or the weights of any two saved models."""
    packed = None not in (first.state, second.state)
    decoders = [
        (saved.state if packed and saved.state else saved.weights)() for saved in (first, second)
    ]
    differences, missing, equal = [], {}, 0
    for name in sorted(decoders[0].keys() | decoders[1].keys()):
        if name not in decoders[0] or name not in decoders[1]:
            missing[name] = "only in the first" if name in decoders[0] else "only in the second"
            continue
        first_tensor, second_tensor = (named[name]().float() for named in decoders)
        if first_tensor.shape != second_tensor.shape:
            missing[name] = f"{list(first_tensor.shape)} and {list(second_tensor.shape)}"
            continue
        difference = second_tensor - first_tensor
        if different := int(difference.count_nonzero()):
            size = float(first_tensor.norm())
            differences.append(
                Difference(
                    name=name,
                    elements=first_tensor.numel(),
                    different=different,
                    largest=finite(float(difference.abs().max())),
                    relative=finite(float(difference.norm()) / size) if size else None,
                )
            )
        else:
            equal += 1
    has_settings = first.settings and second.settings
    return DifferenceReport(
        first=str(first.path),
        second=str(second.path),
        compared="state" if packed else "weights",
        config=_differing(first.config, second.config) if packed else {},
        settings=_differing(first.settings, second.settings) if has_settings else {},
        missing=missing,
        tensors=differences,
        num_equal=equal,
        equal=not differences and not missing,
    )


def _differing(first: Mapping[str, Any], second: Mapping[str, Any]) -> dict[str, list[Any]]:
    names = sorted(first.keys() | second.keys())
    values = {name: [report.get(name) for report in (first, second)] for name in names}
    return {name: pair for name, pair in values.items() if pair[0] != pair[1]}
