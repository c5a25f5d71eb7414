"""Time the server's engine with many clients against a batch of `arb generate`.

    python -m benchmarks.serving [PRESET] [--clients N] [--length N]

The rates are of the same texts of a model with random weights, in the same run. Clients ask for
their next text when the last one is finished.
"""

import argparse
import json
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


def main() -> None:
    """Print the rates and their ratio as JSON."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("preset", nargs="?", default="1b")
    parser.add_argument("--clients", type=int, default=64)
    parser.add_argument("--length", type=int, default=512)
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
    print(json.dumps(report))


if __name__ == "__main__":
    main()
