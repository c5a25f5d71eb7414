"""How close models of Transformers are once they are read in, and what reading takes.

    python -m benchmarks.imports [--large] [--out DIR]

Every kind is made by Transformers with random weights (width 512, 6 layers, 4,096 tokens), saved in
bf16 and imported. Compared with Transformers in float32, on 4 x 256 random tokens: the float
baseline, the integers, and the same weights in Q8_0, as llama.cpp rounds them. `--large` reads a
folder of Qwen3-0.6B's shape instead, and takes time and memory.
"""

import json
import math
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import torch
import transformers
from safetensors.torch import save_file
from torch import Tensor

from arbcli.generation.load import load_weights
from arbcli.interop.huggingface.config_json import read_config
from arbcli.interop.huggingface.dense import sources
from arbcli.interop.huggingface.folder import WeightFolder
from arbcli.interop.importing import import_folder, read_float
from arbcli.model.build import build_model
from benchmarks import results

SIZES = {
    "vocab_size": 4096, "hidden_size": 512, "intermediate_size": 1408, "num_hidden_layers": 6,
    "num_attention_heads": 8, "num_key_value_heads": 4, "max_position_embeddings": 512,
    "tie_word_embeddings": False,
}  # fmt: skip
LLAMA3 = {
    "rope_theta": 5e5, "rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0,
    "high_freq_factor": 4.0, "original_max_position_embeddings": 128,
}  # fmt: skip
KINDS: dict[str, tuple[str, dict[str, Any]]] = {
    "Llama 2": ("Llama", {"rms_norm_eps": 1e-5}),
    "Llama 3": ("Llama", {"rms_norm_eps": 1e-5, "rope_parameters": LLAMA3}),
    "SmolLM": ("Llama", {"rms_norm_eps": 1e-5, "tie_word_embeddings": True}),
    "Qwen 2": ("Qwen2", {}),
    "Qwen 3": ("Qwen3", {"head_dim": 128}),
    "Mistral": ("Mistral", {"rms_norm_eps": 1e-5, "sliding_window": 128}),
}
STORAGE = (("moment", "T32"), ("moment", "T64"), ("nibble", "T32"))
LARGE = {
    "vocab_size": 151936, "hidden_size": 1024, "intermediate_size": 3072, "num_hidden_layers": 28,
    "num_attention_heads": 16, "num_key_value_heads": 8, "max_position_embeddings": 40960,
    "tie_word_embeddings": True, "head_dim": 128, "model_type": "qwen3", "rms_norm_eps": 1e-6,
    "rope_theta": 1e6,
}  # fmt: skip
SHARD = 2**28
"""Weights of a shard."""
MEASURE = """
import json, resource, sys
from pathlib import Path
from arbcli.interop.importing import import_folder
before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
report = import_folder(Path(sys.argv[1]), Path(sys.argv[2]), rule=sys.argv[3])
peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
print(json.dumps([report.num_weights, report.bytes, report.seconds, (peak - before) * 1024]))
"""


def main() -> None:
    """Print a line for each model, and write the rows."""
    parser = results.options("imports", "Measure imports.")
    parser.add_argument("--large", action="store_true", help="read a model of 0.6 B weights")
    args = parser.parse_args()
    folder = Path(tempfile.mkdtemp())
    try:
        rows = measure_large(folder) if args.large else measure_kinds(folder)
    finally:
        shutil.rmtree(folder)
    results.save("imports", rows, command=results.command_line("imports"), folder=args.out)


