"""The page of the server, and the runs of a folder for its curves: works without a model."""

import base64
import dataclasses
import hashlib
import json
import os
import re
import time
from collections.abc import Callable
from functools import cache, lru_cache
from importlib.resources import files
from pathlib import Path
from typing import Any

from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from arbcli.base.errors import ArbError
from arbcli.base.run_files import CONFIG
from arbcli.inspect.runs import RunSummary, differing_settings, list_runs, read_run
from arbcli.training.record import METRICS, read_records


def routes(watch: Path | None) -> list[Route]:
    """Return the routes `/`, and with a folder `/runs` and `/runs/NAME/metrics?after=STEP`.

    `/runs` is an object with `runs`, summaries with the settings that differ between them, and
    `damaged`, messages by name. A summary has `name`, the fields of `RunSummary`, `branch`, which
    changes if records are replaced, as by a resume, and `age`, seconds since the last record.
    `metrics` are the records of later steps than STEP in JSON lines.

    Args:
        watch: folder of the runs; only those that `list_runs` lists are served.
    """
    if watch is None:
        return [Route("/", _page)]

    @_reporting
    def runs(request: Request) -> Response:
        summaries, damaged = {}, {}
        for run in list_runs(watch):
            try:
                summaries[run] = _summary(run, _state(run / CONFIG), _state(run / METRICS))
            except ArbError as error:
                damaged[run.name] = str(error)
        names = differing_settings([*summaries.values()])
        shown = [_shown(run, summary, names) for run, summary in summaries.items()]
        return _json({"runs": shown, "damaged": damaged})

    @_reporting
    def metrics(request: Request) -> Response:
        name, after = request.path_params["name"], request.query_params.get("after", "-1")
        run = next((run for run in list_runs(watch) if run.name == name), None)
        if run is None:
            return _json({"error": {"message": "there is no such run"}}, 404)
        if not re.fullmatch("-?[0-9]{1,18}", after):
            return _json({"error": {"message": "`after` is not a step"}}, 400)
        records = [record for record in read_records(run) if record["step"] > int(after)]
        lines = "".join(json.dumps(record) + "\n" for record in records)
        return Response(lines, media_type="application/x-ndjson")

    return [Route("/", _page), Route("/runs", runs), Route("/runs/{name}/metrics", metrics)]


def _reporting(endpoint: Callable[[Request], Response]) -> Callable[[Request], Response]:
    """Return an endpoint that answers with the message of an `ArbError` where that is raised."""

    def answer(request: Request) -> Response:
        try:
            return endpoint(request)
        except ArbError as error:
            return _json({"error": {"message": str(error)}}, 500)

    return answer


def _state(path: Path) -> tuple[int, int, int] | None:
    """Return what changes with the content of a file; None if there is none."""
    try:
        status = os.lstat(path)
    except OSError:
        return None
    return status.st_ino, status.st_size, status.st_mtime_ns


@lru_cache(maxsize=1024)
def _summary(run: Path, *_: tuple[int, int, int] | None) -> RunSummary:
    """Read the summary of a run, again only if its files have changed."""
    return read_run(run)


def _shown(run: Path, summary: RunSummary, names: list[str]) -> dict[str, Any]:
    fields = dataclasses.asdict(summary)
    del fields["run"]  # a path of the machine
    branch, _, changed = _state(run / METRICS) or (0, 0, None)
    return fields | {
        "name": run.name,
        "settings": {name: fields["settings"].get(name) for name in names},
        "branch": branch,
        "age": None if changed is None else max(0.0, time.time() - changed / 1e9),
    }


def _json(value: dict[str, Any], status: int = 200) -> Response:
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
