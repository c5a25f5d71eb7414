"""`arb generate`: text generation from a saved model."""

import os
import sys
import time
from dataclasses import asdict
from functools import partial
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from arbcli.base.errors import ArbError, counted
from arbcli.base.output import (
    LiveLine,
    TextWriter,
    emit_json,
    is_stdout_terminal,
    is_terminal,
    note,
    write_bytes,
    write_chunks,
)
from arbcli.base.reading import check_regular
from arbcli.base.run_files import run_of
from arbcli.commands import _options as opt
from arbcli.commands._chat import chat
from arbcli.commands._help import combining, options_given
from arbcli.commands._outputs import check_file
from arbcli.commands._prompts import PromptProgress, read_lines, read_prompt, stdin_has_data
from arbcli.data.chat_template import template_of
from arbcli.families import MEDIA, medium_of
from arbcli.families.media.continuing import Completion, write_first
from arbcli.generation.option_checks import check_ahead, check_fills, check_masked_option

LENGTH = 512
"""Default number of bytes, or tokens, to generate."""
EXCLUDED = {
    "--bytes": ("--json", "--out", "--chunks"),
    "--echo": ("--json", "--out", "--chunks", "--prompts", "--infill"),
    "--prompt-file": ("--prompt",),
    "--infill": ("--prompt", "--prompt-file", "--chat", "--chunks", "--ahead", "--kv"),
    "--prompts": (
        "--prompt", "--prompt-file", "--out", "--bytes", "--chunks", "--ahead", "--infill",
        "--steps", "--json",
    ),
}  # fmt: skip
"""Options that cannot be combined with another one."""
NEEDED = {"--batch": "--prompts", "--system": "--chat", "--keep": "--prompt-file"}
"""Options that only apply with another one."""
NOT_INTERACTIVE = (
    "--prompt", "--prompt-file", "--infill", "--prompts", "--out", "--bytes", "--chunks", "--json",
)  # fmt: skip
"""Options with which the command reads no prompts from a terminal."""

if TYPE_CHECKING:
    from arbcli.config.model import ModelConfig
    from arbcli.generation.batch import Request
    from arbcli.generation.conversation import Conversation
    from arbcli.model.language_model import LanguageModel


_PROMPT = typer.Option(
    metavar="TEXT",
    help="Text to continue, or - for stdin. [default: interactive on a terminal, else a newline]",
)
_PROMPT_FILE = typer.Option(
    metavar="FILE",
    help="File with a text to continue, or a sound or picture, whose second half is"
    " generated with --out, and the text after it with --keep 1.",
)
_INFILL = typer.Option(
    metavar="TEXT",
    help="Models that fill holes only: text to complete, with an ellipsis, U+2026, for each"
    " hole of --length bytes. [default length: 32]",
)
_STEPS = typer.Option(
    min=1,
    max=2**24,
    help="Masked models only: number of forward passes that fill all holes; fewer are"
    " faster. [default: one for each byte]",
)
_KEEP = typer.Option(
    min=0, max=1, help="Fraction of a sound or picture used as prompt. [default: 0.5]"
)
_OUT = typer.Option(
    metavar="FILE",
    help="Write the generated sound or picture: .wav, .flac, .ogg, .png, .jpg or .webp.",
)
_PROMPTS = typer.Option(
    metavar="FILE",
    help="Continue many prompts in batches: JSON lines, - for stdin. Texts are printed as"
    " JSON lines.",
)
_BATCH = typer.Option(min=1, max=64, help="Prompts of --prompts in a batch. [default: 16]")
_LENGTH = typer.Option(
    min=1, max=2**24, help="Bytes, or tokens, to generate. [default: 512, or the rest of a file]"
)
_TEMPERATURE = typer.Option(min=0, help="Sampling temperature; 0 is greedy.")
_TOP_K = typer.Option(min=1, max=2**20, help="Sample from the k likeliest bytes, or tokens.")
_AHEAD = typer.Option(
    min=1,
    max=8,
    help="Speculative decoding: maximum number of bytes per step. A head of the model, if"
    " it has one, and repetitions of the text propose them, and the model checks them."
    " The text is the same; slower on a CPU. [default: 1]",
)
_CHATS = typer.Option("--chat", help="Format each prompt as a message by the chat template.")
_SYSTEM = typer.Option(metavar="TEXT", help="System message of --chat.")
_RAW = typer.Option("--bytes", help="Write raw bytes rather than UTF-8.")
_CHUNKS = typer.Option(
    "--chunks",
    help="hnet presets only: print prompt and text at the end, coloured by chunk, or with"
    " marks where stdout is not a terminal.",
)
_ECHO = typer.Option(
    "--echo/--no-echo", help="Write the prompt before the text. [default: on a terminal, for text]"
)


