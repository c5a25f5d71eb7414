"""A tokenizer as keys of GGUF: a byte-level BPE, from `tokenizer.json`.

llama.cpp splits text by built-in rules, which have names. The name follows from the pattern or the
steps of `pre_tokenizer`; other tokenizers are refused. Symbols of the model's vocabulary beyond the
tokenizer's have placeholder names, and are never produced.
"""

import json
from itertools import chain
from pathlib import Path
from typing import Any

from arbcli.base.errors import ArbError
from arbcli.base.reading import ALTERED, check_schema, has_type, parse_json, read_json
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
"""Options of a `ByteLevel` step that affect tokens."""
PATTERNS = {_WORDS + r"\p{N}{1,3}" + _REST: "llama-bpe", _WORDS + r"\p{N}" + _REST: "qwen2"}
"""Names of the rules of llama.cpp by the pattern of a `Split`."""
STEPS: dict[tuple[str, ...], str] = {("ByteLevel",): "gpt-2", ("Digits", "ByteLevel"): "smollm"}
"""Names of the rules of llama.cpp by the steps of a `pre_tokenizer` without a `Split`."""
NORMALIZERS = (None, "NFC")
"""Kinds of normalizers: llama.cpp has none, and text is almost always in NFC already."""
PLAIN_MODEL: dict[str, tuple[Any, ...]] = {
    "dropout": (None, 0), "continuing_subword_prefix": (None, ""), "end_of_word_suffix": (None, ""),
    "byte_fallback": (None, False),
}  # fmt: skip
"""Options of a model and the values that GGUF can represent."""
PLAIN_ADDED = ("single_word", "lstrip", "rstrip")
"""Options of an added token that must be off."""
NUL = "\u0100"
"""Token of byte 0, which no text contains."""
HINT = "use `--to hf`, which copies the tokenizer unchanged"


