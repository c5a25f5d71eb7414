"""How well a model predicts a whole text: every byte once, each with context before it.

A window of T bytes predicts the T bytes after its first one. Windows begin a stride apart, and of
each but the first only the predictions beyond the window before are counted: they have at least
T - stride bytes before them, and no byte is counted twice. The last window is moved back so that
it is whole.

Of a masked model it is the bound of `arbcli.masking`. A byte that two windows have costs in the
later one what it does given some of those before it, as chance hides them: a bound, too.
"""

import itertools
import math
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from arbcli.data import Text, entropy
from arbcli.device import deterministic, explained_out_of_memory
from arbcli.errors import ArbError
from arbcli.infer.media import KindLoss, MediaLosses
from arbcli.infer.option_checks import check_masked_option, check_stride
from arbcli.infer.tokens import check_vocabulary
from arbcli.kernels.runtime.backend import use_backend
from arbcli.masking import hide
from arbcli.model.language_model import LanguageModel
from arbcli.tokens import tokenised

DRAWS = 16
"""Of what is hidden in a window, by default."""
SEED = 7
"""Of these."""
NEAR = 1024
"""Positions of the first part that losses are told of; each further one is as long as all before
it."""


@dataclass(frozen=True, slots=True)
class OfPositions:
    """The loss of some positions of windows."""

    first: int
    last: int
    nats_per_byte: float


@dataclass(frozen=True, slots=True, kw_only=True)
class EvaluateReport:
    """How well a model predicts a text."""

    checkpoint: str
    text: str
    """Name of the text, and its number of files."""
    bytes: int
    """Of the text, of which all but the first are predicted."""
    nats_per_byte: float
    bits_per_byte: float
    tokens: int | None
    """Of the text, which are predicted then; None of a model of bytes."""
    nats_per_token: float | None
    entropy: float
    """Order-0 entropy of the text, nats a byte."""
    compression_ratio: float
    """Bytes of the text over those that it takes if every byte costs what the model makes of it,
    and the first one eight bits."""
    context: int
    """Bytes of a window."""
    stride: int
    """Bytes from one window to the next."""
    seconds: float
    bytes_per_second: float
    kv: str
    """Type that keys and values were rounded to."""
    draws: int | None
    """Of a masked model, whose losses are a bound: how often bytes of a window were hidden."""
    by_position: tuple["OfPositions", ...]
    """Loss of bytes by how many a window has before them. Those that two windows predict count
    twice, so that every part has nearly all of the text."""
    by_kind: tuple[KindLoss, ...]
    """Loss of text, sounds and pictures, of a text that has any of the latter."""
    device: str
    backend: str


def windows(num_bytes: int, context: int, stride: int) -> Iterator[tuple[int, int]]:
    """Cut a text into windows of min(context, num_bytes - 1) bytes.

    Args:
        num_bytes: of the text; at least 2.
        context: the largest window.
        stride: from one window to the next; 1 to `context`.

    Yields:
        (start, counted): how many of the window's last predictions no window before it made.
    """
    length = min(context, num_bytes - 1)
    done, last = 0, num_bytes - 1 - length
    for start in itertools.chain(range(0, last, stride), [last]):
        yield start, start + length - done
        done = start + length


@torch.no_grad()
def mean_loss(
    model: LanguageModel,
    text: Text,
    *,
    stride: int,
    batch: int,
    progress: Callable[[int, float], None] = lambda *_: None,
    sums: Tensor | None = None,
    media: MediaLosses | None = None,
    draws: int = DRAWS,
) -> float:
    """Average the loss over all symbols of a text but the first, in nats a symbol.

    Args:
        model: any `LanguageModel`.
        text: at least 2 symbols, which the model reads.
        stride: from one window of `config.ctx` symbols to the next; 1 to `config.ctx`.
        batch: windows at once.
        progress: is told after every batch how many symbols were predicted, and their mean loss.
        sums: (T,) float64, to which all losses of each position are added, T being `config.ctx`,
            or one less than the bytes of the text if these are fewer.
        media: the losses of the text's sounds and pictures are added to it.
        draws: of a masked model, how often symbols of a window are hidden.
    """
    length = min(model.config.ctx, len(text) - 1)
    index = torch.arange(length, device=model.device)
    plan, total, done, first = windows(len(text), length, stride), 0.0, 0, 0
    while part := list(itertools.islice(plan, batch)):
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
        done += sum(counted)
        progress(done, total / done)
    return total / done


