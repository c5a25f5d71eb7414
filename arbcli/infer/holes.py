"""Texts with holes, which a model fills: one after another, or some symbols of all in every step.

The second are masked models. The window that one of them reads has `ctx` positions, as in training;
what is after the text stays hidden, and is left out.
"""

import dataclasses
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from arbcli.device import deterministic, explained_out_of_memory, spare_bytes
from arbcli.errors import ArbError
from arbcli.filling import EXTRA, in_layout
from arbcli.infer.generation import OUT_OF_MEMORY, Decoder, Sampling, text_dtype
from arbcli.infer.option_checks import check_fills
from arbcli.infer.tokens import bytes_of, symbols_of
from arbcli.kernels.output.choose_bytes import choose_bytes_
from arbcli.kernels.runtime.backend import use_backend
from arbcli.kernels.update.random_bits import stream_keys
from arbcli.model.language_model import LanguageModel

HOLE = "…"
"""Stands for a hole in a text."""
HOLE_LENGTH = 32
"""Symbols of a hole by default."""
ROWS = 256
"""Symbols that are chosen at once."""


@dataclass(frozen=True, slots=True, kw_only=True)
class FillReport:
    """A text whose holes a model has filled."""

    checkpoint: str
    text: str
    """All of it; bytes that are not UTF-8 are shown as U+FFFD."""
    length: int
    """Bytes, or tokens, that were filled in."""
    steps: int
    """Forwards that it took."""
    seconds: float
    seed: int
    temperature: float
    top_k: int
    top_p: float
    device: str
    backend: str


