"""Models of any parts for Transformers: it runs their code without arb, and computes the same."""

import os
import sys
import warnings
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from apparatus.forking import run_forked
from made_runs import checkpoint_of
from safetensors.torch import load_file

from arbcli.base.errors import ArbError
from arbcli.config import kinds
from arbcli.config.model import ModelConfig
from arbcli.config.parts.base import every_part
from arbcli.families.compressed.presets import compressed
from arbcli.families.graph.config import QuantiserConfig
from arbcli.families.graph.presets import graph
from arbcli.families.hnet.config import ChunkingConfig
from arbcli.families.hnet.presets import hnet
from arbcli.generation.generation import generate
from arbcli.generation.sampling import Sampling
from arbcli.interop.exporting import export
from arbcli.interop.huggingface.remote import remote_code
from arbcli.model.checkpoint import save_checkpoint
from arbcli.model.language_model import LanguageModel
from arbcli.verify.models import COMPRESSED, GRAPH, MODELS, TWO_STAGES
from arbcli.verify.subjects import Subject

POOLED = COMPRESSED | {"head_width": 12, "mean_ratio": 7, "key_gain": True}
"""Heads of a width that kernels of a CPU read."""
BALANCED = {"moe": True, "graph": True, "moe_gate": "softplus", "shared_expert": True}


def both_books() -> ModelConfig:
    """Assemble all parts of an `arb` preset, with a codebook of each kind."""
    config = graph(**GRAPH, **BALANCED, moe_clamp=True, graph_gate=True, graph_adapters=True)
    memories = replace(config.main.memories, knowledge=QuantiserConfig(codes=24, width=7))
    return replace(config, stages=(replace(config.main, memories=memories),))


def words() -> ModelConfig:
    """Assemble bounded streams on words, whose weights are all digits."""
    config = MODELS["bounded"]
    outer = replace(config.outer[0], chunking=ChunkingConfig(length=3, boundaries="space"))
    return replace(config, stages=(outer, config.main), digits="all")


MIXED = MODELS["mixed"]
EVERY = replace(MIXED.outer[0], chunking=ChunkingConfig(length=4, boundaries="every"))
CONFIGS = {
    "graph": both_books(), "hnet": replace(hnet(**TWO_STAGES), norm_gain=True), "words": words(),
    "compressed": compressed(**POOLED),
    "mixed": replace(MIXED, stages=(EVERY, MIXED.main), symbol_digits="all"),
    "grouped": replace(MODELS["grouped"], tied=True, digits="all", rule="nibble"),
    "composite": MODELS["composite"],
}  # fmt: skip
NUMBERS = {name: str(number) for number, name in enumerate(CONFIGS)}
PROMPT, TEXT, LENGTH = b"a \xffjum", b"a \xffjumps with brown while fox and", 6
"""A prompt that is not UTF-8 and fits the contexts, and a text that goes beyond them, in
which no choice of a model depends on last bits."""
SPELLED = "cafe\u0301 \u00e9\0 \u2126 \u0100\r\n"
"""A text that is changed by NFC, with the end of a text and the character that stands for it."""


@torch.no_grad()
def read_all(folder: Path, transformers) -> None:
    """Read all models in a process that cannot import arb, and save what they compute."""
    os.chdir(folder)
    sys.modules["arbcli"] = None  # an import of it fails
    warnings.simplefilter("error")
    text, prompt = (torch.tensor([list(part)]) for part in (TEXT, PROMPT))
    read = partial(transformers.AutoModelForCausalLM.from_pretrained, trust_remote_code=True)
    results = {}
    for number in NUMBERS.values():
        model = read(number)
        tokens = model.generate(prompt, max_new_tokens=LENGTH, do_sample=False, eos_token_id=None)
        results[number] = model(text).logits, tokens[0, prompt.shape[1] :]
    chunks = NUMBERS["hnet"]
    model = read(chunks)
    tokens = model.generate(prompt, max_new_tokens=4, do_sample=False, use_cache=True)
    ids, mask = text.repeat(3, 1), torch.ones(3, text.shape[1], dtype=torch.int64)
    ids[0], mask[0], mask[2] = ids[0].roll(9), torch.arange(text.shape[1]) >= 9, 0
    padded = model(ids, attention_mask=mask, labels=ids.masked_fill(mask == 0, -100))
    model.save_pretrained("copy")
    halves = model.bfloat16(), read("copy", dtype=torch.bfloat16)
    half = torch.cat([each(text).logits for each in halves])
    again = halves[1].float()(text).logits
    tokenizer = transformers.AutoTokenizer.from_pretrained(chunks, trust_remote_code=True)
    results["ids"] = tokenizer(SPELLED)["input_ids"]
    results["invalid"] = tokenizer.decode([0xFF, 0x61])
    results["end"] = tokenizer.eos_token_id, tokenizer.pad_token_id, tokenizer.decode([0, 0x61])
    results["others"] = tokens[0, prompt.shape[1] :], padded.logits, padded.loss, again, half
    torch.save(results, "results.pt")


