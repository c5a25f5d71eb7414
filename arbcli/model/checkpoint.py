"""Checkpoints of a run, written atomically.

`step-000200.safetensors` is a safetensors file whose bytes only depend on the state and the
settings of the run:

    8 bytes  length of the header, little-endian
    header   canonical JSON, padded with spaces to a multiple of 8: the dtype, shape and offsets of
             every tensor, and `__metadata__` with the one key `arb`
    data     the tensors, row-major, in order of name, without gaps

The last part of a tensor's name determines its dtype: `trits` is packed trits, uint8 up to 242;
`source`, `target` and `hand` are int32, little-endian and possibly unaligned; all others are int8.
Only those of a float baseline are float32, and finite: `latent` and the state of its optimizer.
Such a file is named `step-000200.float.safetensors`.
An `exponent` is in -96..31, and a `fraction`, `score`, `strength`, `usage`, `uses` or `lives` is
not negative.

`arb` is canonical JSON, too: `format`, `step`, `config`, `counters`, `data`, `digests` (the SHA-256
of each tensor) and `digest` (the SHA-256 of all these fields). Canonical means: as written by
Python's `json` with sorted keys, without spaces, in ASCII. Files with any other bytes are refused.

The safetensors package is not used, as it writes from one buffer with the complete file, whereas
tensors are hashed and written one at a time here; and it accepts files that a checkpoint must
refuse, such as another order of tensors. Tests read checkpoints with it.
"""

import hashlib
import itertools
import json
import math
import os
import re
import shutil
import stat
import warnings
from collections import deque
from collections.abc import Callable, Container, Iterable, Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from io import BufferedIOBase, BufferedReader
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from arbcli.base import run_files
from arbcli.base.atomic_files import WRITE_HINT, open_to_append, replace_file, write_file
from arbcli.base.errors import ArbError, os_errors
from arbcli.base.reading import READ_HINT
from arbcli.kernels.codec.packed import HIGHEST_EXPONENT, LOWEST_EXPONENT, OCTAVE
from arbcli.kernels.codec.packing import illegal_bytes

try:
    import fcntl
except ImportError:  # Windows
    fcntl = None  # type: ignore[assignment]

TOKENIZER_DIGEST = "tokenizer"
"""Key of the tokenizer's digest in the `data` of a checkpoint."""
FORMAT = 1
MAX_HEADER = 2**22
"""Maximum size of a header: enough for ten thousand tensors, and safe to parse untrusted."""
LATENT = "latent"
"""Last part of the names of a float baseline's weights."""
LATENT_AVERAGE = "latent_average"
"""Last part of the names of averages of these weights."""
MOMENTS = ("first_moment", "second_moment", "momentum")
"""Last parts of the names of its optimizer's moments."""
FLOAT_STATE = (*MOMENTS, LATENT_AVERAGE)
"""Last parts of the names of its optimizer's state, which has the shapes of the weights."""
FIELDS = {
    "format": int, "step": int, "config": dict, "counters": dict, "data": dict,
    "digests": dict, "digest": str,
}  # fmt: skip
"""Contents of the metadata key `arb`."""

PENDING_BYTES = 2**30
"""Maximum size of tensors in flight between device, threads and disk, in bytes."""
SMALL_BYTES = 2**16
"""Size in bytes below which a tensor is not worth a thread, unless others are in flight."""
THREADS = min(16, os.cpu_count() or 1)

_CODES = {torch.uint8: "U8", torch.int8: "I8", torch.int32: "I32", torch.float32: "F32"}
_DTYPES = {
    "trits": torch.uint8,
    **dict.fromkeys(("source", "target", "hand"), torch.int32),
    **dict.fromkeys((LATENT, *FLOAT_STATE), torch.float32),
}
"""Dtypes by the last part of a name; all others are int8."""
_RANGES = {
    "exponent": (LOWEST_EXPONENT, HIGHEST_EXPONENT),
    "fraction": (0, OCTAVE - 1),
    **dict.fromkeys(("score", "strength", "usage", "uses", "lives"), (0, 127)),
}
"""Ranges by the last part of a name; all others have the range of their dtype."""
_TENSOR_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.-]*")
_REFUSED_HINT = "it is not a checkpoint of arb, or was truncated or altered: name another"


class DamagedError(ArbError):
    """The contents of a checkpoint have changed since it was written.

    Other failures, such as permissions, disk errors or a newer version, do not raise this error, as
    the file may be intact.
    """