def token_keys(
    path: Path, companions: Path | None, config: ModelConfig
) -> dict[str, tuple[int, Any]]:
    """Describe the tokenizer of a model.

    Args:
        path: path of its `tokenizer.json`.
        companions: folder of files of the imported model; None if there is none.
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

    def set_token(text: Any, index: Any, kind: int) -> None:
        if not (has_type(text, str) and has_type(index, int) and 0 <= index < config.vocabulary):
            raise ArbError(f"`{path}` has a token that the model lacks: {text!r:.60}", ALTERED)
        tokens[index], kinds[index] = text, kind

    for text, index in tokenizer["model"]["vocab"].items():
        set_token(text, index, NORMAL)
    for added in tokenizer.get("added_tokens") or ():
        check_schema(added, {"content": str, "id": int, "special": bool}, f"`{path}`", ALTERED)
        set_token(added["content"], added["id"], CONTROL if added["special"] else USER_DEFINED)
    reader = Tokenizer.read(path)
    special_ids = _special_ids(companions) if companions else {}
    for folder in folders_of(path):
        names = special_tokens(folder)
        for kind, key in (("bos", "bos_token"), ("eos", "eos_token"), ("padding", "pad_token")):
            token = reader.special(names.get(key, ""))
            if token is not None:
                special_ids.setdefault(kind, token)
    if reader.beginning:
        if len(reader.beginning) > 1:
            raise _refused(path, f"{len(reader.beginning)} tokens before a text")
        special_ids["bos"] = reader.beginning[0]
    stops = stop_tokens(reader, path)
    if "eos" not in special_ids:  # by default, llama.cpp ends texts at token 11
        unused = (token for token in range(config.vocabulary) if kinds[token] in (CONTROL, UNUSED))
        eos = next(chain(stops, unused), tokenizer["model"]["vocab"].get(NUL))
        special_ids |= {} if eos is None else {"eos": eos}
    other_stops = [token for token in stops if token != special_ids.get("eos")]
    if other_stops:  # llama.cpp also ends texts at `eot`
        special_ids["eot"] = other_stops[0]
    sources = chain.from_iterable(map(template_sources, folders_of(path)))
    template = next((source for _, source in sources), None)
    keys = {
        "tokenizer.ggml.model": (STRING, "gpt2"),
        "tokenizer.ggml.pre": (STRING, _splitting_rules(tokenizer, path)),
        "tokenizer.ggml.tokens": (
            STRING,
            [f"[PAD{i}]" if text is None else text for i, text in enumerate(tokens)],
        ),
        "tokenizer.ggml.token_type": (INT32, kinds),
        "tokenizer.ggml.merges": (STRING, _merges(tokenizer["model"]["merges"], path)),
        "tokenizer.ggml.add_bos_token": (BOOL, bool(reader.beginning)),
        "tokenizer.ggml.add_eos_token": (BOOL, False),
    }
    keys |= {f"tokenizer.ggml.{name}_token_id": (UINT32, id) for name, id in special_ids.items()}
    if template is None:
        return keys
    template = template.encode(errors="replace").decode()  # lone surrogates
    return keys | {"tokenizer.chat_template": (STRING, template)}


def _read(path: Path) -> dict[str, Any]:
    """Read a `tokenizer.json`, which may have tens of megabytes."""
    try:
        value = parse_json(read_companion(path))
        json.dumps(value, ensure_ascii=False).encode()  # lone surrogates cannot be written
    except ValueError as error:
        raise ArbError(f"`{path}` is not JSON: {error}", ALTERED) from None
    check_schema(value, SCHEMA, f"`{path}`", ALTERED)
    return value


def _merges(merges: list[Any], path: Path) -> list[str]:
    """Join merges that are pairs, as in newer files, by a space."""
    texts = [" ".join(pair) if has_type(pair, list[str]) else pair for pair in merges]
    if not has_type(texts, list[str]):
        raise ArbError(f"`{path}` has a merge that is not a pair of texts", ALTERED)
    return texts


def _splitting_rules(tokenizer: dict[str, Any], path: Path) -> str:
    """Return the name of the rules of llama.cpp that split text as the tokenizer does.

    Raises:
        ArbError: there are none.
    """
    steps = _steps(tokenizer, "pre_tokenizer", "pretokenizers")
    kinds = tuple(str(step.get("type")) for step in steps)
    if kinds == ("Split", "ByteLevel") and _has_options(steps[1], BYTES_ONLY):
        pattern = steps[0].get("pattern")
        regex = pattern.get("Regex") if pattern and has_type(pattern, dict[str, str]) else None
        is_plain = steps[0].get("behavior") == "Isolated" and not steps[0].get("invert", False)
        if regex in PATTERNS and is_plain:
            return PATTERNS[regex]
    elif kinds in STEPS and _has_options(steps[-1], BYTES_AND_WORDS):
        splits_digits = steps[0].get("individual_digits") is True
        if splits_digits or kinds[0] != "Digits":
            return STEPS[kinds]
    raise ArbError(f"`{path}`: llama.cpp has no rules by which `pre_tokenizer` splits text", HINT)


def _has_options(step: dict[str, Any], options: dict[str, bool]) -> bool:
    """Return whether a `ByteLevel` step has these values of options, which are on by default."""
    return all(step.get(name, True) is value for name, value in options.items())


def _check_options(tokenizer: dict[str, Any], path: Path) -> None:
    """Check that GGUF can represent the options of the tokenizer.

    Raises:
        ArbError: it cannot represent one of them.
    """
    for step in _steps(tokenizer, "normalizer", "normalizers"):
        if step.get("type") not in NORMALIZERS:
            raise _refused(path, f"a normalizer `{step.get('type')}`")
    for name, values in PLAIN_MODEL.items():
        if tokenizer["model"].get(name) not in values:
            raise _refused(path, f"`{name}` of a model")
    for added in tokenizer.get("added_tokens") or ():
        for name in PLAIN_ADDED:
            if has_type(added, dict) and added.get(name):
                raise _refused(path, f"`{name}` of a token, as `{added.get('content')!r:.40}` has")


def _refused(path: Path, part: str) -> ArbError:
    return ArbError(f"`{path}`: GGUF cannot represent {part}", HINT)


def _steps(tokenizer: dict[str, Any], name: str, list_name: str) -> list[dict[str, Any]]:
    """List the steps of a part: itself, or its list `list_name`; none if they are malformed."""
    part = tokenizer.get(name) or {}
    steps = part.get(list_name, [part])
    return steps if has_type(steps, list[dict]) else []


def _special_ids(companions: Path) -> dict[str, int]:
    """Read the ids of the tokens that begin, end and pad a text; of several, the first."""
    tokens = {}
    for name in (CONFIG, GENERATION):
        if not (companions / name).exists():
            continue
        values = read_json(companions / name, {})
        for kind, key in (("bos", "bos"), ("eos", "eos"), ("padding", "pad")):
            value = values.get(f"{key}_token_id")
            value = value[0] if has_type(value, list[int]) and value else value
            if has_type(value, int) and 0 <= value < MAX_SIZE:
                tokens[kind] = value
    return tokens
