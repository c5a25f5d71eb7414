"""Text generation: prefill of the prompt, then decoding steps of one byte each.

A step has fixed shapes at any position, and does not synchronise with the device: it reads the
position and samples the byte on the device, and the host fetches bytes while later steps run. On a
GPU the step is one CUDA graph. A model that skips parts for some bytes has a graph for each phase
of a step; without conditional nodes, the host waits to learn which phases to run.
"""

import dataclasses
import time
from collections import deque
from collections.abc import Callable, Collection, Generator, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor

from arbcli.config.model import VOCABULARY
from arbcli.config.parts.ahead import AheadConfig
from arbcli.device import capturing, deterministic, explained_out_of_memory, spare_bytes
from arbcli.errors import ArbError
from arbcli.infer.option_checks import check_ahead
from arbcli.infer.sampling import Sampling
from arbcli.infer.speculative import Checks, can_check
from arbcli.infer.step_graph import StepGraph
from arbcli.infer.tokens import bytes_of, symbols_of
from arbcli.kernels.output.choose_byte import choose_byte_
from arbcli.kernels.runtime import native
from arbcli.kernels.runtime.backend import default_backend, use_backend
from arbcli.kernels.runtime.overlap import overlapping
from arbcli.kernels.update.random_bits import stream_key
from arbcli.model.cache import Cache
from arbcli.model.decoding import Phase, step_phases
from arbcli.model.language_model import LanguageModel

WARM_UP_STEPS = 3
"""Steps before the capture, in which kernels are compiled and libraries choose algorithms."""
FETCHED_STEPS = 16
"""Number of bytes that are fetched from a GPU at once."""
LONGEST_TEXT = 2**24
"""Maximum length of prompt and generated text; float32 has no exact integers beyond."""
OUT_OF_MEMORY = "close what else uses the GPU, or use `--device cpu`"


class _Fetch(NamedTuple):
    """Launched speculative steps, whose results are being copied to the host."""

    checks: int
    """Number of steps."""
    begin: int
    """Number of bytes of the text on the host when they were launched."""
    position: Callable[[], Sequence[int]]
    """Wait for the position after the steps."""
    text: Callable[[], Sequence[int]]
    """Wait for the bytes from `begin`, followed by unused ones."""


