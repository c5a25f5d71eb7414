"""Evaluation of a model on a whole text with sliding windows; each byte is predicted once.

A window of T bytes predicts the T bytes after its first one. Windows begin a stride apart. Of each
window after the first, only the predictions beyond the previous window count, which have at least
T - stride bytes of context. The last window is moved back so that it is complete.

For a masked model the result is the bound of `arbcli.families.masked.masking`. Bytes that two
windows share are predicted in the later one from a random subset of the bytes before them, which is
a bound, too.
"""

import itertools
import math
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from arbcli.base.errors import ArbError
from arbcli.base.lazy import imported
from arbcli.base.run_files import TOKENIZER
from arbcli.config.settings import check_bounds
from arbcli.data.chats import Chats, open_documents
from arbcli.data.text import Text, check_is_bytes, entropy
from arbcli.data.tokens import tokenised
from arbcli.families import MEDIA_MARK
from arbcli.generation.option_checks import check_masked_option, check_stride
from arbcli.generation.tokens import check_vocabulary
from arbcli.kernels.runtime.backend import use_backend
from arbcli.kernels.runtime.device import deterministic, explained_out_of_memory
from arbcli.model.language_model import LanguageModel

if TYPE_CHECKING:
    from arbcli.families.media.evaluation import MediaLosses

BATCH, MAX_BATCH_POSITIONS = 16, 32_768
"""Default number of windows in a forward pass, and the most positions of several windows."""
DRAWS = 16
"""Default number of random masks for each window."""
SEED = 7
"""Seed of the random masks."""
MIN_WINDOW = 1024
"""Minimum number of positions of a window, unless the context is shorter."""
FIRST_BUCKET = 1024
"""Positions of the first bucket of `by_position`; each further bucket doubles the end."""


@dataclass(frozen=True, slots=True, kw_only=True)
class KindLoss:
    """Mean loss over all bytes of one kind."""

    kind: str
    """`text`, `sound` or `picture`."""
    bytes: int
    nats_per_byte: float
    unit: str | None = None
    """`sample` for sounds, `pixel` for pictures; None for text."""
    units: int | None = None
    """Number of units; samples of all channels are counted."""
    bits_per_unit: float | None = None
    """Bits per unit, including headers."""
    peer_bits_per_unit: dict[str, float] | None = None
    """Bits per unit of lossless formats, by name; None if their packages are not installed."""


@dataclass(frozen=True, slots=True)
class PositionLoss:
    """The mean loss over a range of positions in windows."""

    first: int
    last: int
    nats_per_byte: float


@dataclass(frozen=True, slots=True, kw_only=True)
class EvaluateReport:
    """Result of an evaluation."""

    checkpoint: str
    text: str
    """Name of the text, and its number of files."""
    bytes: int
    """Size of the text in bytes, all but the first of which are predicted; of documents, size of
    the answers."""
    nats_per_byte: float
    bits_per_byte: float
    tokens: int | None
    """Size of the text, or of the answers, in tokens; None for a model of bytes."""
    nats_per_token: float | None
    entropy: float
    """Order-0 entropy of the text in nats per byte."""
    compression_ratio: float
    """Size of the text relative to its code length under the model, with eight bits for the first
    byte."""
    context: int
    """Length of a window in bytes."""
    stride: int
    """Distance between the starts of two windows in bytes."""
    seconds: float
    bytes_per_second: float
    kv: str
    """Storage format to which keys and values were rounded."""
    draws: int | None
    """Random masks for each window of a masked model, whose losses are a bound; else None."""
    by_position: tuple["PositionLoss", ...]
    """Loss by the position in a window. It includes bytes that two windows predict, so that each
    bucket covers nearly all of the text."""
    by_kind: tuple[KindLoss, ...]
    """Loss of text, sounds and pictures, if the text has any of the latter."""
    device: str
    backend: str


def windows(num_bytes: int, context: int, stride: int) -> Iterator[tuple[int, int]]:
    """Split a text into overlapping windows of min(context, num_bytes - 1) bytes.

    Args:
        num_bytes: size of the text, at least 2.
        context: maximum length of a window.
        stride: distance between the starts of two windows, 1 to `context`.

    Yields:
        (start, counted): `counted` last predictions of the window are not made by earlier ones.
    """
    length = min(context, num_bytes - 1)
    num_predicted, last = 0, num_bytes - 1 - length
    for start in itertools.chain(range(0, last, stride), [last]):
        yield start, start + length - num_predicted
        num_predicted = start + length


