"""Time generation at batch 1 beside the float twin in bf16, both captured: `make bench`."""

import sys
import time

import torch

from arbcli.config.presets import preset
from arbcli.device import deterministic
from arbcli.infer.generation import Decoder
from arbcli.model.dense import ByteLM

BYTES = 512


def build(name: str, weights: str) -> ByteLM:
    """Make a model of random weights on the GPU."""
    with torch.device("cuda"):
        model = ByteLM(preset(name, weights=weights))
    if weights == "ternary":
        model.initialise(0)
    else:  # its own way draws on the CPU, for long
        with torch.no_grad():
            for weight in model.weights().values():
                weight.latent.normal_(0, min(0.1, weight.latent.shape[1] ** -0.5))
    return model


def bytes_per_second(model: ByteLM, prompt: int) -> float:
    """Continue a prompt of some bytes."""
    with model.held_weights(), deterministic():
        decoder = Decoder(model, prompt + 2 * BYTES)
        decoder.read(b"\n" * prompt)
        list(decoder.stream(32))
        torch.cuda.synchronize()
        started = time.perf_counter()
        length = sum(map(len, decoder.stream(BYTES)))
        return length / (time.perf_counter() - started)


def main(names: list[str]) -> None:
    """Print a line a model and prompt, and the ratio to the twin."""
    for name in names:
        for prompt in (1, preset(name).ctx - 300) if preset(name).ctx > 300 else (1,):
            rates = {
                kind: bytes_per_second(build(name, kind), prompt) for kind in ("ternary", "float")
            }
            ratio = rates["ternary"] / rates["float"]
            print(
                f"{name:5} after {prompt} bytes: {rates['ternary']:,.0f} bytes/s,"
                f" float twin {rates['float']:,.0f}: {ratio:.2f} x",
                flush=True,
            )


if __name__ == "__main__":
    main(sys.argv[1:] or ["small", "1b"])