def saved_model(folder: Path, config: ModelConfig) -> tuple[LanguageModel, Path]:
    """Save a model with random scales and memories; return it and the path of its checkpoint."""
    model = Subject("", config, 1, torch.float32, torch.device("cpu"), "torch").build()
    for weight in model.packed_tensors().values():
        if weight.frozen:
            weight.fill()
    folder.mkdir()
    return model, save_checkpoint(folder, checkpoint_of(model))


@pytest.fixture(scope="module")
def exported(tmp_path_factory, transformers) -> SimpleNamespace:
    """Export the models, and read all folders in one process that cannot import arb."""
    folder, expected = tmp_path_factory.mktemp("remote"), {}
    for name, number in NUMBERS.items():
        model, checkpoint = saved_model(folder / f"run{number}", CONFIGS[name])
        report = export(checkpoint, "hf", out=folder / number)
        assert ("embedding" in report.type) == (CONFIGS[name].symbol_digits == "all")
        cache = model.new_cache(len(TEXT))
        with torch.no_grad():
            parts = torch.tensor([list(TEXT)]).split(cache.window, dim=1)
            logits = torch.cat([model(part, cache) for part in parts], dim=1)
        text = b"".join(generate(model, PROMPT, LENGTH, Sampling(temperature=0)))
        expected[name] = logits, text
    log = folder / "log"
    assert run_forked(lambda: read_all(folder, transformers), log) == 0, log.read_text()
    return SimpleNamespace(
        folder=folder, expected=expected, results=torch.load(folder / "results.pt")
    )


def assert_close(logits: torch.Tensor, expected: torch.Tensor) -> None:
    """Compare float32 logits: two times 32 products in a row, each within 2^-22 of its value."""
    assert (logits - expected).abs().max() < 2**-16 * expected.abs().max()


@pytest.mark.parametrize("name", CONFIGS)
def test_transformers_computes_the_same(exported, name):
    logits, text = exported.expected[name]
    their_logits, their_text = exported.results[NUMBERS[name]]
    assert_close(their_logits, logits)
    assert bytes(their_text.tolist()) == text


def test_folder_is_read_in_every_way(exported):
    """With a cache that it does not use, padded, with a loss, saved again, and in bf16."""
    logits, text = exported.expected["hnet"]
    made, padded, loss, again, half = exported.results["others"]
    assert bytes(made.tolist()) == text[:4]
    assert_close(padded[1], logits[0])
    assert_close(padded[0, 9:], logits[0, :-9])
    assert not padded[0, :9].any() | padded[2].any()  # an empty text
    ids = torch.tensor(list(TEXT))
    losses = [
        torch.nn.functional.cross_entropy(logits[0, : end - 1], ids[1:end], reduction="none")
        for end in (len(TEXT) - 9, len(TEXT))
    ]
    torch.testing.assert_close(loss, torch.cat(losses).mean())
    assert_close(again, logits)
    assert half.dtype == torch.bfloat16
    first = (half[:, 0] - logits[0, 0]).abs().max()  # later ones may have other chunks
    assert first < 2**-4 * logits[0, 0].abs().max()


def test_tokens_are_the_bytes_of_any_text(exported):
    assert exported.results["ids"] == list(SPELLED.encode())
    assert exported.results["invalid"] == "\ufffda"
    assert exported.results["end"] == (0, 0, "\0a")  # programs that score texts need an end


def test_code_only_imports_torch_and_transformers_and_weights_stay_packed(exported):
    folder = exported.folder / NUMBERS["graph"]
    names = {path.stem for path in folder.glob("*.py")}
    assert names == {f"modeling_{name}" for name in ("arb", "core", "experts", "graph", "latent")}
    assert not any("arbcli" in path.read_text() for path in folder.glob("*.py"))
    dtypes = {tensor.dtype for tensor in load_file(folder / "model.safetensors").values()}
    assert dtypes == {torch.uint8, torch.int8, torch.int32}
    card = (folder / "README.md").read_text()
    assert "trust_remote_code=True" in card
    assert "| parts | latent, memgram, memories, mlp, sequencer |" in card


def test_models_here_have_all_parts_and_their_code_no_others():
    used = {part.kind for config in CONFIGS.values() for part in every_part(config)}
    every = {kind for slot in kinds.SLOTS.values() for kind in slot}
    assert used | {"ahead"} == every | {"iterated"}
    assert any(stage.streams > 1 for config in CONFIGS.values() for stage in config.stages)
    assert any(config.main.router for config in CONFIGS.values())


def test_code_of_a_model_has_its_parts_alone():
    names = [f"modeling_{name}.py" for name in ("arb", "core", "media")]
    assert sorted(remote_code(CONFIGS["composite"])) == names


def test_what_cannot_leave_is_refused(tmp_path):
    for config, options, message in (
        (CONFIGS["composite"], {"kind": "bf16"}, "Transformers has no architecture"),
        (MODELS["fill"], {}, "fills holes"),
        (MODELS["masked"], {}, "fills holes"),
    ):
        _, checkpoint = saved_model(tmp_path / config.objective, config)
        with pytest.raises(ArbError, match=message):
            export(checkpoint, "hf", out=tmp_path / "model", **options)
        assert not (tmp_path / "model").exists()
