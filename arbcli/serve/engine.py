"""Continuous batching: one thread decodes texts, which other threads submit and cancel.

Texts join and leave between steps, each in a slot of one `Decoder`, so a text does not depend on
the others. On a GPU a group of steps runs while the symbols of the group before are delivered.
"""

import threading
from collections import deque
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from arbcli.base.errors import ArbError
from arbcli.base.output import printable
from arbcli.generation.conversation import Conversation
from arbcli.generation.decoder import MAX_TEXTS, OUT_OF_MEMORY, Decoder, copy_to_host
from arbcli.generation.tokens import encode_prompt
from arbcli.kernels.runtime.backend import default_backend, use_backend
from arbcli.kernels.runtime.device import deterministic, explained_out_of_memory, spare_bytes
from arbcli.model.language_model import LanguageModel
from arbcli.serve.texts import Output, Piece, Symbol, Text, echoed

GROUPED_STEPS = 4
"""Number of steps on a GPU whose symbols are delivered together."""
TEXTS_ON_CPU = 4
"""Default number of slots on a CPU, where a step computes every slot, used or not."""
MIN_POSITIONS = 4096
"""Default maximum length of a text, if the context of the model is not longer."""
MAX_LOGPROBS = 20
"""Maximum number of likeliest symbols that are reported at a position."""
SCORED_ROWS = 256
"""Number of positions of a prompt whose log probabilities are computed at once."""
MIN_LOGPROB = -9999.0
"""Replacement of minus infinity, which JSON does not have."""


class Busy(Exception):
    """The queue has no room for more texts."""


class Closed(Exception):
    """The engine was closed."""


