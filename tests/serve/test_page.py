"""A headless Chromium writes with the page, stops it, and sees the curves of a run that trains."""

import asyncio
import json
import math
import threading
import time

import pytest
from made_runs import make_run, record

pytest.importorskip("starlette", reason="needs the extra `serve`")
uvicorn = pytest.importorskip("uvicorn", reason="needs the extra `serve`")
from browser import CHROMIUM, opened  # noqa: E402
from starlette.applications import Starlette  # noqa: E402
from starlette.responses import JSONResponse, StreamingResponse  # noqa: E402
from starlette.routing import Route  # noqa: E402

from arbcli.serve.runs import routes  # noqa: E402

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


async def chat(request):
    """Answer with an é of two tokens, neither of which is text, and with `ja`."""
    asked = await request.json()
    assert asked["messages"][0] == {"role": "system", "content": "Be brief."}

    async def events():
        for content, tokens in (
            ("", [b"\xef\xbf\xbd"]),
            ("é", [b"\xef\xbf\xbd"]),
            ("ja", [b"j", b"a"]),
        ):
            entries = [
                {"token": "", "logprob": -math.log(2), "bytes": [*token]} for token in tokens
            ]
            delta = {"delta": {"content": content}, "logprobs": {"content": entries}}
            yield f"data: {json.dumps({'choices': [delta]})}\n\n"
        yield "data: [DONE]\n\n"

    return StreamingResponse(events(), media_type="text/event-stream")


@pytest.fixture
def address(tmp_path):
    make_run(tmp_path / "runs" / "001", [record(10, 3.0), record(20, 2.5, 2.25)])
    app = Starlette(
        routes=[*routes(tmp_path / "runs"), Route("/v1/models", models),
                Route("/v1/completions", completions, methods=["POST"]),
                Route("/v1/chat/completions", chat, methods=["POST"])]
    )  # fmt: skip
    server = uvicorn.Server(uvicorn.Config(app, port=0, log_level="error"))
    thread = threading.Thread(target=server.run)
    thread.start()
    while not server.started:
        time.sleep(0.01)
    (listening,) = server.servers[0].sockets
    yield f"http://127.0.0.1:{listening.getsockname()[1]}/"
    server.should_exit = True
    thread.join()


def write(page, prompt: str, length: int) -> None:
    fields = f"$('max_tokens').value = {length}; $('text').value = ''; $('text').focus()"
    page.evaluate(fields)
    page.evaluate("$('text').dispatchEvent(new Event('input'))")
    page.command("Input.insertText", text=prompt)
    for kind in ("keyDown", "keyUp"):
        page.command("Input.dispatchKeyEvent", type=kind, key="Enter", modifiers=2)


def test_page_writes_streams_stops_and_shows_curves(address, tmp_path):
    with opened(tmp_path / "profile") as page:
        page.open(address, 390, dark=True)
        page.wait("!$('writing').hidden")
        write(page, "ca", 4)
        page.wait("$('told').textContent.includes('maximum length reached')")
        assert page.evaluate("$('text').value") == "cané?"
        marks = "[...$('marked').children].map(mark => mark.textContent + mark.className)"
        assert page.evaluate(marks) == ["nb0", "éb4", "?b8"]
        assert "4 bytes · 3.25 bits per byte" in page.evaluate("$('told').textContent")
        page.command("Input.insertText", text="!")
        shown = "$('marked').textContent.slice(0, -1)"
        assert page.evaluate(shown) == page.evaluate("$('text').value") == "cané?!"
        assert page.evaluate("$('marked').children.length") == 3

        write(page, "endless", 5000)
        page.wait("$('marked').children.length > 3")
        page.evaluate("document.querySelector('.stop:not([hidden])').click()")
        page.wait("$('told').textContent.includes('stopped')")
        assert 10 < len(page.evaluate("$('text').value")) < 4000
        write(page, "full", 4)
        page.wait("$('told').textContent == 'the queue is full'")

        page.evaluate("$('chat-tab').click()")
        page.evaluate(
            "$('system').value = 'Be brief.'; $('said').value = 'Oui?'; $('send').click()"
        )
        page.wait("talk.length == 2")
        assert page.evaluate("talk[1]") == {"role": "assistant", "content": "éja"}
        marks = "[...document.querySelectorAll('.assistant span')].map(mark => mark.className)"
        assert page.evaluate(marks) == ["b2", "b1", "b1"]

        page.evaluate("$('runs-tab').click()")
        page.wait("document.querySelectorAll('#charts path').length == 6")
        row = page.evaluate("$('rows').innerText").split()
        assert row == ["001live", "seed", "0", "20", "/", "100", "2.2500"]
        with (tmp_path / "runs" / "001" / "metrics.jsonl").open("a") as file:
            file.write(json.dumps(record(30, 2.0, 1.75)) + "\n")
        page.wait("$('rows').innerText.includes('30 / 100')")
        label = "document.querySelector('#charts svg').getAttribute('aria-label')"
        assert "held out 1.7500; 001 training 2.0000" in page.evaluate(label)
        for width in (390, 1280):
            page.open(f"{address}?{width}#runs", width)
            page.wait("document.querySelectorAll('#charts path').length == 6")
            assert page.evaluate("document.documentElement.scrollWidth") <= width
        hosts = {url.split("/")[2] for url in page.requests() if not url.startswith("data:")}
        assert hosts == {address.split("/")[2]}
        (refused,) = page.errors()  # the log has the answer that the queue is full
        assert refused["entry"]["source"] == "network"
