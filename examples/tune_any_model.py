"""Tune a causal language model of Transformers on a text with integer weights, in a plain loop.

    pip install '.[export-test]'
    python examples/tune_any_model.py Qwen3-0.6B book.txt --out tuned

It writes a folder with bf16 weights that Transformers and others load.
"""

import argparse
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

import arbcli


def main() -> None:
    """Parse arguments, and tune."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("model", help="folder with weights and a tokenizer")
    parser.add_argument("text", type=Path, help="text to learn")
    parser.add_argument("--out", type=Path, required=True, help="folder to write")
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--batch", type=int, default=4, help="windows of a step")
    parser.add_argument("--ctx", type=int, default=512, help="tokens of a window")
    parser.add_argument("--lr", type=float, default=0.003, help="learning rate")
    options = parser.parse_args()

    device = "cuda" if torch.cuda.is_available() else "cpu"
    tokenizer = AutoTokenizer.from_pretrained(options.model)
    model = AutoModelForCausalLM.from_pretrained(options.model, dtype=torch.bfloat16).to(device)
    optimizer = arbcli.to_integers(model, lr=options.lr)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, options.steps)
    print("floats that are left:", ", ".join(arbcli.floats(model)) or "none")

    ids = torch.tensor(tokenizer(options.text.read_text())["input_ids"])
    windows = ids.unfold(0, options.ctx, options.ctx)
    generator = torch.Generator().manual_seed(0)
    model.train()
    for step in range(options.steps):
        chosen = torch.randint(len(windows), (options.batch,), generator=generator)
        batch = windows[chosen].to(device)
        loss = model(input_ids=batch, labels=batch).loss
        loss.backward()
        optimizer.step()
        schedule.step()
        print(f"step {step}: {loss.item():.3f} nats a token")
    arbcli.export_float(model, options.out)
    tokenizer.save_pretrained(options.out)


if __name__ == "__main__":
    main()
