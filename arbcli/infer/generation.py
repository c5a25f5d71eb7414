"""Text from a model, a byte at a time: read a prompt at once, then step, each step one byte.

A step has the same shapes wherever it is in the text, and nothing in it waits for the device: the
position is read there, the byte is chosen there, and fetched while later steps run. So on a GPU the
whole step is one CUDA graph. A model that leaves parts of itself out for some bytes has a graph for
each phase of a step, and the host waits to know which of them to run.
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

from arbcli.config.model import MOST, VOCABULARY
from arbcli.config.parts.ahead import AheadConfig
from arbcli.device import capturing, deterministic, explained_out_of_memory, spare_bytes
from arbcli.errors import ArbError
from arbcli.infer.checks import Checks
from arbcli.infer.option_checks import check_ahead
from arbcli.infer.step_graph import StepGraph
from arbcli.infer.tokens import bytes_of, symbols_of
from arbcli.kernels.output.choose_byte import choose_byte_
from arbcli.kernels.runtime import native
from arbcli.kernels.runtime.backend import default_backend, use_backend
from arbcli.kernels.runtime.overlap import overlapping
from arbcli.kernels.update.random_bits import stream_keys
from arbcli.model.cache import Cache
from arbcli.model.language_model import LanguageModel, Phase

WARM_UP_STEPS = 3
"""Steps before one is captured: kernels compile and libraries make up their minds in them."""
FETCHED_STEPS = 16
"""Bytes that come from a GPU at once."""
LONGEST_TEXT = 2**24
"""Bytes of a prompt and what follows it; positions beyond have no exact angle in float32."""
OUT_OF_MEMORY = "close what else uses the GPU, or use `--device cpu`"


@dataclass(frozen=True, slots=True, kw_only=True)
class Sampling:
    """How the next byte, or token, is chosen from its logits."""

    temperature: float = 0.8
    """Sampling temperature, which divides the logits; 0 is greedy."""
    top_k: int = VOCABULARY
    """Choose among so many of the likeliest symbols; all of them if there are fewer."""
    top_p: float = 1.0
    """Then among the likeliest ones that together have at least this share."""
    seed: int = 0
    """The random numbers of a byte follow from this and its position, on every device."""

    def __post_init__(self) -> None:
        """Refuse what no byte can be chosen by.

        Raises:
            ArbError: a number is out of range.
        """
        heat = self.temperature
        for option, value, fits, hint in (
            ("temperature", heat, heat == 0 or 1e-6 <= heat <= 1e6, "0, or 1e-6 to 1e6"),
            ("top-k", self.top_k, 1 <= self.top_k <= MOST, f"1 to {MOST:,}"),
            ("top-p", self.top_p, 0 < self.top_p <= 1, "a number above 0 and at most 1"),
            ("seed", self.seed, 0 <= self.seed < 2**31, f"0 to {2**31 - 1}"),
        ):
            if not fits:
                raise ArbError(f"`--{option}` is {value}", hint=f"use {hint}")


class _Fetch(NamedTuple):
    """Checks that were launched, and their results on the way to the host."""

    checks: int
    begin: int
    """Bytes of the text that were known when they were launched."""
    position: Callable[[], Sequence[int]]
    """Waits for the position after them."""
    text: Callable[[], Sequence[int]]
    """Waits for the bytes from `begin` on, and what may be after them."""


class Decoder:
    """A model, its cache, and the text so far.

    Args:
        model: any `LanguageModel`. It is faster inside `model.prepared_weights()`; what was
            captured there cannot be used outside.
        positions: bytes that the text can have: the prompt and what follows.
        sampling: how bytes are chosen.
        backend: what runs the kernels; None is the device's own.
        capture: whether a step is replayed as one CUDA graph, or on a CPU as one list of loops,
            which gives the same bits; None is wherever it can be.
        stream: which of the random streams of the seed.
        ahead: bytes that a step makes at most: all but the first are proposed, by a head of the
            model if it has one and where the text repeats itself, and the model checks them. It
            changes no bit of the text.
        prompt: bytes that are read first, at least: a long one takes less memory if it is known.

    Raises:
        ArbError: several bytes are to be checked, and the model cannot.
        ArbError: the text is longer than `LONGEST_TEXT`.
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
                f"the prompt and the text after it are {positions:,} bytes",
                hint=f"reduce `--length`: together they have {LONGEST_TEXT:,} at most",
            )
        self.model, self.sampling = model, sampling or Sampling()
        reach = model.config.reach
        # as many as are counted whatever the window, or fewer
        first = 0 if reach is None else max(0, prompt - 1 - reach - 2 * model.config.ctx)
        self.cache = model.new_cache(positions, first)
        self.kept_in = model.kept_in
        """Type of keys and values in the cache."""
        self._prompt = prompt
        device = self.device = self.cache.position.device
        self.backend = backend or default_backend(device)
        self.length = 0
        """Bytes of the text so far."""
        dtype = text_dtype(model.config.vocabulary)
        self._text = torch.zeros(positions, dtype=dtype, device=device)
        self._byte = torch.zeros(1, 1, dtype=torch.int64, device=device)  # the last one
        seed = torch.tensor(self.sampling.seed, dtype=torch.int32, device=device)
        self._key = stream_keys(seed, torch.full_like(seed, stream), 1, 1)[0, 0]
        self._phases = model.step_phases(self._byte, self.cache)
        self.checks = self._new_checks(ahead)
        """Makes several bytes at once; None is one at a time."""
        self.checks_made, self.checked_bytes = 0, 0
        """Checks, and bytes that they made."""
        self._check_graph: torch.cuda.CUDAGraph | None = None
        self.recorded = False
        """Whether a step is replayed as one list of loops."""
        can_capture = device.type == "cuda" and self.backend == "triton"
        if can_capture if capture is None else capture:
            self._capture()
        elif self.backend == "native" and capture is not False:
            self._record()

    @property
    def bytes_per_check(self) -> float | None:
        """Bytes that a check made, on average."""
        return self.checked_bytes / self.checks_made if self.checks_made else None

    @property
    def nbytes(self) -> int:
        """Bytes that keys, values and other states of the text take."""
        return self.cache.nbytes + (self.checks.nbytes if self.checks else 0)

    @torch.no_grad()
    def read(
        self, prompt: Sequence[int], progress: Callable[[int, int], None] = lambda *_: None
    ) -> None:
        """Add bytes, or tokens, to the text, all at once or in chunks of the window.

        Args:
            prompt: the symbols.
            progress: is told after each chunk how many were read, and of how many that are.

        Raises:
            ArbError: there is none.
            ValueError: the text cannot have so many, or a longer prompt was expected.
        """
        if not prompt:
            raise ArbError("the prompt is empty", hint="give at least one byte, such as a newline")
        if not self.length and len(prompt) < self._prompt:
            raise ValueError(f"a prompt of {self._prompt} bytes was expected, got {len(prompt)}")
        if self.length + len(prompt) > len(self._text):
            raise ValueError(f"no room for {len(prompt)} bytes after {self.length}")
        marked = self.model.config.symbols > VOCABULARY  # of marks the text has the low bits
        ids = symbols_on(self.device, prompt, torch.int32 if marked else self._text.dtype)
        self._text[self.length : self.length + len(ids)] = ids
        if self.length:
            ids = torch.cat([self._byte[0].to(ids.dtype), ids])
        with use_backend(self.backend):
            read_symbols(self.model, ids[:-1], self.cache, progress)
        self._byte.copy_(ids[-1])  # the next step reads it
        self.length += len(prompt)

    def stream(self, length: int) -> Iterator[Sequence[int]]:
        """Make `length` symbols more, and yield them some at a time, while later ones are made.

        Raises:
            ValueError: the text cannot have so many, or nothing was read.
        """
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
            fetched.append(self._fetch(begin))
            if len(fetched) == 2:
                yield fetched.popleft()()
        yield from (fetch() for fetch in fetched)

    def _new_checks(self, ahead: int) -> Checks | None:
        """Make what checks several bytes at once, if that is asked for and the text has as many."""
        model, size = self.model, min(ahead, self.cache.window, len(self._text) - 1)
        if ahead == 1:
            return None
        if not 1 <= ahead <= AheadConfig.MOST:
            raise ArbError(f"`--ahead` is {ahead}", hint=f"use 1 to {AheadConfig.MOST}")
        check_ahead(model.config, ahead)
        with use_backend(self.backend):
            if model.kept.stored:
                raise ArbError(
                    f"bytes cannot be checked several at once with a cache in {model.kept_in}",
                    hint="leave `--kv` or `--ahead` out",
                )
            if not model.can_check():
                raise ArbError(
                    "bytes of this model cannot be checked several at once",
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
        """Make bytes by checks as long as each has room, while later checks run.

        Returns:
            Bytes that are left to be made one at a time.
        """
        end, size = self.length + length, checks.size
        together = FETCHED_STEPS if self.device.type == "cuda" else 1
        checks.begin(self._byte)
        under_way: deque[_Fetch] = deque()
        while True:
            launched = sum(group.checks for group in under_way)
            more = min(together, (end - self.length) // size - launched)
            if more > 0 and len(under_way) < 2:
                for _ in range(more):
                    self._run_check()
                most = self._text[self.length : self.length + (launched + more) * size]
                position = copied_to_host(self.cache.position[None])
                under_way.append(_Fetch(more, self.length, position, copied_to_host(most)))
            elif under_way:
                group, begin = under_way.popleft(), self.length
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
        """Do a phase of reading the last byte, and choose the next one when it is the last.

        Every tensor is where it always is.
        """
        how = self.sampling
        with use_backend(self.backend), overlapping():
            logits = phase.run()
            if logits is None:
                return
            choose_byte_(
                self._byte,
                self._text,
                logits[0, 0],
                self.cache.position,  # by now that of the byte to choose
                self._key,
                how.temperature,
                how.top_k,
                how.top_p,
            )

    def _capture(self) -> None:
        """Record a step as CUDA graphs, after a few steps whose bytes are then forgotten."""
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
        """Record a step as one list of loops, where it is nothing else, and forget its byte."""
        if len(self._phases) > 1:
            return
        with use_backend(self.backend):
            self._phases[0].run()  # weights are prepacked when first used
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

    def _fetch(self, begin: int) -> Callable[[], Sequence[int]]:
        """Copy the text from `begin` on to the host; the function returned waits for it."""
        return copied_to_host(self._text[begin : self.length])


def read_symbols(
    model: LanguageModel,
    ids: Tensor,
    cache: Cache,
    progress: Callable[[int, int], None] = lambda *_: None,
) -> None:
    """Let a model read symbols, in chunks of the window.

    Symbols that nothing after the last one depends on are counted only. The others are in the
    chunks that they would be in otherwise, so no bit of what follows is another.

    Args:
        model: that reads.
        ids: (N,) integers.
        cache: of a text, to which they are added.
        progress: is told after each chunk how many were read, and of how many that are.
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
    """Choose the dtype of the symbols of a text on a device: uint8 of bytes, int32 of more."""
    return torch.uint8 if vocabulary <= VOCABULARY else torch.int32


def symbols_on(device: torch.device, symbols: Sequence[int], dtype: torch.dtype) -> Tensor:
    """Copy bytes, where the dtype is uint8, or tokens, in int32, to a device: (N,)."""
    if dtype == torch.uint8:
        return torch.frombuffer(bytearray(symbols), dtype=dtype).to(device)
    return torch.tensor([*symbols], dtype=dtype, device="cpu").to(device)


def copied_to_host(made: Tensor) -> Callable[[], Sequence[int]]:
    """Copy symbols, (N,), as they are now; the function returned waits until they are there.

    What it gives are `bytes` where the dtype is uint8.
    """
    kind = bytes if made.dtype == torch.uint8 else list
    if made.device.type == "cpu":
        copied = kind(made.tolist())
        return lambda: copied
    on_host = torch.empty(made.shape, dtype=made.dtype, pin_memory=True)
    on_host.copy_(made, non_blocking=True)
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
    """Make the phase that a graph recorded; what it leads to is read where the graph writes it."""
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
) -> Iterator[bytes]:
    """Continue a prompt.

    Args:
        model: any `LanguageModel`; every byte sees the `config.ctx` - 1 before it.
        prompt: at least one byte; a model of tokens reads them as its tokenizer has it. Or tokens.
        length: bytes, or tokens, to make.
        sampling: how they are chosen.
        backend: what runs the kernels; None is the device's own.
        kv: what keys and values are kept in: see `LanguageModel.keeping`.
        ends: symbols before which the text ends.
        ahead: bytes that a step makes at most: see `Decoder`.

    Yields:
        One or more bytes at a time.

    Raises:
        ArbError: the prompt is empty, the model keeps nothing so, or a GPU's memory is not enough.
    """
    room = spare_bytes(model.device)
    with explained_out_of_memory(OUT_OF_MEMORY), model.prepared_weights(room):
        symbols = symbols_of(model, prompt)
        decoder = _decoder_for(model, symbols, length, sampling, backend, kv, ahead)
        decoder.read(symbols)
        yield from bytes_of(model, symbols, _until(decoder.stream(length), ends))


def _decoder_for(
    model: LanguageModel,
    prompt: Sequence[int],
    length: int,
    sampling: Sampling | None,
    backend: str | None,
    kv: str | None,
    ahead: int,
) -> Decoder:
    """Make the decoder of a text, which has not read its prompt yet."""
    with model.keeping(kv):
        return Decoder(
            model,
            len(prompt) + length,
            sampling,
            backend=backend,
            ahead=ahead,
            prompt=len(prompt),
        )


def _until(parts: Iterator[Sequence[int]], ends: Collection[int]) -> Iterator[Sequence[int]]:
    """Hand on symbols up to the first of `ends`."""
    for part in parts:
        place = next((i for i, symbol in enumerate(part) if symbol in ends), None)
        yield part[:place]
        if place is not None:
            return


def _counting(parts: Iterator[Sequence[int]], counted: list[int]) -> Iterator[Sequence[int]]:
    for part in parts:
        counted[0] += len(part)
        yield part


@dataclass(frozen=True, slots=True, kw_only=True)
class GenerateReport:
    """A prompt and what a model made of it."""

    checkpoint: str
    prompt: str
    """Bytes that are not UTF-8 are shown as U+FFFD, here and in `text`."""
    text: str
    """Continuation of the prompt."""
    length: int
    """Bytes of it, or tokens of a model that makes those."""
    bytes_per_second: float
    """Once the prompt was read and a step was captured."""
    seed: int
    temperature: float
    top_k: int
    top_p: float
    kv: str
    """Type of keys and values in the cache."""
    cache_bytes: int
    """Size of the cache of this text, or of a model's states."""
    ahead: int
    """Bytes that a step makes at most."""
    bytes_per_check: float | None
    """Bytes that a check of several made, on average; None where there was none."""
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
) -> GenerateReport:
    """Continue a prompt and measure how fast; the same bits every time on the same machine.

    Args:
        model: any `LanguageModel`.
        checkpoint: its name, for the report.
        prompt: at least one byte, or token.
        length: bytes, or tokens, to make.
        sampling: how they are chosen.
        backend: what runs the kernels.
        kv: what keys and values are kept in: see `LanguageModel.keeping`.
        ends: symbols before which the text ends.
        ahead: bytes that a step makes at most: see `Decoder`.
        on_prompt: is told how much of the prompt is read: see `Decoder.read`.
        on_bytes: is given the bytes as they come.

    Raises:
        ArbError: the prompt is empty, the model keeps nothing so, or a GPU's memory is not enough.
    """
    made = bytearray()
    room = spare_bytes(model.device)
    with deterministic(), explained_out_of_memory(OUT_OF_MEMORY), model.prepared_weights(room):
        symbols = symbols_of(model, prompt)
        decoder = _decoder_for(model, symbols, length, sampling, backend, kv, ahead)
        decoder.read(symbols, on_prompt)
        if decoder.device.type == "cuda":
            torch.cuda.synchronize(decoder.device)
        started, counted = time.perf_counter(), [0]
        parts = _counting(_until(decoder.stream(length), ends), counted)
        for part in bytes_of(model, symbols, parts):
            made += part
            on_bytes(part)
        seconds = time.perf_counter() - started
    if isinstance(prompt, bytes):
        asked = prompt.decode(errors="replace")
    else:
        asked = model.tokenizer.decode(prompt)
    return GenerateReport(
        checkpoint=checkpoint,
        prompt=asked,
        text=made.decode(errors="replace"),
        length=counted[0],
        bytes_per_second=len(made) / seconds,
        **dataclasses.asdict(sampling),
        kv=decoder.kept_in,
        cache_bytes=decoder.nbytes,
        ahead=ahead,
        bytes_per_check=decoder.bytes_per_check,
        device=str(decoder.device),
        backend=decoder.backend,
    )