@torch.no_grad()
def fill(model: LanguageModel, symbols: Sequence[int], steps: int, sampling: Sampling) -> list[int]:
    """Choose the hidden symbols of a text, which are `config.vocabulary` in it.

    At a temperature of 0 a step takes those that the model is surest of. Else they come in a random
    order; one at a step, at a temperature of 1, they are drawn from the model's own distribution.

    Args:
        model: a masked one.
        symbols: at most `config.ctx`.
        steps: in which as many symbols each are chosen; at most as many as are hidden.
        sampling: how they are chosen, in words of the next byte.
    """
    config, device = model.config, model.device
    hidden = [place for place, symbol in enumerate(symbols) if symbol == config.vocabulary]
    seed = torch.tensor(sampling.seed, dtype=torch.int32, device=device)
    key = stream_keys(seed, torch.zeros_like(seed), 1, 1)[0, 0]
    if sampling.temperature > 0:
        about = torch.Generator().manual_seed(sampling.seed)
        hidden = [hidden[i] for i in torch.randperm(len(hidden), generator=about).tolist()]
    left = torch.tensor(hidden, device=device)
    ids = torch.full((1, config.ctx), config.vocabulary, device=device)
    ids[0, : len(symbols)] = torch.tensor(symbols, device=device)
    for step in range(steps):
        now = -(-len(left) // (steps - step))
        logits = model(ids)[0, left]
        if sampling.temperature == 0:
            sure = logits.float().softmax(dim=-1).amax(dim=-1).argsort(descending=True, stable=True)
            left, logits = left[sure], logits[sure]
        for places, some in zip(left[:now].split(ROWS), logits[:now].split(ROWS), strict=True):
            ids[0, places] = _choose(some.contiguous(), places, key, sampling, config.ctx)
        left = left[now:]
    return ids[0, : len(symbols)].tolist()


def _choose(
    logits: Tensor, places: Tensor, key: Tensor, sampling: Sampling, positions: int
) -> Tensor:
    """Choose a symbol for each row of logits, (N, V), by the random numbers of its place: (N,)."""
    number, symbols = logits.shape
    chosen = torch.zeros(number, 1, dtype=torch.int64, device=logits.device)
    dtype = text_dtype(symbols)
    texts = torch.zeros(number, positions, dtype=dtype, device=logits.device)  # written, not read
    how = (
        torch.full((number,), value, dtype=dtype, device=logits.device)
        for value, dtype in (
            (sampling.temperature, torch.float32),
            (min(sampling.top_k, symbols), torch.int32),
            (sampling.top_p, torch.float32),
        )
    )
    choose_bytes_(chosen, texts, logits, places.int(), key.repeat(number), *how)
    return chosen[:, 0]


def filled(
    model: LanguageModel, length: int, steps: int, sampling: Sampling, *, backend: str
) -> Iterator[bytes]:
    """Make a text of `length` symbols of nothing but a hole, and yield its bytes."""
    hidden = [model.config.vocabulary] * length
    with use_backend(backend), model.prepared_weights(spare_bytes(model.device)):
        found = fill(model, hidden, min(steps, length), sampling)
    yield from bytes_of(model, [], [found])


def fill_in_order(
    model: LanguageModel, parts: Sequence[list[int]], length: int, sampling: Sampling, backend: str
) -> list[int]:
    """Fill holes from the first to the last; each follows the text up to the next hole.

    Args:
        model: one with `objective=fill`.
        parts: symbols of the text between holes.
        length: of each hole.
        sampling: how symbols are chosen.
        backend: what runs the kernels.
    """
    text = torch.tensor(parts[0], dtype=torch.int64)
    for part in parts[1:]:
        after, hole = torch.tensor(part, dtype=torch.int64), text.new_zeros(length)
        given = in_layout(text, hole, after, model.config.vocabulary)[:-length]
        decoder = Decoder(model, len(given) + length, sampling, backend=backend)
        decoder.read(given.tolist())
        made = [symbol for some in decoder.stream(length) for symbol in some]
        text = torch.cat([text, text.new_tensor(made), after])
    return text.tolist()


def fill_text(
    model: LanguageModel,
    checkpoint: str,
    parts: Sequence[bytes],
    length: int,
    steps: int | None,
    sampling: Sampling,
    *,
    backend: str,
) -> tuple[FillReport, bytes]:
    """Fill the holes between the parts of a text; the same bits every time on the same machine.

    Args:
        model: any `LanguageModel`.
        checkpoint: its name, for the report.
        parts: of the text, two or more; there is a hole between any two.
        length: bytes, or tokens, of each hole.
        steps: forwards in which a masked model fills them; None is one for each of them.
        sampling: how they are chosen.
        backend: what runs the kernels.

    Returns:
        The report, and the whole text.

    Raises:
        ArbError: the model was not trained for it, the text does not fit, or a GPU's memory is not
            enough.
    """
    config, filled = model.config, length * (len(parts) - 1)
    check_fills(config)
    if not filled:
        raise ArbError(
            f"the text of `--infill` has no `{HOLE}`", hint=f'put it where a hole is: "a {HOLE} b"'
        )
    first, *others = parts
    before = 0 if model.tokenizer is None else len(model.tokenizer.beginning)
    encode = list if model.tokenizer is None else model.tokenizer.encode
    symbols = [[*symbols_of(model, first)], *map(encode, others)]
    size, most = filled + sum(map(len, symbols)), config.ctx - EXTRA * (not config.is_masked)
    if size > most:
        raise ArbError(
            f"the text has {size:,} symbols with its holes, and the model reads {most:,}",
            hint="use a smaller `--length`, or a shorter text",
        )
    steps = filled if steps is None else min(steps, filled)
    started = time.perf_counter()
    with (
        deterministic(),
        explained_out_of_memory(OUT_OF_MEMORY),
        use_backend(backend),
        model.prepared_weights(spare_bytes(model.device)),
    ):
        if config.is_masked:
            hidden = [config.vocabulary] * length
            whole = [*symbols[0], *(one for part in symbols[1:] for one in (*hidden, *part))]
            found = fill(model, whole, steps, sampling)
        else:
            found = fill_in_order(model, symbols, length, sampling, backend)
    content = b"".join(bytes_of(model, found[:before], [found[before:]]))
    report = FillReport(
        checkpoint=checkpoint,
        text=content.decode(errors="replace"),
        length=filled,
        steps=steps,
        seconds=time.perf_counter() - started,
        **dataclasses.asdict(sampling),
        device=str(model.device),
        backend=backend,
    )
    return report, content
