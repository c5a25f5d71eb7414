"""Decoding of 1 to 64 texts: prefill of the prompts, then steps of one symbol of each text.

A step has fixed shapes at any position, and does not synchronise with the device: it reads the
positions and samples the symbols on the device, and the host fetches them while later steps run. On
a GPU the step is one CUDA graph. For a single text, a model that skips parts for some bytes has a
graph for each phase of a step; without conditional nodes, the host waits to learn which phases to
run.

Texts begin and end at different times. The bits of a text depend neither on the other texts nor on
their number, from two on: kernels guarantee that for each row, and parts without such kernels
process one text after another within the step. A single text has kernels of its own, whose sums
have another order.
"""

from collections import deque
from collections.abc import Callable, Collection, Generator, Iterator, Sequence
from functools import partial
from importlib import import_module
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor

from arbcli.base.errors import ArbError
from arbcli.config.model import VOCABULARY
from arbcli.families import SPECULATION
from arbcli.generation.sampling import Sampling
from arbcli.kernels.output.choose_byte import choose_byte_
from arbcli.kernels.runtime import native
from arbcli.kernels.runtime.arguments import TensorOptions
from arbcli.kernels.runtime.backend import default_backend, use_backend
from arbcli.kernels.runtime.device import capturing, check_room
from arbcli.kernels.runtime.overlap import overlapping
from arbcli.kernels.update.random_bits import stream_key
from arbcli.model.cache import BatchCache, Cache
from arbcli.model.decoding import Phase, step_phases
from arbcli.model.language_model import LanguageModel

if TYPE_CHECKING:
    from arbcli.families.ahead.speculation import Checks

