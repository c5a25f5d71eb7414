"""Text generation of a single prompt."""

import dataclasses
import time
from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass

import torch

from arbcli.generation.decoder import OUT_OF_MEMORY, Decoder
from arbcli.generation.sampling import Sampling
from arbcli.generation.tokens import bytes_of, ends_of, symbols_of
from arbcli.kernels.runtime.device import deterministic, explained_out_of_memory, spare_bytes
from arbcli.model.language_model import LanguageModel

REPEATS, REPEATED_BYTES = 3, 64
"""Least periods and bytes at the end of a text that repeats."""
LONGEST_PERIOD = 2**12
"""Longest period that is searched, in bytes."""


def generate(
    model: LanguageModel,
    prompt: bytes | list[int],
    length: int,
    sampling: Sampling | None = None,
    *,
    backend: str | None = None,
    kv: str | None = None,
    ends: Collection[int] | None = None,
    ahead: int = 1,
    on_prompt: Callable[[int, int], None] = lambda *_: None,
    on_read: Callable[[Decoder], None] = lambda _: None,
) -> Iterator[bytes]:
    """Continue a prompt.

    Args:
        model: the model; each byte attends to the `config.ctx` - 1 before it.
        prompt: at least one byte, encoded by a model with a tokenizer; or a list of tokens.
        length: number of bytes, or tokens, to generate.
        sampling: parameters of sampling.
        backend: kernel backend; None is the default of the device.
        kv: storage format of keys and values: see `LanguageModel.cached_as`.
        ends: stop symbols, which are not part of the text; None are those of the model.
        ahead: maximum number of bytes per step: see `Decoder`.
        on_prompt: called during prefill with the symbols read and in total.
        on_read: called after prefill.

    Yields:
        Pieces of one or more bytes.

    Raises:
        ArbError: the prompt is empty, an option does not suit the model, or GPU memory is
            exhausted.
    """
    room = spare_bytes(model.device)
    with explained_out_of_memory(OUT_OF_MEMORY), model.prepared_weights(room):
        symbols = symbols_of(model, prompt)
        size = len(symbols)
        with model.cached_as(kv):
            decoder = Decoder(model, size + length, backend=backend, ahead=ahead, prompt=size)
        decoder.begin(symbols, sampling, progress=on_prompt)
        on_read(decoder)
        stops = ends_of(model) if ends is None else ends
        yield from bytes_of(model, symbols, decoder.stream(length, stops))


def repetition_period(text: bytes | bytearray) -> int | None:
    """Return the smallest period in bytes with which a text ends; None if it does not repeat.

    A text repeats if at least `REPEATS` periods and `REPEATED_BYTES` bytes at its end do.
    """
    for period in range(1, min(len(text) // REPEATS, LONGEST_PERIOD) + 1):
        end = text[-max(REPEATS * period, REPEATED_BYTES) :]
        if len(end) >= REPEATED_BYTES and end[period:] == end[:-period]:
            return period
    return None


@dataclass(frozen=True, slots=True, kw_only=True)
class GenerateReport:
    """A prompt, the generated text, and the parameters and speed of generation."""

    checkpoint: str
    prompt: str
    """The prompt; invalid UTF-8 becomes U+FFFD, as in `text`."""
    text: str
    """Continuation of the prompt."""
    length: int
    """Length of `text` in bytes, or tokens."""
    bytes_per_second: float
    """Speed of decoding, without prefill and capture."""
    seed: int
    temperature: float
    top_k: int
    top_p: float
    kv: str
    """Storage format of keys and values."""
    cache_bytes: int
    """Size of the decoding cache."""
    ahead: int
    """Maximum number of bytes per step."""
    bytes_per_check: float | None
    """Mean number of bytes per speculative step; None without one."""
    period: int | None
    """Period in bytes with which the text repeats at its end: see `repetition_period`."""
    device: str
    backend: str


def continue_text(
    model: LanguageModel,
    checkpoint: str,
    prompt: bytes | list[int],
    length: int,
    sampling: Sampling,
    *,
    backend: str,
    kv: str | None = None,
    ends: Collection[int] | None = None,
    ahead: int = 1,
    on_prompt: Callable[[int, int], None] = lambda *_: None,
    on_bytes: Callable[[bytes], None] = lambda _: None,
    is_complete: Callable[[], bool] | None = None,
) -> GenerateReport:
    """Continue a prompt and measure the speed; deterministic on a given machine.

    Args:
        model: the model.
        checkpoint: name of the checkpoint, for the report.
        prompt: at least one byte, or token.
        length: number of bytes, or tokens, to generate.
        sampling: parameters of sampling.
        backend: kernel backend.
        kv: storage format of keys and values: see `LanguageModel.cached_as`.
        ends: stop symbols, which are not part of the text; None are those of the model.
        ahead: maximum number of bytes per step: see `Decoder`.
        on_prompt: called during prefill with the symbols read and in total.
        on_bytes: called with each piece of generated bytes.
        is_complete: called after `on_bytes`; generation ends early if it returns True.

    Raises:
        ArbError: the prompt is empty, an option does not suit the model, or GPU memory is
            exhausted.
    """
    text, started = bytearray(), 0.0
    decoder: Decoder | None = None

    def begin(reader: Decoder) -> None:
        nonlocal started, decoder
        if reader.device.type == "cuda":
            torch.cuda.synchronize(reader.device)
        started, decoder = time.perf_counter(), reader

    with deterministic():
        for part in generate(
            model,
            prompt,
            length,
            sampling,
            backend=backend,
            kv=kv,
            ends=ends,
            ahead=ahead,
            on_prompt=on_prompt,
            on_read=begin,
        ):
            text += part
            on_bytes(part)
            if is_complete and is_complete():
                break
    seconds = time.perf_counter() - started
    assert decoder is not None
    if isinstance(prompt, bytes):
        prompt_text = prompt.decode(errors="replace")
    else:
        prompt_text = model.tokenizer.decode(prompt)
    return GenerateReport(
        checkpoint=checkpoint,
        prompt=prompt_text,
        text=text.decode(errors="replace"),
        length=decoder.num_generated,
        bytes_per_second=len(text) / seconds,
        **dataclasses.asdict(sampling),
        kv=decoder.cache_dtype,
        cache_bytes=decoder.nbytes,
        ahead=ahead,
        bytes_per_check=decoder.bytes_per_check,
        period=repetition_period(text),
        device=str(decoder.device),
        backend=decoder.backend,
    )
