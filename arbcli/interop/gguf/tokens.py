"""A tokenizer as keys of GGUF: a byte-level BPE, from `tokenizer.json`.

llama.cpp splits text by rules of its own, which have names. The name follows from the pattern or
the steps of `pre_tokenizer`; a tokenizer with others is refused. Tokens that a model has beyond
those of its tokenizer have a name each and are never made.
"""

import json
from itertools import chain
from pathlib import Path
from typing import Any

from arbcli.base.errors import ArbError
from arbcli.base.reading import ALTERED, check_schema, is_of, parse_json, read_json
from arbcli.base.run_files import CONFIG
from arbcli.config.model import MAX_SIZE, ModelConfig
from arbcli.data.chat_template import template_sources
from arbcli.data.special_tokens import GENERATION, folders_of, special_tokens, stop_tokens
from arbcli.data.tokens import Tokenizer
from arbcli.interop.gguf.container import BOOL, INT32, STRING, UINT32
from arbcli.interop.huggingface.companions import read_companion

NORMAL, CONTROL, USER_DEFINED, UNUSED = 1, 3, 4, 5
"""Types of tokens."""
SCHEMA = {
    "model": dict, "model.type": str, "model.vocab": dict[str, int], "model.merges": list,
    "added_tokens": list | None, "pre_tokenizer": dict | None, "post_processor": dict | None,
    "normalizer": dict | None,
}  # fmt: skip
"""Fields of `tokenizer.json` that are read."""
_WORDS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|"
_REST = r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
BYTES_ONLY = {"add_prefix_space": False, "use_regex": False}
BYTES_AND_WORDS = {"add_prefix_space": False, "use_regex": True}
"""Options of a `ByteLevel` step that decide tokens."""
PATTERNS = {_WORDS + r"\p{N}{1,3}" + _REST: "llama-bpe", _WORDS + r"\p{N}" + _REST: "qwen2"}
"""Names of the rules of llama.cpp by the pattern of a `Split`."""
STEPS: dict[tuple[str, ...], str] = {("ByteLevel",): "gpt-2", ("Digits", "ByteLevel"): "smollm"}
"""The same by the steps of a `pre_tokenizer` without a `Split`."""
NORMALIZERS = (None, "NFC")
"""Kinds of normalizers: llama.cpp has none, and text is almost always in NFC already."""
PLAIN_MODEL: dict[str, tuple[Any, ...]] = {
    "dropout": (None, 0), "continuing_subword_prefix": (None, ""), "end_of_word_suffix": (None, ""),
    "byte_fallback": (None, False),
}  # fmt: skip
"""Options of a model and the values that GGUF can hold."""
PLAIN_ADDED = ("single_word", "lstrip", "rstrip")
"""Options of an added token, which must be off."""
NUL = "\u0100"
"""Text of the token of byte 0, which no text has."""
HINT = "use `--to hf`, where the tokenizer goes along as it is"


def token_keys(
    path: Path, companions: Path | None, config: ModelConfig
) -> dict[str, tuple[int, Any]]:
    """Describe the tokenizer of a model.

    Args:
        path: path of its `tokenizer.json`.
        companions: folder of files that came with the model; None is none.
        config: configuration of the model, whose vocabulary may exceed the tokenizer's.

    Raises:
        ArbError: the file cannot be read, or its kind is not supported.
    """
    tokenizer = _read(path)
    if tokenizer["model"]["type"] != "BPE" or tokenizer["model"].get("byte_fallback"):
        raise ArbError(
            f"`{path}` is not byte-level BPE, the one kind that is written to GGUF", HINT
        )
    _check_options(tokenizer, path)
    tokens: list[str | None] = [None] * config.vocabulary
    kinds = [UNUSED] * config.vocabulary

    def place(text: Any, index: Any, kind: int) -> None:
        if not (is_of(text, str) and is_of(index, int) and 0 <= index < config.vocabulary):
            raise ArbError(f"`{path}` has a token that the model lacks: {text!r:.60}", ALTERED)
        tokens[index], kinds[index] = text, kind

    for text, index in tokenizer["model"]["vocab"].items():
        place(text, index, NORMAL)
    for added in tokenizer.get("added_tokens") or ():
        check_schema(added, {"content": str, "id": int, "special": bool}, f"`{path}`", ALTERED)
        place(added["content"], added["id"], CONTROL if added["special"] else USER_DEFINED)
    reader = Tokenizer.read(path)
    ends = _ends(companions) if companions else {}
    for folder in folders_of(path):
        named = special_tokens(folder)
        for kind, key in (("bos", "bos_token"), ("eos", "eos_token"), ("padding", "pad_token")):
            token = reader.special(named.get(key, ""))
            if token is not None:
                ends.setdefault(kind, token)
    if reader.beginning:
        if len(reader.beginning) > 1:
            raise _refused(path, f"{len(reader.beginning)} tokens before a text")
        ends["bos"] = reader.beginning[0]
    stops = stop_tokens(reader, path)
    if "eos" not in ends:  # without one, llama.cpp ends texts at token 11
        unread = (token for token in range(config.vocabulary) if kinds[token] in (CONTROL, UNUSED))
        end = next(chain(stops, unread), tokenizer["model"]["vocab"].get(NUL))
        ends |= {} if end is None else {"eos": end}
    others = [token for token in stops if token != ends.get("eos")]
    if others:  # llama.cpp ends texts at these, too
        ends["eot"] = others[0]
    sources = chain.from_iterable(map(template_sources, folders_of(path)))
    template = next((source for _, source in sources), None)
    keys = {
        "tokenizer.ggml.model": (STRING, "gpt2"),
        "tokenizer.ggml.pre": (STRING, _rules(tokenizer, path)),
        "tokenizer.ggml.tokens": (
            STRING,
            [f"[PAD{i}]" if text is None else text for i, text in enumerate(tokens)],
        ),
        "tokenizer.ggml.token_type": (INT32, kinds),
        "tokenizer.ggml.merges": (STRING, _merges(tokenizer["model"]["merges"], path)),
        "tokenizer.ggml.add_bos_token": (BOOL, bool(reader.beginning)),
        "tokenizer.ggml.add_eos_token": (BOOL, False),
    }
    keys |= {f"tokenizer.ggml.{name}_token_id": (UINT32, end) for name, end in ends.items()}
    if template is None:
        return keys
    template = template.encode(errors="replace").decode()  # halves of characters
    return keys | {"tokenizer.chat_template": (STRING, template)}