@torch.no_grad()
def mean_loss(
    model: LanguageModel,
    text: Text,
    *,
    stride: int,
    batch: int,
    progress: Callable[[int, float], None] = lambda *_: None,
    sums: Tensor | None = None,
    media: "MediaLosses | None" = None,
    draws: int = DRAWS,
) -> float:
    """Compute the mean loss over all symbols of a text but the first, in nats per symbol.

    Args:
        model: the model to evaluate.
        text: at least 2 symbols of the model's vocabulary.
        stride: distance between the starts of two windows, 1 to `config.ctx`.
        batch: windows in a forward pass.
        progress: called after each batch with the number of predicted symbols and their mean loss.
        sums: (T,) float64, to which the losses of each position are added; T is `config.ctx`, or
            the number of predicted symbols if that is smaller.
        media: accumulates the losses of sounds and pictures.
        draws: random masks for each window of a masked model.
    """
    length = min(model.config.ctx, len(text) - 1)
    index = torch.arange(length, device=model.device)
    remaining, total, num_predicted, first = windows(len(text), length, stride), 0.0, 0, 0
    while part := list(itertools.islice(remaining, batch)):
        starts, counted = zip(*part, strict=True)
        ids = text.window_batch(starts, length + 1).to(model.device).long()  # (B, T + 1)
        if model.config.is_masked:
            losses = _masked_losses(model, ids[:, 1:], range(first, first + len(ids)), draws)
        else:
            losses = model.position_losses(ids[:, :-1], ids[:, 1:])  # (B, T)
        first += len(ids)
        is_counted = index >= length - torch.tensor(counted, device=model.device)[:, None]
        total += float(torch.where(is_counted, losses, 0).sum(dtype=torch.float64))
        if media is not None:
            media.add(starts, losses, is_counted)
        if sums is not None:
            sums += losses.sum(dim=0, dtype=torch.float64)
        num_predicted += sum(counted)
        progress(num_predicted, total / num_predicted)
    return total / num_predicted


@torch.no_grad()
def document_loss(
    model: LanguageModel,
    text: Chats,
    *,
    batch: int,
    progress: Callable[[int, float], None] = lambda *_: None,
) -> float:
    """Compute the mean loss over all learnt symbols of documents, in nats per symbol.

    Args:
        model: the model to evaluate.
        text: documents, which the model keeps apart.
        batch: windows in a forward pass.
        progress: called after each batch with the number of predicted symbols and their mean loss.
    """
    total, num_predicted = 0.0, 0
    for first in range(0, len(text.bins), batch):
        windows = range(first, min(first + batch, len(text.bins)))
        inputs = [part.to(model.device) for part in text.packed_batch(windows)]
        count = text.learnt_symbols(windows, text.context)
        total += float(model.loss(*inputs)) * count
        num_predicted += count
        progress(num_predicted, total / num_predicted)
    return total / num_predicted


def documents_for(model: LanguageModel, checkpoint: Path, text: Text, field: str) -> Chats:
    """Tokenise documents as the model reads them, in windows that the longest one fills.

    Args:
        model: the model.
        checkpoint: path of its checkpoint, next to which are its tokenizer and template.
        text: records.
        field: see `Chats`.

    Raises:
        ArbError: the model has no tokenizer or no template, or a record is invalid.
    """
    path, context = checkpoint.with_name(TOKENIZER), model.config.ctx
    documents = open_documents(text, field, model.tokenizer, path, context)
    shorter = max(documents.longest, MIN_WINDOW)
    if shorter >= context:
        return documents
    return open_documents(text, field, model.tokenizer, path, shorter)


def _masked_losses(model: LanguageModel, ids: Tensor, numbers: range, draws: int) -> Tensor:
    """Average the terms of the bound over random masks: (B, T) float32.

    The hidden shares of the masks of a window are evenly spaced.

    Args:
        model: a masked model.
        ids: (B, T) int64.
        numbers: indices of the windows in the text, which seed the masks.
        draws: number of masks for each window.
    """
    pairs = [
        imported("arbcli.families.masked.masking:hide")(
            row.expand(draws, -1),
            model.config.vocabulary,
            seed=SEED,
            step=number,
            numbers=range(draws),
            of=draws,
        )
        for number, row in zip(numbers, ids, strict=True)
    ]
    masked, targets = (torch.stack(parts, dim=1) for parts in zip(*pairs, strict=True))
    losses = torch.zeros(ids.shape, dtype=torch.float32, device=ids.device)
    for draw in range(draws):
        losses += model.position_losses(masked[draw], targets[draw]) / draws
    return losses


