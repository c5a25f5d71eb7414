"""`arb generate`: text generation from a saved model."""

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
    one_path,
)
from arbcli.commands._saved import saved_config
from arbcli.errors import ArbError
from arbcli.infer.option_checks import check_ahead, check_fills, check_masked_option
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
"""Default number of bytes, or tokens, to generate."""
MOST_PROMPT_BYTES = 2**26
"""Maximum size of a prompt, or of a file of prompts."""

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
            help="Text to continue, or - for stdin. [default: interactive on a terminal, else a"
            " newline]",
        ),
    ] = None,
    prompt_file: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE",
            help="File with a text to continue, or a sound or picture, whose second half is"
            " generated.",
        ),
    ] = None,
    infill: Annotated[
        str | None,
        typer.Option(
            metavar="TEXT",
            help="Models that fill holes only: text to complete, with an ellipsis, U+2026, for each"
            " hole of --length bytes. [default length: 32]",
        ),
    ] = None,
    steps: Annotated[
        int | None,
        typer.Option(
            min=1,
            max=2**24,
            help="Masked models only: number of forward passes that fill all holes; fewer are"
            " faster. [default: one for each byte]",
        ),
    ] = None,
    keep: Annotated[
        float | None,
        typer.Option(
            min=0, max=1, help="Fraction of a sound or picture used as prompt. [default: 0.5]"
        ),
    ] = None,
    out: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE",
            help="Write the generated sound or picture: .wav, .flac, .ogg, .png, .jpg or .webp.",
        ),
    ] = None,
    prompts: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE",
            help="Continue many prompts in batches: JSON lines, - for stdin. Texts are printed as"
            " JSON lines.",
        ),
    ] = None,
    batch: Annotated[
        int | None,
        typer.Option(min=1, max=64, help="Prompts of --prompts in a batch. [default: 16]"),
    ] = None,
    length: Annotated[
        int | None,
        typer.Option(
            min=1,
            max=2**24,
            help="Bytes, or tokens, to generate. [default: 512, or the rest of a file]",
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
            help="Speculative decoding: maximum number of bytes per step. A head of the model, if"
            " it has one, and repetitions of the text propose them, and the model checks them."
            " The text is the same; slower on a CPU. [default: 1]",
        ),
    ] = None,
    compute: ComputeOfRun = None,
    kv: KeptIn = None,
    device: Device = None,
    backend: Backend = None,
    chats: Annotated[
        bool,
        typer.Option("--chat", help="Format the prompt as a message by the chat template."),
    ] = False,
    raw: Annotated[
        bool, typer.Option("--bytes", help="Write raw bytes rather than UTF-8.")
    ] = False,
    chunks: Annotated[
        bool,
        typer.Option(
            "--chunks",
            help="hnet presets only: print prompt and text at the end, coloured by chunk, or with"
            " marks where stdout is not a terminal.",
        ),
    ] = False,
    as_json: Json = False,
) -> None:
    """Continue a prompt: `arb generate runs/001-256x4-moment --prompt "import "`.

    The generated text, without the prompt, is streamed to stdout. On a terminal, without a prompt,
    prompts are read interactively. A model that fills holes completes the text of --infill, a
    masked one a prompt too, and the whole text is written to stdout.
    """
    if raw and as_json:
        raise ArbError("`--bytes` cannot be combined with `--json`", hint="choose one")
    if raw and out is not None:
        raise ArbError("`--bytes` cannot be combined with `--out`", hint="choose one")
    if raw and chunks:
        raise ArbError("`--bytes` cannot be combined with `--chunks`", hint="choose one")
    if prompts is None and batch is not None:
        raise ArbError("`--batch` only applies with `--prompts`", hint="add `--prompts FILE`")
    if prompt is not None and prompt_file is not None:
        raise ArbError("`--prompt` and `--prompt-file` both give a prompt", hint="give one of them")
    if keep is not None and prompt_file is None:
        raise ArbError("`--keep` only applies with `--prompt-file`", hint="give a sound or picture")
    if out is not None:
        kind_of(out)
    not_with_infill = {
        "--prompt": prompt is not None, "--prompt-file": prompt_file is not None,
        "--chat": chats, "--chunks": chunks, "--ahead": ahead is not None, "--kv": kv is not None,
    }  # fmt: skip
    for option, is_given in not_with_infill.items():
        if infill is not None and is_given:
            raise ArbError(
                f"`{option}` cannot be combined with `--infill`", hint=f"leave `{option}` out"
            )
    not_with_prompts = {
        "--prompt": prompt is not None, "--prompt-file": prompt_file is not None,
        "--out": out is not None, "--chat": chats, "--bytes": raw, "--chunks": chunks,
        "--ahead": ahead is not None, "--infill": infill is not None, "--steps": steps is not None,
        "--json": as_json,
    }  # fmt: skip
    for option, is_given in not_with_prompts.items():
        if prompts is not None and is_given:
            raise ArbError(
                f"`{option}` cannot be combined with `--prompts`",
                hint=f"leave `{option}` out",
            )
    checkpoint = find_run(one_path(run, checkpoint), loads=True)
    if prompt_file is not None:
        check_regular(prompt_file)
    next_byte_options = {
        "--chat": chats, "--chunks": chunks, "--ahead": ahead is not None, "--kv": kv is not None,
    }  # fmt: skip
    model_options = next_byte_options, ahead or 1, steps, infill is not None
    if config := saved_config(checkpoint):
        _check_model(config, *model_options)
        if chats:
            template_of(checkpoint if checkpoint.is_dir() else checkpoint.parent)
    lines = _read_lines(prompts) if prompts else []
    texts = prompt, prompt_file, infill, prompts
    is_interactive = all(text is None for text in texts) and not (raw or as_json or chunks or out)
    is_interactive = is_interactive and is_terminal()
    with LiveLine() as line, typing_dropped() if is_interactive else nullcontext():
        line.show_wait("loading")
        from arbcli.device import resolve_backend, resolve_device
        from arbcli.infer import generation  # imports torch: slow, and not needed for `arb --help`
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
    _check_model(model.config, *model_options)
    fills = infill is not None or model.config.is_masked
    conversation = Conversation(model, Path(name)) if chats and not fills else None
    if is_interactive and not fills:
        chat(model, length or LENGTH, sampling, backend, kv, conversation)
        return
    if prompt_file is not None:
        prompt_bytes, length = _read_prompt(prompt_file, checkpoint, model, keep, length)
    else:
        prompt = "\n" if prompt is None else prompt
        prompt_bytes = sys.stdin.buffer.read() if prompt == "-" else os.fsencode(prompt)
    if fills:
        parts = [prompt_bytes, b""] if infill is None else os.fsencode(infill).split(HOLE.encode())
        filled, content = fill_text(
            model, name, parts, length or HOLE_LENGTH, steps, sampling, backend=backend
        )
        _write_filled(filled, content, out, raw=raw, as_json=as_json)
        return
    length = length or LENGTH
    if chunks:
        check_chunks(model)
    read = conversation.ask(prompt_bytes) if conversation else prompt_bytes
    text_bytes, collects = bytearray(prompt_bytes), as_json or chunks or out is not None
    with _PromptProgress() as reading, TextWriter() as text:
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
            on_bytes=write_bytes if raw else text_bytes.extend if collects else text.write,
        )
    if out is not None:
        note(f"`{out}` has {write_first(out, bytes(text_bytes))}")
    depths = chunk_depths(model, bytes(text_bytes), backend) if chunks else None
    if as_json:
        emit_json(asdict(report) | ({"chunk_depths": depths} if chunks else {}))
    elif depths is not None:
        write_chunks(bytes(text_bytes), depths)
    unit = "bytes" if model.tokenizer is None else "tokens"
    bytes_per_check = report.bytes_per_check
    checks = "" if bytes_per_check is None else f", {bytes_per_check:.2f} bytes a check"
    rate, cache = f"{report.bytes_per_second:,.0f}", f"{report.cache_bytes:,}"
    note("")
    note(
        f"{report.length} {unit}, {rate} bytes/s on {place}, backend {backend}, cache of"
        f" {cache} bytes in {report.kv}{checks}"
    )