class Decoder:
    """Generates one text with a model and a cache.

    Args:
        model: the model. It is faster within `model.prepared_weights()`, whose captured steps must
            not be used outside.
        positions: maximum length of the text, including the prompt.
        sampling: parameters of sampling.
        backend: kernel backend; None is the default of the device.
        capture: whether to replay a step as a CUDA graph, or on a CPU as a recorded list of loops,
            with the same bits; None does so if possible.
        stream: index of the seed's random stream.
        ahead: maximum number of bytes per step (speculative decoding). Proposals come from a head
            of the model, if it has one, and from repetitions of the text. The text does not depend
            on it.
        prompt: minimum length of the first `read`; a known long prompt takes less memory.

    Raises:
        ArbError: the model does not support `ahead`, or the text is longer than `LONGEST_TEXT`.
    """

    @torch.no_grad()
    def __init__(
        self,
        model: LanguageModel,
        positions: int,
        sampling: Sampling | None = None,
        *,
        backend: str | None = None,
        capture: bool | None = None,
        stream: int = 0,
        ahead: int = 1,
        prompt: int = 1,
    ) -> None:
        if positions > LONGEST_TEXT:
            raise ArbError(
                f"prompt and generated text have {positions:,} bytes",
                hint=f"use a `--length` such that they have at most {LONGEST_TEXT:,}",
            )
        self.model, self.sampling = model, sampling or Sampling()
        reach = model.config.reach
        # at most the number of positions that `read_symbols` skips
        first = 0 if reach is None else max(0, prompt - 1 - reach - 2 * model.config.ctx)
        self.cache = model.new_cache(positions, first)
        self.cache_dtype = model.cache_dtype
        """Storage format of keys and values in the cache."""
        self._prompt = prompt
        device = self.device = self.cache.position.device
        self.backend = backend or default_backend(device)
        self.length = 0
        """Length of the text so far."""
        self.num_generated = 0
        """Number of symbols that `stream` has yielded."""
        dtype = text_dtype(model.config.vocabulary)
        self._text = torch.zeros(positions, dtype=dtype, device=device)
        self._byte = torch.zeros(1, 1, dtype=torch.int64, device=device)  # last byte of the text
        self._key = stream_key(self.sampling.seed, stream, device)
        self._phases = step_phases(model, self._byte, self.cache)
        self.checks = self._new_checks(ahead)
        """Speculative decoding; None for single-byte steps."""
        self.checks_made, self.checked_bytes = 0, 0
        """Number of speculative steps, and of the bytes that they generated."""
        self._check_graph: torch.cuda.CUDAGraph | None = None
        self.recorded = False
        """Whether a step is replayed as a recorded list of loops."""
        can_capture = device.type == "cuda" and self.backend == "triton"
        if can_capture if capture is None else capture:
            self._capture()
        elif self.backend == "native" and capture is not False:
            self._record()

    @property
    def bytes_per_check(self) -> float | None:
        """Mean number of bytes per speculative step; None without one."""
        return self.checked_bytes / self.checks_made if self.checks_made else None

    @property
    def nbytes(self) -> int:
        """Memory of keys, values and other states in bytes."""
        return self.cache.nbytes + (self.checks.nbytes if self.checks else 0)

    @torch.no_grad()
    def read(
        self, prompt: Sequence[int], progress: Callable[[int, int], None] = lambda *_: None
    ) -> None:
        """Append bytes, or tokens, to the text, and prefill the cache in chunks of the window.

        Args:
            prompt: the symbols.
            progress: called after each chunk with the number of symbols read and in total.

        Raises:
            ArbError: `prompt` is empty.
            ValueError: the text would be too long, or a longer prompt was announced.
        """
        if not prompt:
            raise ArbError("the prompt is empty", hint="give at least one byte, such as a newline")
        if not self.length and len(prompt) < self._prompt:
            raise ValueError(f"a prompt of {self._prompt} bytes was expected, got {len(prompt)}")
        if self.length + len(prompt) > len(self._text):
            raise ValueError(f"no room for {len(prompt)} bytes after {self.length}")
        marked = self.model.config.symbols > VOCABULARY  # the text has the low bits of marks
        ids = symbols_on(self.device, prompt, torch.int32 if marked else self._text.dtype)
        self._text[self.length : self.length + len(ids)] = ids
        if self.length:
            ids = torch.cat([self._byte[0].to(ids.dtype), ids])
        with use_backend(self.backend):
            read_symbols(self.model, ids[:-1], self.cache, progress)
        self._byte.copy_(ids[-1])  # the next step reads it
        self.length += len(prompt)

    def stream(self, length: int, ends: Collection[int] = ()) -> Iterator[Sequence[int]]:
        """Generate `length` symbols, and yield them in pieces while later ones are computed.

        Args:
            length: number of symbols.
            ends: stop symbols, which are not yielded.

        Raises:
            ValueError: the text would be too long, or no prompt was read.
        """
        for part in self._stream(length):
            place = next((i for i, symbol in enumerate(part) if symbol in ends), None)
            self.num_generated += len(part[:place])
            yield part[:place]
            if place is not None:
                return

    def _stream(self, length: int) -> Iterator[Sequence[int]]:
        if not 0 < self.length <= len(self._text) - length:
            raise ValueError(f"no room for {length} bytes after {self.length}")
        if self.checks is not None:
            length = yield from self._stream_checked(self.checks, length)
        together = FETCHED_STEPS if self.device.type == "cuda" else 1
        fetched: deque[Callable[[], Sequence[int]]] = deque()
        end = self.length + length
        while self.length < end:
            begin = self.length
            for _ in range(min(together, end - begin)):
                self._step()
            fetched.append(copied_to_host(self._text[begin : self.length]))
            if len(fetched) == 2:
                yield fetched.popleft()()
        yield from (fetch() for fetch in fetched)

    def _new_checks(self, ahead: int) -> Checks | None:
        """Create the speculative steps, if `ahead` is above 1 and the text is long enough."""
        model, size = self.model, min(ahead, self.cache.window, len(self._text) - 1)
        if ahead == 1:
            return None
        if not 1 <= ahead <= AheadConfig.MOST:
            raise ArbError(f"`--ahead` is {ahead}", hint=f"use 1 to {AheadConfig.MOST}")
        check_ahead(model.config, ahead)
        with use_backend(self.backend):
            if model.cache_format.stored:
                raise ArbError(
                    f"`--ahead` does not work with a cache in {model.cache_dtype}",
                    hint="leave `--kv` or `--ahead` out",
                )
            if not can_check(model):
                raise ArbError(
                    "this model does not support `--ahead`",
                    hint="leave `--ahead` out; docs/models.md says which models can",
                )
            return Checks(model, self.cache, size) if size > 1 else None

    @torch.no_grad()
    def _run_check(self) -> None:
        if self._check_graph is not None:
            self._check_graph.replay()
        elif self.checks is not None:
            with use_backend(self.backend), overlapping():
                self.checks.run(self._text, self._key, self.sampling)

    def _stream_checked(self, checks: Checks, length: int) -> Generator[Sequence[int], None, int]:
        """Generate bytes by speculative steps, as long as the text has room for a complete one.

        Returns:
            The number of bytes left for single-byte steps.
        """
        end, size = self.length + length, checks.size
        together = FETCHED_STEPS if self.device.type == "cuda" else 1
        checks.begin(self._byte)
        in_flight: deque[_Fetch] = deque()
        while True:
            launched = sum(group.checks for group in in_flight)
            more = min(together, (end - self.length) // size - launched)
            if more > 0 and len(in_flight) < 2:
                for _ in range(more):
                    self._run_check()
                most = self._text[self.length : self.length + (launched + more) * size]
                position = copied_to_host(self.cache.position[None])
                in_flight.append(_Fetch(more, self.length, position, copied_to_host(most)))
            elif in_flight:
                group, begin = in_flight.popleft(), self.length
                self.length = group.position()[0] + 1
                self.checks_made += group.checks
                self.checked_bytes += self.length - begin
                yield group.text()[begin - group.begin : self.length - group.begin]
            else:
                self._byte.copy_(checks.byte)
                return end - self.length

    @torch.no_grad()
    def _step(self) -> None:
        deepest = 0
        for phase in self._phases:
            if phase.depth > deepest:
                continue
            self._compute(phase)
            if phase.leads_deeper is not None:
                deepest = phase.depth + int(phase.leads_deeper())
        self.length += 1

    def _compute(self, phase: Phase) -> None:
        """Run a phase of a step; the last phase samples the next byte.

        All tensors have fixed addresses, so that the phase can be captured.
        """
        sampling = self.sampling
        with use_backend(self.backend), overlapping():
            logits = phase.run()
            if logits is None:
                return
            choose_byte_(
                self._byte,
                self._text,
                logits[0, 0],
                self.cache.position,  # already incremented: position of the next byte
                self._key,
                sampling.temperature,
                sampling.top_k,
                sampling.top_p,
            )

    def _capture(self) -> None:
        """Capture a step as CUDA graphs, after warm-up steps, and reset the cache."""
        joined = self._phases[0].handle is not None
        for _ in range(WARM_UP_STEPS):
            self.cache.reset()
            for phase in self._phases:
                self._compute(phase)
        graphs: list[torch.cuda.CUDAGraph] = []
        for phase in self._phases:
            pool = graphs[-1].pool() if graphs else None
            graphs.append(torch.cuda.CUDAGraph(keep_graph=joined))
            with capturing(graphs[-1], pool=pool):
                self._compute(phase)
        if joined:
            step = StepGraph(self._phases, graphs, self.device)
            self._phases = [Phase(0, step.replay)]
        else:
            pairs = zip(self._phases, graphs, strict=True)
            self._phases = [_replayed(phase, graph) for phase, graph in pairs]
        if self.checks is not None:
            for _ in range(WARM_UP_STEPS):
                self.cache.reset()
                self.checks.begin(self._byte)
                self._run_check()
            checks = torch.cuda.CUDAGraph()
            with capturing(checks, pool=graphs[-1].pool()):
                self._run_check()
            self._check_graph = checks
        self.cache.reset()

    def _record(self) -> None:
        """Record a step as a list of loops, if it only consists of such, and reset the cache."""
        if len(self._phases) > 1:
            return
        with use_backend(self.backend):
            self._phases[0].run()  # prepacks the weights
            step = native.Recording()
            try:
                with step:
                    logits = self._phases[0].run()
            except native.NotRecorded:
                pass
            else:
                if logits is not None:
                    self._phases = [Phase(0, partial(_replayed_loops, step, logits))]
                    self.recorded = True
        self.cache.reset()


def read_symbols(
    model: LanguageModel,
    ids: Tensor,
    cache: Cache,
    progress: Callable[[int, int], None] = lambda *_: None,
) -> None:
    """Prefill a cache with symbols, in chunks of the window.

    Symbols beyond the model's reach, on which no later symbol depends, are only counted. Chunk
    boundaries do not depend on this, so the bits of the result do not either.

    Args:
        model: the model.
        ids: (N,) integers.
        cache: cache of the text, to which the symbols are appended.
        progress: called after each chunk with the number of symbols read and in total.
    """
    skipped, reach, window = 0, model.config.reach, cache.window
    if reach is not None and not cache.is_marked:
        skipped = max(0, (len(ids) - window - reach) // window * window)
        cache.main.clock.count(skipped)
    for start in range(skipped, len(ids), window):
        stop = min(start + window, len(ids))
        model(ids[None, start:stop].long(), cache)
        progress(stop - skipped, len(ids) - skipped)


def text_dtype(vocabulary: int) -> torch.dtype:
    """Return the dtype of a text on a device: uint8 for bytes, int32 for larger vocabularies."""
    return torch.uint8 if vocabulary <= VOCABULARY else torch.int32


def symbols_on(device: torch.device, symbols: Sequence[int], dtype: torch.dtype) -> Tensor:
    """Copy bytes (uint8) or tokens (int32) to a device: (N,)."""
    if dtype == torch.uint8:
        return torch.frombuffer(bytearray(symbols), dtype=dtype).to(device)
    return torch.tensor([*symbols], dtype=dtype, device="cpu").to(device)


def copied_to_host(symbols: Tensor) -> Callable[[], Sequence[int]]:
    """Start copying symbols, (N,), to the host; return a function that waits for the copy.

    It returns `bytes` if the dtype is uint8, else a list.
    """
    kind = bytes if symbols.dtype == torch.uint8 else list
    if symbols.device.type == "cpu":
        copied = kind(symbols.tolist())
        return lambda: copied
    on_host = torch.empty(symbols.shape, dtype=symbols.dtype, pin_memory=True)
    on_host.copy_(symbols, non_blocking=True)
    arrived = torch.cuda.Event()
    arrived.record()

    def wait() -> Sequence[int]:
        arrived.synchronize()
        return kind(on_host.tolist())

    return wait


def _replayed_loops(step: native.Recording, logits: Tensor) -> Tensor:
    step.replay()
    return logits


def _replayed(phase: Phase, graph: torch.cuda.CUDAGraph) -> Phase:
    """Return a phase that replays a graph; `leads_deeper` reads the tensor that it writes."""
    leads_deeper = phase.leads_deeper and partial(Tensor.detach, phase.leads_deeper())
    return Phase(phase.depth, graph.replay, leads_deeper)


def generate(
    model: LanguageModel,
    prompt: bytes | list[int],
    length: int,
    sampling: Sampling | None = None,
    *,
    backend: str | None = None,
    kv: str | None = None,
    ends: Collection[int] = (),
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
        ends: stop symbols, which are not part of the text.
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
            decoder = Decoder(
                model, size + length, sampling, backend=backend, ahead=ahead, prompt=size
            )
        decoder.read(symbols, on_prompt)
        on_read(decoder)
        yield from bytes_of(model, symbols, decoder.stream(length, ends))


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
    ends: Collection[int] = (),
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
        ends: stop symbols, which are not part of the text.
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
        device=str(decoder.device),
        backend=decoder.backend,
    )
