"""Cache of passed checks, so that unchanged code is not verified again.

A result is found again by everything that it follows from: the sources of the kernel, of what it
imports and of the verifier, the versions of Python, torch and Triton, the device, the settings of
the environment, and the check itself with its options. Only checks that passed are remembered. The
files are in the user's cache, and are believed only as `arbcli.base.caches` believes them.
"""

import ast
import dataclasses
import importlib.metadata
import json
import os
import platform
import sys
from collections.abc import Callable, Iterable
from contextlib import suppress
from functools import cache
from hashlib import sha256
from pathlib import Path
from typing import Any

import torch

from arbcli.base.caches import cache_folder, read_cached, remove_cached, write_cached
from arbcli.base.errors import ArbError
from arbcli.kernels.runtime import native
from arbcli.verify.verification import Verification
from arbcli.verify.workers import JobDone, Workers, name_of

PACKAGE = Path(__file__).parents[1]
ROOT = PACKAGE.parent
LIBRARIES = ("torch", "triton", "numpy")
SETTINGS = (
    "ARB_", "ATEN_", "CC", "CUBLAS_", "CUDA_", "DNNL_", "MKL_", "NVIDIA_", "OMP_", "ONEDNN_",
    "OPENBLAS_", "PYTORCH_", "TORCH", "TRITON_",
)  # fmt: skip
"""Prefixes of variables that can change a result."""
FIRST = -1
"""Default priority of the calls before a job."""


def memory_folder() -> Path:
    """Return the folder of results, `verified` in the cache."""
    return cache_folder() / "verified"


@cache
def kernel_sources(spec: Verification, *, drawn: bool = False) -> frozenset[Path] | None:
    """List the files that a result of a kernel follows from.

    Args:
        spec: verification of the kernel.
        drawn: whether its cases are drawn by `arbcli.verify.fuzz`.

    Returns:
        The files, or None if the spec is not that of a module.
    """
    modules = [
        name
        for name, module in [*sys.modules.items()]
        if name.startswith("arbcli.verify.kernels.")
        and any(value is spec for value in vars(module).values())
    ]
    if not modules:
        return None
    modules += ["arbcli.verify.fuzz"] if drawn else []
    found: set[Path] = set()
    for name in modules:
        found |= _imported(PACKAGE.joinpath(*name.split(".")[1:]).with_suffix(".py"))
    verifier = _sources_in("verify") - _sources_in("verify/kernels")
    return frozenset(found) | _sources_in("kernels/runtime") | verifier


def all_sources() -> frozenset[Path]:
    """Return all source files of the program, on which the results of models depend."""
    return _sources_in("")


@cache
def _sources_in(folder: str) -> frozenset[Path]:
    return frozenset(p for p in (PACKAGE / folder).rglob("*") if p.suffix in (".py", ".c"))


def _imported(first: Path) -> set[Path]:
    """List a file of the program, and all that it imports of the program, directly or not."""
    found, further = set(), {first}
    while further:
        path = further.pop()
        found.add(path)
        further |= _imports(path) - found
    return found