@dataclass(frozen=True, eq=False)
class Checkpoint:
    """The complete state of a run; all fields except for the tensors are JSON values."""

    step: int
    """Number of steps done."""
    config: dict[str, Any]
    """Configuration of the model."""
    counters: dict[str, int]
    """Counters of the run."""
    data: dict[str, Any]
    """Digest of the text, position in it, and the settings that determine the run."""
    tensors: Mapping[str, Tensor]
    """Tensors by name: see the module's docstring."""
    digest: str = ""
    """Digest of the file that it was read from; empty if it was not read from a file."""


def save_checkpoint(directory: Path, checkpoint: Checkpoint, keep: int = 2) -> Path:
    """Write a checkpoint atomically, then delete those older than the newest `keep`.

    Only one process may save to a directory at a time: hold `run_lock`.

    Args:
        directory: directory of the run, which exists.
        checkpoint: the checkpoint; tensors on a GPU are copied `PENDING_BYTES` bytes at a time.
        keep: number of checkpoints to keep, including this one; later steps are not deleted.

    Returns:
        The path of the checkpoint.

    Raises:
        ArbError: it cannot be written; earlier checkpoints are intact.
        ValueError: the dtype or the range of a tensor does not match its name.
    """
    if checkpoint.step < 0 or keep < 1:
        raise ValueError(f"cannot save step {checkpoint.step} and keep {keep}")
    path = path_of(checkpoint, directory)
    write_checkpoint(path, checkpoint)
    older = [
        old for old in run_files.checkpoints(directory) if run_files.step_of(old) < checkpoint.step
    ]
    remove_files(older[keep - 1 :])
    return path


def path_of(checkpoint: Checkpoint, directory: Path) -> Path:
    """Return the path of a checkpoint in the directory of its run."""
    weights = checkpoint.config.get("weights", "ternary")
    return run_files.checkpoint_path(directory, checkpoint.step, weights)


def write_checkpoint(path: Path, checkpoint: Checkpoint) -> None:
    """Write a checkpoint to a file of any name, atomically.

    Raises:
        ArbError: it cannot be written; an existing file is intact.
        ValueError: the dtype or the range of a tensor does not match its name.
    """
    tensors = dict(sorted(checkpoint.tensors.items()))
    for name, tensor in tensors.items():
        if not _TENSOR_NAME.fullmatch(name) or tensor.dtype != _dtype(name):
            raise ValueError(f"cannot save {tensor.dtype} as `{name}`")
    metadata = {"format": FORMAT}
    for field in ("step", "config", "counters", "data"):
        metadata[field] = getattr(checkpoint, field)
    shapes = {name: list(tensor.shape) for name, tensor in tensors.items()}

    def header(digests: dict[str, str]) -> bytes:
        return _header(_seal(metadata | {"digests": digests}), shapes)

    any_digest = tensor_digest("", torch.empty(0))  # all digests have this length
    placeholder = header(dict.fromkeys(tensors, any_digest))
    assert len(placeholder) <= MAX_HEADER, "too many tensors for the header"

    def write(file: BufferedIOBase) -> None:
        digests = {}
        file.write(placeholder)
        for name, data, digest in _map_threads(_serialise, tensors.items()):
            file.write(data)
            digests[name] = digest
        file.seek(0)
        file.write(header(digests))

    write_file(path, write)


Accept = Callable[[Checkpoint], Container[str] | None]
"""Check of a checkpoint before its tensors are allocated; they are on `meta`. It raises `ArbError`
to refuse it, and returns the names of the tensors to keep, or None for all. The other tensors are
verified and discarded."""


def _accept_any(_: Checkpoint) -> None:
    """Accept any checkpoint, and keep all tensors."""


def load_checkpoint(path: Path, accept: Accept = _accept_any) -> Checkpoint:
    """Read and verify an untrusted checkpoint.

    Args:
        path: path of the file.
        accept: check of the header, which also selects the tensors to keep.

    Returns:
        The checkpoint, with tensors on the CPU.

    Raises:
        DamagedError: the file is not exactly as `save_checkpoint` wrote it.
        ArbError: it cannot be read, was written by a newer version, or is refused by `accept`.
    """
    with os_errors("read", path, READ_HINT):
        try:
            if not stat.S_ISREG(path.stat().st_mode):
                raise ArbError("it is not a regular file", READ_HINT)
            with path.open("rb") as file:
                return _read_checkpoint(file, accept)
        except ArbError as error:
            kind, why, hint = type(error), str(error), error.hint
        except RecursionError:
            kind, why, hint = DamagedError, "its header is nested too deeply", _REFUSED_HINT
    raise kind(f"checkpoint `{path}`: refused: {why}", hint=hint)


