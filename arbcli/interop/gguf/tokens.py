"""A tokenizer as keys of GGUF: a byte-level BPE, from `tokenizer.json`.

llama.cpp splits text by rules of its own, which have names. The name follows from the pattern or
the steps of `pre_tokenizer`; a tokenizer with others is refused. Tokens that a model has beyond
those of its tokenizer have a name each and are never made.
"""

import json
from pathlib import Path
from typing import Any

from arbcli.base.errors import ArbError
from arbcli.base.reading import ALTERED, check_schema, is_of, parse_json, read_json
from arbcli.base.run_files import CONFIG
from arbcli.config.model import MOST, ModelConfig
from arbcli.interop.gguf.container import BOOL, INT32, STRING, UINT32
from arbcli.interop.huggingface.companions import GENERATION, TEMPLATE, read_companion

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
PATTERNS = {
    _WORDS + r"\p{N}{1,3}" + _REST: "llama-bpe",
    _WORDS + r"\p{N}" + _REST: "qwen2",
}
"""Names of the rules of llama.cpp by the pattern of a `Split`."""
STEPS = {("ByteLevel",): "gpt-2", ("Digits", "ByteLevel"): "smollm"}
"""The same by the steps of a `pre_tokenizer` without a `Split`."""
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
        ArbError: it cannot be read, or is of a kind that is not written.
    """
    tokenizer = _read(path)
    if tokenizer["model"]["type"] != "BPE" or tokenizer["model"].get("byte_fallback"):
        raise ArbError(
            f"`{path}` is not byte-level BPE, the one kind that is written to GGUF", hint=HINT
        )
    tokens: list[str | None] = [None] * config.vocabulary
    kinds = [UNUSED] * config.vocabulary

    def place(text: Any, index: Any, kind: int) -> None:
        if not (is_of(text, str) and is_of(index, int) and 0 <= index < config.vocabulary):
            raise ArbError(f"`{path}` has a token that the model lacks: {text!r:.60}", hint=ALTERED)
        tokens[index], kinds[index] = text, kind

    for text, index in tokenizer["model"]["vocab"].items():
        place(text, index, NORMAL)
    for added in tokenizer.get("added_tokens") or ():
        check_schema(added, {"content": str, "id": int, "special": bool}, f"`{path}`", ALTERED)
        place(added["content"], added["id"], CONTROL if added["special"] else USER_DEFINED)
    ends = _ends(companions) if companions else {}
    template = _chat_template(companions) if companions else None
    keys = {
        "tokenizer.ggml.model": (STRING, "gpt2"),
        "tokenizer.ggml.pre": (STRING, _rules(tokenizer, path)),
        "tokenizer.ggml.tokens": (
            STRING,
            [f"[PAD{i}]" if text is None else text for i, text in enumerate(tokens)],
        ),
        "tokenizer.ggml.token_type": (INT32, kinds),
        "tokenizer.ggml.merges": (STRING, _merges(tokenizer["model"]["merges"], path)),
        "tokenizer.ggml.add_bos_token": (BOOL, _begins(tokenizer, tokens, ends.get("bos"))),
        "tokenizer.ggml.add_eos_token": (BOOL, False),
    }
    keys |= {f"tokenizer.ggml.{name}_token_id": (UINT32, end) for name, end in ends.items()}
    return keys | ({"tokenizer.chat_template": (STRING, template)} if template else {})


def _read(path: Path) -> dict[str, Any]:
    """Read a `tokenizer.json`, which may have tens of millions of bytes."""
    try:
        value = parse_json(read_companion(path))
        json.dumps(value, ensure_ascii=False).encode()  # halves of characters cannot be written
    except ValueError as error:
        raise ArbError(f"`{path}` is not JSON: {error}", hint=ALTERED) from None
    check_schema(value, SCHEMA, f"`{path}`", ALTERED)
    return value


def _merges(merges: list[Any], path: Path) -> list[str]:
    """Write merges as two texts with a space between; newer files have them as pairs."""
    found = [" ".join(pair) if is_of(pair, list[str]) else pair for pair in merges]
    if not is_of(found, list[str]):
        raise ArbError(f"`{path}` has a merge that is not a pair of texts", hint=ALTERED)
    return found


def _rules(tokenizer: dict[str, Any], path: Path) -> str:
    """Name the rules by which llama.cpp splits text as the tokenizer does."""
    steps = _steps(tokenizer, "pre_tokenizer", "pretokenizers")
    for step in steps:
        pattern = step.get("pattern")
        if step.get("type") == "Split" and pattern and is_of(pattern, dict[str, str]):
            found = PATTERNS.get(pattern.get("Regex"))
            if found:
                return found
    kinds = tuple(str(step.get("type")) for step in steps)
    if kinds in STEPS and all(step.get("use_regex", True) for step in steps):
        return STEPS[kinds]
    raise ArbError(
        f"`{path}`: llama.cpp has no rules by which `pre_tokenizer` splits text", hint=HINT
    )


def _begins(tokenizer: dict[str, Any], tokens: list[str | None], begin: int | None) -> bool:
    """Return whether the tokenizer puts the first token before a text."""
    wanted = {"SpecialToken": {"id": None if begin is None else tokens[begin], "type_id": 0}}
    steps = _steps(tokenizer, "post_processor", "processors")
    return any(is_of(step.get("single"), list) and wanted in step["single"] for step in steps)


def _steps(tokenizer: dict[str, Any], name: str, several: str) -> list[dict[str, Any]]:
    """List the steps of a part: itself, or those that it lists; none if they are malformed."""
    part = tokenizer.get(name) or {}
    steps = part.get(several, [part])
    return steps if is_of(steps, list[dict]) else []


def _ends(companions: Path) -> dict[str, int]:
    """Read the numbers of the tokens that begin, end and pad a text; the first of several."""
    found = {}
    for name in (CONFIG, GENERATION):
        if not (companions / name).exists():
            continue
        values = read_json(companions / name, {})
        for kind, key in (("bos", "bos"), ("eos", "eos"), ("padding", "pad")):
            value = values.get(f"{key}_token_id")
            value = value[0] if is_of(value, list[int]) and value else value
            if is_of(value, int) and 0 <= value < MOST:
                found[kind] = value
    return found


def _chat_template(companions: Path) -> str | None:
    """Read the chat template, which is copied and not run."""
    if (companions / TEMPLATE).exists():
        return read_companion(companions / TEMPLATE).decode(errors="replace")
    path = companions / "tokenizer_config.json"
    template = read_json(path, {}).get("chat_template") if path.exists() else None
    return template.encode(errors="replace").decode() if isinstance(template, str) else None
