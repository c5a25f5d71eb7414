"""Infilling: models fill the holes of a text, in order or, if masked, all holes in parallel.

A masked model reads windows of `ctx` positions, as in training; positions after the text stay
hidden and are discarded.
"""

import dataclasses
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from arbcli.base.errors import ArbError
from arbcli.families.masked.filling import EXTRA, led_in
from arbcli.generation.decoder import OUT_OF_MEMORY, Decoder, text_dtype
from arbcli.generation.option_checks import check_fills
from arbcli.generation.sampling import Sampling
from arbcli.generation.tokens import decode_symbols, encode_prompt
from arbcli.kernels.output.choose_bytes import choose_bytes_
from arbcli.kernels.runtime.backend import use_backend
from arbcli.kernels.runtime.device import deterministic, explained_out_of_memory, spare_bytes
from arbcli.kernels.update.random_bits import stream_key
from arbcli.model.language_model import LanguageModel

HOLE = "…"
"""Marks a hole in a text."""
HOLE_LENGTH = 32
"""Default length of a hole in symbols."""
ROWS = 256
"""Number of symbols that are sampled in one launch."""


@dataclass(frozen=True, slots=True, kw_only=True)
class FillReport:
    """A text with filled holes, and the parameters and speed of infilling."""

    checkpoint: str
    text: str
    """The complete text; invalid UTF-8 becomes U+FFFD."""
    length: int
    """Number of bytes, or tokens, that were filled in."""
    steps: int
    """Number of forward passes."""
    seconds: float
    seed: int
    temperature: float
    top_k: int
    top_p: float
    device: str
    backend: str


@torch.no_grad()
def fill(model: LanguageModel, symbols: Sequence[int], steps: int, sampling: Sampling) -> list[int]:
    """Sample the hidden symbols of a text, marked by `config.vocabulary`.

    At temperature 0 each step fills the symbols with the highest confidence, else random ones. With
    one symbol per step at temperature 1, the text is a sample of the model's distribution.

    Args:
        model: a masked model.
        symbols: the text, at most `config.ctx` symbols.
        steps: number of steps, each with equally many symbols; at most the number hidden.
        sampling: parameters of sampling for each symbol.
    """
    config, device = model.config, model.device
    hidden = [index for index, symbol in enumerate(symbols) if symbol == config.vocabulary]
    key = stream_key(sampling.seed, 0, device)
    if sampling.temperature > 0:
        generator = torch.Generator().manual_seed(sampling.seed)
        hidden = [hidden[i] for i in torch.randperm(len(hidden), generator=generator).tolist()]
    left = torch.tensor(hidden, device=device)
    ids = torch.full((1, config.ctx), config.vocabulary, device=device)
    ids[0, : len(symbols)] = torch.tensor(symbols, device=device)
    for step in range(steps):
        now = -(-len(left) // (steps - step))
        logits = model(ids)[0, left]
        if sampling.temperature == 0:
            confidence = logits.float().softmax(dim=-1).amax(dim=-1)
            order = confidence.argsort(descending=True, stable=True)
            left, logits = left[order], logits[order]
        for indices, rows in zip(left[:now].split(ROWS), logits[:now].split(ROWS), strict=True):
            ids[0, indices] = _choose(rows.contiguous(), indices, key, sampling, config.ctx)
        left = left[now:]
    return ids[0, : len(symbols)].tolist()


def _choose(
    logits: Tensor, indices: Tensor, key: Tensor, sampling: Sampling, positions: int
) -> Tensor:
    """Sample a symbol from each row of logits, (N, V), with the random number of its position."""
    number, symbols = logits.shape
    chosen = torch.zeros(number, 1, dtype=torch.int64, device=logits.device)
    dtype = text_dtype(symbols)
    texts = torch.zeros(number, positions, dtype=dtype, device=logits.device)  # unused output
    parameters = (
        torch.full((number,), value, dtype=dtype, device=logits.device)
        for value, dtype in (
            (sampling.temperature, torch.float32),
            (min(sampling.top_k, symbols), torch.int32),
            (sampling.top_p, torch.float32),
        )
    )
    choose_bytes_(chosen, texts, logits, indices.int(), key.repeat(number), *parameters)
    return chosen[:, 0]


def filled(
    model: LanguageModel, length: int, steps: int, sampling: Sampling, *, backend: str
) -> Iterator[bytes]:
    """Generate a text of `length` symbols from a single hole, and yield its bytes."""
    hidden = [model.config.vocabulary] * length
    with use_backend(backend), model.prepared_weights(spare_bytes(model.device)):
        symbols = fill(model, hidden, min(steps, length), sampling)
    yield from decode_symbols(model, [], [symbols])


def fill_in_order(
    model: LanguageModel, parts: Sequence[list[int]], length: int, sampling: Sampling, backend: str
) -> list[int]:
    """Fill holes in order, each given the text before it and the part up to the next hole.

    Args:
        model: a model with `objective=fill`.
        parts: symbols of the text between the holes.
        length: length of each hole.
        sampling: parameters of sampling.
        backend: kernel backend.
    """
    text = torch.tensor(parts[0], dtype=torch.int64)
    for part in parts[1:]:
        after, hole = torch.tensor(part, dtype=torch.int64), text.new_zeros(length)
        prompt = led_in(text, hole, after, model.config.vocabulary)[:-length]
        decoder = Decoder(model, len(prompt) + length, backend=backend)
        decoder.begin(prompt.tolist(), sampling)
        middle = [symbol for piece in decoder.stream(length) for symbol in piece]
        text = torch.cat([text, text.new_tensor(middle), after])
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
    """Fill the holes between the parts of a text; deterministic on a given machine.

    Args:
        model: the model.
        checkpoint: name of the checkpoint, for the report.
        parts: two or more parts of the text, with a hole between each two.
        length: length of each hole in bytes, or tokens.
        steps: forward passes of a masked model; None is one for each hidden symbol.
        sampling: parameters of sampling.
        backend: kernel backend.

    Returns:
        The report, and the complete text.

    Raises:
        ArbError: the model does not fill holes, the text is too long, or GPU memory is exhausted.
    """
    config, filled = model.config, length * (len(parts) - 1)
    check_fills(config)
    if not filled:
        raise ArbError(
            f"the text of `--infill` has no `{HOLE}`", f'put it where a hole is: "a {HOLE} b"'
        )
    first, *others = parts
    before = 0 if model.tokenizer is None else len(model.tokenizer.beginning)
    encode = list if model.tokenizer is None else model.tokenizer.encode
    symbols = [[*encode_prompt(model, first)], *map(encode, others)]
    size, capacity = filled + sum(map(len, symbols)), config.ctx - EXTRA * (not config.is_masked)
    if size > capacity:
        raise ArbError(
            f"the text has {size:,} symbols with its holes, and the model reads {capacity:,}",
            "use a smaller `--length`, or a shorter text",
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
            masked = [*symbols[0], *(symbol for part in symbols[1:] for symbol in (*hidden, *part))]
            filling = fill(model, masked, steps, sampling)
        else:
            filling = fill_in_order(model, symbols, length, sampling, backend)
    content = b"".join(decode_symbols(model, filling[:before], [filling[before:]]))
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
