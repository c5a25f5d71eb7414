"""`arb generate`: text from a saved model."""

import os
import sys
import time
from contextlib import ExitStack, nullcontext
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from arbcli.chat_template import template_of
from arbcli.commands._chat import chat
from arbcli.commands._options import (
    Backend,
    Checkpoint,
    ComputeOfRun,
    Device,
    Json,
    KeptIn,
    Run,
    Seed,
    find_run,
    the_one,
)
from arbcli.commands._saved import saved_config
from arbcli.errors import ArbError
from arbcli.infer.asked import check_ahead, check_fills, check_of_masked
from arbcli.media.continuing import kind_of, prompt_and_length, write_first
from arbcli.output import (
    PIPE_SECONDS,
    LiveLine,
    TextWriter,
    clock,
    emit_json,
    is_terminal,
    note,
    typing_dropped,
    write_bytes,
    write_chunks,
)
from arbcli.plain_text import plain_file
from arbcli.reading import check_regular, open_regular

LENGTH = 512
"""Bytes, or tokens, that are made by default."""
MOST_PROMPT_BYTES = 2**26
"""Of a file of prompts, or of a prompt."""

if TYPE_CHECKING:
    from arbcli.config.model import ModelConfig
    from arbcli.infer.holes import FillReport
    from arbcli.infer.several import Request, TextReport
    from arbcli.model.language_model import LanguageModel


