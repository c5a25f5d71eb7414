"""Several texts from a model at once: what a text is does not depend on the others.

Each step makes one byte of every text that goes on. A text that is done gives its place to the next
prompt, which is read by itself, as if it were alone. A step gives each text the bits that it would
have among any others, at any number of them: its kernels promise that of a row, and what has no
such kernels is computed for one text after another, within the same step.
"""

import dataclasses
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from arbcli.device import (
    capturing,
    check_room,
    deterministic,
    explained_out_of_memory,
    spare_bytes,
)
from arbcli.errors import ArbError
from arbcli.infer.generation import (
    LONGEST_TEXT,
    OUT_OF_MEMORY,
    WARM_UP_STEPS,
    Sampling,
    copied_to_host,
    read_symbols,
    symbols_on,
    text_dtype,
)
from arbcli.infer.tokens import bytes_of, symbols_of
from arbcli.kernels.output.choose_bytes import choose_bytes_
from arbcli.kernels.runtime.backend import default_backend, use_backend
from arbcli.kernels.runtime.inputs import TensorOptions
from arbcli.kernels.runtime.overlap import overlapping
from arbcli.kernels.update.random_bits import stream_keys
from arbcli.model.language_model import LanguageModel

MOST_AT_ONCE = 64
"""Texts that the kernels of a step take."""
USUALLY_AT_ONCE = 16


@dataclass(frozen=True, slots=True, kw_only=True)
class Request:
    """A prompt, and what to make of it."""

    prompt: bytes
    length: int
    """Bytes that follow."""
    sampling: Sampling
    stream: int = 0
    """Which of the random streams of the seed; a single text has stream 0."""

    def __post_init__(self) -> None:
        """Refuse what no text can be made of.

        Raises:
            ArbError: the prompt is empty, or the text has no or too many bytes.
        """
        if not self.prompt:
            raise ArbError("the prompt is empty", hint="give at least one byte, such as a newline")
        if self.length < 1 or self.positions > LONGEST_TEXT:
            raise ArbError(
                f"{self.length:,} bytes are to follow a prompt of {len(self.prompt):,}",
                hint=f"make at least one, and {LONGEST_TEXT:,} with the prompt at most",
            )

    @property
    def positions(self) -> int:
        """Bytes of the text, its prompt among them."""
        return len(self.prompt) + self.length

    def key(self, device: torch.device) -> Tensor:
        """Make the key of its random numbers, an int32 scalar."""
        seed, stream = torch.tensor([self.sampling.seed, self.stream], dtype=torch.int32).unbind()
        return stream_keys(seed, stream, 1, 1)[0, 0].to(device)


def check_at_once(batch: int | None) -> int:
    """Choose how many texts a step makes; None is what is usual.

    Raises:
        ArbError: a step makes no such number.
    """
    if batch is None:
        return USUALLY_AT_ONCE
    if not 1 <= batch <= MOST_AT_ONCE:
        raise ArbError(f"`--batch` is {batch}", hint=f"use 1 to {MOST_AT_ONCE}")
    return batch


def cache_bytes(model: LanguageModel, texts: int, positions: int) -> int:
    """Count the bytes that the states of several texts take."""
    return model.new_several_cache(texts, positions, torch.device("meta")).nbytes


class SeveralDecoder:
    """A model, a cache for several texts, and what they have so far.

    Args:
        model: any `LanguageModel`, inside `model.prepared_weights()`.
        texts: how many are made at once.
        positions: bytes that the longest of them can have.
        backend: what runs the kernels; None is the device's own.
        capture: whether a step is replayed as one CUDA graph; None is wherever it can be.

    Raises:
        ArbError: there is no memory for the cache.
    """

    @torch.no_grad()
    def __init__(
        self,
        model: LanguageModel,
        texts: int,
        positions: int,
        *,
        backend: str | None = None,
        capture: bool | None = None,
    ) -> None:
        self.model, device = model, model.device
        texts = max(2, texts)  # a single row would have a kernel that adds up in another order
        if device.type == "cuda":
            needed = cache_bytes(model, texts, positions)
            free, _ = torch.cuda.mem_get_info(device)
            held = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
            what = f"the cache of {texts} texts"
            check_room(needed, what, "use a smaller `--batch`, or shorter texts", free + held)
        self.cache = model.new_several_cache(texts, positions)
        self.backend = backend or default_backend(device)
        integers: TensorOptions = {"dtype": torch.int32, "device": device}
        dtype = text_dtype(model.config.vocabulary)
        self._text = torch.zeros(texts, positions, dtype=dtype, device=device)
        self._prompts: dict[int, Sequence[int]] = {}  # what was read of each place
        self._byte = torch.zeros(texts, 1, dtype=torch.int64, device=device)  # the last ones
        self._key = torch.zeros(texts, **integers)
        self._temperature = torch.zeros(texts, device=device)
        self._top_k = torch.ones(texts, **integers)
        self._top_p = torch.ones(texts, device=device)
        self._graph: torch.cuda.CUDAGraph | None = None
        can_capture = device.type == "cuda" and self.backend == "triton"
        if can_capture if capture is None else capture:
            self._capture()

    @torch.no_grad()
    def begin(self, place: int, request: Request) -> None:
        """Begin a text in one of the places, by reading its prompt."""
        cache, how, device = self.cache.texts[place], request.sampling, self._text.device
        prompt = self._prompts[place] = symbols_of(self.model, request.prompt)
        ids = symbols_on(device, prompt, self._text.dtype)
        self._text[place, : len(ids)] = ids
        self._key[place] = request.key(device)
        self._temperature[place], self._top_p[place] = how.temperature, how.top_p
        self._top_k[place] = how.top_k
        cache.reset()
        with use_backend(self.backend):
            read_symbols(self.model, ids[:-1], cache)
        self._byte[place] = ids[-1]
        self.cache.active[place] = 1

    def end(self, place: int, request: Request) -> Callable[[], bytes]:
        """End a text; the function returned waits for its bytes, without those of the prompt."""
        self.cache.active[place] = 0
        prompt = self._prompts.pop(place)
        made = copied_to_host(self._text[place, len(prompt) : len(prompt) + request.length])
        return lambda: b"".join(bytes_of(self.model, prompt, [made()]))

    @torch.no_grad()
    def step(self) -> None:
        """Make one byte of every text that was begun and not ended."""
        if self._graph is None:
            self._compute()
        else:
            self._graph.replay()

    def _compute(self) -> None:
        with use_backend(self.backend), overlapping():
            logits = self.model(self._byte, self.cache)[:, 0]
            choose_bytes_(
                self._byte,
                self._text,
                logits,
                self.cache.position,  # by now those of the bytes to choose
                self._key,
                self._temperature,
                self._top_k,
                self._top_p,
            )

    def _capture(self) -> None:
        """Record a step as a CUDA graph, after a few steps whose bytes are then forgotten."""
        for _ in range(WARM_UP_STEPS):
            self._compute()
        self._graph = torch.cuda.CUDAGraph()
        with capturing(self._graph):
            self._compute()
        self.cache.reset()


