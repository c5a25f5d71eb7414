"""Read-only verification of a run's files, and a preview of a resume."""

import dataclasses
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from arbcli.base.atomic_files import TEMPORARY, is_abandoned
from arbcli.base.errors import ArbError, counted
from arbcli.base.run_files import CONFIG, best_checkpoints, checkpoints, require_run, step_of
from arbcli.config.training import TrainConfig
from arbcli.model.checkpoint import Accept, Checkpoint, DamagedError, load_checkpoint, path_of
from arbcli.training import resume
from arbcli.training.directory import read_facts, reopen_texts, run_config
from arbcli.training.recent import FIELD
from arbcli.training.record import METRICS, held_out_losses, is_kept, read_all_records
from arbcli.training.saving import surplus_checkpoints
from arbcli.training.schedule import Patience, is_evaluated
from arbcli.training.teacher import reload_teacher
from arbcli.training.trainer import check_shares, text_digest


@dataclass(frozen=True, slots=True, kw_only=True)
class Finding:
    """The result of verifying a file of a run, its text or its teacher."""

    name: str
    state: str
    """`ok`, `damaged`, `refused` (possibly intact, but unusable for this run) or `left over`."""
    detail: str


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckReport:
    """State of a run's files, and the effect of a resume."""

    run: str
    findings: tuple[Finding, ...]
    resumes_at: int | None
    """Step of the checkpoint that a resume loads; None if it would fail."""
    stops: str | None
    """Reason why a resume would fail."""
    steps: int | None
    """Total number of steps; with `--steps` the new number."""
    steps_before: int | None
    """Present total number of steps, if `--steps` would change it."""
    drops_records: int
    """Number of records that are replaced: records of later steps, and the extra one of a stop."""
    evaluates_first: bool
    """Whether a resume begins with an evaluation, as the record of its step is missing."""
    has_ended: bool
    """Whether the run has ended by `--patience`, so that a resume takes no step."""
    sets_aside: tuple[str, ...]
    """Checkpoints of later steps, renamed at the first save, or at once if `--steps` changes."""
    removes: tuple[str, ...]
    """Temporary files, and checkpoints beyond those to keep: removed at once, or at the first save
    if checkpoints are set aside."""
    passed: bool
    """Whether no file is damaged or refused."""


def check_run(
    path: Path,
    steps: int | None = None,
    *,
    processes: int = 1,
    machine: Sequence[str | None] | None = None,
    **changes: Any,
) -> CheckReport:
    """Verify the contents of all files of a run, and predict the effect of a resume.

    Args:
        path: a run directory, or the checkpoint from which to resume.
        steps: number of steps that the resume would set; None keeps the run's own.
        processes: number of processes of the resume.
        machine: its `device` and `backend`; None does not check that this machine has them.
        changes: other settings that it would change: see `resume_run`.

    Raises:
        ArbError: there is no run.
    """
    run = require_run(path)
    findings: list[Finding] = []
    facts: dict[str, Any] = {}
    config = None
    try:
        facts = read_facts(run)
        config = dataclasses.replace(run_config(run, facts), **changes)
        detail = f"{counted(config.steps, 'step')}, begun {facts['started'][:19]}"
        findings.append(Finding(name=CONFIG, state="ok", detail=detail))
    except ArbError as error:
        findings.append(Finding(name=CONFIG, state="refused", detail=str(error)))
    if config is not None:
        findings.append(_check_text(facts, config))
        if config.teacher is not None:
            findings.append(_check_teacher(facts, config))
    stops = next((finding.detail for finding in findings if finding.state != "ok"), None)
    records, bad = read_all_records(run)
    findings.append(_check_records(len(records), bad))
    check_checkpoint = resume.checkpoint_check(run, facts, config) if config else lambda _: None
    recent_steps: set[int] = set()

    def accept(checkpoint: Checkpoint) -> None:
        check_checkpoint(checkpoint)
        if FIELD in checkpoint.data:
            recent_steps.add(checkpoint.step)

    files = [*checkpoints(run), *best_checkpoints(run)]
    verified = {file: _check_checkpoint(file, accept) for file in files}
    # a run that is training removes files
    verified = {file: finding for file, finding in verified.items() if file.exists()}
    findings += verified.values()
    verified = {file: verified[file] for file in verified if file.name.startswith("step-")}
    findings += _left_over(run)
    resumes_at = None
    if stops is None:
        resumes_at, stops = _start(verified, path if path != run else None)
        if not verified and resume.can_restart(run):
            resumes_at, stops = 0, _refusal(resume.reload_initial, facts)
    total = config.steps if config else None
    extends = config is not None and steps not in (None, total)
    if config is not None and stops is None:
        stops = _refusal(check_shares, config, processes)
        if machine is not None and stops is None:
            stops = _refusal(resume.on_machine, config, *machine)
    if extends and stops is None:
        stops = _refusal(resume.check_steps, run, resumes_at, steps)
    resumes_at = None if stops else resumes_at
    removes = [finding.name for finding in findings if finding.name.endswith(".tmp")]
    sets_aside: list[str] = []
    dropped, evaluates, ended = 0, False, False
    if config is not None and resumes_at is not None:
        resumed = dataclasses.replace(config, steps=steps or config.steps)
        has_recent = resumes_at in recent_steps
        kept_records = [r for r in records if is_kept(r, resumes_at, resumed, has_recent)]
        dropped = len(records) - len(kept_records)
        losses = held_out_losses(kept_records)
        ended = Patience(config.patience, losses).is_exhausted
        recorded = any(record["step"] == resumes_at for record in kept_records)
        evaluates = is_evaluated(resumed, resumes_at) and not recorded
        sets_aside = [file.name for file in verified if step_of(file) > resumes_at]
        removed = {file.name for file in surplus_checkpoints(run, config, resumes_at, kept_records)}
        if resumes_at < resumed.steps:  # else nothing is saved
            older = [file.name for file in verified if step_of(file) <= resumes_at]
            removed |= {*older[config.keep - 1 :]}
        removes += sorted(removed, reverse=True)
        if ended and extends:
            resumes_at, stops = None, _refusal(resume.check_patience, run, config, losses)
    return CheckReport(
        run=str(run),
        findings=tuple(findings),
        resumes_at=resumes_at,
        stops=stops,
        steps=steps if extends else total,
        steps_before=total if extends else None,
        drops_records=dropped,
        evaluates_first=evaluates,
        has_ended=ended,
        sets_aside=tuple(sets_aside),
        removes=tuple(removes),
        passed=stops is None and all(f.state in ("ok", "left over") for f in findings),
    )