def _check_model(
    config: "ModelConfig",
    next_byte_options: dict[str, bool],
    ahead: int,
    steps: int | None,
    fills: bool,
) -> None:
    """Check that a model supports the options.

    Args:
        config: configuration of the model.
        next_byte_options: options for models that predict the next byte, each with whether it was
            given.
        ahead: maximum number of bytes per step.
        steps: value of `--steps`, if given.
        fills: whether the text has holes.

    Raises:
        ArbError: the model does not support an option.
    """
    check_masked_option(config, "--steps", steps)
    if fills:
        check_fills(config)
    for option, is_given in next_byte_options.items():
        if is_given and (config.is_masked or fills):
            raise ArbError(
                f"`{option}` only applies to text that is generated from left to right",
                hint=f"leave `{option}` out",
            )
    check_ahead(config, ahead)


class _PromptProgress:
    """Shows the progress of reading a long prompt, with the remaining time.

    The line is updated every second on a terminal, and every `PIPE_SECONDS` elsewhere.
    """

    def __init__(self) -> None:
        self._line, self._stack = LiveLine(), ExitStack()
        self._begun = time.perf_counter()
        self._next = self._begun + 1

    def __enter__(self) -> "_PromptProgress":
        return self

    def __exit__(self, *_: object) -> None:
        """Remove the line."""
        self._stack.close()

    def show(self, done: int, size: int) -> None:
        """Show that `done` of `size` symbols are read."""
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
    """Write a text whose holes were filled, and a note with the time."""
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


def _read_prompt(
    file: Path, checkpoint: Path, model: "LanguageModel", keep: float | None, length: int | None
) -> tuple[bytes, int | None]:
    """Read a file as the run reads its texts; return the prompt and the length to generate."""
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
            "a model with a tokenizer only reads text", hint="give a text file, or use a byte model"
        )
    return prompt_and_length(content, keep, length)


def _read_lines(file: Path) -> list[bytes]:
    """Read the lines of a file, or of stdin for `-`."""
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
    """Print a JSON line for each text, and a note with the speed."""
    from arbcli.infer.several import continue_several

    def write(text: "TextReport") -> None:
        emit_json(asdict(text))

    done = continue_several(model, requests, batch, backend=backend, kv=kv, on_text=write)
    kind = "bytes" if model.tokenizer is None else "tokens"
    note(
        f"{done.texts} texts, {done.length:,} {kind}, {done.length / done.seconds:,.0f} {kind}/s on"
        f" {done.device}, backend {done.backend}, {done.batch} at once"
    )
