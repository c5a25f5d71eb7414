"""Every refusal of an input is met: the input, and the line of the error."""

import ast
import json
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
from syntax import parsed, walk

import arbcli
from arbcli.base import run_files
from arbcli.base.errors import ArbError
from arbcli.base.run_files import COMPANIONS
from arbcli.commands import _options, _prompts, audit_memory, import_model
from arbcli.config.fields import from_fields
from arbcli.config.file import read_settings
from arbcli.config.model import BlockConfig, ModelConfig, StageConfig
from arbcli.config.model_file import model_from_toml
from arbcli.config.parts.attention import AttentionConfig
from arbcli.config.parts.mlp import MLPConfig
from arbcli.config.presets import preset
from arbcli.config.short_forms import assemble
from arbcli.config.training import train_config
from arbcli.data import chat_template, tokens
from arbcli.data import chats as chatting
from arbcli.data.chat_template import ChatTemplate, find_template, keep_template, template_of
from arbcli.data.chats import Chats
from arbcli.data.files import Conversion, check_named
from arbcli.data.opening import plain_file
from arbcli.data.text import Mixture
from arbcli.families.hnet.config import ChunkingConfig
from arbcli.families.media import continuing, pictures, sound
from arbcli.generation import conversation
from arbcli.inspect import probe, ranks
from arbcli.interop.gguf import tokens as gguf_tokens
from arbcli.interop.huggingface import companions
from arbcli.interop.huggingface.config_json import read_config
from arbcli.training import check, directory, run, teacher, token_texts

MLP, ATTENTION = MLPConfig(width=8), AttentionConfig(heads=2)
BLOCK = BlockConfig(mixer=ATTENTION, channel=MLP)
CHUNKS = ChunkingConfig(length=4)
MAIN = StageConfig(dim=16, blocks=(BLOCK,))
OUTER = StageConfig(dim=16, before=(BLOCK,), after=(BLOCK,), chunking=CHUNKS)
LLAMA = {
    "model_type": "llama", "vocab_size": 64, "hidden_size": 16, "intermediate_size": 32,
    "num_hidden_layers": 1, "num_attention_heads": 2, "num_key_value_heads": 2,
    "max_position_embeddings": 64, "rms_norm_eps": 1e-6, "tie_word_embeddings": False,
}  # fmt: skip


def text(content: bytes | str, name: str = "a.txt") -> Path:
    """Write a file where the test is."""
    path = Path(name)
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(content if isinstance(content, bytes) else content.encode())
    return path


def toml(model: str) -> Callable:
    return lambda _: read_settings(text(model, "a.toml"))


def without(package: str, call: Callable) -> Callable:
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


def masked_and_next(patch: pytest.MonkeyPatch) -> None:
    """A teacher that predicts the next byte of a model that fills holes."""
    patch.setattr(teacher, "read_saved", lambda *_: SimpleNamespace(checkpoint=None))
    patch.setattr(teacher, "saved_config", lambda _: preset("tiny"))
    config = SimpleNamespace(teacher="a", model=preset("tiny", objective="masked"))
    teacher.read_teacher(config)


def probed(**about: object) -> Callable:
    """Examine what stands for a trainer."""

    def refused(_: object) -> None:
        model = SimpleNamespace(is_masked=False, ctx=8, vocabulary=256)
        config = SimpleNamespace(model=model, batch=2)
        lm = SimpleNamespace(packed_tensors=dict, scores_in_chunks=False)
        texts = SimpleNamespace(val=SimpleNamespace(packs=False))
        trainer = SimpleNamespace(config=config, device="cpu", updater=1, model=lm, texts=texts)
        model.is_masked = bool(about.get("masked"))
        texts.val.packs = bool(about.get("packs"))
        trainer.updater = None if about.get("float") else 1
        probe.examine(trainer, 1)

    return refused


def imported(**changes: object) -> Callable:
    return lambda _: read_config(LLAMA | changes, "config.json", digits="all")


