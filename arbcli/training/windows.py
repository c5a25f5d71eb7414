"""Windows of a training text as runs of text, which are learnt or only read."""

import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from arbcli.base.errors import ArbError
from arbcli.config.training import TrainConfig
from arbcli.data.text import Texts, batch_at, batch_starts
from arbcli.data.tokens import Tokenizer


@dataclass(frozen=True, slots=True)
class Run:
    """Consecutive symbols of a document that are all learnt, or all only read."""

    text: str
    """Text of the symbols; incomplete UTF-8 becomes U+FFFD."""
    symbols: int
    learnt: bool


@dataclass(frozen=True, slots=True)
class Window:
    """A window of a training text."""

    documents: tuple[tuple[Run, ...], ...]

    @property
    def learnt(self) -> int:
        """Number of symbols that are learnt."""
        return sum(run.symbols for runs in self.documents for run in runs if run.learnt)


def first_windows(config: TrainConfig, texts: Texts, number: int) -> Iterator[Window]:
    """Yield the first windows that a run would read, in its order.

    Args:
        config: configuration of the run.
        texts: its texts.
        number: number of windows.

    Raises:
        ArbError: the objective hides symbols or moves holes.
    """
    if config.model.fills:
        raise ArbError(
            "windows of `--objective next` can be shown, and this model fills holes",
            "leave `--show-windows` out",
        )
    text, context = texts.train, config.model.ctx
    for index in range(-(-number // config.batch)):
        step, micro = divmod(index, config.accum)
        starts = batch_starts(text, config.seed, step, micro, config.batch, context)
        rows = [part.tolist() for part in batch_at(text, starts, context, "cpu")]
        for row in itertools.islice(zip(*rows, strict=True), number - index * config.batch):
            yield _window(*row, tokenizer=texts.tokenizer)


def _window(
    ids: list[int],
    targets: list[int],
    documents: list[int] | None = None,
    *,
    tokenizer: Tokenizer | None,
) -> Window:
    """Divide a window into its documents, without padding, and these into runs."""
    rows = []
    positions = zip(ids, targets, documents or itertools.repeat(0), strict=False)
    for _, group in itertools.groupby(positions, lambda position: position[2]):
        document_ids, document_targets, _ = zip(*group, strict=True)
        symbols = [*document_ids, document_targets[-1]]
        learnt = [False, *(target >= 0 for target in document_targets)]
        if documents and not any(learnt):  # padding
            continue
        end = len(symbols) if symbols[-1] >= 0 else -1
        rows.append(tuple(_runs(symbols[:end], learnt[:end], tokenizer)))
    return Window(tuple(rows))


def _runs(
    symbols: Sequence[int], learnt: Sequence[bool], tokenizer: Tokenizer | None
) -> Iterator[Run]:
    pairs = zip(symbols, learnt, strict=True)
    for is_learnt, group in itertools.groupby(pairs, lambda pair: pair[1]):
        run = [symbol for symbol, _ in group]
        text = bytes(run).decode(errors="replace") if tokenizer is None else tokenizer.decode(run)
        yield Run(text, len(run), is_learnt)
