"""Every refusal of an input is met: the input, and the line of the error."""

import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest

from arbcli.base.errors import ArbError
from arbcli.commands import audit_memory
from arbcli.config.fields import build_dataclass
from arbcli.config.file import read_settings
from arbcli.config.model import BlockConfig, ModelConfig, StageConfig
from arbcli.config.parts.attention import AttentionConfig
from arbcli.config.parts.mlp import MLPConfig
from arbcli.config.short_forms import assemble
from arbcli.data import chats as chatting
from arbcli.data import tokens
from arbcli.data.chat_template import ChatTemplate, keep_template, template_of
from arbcli.data.chats import Chats
from arbcli.data.files import Conversion
from arbcli.data.opening import plain_file
from arbcli.data.text import Mixture
from arbcli.families.hnet.config import ChunkingConfig
from arbcli.families.media import continuing
from arbcli.generation import conversation
from arbcli.inspect import ranks
from arbcli.interop.gguf import tokens as gguf_tokens

MLP, ATTENTION = MLPConfig(width=8), AttentionConfig(heads=2)
BLOCK = BlockConfig(mixer=ATTENTION, channel=MLP)
CHUNKS = ChunkingConfig(length=4)
MAIN = StageConfig(dim=16, blocks=(BLOCK,))
OUTER = StageConfig(dim=16, before=(BLOCK,), after=(BLOCK,), chunking=CHUNKS)


def text(content: bytes | str, name: str = "a.txt") -> Path:
    """Write a file where the test is."""
    path = Path(name)
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(content if isinstance(content, bytes) else content.encode())
    return path


def toml(model: str) -> Callable:
    return lambda _: read_settings(text(model, "a.toml"))


def hide_package(package: str, call: Callable) -> Callable:
    """Call where a package is not installed."""

    def refused(patch: pytest.MonkeyPatch) -> None:
        for name in [*sys.modules]:
            if name == package or name.startswith(f"{package}."):
                patch.setitem(sys.modules, name, None)
        patch.setitem(sys.modules, package, None)
        call()

    return refused


def smaller(module: object, name: str, size: int, call: Callable) -> Callable:
    """Call where a limit is smaller."""

    def refused(patch: pytest.MonkeyPatch) -> None:
        patch.setattr(module, name, size)
        call()

    return refused


def chats(source: object = None, field: str = "messages") -> Chats:
    source = SimpleNamespace() if source is None else source
    return Chats(source, field, SimpleNamespace(), None, 16)


def templates(source: str) -> ChatTemplate:
    return ChatTemplate(source, "a template", {})


REFUSED: dict[str, tuple[Callable, str]] = {
    "empty block": (lambda _: BlockConfig(), "a block has neither mixer nor channel mixer"),
    "chunks and blocks": (
        lambda _: replace(OUTER, blocks=(BLOCK,)),
        "a stage with chunking has `blocks`, `memories` or a `router`"),
    "two stages without chunks": (
        lambda _: ModelConfig(ctx=8, stages=(MAIN, MAIN)), "stage 1 of 2 has no chunking"),
    "preset and model": (
        toml('preset = "tiny"\n[model]\nkind = "x"\n'), "has a preset and a whole model"),
    "fields of another version": (
        toml('[model]\nkind = "x"\n'), "has no model of this version of arb"),
    "too many entries": (
        lambda _: build_dataclass(StageConfig, {"dim": 8, "blocks": [{}] * 10**6}, "model.stage"),
        "`model.stage.blocks` has 1,000,000 entries, more than"),
    "unknown size": (
        lambda _: assemble("dense", {"dim": 32, "layers": 1, "heads": 2, "ffn": 8, "ctx": 8,
                                     "height": 3}),
        "has no `height`"),
    "mixed documents": (
        lambda _: chats(Mixture.__new__(Mixture)), "documents cannot be mixed by weights"),
    "messages without a template": (
        lambda _: chats(), "`--field messages` has messages, and no chat template lies next to"),
    "long record": (
        smaller(chatting, "RECORD_BYTES", 9,
                lambda: list(chatting._lines(text("{}\n" + 10 * "x" + "\n"), 0, 14))),
        "`a.txt` has a line of more than 9 bytes"),
    "compressed sound": (
        lambda _: plain_file(text("a", "a.wav.gz"), Conversion()),
        "`a.wav.gz` is a compressed sound or picture"),
    "name of no file": (
        lambda _: plain_file(text('{"a": [{"sound": "\\u0000.wav"}]}', "a.jsonl"),
                             Conversion(field="a")),
        "embedded null byte"),
    "large tokenizer": (
        smaller(tokens, "MAX_FILE_BYTES", 3, lambda: tokens.Tokenizer.read(text("four"))),
        "`a.txt` has more than 3 bytes"),
    "templates without jinja": (
        hide_package("jinja2", lambda: templates("x")), "needs the package jinja2, which is not"),
    "tokenizers without the package": (
        hide_package("tokenizers", lambda: tokens.Tokenizer(b"{}", "it")),
        "`it` needs the package tokenizers, which is not installed"),
    "long template": (lambda _: templates("a" * 2**19), "it has more than 262,144 characters"),
    "run without a template": (lambda _: template_of(Path()), "`.` has no chat template"),
    "chat of a model without a template": (
        lambda _: conversation.Conversation(SimpleNamespace(tokenizer=None), Path("run/step-1")),
        "`run` has no chat template"),
    "audit of other ranks": (
        lambda _: audit_memory._check_ranks(4, 2),
        "`--ranks` is 4, and `torchrun` has started 2 processes"),
    "half a character": (
        lambda _: gguf_tokens._read(text('{"a": "\\ud800"}', "a.json")), "`a.json` is not JSON"),
    "ranks without a reduce dtype": (
        lambda _: ranks._report(SimpleNamespace(reduce_dtype=None), [], None),
        "processes can only share a run whose `reduce_dtype` is set"),
    "rest of a text": (
        lambda _: continuing.prompt_and_length(b"a text", 0.5, 9),
        "`--keep` only applies to a sound or a picture"),
    "documents of bytes": (
        lambda _: chatting.open_documents(None, "messages", None, "", 8),
        "`--field messages` needs a tokenizer, as it has documents"),
    "template that is kept nowhere": (
        lambda _: keep_template(
            text("x", "there/chat_template.jinja").with_name("tokenizer.json"), text("", "file")),
        "cannot make `file/hugging_face`"),
}  # fmt: skip


@pytest.mark.parametrize("name", REFUSED)
def test_refusal_shows_the_given_value(name, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    call, said = REFUSED[name]
    with pytest.raises((ArbError, ValueError, TypeError)) as caught:
        call(monkeypatch)
    assert said in str(caught.value)
    if isinstance(caught.value, ArbError):
        assert caught.value.hint