@cache
def _imports(path: Path) -> frozenset[Path]:
    names: list[str] = []
    for node in ast.walk(ast.parse(path.read_bytes())):
        if isinstance(node, ast.Import):
            names += [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            names += [node.module or "", *(f"{node.module}.{alias.name}" for alias in node.names)]
    files = (
        file
        for name in names
        if name.split(".")[0] == PACKAGE.name
        for place in [ROOT.joinpath(*name.split("."))]
        for file in (place.with_suffix(".py"), place / "__init__.py")
    )
    return frozenset(file for file in files if file != PACKAGE / "__init__.py" and file.is_file())


def describe_machine(device: torch.device) -> str:
    """Describe the other dependencies of results: libraries, device, CPU, settings."""
    lines = [platform.platform(), platform.python_version(), torch.__version__]
    lines += [str(device), f"{torch.get_num_threads()} threads"]
    for name in LIBRARIES:
        with suppress(importlib.metadata.PackageNotFoundError):
            lines.append(f"{name} {importlib.metadata.version(name)}")
    if device.type == "cuda":
        about = torch.cuda.get_device_properties(device)
        lines.append(f"{about.name} {about.major}.{about.minor} {about.total_memory}")
    lines += [*native.describe_cpu(), native.why_not() or "native"]
    lines += sorted(f"{k}={v}" for k, v in os.environ.items() if k.startswith(SETTINGS))
    return "\n".join(lines)


class Memory:
    """Results of passed checks, with a file for each.

    Args:
        machine: properties of the machine, from `describe_machine`; None stores nothing.
        fresh: whether to ignore stored results, and store all anew.
        show: called with a line for each problem of the files.
    """

    def __init__(
        self,
        machine: str | None = None,
        *,
        fresh: bool = False,
        show: Callable[[str], None] = lambda _: None,
    ) -> None:
        self._machine, self._fresh, self._show = machine, fresh, show
        self._folder = memory_folder()
        self._stamps: dict[Path, tuple[int, int]] = {}
        self._digests: dict[Path, str] = {}
        self._told: set[str] = set()

    def begin(
        self,
        workers: Workers,
        function: Callable[..., list],
        jobs: Iterable[tuple],
        progress: Callable[[JobDone], None],
        kind: type,
        sources: Callable[[tuple], frozenset[Path] | None],
        turn: Callable[[tuple], int] = lambda _: 0,
        ahead: Callable[[tuple], Iterable[tuple]] = lambda _: (),
        turn_ahead: int = FIRST,
    ) -> Callable[[], list[list]]:
        """Run the jobs whose results are not known, and store those that pass.

        Args:
            workers: processes that run the jobs.
            function: see `Workers.begin`; it returns a list of results.
            jobs: see `Workers.begin`.
            progress: called for each finished job, first for those with known results.
            kind: class of the results.
            sources: returns the source files of a job's results; None does not store them.
            turn: see `Workers.begin`.
            ahead: yields calls that processes run before a job: a function and its arguments.
            turn_ahead: priority of these calls.

        Returns:
            Waits for the jobs, and returns the results in their order.
        """
        jobs = list(jobs)
        keys = [self._key(function, job, sources) for job in jobs]
        key_of = {id(job): key for job, key in zip(jobs, keys, strict=True)}
        results = [self._recall(key, kind) for key in keys]
        open_jobs = [index for index, found in enumerate(results) if found is None]
        known = [index for index, found in enumerate(results) if found is not None]
        for count, index in enumerate(known, 1):
            job, found = jobs[index], results[index]
            progress(JobDone(count, len(jobs), name_of(job), found, job, remembered=True))

        def done(job: JobDone) -> None:
            self._keep(key_of[id(job.arguments)], job.result)
            number = len(known) + job.number
            progress(dataclasses.replace(job, number=number, total=len(jobs)))

        todo = [jobs[index] for index in open_jobs]
        if workers.number > 1:
            for call in (call for job in todo for call in ahead(job)):
                workers.begin(call[0], [call[1:]], turn=lambda _: turn_ahead)
        batch = workers.begin(function, todo, done, turn)

        def finish() -> list[list]:
            for index, found in zip(open_jobs, workers.finish(batch), strict=True):
                results[index] = found
            return [found for found in results if found is not None]

        return finish

    def _key(self, function: Callable, job: tuple, sources: Callable) -> "_Key | None":
        if self._machine is None:
            return None
        files = sources(job)
        if files is None:
            return None
        about = f"{function.__name__}\n{job!r}\n{self._machine}"
        digests = "\n".join(
            f"{path.relative_to(ROOT)} {self._digest(path)}" for path in sorted(files)
        )
        name = sha256(about.encode()).hexdigest()[:40]
        return _Key(f"{name}.json", sha256(f"{about}\n{digests}".encode()).hexdigest(), files)

    def _digest(self, path: Path) -> str:
        if path not in self._digests:
            self._stamps[path] = _stamp(path)
            self._digests[path] = sha256(path.read_bytes()).hexdigest()
        return self._digests[path]

    def _recall(self, key: "_Key | None", kind: type) -> list | None:
        """Read a cached result; None if it is missing or invalid."""
        if key is None or self._fresh:
            return None
        path = self._folder / key.name
        text = read_cached(path, self._tell)
        if text is None:
            return None
        try:
            saved = json.loads(text)
            if saved["key"] != key.digest:
                return None  # a source has changed since
            found = [_rebuilt(kind, row) for row in saved["results"]]
        except (ValueError, TypeError, KeyError, RecursionError) as error:
            self._tell(f"ignored `{path}`: {error}")
            return None
        return found if found and all(result.passed is True for result in found) else None

    def _keep(self, key: "_Key | None", results: list) -> None:
        """Remember results if all passed and no source has changed meanwhile; else forget them."""
        if key is None:
            return
        path = self._folder / key.name
        try:
            if not all(result.passed for result in results) or self._changed(key.files):
                remove_cached(path)
                return
            rows = [dataclasses.asdict(result) for result in results]
            text = json.dumps({"key": key.digest, "results": rows}, allow_nan=False)
            write_cached(path, [text.encode()])
        except (ArbError, ValueError) as error:
            self._tell(f"nothing is remembered: {error}")

    def _changed(self, files: Iterable[Path]) -> bool:
        return any(_stamp(path) != self._stamps[path] for path in files)

    def _tell(self, line: str) -> None:
        if line not in self._told:
            self._told.add(line)
            self._show(line)


@dataclasses.dataclass(frozen=True, slots=True)
class _Key:
    name: str
    """Name of the file, from the check and the machine."""
    digest: str
    """Digest of the check, the machine and the source files."""
    files: frozenset[Path]


def _rebuilt(kind: type, row: dict[str, Any]) -> Any:
    """Rebuild a result from JSON."""
    fields = {name: tuple(v) if isinstance(v, list) else v for name, v in row.items()}
    return kind(**fields | {"remembered": True})


def _stamp(path: Path) -> tuple[int, int]:
    try:
        status = path.stat()
    except OSError:
        return 0, 0
    return status.st_mtime_ns, status.st_size