@combining(EXCLUDED, NEEDED)
def generate(
    context: typer.Context,
    run: opt.Run = None,
    checkpoint: opt.Checkpoint = None,
    prompt: Annotated[str | None, _PROMPT] = None,
    prompt_file: Annotated[Path | None, _PROMPT_FILE] = None,
    infill: Annotated[str | None, _INFILL] = None,
    steps: Annotated[int | None, _STEPS] = None,
    keep: Annotated[float | None, _KEEP] = None,
    out: Annotated[Path | None, _OUT] = None,
    prompts: Annotated[Path | None, _PROMPTS] = None,
    batch: Annotated[int | None, _BATCH] = None,
    length: Annotated[int | None, _LENGTH] = None,
    temperature: Annotated[float, _TEMPERATURE] = 0.8,
    top_k: Annotated[int, _TOP_K] = 256,
    top_p: Annotated[float, typer.Option(min=0, max=1, help="Nucleus (top-p) sampling.")] = 1.0,
    seed: opt.Seed = None,
    ahead: Annotated[int | None, _AHEAD] = None,
    compute: opt.ComputeOfRun = None,
    kv: opt.CacheDtype = None,
    device: opt.Device = None,
    backend: opt.Backend = None,
    chats: Annotated[bool, _CHATS] = False,
    system: Annotated[str | None, _SYSTEM] = None,
    raw: Annotated[bool, _RAW] = False,
    chunks: Annotated[bool, _CHUNKS] = False,
    echo: Annotated[bool | None, _ECHO] = None,
    as_json: opt.Json = False,
) -> None:
    """Continue a prompt: `arb generate runs/book --prompt "import "`.

    The generated text is streamed to stdout, on a terminal after the prompt. On a terminal, without
    a prompt, prompts are read interactively. A model that fills holes completes the text of
    --infill, a masked one a prompt too, and the whole text is written to stdout.
    """
    options = options_given(context)
    if out is not None:
        check_file(out, "--out", tuple(chain(*MEDIA.values())))
    checkpoint = opt.find_run(opt.one_path(run, checkpoint), loads=True)
    if prompt_file is not None:
        check_regular(prompt_file)
    if config := opt.config_in_header(checkpoint):
        _check_model(config, options, ahead, steps)
        if chats:
            template_of(run_of(checkpoint))
    lines = read_lines(prompts) if prompts else []
    is_interactive = options.isdisjoint(NOT_INTERACTIVE) and is_terminal()
    with LiveLine("loading"):
        from arbcli.families.hnet import boundaries as chunking
        from arbcli.families.masked.holes import HOLE, HOLE_LENGTH, fill_text
        from arbcli.generation.conversation import Conversation
        from arbcli.generation.generation import continue_text
        from arbcli.generation.prompts import read_prompts
        from arbcli.generation.sampling import Sampling

        sampling = Sampling(temperature=temperature, top_k=top_k, top_p=top_p, seed=seed or 0)
        name = str(prompts)
        requests = read_prompts(lines, name, length or LENGTH, sampling) if prompts else []
        model, name, torch_device, backend = opt.open_model(checkpoint, device, backend, compute)
    conversation = Conversation(model, Path(name), system) if chats else None
    if requests:
        _continue_batch(model, requests, batch, backend, kv, conversation)
        return
    _check_model(model.config, options, ahead, steps)
    fills = infill is not None or model.config.is_masked
    if is_interactive and not fills:
        chat(model, length or LENGTH, sampling, backend, kv, conversation, ahead or 1)
        return
    if prompt_file is not None:
        kinds = [kind for kind in MEDIA if raw or (out and medium_of(out.name) == kind)]
        start, length = read_prompt(prompt_file, checkpoint, model, keep, length, kinds)
    elif prompt == "-":
        start = sys.stdin.buffer.read()
    else:
        if prompt is None and infill is None and stdin_has_data():
            note("stdin is not read: add `--prompt -` to continue the text from it")
        start = os.fsencode("\n" if prompt is None else prompt)
    if fills:
        parts = [start, b""] if infill is None else os.fsencode(infill).split(HOLE.encode())
        size = length or HOLE_LENGTH
        filled, content = fill_text(model, name, parts, size, steps, sampling, backend=backend)
        _write(content, asdict(filled), out, raw=raw, as_json=as_json)
        speed = f"{counted(filled.length, 'symbol')} filled in {counted(filled.steps, 'step')}"
        _note_end(f"{speed} and {filled.seconds:.2f} s on {filled.device}, backend {backend}")
        return
    if chunks:
        chunking.check_chunks(model)
    collected, collects = bytearray(start), as_json or chunks or out is not None
    ends = None if out is None else partial(Completion(out).is_complete, collected)
    is_given = prompt is not None or prompt_file is not None
    echoes = is_given and not (raw or chats) and is_stdout_terminal() if echo is None else echo
    with PromptProgress() as reading, TextWriter() as writer:
        if echoes and not collects:
            (write_bytes if raw else writer.write)(start)
        report = continue_text(
            model,
            name,
            conversation.ask(start) if conversation else start,
            length or LENGTH,
            sampling,
            backend=backend,
            kv=kv,
            ends=conversation.ends if conversation else None,
            ahead=ahead or 1,
            on_prompt=reading.show,
            on_bytes=write_bytes if raw else collected.extend if collects else writer.write,
            is_complete=ends,
        )
    if collects:
        content = bytes(collected)
        depths = chunking.chunk_depths(model, content, backend) if chunks else None
        extra = {"chunk_depths": depths} if chunks else {}
        _write(content, asdict(report) | extra, out, as_json=as_json, depths=depths)
    checks, period = report.bytes_per_check, report.period
    _note_end(
        f"{report.length} {_unit(model)}, {report.bytes_per_second:,.0f} bytes/s on {torch_device},"
        f" backend {backend}, cache of {report.cache_bytes:,} bytes in {report.kv}"
        + ("" if checks is None else f", {checks:.2f} bytes a check")
        + ("" if period is None else f"; the text repeats with a period of {period} bytes")
    )