def _masked_losses(model: LanguageModel, ids: Tensor, numbers: range, draws: int) -> Tensor:
    """Average the terms of the bound over draws of what is hidden: (B, T) float32.

    Shares that are hidden are spread evenly over the draws of a window.

    Args:
        model: a masked one.
        ids: (B, T) int64.
        numbers: of the windows in the text, which the draws follow from.
        draws: how many.
    """
    pairs = [
        hide(
            row.expand(draws, -1),
            model.config.vocabulary,
            seed=SEED,
            step=number,
            numbers=range(draws),
            of=draws,
        )
        for number, row in zip(numbers, ids, strict=True)
    ]
    given, targets = (torch.stack(parts, dim=1) for parts in zip(*pairs, strict=True))
    losses = torch.zeros(ids.shape, device=ids.device)
    for draw in range(draws):
        losses += model.position_losses(given[draw], targets[draw]) / draws
    return losses


def _by_position(sums: Tensor, count: float) -> tuple[OfPositions, ...]:
    """Divide the sums of losses of parts by `count`: windows, times the bytes of a symbol."""
    found, first = [], 0
    while first < len(sums):
        end = min(len(sums), max(NEAR, 2 * first))
        nats = float(sums[first:end].mean()) / count
        found.append(OfPositions(first, end - 1, nats))
        first = end
    return tuple(found)


def evaluate(
    model: LanguageModel,
    checkpoint: str,
    text: Text,
    description: str,
    *,
    stride: int | None,
    batch: int,
    backend: str,
    kv: str | None = None,
    draws: int | None = None,
    progress: Callable[[int, int, float], None] = lambda *_: None,
) -> EvaluateReport:
    """Measure how well a model predicts a text.

    Args:
        model: any `LanguageModel`.
        checkpoint: its name, for the report.
        text: what to predict; a model of tokens reads it as its tokenizer has it.
        description: of the text, for the report.
        stride: from one window to the next: see `check_stride`.
        batch: windows at once.
        backend: what runs the kernels.
        kv: what keys and values are rounded to, as in a cache: see `LanguageModel.keeping`.
        draws: of a masked model, how often bytes of a window are hidden; None is `DRAWS`.
        progress: is told after every batch how many bytes were predicted, of how many, and their
            mean loss in nats.

    Raises:
        ArbError: the text or the stride does not do, the model keeps nothing so, or a GPU's memory
            is not enough.
    """
    context, is_masked = model.config.ctx, model.config.is_masked
    check_masked_option(model.config, "--draws", draws)
    draws = DRAWS if draws is None else draws
    stride = check_stride(model.config, stride)
    check_vocabulary(model.config, model.tokenizer, "")
    if model.tokenizer is not None and text.source is text:
        text = tokenised(text, model.tokenizer)
    if len(text) < 2:
        raise ArbError("a text of one byte has no byte to predict", hint="name a longer text")
    started = time.perf_counter()
    with (
        deterministic(),
        explained_out_of_memory("use a smaller `--batch`"),
        use_backend(backend),
        model.keeping(kv),
    ):
        kept_in = model.kept_in
        length = min(context, len(text) - 1)
        each, last = text.symbol_bytes, len(text) - 1

        def told(done: int, loss: float) -> None:
            progress(round(done * each), round(last * each), loss / each)

        sums = torch.zeros(length, dtype=torch.float64, device=model.device)
        media = MediaLosses(text, model.device) if text.source is text else None
        nats = mean_loss(
            model,
            text,
            stride=stride,
            batch=batch,
            progress=told,
            sums=sums,
            media=media,
            draws=draws,
        )
    seconds = time.perf_counter() - started
    of_token, nats = nats, nats / text.symbol_bytes
    bits = nats / math.log(2)
    count = sum(1 for _ in windows(len(text), context, stride)) * text.symbol_bytes
    size, of_tokens = len(text.source), model.tokenizer is not None
    return EvaluateReport(
        checkpoint=checkpoint,
        text=description,
        bytes=size,
        nats_per_byte=nats,
        bits_per_byte=bits,
        tokens=len(text) if of_tokens else None,
        nats_per_token=of_token if of_tokens else None,
        entropy=entropy(text),
        compression_ratio=8 * size / (8 + bits * (size - 1)),
        context=context,
        stride=stride,
        seconds=seconds,
        bytes_per_second=size / seconds,
        kv=kept_in,
        draws=draws if is_masked else None,
        by_position=_by_position(sums, count),
        by_kind=() if media is None else media.report(),
        device=str(model.device),
        backend=backend,
    )