def generate(
    run: Run = None,
    checkpoint: Checkpoint = None,
    prompt: Annotated[
        str | None,
        typer.Option(
            metavar="TEXT",
            help="What to continue, or - for stdin. [default: asked for on a terminal, else a"
            " newline]",
        ),
    ] = None,
    prompt_file: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE",
            help="A text to continue, or a sound or picture, half of which is the prompt and the"
            " rest is made.",
        ),
    ] = None,
    infill: Annotated[
        str | None,
        typer.Option(
            metavar="TEXT",
            help="Only of a model that fills holes: a text to complete, with an ellipsis, U+2026,"
            " for each hole of --length bytes. [default length: 32]",
        ),
    ] = None,
    steps: Annotated[
        int | None,
        typer.Option(
            min=1,
            max=2**24,
            help="Only of a masked model: forwards in which all holes are filled; fewer are faster."
            " [default: one for each byte]",
        ),
    ] = None,
    keep: Annotated[
        float | None,
        typer.Option(
            min=0, max=1, help="Share of a sound or picture that is the prompt. [default: 0.5]"
        ),
    ] = None,
    out: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE",
            help="Write the sound or picture that is made: .wav, .flac, .ogg, .png, .jpg or .webp.",
        ),
    ] = None,
    prompts: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE",
            help="Continue many prompts, several at once: a JSON a line, - for stdin. Texts come as"
            " JSON lines.",
        ),
    ] = None,
    batch: Annotated[
        int | None,
        typer.Option(min=1, max=64, help="How many texts of --prompts at once. [default: 16]"),
    ] = None,
    length: Annotated[
        int | None,
        typer.Option(
            min=1,
            max=2**24,
            help="Bytes, or tokens, to make. [default: 512, or the rest of a file]",
        ),
    ] = None,
    temperature: Annotated[
        float, typer.Option(min=0, help="Sampling temperature; 0 is greedy.")
    ] = 0.8,
    top_k: Annotated[
        int, typer.Option(min=1, max=2**20, help="Sample from the k likeliest bytes, or tokens.")
    ] = 256,
    top_p: Annotated[float, typer.Option(min=0, max=1, help="Nucleus (top-p) sampling.")] = 1.0,
    seed: Seed = None,
    ahead: Annotated[
        int | None,
        typer.Option(
            min=1,
            max=8,
            help="Bytes that a step makes at most: a head of the model, if it has one, and what the"
            " text repeats propose them, and the model checks them. The text is the same; on a CPU"
            " it takes longer. [default: 1]",
        ),
    ] = None,
    compute: ComputeOfRun = None,
    kv: KeptIn = None,
    device: Device = None,
    backend: Backend = None,
    chats: Annotated[
        bool,
        typer.Option("--chat", help="The prompt is a message, answered by the chat template."),
    ] = False,
    raw: Annotated[
        bool, typer.Option("--bytes", help="Write bytes as they come, not as UTF-8.")
    ] = False,
    chunks: Annotated[
        bool,
        typer.Option(
            "--chunks",
            help="Only with hnet presets: write prompt and text in the end, in colours by chunk, or"
            " with marks where stdout is not a terminal.",
        ),
    ] = False,
    as_json: Json = False,
) -> None:
    """Continue a prompt: `arb generate runs/001-256x4-moment --prompt "import "`.

    The text that follows the prompt goes to stdout as it is made. Without a prompt, on a terminal,
    it asks for one again and again. A model that fills holes completes the text of --infill, a
    masked one a prompt too, and the whole text goes to stdout.
    """
    if raw and as_json:
        raise ArbError("`--bytes` and `--json` exclude each other", hint="choose one")
    if raw and out is not None:
        raise ArbError("`--bytes` and `--out` exclude each other", hint="choose one")
    if raw and chunks:
        raise ArbError("`--chunks` marks text, and `--bytes` has none", hint="choose one")
    if prompts is None and batch is not None:
        raise ArbError("`--batch` is for several prompts", hint="give them by `--prompts FILE`")
    if prompt is not None and prompt_file is not None:
        raise ArbError("`--prompt` and `--prompt-file` both give a prompt", hint="give one of them")
    if keep is not None and prompt_file is None:
        raise ArbError("`--keep` only applies with `--prompt-file`", hint="give a sound or picture")
    if out is not None:
        kind_of(out)
    of_text = {
        "--prompt": prompt is not None, "--prompt-file": prompt_file is not None,
        "--chat": chats, "--chunks": chunks, "--ahead": ahead is not None, "--kv": kv is not None,
    }  # fmt: skip
    for option, is_given in of_text.items():
        if infill is not None and is_given:
            raise ArbError(
                f"`--infill` cannot be combined with `{option}`", hint="leave one of them out"
            )
    alone = {
        "--prompt": prompt is not None, "--prompt-file": prompt_file is not None,
        "--out": out is not None, "--chat": chats, "--bytes": raw, "--chunks": chunks,
        "--ahead": ahead is not None, "--infill": infill is not None, "--steps": steps is not None,
        "--json": as_json,
    }  # fmt: skip
    for option, is_given in alone.items():
        if prompts is not None and is_given:
            raise ArbError(
                f"`--prompts` cannot be combined with `{option}`", hint="leave one of them out"
            )
    checkpoint = find_run(the_one(run, checkpoint), loads=True)
    if prompt_file is not None:
        check_regular(prompt_file)
    of_next = {
        "--chat": chats, "--chunks": chunks, "--ahead": ahead is not None, "--kv": kv is not None,
    }  # fmt: skip
    asked = of_next, ahead or 1, steps, infill is not None
    if config := saved_config(checkpoint):
        _check_asked(config, *asked)
        if chats:
            template_of(checkpoint if checkpoint.is_dir() else checkpoint.parent)
    lines = _lines(prompts) if prompts else []
    texts = prompt, prompt_file, infill, prompts
    asks = all(text is None for text in texts) and not (raw or as_json or chunks or out)
    asks = asks and is_terminal()
    with LiveLine() as line, typing_dropped() if asks else nullcontext():
        line.show_wait("loading")
        from arbcli.device import resolve_backend, resolve_device
        from arbcli.infer import generation  # torch takes seconds, so not for `arb --help`
        from arbcli.infer.chunks import check_chunks, chunk_depths
        from arbcli.infer.conversation import Conversation
        from arbcli.infer.holes import HOLE, HOLE_LENGTH, fill_text
        from arbcli.infer.load import load_named_model
        from arbcli.infer.prompts import read_prompts

        sampling = generation.Sampling(
            temperature=temperature, top_k=top_k, top_p=top_p, seed=seed or 0
        )
        if prompts:
            requests = read_prompts(lines, str(prompts), length or LENGTH, sampling)
        else:
            requests = None
        place = resolve_device(device)
        backend = resolve_backend(backend, place)
        model, name = load_named_model(checkpoint, place, note, compute)
    if requests:
        _continue_several(model, requests, batch, backend, kv)
        return
    _check_asked(model.config, *asked)
    fills = infill is not None or model.config.is_masked
    conversation = Conversation(model, Path(name)) if chats and not fills else None
    if asks and not fills:
        chat(model, length or LENGTH, sampling, backend, kv, conversation)
        return
    if prompt_file is not None:
        given, length = _prompt_of(prompt_file, checkpoint, model, keep, length)
    else:
        prompt = "\n" if prompt is None else prompt
        given = sys.stdin.buffer.read() if prompt == "-" else os.fsencode(prompt)
    if fills:
        parts = [given, b""] if infill is None else os.fsencode(infill).split(HOLE.encode())
        filled, content = fill_text(
            model, name, parts, length or HOLE_LENGTH, steps, sampling, backend=backend
        )
        _write_filled(filled, content, out, raw=raw, as_json=as_json)
        return
    length = length or LENGTH
    if chunks:
        check_chunks(model)
    read = conversation.ask(given) if conversation else given
    made, collects = bytearray(given), as_json or chunks or out is not None
    with _ReadPrompt() as reading, TextWriter() as text:
        report = generation.continue_text(
            model,
            name,
            read,
            length,
            sampling,
            backend=backend,
            kv=kv,
            ends=conversation.ends if conversation else (),
            ahead=ahead or 1,
            on_prompt=reading.show,
            on_bytes=write_bytes if raw else made.extend if collects else text.write,
        )
    if out is not None:
        note(f"`{out}` has {write_first(out, bytes(made))}")
    depths = chunk_depths(model, bytes(made), backend) if chunks else None
    if as_json:
        emit_json(asdict(report) | ({"chunk_depths": depths} if chunks else {}))
    elif depths is not None:
        write_chunks(bytes(made), depths)
    made_of = "bytes" if model.tokenizer is None else "tokens"
    checked = report.bytes_per_check
    by_checks = "" if checked is None else f", {checked:.2f} bytes a check"
    rate, cache = f"{report.bytes_per_second:,.0f}", f"{report.cache_bytes:,}"
    note("")
    note(
        f"{report.length} {made_of}, {rate} bytes/s on {place}, backend {backend}, cache of"
        f" {cache} bytes in {report.kv}{by_checks}"
    )


