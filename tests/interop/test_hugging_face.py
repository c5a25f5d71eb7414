"""A folder for Transformers: the same weights, and Transformers computes the same with them."""

import json
import re

import pytest
import torch
from marks import mostly_slow

from arbcli.base.atomic_files import write_json
from arbcli.base.reading import read_json
from arbcli.base.run_files import COMPANIONS
from arbcli.generation.generation import generate
from arbcli.generation.load import load_model, load_weights
from arbcli.generation.sampling import Sampling
from arbcli.interop.exporting import export
from arbcli.kernels.runtime.device import default_compute

TEXT = "naïve Ā \0\x7f  x\n\n\ty'll"


@pytest.mark.parametrize("sub_norms", [False, True])
def test_card_describes_the_model(saved, tmp_path, sub_norms):
    """Settings of models without sub-norms are recorded in `commands/json_output.txt`."""
    checkpoint = saved(sub_norms=sub_norms, layers=3, ctx=48)
    report = export(checkpoint, "hf", out=tmp_path / "model", kind="f32")
    data = (tmp_path / "model" / "model.safetensors").read_bytes()
    assert int.from_bytes(data[:8], "little") % 8 == 0  # so that numbers are aligned
    config = read_json(tmp_path / "model" / "config.json")
    assert (config["arb.step"], config["arb.origin"]) == (7, report.origin)
    said = (tmp_path / "model" / "README.md").read_text()
    assert dict(re.findall(r"^\| (.+?) \| (.+?) \|$", said, re.MULTILINE)) == {
        "weights": f"{report.num_weights:,}, each -1, 0 or +1 times a scale of 32",
        "shape": "3 blocks of width 64, 2 heads, MLP 192, context 48 bytes",
        "tokens": "the 256 bytes; byte 0 ends a text",
        "norms before the output projections": "yes" if sub_norms else "no",
        "update rule": "moment",
        "steps": "7",
        "trained in": default_compute(torch.device("cpu")),  # as no run says otherwise
        "origin": f"checkpoint with the digest `{report.origin}`",
    }
    assert ("trust_remote_code=True" in said) == sub_norms
    weights = load_weights(checkpoint, print).model.weights().values()
    assert report.num_weights == sum(weight.num_weights for weight in weights)
    assert report.bytes == sum(file.stat().st_size for file in (tmp_path / "model").iterdir())
    assert (report.step, report.format, report.type) == (7, "hf", "F32")


def test_card_has_the_figures_of_the_run(saved, tmp_path):
    checkpoint = saved()
    config = {"compute": "fp32"}
    text = {"train_bytes": 1234567, "val_bytes": 89}
    (tmp_path / "config.json").write_text(json.dumps({"config": config, "text": text}))
    # the checkpoint is of step 7: what came later is of another model
    records = [{"step": 5, "val_loss": 2.0}, {"step": 7, "val_loss": None}, {"step": 9}]
    records += [{"step": 8, "val_loss": 1.0}, {"val_loss": 0.5}, [7]]
    (tmp_path / "metrics.jsonl").write_text("".join(json.dumps(r) + "\n" for r in records) + "{")
    export(checkpoint, "hf", out=tmp_path / "model")
    card = (tmp_path / "model" / "README.md").read_text()
    assert "1,234,567 bytes, and 89 held out" in card
    assert "| trained in | fp32 |" in card
    assert "2.0000 nats = 2.8854 bits a byte, after 5 steps" in card


def test_special_tokens_and_template_of_a_run_go_along(saved, tmp_path):
    """A run that begins without an import keeps them for chats."""
    checkpoint = saved(sub_norms=False, fields={"vocabulary": 300})
    run = tmp_path / COMPANIONS
    run.mkdir()
    write_json(run / "tokenizer_config.json", {"eos_token": "<end>"})
    write_json(run / "generation_config.json", {"eos_token_id": [7, 9]})
    (run / "chat_template.jinja").write_text("{{ messages }}")
    folder = tmp_path / "model"
    export(checkpoint, "hf", out=folder)
    settings = read_json(folder / "tokenizer_config.json")
    assert settings["eos_token"] == "<end>"
    assert settings["tokenizer_class"] == "PreTrainedTokenizerFast"
    for name in ("config.json", "generation_config.json"):
        assert read_json(folder / name)["eos_token_id"] == [7, 9]
    assert (folder / "chat_template.jinja").read_text() == "{{ messages }}"


ATTENTION = {
    "qwen2": {"query_key_norm": "none", "bias": True}, "mistral": {"query_key_norm": "none"},
    "qwen3": {}, "llama": {"query_key_norm": "none", "bias": True, "output_bias": True},
    "arb_byte_lm": {"sub_norm": True},
}  # fmt: skip
"""Fields by the `model_type` that they become."""


@pytest.mark.parametrize("kind", mostly_slow(ATTENTION, lambda kind: kind != "qwen2"))
def test_transformers_reads_the_bytes_of_a_text(saved, tmp_path, kind, transformers):
    """Its own tokenizer of a Qwen 2 composes characters."""
    export(saved(sub_norms=False, fields=ATTENTION[kind]), "hf", out=tmp_path / "model")
    assert json.loads((tmp_path / "model" / "config.json").read_text())["model_type"] == kind
    for trust in (None, False, kind != "arb_byte_lm"):
        tokenizer = transformers.AutoTokenizer.from_pretrained(
            tmp_path / "model", trust_remote_code=trust
        )
        ids = tokenizer("cafe\u0301\n 12")["input_ids"]
        assert ids == list("cafe\u0301\n 12".encode())


def test_transformers_computes_the_same_with_sub_norms(saved, tmp_path, transformers):
    checkpoint, folder = saved(), tmp_path / "model"
    export(checkpoint, "hf", out=folder)
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    assert tokenizer(TEXT)["input_ids"] == list(TEXT.encode())
    assert tokenizer.decode(list(TEXT.encode())) == TEXT
    load = transformers.AutoModelForCausalLM.from_pretrained
    with pytest.raises(ValueError, match="trust_remote_code"):
        load(folder, trust_remote_code=False)  # never loaded as a model without
    ids = torch.tensor([list(range(32, 64))])
    for compute, dtype, bound in (("fp32", torch.float32, 1e-5), ("bf16", torch.bfloat16, 0.05)):
        theirs = load(folder, dtype=dtype, trust_remote_code=True)
        ours = load_model(checkpoint, device="cpu", compute=compute)
        with torch.no_grad():
            wanted = ours(ids).float()
            assert (theirs(ids).logits.float() - wanted).abs().max() < bound * wanted.abs().max()
        if compute == "fp32":  # beyond the context, too
            text = b"".join(generate(ours, b"import ", 60, Sampling(temperature=0)))
            prompt = torch.tensor([list(b"import ")])
            tokens = theirs.generate(prompt, max_new_tokens=60, do_sample=False, eos_token_id=None)
            assert bytes(tokens[0, 7:].tolist()) == text
            pipeline = transformers.pipeline("text-generation", model=theirs, tokenizer=tokenizer)
            assert pipeline("import ", max_new_tokens=5)[0]["generated_text"].startswith("import ")