@torch.no_grad()
def measure_kinds(folder: Path) -> list[dict]:
    """Read every kind, and compare."""
    rows = []
    for kind, (name, about) in KINDS.items():
        random_model(name, about).save_pretrained(folder / kind)
        load = transformers.AutoModelForCausalLM.from_pretrained  # whose angles stay float32
        theirs = load(folder / kind, dtype=torch.float32).eval()
        ids = torch.randint(SIZES["vocab_size"], (4, 256), generator=seeded(1))
        wanted = log_probabilities(theirs(ids).logits)
        values = json.loads((folder / kind / "config.json").read_text())
        twin = read_float(WeightFolder(folder / kind), read_config(values, kind, weights="float"))
        of_float = float((twin(ids) - theirs(ids).logits).abs().max())
        for weight in theirs.parameters():
            if weight.dim() == 2:
                weight.copy_(in_q8_0(weight))
        of_q8_0 = divergence(wanted, log_probabilities(theirs(ids).logits))
        for rule, scale_type in STORAGE:
            run = folder / f"{kind}-{rule}-{scale_type}"
            report = import_folder(folder / kind, run, rule=rule, scale_type=scale_type)
            ours = load_weights(run, print).model
            rows.append(
                {
                    "kind": kind,
                    "rule": rule,
                    "scale_type": scale_type,
                    "num_weights": report.num_weights,
                    "from_float": of_float,
                    "relative_error": report.relative_error,
                    "divergence": divergence(wanted, log_probabilities(ours(ids))),
                    "of_q8_0": of_q8_0,
                }
            )
            print(rows[-1], flush=True)
    return rows


def random_model(name: str, about: dict) -> transformers.PreTrainedModel:
    """Make a model in bf16 whose logits spread as those of a trained one."""
    torch.manual_seed(0)
    config = getattr(transformers, f"{name}Config")(**SIZES | about)
    model = getattr(transformers, f"{name}ForCausalLM")(config)
    with torch.no_grad():
        for weight in model.parameters():
            drawn = torch.randn_like(weight) / math.sqrt(weight.shape[-1])
            weight.copy_(drawn if weight.dim() == 2 else 0.1 * drawn + (drawn.numel() > 0))
    return model.bfloat16()


def measure_large(folder: Path) -> list[dict]:
    """Write shards of random weights in bf16, and read them in a process of their own."""
    source = folder / "large"
    source.mkdir()
    (source / "config.json").write_text(json.dumps(LARGE))
    with torch.device("meta"):
        model = build_model(read_config(LARGE, "it"), torch.float32)
    write_shards(source, {p.hugging_face: p.shape for s in sources(model) for p in s.parts})
    rows = []
    for rule in ("moment", "nibble"):
        run = folder / rule
        words = [sys.executable, "-c", MEASURE, str(source), str(run), rule]
        done = subprocess.run(words, capture_output=True, text=True, check=True)
        number, size, seconds, peak = json.loads(done.stdout)
        rows.append(
            {"kind": "Qwen3-0.6B's shape", "rule": rule, "scale_type": "T32", "num_weights": number,
             "bytes": size, "seconds": seconds, "peak_bytes": peak}
        )  # fmt: skip
        print(rows[-1], flush=True)
        shutil.rmtree(run)
    return rows


def write_shards(source: Path, shapes: dict[str, tuple[int, ...]]) -> None:
    """Write random weights of these shapes, some in each shard, and the index."""
    shards: list[dict[str, Tensor]] = [{}]
    where: dict[str, str] = {}
    generator, number = seeded(0), 0

    def flush() -> None:
        nonlocal number
        number += 1
        name = f"model-{number:05d}.safetensors"
        save_file(shards[-1], source / name)
        where.update(dict.fromkeys(shards[-1], name))
        shards[-1] = {}

    for name, shape in shapes.items():
        shards[-1][name] = (torch.randn(shape, generator=generator) * 0.02).bfloat16()
        if sum(weight.numel() for weight in shards[-1].values()) >= SHARD:
            flush()
    flush()
    index = {"metadata": {}, "weight_map": where}
    (source / "model.safetensors.index.json").write_text(json.dumps(index))


def seeded(seed: int) -> torch.Generator:
    """Make a generator."""
    return torch.Generator().manual_seed(seed)


def in_q8_0(weight: Tensor) -> Tensor:
    """Round as llama.cpp does: blocks of 32, whose largest has level 127, and an fp16 scale."""
    blocks = weight.reshape(-1, 32)
    step = blocks.abs().amax(dim=1, keepdim=True) / 127
    return ((blocks / step).round() * step.half().float()).view_as(weight)


def log_probabilities(logits: Tensor) -> Tensor:
    """Compute them in float64."""
    return logits.double().log_softmax(-1)


def divergence(wanted: Tensor, found: Tensor) -> float:
    """Average the Kullback-Leibler divergence over the positions, in nats."""
    return float((wanted.exp() * (wanted - found)).sum(dim=-1).mean())


if __name__ == "__main__":
    main()