def latest_checkpoint(
    directory: Path, note: Callable[[str], None], accept: Accept = _accept_any
) -> Checkpoint:
    """Load the newest intact checkpoint of a run.

    Args:
        directory: directory of the run.
        note: called with a message for each damaged checkpoint that is skipped.
        accept: check of the header, see `load_checkpoint`; a refusal is not skipped.

    Raises:
        ArbError: all are damaged, or a possibly intact one cannot be read or is refused.
    """
    refusals: list[str] = []
    for path in run_files.checkpoints(directory):
        if refusals:
            note(f"{refusals[-1]}; using the one before it")
        try:
            checkpoint = load_checkpoint(path, accept)
        except DamagedError as error:
            refusals.append(str(error))
        else:
            written_as = path_of(checkpoint, directory)
            if path == written_as:
                return checkpoint
            refusals.append(f"checkpoint `{path}`: refused: it was written as `{written_as.name}`")
    if not refusals:
        raise run_files.missing_checkpoint(directory)
    raise ArbError(
        f"no checkpoint in `{directory}` can be used: {'; '.join(refusals)}",
        "restore one from a copy, or start again in another directory",
    )


def set_aside(path: Path, *, leave: bool = False) -> Path:
    """Rename a file with the suffix `.aside`, so that it is neither read nor deleted.

    Args:
        path: path of the file.
        leave: whether to keep the old name too, as a hard link, until it is overwritten.

    Returns:
        The new name, with a number if `.aside` is taken.

    Raises:
        ArbError: it cannot be renamed.
    """
    aside = _aside(path)
    with os_errors("rename", path, WRITE_HINT):
        if leave:
            with suppress(OSError):  # the file system may lack hard links
                os.link(path, aside)
                return aside
        path.rename(aside)
    return aside


def copy_aside(path: Path) -> Path:
    """Copy a file to a name with the suffix `.aside`, before its content is replaced.

    Returns:
        The name of the copy: see `set_aside`.

    Raises:
        ArbError: it cannot be copied.
    """
    aside = _aside(path)
    write_file(aside, lambda file: _copy(path, file))
    return aside


def _aside(path: Path) -> Path:
    names = (path.with_name(f"{path.name}.aside{n or ''}") for n in itertools.count())
    return next(name for name in names if not os.path.lexists(name))


def keep_best(path: Path) -> Path:
    """Link a checkpoint as `best-000200.safetensors`, and remove the previous best one.

    Raises:
        ArbError: it cannot be linked; the previous one is intact.
    """
    best = link_best(path)
    remove_files(other for other in run_files.best_checkpoints(path.parent) if other != best)
    return best


def link_best(path: Path) -> Path:
    """Link a checkpoint as `best-000200.safetensors`, next to other best ones.

    Raises:
        ArbError: it cannot be linked.
    """
    best = path.with_name(path.name.replace("step-", "best-", 1))
    with os_errors("write", best, WRITE_HINT):
        if not best.exists():
            try:
                os.link(path, best)
            except OSError:  # the file system lacks hard links
                replace_file(best, lambda file: _copy(path, file))
    return best


def remove_files(paths: Iterable[Path]) -> None:
    """Remove files, such as checkpoints that are not to be kept.

    Raises:
        ArbError: one cannot be removed.
    """
    for path in paths:
        with os_errors("remove", path, "check permissions"):
            path.unlink()


def _copy(path: Path, file: BufferedIOBase) -> None:
    with path.open("rb") as source:
        shutil.copyfileobj(source, file)


def is_export(checkpoint: Checkpoint) -> bool:
    """Return whether a checkpoint only has weights, as `arb export --to safetensors` writes it."""
    return "origin" in checkpoint.data


def check_trainable(checkpoint: Checkpoint) -> None:
    """Check that a checkpoint has training state.

    Raises:
        ArbError: it is an export, which only has weights.
    """
    if is_export(checkpoint):
        raise ArbError(
            "the file is an export without training state",
            "name a checkpoint of the run that it was exported from",
        )


def check_layout(tensors: Mapping[str, Tensor], expected: Mapping[str, Tensor]) -> None:
    """Check that a checkpoint has the tensors of a model.

    Args:
        tensors: tensors of the checkpoint.
        expected: state of the model, on any device including `meta`.

    Raises:
        ArbError: a name, dtype or shape differs.
    """
    for name in sorted(tensors.keys() | expected.keys()):
        stored, built = (
            f"{state[name].dtype} {list(state[name].shape)}" if name in state else "missing"
            for state in (tensors, expected)
        )
        if stored != built:
            raise ArbError(
                f"`{name}` is {stored} in the checkpoint and {built} in the model",
                "the checkpoint has another preset, rule or scale type: use those of its run",
            )


