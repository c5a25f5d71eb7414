"""Generate text from a model, a byte at a time."""

from collections.abc import Iterator

import torch

from arbcli.model.lm import ByteLM


@torch.no_grad()
def generate(
    model: ByteLM, prompt: bytes, length: int, *, temperature: float = 0.8, seed: int = 0
) -> Iterator[int]:
    """Continue a prompt.

    Args:
        model: any `ByteLM`; it sees at most `config.ctx` bytes back.
        prompt: at least one byte.
        length: bytes to generate.
        temperature: divides the logits; 0 always takes the likeliest byte.
        seed: of the choice among bytes.

    Yields:
        Bytes, as integers in 0..255.
    """
    device = next(model.buffers()).device if model.config.weights == "ternary" else None
    device = device or next(model.parameters()).device
    generator = torch.Generator().manual_seed(seed)
    context = torch.tensor(list(prompt), dtype=torch.int64)
    for _ in range(length):
        context = context[-model.config.ctx :]
        logits = model(context[None].to(device))[0, -1].float().cpu()
        if temperature == 0:
            byte = logits.argmax()[None]
        else:
            byte = torch.multinomial((logits / temperature).softmax(0), 1, generator=generator)
        context = torch.cat([context, byte])
        yield int(byte)