def _average_positions(sums: Tensor, count: float) -> tuple[PositionLoss, ...]:
    """Average the sums of losses in buckets of positions.

    Args:
        sums: (T,) float64, sum of the losses of each position in nats.
        count: number of windows, times the bytes per symbol.
    """
    buckets, first = [], 0
    while first < len(sums):
        end = min(len(sums), max(FIRST_BUCKET, 2 * first))
        buckets.append(PositionLoss(first, end - 1, float(sums[first:end].mean()) / count))
        first = end
    return tuple(buckets)


def evaluate(
    model: LanguageModel,
    checkpoint: str,
    text: Text,
    description: str,
    *,
    stride: int | None,
    batch: int | None,
    backend: str,
    kv: str | None = None,
    draws: int | None = None,
    progress: Callable[[int, int, float], None] = lambda *_: None,
) -> EvaluateReport:
    """Evaluate a model on a text.

    Args:
        model: the model to evaluate.
        checkpoint: name of the checkpoint, for the report.
        text: the text in bytes, which a model with a tokenizer encodes; or documents, whose answers
            are predicted.
        description: name of the text, for the report.
        stride: distance between the starts of two windows: see `check_stride`.
        batch: windows in a forward pass; None is `BATCH`, and fewer of long windows.
        backend: kernel backend.
        kv: format to which keys and values are rounded: see `LanguageModel.cached_as`.
        draws: random masks for each window of a masked model; None is `DRAWS`.
        progress: called after each batch with the predicted bytes, their total number, and their
            mean loss in nats.

    Raises:
        ArbError: the text is too short, an option does not suit the model, or GPU memory is
            exhausted.
    """
    check_masked_option(model.config, "--draws", draws)
    draws = DRAWS if draws is None else draws
    if batch is None:
        batch = min(BATCH, max(1, MAX_BATCH_POSITIONS // model.config.ctx))
    check_bounds("batch", batch)
    stride = check_stride(model.config, stride)
    check_vocabulary(model.config, model.tokenizer, "")
    documents = text if isinstance(text, Chats) else None
    if documents is not None:
        model.config.check_documents()
    elif model.tokenizer is None:
        check_is_bytes(text.token_bytes)
    elif text.source is text:
        text = tokenised(text, model.tokenizer)
    if documents is None and len(text) < 2:
        raise ArbError("a text of one byte has nothing to predict", "name a longer text")
    started, symbol_bytes = time.perf_counter(), text.symbol_bytes
    predicted = (len(text) - 1) * symbol_bytes if documents is None else documents.learnt_bytes
    media: MediaLosses | None = None
    by_position: tuple[PositionLoss, ...] = ()
    tokens: int | None

    def report_progress(num_predicted: int, loss: float) -> None:
        progress(round(num_predicted * symbol_bytes), round(predicted), loss / symbol_bytes)

    with (
        deterministic(),
        explained_out_of_memory("use a smaller `--batch`"),
        use_backend(backend),
        model.cached_as(kv),
    ):
        cache_dtype = model.cache_dtype
        if documents is not None:
            nats = document_loss(model, documents, batch=batch, progress=report_progress)
        else:
            length = min(model.config.ctx, len(text) - 1)
            sums = torch.zeros(length, dtype=torch.float64, device=model.device)
            if text.source is text and text.may_contain(MEDIA_MARK):
                media = imported("arbcli.families.media.evaluation:MediaLosses")(text, model.device)
            nats = mean_loss(
                model,
                text,
                stride=stride,
                batch=batch,
                progress=report_progress,
                sums=sums,
                media=media,
                draws=draws,
            )
    seconds = time.perf_counter() - started
    bits = nats / symbol_bytes / math.log(2)
    if documents is not None:
        context = stride = documents.context
        size, tokens, ratio = documents.learnt_bytes, documents.learnt_tokens, 8 / bits
    else:
        context, size = model.config.ctx, len(text.source)
        tokens = None if model.tokenizer is None else len(text)
        ratio = 8 * size / (8 + bits * (size - 1))
        count = sum(1 for _ in windows(len(text), context, stride)) * symbol_bytes
        by_position = _average_positions(sums, count)
    return EvaluateReport(
        checkpoint=checkpoint,
        text=description,
        bytes=size,
        nats_per_byte=nats / symbol_bytes,
        bits_per_byte=bits,
        tokens=tokens,
        nats_per_token=None if tokens is None else nats,
        entropy=entropy(text),
        compression_ratio=ratio,
        context=context,
        stride=stride,
        seconds=seconds,
        bytes_per_second=size / seconds,
        kv=cache_dtype,
        draws=draws if model.config.is_masked else None,
        by_position=by_position,
        by_kind=() if media is None else media.report(),
        device=str(model.device),
        backend=backend,
    )
