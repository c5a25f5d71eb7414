"""The directory of a run: its name, its `config.json`, and its texts."""

import dataclasses
import json
import os
import platform
import re
from contextlib import suppress
from dataclasses import asdict
from datetime import UTC, datetime
from hashlib import sha256
from pathlib import Path
from typing import Any

import torch

from arbcli.base.errors import ArbError, os_errors
from arbcli.base.reading import read_json
from arbcli.base.run_files import CONFIG, RUNS, TOKENIZER, run_of
from arbcli.config.settings import check_bounds
from arbcli.config.training import TrainConfig, option_word, train_config_dict, train_config_from
from arbcli.data.files import DOCUMENTS, Conversion, TextError, absolute_entry, has_documents
from arbcli.data.opening import open_texts
from arbcli.data.text import Text, Texts, check_is_bytes, entropy
from arbcli.generation.tokens import check_vocabulary
from arbcli.training.trainer import text_digest
from arbcli.version import __version__

CHOOSE_OUT = "choose another `--out`"
"""Hint about a directory that cannot be made."""


def make_next_directory(config: TrainConfig, root: Path = RUNS) -> Path:
    """Create the next free run directory.

    Its name has the settings in which runs differ: `runs/003-256x4-int8-moment-muon-lr0.5-seed0`.

    Raises:
        ArbError: it cannot be created.
    """
    model, optimizer = config.model, option_word("--optimizer", config)
    rule = model.rule_text if model.weights == "ternary" else None
    words = [option_word("--weights", config), rule]
    words += [optimizer, optimizer and f"lr{config.lr:g}", f"seed{config.seed}"]
    kind = "-".join(filter(None, words))
    while True:
        with os_errors("make", root, CHOOSE_OUT):
            names = os.listdir(root) if root.exists() else []
        numbers = (re.match("[0-9]+(?=-)", name) for name in names)
        number = max((int(match[0]) for match in numbers if match), default=0) + 1
        run = root / f"{number:03d}-{model.dim}x{model.layers}-{kind}"
        with os_errors("make", run, CHOOSE_OUT), suppress(FileExistsError):  # of another process
            root.mkdir(parents=True, exist_ok=True)
            run.mkdir()
            return run


def next_number(root: Path) -> int:
    """Return the number of a new run: one more than the largest one in its folder."""
    numbers = [0]
    for path in root.glob(f"*/{CONFIG}"):
        with suppress(ArbError):  # damaged
            numbers.append(read_json(path, {"number": int | None}).get("number") or 0)
    return max(numbers) + 1


def make_directory(run: Path) -> Path:
    """Create the directory of a new run, and return it.

    Raises:
        ArbError: it cannot be created.
    """
    with os_errors("make", run, CHOOSE_OUT):
        try:
            run.mkdir(parents=True, exist_ok=True)
        except FileExistsError:
            raise ArbError(f"`{run}` is a file", CHOOSE_OUT) from None
    return run


FACTS = {
    "config": dict,
    "digests": dict[str, str] | None,
    "extended": list[dict] | None,
    "init_digest": str | None,
    "init_from": str | None,
    "number": int | None,
    "started": str,
    "teacher_digest": str | None,
    "text": dict,
    "text.description": str,
    "text.digest": str,
    "text.entropy": float,
    "text.paths": dict | None,
    "text.paths.data": list[str],
    "text.paths.val": list[str],
    "text.split": str | None,
    "text.template": str | None,
    "text.tokenizer": str | None,
    "text.train_bytes": int,
    "text.val_bytes": int,
    "threads": int | None,
    "versions": dict[str, str] | None,
}
"""Schema of the fields of `config.json` that a resume reads; optional ones can be None."""


def read_facts(run: Path) -> dict[str, Any]:
    """Read the `config.json` of a run, without fields that are None.

    Raises:
        ArbError: it cannot be read, or a field is missing or has the wrong type.
    """
    content = read_json(run / CONFIG, FACTS)
    facts = {name: value for name, value in content.items() if value is not None}
    check_bounds("threads", facts.get("threads", 1))
    return facts


def field_digests(config: TrainConfig, saved_model: dict[str, Any] | None = None) -> dict[str, str]:
    """Hash each setting that a checkpoint depends on, so that errors can name changed ones.

    Args:
        config: configuration of a run.
        saved_model: the model in its `config.json`, which may lack fields that are newer than
            the run; these are not hashed. None is a new run.
    """
    model, values = asdict(config.model), config.decisive()
    earlier = saved_model or {}
    values |= {
        f"model.{name}": _drop_newer(value, earlier.get(name)) for name, value in model.items()
    }
    return {name: sha256(json.dumps(value).encode()).hexdigest() for name, value in values.items()}


def _drop_newer(value: Any, saved_model: Any) -> Any:
    """Leave out fields in nested values that the same value in a file does not have."""
    if isinstance(value, dict) and isinstance(saved_model, dict):
        return {
            name: _drop_newer(entry, saved_model[name])
            for name, entry in value.items()
            if name in saved_model
        }
    both_lists = isinstance(value, list | tuple) and isinstance(saved_model, list)
    if both_lists and len(value) == len(saved_model):
        return [*map(_drop_newer, value, saved_model)]
    return value