@contextmanager
def run_lock(directory: Path) -> Iterator[None]:
    """Hold an exclusive lock on a run; it is released when the process ends.

    Without `flock`, on Windows, it only warns.

    Raises:
        ArbError: another process holds the lock, or the file system does not support locks.
    """
    if fcntl is None:
        warnings.warn(f"`{directory}` is not locked: do not train in it twice", stacklevel=3)
        yield
        return
    with ExitStack() as stack:
        with os_errors("lock", directory, "use a directory that exists, is yours and has locks"):
            file = stack.enter_context(open_to_append(directory / ".lock"))
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                raise ArbError(
                    f"the run directory `{directory}` is in use by another process",
                    "wait for it to end, or use another directory",
                ) from None
        yield


def _require(condition: bool, otherwise: str) -> None:
    if not condition:
        raise DamagedError(otherwise, hint=_REFUSED_HINT)


def _dtype(name: str) -> torch.dtype:
    return _DTYPES.get(name.rpartition(".")[2], torch.int8)


def _is_legal(name: str, tensor: Tensor) -> bool:
    if _dtype(name) == torch.uint8:
        return illegal_bytes(tensor) == 0
    if _dtype(name) == torch.float32:
        return bool(tensor.isfinite().all())
    allowed = _RANGES.get(name.rpartition(".")[2])
    if allowed is None or not tensor.numel():
        return True
    lowest_allowed, highest_allowed = allowed
    lowest, highest = tensor.aminmax()
    return lowest_allowed <= int(lowest) and int(highest) <= highest_allowed


def _bytes(tensor: Tensor) -> memoryview:
    """View a tensor as bytes; copies it if it is on a GPU or not contiguous."""
    return tensor.detach().cpu().reshape(-1).view(torch.uint8).numpy().data


def tensor_digest(name: str, tensor: Tensor) -> str:
    """Return the SHA-256 of dtype, shape and bytes, such as `U8[3, 5]` and fifteen bytes."""
    digest = hashlib.sha256(f"{_CODES[_dtype(name)]}{list(tensor.shape)}".encode())
    digest.update(_bytes(tensor))
    return digest.hexdigest()


def _map_threads(
    work: Callable[[str, Tensor], Any], tensors: Iterable[tuple[str, Tensor]]
) -> Iterator[Any]:
    """Map a function over tensors in threads, and yield the results in order.

    Hashing and copying release the GIL. Tensors are only taken from the iterable while those with
    pending results have less than `PENDING_BYTES` bytes.
    """
    waiting: deque[tuple[int, Future]] = deque()
    in_hand = 0
    pool = ThreadPoolExecutor(THREADS)
    try:
        for name, tensor in tensors:
            if tensor.nbytes < SMALL_BYTES and not waiting:
                yield work(name, tensor)
                continue
            waiting.append((tensor.nbytes, pool.submit(work, name, tensor)))
            in_hand += tensor.nbytes
            del tensor
            while in_hand >= PENDING_BYTES:
                size, future = waiting.popleft()
                yield future.result()
                in_hand -= size
        while waiting:
            yield waiting.popleft()[1].result()
    finally:
        pool.shutdown(cancel_futures=True)


def _serialise(name: str, tensor: Tensor) -> tuple[str, memoryview, str]:
    """Copy a tensor to the CPU, and hash it there."""
    on_cpu = tensor.cpu().contiguous()
    if not _is_legal(name, on_cpu):
        raise ValueError(f"`{name}` has an invalid value")
    return name, _bytes(on_cpu), tensor_digest(name, on_cpu)


def _canonical(value: Any) -> str:
    return json.dumps(value, sort_keys=True, separators=(",", ":"), allow_nan=False)


def _seal(metadata: dict[str, Any]) -> dict[str, Any]:
    """Add the digest of all other fields."""
    fields = {field: value for field, value in metadata.items() if field != "digest"}
    return fields | {"digest": hashlib.sha256(_canonical(fields).encode()).hexdigest()}


def _header(metadata: dict[str, Any], shapes: Mapping[str, list[int]]) -> bytes:
    """Return length and header, which are unique for given metadata and shapes."""
    entries: dict[str, Any] = {"__metadata__": {"arb": _canonical(metadata)}}
    end = 0
    for name, shape in sorted(shapes.items()):
        begin, end = end, end + _size(name, shape)
        code = _CODES[_dtype(name)]
        entries[name] = {"dtype": code, "shape": shape, "data_offsets": [begin, end]}
    text = _canonical(entries).encode()
    text += b" " * (-len(text) % 8)
    return len(text).to_bytes(8, "little") + text