def _check_model(
    config: "ModelConfig", options: set[str], ahead: int | None, steps: int | None
) -> None:
    """Check that a model supports the options.

    Raises:
        ArbError: the model does not support an option.
    """
    check_masked_option(config, "--steps", steps)
    if "--infill" in options:
        check_fills(config)
    for option in ("--chat", "--chunks", "--ahead", "--kv"):
        if option in options and config.is_masked:
            raise ArbError(
                f"`{option}` only applies to text that is generated from left to right",
                f"leave `{option}` out",
            )
    check_ahead(config, ahead or 1)


def _write(
    content: bytes,
    report: dict[str, Any],
    out: Path | None,
    *,
    as_json: bool,
    raw: bool = False,
    depths: list[int] | None = None,
) -> None:
    """Write a complete text: to a file, and as JSON, coloured chunks, bytes or characters."""
    if out is not None:
        note(f"`{out}` has {write_first(out, content)}")
    if as_json:
        emit_json(report)
    elif depths is not None:
        write_chunks(content, depths)
    elif raw:
        write_bytes(content)
    elif out is None:
        with TextWriter() as text:
            text.write(content)


def _note_end(message: str) -> None:
    note("")  # the text may have no newline at its end
    note(message)


def _unit(model: "LanguageModel") -> str:
    return "bytes" if model.tokenizer is None else "tokens"


def _continue_batch(
    model: "LanguageModel",
    requests: "list[Request]",
    batch: int | None,
    backend: str,
    kv: str | None,
    conversation: "Conversation | None",
) -> None:
    """Print a JSON line for each text, and a note with the speed."""
    from arbcli.generation.batch import check_batch, continue_batch

    encode = None if conversation is None else conversation.prompt_tokens
    started, length = time.perf_counter(), 0
    for text in continue_batch(model, requests, batch, backend=backend, kv=kv, encode=encode):
        emit_json(asdict(text))
        length += text.length
    unit, rate = _unit(model), length / (time.perf_counter() - started)
    note(
        f"{len(requests)} texts, {length:,} {unit}, {rate:,.0f} {unit}/s on {model.device},"
        f" backend {backend}, {min(check_batch(batch), len(requests))} at once"
    )