def _check_asked(
    config: "ModelConfig", of_next: dict[str, bool], ahead: int, steps: int | None, fills: bool
) -> None:
    """Refuse what a model does not do.

    Args:
        config: of the model.
        of_next: options of models that predict the next byte, and whether each was given.
        ahead: bytes that a step makes.
        steps: in which holes are filled, if that was asked for.
        fills: whether there is a text with holes.

    Raises:
        ArbError: it does not.
    """
    check_of_masked(config, "--steps", steps)
    if fills:
        check_fills(config)
    for option, is_given in of_next.items():
        if is_given and (config.is_masked or fills):
            raise ArbError(f"`{option}` does not work where holes are filled", hint="leave it out")
    check_ahead(config, ahead)


class _ReadPrompt:
    """Shows how far a long prompt is read, and how long the rest takes, until all of it is.

    That is a line that is written over each second, or one in `PIPE_SECONDS`.
    """

    def __init__(self) -> None:
        self._line, self._stack = LiveLine(), ExitStack()
        self._begun = time.perf_counter()
        self._next = self._begun + 1

    def __enter__(self) -> "_ReadPrompt":
        return self

    def __exit__(self, *_: object) -> None:
        """Take the line away."""
        self._stack.close()

    def show(self, done: int, size: int) -> None:
        """Show that so many symbols of so many are read."""
        now = time.perf_counter()
        if done == size:
            self._stack.close()
        elif now >= self._next:
            if self._next == self._begun + 1:
                self._stack.enter_context(self._line)
            self._next = now + (1 if self._line.is_live else PIPE_SECONDS)
            left = (now - self._begun) * (size - done) / done
            text = f"read {done:,} of {size:,} of the prompt, {clock(left)} left"
            (self._line.show_wait if self._line.is_live else note)(text)


def _write_filled(
    report: "FillReport", content: bytes, out: Path | None, *, raw: bool, as_json: bool
) -> None:
    """Write a text whose holes were filled, and how fast that was."""
    if out is not None:
        note(f"`{out}` has {write_first(out, content)}")
    elif as_json:
        emit_json(asdict(report))
    elif raw:
        write_bytes(content)
    else:
        with TextWriter() as text:
            text.write(content)
    note("")
    note(
        f"{report.length:,} symbols filled in {report.steps:,} steps and {report.seconds:.2f} s on"
        f" {report.device}, backend {report.backend}"
    )


def _prompt_of(
    file: Path, checkpoint: Path, model: "LanguageModel", keep: float | None, length: int | None
) -> tuple[bytes, int | None]:
    """Read a file as the run's texts were read; return the prompt, and the bytes to make."""
    from arbcli.train.directory import run_conversion

    plain = plain_file(file, run_conversion(checkpoint))
    with open_regular(plain) as source:
        content = source.read(MOST_PROMPT_BYTES + 1)
    if len(content) > MOST_PROMPT_BYTES:
        raise ArbError(
            f"`{file}` has more than {MOST_PROMPT_BYTES:,} bytes", hint="give a shorter prompt"
        )
    if model.tokenizer is not None and plain != file:
        raise ArbError(
            "a model of tokens only reads text", hint="give a file of text, or a model of bytes"
        )
    return prompt_and_length(content, keep, length)


def _lines(file: Path) -> list[bytes]:
    """Read the lines of a file, or of stdin."""
    try:
        with nullcontext(sys.stdin.buffer) if str(file) == "-" else file.open("rb") as source:
            content = source.read(MOST_PROMPT_BYTES + 1)
    except OSError as error:
        why = error.strerror or type(error).__name__
        raise ArbError(
            f"cannot read `{file}`: {why}", hint="give a file, or - for stdin"
        ) from error
    if len(content) > MOST_PROMPT_BYTES:
        raise ArbError(
            f"`{file}` has more than {MOST_PROMPT_BYTES:,} bytes of prompts",
            hint="split it into several files",
        )
    return content.splitlines()


def _continue_several(
    model: "LanguageModel",
    requests: "list[Request]",
    batch: int | None,
    backend: str,
    kv: str | None,
) -> None:
    """Write a JSON line for each text, and how fast they were made."""
    from arbcli.infer.several import continue_several

    def write(text: "TextReport") -> None:
        emit_json(asdict(text))

    done = continue_several(model, requests, batch, backend=backend, kv=kv, on_text=write)
    kind = "bytes" if model.tokenizer is None else "tokens"
    note(
        f"{done.texts} texts, {done.length:,} {kind}, {done.length / done.seconds:,.0f} {kind}/s on"
        f" {done.device}, backend {done.backend}, {done.batch} at once"
    )
