"""Batched generation with continuous batching; a text does not depend on the others in the batch.

Each step generates one byte of each active text. When a text is finished, the next prompt takes its
slot, and is prefilled separately. The bits of a text depend neither on the other texts nor on their
number: kernels guarantee that for each row, and parts without such kernels process one text after
another within the step.
"""

import dataclasses
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import torch

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
    copied_to_host,
    read_symbols,
    symbols_on,
    text_dtype,
)
from arbcli.infer.sampling import Sampling
from arbcli.infer.tokens import bytes_of, symbols_of
from arbcli.kernels.output.choose_bytes import choose_bytes_
from arbcli.kernels.runtime.backend import default_backend, use_backend
from arbcli.kernels.runtime.inputs import TensorOptions
from arbcli.kernels.runtime.overlap import overlapping
from arbcli.kernels.update.random_bits import stream_key
from arbcli.model.language_model import LanguageModel

LARGEST_BATCH = 64
"""Maximum batch size of the kernels."""
DEFAULT_BATCH = 16
"""Default batch size."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Request:
    """A prompt, with the parameters of its generation."""

    prompt: bytes
    length: int
    """Number of bytes to generate."""
    sampling: Sampling
    stream: int = 0
    """Index of the seed's random stream; 0 for a single text."""

    def __post_init__(self) -> None:
        """Check prompt and length.

        Raises:
            ArbError: the prompt is empty, or the length is out of range.
        """
        if not self.prompt:
            raise ArbError("the prompt is empty", hint="give at least one byte, such as a newline")
        if self.length < 1 or self.positions > LONGEST_TEXT:
            raise ArbError(
                f"`length` is {self.length:,} after a prompt of {len(self.prompt):,} bytes",
                hint=f"use at least 1, and at most {LONGEST_TEXT:,} with the prompt",
            )

    @property
    def positions(self) -> int:
        """Length of the text, including the prompt."""
        return len(self.prompt) + self.length


def check_batch(batch: int | None) -> int:
    """Return the batch size; None is the default.

    Raises:
        ArbError: it is out of range.
    """
    if batch is None:
        return DEFAULT_BATCH
    if not 1 <= batch <= LARGEST_BATCH:
        raise ArbError(f"`--batch` is {batch}", hint=f"use 1 to {LARGEST_BATCH}")
    return batch


def cache_bytes(model: LanguageModel, texts: int, positions: int) -> int:
    """Return the memory of the states of a batch of texts in bytes."""
    return model.new_batch_cache(texts, positions, torch.device("meta")).nbytes


