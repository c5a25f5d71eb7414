"""Time the server's engine with many clients against a batch of `arb generate`, and attack it.

    python -m benchmarks.serving [PRESET] [--clients N] [--length N] [--soak SECONDS]

The rates are of the same texts of a model with random weights, in the same run. Clients ask for
their next text when the last one is finished. The soak needs starlette and uvicorn: clients come,
leave, stall and send garbage, while one text is generated again and again and must not change.
"""

import argparse
import http.client
import json
import random
import resource
import socket
import tempfile
import threading
import time
from pathlib import Path

import torch

from arbcli.config.presets import preset
from arbcli.generation.batch import Request, generate_batch
from arbcli.generation.sampling import Sampling
from arbcli.model.language_model import LanguageModel
from arbcli.serve.engine import Engine
from arbcli.serve.texts import Piece, Text

TEXTS = 2
"""Number of texts of each client."""


def batch_rate(model: LanguageModel, clients: int, length: int) -> float:
    """Return the bytes per second of `arb generate --prompts` with all texts."""
    requests = [
        Request(prompt=b"It was", length=length, sampling=Sampling(seed=index))
        for index in range(clients * TEXTS)
    ]
    list(generate_batch(model, requests[:2], 2))  # compiles the kernels
    start = time.perf_counter()
    total = sum(len(text) for _, text in generate_batch(model, requests, clients))
    return total / (time.perf_counter() - start)


def served_rate(engine: Engine, clients: int, length: int) -> float:
    """Return the bytes per second of clients, each with one text after the other."""
    total, left = 0, clients * TEXTS
    done = threading.Event()

    def ask(index: int) -> None:
        def hear(piece: Piece) -> None:
            nonlocal total, left
            total += len(piece.symbols)
            if piece.finish:
                left -= 1
                if index + clients < clients * TEXTS:
                    ask(index + clients)
                elif not left:
                    done.set()

        sampling = Sampling(seed=index)
        engine.submit([Text(prompt=b"It was", length=length, sampling=sampling, on_piece=hear)])

    start = time.perf_counter()
    for client in range(clients):
        ask(client)
    done.wait()
    return total / (time.perf_counter() - start)


def soak(engine: Engine, seconds: float) -> dict[str, int]:
    """Attack a server for some time; return counts.

    Raises:
        RuntimeError: a text changed, a malformed request was not refused, or a slot is not free.
    """
    from arbcli.serve.app import build_app
    from arbcli.serve.server import listener, serve

    sock = listener("127.0.0.1", 0)
    port, draw = sock.getsockname()[1], random.Random(0)
    thread = threading.Thread(target=serve, args=(build_app(engine), engine, sock, 60))
    thread.start()
    head = "POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
    counts = dict.fromkeys(("texts", "refused", "left", "stalled"), 0)
    stalled: list[socket.socket] = []

    def ask(body: bytes) -> tuple[int, bytes]:
        connection = http.client.HTTPConnection("127.0.0.1", port, timeout=60)
        connection.request("POST", "/v1/completions", body, {"Content-Type": "application/json"})
        answer = connection.getresponse()
        status, content = answer.status, answer.read()
        connection.close()
        return status, content

    def text() -> str:
        body = json.dumps({"prompt": "It was", "seed": 7, "max_tokens": 16}).encode()
        status, content = ask(body)
        if status != 200:
            raise RuntimeError(f"status {status}: {content!r}")
        return json.loads(content)["choices"][0]["text"]

    expected, start, first_peak = text(), time.perf_counter(), 0
    while (passed := time.perf_counter() - start) < seconds:
        for _ in range(20):
            field = draw.choice(["prompt", "max_tokens", "n", "stop", "stream", "logprobs", "x"])
            wrong = json.dumps({"prompt": "a"} | {field: draw.choice([-5, {}, [[]], 1e99])})
            garbage = draw.randbytes(draw.randint(0, 99))
            status, content = ask(draw.choice([garbage, wrong.encode()]))
            if not 400 <= status < 500 or "error" not in json.loads(content):
                raise RuntimeError(f"status {status}: {content!r}")
            counts["refused"] += 1
        body = json.dumps(
            {"prompt": "a", "max_tokens": engine.positions - 1, "n": 3, "stream": True}
        ).encode()
        with socket.create_connection(("127.0.0.1", port)) as client:
            client.sendall(f"{head}Content-Length: {len(body)}\r\n\r\n".encode() + body)
            client.recv(draw.randint(1, 4000))
        counts["left"] += 1
        client = socket.create_connection(("127.0.0.1", port))  # half open, or with a slow body
        client.sendall(
            draw.choice([b"", b"GET / HT", f"{head}Content-Length: 9\r\n\r\n{{".encode()])
        )
        stalled.append(client)
        if len(stalled) > 100:
            stalled.pop(0).close()
        counts["stalled"] += 1
        if text() != expected:
            raise RuntimeError("a text changed")
        counts["texts"] += 1
        if passed > seconds / 2 and not first_peak:
            first_peak = _peak_bytes()
    for client in stalled:
        client.close()
    end = time.perf_counter() + 30
    while engine.num_running or engine.num_waiting:
        if time.perf_counter() > end:
            raise RuntimeError("a slot is not free")
        time.sleep(0.01)
    engine.on_failure()  # stops the server
    thread.join()
    return counts | {"peak_bytes": _peak_bytes(), "grown_bytes": _peak_bytes() - first_peak}


def _peak_bytes() -> int:
    return 1024 * resource.getrusage(resource.RUSAGE_SELF).ru_maxrss


def main() -> None:
    """Print the rates, their ratio, and what the soak counted, as JSON."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("preset", nargs="?", default="1b")
    parser.add_argument("--clients", type=int, default=64)
    parser.add_argument("--length", type=int, default=512)
    parser.add_argument("--soak", type=float, default=0)
    asked = parser.parse_args()
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    with torch.device(device):
        model = LanguageModel(preset(asked.preset), dtype)
    model.initialise(0)
    report: dict[str, object] = {"preset": asked.preset, "device": str(device)}
    report["batch_rate"] = batch = batch_rate(model, asked.clients, asked.length)
    with tempfile.TemporaryDirectory() as folder:
        positions = len("It was") + asked.length
        engine = Engine(model, Path(folder, "step"), texts=asked.clients, positions=positions)
        with engine:
            served_rate(engine, asked.clients, 8)
            report["served_rate"] = served = served_rate(engine, asked.clients, asked.length)
            report["ratio"] = served / batch
            if asked.soak:
                report["soak"] = soak(engine, asked.soak)
    print(json.dumps(report))


if __name__ == "__main__":
    main()
