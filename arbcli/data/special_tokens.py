"""Special tokens of a tokenizer by their names, and the tokens that end a text."""

from collections.abc import Iterator, Mapping
from itertools import chain
from pathlib import Path
from typing import Any

from arbcli.base.atomic_files import make_folder, write_json
from arbcli.base.reading import read_json
from arbcli.base.run_files import COMPANIONS, CONFIG
from arbcli.data.tokens import Tokenizer

SETTINGS = "tokenizer_config.json"
MAP = "special_tokens_map.json"
GENERATION = "generation_config.json"
NAMES = (
    "bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token",
)  # fmt: skip
"""Names of special tokens in Transformers, which templates read as variables."""
OWN_FIELDS = ("model_specific_special_tokens", "extra_special_tokens")
"""Fields with special tokens that have names of their own, if they are objects."""
ADDED_TOKENS = "added_tokens_decoder"
"""Field of newer settings, next to which Transformers does not read `MAP`."""


def folders_of(tokenizer: Path | str) -> tuple[Path, Path]:
    """Return the folders in which files that belong to a `tokenizer.json` are looked for."""
    parent = Path(tokenizer).parent
    return parent / COMPANIONS, parent


def read_settings(folder: Path, name: str) -> dict[str, Any]:
    """Read a JSON object of a folder; empty if there is no such file.

    Raises:
        ArbError: it is damaged.
    """
    path = folder / name
    return read_json(path, {}) if path.exists() else {}


def special_tokens(folder: Path) -> dict[str, str]:
    """Return the texts of a folder's special tokens by name, as Transformers reads them.

    Raises:
        ArbError: a file is damaged.
    """
    settings = read_settings(folder, SETTINGS)
    if ADDED_TOKENS not in settings:
        settings = settings | read_settings(folder, MAP)
    entries = {name: settings.get(name) for name in NAMES}
    for name in OWN_FIELDS:
        others = settings.get(name)
        entries |= others if isinstance(others, dict) else {}
    texts = {name: _text(value) for name, value in entries.items()}
    return {name: text for name, text in texts.items() if text}


def set_special_tokens(settings: Mapping[str, Any], tokens: Mapping[str, str]) -> dict[str, Any]:
    """Return a tokenizer's settings with other special tokens: see `special_tokens`."""
    others = {name: text for name, text in tokens.items() if name not in NAMES}
    named = {name: value for name, value in settings.items() if name not in {*NAMES, *OWN_FIELDS}}
    named |= {name: text for name, text in tokens.items() if name in NAMES}
    return named | ({OWN_FIELDS[-1]: others} if others else {})


def _text(value: Any) -> str:
    """Return the text of a special token, which is a string or an object with one."""
    value = value.get("content") if isinstance(value, Mapping) else value
    return value if isinstance(value, str) else ""


def _declared(folder: Path) -> Iterator[int]:
    """Yield the stop tokens that the settings of generation and of the model declare."""
    for name in (GENERATION, CONFIG):
        value = read_settings(folder, name).get("eos_token_id")
        yield from (token for token in (value if isinstance(value, list) else [value])
                    if type(token) is int and token >= 0)  # fmt: skip


def stop_tokens(tokenizer: Tokenizer, path: Path | str) -> list[int]:
    """Return the tokens that end a text: of the tokenizer, of generation and of the model.

    Args:
        tokenizer: the tokenizer.
        path: path of its file, next to which, or in whose folder of companions, are the others.

    Returns:
        Tokens without repetition; the first is the one that ends a document.

    Raises:
        ArbError: a file is damaged.
    """
    stops: list[int | None] = []
    for folder in folders_of(path):
        stops.append(tokenizer.special(special_tokens(folder).get("eos_token", "")))
        stops += (token for token in _declared(folder) if token < tokenizer.size)
    return list(dict.fromkeys(token for token in stops if token is not None))


def keep_special_tokens(tokenizer: Path | str, run: Path) -> None:
    """Copy special tokens and stop tokens into a run that has none of its own.

    Raises:
        ArbError: a file is damaged, or cannot be written.
    """
    folder = run / COMPANIONS
    if any((folder / name).exists() for name in (SETTINGS, MAP, GENERATION, CONFIG)):
        return
    tokens = next(filter(None, map(special_tokens, folders_of(tokenizer))), {})
    stops = list(dict.fromkeys(chain(*map(_declared, folders_of(tokenizer)))))
    settings = set_special_tokens({}, tokens)
    written = {SETTINGS: settings, GENERATION: {"eos_token_id": stops} if stops else {}}
    for name, content in written.items():
        if content:
            make_folder(folder)
            write_json(folder / name, content)
