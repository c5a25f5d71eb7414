"""Prompts from a file: one JSON object a line, or one JSON string."""

import json
from collections.abc import Iterable
from typing import Any

from arbcli.errors import ArbError
from arbcli.infer.generation import Sampling
from arbcli.infer.several import Request
from arbcli.reading import is_of, parse_json

FIELDS = {
    "prompt": str, "length": int, "temperature": float, "top_k": int, "top_p": float, "seed": int,
}  # fmt: skip
"""Fields of a line, and their types."""
SHOWN_LENGTH = 40


def read_prompts(
    lines: Iterable[bytes], name: str, length: int, sampling: Sampling
) -> list[Request]:
    """Read what is to be made, and check all of it.

    A line is `{"prompt": "It was"}`, with any of `length`, `temperature`, `top_k`, `top_p` and
    `seed` besides, or a JSON string, which is a prompt. Empty lines are left out. A line without a
    seed of its own has the stream of random numbers of its number, from 0 on.

    Args:
        lines: of the file.
        name: of the file, for errors.
        length: bytes to make where a line does not say.
        sampling: how, where a line does not say.

    Raises:
        ArbError: a line is wrong, or there is none.
    """
    requests: list[Request] = []
    for number, line in enumerate(lines, 1):
        if not line.strip():
            continue
        try:
            requests.append(_request(_fields(line), len(requests), length, sampling))
        except ArbError as error:
            raise ArbError(f"line {number} of `{name}`: {error}", hint=error.hint) from error
    if not requests:
        raise ArbError(
            f"there is no prompt in `{name}`", hint='write one JSON a line: {"prompt": "It was"}'
        )
    return requests


def _fields(line: bytes) -> dict[str, Any]:
    try:
        value = parse_json(line)
    except ValueError as error:
        shown = line.decode(errors="replace").strip()
        shown = shown if len(shown) <= SHOWN_LENGTH else f"{shown[:SHOWN_LENGTH]}..."
        raise ArbError(
            f"`{shown}` is not JSON", hint='write {"prompt": "It was"}, in UTF-8'
        ) from error
    if isinstance(value, str):
        value = {"prompt": value}
    if not isinstance(value, dict) or "prompt" not in value:
        raise ArbError("there is no `prompt`", hint='write {"prompt": "It was"}')
    for name, given in value.items():
        if name not in FIELDS:
            known = ", ".join(f"`{field}`" for field in FIELDS)
            raise ArbError(f"no field is named `{name}`", hint=f"use some of: {known}")
        kind = FIELDS[name]
        if not is_of(given, kind):
            words = {str: "a string", int: "an integer", float: "a number"}
            raise ArbError(
                f"`{name}` is {json.dumps(given)[:SHOWN_LENGTH]}", hint=f"give {words[kind]}"
            )
    return value


def _request(fields: dict[str, Any], index: int, length: int, sampling: Sampling) -> Request:
    how = {
        name: fields.get(name, getattr(sampling, name))
        for name in ("temperature", "top_k", "top_p", "seed")
    }
    try:
        prompt = fields["prompt"].encode("utf-8", "surrogateescape")
    except UnicodeEncodeError as error:
        raise ArbError("`prompt` has an unpaired surrogate", hint="write it as one") from error
    return Request(
        prompt=prompt,
        length=fields.get("length", length),
        sampling=Sampling(**how),
        stream=0 if "seed" in fields else index,
    )