WARM_UP_STEPS = 3
"""Steps before the capture, in which kernels are compiled and libraries choose algorithms."""
FETCHED_STEPS = 16
"""Number of bytes that are fetched from a GPU at once."""
MAX_TEXTS = 64
"""Maximum number of texts that kernels decode at once."""
MAX_LENGTH = 2**24
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
    """Generates texts with a model, each in a slot that can be reused.

    Args:
        model: the model. It is faster within `model.prepared_weights()`, whose captured steps must
            not be used outside.
        positions: maximum length of a text, including its prompt.
        texts: number of slots, 1 to `MAX_TEXTS`.
        backend: kernel backend; None is the default of the device.
        capture: whether to replay a step as CUDA graphs, or that of a single text on a CPU as a
            recorded list of loops, with the same bits; None does so if possible.
        ahead: maximum number of bytes per step of a single text (speculative decoding). Proposals
            come from a head of the model, if it has one, and from repetitions of the text. The text
            does not depend on it.
        prompt: minimum length of the prompts; known long prompts take less memory.

    Raises:
        ArbError: the model does not support `ahead`, texts are longer than `MAX_LENGTH`, or there
            is not enough memory for the cache.
        ValueError: `texts` is out of range.
    """

    @torch.no_grad()
    def __init__(
        self,
        model: LanguageModel,
        positions: int,
        texts: int = 1,
        *,
        backend: str | None = None,
        capture: bool | None = None,
        ahead: int = 1,
        prompt: int = 1,
    ) -> None:
        if not 1 <= texts <= MAX_TEXTS:
            raise ValueError(f"{texts} texts cannot be decoded at once, only 1 to {MAX_TEXTS}")
        if positions > MAX_LENGTH:
            raise ArbError(
                f"prompt and generated text have {positions:,} bytes",
                f"use a `--length` such that they have at most {MAX_LENGTH:,}",
            )
        device = self.device = model.device
        self.model, self.backend = model, backend or default_backend(device)
        self.cache = _new_cache(model, positions, texts, prompt)
        self.cache_dtype = model.cache_dtype
        """Storage format of keys and values in the cache."""
        self.lengths: dict[int, int] = {}
        """Length of the text in each slot that has one."""
        self.num_generated = 0
        """Number of symbols that `stream` has yielded."""
        uses_gpu = device.type == "cuda" and self.backend == "triton"
        self._captures, self._records = uses_gpu if capture is None else capture, False
        self._shortest_prompt = prompt
        integers: TensorOptions = {"dtype": torch.int32, "device": device}
        dtype, shape = text_dtype(model.config.vocabulary), (texts,) if texts > 1 else ()
        self._text = torch.zeros(*shape, positions, dtype=dtype, device=device)
        self._texts = [*self._text.view(texts, positions)]  # views
        self.last = torch.zeros(texts, 1, dtype=torch.int64, device=device)
        """The last symbol of each slot's text, (texts, 1) int64, which the next step replaces."""
        self._key = torch.zeros(shape, **integers)
        self.logits: Tensor | None = None
        """Logits of the last step, (texts, V); steps that are replayed write the same tensor."""
        self._sample: Callable[..., None]
        self._slot_sampling: tuple[Tensor, ...] = ()
        """Temperature, top k and top p of each slot; empty for a single text."""
        if isinstance(self.cache, BatchCache):
            from arbcli.kernels.output.choose_bytes import choose_bytes_

            self._caches: Sequence[Cache] = self.cache.texts
            self._active, self._sample = self.cache.active, choose_bytes_
            self._eager = [Phase(0, partial(model, self.last, self.cache))]
            ones = torch.ones(texts, dtype=torch.float32, device=device)
            self._slot_sampling = torch.zeros_like(ones), ones.int(), ones
        else:
            self._caches, self._active = [self.cache], torch.zeros(1, **integers)  # unused
            self._sample = choose_byte_
            self._eager = step_phases(model, self.last, self.cache)
            self._records = self.backend == "native" and capture is None and len(self._eager) == 1
        self._sampling_arguments: tuple[Any, ...] = ()
        """Temperature, top k and top p in the step: numbers, or the tensors of all slots."""
        self._phases = self._eager
        self.recorded = False
        """Whether a step is replayed as a recorded list of loops."""
        self.checks = self._new_checks(ahead)
        """Speculative decoding; None for single-byte steps."""
        self._check: Callable[[], None] = lambda: None
        self.num_checks, self.checked_bytes = 0, 0
        """Number of speculative steps, and of the bytes that they generated."""

    @property
    def bytes_per_check(self) -> float | None:
        """Mean number of bytes per speculative step; None without one."""
        return self.checked_bytes / self.num_checks if self.num_checks else None

    @property
    def nbytes(self) -> int:
        """Memory of keys, values and other states in bytes."""
        return self.cache.nbytes + (self.checks.nbytes if self.checks else 0)

    @torch.no_grad()
    def begin(
        self,
        prompt: Sequence[int],
        sampling: Sampling | None = None,
        *,
        slot: int = 0,
        stream: int = 0,
        progress: Callable[[int, int], None] = lambda *_: None,
        on_logits: Callable[[Tensor], None] | None = None,
    ) -> None:
        """Begin a text in a slot, and prefill its prompt.

        Args:
            prompt: bytes, or tokens.
            sampling: parameters of sampling. Those of a single text are constants of its step,
                which is captured again if they change.
            slot: index of the slot, whose last text is forgotten.
            stream: index of the seed's random stream.
            progress: see `read_symbols`; the prompt's last symbol is not read yet.
            on_logits: see `read_symbols`.

        Raises:
            ArbError: `prompt` is empty.
            ValueError: `prompt` is too long, or longer ones were announced.
        """
        self.lengths.pop(slot, None)
        self._active[slot] = 0
        sampling = sampling or Sampling()
        arguments: tuple[Any, ...] = sampling.temperature, sampling.top_k, sampling.top_p
        if self._slot_sampling:
            for values, value in zip(self._slot_sampling, arguments, strict=True):
                values[slot] = value
            arguments = self._slot_sampling
        self._key.view(-1)[slot] = stream_key(sampling.seed, stream, self.device)
        if self._sampling_arguments != arguments:
            self._sampling_arguments = arguments
            self._capture()
        self._caches[slot].reset()
        shortest, room = self._shortest_prompt, self._text.shape[-1]
        if not prompt:
            raise ArbError("the prompt is empty", "give at least one byte, such as a newline")
        if len(prompt) < shortest:
            raise ValueError(f"a prompt of {shortest} bytes was expected, got {len(prompt)}")
        if len(prompt) > room:
            raise ValueError(f"no room for {len(prompt)} bytes in a text of {room}")
        marked = self.model.config.symbols > VOCABULARY  # the text has the low bits of marks
        ids = to_device(self.device, prompt, torch.int32 if marked else self._text.dtype)
        self._texts[slot][: len(ids)] = ids
        with use_backend(self.backend):
            read_symbols(self.model, ids[:-1], self._caches[slot], progress, on_logits)
        self.last[slot] = ids[-1]  # the next step reads it
        self._active[slot] = 1
        self.lengths[slot] = len(ids)

    @torch.no_grad()
    def step(self, steps: int = 1) -> None:
        """Generate `steps` symbols of each text.

        Raises:
            ValueError: a text would be too long, or none has begun.
        """
        self._check_room(steps)
        with use_backend(self.backend), overlapping():
            for _ in range(steps):
                depth = 0
                for phase in self._phases:
                    if phase.depth > depth:
                        continue
                    self._compute(phase)
                    if phase.leads_deeper is not None:
                        depth = phase.depth + int(phase.leads_deeper())
        for slot in self.lengths:
            self.lengths[slot] += steps

    @torch.no_grad()
    def check(self, steps: int = 1) -> None:
        """Run speculative steps of the single text, for which it must have room."""
        with use_backend(self.backend), overlapping():
            for _ in range(steps):
                self._check()

    def end(self, slot: int, count: int) -> Callable[[], Sequence[int]]:
        """End the text of a slot; return a function that waits for its last `count` symbols.

        Raises:
            ValueError: the text has not begun.
        """
        self._check_begun(slot)
        self._active[slot] = 0
        length = self.lengths.pop(slot)
        return copy_to_host(self._texts[slot][length - count : length])

    def stream(self, length: int, ends: Collection[int] = ()) -> Iterator[Sequence[int]]:
        """Generate `length` symbols of the text in slot 0, and yield them in pieces.

        Later symbols are computed meanwhile.

        Args:
            length: number of symbols.
            ends: stop symbols, which are not yielded.

        Raises:
            ValueError: the text would be too long, or has not begun.
        """
        for part in self._stream(length):
            end = next((i for i, symbol in enumerate(part) if symbol in ends), None)
            self.num_generated += len(part[:end])
            yield part[:end]
            if end is not None:
                return

    def _stream(self, length: int) -> Iterator[Sequence[int]]:
        self._check_begun(0)
        self._check_room(length)
        if self.checks is not None:
            length = yield from self._stream_checked(self.checks, length)
        steps_per_fetch = FETCHED_STEPS if self.device.type == "cuda" else 1
        fetched: deque[Callable[[], Sequence[int]]] = deque()
        end = self.lengths[0] + length
        while (begin := self.lengths[0]) < end:
            self.step(min(steps_per_fetch, end - begin))
            fetched.append(copy_to_host(self._texts[0][begin : self.lengths[0]]))
            if len(fetched) == 2:
                yield fetched.popleft()()
        yield from (fetch() for fetch in fetched)

    def _stream_checked(self, checks: "Checks", length: int) -> Generator[Sequence[int], None, int]:
        """Generate bytes by speculative steps, as long as the text has room for a complete one.

        Returns:
            The number of bytes left for single-byte steps.
        """
        begin, size = self.lengths[0], checks.size
        end = begin + length
        steps_per_fetch = FETCHED_STEPS if self.device.type == "cuda" else 1
        checks.begin(self.last)
        pending: deque[_Fetch] = deque()
        while True:
            launched = sum(group.checks for group in pending)
            num_checks = min(steps_per_fetch, (end - begin) // size - launched)
            if num_checks > 0 and len(pending) < 2:
                self.check(num_checks)
                checked = self._texts[0][begin : begin + (launched + num_checks) * size]
                position = copy_to_host(self.cache.position[None])
                pending.append(_Fetch(num_checks, begin, position, copy_to_host(checked)))
            elif pending:
                group = pending.popleft()
                self.lengths[0] = group.position()[0] + 1
                self.num_checks += group.checks
                self.checked_bytes += self.lengths[0] - begin
                yield group.text()[begin - group.begin : self.lengths[0] - group.begin]
                begin = self.lengths[0]
            else:
                self.last.copy_(checks.byte)
                return end - begin

    def _check_begun(self, slot: int) -> None:
        if slot not in self.lengths:
            raise ValueError(f"no text has begun in slot {slot}")

    def _check_room(self, count: int) -> None:
        length = max(self.lengths.values(), default=0)
        if not 0 < length <= self._text.shape[-1] - count:
            raise ValueError(f"no room for {count} bytes after {length}")

    def _new_checks(self, ahead: int) -> "Checks | None":
        """Create the speculative steps, if `ahead` is above 1 and the text is long enough."""
        model, size = self.model, min(ahead, self.cache.window, self._text.shape[-1] - 1)
        if ahead == 1:
            return None
        speculation = import_module(SPECULATION)
        if not 1 <= ahead <= speculation.MAX_AHEAD:
            raise ArbError(f"`--ahead` is {ahead}", f"use 1 to {speculation.MAX_AHEAD}")
        if len(self._caches) > 1:
            raise ArbError("`--ahead` is for a single text", "leave it out, or give one text")
        from arbcli.generation.option_checks import check_ahead

        check_ahead(model.config, ahead)
        with use_backend(self.backend):
            if model.cache_format.code_dtype:
                raise ArbError(
                    f"`--ahead` does not work with a cache in {model.cache_dtype}",
                    "leave `--kv` or `--ahead` out",
                )
            if not speculation.can_check(model):
                raise ArbError(
                    "this model does not support `--ahead`",
                    "leave `--ahead` out; docs/models.md lists the models that do",
                )
            return speculation.Checks(model, self.cache, size) if size > 1 else None

    def _compute(self, phase: Phase) -> None:
        """Run a phase of a step; the last phase samples the next symbols.

        All tensors have fixed addresses, so that the phase can be captured.
        """
        logits = phase.run()
        if logits is not None:
            self.logits = logits[:, 0]
            self._sample(
                self.last,
                self._text,
                self.logits.view(*self._key.shape, -1),
                self.cache.position,  # already incremented: positions of the next symbols
                self._key,
                *self._sampling_arguments,
            )

    def _capture(self) -> None:
        """Capture a step as CUDA graphs or record it, if possible, and reset the cache."""
        self._phases = self._eager
        if self.checks is not None:
            arguments = self._text, self._key, self._sampling_arguments
            self._check = partial(self.checks.run, *arguments)
        with use_backend(self.backend), overlapping():
            if self._captures:
                self._capture_graphs()
            elif self._records:
                self._record()
        self.cache.reset()

    def _capture_graphs(self) -> None:
        joined = self._eager[0].handle is not None
        for phase in self._eager:
            if phase.handle is not None:
                phase.handle.zero_()  # nodes of an earlier capture do not exist any more
        for _ in range(WARM_UP_STEPS):
            self.cache.reset()
            for phase in self._eager:
                self._compute(phase)
        graphs: list[torch.cuda.CUDAGraph] = []
        for phase in self._eager:
            pool = graphs[-1].pool() if graphs else None
            graphs.append(torch.cuda.CUDAGraph(keep_graph=joined))
            with capturing(graphs[-1], pool=pool):
                self._compute(phase)
        if joined:
            from arbcli.generation.step_graph import StepGraph

            self._phases = [Phase(0, StepGraph(self._eager, graphs, self.device).replay)]
        else:
            self._phases = [*map(_replay_phase, self._eager, graphs)]
        if self.checks is not None:
            for _ in range(WARM_UP_STEPS):
                self.cache.reset()
                self.checks.begin(self.last)
                self._check()
            checks = torch.cuda.CUDAGraph()
            with capturing(checks, pool=graphs[-1].pool()):
                self._check()
            self._check = checks.replay

    def _record(self) -> None:
        """Record a step as a list of loops, if it only consists of such."""
        (phase,) = self._eager
        phase.run()  # prepacks the weights
        step = native.Recording()
        try:
            with step:
                logits = phase.run()
        except native.NotRecorded:
            return
        if logits is not None:
            self._phases = [Phase(0, partial(_replay_loops, step, logits))]
            self.recorded = True


def _new_cache(model: LanguageModel, positions: int, texts: int, prompt: int) -> Cache:
    """Create the cache of texts whose prompts have at least `prompt` symbols."""
    reach, device = model.config.reach, model.device
    # at most the number of positions that `read_symbols` skips
    first = 0 if reach is None else max(0, prompt - 1 - reach - 2 * model.config.ctx)
    new = partial(model.new_cache, positions, texts, first=first)
    if device.type == "cuda":
        free, _ = torch.cuda.mem_get_info(device)
        cached = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
        if texts > 1:
            subject = f"the cache of {texts} texts"
            hint = "use a smaller `--batch`, or shorter texts"
        else:
            subject = "the cache of a text"
            hint = "use a shorter prompt and a smaller `--length`"
        check_room(new(device=torch.device("meta")).nbytes, subject, hint, free + cached)
    return new()


def read_symbols(
    model: LanguageModel,
    ids: Tensor,
    cache: Cache,
    progress: Callable[[int, int], None] = lambda *_: None,
    on_logits: Callable[[Tensor], None] | None = None,
) -> None:
    """Prefill a cache with symbols, in chunks of the window.

    Symbols beyond the model's reach, on which no later symbol depends, are only counted. Chunk
    boundaries do not depend on this, so the bits of the result do not either.

    Args:
        model: the model.
        ids: (N,) integers.
        cache: cache of the text, to which the symbols are appended.
        progress: called after each chunk with the number of symbols read and in total.
        on_logits: called with the logits of each chunk, (T, V); no symbol is skipped then.
    """
    skipped, reach, window = 0, model.config.reach, cache.window
    if reach is not None and on_logits is None:
        skipped = max(0, (len(ids) - window - reach) // window * window)
        cache.main.clock.count(skipped)
    for start in range(skipped, len(ids), window):
        stop = min(start + window, len(ids))
        logits = model(ids[None, start:stop].long(), cache)
        if on_logits is not None:
            on_logits(logits[0])
        progress(stop - skipped, len(ids) - skipped)


def text_dtype(vocabulary: int) -> torch.dtype:
    """Return the dtype of a text on a device: uint8 for bytes, int32 for larger vocabularies."""
    return torch.uint8 if vocabulary <= VOCABULARY else torch.int32


def to_device(device: torch.device, symbols: Sequence[int], dtype: torch.dtype) -> Tensor:
    """Copy bytes (uint8) or tokens (int32) to a device: (N,)."""
    if dtype == torch.uint8:
        return torch.frombuffer(bytearray(symbols), dtype=dtype).to(device)
    return torch.tensor([*symbols], dtype=dtype, device="cpu").to(device)


def copy_to_host(symbols: Tensor) -> Callable[[], Sequence[int]]:
    """Start copying symbols, (N,), to the host; return a function that waits for the copy.

    It returns `bytes` if the dtype is uint8, else a list.
    """
    kind = bytes if symbols.dtype == torch.uint8 else list
    if symbols.device.type == "cpu":
        copied = kind(symbols.tolist())
        return lambda: copied
    host_symbols = torch.empty(symbols.shape, dtype=symbols.dtype, pin_memory=True)
    host_symbols.copy_(symbols, non_blocking=True)
    arrived = torch.cuda.Event()
    arrived.record()

    def wait() -> Sequence[int]:
        arrived.synchronize()
        return kind(host_symbols.tolist())

    return wait


def _replay_loops(step: native.Recording, logits: Tensor) -> Tensor:
    step.replay()
    return logits


def _replay_phase(phase: Phase, graph: torch.cuda.CUDAGraph) -> Phase:
    """Return a phase that replays a graph; `leads_deeper` reads the tensor that it writes."""
    leads_deeper = phase.leads_deeper and partial(Tensor.detach, phase.leads_deeper())
    return Phase(phase.depth, graph.replay, leads_deeper)
