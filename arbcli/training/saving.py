"""Saving during training: checkpoints, the best one, and checkpoints of later steps."""

import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from arbcli.base.atomic_files import sweep
from arbcli.base.errors import ArbError, quoted, shell_word
from arbcli.base.run_files import best_checkpoints, checkpoint_path, checkpoints, step_of
from arbcli.config.training import TrainConfig
from arbcli.data.text import Texts
from arbcli.model.checkpoint import keep_best, link_best, remove_files, save_checkpoint, set_aside
from arbcli.training.observer import Observer
from arbcli.training.recent import FIELD
from arbcli.training.record import RunRecords, best_step
from arbcli.training.schedule import Patience
from arbcli.training.trainer import Trainer, text_digest

SAVE_SECONDS = 300
"""Maximum age of the last checkpoint, whatever `save_every` is."""


class Saver:
    """Writes checkpoints, sets aside checkpoints of later steps, and keeps the best one.

    Args:
        trainer: the trainer.
        run: directory of the run; None saves nothing.
        facts: contents of `config.json`.
        observer: receives notes.
        records: records of the run.
        patience: held-out losses of the run.
        resumed: whether the run continues from a checkpoint of the trainer's step.
    """

    def __init__(
        self,
        trainer: Trainer,
        run: Path | None,
        facts: dict[str, Any],
        observer: Observer,
        records: RunRecords,
        patience: Patience,
        *,
        resumed: bool,
    ) -> None:
        self._trainer, self._facts, self._observer = trainer, facts, observer
        self._records, self._patience = records, patience
        self.run = run
        """Directory of the checkpoints; None for no checkpoints."""
        self.saved_step = trainer.step if resumed else None
        """Step of the newest checkpoint; None if there is none."""
        self._later = [] if run is None else later_checkpoints(run, trainer.step)
        """Checkpoints of later steps, which are set aside at the first save."""
        self._times = _times(trainer.texts)
        """Sizes and modification times of the text's files at the last check."""
        self._last_save = time.perf_counter()

    @property
    def is_due(self) -> bool:
        """Whether the last checkpoint is older than `SAVE_SECONDS`, on this process's clock."""
        return time.perf_counter() - self._last_save >= SAVE_SECONDS

    @property
    def is_saved(self) -> bool:
        """Whether there is a checkpoint of the trainer's step, or there are none at all."""
        return self.run is None or self.saved_step == self._trainer.step

    @property
    def newest(self) -> Path | None:
        """The newest checkpoint, if there is one."""
        if self.run is None or self.saved_step is None:
            return None
        return self._path_of(self.saved_step)

    def save(self, recent: dict[str, Any]) -> None:
        """Save the state of the trainer; collective.

        Args:
            recent: losses of the last steps: see `arbcli.training.recent`.

        Raises:
            ArbError: the text has changed, processes differ, or the file cannot be written.
        """
        assert self.run is not None
        self._check_text(self.run)
        self._trainer.check_agreement()
        digests = self._facts["text"]["digest"], self._facts.get("init_digest")
        checkpoint = self._trainer.checkpoint(*digests)
        checkpoint.data[FIELD] = recent
        aside: list[Path] = []
        if self._trainer.group.first:
            # a kill leaves the old branch with its records, or the new one with its own
            path = self._path_of(checkpoint.step)
            if self._later:
                self._link_best()
            if path in self._later:
                aside = [set_aside(path, leave=True)]
            save_checkpoint(self.run, checkpoint, self._trainer.config.keep)
            self._records.merge_branches()
            aside += [set_aside(later) for later in self._later if later != path]
            self._records.drop_old_branch()
        self.saved_step, self._last_save, self._later = checkpoint.step, time.perf_counter(), []
        note_aside(aside, self._observer)

    @property
    def is_best(self) -> bool:
        """Whether the best checkpoint is kept, and is that of this step."""
        keeps_best = self.run is not None and self._trainer.config.keeps_best
        return keeps_best and self._patience.best_step == self._trainer.step

    def keep_best(self) -> None:
        """Keep the newest checkpoint as the best one, once later checkpoints are set aside."""
        if self.newest is not None and self._trainer.group.first and not self._later:
            keep_best(self.newest)

    def _path_of(self, step: int) -> Path:
        assert self.run is not None
        return checkpoint_path(self.run, step, self._trainer.config.model.weights)

    def _link_best(self) -> None:
        """Keep the best checkpoint of the new branch, next to that of the old one."""
        best = self._patience.best_step
        if self._trainer.config.keeps_best and best is not None:
            path = self._path_of(best)
            if path.exists():
                link_best(path)

    def _check_text(self, run: Path) -> None:
        """Check that the text has not changed since the run began.

        Raises:
            ArbError: in all processes, if a file was changed.
        """
        texts, same = self._trainer.texts, True
        if self._trainer.group.first and (times := _times(texts)) != self._times:
            same = text_digest(texts) == self._facts["text"]["digest"]
            self._times = times if same else self._times
        if not self._trainer.group.broadcast_object(same):
            raise ArbError(
                "the text was changed while the run read it",
                f"restore it, and continue with `--resume {shell_word(run)}`",
            )


def surplus_checkpoints(
    run: Path, config: TrainConfig, step: int, records: Sequence[dict[str, Any]]
) -> list[Path]:
    """Return the checkpoints that a run at a step does not keep, which a killed process left.

    Args:
        run: directory of the run.
        config: configuration of the run.
        step: step from which it continues; while there are later checkpoints, all are kept.
        records: records up to this step.
    """
    if later_checkpoints(run, step):
        return []
    paths, best = checkpoints(run)[config.keep :], best_step(records)
    best_paths = [path for path in best_checkpoints(run) if step_of(path) == best]
    return paths + [path for path in best_checkpoints(run) if best_paths and path not in best_paths]


def sweep_run(run: Path, config: TrainConfig, step: int, records: Sequence[dict[str, Any]]) -> None:
    """Remove leftovers of a killed process: temporary files, and `surplus_checkpoints`.

    Raises:
        ArbError: a checkpoint cannot be removed.
    """
    sweep(run)
    remove_files(surplus_checkpoints(run, config, step, records))


def later_checkpoints(run: Path, step: int) -> list[Path]:
    """Return the checkpoints of a run that are of later steps."""
    return [path for path in [*checkpoints(run), *best_checkpoints(run)] if step_of(path) > step]


def note_aside(aside: Sequence[Path], observer: Observer) -> None:
    """Send a note about checkpoints that were set aside, if there are any."""
    if aside:
        observer.noted(f"checkpoints of later steps are set aside: {quoted(aside)}")


def _times(texts: Texts) -> dict[Path, tuple[int, int]]:
    """Return size and modification time of each file of both texts."""
    return texts.train.times() | texts.val.times()