def generate_several(
    model: LanguageModel,
    requests: Sequence[Request],
    batch: int | None = None,
    *,
    backend: str | None = None,
    kv: str | None = None,
) -> Iterator[tuple[int, bytes]]:
    """Make texts of several prompts.

    Args:
        model: any `LanguageModel`.
        requests: what to make.
        batch: texts at once, 1 to 64; None is as many as is usual. It changes no text.
        backend: what runs the kernels; None is the device's own.
        kv: what keys and values are kept in: see `LanguageModel.keeping`.

    Yields:
        The index of a request, and the bytes that follow its prompt, in the order in which they
        are done.

    Raises:
        ArbError: no step makes so many, the model keeps nothing so, or memory is not enough.
    """
    backend, batch = backend or default_backend(model.device), check_at_once(batch)
    if not requests:
        return
    positions = max(len(symbols_of(model, each.prompt)) + each.length for each in requests)
    places = min(batch, len(requests))
    weights = model.prepared_weights(spare_bytes(model.device))
    with explained_out_of_memory(OUT_OF_MEMORY), weights, use_backend(backend):
        with model.keeping(kv):
            decoder = SeveralDecoder(model, places, positions, backend=backend)
        yield from _in_places(decoder, places, requests)


def _in_places(
    decoder: SeveralDecoder, places: int, requests: Sequence[Request]
) -> Iterator[tuple[int, bytes]]:
    waiting, free = deque(enumerate(requests)), list(range(places))
    left: dict[int, int] = {}  # bytes that a place still makes
    made: dict[int, int] = {}  # which request a place has
    ended: list[tuple[int, Callable[[], bytes]]] = []
    while waiting or left:
        for place in free[: len(waiting)]:
            index, request = waiting.popleft()
            decoder.begin(place, request)
            left[place], made[place] = request.length, index
        steps = min(left.values())
        for _ in range(steps):
            decoder.step()
        yield from ((index, fetch()) for index, fetch in ended)  # while these steps run
        left = {place: length - steps for place, length in left.items()}
        free = [place for place, length in left.items() if length == 0]
        ended = [(made[place], decoder.end(place, requests[made[place]])) for place in free]
        left = {place: length for place, length in left.items() if length}
    yield from ((index, fetch()) for index, fetch in ended)


@dataclass(frozen=True, slots=True, kw_only=True)
class SeveralReport:
    """How texts were made."""

    texts: int
    length: int
    """Bytes of all of them."""
    seconds: float
    """From the first prompt on, kernels and captures included."""
    batch: int
    device: str
    backend: str


@dataclass(frozen=True, slots=True, kw_only=True)
class TextReport:
    """A prompt of several and what a model made of it."""

    index: int
    """Of the prompt, from 0 on."""
    prompt: str
    """Bytes that are not UTF-8 are shown as U+FFFD, here and in `text`."""
    text: str
    """Continuation of the prompt."""
    length: int
    seed: int
    temperature: float
    top_k: int
    top_p: float


def continue_several(
    model: LanguageModel,
    requests: Sequence[Request],
    batch: int | None = None,
    *,
    backend: str,
    kv: str | None = None,
    on_text: Callable[[TextReport], None] = lambda _: None,
) -> SeveralReport:
    """Make texts of several prompts, and tell of each in the order of the prompts.

    Args:
        model: any `LanguageModel`.
        requests: what to make.
        batch: texts at once: see `generate_several`.
        backend: what runs the kernels.
        kv: what keys and values are kept in.
        on_text: is given each text as soon as it and all before it are done.

    Raises:
        ArbError: no step makes so many, the model keeps nothing so, or memory is not enough.
    """
    started, done, told = time.perf_counter(), {}, 0
    with deterministic():
        for index, text in generate_several(model, requests, batch, backend=backend, kv=kv):
            done[index] = text
            while told in done:
                on_text(_report(told, requests[told], done.pop(told)))
                told += 1
    return SeveralReport(
        texts=len(requests),
        length=sum(request.length for request in requests),
        seconds=time.perf_counter() - started,
        batch=min(check_at_once(batch), len(requests)),
        device=str(model.device),
        backend=backend,
    )


def _report(index: int, request: Request, text: bytes) -> TextReport:
    return TextReport(
        index=index,
        prompt=request.prompt.decode(errors="replace"),
        text=text.decode(errors="replace"),
        length=request.length,
        **dataclasses.asdict(request.sampling),
    )