def reopen_texts(
    facts: dict[str, Any], config: TrainConfig, alternative: str | None = None
) -> Texts:
    """Open the texts of a run at their absolute paths, or else relative to the current folder.

    Args:
        facts: contents of `config.json`.
        config: the configuration in `facts`.
        alternative: alternative to restoring the text, for the hint; None keeps that of the error.

    Raises:
        ArbError: they are at neither place, or not suitable; the error is that of the first place.
    """
    split = facts["text"].get("split", "files")  # the default of earlier versions
    paths = facts["text"].get("paths")  # missing in runs of earlier versions
    try:
        return open_run_texts(config, paths, split)
    except ArbError as error:
        with suppress(ArbError):
            return open_run_texts(config, split=split)
        if alternative and isinstance(error, TextError):
            error.hint = f"put the text back at its path, or {alternative}"
        raise error


def open_run_texts(
    config: TrainConfig, paths: dict[str, list[str]] | None = None, split: str | None = None
) -> Texts:
    """Open the texts of a configuration.

    Args:
        config: configuration of the run.
        paths: paths by the names `data` and `val`; None takes those of `config`.
        split: split of several files, see `Texts.split`; None chooses.

    Raises:
        ArbError: files do not exist, or are not suitable.
    """
    data, val = (paths["data"], paths["val"]) if paths else (config.data, config.val)
    documents = has_documents(config.field)
    texts = open_texts(
        data,
        val,
        seed=config.seed,
        context=1 if documents else config.model.ctx,
        conversion=DOCUMENTS if documents else config.conversion,
        split=split,
    )
    if not documents and config.tokenizer is None:
        check_vocabulary(config.model, None, "")
        for text in (texts.train, texts.val):
            check_is_bytes(text.token_bytes)
        return texts
    from arbcli.training.token_texts import token_texts

    return token_texts(texts, config)


def run_config(run: Path, facts: dict[str, Any]) -> TrainConfig:
    """Return the configuration of a run, with the tokenizer in its directory.

    Raises:
        ArbError: the configuration is damaged or of an incompatible version, or the tokenizer is
            missing or has changed.
    """
    config = train_config_from(facts)
    if config.tokenizer is None:
        return config
    from arbcli.data.chat_template import check_template, find_template
    from arbcli.data.tokens import Tokenizer
    from arbcli.generation.tokens import check_digest

    path = run / TOKENIZER
    check_digest(Tokenizer.read(path), facts["text"].get("tokenizer"), path)
    if has_documents(config.field):
        check_template(find_template(path), facts["text"].get("template"), run)
    return dataclasses.replace(config, tokenizer=str(path))


def run_conversion(
    path: Path, field: str | None = None, data_format: str | None = None
) -> Conversion:
    """Return the conversion of text files in a checkpoint's run; plain without `config.json`.

    Args:
        path: path of a run or checkpoint.
        field: field of records, instead of the run's.
        data_format: format of shards; None is the run's.
    """
    run = run_of(path)
    if has_documents(field):
        return DOCUMENTS
    if not (run / CONFIG).exists():
        return Conversion(field, data_format=data_format)
    conversion = train_config_from(read_facts(run)).conversion
    data_format = data_format or conversion.data_format
    return dataclasses.replace(conversion, field=field, data_format=data_format)


def held_out_text(run: Path) -> tuple[Text, str]:
    """Open the held-out text of a run.

    Returns:
        The text, and its description.

    Raises:
        ArbError: the text is missing or has changed.
    """
    if not (run / CONFIG).exists():
        raise ArbError(f"`{run}` has no held-out text", "name a text with `--data`")
    facts = read_facts(run)
    alternative = "name another with `--data`"
    texts = reopen_texts(facts, run_config(run, facts), alternative)
    check_same_text(run, facts, text_digest(texts), alternative)
    return texts.val, f"held out of {texts.description}"


def check_same_text(run: Path, facts: dict[str, Any], digest: str, alternative: str) -> None:
    """Check that the text of a run has not changed.

    Args:
        run: directory of the run.
        facts: contents of `config.json`.
        digest: digest of the present text.
        alternative: alternative to restoring the text, for the hint.

    Raises:
        ArbError: the digests differ.
    """
    if facts["text"]["digest"] != digest:
        raise ArbError(
            f"the text is not the one that `{run}` was trained on", f"restore it, or {alternative}"
        )


def run_facts(run: Path | None, config: TrainConfig, texts: Texts) -> dict[str, Any]:
    """Return the contents of a run's `config.json`; without a directory it has no number."""
    return {
        "config": train_config_dict(config),
        "digests": field_digests(config),
        "text": {
            "description": texts.description,
            "split": texts.split,
            "digest": text_digest(texts),
            "entropy": entropy(texts.val),
            "paths": {
                name: [*map(absolute_entry, getattr(config, name))] for name in ("data", "val")
            },
            "template": texts.train.template_digest,
            "tokenizer": texts.tokenizer and texts.tokenizer.digest,
            "train_bytes": len(texts.train.source),
            "val_bytes": len(texts.val.source),
        },
        "threads": torch.get_num_threads(),
        "number": None if run is None else next_number(run.parent),
        "started": datetime.now(UTC).isoformat(timespec="microseconds"),
        "versions": {
            "arb": __version__,
            "python": platform.python_version(),
            "torch": torch.__version__,
        },
    }