class Engine:
    """Generates texts of a model in a thread of its own.

    Args:
        model: the model.
        checkpoint: path of its checkpoint, whose folder names the model.
        texts: number of slots, 1 to `MAX_TEXTS`; None is that, or `TEXTS_ON_CPU` on a CPU.
        positions: maximum length of a text, including its prompt; None is the context of the
            model, or `MIN_POSITIONS` if that is more.
        queue: maximum number of texts that wait for a slot.
        backend: kernel backend; None is the default of the device.
        kv: storage format of keys and values: see `LanguageModel.cached_as`.
    """

    def __init__(
        self,
        model: LanguageModel,
        checkpoint: Path,
        *,
        texts: int | None = None,
        positions: int | None = None,
        queue: int = 256,
        backend: str | None = None,
        kv: str | None = None,
    ) -> None:
        on_gpu = model.device.type == "cuda"
        self.model, self.name = model, printable(checkpoint.resolve().parent.name)
        self.texts = texts or (MAX_TEXTS if on_gpu else TEXTS_ON_CPU)
        self.positions = positions or max(model.config.ctx, MIN_POSITIONS)
        self.queue, self.kv = queue, kv
        self.backend = backend or default_backend(model.device)
        self.conversation: Conversation | ArbError
        """Formats chats; without a chat template, the error that says so."""
        try:
            self.conversation = Conversation(model, checkpoint)
        except ArbError as error:
            self.conversation = error
        self.failure: BaseException | None = None
        """Why the thread ended, if it failed."""
        self.on_failure: Callable[[], None] = lambda: None
        """Called in the thread if it fails."""
        self.num_read, self.num_generated, self.num_finished = 0, 0, 0
        """Number of symbols read and generated, and of texts finished."""
        self._steps = GROUPED_STEPS if on_gpu else 1
        self._ahead = int(on_gpu)
        self._waiting: deque[Text] = deque()
        self._running: dict[int, Output] = {}
        self._launched: deque[tuple[Callable[[], Any], dict[int, Output]]] = deque()
        self._changed = threading.Condition()
        self._closing = False
        self._ready = threading.Event()
        self._thread = threading.Thread(target=self._run, name="engine", daemon=True)

    def start(self) -> None:
        """Start the thread, and wait until the model can generate.

        Raises:
            ArbError: an option does not suit the model, or memory is exhausted.
        """
        self._thread.start()
        self._ready.wait()
        if self.failure is not None:
            raise self.failure

    def close(self) -> None:
        """Refuse new texts, and wait until all texts are finished.

        Raises:
            BaseException: the thread failed.
        """
        with self._changed:
            self._closing = True
            self._changed.notify()
        self._thread.join()
        if self.failure is not None:
            raise self.failure

    def __enter__(self) -> "Engine":
        self.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    @property
    def num_running(self) -> int:
        """Number of texts in a slot."""
        return len(self._running)

    @property
    def num_waiting(self) -> int:
        """Number of texts that wait for a slot."""
        return len(self._waiting)

    def submit(self, texts: Sequence[Text]) -> None:
        """Queue texts, whose prompt and length must be within `positions`.

        Raises:
            Busy: the queue has no room for all of them.
            Closed: the engine is closed, or has failed.
        """
        with self._changed:
            if self._closing:
                raise Closed
            if len(self._waiting) + len(texts) > self.queue + self.texts - len(self._running):
                raise Busy
            self._waiting.extend(texts)
            self._changed.notify()

    def cancel(self, texts: Sequence[Text]) -> None:
        """Free the places of texts, in a slot or in the queue."""
        with self._changed:
            for text in texts:
                text.cancelled = True
                if text in self._waiting:
                    self._waiting.remove(text)
            self._changed.notify()

    def encode_prompt(self, text: str) -> tuple[Sequence[int], int]:
        """Encode a prompt; return it and the number of symbols before its text."""
        tokenizer = self.model.tokenizer
        beginning = 0 if tokenizer is None else len(tokenizer.beginning)
        return encode_prompt(self.model, text.encode(errors="replace")), beginning

    @torch.no_grad()
    def _run(self) -> None:
        model, slots = self.model, max(2, self.texts)  # see `Decoder` for a single text
        if model.device.type == "cuda":
            torch.cuda.set_device(model.device)  # of this thread
        try:
            weights = model.prepared_weights(spare_bytes(model.device))
            explained = explained_out_of_memory(OUT_OF_MEMORY)
            with deterministic(), explained, weights, use_backend(self.backend):
                with model.cached_as(self.kv):
                    self._decoder = Decoder(model, self.positions, slots, backend=self.backend)
                self._decoder.begin([0])  # captures a step
                self._decoder.end(0, 0)
                self._ready.set()
                self._decode()
        except BaseException as error:  # raised again by `start` or `close`
            self.failure = error
            with self._changed:
                self._closing = True
                outputs = [self._running, *(outputs for _, outputs in self._launched)]
                lost = {o.text for part in outputs for o in part.values() if not o.finish}
                lost.update(self._waiting)
                self._running.clear()
                self._waiting.clear()
            for text in lost:
                text.on_piece(Piece([], "error"))
            self._ready.set()
            self.on_failure()

    def _decode(self) -> None:
        launched = self._launched
        while (joining := self._joining(idle=not launched)) is not None:
            for slot in joining:
                self._begin(slot)
            if self._running:
                launched.append(self._launch())
            while len(launched) > (self._ahead if self._running else 0):
                self._deliver(*launched[0])
                launched.popleft()

    def _joining(self, *, idle: bool) -> list[int] | None:
        """Remove cancelled texts, and return the slots of the next ones; None at the end.

        Args:
            idle: whether to wait for a text if there is none.
        """
        with self._changed:
            while idle and not (self._waiting or self._running):
                if self._closing:
                    return None
                self._changed.wait()
            for slot, output in [*self._running.items()]:
                if output.text.cancelled:
                    self._leave(slot)
            free = [slot for slot in range(self.texts) if slot not in self._running]
            joining = free[: len(self._waiting)]
            for slot in joining:
                self._running[slot] = Output(self._waiting.popleft(), self.model.tokenizer)
            return joining

    def _begin(self, slot: int) -> None:
        output, scored = self._running[slot], list[Symbol]()
        text = output.text

        def score(logits: Tensor) -> None:
            for rows in logits.split(SCORED_ROWS):
                begin = len(scored) + 1
                ids = torch.tensor([*text.prompt[begin : begin + len(rows)]], device=rows.device)
                scores = _scores(rows, ids[:, None]).tolist()
                scored.extend(_symbol(row, text.logprobs) for row in scores)

        on_logits = score if text.echo and text.logprobs is not None else None
        self._decoder.begin(
            text.prompt, text.sampling, slot=slot, stream=text.stream, on_logits=on_logits
        )
        self.num_read += len(text.prompt)
        if text.echo:
            text.on_piece(Piece(echoed(text, self.model.tokenizer, scored), echoed=True))
        if not text.length:
            output.finish = "length"
            self._leave(slot)
            self.num_finished += 1
            text.on_piece(Piece([], "length"))

    def _launch(self) -> tuple[Callable[[], Any], dict[int, Output]]:
        """Launch steps of all texts; return a function that waits for their rows, and the texts."""
        outputs = {**self._running}
        steps = min(self._steps, *(output.unlaunched for output in outputs.values()))
        scores = any(output.text.logprobs is not None for output in outputs.values())
        rows = []
        for _ in range(steps):
            self._decoder.step()
            ids, logits = self._decoder.last, self._decoder.logits
            assert logits is not None  # of the step
            rows.append(_scores(logits, ids) if scores else ids.float())
        for slot, output in outputs.items():
            output.unlaunched -= steps
            if not output.unlaunched:
                self._leave(slot)
        return copy_to_host(torch.stack(rows)), outputs

    def _deliver(self, fetch: Callable[[], Any], outputs: dict[int, Output]) -> None:
        rows = fetch()
        for slot, output in outputs.items():
            text = output.text
            if output.finish or text.cancelled:
                continue
            before = output.left
            symbols = output.take(_symbol(step[slot], text.logprobs) for step in rows)
            self.num_generated += before - output.left
            if output.finish:
                self.num_finished += 1
                if self._running.get(slot) is output:
                    self._leave(slot)
            if symbols or output.finish:
                text.on_piece(Piece(symbols, output.finish))

    def _leave(self, slot: int) -> None:
        self._decoder.end(slot, 0)
        del self._running[slot]


def _scores(logits: Tensor, ids: Tensor) -> Tensor:
    """Compute log probabilities of symbols, and the likeliest ones.

    Args:
        logits: (N, V).
        ids: (N, 1) int64, the symbols.

    Returns:
        (N, 2 + 2 k) float32: a symbol, its log probability, the k likeliest symbols, theirs.
        Symbols are below 2^24, so they are exact.
    """
    logprobs = logits.float().log_softmax(-1).clamp(min=MIN_LOGPROB)
    likeliest = logprobs.topk(min(MAX_LOGPROBS, logprobs.shape[1]))
    columns = ids.float(), logprobs.gather(1, ids), likeliest.indices.float(), likeliest.values
    return torch.cat(columns, dim=1)


def _symbol(row: Sequence[float], logprobs: int | None) -> Symbol:
    """Return the symbol of a row of `_scores`, with the number of likeliest ones asked for."""
    if logprobs is None:
        return Symbol(int(row[0]))
    half = len(row) // 2 + 1
    likeliest = zip(map(int, row[2:half][:logprobs]), row[half:][:logprobs], strict=True)
    return Symbol(int(row[0]), b"", row[1], tuple(likeliest))
