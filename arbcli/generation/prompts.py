"""Prompts from a JSON lines file, with an object or a string on each line."""

import json
from collections.abc import Iterable
from dataclasses import replace
from typing import Any

from arbcli.base.errors import ArbError, quoted
from arbcli.base.reading import has_type, parse_json
from arbcli.generation.batch import Request
from arbcli.generation.sampling import Sampling

FIELDS = {
    "prompt": str, "length": int, "temperature": float, "top_k": int, "top_p": float, "seed": int,
}  # fmt: skip
"""Fields of a line, and their types."""
SHOWN_LENGTH = 40


def read_prompts(
    lines: Iterable[bytes], name: str, length: int, sampling: Sampling
) -> list[Request]:
    """Parse and validate prompts.

    A line is an object such as `{"prompt": "It was"}` with optional `length`, `temperature`,
    `top_k`, `top_p` and `seed`, or a string, which is the prompt. Empty lines are skipped. A line
    without a seed uses the random stream of its index, from 0.

    Args:
        lines: lines of the file.
        name: name of the file, for errors.
        length: default number of bytes to generate.
        sampling: default parameters of sampling.

    Raises:
        ArbError: a line is invalid, or there is no prompt.
    """
    requests: list[Request] = []
    for number, line in enumerate(lines, 1):
        if not line.strip():
            continue
        try:
            requests.append(_request(_fields(line), len(requests), length, sampling))
        except ArbError as error:
            raise ArbError(f"line {number} of `{name}`: {error}", error.hint) from error
    if not requests:
        raise ArbError(
            f"there is no prompt in `{name}`", 'write one JSON a line: {"prompt": "It was"}'
        )
    return requests


def _fields(line: bytes) -> dict[str, Any]:
    try:
        value = parse_json(line)
    except ValueError as error:
        shown = line.decode(errors="replace").strip()
        shown = shown if len(shown) <= SHOWN_LENGTH else f"{shown[:SHOWN_LENGTH]}..."
        raise ArbError(f"`{shown}` is not JSON", 'write {"prompt": "It was"}, in UTF-8') from error
    if isinstance(value, str):
        value = {"prompt": value}
    if not isinstance(value, dict) or "prompt" not in value:
        raise ArbError("there is no `prompt`", 'write {"prompt": "It was"}')
    for name, field in value.items():
        if name not in FIELDS:
            raise ArbError(f"no field is named `{name}`", f"use some of: {quoted(FIELDS)}")
        kind = FIELDS[name]
        if not has_type(field, kind):
            kinds = {str: "a string", int: "an integer", float: "a number"}
            raise ArbError(f"`{name}` is {json.dumps(field)[:SHOWN_LENGTH]}", f"give {kinds[kind]}")
    return value


def _request(fields: dict[str, Any], index: int, length: int, sampling: Sampling) -> Request:
    options = {name: fields[name] for name in fields if name not in ("prompt", "length")}
    try:
        prompt = fields["prompt"].encode("utf-8", "surrogateescape")
    except UnicodeEncodeError as error:
        raise ArbError("`prompt` has an unpaired surrogate", "use valid Unicode") from error
    return Request(
        prompt=prompt,
        length=fields.get("length", length),
        sampling=replace(sampling, **options),
        stream=0 if "seed" in fields else index,
    )