def _read(path: Path) -> dict[str, Any]:
    """Read a `tokenizer.json`, which may have tens of millions of bytes."""
    try:
        value = parse_json(read_companion(path))
        json.dumps(value, ensure_ascii=False).encode()  # halves of characters cannot be written
    except ValueError as error:
        raise ArbError(f"`{path}` is not JSON: {error}", ALTERED) from None
    check_schema(value, SCHEMA, f"`{path}`", ALTERED)
    return value


def _merges(merges: list[Any], path: Path) -> list[str]:
    """Write merges as two texts with a space between; newer files have them as pairs."""
    texts = [" ".join(pair) if is_of(pair, list[str]) else pair for pair in merges]
    if not is_of(texts, list[str]):
        raise ArbError(f"`{path}` has a merge that is not a pair of texts", ALTERED)
    return texts


def _rules(tokenizer: dict[str, Any], path: Path) -> str:
    """Name the rules by which llama.cpp splits text as the tokenizer does."""
    steps = _steps(tokenizer, "pre_tokenizer", "pretokenizers")
    kinds = tuple(str(step.get("type")) for step in steps)
    if kinds == ("Split", "ByteLevel") and _has_options(steps[1], BYTES_ONLY):
        pattern = steps[0].get("pattern")
        regex = pattern.get("Regex") if pattern and is_of(pattern, dict[str, str]) else None
        is_plain = steps[0].get("behavior") == "Isolated" and not steps[0].get("invert", False)
        if regex in PATTERNS and is_plain:
            return PATTERNS[regex]
    elif kinds in STEPS and _has_options(steps[-1], BYTES_AND_WORDS):
        splits_digits = steps[0].get("individual_digits") is True
        if splits_digits or kinds[0] != "Digits":
            return STEPS[kinds]
    raise ArbError(f"`{path}`: llama.cpp has no rules by which `pre_tokenizer` splits text", HINT)


def _has_options(step: dict[str, Any], options: dict[str, bool]) -> bool:
    """Return whether a `ByteLevel` step has options, which are on if they are left out."""
    return all(step.get(name, True) is value for name, value in options.items())


def _check_options(tokenizer: dict[str, Any], path: Path) -> None:
    """Check that the tokenizer has nothing that GGUF cannot hold.

    Raises:
        ArbError: it has, and the error names it.
    """
    for step in _steps(tokenizer, "normalizer", "normalizers"):
        if step.get("type") not in NORMALIZERS:
            raise _refused(path, f"a normalizer `{step.get('type')}`")
    for name, values in PLAIN_MODEL.items():
        if tokenizer["model"].get(name) not in values:
            raise _refused(path, f"`{name}` of a model")
    for added in tokenizer.get("added_tokens") or ():
        for name in PLAIN_ADDED:
            if is_of(added, dict) and added.get(name):
                raise _refused(path, f"`{name}` of a token, as `{added.get('content')!r:.40}` has")


def _refused(path: Path, part: str) -> ArbError:
    return ArbError(f"`{path}`: GGUF has no place for {part}", HINT)


def _steps(tokenizer: dict[str, Any], name: str, several: str) -> list[dict[str, Any]]:
    """List the steps of a part: itself, or those that it lists; none if they are malformed."""
    part = tokenizer.get(name) or {}
    steps = part.get(several, [part])
    return steps if is_of(steps, list[dict]) else []


def _ends(companions: Path) -> dict[str, int]:
    """Read the numbers of the tokens that begin, end and pad a text; the first of several."""
    tokens = {}
    for name in (CONFIG, GENERATION):
        if not (companions / name).exists():
            continue
        values = read_json(companions / name, {})
        for kind, key in (("bos", "bos"), ("eos", "eos"), ("padding", "pad")):
            value = values.get(f"{key}_token_id")
            value = value[0] if is_of(value, list[int]) and value else value
            if is_of(value, int) and 0 <= value < MAX_SIZE:
                tokens[kind] = value
    return tokens
