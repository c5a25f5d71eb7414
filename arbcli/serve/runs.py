"""The page of the server, and the runs of a folder for its curves: works without a model."""

import base64
import dataclasses
import hashlib
import json
import os
import re
import threading
import time
from contextlib import suppress
from functools import cache
from importlib.resources import files
from pathlib import Path
from typing import Any

from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from arbcli.base.errors import ArbError
from arbcli.inspect.runs import RunReader, RunSummary, differing_settings, list_runs
from arbcli.training.record import METRICS, complete_lines

ANSWER_BYTES = 4 * 2**20
"""Size of the records of an answer, after which no more are added."""


def routes(watch: Path | None) -> list[Route]:
    """Return the routes `/`, and with a folder `/runs` and `/runs/NAME/metrics?from=OFFSET`.

    `/runs` is an object with `runs`, summaries with the settings that differ between them, and
    `damaged`, messages by name. A summary has `name`, the fields of `RunSummary`, `branch`, which
    changes if records are replaced, as by a resume, and `age`, seconds since the last record.
    `metrics` is an object with `records`, up to 4 MiB of those after an offset in their file, and
    `next`, the offset after them.

    Args:
        watch: folder of the runs; only those that `list_runs` lists are served.
    """
    if watch is None:
        return [Route("/", _page)]
    readers: dict[Path, RunReader] = {}
    one_at_a_time = threading.Lock()

    def runs(request: Request) -> Response:
        nonlocal readers
        summaries, damaged = {}, {}
        with one_at_a_time:
            readers = {run: readers.get(run) or RunReader(run) for run in list_runs(watch)}
            for run, reader in readers.items():
                try:
                    summaries[run] = reader.read()
                except ArbError as error:
                    damaged[run.name] = str(error)
            names = differing_settings([*summaries.values()])
            shown = [
                _shown(run, summary, readers[run].branch, names)
                for run, summary in summaries.items()
            ]
        return json_answer({"runs": shown, "damaged": damaged})

    def metrics(request: Request) -> Response:
        name, offset = request.path_params["name"], request.query_params.get("from", "0")
        run = next((run for run in list_runs(watch) if run.name == name), None)
        if run is None:
            return json_answer({"error": {"message": "there is no such run"}}, 404)
        if not re.fullmatch("[0-9]{1,12}", offset):
            return json_answer({"error": {"message": "`from` is not an offset"}}, 400)
        records, end = [], int(offset)
        for line, record in complete_lines(run, end):
            end += len(line)
            if record is not None:
                records.append(record)
            if end - int(offset) >= ANSWER_BYTES:
                break
        return json_answer({"records": records, "next": end})

    return [Route("/", _page), Route("/runs", runs), Route("/runs/{name}/metrics", metrics)]


def _shown(run: Path, summary: RunSummary, branch: float, names: list[str]) -> dict[str, Any]:
    fields = dataclasses.asdict(summary)
    del fields["run"]  # a path of the machine
    age = None
    with suppress(OSError):
        age = max(0.0, time.time() - os.lstat(run / METRICS).st_mtime)
    settings = {name: fields["settings"].get(name) for name in names}
    return fields | {"name": run.name, "settings": settings, "branch": branch, "age": age}


def json_answer(value: dict[str, Any], status: int = 200) -> Response:
    """Return a response of ASCII, as names and settings may have halves of surrogate pairs."""
    return Response(json.dumps(value, allow_nan=False), status, media_type="application/json")


@cache
def _page_and_policy() -> tuple[str, str]:
    """Read the page, and compute its policy."""
    page = files("arbcli.serve").joinpath("page.html").read_text(encoding="utf-8")
    return page, _policy(page)


def _page(request: Request) -> Response:
    page, policy = _page_and_policy()
    headers = {
        "Content-Security-Policy": policy,
        "X-Content-Type-Options": "nosniff",
        "Referrer-Policy": "no-referrer",
        "Cache-Control": "no-cache",
    }
    return Response(page, headers=headers, media_type="text/html")


def _policy(page: str) -> str:
    """Return a policy that permits the script and the style of the page, and no other host."""

    def sources(tag: str) -> str:
        contents = re.findall(rf"<{tag}>(.*?)</{tag}>", page, re.DOTALL)
        digests = [hashlib.sha256(content.encode()).digest() for content in contents]
        return " ".join(f"'sha256-{base64.b64encode(digest).decode()}'" for digest in digests)

    return (
        f"default-src 'none'; script-src {sources('script')}; style-src {sources('style')};"
        " connect-src 'self'; img-src data:; base-uri 'none'; form-action 'none';"
        " frame-ancestors 'none'"
    )