REFUSED: dict[str, tuple[Callable, str]] = {
    "empty block": (lambda _: BlockConfig(), "a block has neither mixer nor channel mixer"),
    "chunks and blocks": (
        lambda _: replace(OUTER, blocks=(BLOCK,)),
        "a stage with chunking has `blocks`, `memories` or a `router`"),
    "blocks before no chunks": (
        lambda _: replace(MAIN, before=(BLOCK,)),
        "a stage without chunking has blocks `before` or `after`"),
    "two stages without chunks": (
        lambda _: ModelConfig(ctx=8, stages=(MAIN, MAIN)), "stage 1 of 2 has no chunking"),
    "chunks of nothing": (
        lambda _: ModelConfig(ctx=8, stages=(OUTER,)),
        "stage 1 of 1 has chunking and nothing inside"),
    "preset and model": (
        toml('preset = "tiny"\n[model]\nkind = "x"\n'), "has a preset and a whole model"),
    "fields of another version": (
        toml('[model]\nkind = "x"\n'), "has no model of this version of arb"),
    "stage that is a number": (
        lambda _: model_from_toml({"stage": [7]}, "a.toml"), "`model.stage[0]` is `7`"),
    "too many entries": (
        lambda _: from_fields(StageConfig, {"dim": 8, "blocks": [{}] * 10**6}, "model.stage"),
        "`model.stage.blocks` has 1,000,000 entries, more than"),
    "unknown size": (
        lambda _: assemble("dense", {"dim": 32, "layers": 1, "heads": 2, "ffn": 8, "ctx": 8,
                                     "height": 3}),
        "has no `height`"),
    "tokens of sounds": (
        lambda _: train_config("tiny", device="cpu", backend="torch", compute="fp32",
                               sound="mulaw", tokenizer="a"),
        "`sound` needs a model of bytes, and the tokenizer reads text"),
    "mixed documents": (
        lambda _: chats(Mixture.__new__(Mixture)), "documents cannot be mixed by weights"),
    "messages without a template": (
        lambda _: chats(), "`--field messages` has messages, and no chat template lies next to"),
    "long record": (
        smaller(chatting, "RECORD_BYTES", 9,
                lambda: list(chatting._lines(text("{}\n" + 10 * "x" + "\n"), 0, 14))),
        "`a.txt` has a line of more than 9 bytes"),
    "record that is gone": (
        lambda _: list(chatting._lines(Path("gone"), 0, 9)), "cannot read `gone`"),
    "no text in files": (
        lambda _: check_named([str(text(""))], None), "there is no text in `a.txt`"),
    "field of plain texts": (
        lambda _: check_named([str(text("a"))], "body"), "`--field body` only applies to records"),
    "compressed sound": (
        lambda _: plain_file(text("a", "a.wav.gz"), Conversion()),
        "`a.wav.gz` is a compressed sound or picture"),
    "large tokenizer": (
        smaller(tokens, "LARGEST_FILE", 3, lambda: tokens.Tokenizer.read(text("four"))),
        "`a.txt` has more than 3 bytes"),
    "tokens of what is gone": (
        lambda _: tokens._tokenised(None, 0, (Path("gone"), 0, 9), SimpleNamespace(digest="")),
        "cannot read `gone`"),
    "templates without jinja": (
        without("jinja2", lambda: templates("x")), "needs the package jinja2, which is not"),
    "tokenizers without the package": (
        without("tokenizers", lambda: tokens.Tokenizer(b"{}", "it")),
        "`it` needs the package tokenizers, which is not installed"),
    "endless template": (
        smaller(chat_template, "MOST_CHARACTERS", 9, lambda: templates("0123456789").render([])),
        "it writes more than 9 characters"),
    "large template": (
        smaller(chat_template, "LARGEST", 3,
                lambda: find_template(text("four", "chat_template.jinja").parent / "x")),
        "has more than 3 bytes"),
    "run without a template": (lambda _: template_of(Path()), "`.` has no chat template"),
    "chat of a model without a template": (
        lambda _: conversation.Conversation(SimpleNamespace(tokenizer=None), Path("run/step-1")),
        "`run` has no chat template"),
    "long prompt file": (
        smaller(_prompts, "MOST_PROMPT_BYTES", 3, lambda: _prompts.read_lines(text("four"))),
        "`a.txt` has more than 3 bytes of prompts"),
    "prompt of a file that is gone": (
        lambda _: _prompts.read_lines(Path("gone")), "cannot read `gone`"),
    "import of a file": (
        lambda _: import_model.import_model(text("a")), "`a.txt` is not a folder"),
    "audit of other ranks": (
        lambda _: audit_memory._check_ranks(4, 2, what_if=False, snapshot=None),
        "`--ranks` is 4, and `torchrun` has started 2 processes"),
    "audit of other changes": (
        lambda _: audit_memory._check_ranks(4, 1, what_if=True, snapshot=None),
        "`--what-if` only works with a single process"),
    "snapshot of ranks": (
        lambda _: audit_memory._check_ranks(4, 4, what_if=False, snapshot=Path("a")),
        "`--snapshot` only works with a single process"),
    "folder without a checkpoint": (
        lambda _: _options.find_run(text("", "run/config.json").parent, loads=True),
        "there is no checkpoint in `run`"),
    "merge of three": (
        lambda _: gguf_tokens._merges([["a", "b"], 3], Path("a.json")),
        "`a.json` has a merge that is not a pair of texts"),
    "half a character": (
        lambda _: gguf_tokens._read(text('{"a": "\\ud800"}', "a.json")), "`a.json` is not JSON"),
    "large companion": (
        smaller(companions, "LARGEST", 3, lambda: companions.read_companion(text("four"))),
        "`a.txt` has more than 3 bytes"),
    "companions over a file": (
        lambda _: companions.copy_companions(
            text("{}", "there/config.json").parent, text("", "made") / "x"),
        "cannot make `made/x`"),
    "companions of another model": (
        lambda _: companions.companions_of(
            text(json.dumps(LLAMA), f"{COMPANIONS}/config.json").parents[1], preset("tiny")),
        "came with another model than the one of `.`"),
    "biases of a Mistral": (
        imported(model_type="mistral", attention_bias=True), "`attention_bias` is `True`"),
    "window of a Llama": (imported(sliding_window=4), "`sliding_window` is `4`"),
    "float baseline of a probe": (probed(float=True), "need a trainer of ternary weights"),
    "masked model of a probe": (
        probed(masked=True), "a probe reads bytes from left to right, and the model predicts"),
    "documents of a probe": (probed(packs=True), "a probe reads plain text, and these are"),
    "ranks without a reduce dtype": (
        lambda _: ranks._report(SimpleNamespace(reduce_dtype=None), [], None),
        "processes can only share a run whose `reduce_dtype` is set"),
    "rest of a text": (
        lambda _: continuing.prompt_and_length(b"a text", 0.5, 9),
        "`--keep` only applies to a sound or a picture"),
    "form of pictures": (lambda _: pictures.check_form("cmyk"), "`picture` is `cmyk`"),
    "size of pictures": (
        lambda _: pictures.check_form("rgb:99999x1"), "`picture` is `rgb:99999x1`"),
    "pictures without Pillow": (
        without("PIL", lambda: pictures._package("Image", Path("a.png"))),
        "`a.png` needs the package Pillow, which is not installed"),
    "sounds without soundfile": (
        without("soundfile", lambda: sound._package(Path("a.wav"))),
        "`a.wav` needs the package soundfile, which is not installed"),
    "sound without a frame": (
        lambda _: sound._check(sound.SoundHeader("mulaw", 8000, 1, 0), Path("a.wav")),
        "its header says 0 frames"),
    "check of no run": (lambda _: check.check_run(Path("gone")), "there is no run at `gone`"),
    "resume of no run": (
        lambda _: run.resume_run(Path("gone"), run.Observer()), "there is no run at `gone`"),
    "documents of bytes": (
        lambda _: token_texts._document_texts(None, None, SimpleNamespace(field="messages")),
        "`--field messages` needs a tokenizer, as it has documents"),
    "text of a folder": (
        lambda _: directory.held_out_text(Path()), "`.` has no held-out text"),
    "student that fills holes": (masked_and_next, "models that fill holes cannot have a teacher"),
    "name of a file": (
        lambda _: run_files.step_of(Path("model.safetensors")),
        "`model.safetensors` does not name a checkpoint"),
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


def test_every_refusal_has_a_hint():
    without = []
    for path in Path(arbcli.__file__).parent.rglob("*.py"):
        for call in walk(parsed(path)):
            if isinstance(call, ast.Call) and getattr(call.func, "id", "") == "ArbError":
                hints = [each.value for each in call.keywords if each.arg == "hint"]
                if not hints or getattr(hints[0], "value", "") is None:
                    without.append(f"{path.name}:{call.lineno}")
    assert without == []