class BatchDecoder:
    """Generates a batch of texts, in slots that can be reused.

    Args:
        model: the model, within `model.prepared_weights()`.
        texts: batch size.
        positions: maximum length of a text, including the prompt.
        backend: kernel backend; None is the default of the device.
        capture: whether to replay a step as a CUDA graph; None does so if possible.

    Raises:
        ArbError: there is not enough memory for the cache.
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
        texts = max(2, texts)  # the kernel for a single row sums in another order
        if device.type == "cuda":
            needed = cache_bytes(model, texts, positions)
            free, _ = torch.cuda.mem_get_info(device)
            held = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
            what = f"the cache of {texts} texts"
            check_room(needed, what, "use a smaller `--batch`, or shorter texts", free + held)
        self.cache = model.new_batch_cache(texts, positions)
        self.backend = backend or default_backend(device)
        integers: TensorOptions = {"dtype": torch.int32, "device": device}
        dtype = text_dtype(model.config.vocabulary)
        self._text = torch.zeros(texts, positions, dtype=dtype, device=device)
        self._prompts: dict[int, Sequence[int]] = {}  # symbols of the prompt in each slot
        self._byte = torch.zeros(texts, 1, dtype=torch.int64, device=device)  # last bytes
        self._key = torch.zeros(texts, **integers)
        self._temperature = torch.zeros(texts, device=device)
        self._top_k = torch.ones(texts, **integers)
        self._top_p = torch.ones(texts, device=device)
        self._graph: torch.cuda.CUDAGraph | None = None
        can_capture = device.type == "cuda" and self.backend == "triton"
        if can_capture if capture is None else capture:
            self._capture()

    @torch.no_grad()
    def begin(self, slot: int, request: Request) -> None:
        """Begin a text in a slot: prefill its prompt."""
        cache, sampling, device = self.cache.texts[slot], request.sampling, self._text.device
        prompt = self._prompts[slot] = symbols_of(self.model, request.prompt)
        ids = symbols_on(device, prompt, self._text.dtype)
        self._text[slot, : len(ids)] = ids
        self._key[slot] = stream_key(sampling.seed, request.stream, device)
        self._temperature[slot], self._top_p[slot] = sampling.temperature, sampling.top_p
        self._top_k[slot] = sampling.top_k
        cache.reset()
        with use_backend(self.backend):
            read_symbols(self.model, ids[:-1], cache)
        self._byte[slot] = ids[-1]
        self.cache.active[slot] = 1

    def end(self, slot: int, request: Request) -> Callable[[], bytes]:
        """End the text of a slot; return a function that waits for its generated bytes."""
        self.cache.active[slot] = 0
        prompt = self._prompts.pop(slot)
        made = copied_to_host(self._text[slot, len(prompt) : len(prompt) + request.length])
        return lambda: b"".join(bytes_of(self.model, prompt, [made()]))

    @torch.no_grad()
    def step(self) -> None:
        """Generate one byte of each active text."""
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
                self.cache.position,  # already incremented: positions of the next bytes
                self._key,
                self._temperature,
                self._top_k,
                self._top_p,
            )

    def _capture(self) -> None:
        """Capture a step as a CUDA graph, after warm-up steps, and reset the cache."""
        for _ in range(WARM_UP_STEPS):
            self._compute()
        self._graph = torch.cuda.CUDAGraph()
        with capturing(self._graph):
            self._compute()
        self.cache.reset()


def generate_batch(
    model: LanguageModel,
    requests: Sequence[Request],
    batch: int | None = None,
    *,
    backend: str | None = None,
    kv: str | None = None,
) -> Iterator[tuple[int, bytes]]:
    """Generate the texts of a list of requests.

    Args:
        model: the model.
        requests: prompts with their parameters.
        batch: batch size, 1 to 64; None is the default. The texts do not depend on it.
        backend: kernel backend; None is the default of the device.
        kv: storage format of keys and values: see `LanguageModel.cached_as`.

    Yields:
        The index of a request and its generated bytes, in the order of completion.

    Raises:
        ArbError: the batch size is out of range, an option does not suit the model, or memory is
            exhausted.
    """
    backend, batch = backend or default_backend(model.device), check_batch(batch)
    if not requests:
        return
    positions = max(len(symbols_of(model, each.prompt)) + each.length for each in requests)
    slots = min(batch, len(requests))
    weights = model.prepared_weights(spare_bytes(model.device))
    with explained_out_of_memory(OUT_OF_MEMORY), weights, use_backend(backend):
        with model.cached_as(kv):
            decoder = BatchDecoder(model, slots, positions, backend=backend)
        yield from _run_requests(decoder, slots, requests)


def _run_requests(
    decoder: BatchDecoder, slots: int, requests: Sequence[Request]
) -> Iterator[tuple[int, bytes]]:
    waiting, free = deque(enumerate(requests)), list(range(slots))
    left: dict[int, int] = {}  # remaining bytes of each slot
    request_of: dict[int, int] = {}  # index of the request in each slot
    ended: list[tuple[int, Callable[[], bytes]]] = []
    while waiting or left:
        for slot in free[: len(waiting)]:
            index, request = waiting.popleft()
            decoder.begin(slot, request)
            left[slot], request_of[slot] = request.length, index
        steps = min(left.values())
        for _ in range(steps):
            decoder.step()
        yield from ((index, fetch()) for index, fetch in ended)  # while the steps run on the GPU
        left = {slot: length - steps for slot, length in left.items()}
        free = [slot for slot, length in left.items() if length == 0]
        ended = [(request_of[slot], decoder.end(slot, requests[request_of[slot]])) for slot in free]
        left = {slot: length for slot, length in left.items() if length}
    yield from ((index, fetch()) for index, fetch in ended)


@dataclass(frozen=True, slots=True, kw_only=True)
class BatchReport:
    """Summary of a batched generation."""

    texts: int
    length: int
    """Total number of generated bytes."""
    seconds: float
    """Total time, including prefill, compilation and capture."""
    batch: int
    device: str
    backend: str


@dataclass(frozen=True, slots=True, kw_only=True)
class TextReport:
    """A prompt of a batch, the generated text, and its parameters."""

    index: int
    """Index of the prompt, from 0."""
    prompt: str
    """The prompt; invalid UTF-8 becomes U+FFFD, as in `text`."""
    text: str
    """Continuation of the prompt."""
    length: int
    seed: int
    temperature: float
    top_k: int
    top_p: float


def continue_batch(
    model: LanguageModel,
    requests: Sequence[Request],
    batch: int | None = None,
    *,
    backend: str,
    kv: str | None = None,
    on_text: Callable[[TextReport], None] = lambda _: None,
) -> BatchReport:
    """Generate the texts of a list of requests, and report them in order.

    Args:
        model: the model.
        requests: prompts with their parameters.
        batch: batch size: see `generate_batch`.
        backend: kernel backend.
        kv: storage format of keys and values: see `LanguageModel.cached_as`.
        on_text: called with each text, once it and all earlier ones are complete.

    Raises:
        ArbError: the batch size is out of range, an option does not suit the model, or memory is
            exhausted.
    """
    started, done, next_index = time.perf_counter(), {}, 0
    with deterministic():
        for index, text in generate_batch(model, requests, batch, backend=backend, kv=kv):
            done[index] = text
            while next_index in done:
                on_text(_report(next_index, requests[next_index], done.pop(next_index)))
                next_index += 1
    return BatchReport(
        texts=len(requests),
        length=sum(request.length for request in requests),
        seconds=time.perf_counter() - started,
        batch=min(check_batch(batch), len(requests)),
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
