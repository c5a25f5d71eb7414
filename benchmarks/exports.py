"""Run exports of trained models in llama.cpp and Transformers, and compare with `arb`.

    python -m benchmarks.exports RUN [RUN...] [--out DIR]

The runs are of `--no-sub-norms`, with a context of 256 bytes or more. Compared with those of `arb`
in float32 are the logarithms of the probabilities of all 256 bytes, after some beginnings of the
held-out text, and 200 bytes of greedy text. All logarithms are also compared with those of the
reference in float64, to tell whose error a difference is.
"""

import dataclasses
import shutil
import tempfile
from collections.abc import Callable
from pathlib import Path

import torch
from torch import Tensor
from transformers import AutoModelForCausalLM

from arbcli.base.reading import read_json
from arbcli.base.run_files import CONFIG
from arbcli.config.model import ModelConfig
from arbcli.config.training import train_config_from
from arbcli.generation.generation import Sampling, generate
from arbcli.generation.load import load_model
from arbcli.interop.exporting import export
from arbcli.interop.gguf.export import smallest_type
from arbcli.model.language_model import LanguageModel
from arbcli.model.packed import TernaryTensor
from arbcli.training.directory import open_texts_again
from arbcli.verify.reference import reference_model
from arbcli.verify.update_reference import reference_weight
from benchmarks import results
from benchmarks.llama_cpp import Llama

LENGTHS = (1, 2, 3, 7, 20, 50, 100, 150, 200, 250)
PROMPT, LENGTH = b"import ", 200
Predict = Callable[[bytes], Tensor]


def main() -> None:
    """Print a line for each export, and write the rows."""
    parser = results.options("exports", "Compare exports with what arb computes.")
    parser.add_argument("runs", nargs="+", type=Path, metavar="RUN")
    args = parser.parse_args()
    rows = [row for run in args.runs for row in measure(run)]
    results.save("exports", rows, command=results.command_line("exports"), folder=args.out)


def measure(run: Path) -> list[dict]:
    """Export a run each way, and compare."""
    facts = read_json(run / CONFIG)
    texts = open_texts_again(facts, train_config_from(facts))
    text = texts.val.read(0, max(LENGTHS))
    model = load_model(run, device="cpu", compute="fp32")
    exact = in_float64(model, text)
    ours = predicted(model, text)
    greedy = b"".join(generate(model, PROMPT, LENGTH, Sampling(temperature=0)))
    rows = [about(model.config) | distances(ours, ours, exact) | {"program": "arb", "type": "F32"}]
    smallest = smallest_type(model.config).name.lower()
    for program, types in (
        ("llama.cpp", dict.fromkeys(("f32", "bf16", "f16", smallest))),
        ("Transformers", ("f32", "bf16")),
    ):
        for kind in types:
            row, theirs = run_export(run, program, kind, text, greedy)
            rows.append(row | about(model.config) | distances(theirs, ours, exact))
    for row in rows:
        print(", ".join(f"{name} {value}" for name, value in row.items()), flush=True)
    return rows


def run_export(
    run: Path, program: str, kind: str, text: bytes, greedy: bytes
) -> tuple[dict, Tensor]:
    """Export a run one way: what that gave, and the log-probabilities that the program finds."""
    folder = Path(tempfile.mkdtemp())
    try:
        form = "gguf" if program == "llama.cpp" else "hf"
        report = export(run, form, out=folder / "model", kind=kind)
        load = in_llama_cpp if form == "gguf" else in_transformers
        predict, made = load(folder / "model", kind)
        theirs = torch.stack([predict(text[:n]) for n in LENGTHS])
    finally:
        shutil.rmtree(folder)
    pairs = enumerate(zip(greedy, made, strict=False))
    row = {
        "program": program,
        "type": report.type,
        "bytes": report.bytes,
        "num_weights": report.num_weights,
        "step": report.step,
        "first_divergence": next((index for index, (a, b) in pairs if a != b), None),
    }
    return row, theirs


def distances(found: Tensor, ours: Tensor, exact: Tensor) -> dict[str, float]:
    """Compare log-probabilities with those of `arb`, and with those in float64."""
    return {
        "largest": float((found - ours).abs().max()),
        "from_float64": float((found - exact).abs().max()),
    }


def predicted(model: LanguageModel, text: bytes) -> Tensor:
    """Compute the log-probabilities after every beginning, (len(LENGTHS), 256) float64."""
    with torch.no_grad():
        return torch.cat([log_probabilities(model(ids(text[:n]))) for n in LENGTHS])


def in_float64(model: LanguageModel, text: bytes) -> Tensor:
    """Compute the same by the reference."""
    weights = {
        name: reference_weight(tensor)
        for name, tensor in model.weights().items()
        if isinstance(tensor, TernaryTensor)
    }
    logits, _ = reference_model(weights, model.config, ids(text))
    return logits.log_softmax(-1)[0, [n - 1 for n in LENGTHS]]


def in_llama_cpp(path: Path, _kind: str) -> tuple[Predict, bytes]:
    """Load a file: what predicts, and the greedy text."""
    llama = Llama(path, max(LENGTHS) + 1)
    return llama.log_probabilities, llama.greedy(PROMPT, LENGTH)


def in_transformers(path: Path, kind: str) -> tuple[Predict, bytes]:
    """Load a folder: what predicts, and the greedy text."""
    dtype = {"f32": torch.float32, "bf16": torch.bfloat16}[kind]
    model = AutoModelForCausalLM.from_pretrained(path, dtype=dtype)
    prompt = ids(PROMPT)
    made = model.generate(prompt, max_new_tokens=LENGTH, do_sample=False)

    def predict(text: bytes) -> Tensor:
        with torch.no_grad():
            return log_probabilities(model(ids(text)).logits)[0]

    return predict, bytes(made[0, prompt.shape[1] :].tolist())


def ids(text: bytes) -> Tensor:
    """Make a batch of one."""
    return torch.tensor([list(text)])


def log_probabilities(logits: Tensor) -> Tensor:
    """Take the last of (1, T, 256) logits: (1, 256) float64."""
    return logits[:, -1].detach().double().log_softmax(-1)


def about(config: ModelConfig) -> dict:
    """Name a model by what its weights are."""
    shape = dataclasses.asdict(config)
    return {"model": " ".join(str(shape[name]) for name in ("rule", "digits", "scale_type"))}


if __name__ == "__main__":
    main()
