"""A headless Chromium writes with the page, stops it, and sees the curves of a run that trains."""

import asyncio
import json
import math
import queue
import shutil
import subprocess
import threading
import time
from pathlib import Path

import pytest
from made_runs import make_run, record

pytest.importorskip("starlette", reason="needs the extra `serve`")
uvicorn = pytest.importorskip("uvicorn", reason="needs the extra `serve`")
from starlette.applications import Starlette  # noqa: E402
from starlette.responses import JSONResponse, Response, StreamingResponse  # noqa: E402
from starlette.routing import Route  # noqa: E402

from arbcli.serve import runs  # noqa: E402

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser")
DRIVER = Path(__file__).with_name("driver.js").read_text(encoding="utf-8")
pytestmark = pytest.mark.skipif(CHROMIUM is None, reason="needs Chromium")
BITS = (0, 1.5, 2.5, 9)
"""Surprise of the bytes that the model writes again and again: those of `né?`."""


def models(request):
    return JSONResponse({"data": [{"id": "a model", "unit": "byte", "max_model_len": 9000}]})


def choice(number: int) -> dict:
    index, offset = number % 4, number // 4 * 3 + (0, 1, 1, 2)[number % 4]
    logprobs = {"tokens": ["?"], "token_logprobs": [-BITS[index] * math.log(2)]}
    text = ("n", "", "é", "?")[index]
    return {"text": text, "logprobs": logprobs | {"text_offset": [offset]}, "finish_reason": None}


async def completions(request):
    asked = await request.json()
    assert asked["stream"]
    if asked["prompt"] == "full":
        return JSONResponse({"error": {"message": "the queue is full"}}, 429)

    async def events():
        for number in range(asked["max_tokens"]):
            yield f"data: {json.dumps({'choices': [choice(number)]})}\n\n"
            if asked["prompt"] == "endless":
                await asyncio.sleep(0.02)
        yield 'data: {"choices": [{"text": "", "finish_reason": "length"}]}\n\ndata: [DONE]\n\n'

    return StreamingResponse(events(), media_type="text/event-stream")


ANSWER = (("", [b"\xef\xbf\xbd"]), ("é", [b"\xef\xbf\xbd"]), ("ja", [b"j", b"a"]))
"""Contents with the bytes of their tokens: an é of two tokens, neither of which is text."""


async def chat(request):
    asked = await request.json()
    assert asked["messages"][0] == {"role": "system", "content": "Be brief."}
    parts = []
    for content, tokens in ANSWER:
        scores = [{"token": "", "logprob": -math.log(2), "bytes": [*token]} for token in tokens]
        delta = {"delta": {"content": content}, "logprobs": {"content": scores}}
        parts.append(f"data: {json.dumps({'choices': [delta]})}\n\n")
    return Response("".join([*parts, "data: [DONE]\n\n"]), media_type="text/event-stream")


@pytest.fixture
def show(tmp_path, monkeypatch):
    """Return a function that opens the page in a window of a width, and returns its text."""
    run = make_run(tmp_path / "runs" / "001", [record(10, 3.0), record(20, 2.5, 2.25)])
    shown = queue.Queue()

    async def told(request):
        shown.put(await request.json())
        return Response()

    async def trained(request):
        with (run / "metrics.jsonl").open("a") as file:
            file.write(json.dumps(record(30, 2.0, 1.75)) + "\n")
        return Response()

    page, _ = runs._page_and_policy()
    page = page.replace("<script>", f"<script>{DRIVER}</script><script>")
    monkeypatch.setattr(runs, "_page_and_policy", lambda: (page, runs._policy(page)))
    posts = {"v1/completions": completions, "v1/chat/completions": chat}
    posts |= {"shown": told, "trained": trained}
    app = Starlette(
        routes=[*runs.routes(tmp_path / "runs"), Route("/v1/models", models),
                *(Route(f"/{path}", post, methods=["POST"]) for path, post in posts.items())]
    )  # fmt: skip
    server = uvicorn.Server(uvicorn.Config(app, port=0, log_level="error"))
    thread = threading.Thread(target=server.run)
    thread.start()
    while not server.started:
        time.sleep(0.01)
    (listening,) = server.servers[0].sockets
    address = f"127.0.0.1:{listening.getsockname()[1]}"

    def look(width: int) -> dict:
        options = ["--headless", "--no-sandbox", "--disable-gpu", f"--window-size={width},844"]
        options += ["--force-dark-mode", f"--user-data-dir={tmp_path / 'profile'}"]
        browser = subprocess.Popen([CHROMIUM, *options, address], stderr=subprocess.DEVNULL)
        try:
            told = shown.get(timeout=60)
        finally:
            browser.terminate()
            browser.wait(30)
        assert told["problems"] == []
        assert told["hosts"] == [address]
        return told

    yield look
    server.should_exit = True
    thread.join()


def test_page_writes_streams_stops_and_shows_curves(show):
    told = show(500)
    assert told["written"][:4] == ["cané?", "nb0", "éb4", "?b8"]
    assert "4 bytes · 3.25 bits per byte" in told["written"][4]
    assert told["edited"] == ["cané?!", "cané?!", 3]
    assert 10 < told["stopped"] < 4000
    assert told["answer"] == [{"role": "assistant", "content": "éja"}, ["b2", "b1", "b1"]]
    assert told["row"] == ["001live", "seed", "0", "20", "/", "100", "2.2500"]
    assert "held out 1.7500; 001 training 2.0000" in told["label"]
    for width, room in (told["width"], show(1280)["width"]):
        assert width <= room