def _check_text(facts: dict[str, Any], config: TrainConfig) -> Finding:
    try:
        texts = reopen_texts(facts, config)
        digest = text_digest(texts)
    except ArbError as error:
        return Finding(name="text", state="refused", detail=str(error))
    if digest != facts["text"]["digest"]:
        return Finding(name="text", state="refused", detail="it has changed since the run began")
    size = f"{len(texts.train.source):,} + {len(texts.val.source):,} bytes"
    return Finding(name="text", state="ok", detail=f"{texts.description}, {size}")


def _check_teacher(facts: dict[str, Any], config: TrainConfig) -> Finding:
    if stops := _refusal(reload_teacher, facts, config):
        return Finding(name="teacher", state="refused", detail=stops)
    return Finding(name="teacher", state="ok", detail=f"{config.teacher}")


def _check_records(good: int, bad: int) -> Finding:
    state = "damaged" if bad else "ok"
    detail = counted(good, "record") + (f", and {counted(bad, 'invalid line')}" if bad else "")
    return Finding(name=METRICS, state=state, detail=detail)


def _check_checkpoint(path: Path, accept: Accept) -> Finding:
    try:
        checkpoint = load_checkpoint(path, accept)
    except DamagedError as error:
        return Finding(name=path.name, state="damaged", detail=str(error))
    except ArbError as error:
        return Finding(name=path.name, state="refused", detail=str(error))
    size = sum(tensor.nbytes for tensor in checkpoint.tensors.values())
    written = path_of(checkpoint, path.parent).name
    if path.name.replace("best-", "step-") != written:
        return Finding(name=path.name, state="damaged", detail=f"it was written as `{written}`")
    return Finding(name=path.name, state="ok", detail=f"{size:,} bytes of state, as written")


def _left_over(run: Path) -> Iterator[Finding]:
    kinds = {
        f".*.{TEMPORARY}": "temporary file of a killed process",
        "*.aside*": "set aside by a resume; no longer read",
    }
    for pattern, kind in kinds.items():
        for path in sorted(run.glob(pattern)):
            if path.name.endswith(".tmp") and not is_abandoned(path):
                continue  # a run that is training writes it
            yield Finding(name=path.name, state="left over", detail=kind)


def _refusal(check: Callable[..., object], *arguments: Any) -> str | None:
    """Call a check of a resume; return the message of its error, or None."""
    try:
        check(*arguments)
    except ArbError as error:
        return str(error)
    return None


def _start(verified: dict[Path, Finding], requested: Path | None) -> tuple[int | None, str | None]:
    """Return the step of the checkpoint that a resume loads, or the reason why it fails."""
    for path, finding in verified.items():
        if requested is not None and path.name != requested.name:
            continue
        if finding.state == "ok":
            return step_of(path), None
        if finding.state == "refused" or requested is not None:
            return None, finding.detail
    return None, "there is no checkpoint that can be used"
