"""Train a small model, export it to GGUF, and let llama.cpp write with it.

    pip install '.[export-test]'
    python examples/train_export_run.py book.txt

Without a text it reads the source of Python's standard library. It takes some minutes on a CPU.
"""

import argparse
from pathlib import Path

import xllamacpp

import arbcli
from arbcli.generation.generation import generate
from arbcli.generation.sampling import Sampling
from arbcli.interop.exporting import export
from arbcli.training.configure import new_config
from arbcli.training.observer import Observer
from arbcli.training.record import Record
from arbcli.training.run import start_run

PROMPT = b"import "


class Progress(Observer):
    """Prints a line for every record."""

    def recorded(self, record: Record) -> None:
        """Print step and loss."""
        print(f"step {record.step}: {record.loss:.3f} nats a byte")


def continue_in_llama_cpp(path: Path, length: int) -> bytes:
    """Continue `PROMPT` by the likeliest bytes; tokens are bytes."""
    about = xllamacpp.CommonParams()
    about.model.path, about.n_ctx, about.n_parallel = str(path), len(PROMPT) + length + 1, 1
    about.warmup, about.verbosity = False, -1
    about.cache_type_k = about.cache_type_v = xllamacpp.ggml_type.GGML_TYPE_F32
    server = xllamacpp.Server(about)
    ask = {"prompt": list(PROMPT), "max_tokens": length, "temperature": 0, "n_probs": 1}
    answer = server.handle_completions(ask)
    return bytes(token["id"] for token in answer["choices"][0]["logprobs"]["content"])


def main() -> None:
    """Do all of it, and compare what both write."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("data", nargs="*", help="files, folders or globs")
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--length", type=int, default=200, help="bytes to write")
    parser.add_argument("--out", type=Path, default=Path("runs/example"))
    options = parser.parse_args()

    # without sub-norms, which GGUF has no place for; a context that holds all that is written,
    # because llama.cpp looks back to the beginning and a model of ours no further than its context
    config = new_config(
        sub_norms=False, ctx=256, batch=8, steps=options.steps, data=options.data, compute="fp32"
    )
    report = start_run(config, options.out, Progress())
    print(f"held-out loss {report.val_loss:.4f} nats a byte")

    model = arbcli.load(options.out, compute="fp32")
    ours = b"".join(generate(model, PROMPT, options.length, Sampling(temperature=0)))
    print(f"arb\n{PROMPT + ours!r}")
    for kind in ("f32", None):
        path = options.out / f"{kind or 'smallest'}.gguf"
        exported = export(options.out, "gguf", out=path, kind=kind)
        theirs = continue_in_llama_cpp(path, options.length)
        pairs = enumerate(zip(ours, theirs, strict=False))
        first = next((index for index, (a, b) in pairs if a != b), None)
        same = "the same text" if first is None else f"another text from byte {first} on"
        print(f"llama.cpp, {exported.type}, {exported.bytes:,} bytes: {same}")


if __name__ == "__main__":
    main()
