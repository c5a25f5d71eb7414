"""Model card of a run: the configuration and the training."""

import math
from contextlib import suppress
from pathlib import Path

from arbcli.base.errors import ArbError
from arbcli.base.reading import read_json
from arbcli.base.run_files import COMPANIONS, CONFIG
from arbcli.config.model import VOCABULARY, ModelConfig
from arbcli.generation.load import Weights
from arbcli.interop.huggingface.config_json import NAME
from arbcli.interop.huggingface.dense import Shape, known_shape
from arbcli.model.checkpoint import TOKENIZER_DIGEST
from arbcli.training.record import read_records

TEXT = {"text": dict, "text.train_bytes": int, "text.val_bytes": int}
"""Fields of the `config.json` of a run that a card shows."""
USE = """```python
from transformers import AutoModelForCausalLM, AutoTokenizer

tokenizer = AutoTokenizer.from_pretrained(FOLDER)
model = AutoModelForCausalLM.from_pretrained(FOLDER{trust})
ids = tokenizer("import ", return_tensors="pt")
print(tokenizer.decode(model.generate(**ids, max_new_tokens=200)[0]))
```
"""


def model_card(weights: Weights, name: str, *, packed: bool = False) -> str:
    """Write a card in Markdown, with the figures of the run if it lies next to the checkpoint.

    Args:
        weights: the model.
        name: its name.
        packed: whether the folder has packed weights, and code that reads them.
    """
    config, checkpoint = weights.model.config, weights.checkpoint
    number = weights.model.num_weights
    shape = None if packed else known_shape(config)
    is_bitnet = shape is not None and shape.bitnet
    is_float = config.weights != "ternary"
    is_ternary = not is_float and (config.digits == "trit" or is_bitnet)
    value = "-1, 0 or +1" if is_ternary else "an integer of one byte"
    value += " (in the embedding, an integer of one byte)" if is_bitnet else ""
    if is_ternary and config.symbol_digits:
        value += " (in the embedding and the head, an integer of one byte)"
    encoding = f"each {value} times a scale of {config.group_size}"
    reads_bytes = config.vocabulary == VOCABULARY and TOKENIZER_DIGEST not in checkpoint.data
    units = "bytes" if reads_bytes else "tokens"
    description = _dense(shape) if shape else _parts(config)
    base = base_model(weights.path.parent / COMPANIONS)
    rows = {
        **({"base model": base} if base else {}),
        "weights": f"{number:,}" + ("" if is_float else f", {encoding}"),
        "shape": f"{description.pop('shape')}, context {config.ctx} {units}",
        "tokens": "the 256 bytes; byte 0 ends a text"
        if reads_bytes
        else f"{config.vocabulary:,}, of `tokenizer.json`",
        **description,
        **({} if is_float else {"update rule": config.rule_text}),
        "steps": f"{checkpoint.step:,}",
        "trained in": weights.compute,
        "origin": f"checkpoint with the digest `{weights.origin}`",
        **run_figures(weights.path.parent, checkpoint.step),
    }
    table = "".join(f"| {key} | {value} |\n" for key, value in rows.items())
    needs_code = shape is None or shape.sub_norms
    use = USE.format(trust=", trust_remote_code=True" if needs_code else "")
    kind = "float" if is_float else "ternary" if is_ternary else "int8"
    state = "float32" if is_float else "packed trits and int8"
    base_line = f"base_model: {base}\n" if base and "/" in base else ""
    return (
        "---\nlibrary_name: transformers\npipeline_tag: text-generation\n"
        f"tags: [arb, {kind}]\n{base_line}---\n\n# {name}\n\n"
        f"A language model over {units}, trained by `arb` with {state} as its whole state.\n\n"
        f"| | |\n|---|---|\n{table}\n{use}"
    )


def _dense(shape: Shape) -> dict[str, str]:
    """Describe a model of an architecture that Transformers has."""
    keys = "" if shape.kv_heads == shape.heads else f" on {shape.kv_heads} of keys"
    return {
        "shape": f"{shape.layers} blocks of width {shape.dim}, {shape.heads} heads{keys},"
        f" MLP {shape.ffn}",
        "norms before the output projections": "yes" if shape.sub_norms else "no",
    }


def _parts(config: ModelConfig) -> dict[str, str]:
    """Describe a model by the kinds of its parts."""
    widths = " and ".join(str(stage.dim) for stage in config.stages)
    kinds = ", ".join(sorted({part.kind for _, part in config.specs_and_parts()}))
    blocks = sum(len(blocks) for stage in config.stages for blocks in stage.lists)
    return {"shape": f"{blocks} blocks of width {widths}", "parts": kinds}


def base_model(companions: Path) -> str | None:
    """Return the name of the model that a run was imported from; None if it was not."""
    path = companions / CONFIG
    return read_json(path, {NAME: str | None}).get(NAME) if path.exists() else None


def run_figures(run: Path, step: int) -> dict[str, str]:
    """Return the text and the losses of a run at a step; empty if there is no run."""
    figures: dict[str, str] = {}
    with suppress(ArbError):
        text = read_json(run / CONFIG, TEXT)["text"]
        figures["text"] = f"{text['train_bytes']:,} bytes, and {text['val_bytes']:,} held out"
    with suppress(ArbError):
        for record in read_records(run):
            if record["step"] <= step and record.get("val_loss") is not None:
                bits = record["val_loss"] / math.log(2)
                loss = f"{record['val_loss']:.4f} nats = {bits:.4f} bits a byte"
                figures["held-out loss"] = f"{loss}, after {record['step']:,} steps"
    return figures