def _size(name: str, shape: list[int]) -> int:
    return _dtype(name).itemsize * math.prod(shape)


def _read_checkpoint(file: BufferedReader, accept: Accept) -> Checkpoint:
    """Read and verify the header, then the tensors."""
    size = os.fstat(file.fileno()).st_size
    prefix = file.read(8)
    length = int.from_bytes(prefix, "little")
    _require(not prefix.startswith(b"GGUF"), "it is a GGUF file, which arb only writes")
    _require(length <= MAX_HEADER, f"its header cannot have {length} bytes")
    _require(8 + length <= size, f"it is truncated: it has {size} bytes, too few for its header")
    text = file.read(length)
    entries = _parse_object(text, "header")
    metadata = _read_metadata(entries.pop("__metadata__", None))
    _require(metadata["digests"].keys() == entries.keys(), "its digests are of other tensors")
    shapes = {name: _read_shape(name, entry) for name, entry in sorted(entries.items())}
    _require(_header(metadata, shapes) == prefix + text, "its header has offsets that do not fit")
    expected = 8 + length + sum(_size(*entry) for entry in shapes.items())
    _require(size >= expected, f"it is truncated: it has {size} bytes of {expected}")
    _require(size == expected, f"it has {size - expected} bytes too many")
    fields = {field: metadata[field] for field in ("step", "config", "counters", "data", "digest")}
    layout = {
        name: torch.empty(shape, dtype=_dtype(name), device="meta")
        for name, shape in shapes.items()
    }
    chosen = accept(Checkpoint(**fields, tensors=layout))
    names_to_load = shapes if chosen is None else chosen

    def read() -> Iterator[tuple[str, Tensor]]:
        for name, shape in shapes.items():
            tensor = torch.empty(shape, dtype=_dtype(name), device="cpu")
            file.readinto(_bytes(tensor))  # a short read fails the digest
            yield name, tensor

    def verify(name: str, tensor: Tensor) -> tuple[str, Tensor | None]:
        _require(tensor_digest(name, tensor) == metadata["digests"][name], f"`{name}` was altered")
        _require(_is_legal(name, tensor), f"`{name}` has an invalid value")
        return name, tensor if name in names_to_load else None

    checked = _map_threads(verify, read())
    tensors = {name: tensor for name, tensor in checked if tensor is not None}
    return Checkpoint(**fields, tensors=tensors)


def _read_metadata(entry: Any) -> dict[str, Any]:
    """Parse and check the metadata key `arb`."""
    one_key = isinstance(entry, dict) and entry.keys() == {"arb"} and type(entry["arb"]) is str
    _require(one_key, "its metadata is not the one key `arb`")
    metadata = _parse_object(entry["arb"].encode(errors="replace"), "metadata")
    version = metadata.get("format")
    newer = type(version) is int and version > FORMAT
    if newer:
        raise ArbError("it was written by a newer arb", "upgrade arb")
    types = {field: type(value) for field, value in metadata.items()}
    _require(types == FIELDS, "its metadata does not have the fields of a checkpoint")
    _require(_seal(metadata) == metadata, "its metadata was altered")
    counts = (metadata["step"], *metadata["counters"].values())
    integers = all(type(count) is int and 0 <= count < 2**63 for count in counts)
    _require(version == FORMAT and integers, "its metadata has an invalid value")
    return metadata


def _read_shape(name: str, entry: Any) -> list[int]:
    """Check name, dtype and shape of a tensor; return the shape."""
    tensor = _TENSOR_NAME.fullmatch(name) is not None and isinstance(entry, dict)
    _require(tensor, "its header has an entry that is not a tensor")
    _require(entry.get("dtype") == _CODES[_dtype(name)], f"`{name}` is not {_dtype(name)}")
    shape = entry.get("shape")
    integers = isinstance(shape, list) and all(type(n) is int and n >= 0 for n in shape)
    possible = integers and len(shape) <= 8 and _size(name, [n or 1 for n in shape]) < 2**63
    _require(possible, f"`{name}` has an impossible shape")
    return shape


def _parse_object(text: bytes, part: str) -> dict[str, Any]:
    """Parse a canonical JSON object: no NaN, no duplicate keys, no spaces except for padding."""
    try:
        value = json.loads(text.decode("ascii"))
        canonical = _canonical(value).encode() == text.rstrip(b" ")
    except ValueError:
        canonical = False
    _require(canonical and isinstance(value, dict), f"its {part} is not canonical JSON")
    return value
