"""Folders and configurations of other makers: what is known of them, and what is refused."""

import json
import pickle
import shutil
from pathlib import Path

import pytest
import torch
from folders import plain_folder
from safetensors.torch import save_file

from arbcli.base.errors import ArbError
from arbcli.base.run_files import COMPANIONS
from arbcli.config.file import read_model
from arbcli.interop import importing
from arbcli.interop.exporting import export
from arbcli.interop.huggingface.config_json import read_config
from arbcli.interop.huggingface.dense import shape_of
from arbcli.interop.importing import import_folder
from arbcli.model.build import build_model


def refused(folder, tmp_path) -> str:
    with pytest.raises(ArbError) as caught:
        import_folder(folder, tmp_path / "run")
    assert caught.value.hint
    assert not (tmp_path / "run").exists()
    assert "\n" not in str(caught.value)
    return str(caught.value)


@pytest.mark.parametrize(("field", "value"), [
    ("quantization_config", {}), ("final_logit_softcapping", 30.0), ("num_hidden_layers", 10**9),
    ("rope_parameters", {"rope_type": "dynamic", "factor": 2.0}), ("rope_interleaved", True),
    ("rope_parameters", {"rope_type": "yarn", "factor": 2.0, "attention_factor": 1.5}),
    ("model_type", "arb"),
])  # fmt: skip
def test_field_of_a_config_is_refused_by_its_name(tmp_path, field, value):
    """Besides those of `altered.txt`."""
    plain_folder(tmp_path / "model", **{field: value})
    named = "packed for Transformers" if value == "arb" else field
    assert named in refused(tmp_path / "model", tmp_path)


def test_tensors_that_are_missing_unknown_or_not_finite_are_refused(tmp_path):
    """Damaged headers are those of `altered.txt`."""
    folder = tmp_path / "model"
    weights = plain_folder(folder)
    file, name = folder / "model.safetensors", "model.layers.0.mlp.up_proj.weight"
    for changed, why in (
        ({name: torch.full((48, 32), torch.nan)}, "not finite"),
        ({name: weights[name].mT.contiguous()}, f"`{name}` is [32, 48]"),
        ({name: weights[name].double()}, "is F64"),
        ({"model.layers.1.mlp.up_proj.weight": weights[name].clone()}, "the architecture does not"),
    ):
        save_file(weights | changed, file)
        assert why in refused(folder, tmp_path)
    save_file({key: w for key, w in weights.items() if key != name}, file)
    assert f"has no `{name}`" in refused(folder, tmp_path)


def test_shards_are_read_by_their_index(tmp_path):
    folder = tmp_path / "model"
    weights = plain_folder(folder)
    (folder / "model.safetensors").rename(folder / "model-00001-of-00001.safetensors")
    index = {"weight_map": dict.fromkeys(weights, "model-00001-of-00001.safetensors")}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    assert import_folder(folder, tmp_path / "run").num_weights > 0
    save_file({"model.norm.weight": torch.ones(32)}, folder / "model.safetensors")
    assert "has no `model.embed_tokens.weight`" in refused(folder, tmp_path / "other")


def test_tied_head_has_to_be_the_embedding_and_a_run_is_not_written_over(tmp_path):
    folder = tmp_path / "model"
    weights = plain_folder(folder, tie_word_embeddings=True)
    assert "`lm_head.weight` differs" in refused(folder, tmp_path)
    weights["lm_head.weight"] = weights["model.embed_tokens.weight"].clone()
    save_file(weights, folder / "model.safetensors")
    import_folder(folder, tmp_path / "run")
    with pytest.raises(ArbError, match="already contains a run"):
        import_folder(folder, tmp_path / "run")


def test_import_that_fails_leaves_no_files(tmp_path, monkeypatch):
    """And does not mix the files of two models."""
    folder, run = tmp_path / "model", tmp_path / "run"
    plain_folder(folder)
    monkeypatch.setattr(importing, "save_checkpoint", lambda *_: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        import_folder(folder, run)
    assert not [*run.iterdir()]
    (run / COMPANIONS).mkdir()
    with pytest.raises(ArbError, match="already contains a run"):
        import_folder(folder, run)


def test_pickle_is_refused_and_not_run(tmp_path):
    class Bomb:
        def __reduce__(self):
            return open, (str(tmp_path / "ran"), "w")

    folder = tmp_path / "model"
    plain_folder(folder)
    (folder / "model.safetensors").unlink()
    (folder / "pytorch_model.bin").write_bytes(pickle.dumps(Bomb()))
    assert "is a pickle" in refused(folder, tmp_path)
    assert not (tmp_path / "ran").exists()


def test_tokenizer_that_cannot_be_loaded_is_refused(tmp_path):
    pytest.importorskip("tokenizers")
    plain_folder(tmp_path / "model")
    tokens = {"model": {"type": "BPE", "vocab": {"a": 0, "b": 1}, "merges": ["a c"]}}
    (tmp_path / "model" / "tokenizer.json").write_text(json.dumps(tokens))
    assert "tokenizer.json" in refused(tmp_path / "model", tmp_path)


def test_tokenizer_of_as_many_tokens_as_bytes_is_kept(tmp_path):
    pytest.importorskip("tokenizers")
    folder, run, back = (tmp_path / name for name in ("model", "run", "back"))
    plain_folder(folder, vocab_size=256, **{"arb.origin": "an export"})
    words = {f"word {number}": number for number in range(256)}
    model = {"type": "WordLevel", "vocab": words, "unk_token": "word 0"}
    (folder / "tokenizer.json").write_text(json.dumps({"model": model}))
    import_folder(folder, run)
    shutil.rmtree(run / COMPANIONS)  # as of a run from scratch
    export(run, "hf", out=back)
    assert (back / "tokenizer.json").read_bytes() == (folder / "tokenizer.json").read_bytes()
    assert "| 256, of `tokenizer.json` |" in (back / "README.md").read_text()
    assert (back / "generation_config.json").read_text() == "{}\n"  # byte 0 ends no text


def test_unknown_field_is_ignored_if_it_is_named(tmp_path):
    folder = tmp_path / "model"
    plain_folder(folder, finetuned_by="somebody")
    assert "`finetuned_by`, which is `somebody`" in refused(folder, tmp_path)
    for name in ("hidden_size", "missing"):
        with pytest.raises(ArbError, match=f"no field `{name}` that arb does not know"):
            import_folder(folder, tmp_path / "run", ignored=("finetuned_by", name))
    import_folder(folder, tmp_path / "run", ignored=("finetuned_by",))
    export(tmp_path / "run", "hf", out=tmp_path / "back")  # reads the copy of config.json
    assert "finetuned_by" not in json.loads((tmp_path / "back" / "config.json").read_text())


@pytest.mark.parametrize(("place", "name"), [
    ("models--some-one--A-1B/snapshots/0123abcd", "some-one/A-1B"), ("A-1B", "A-1B"),
])  # fmt: skip
def test_model_keeps_its_name(place, name, tmp_path, arb_done, monkeypatch):
    """Folders of a cache are named by a hash."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / place).parent.mkdir(parents=True, exist_ok=True)
    plain_folder(tmp_path / place)
    arb_done("import", place)
    export(tmp_path / "runs" / "imported-A-1B", "hf", out=tmp_path / "back")
    card = (tmp_path / "back" / "README.md").read_text()
    assert f"| base model | {name} |" in card
    assert ("\nbase_model: some-one/A-1B\n" in card) == ("/" in name)
    assert "\ntags: [arb, int8]\n" in card


PUBLISHED = json.loads((Path(__file__).parent / "published.json").read_text())
"""What `config.json` of some models says, and how many weights each has."""


@pytest.mark.parametrize("name", PUBLISHED)
def test_published_model_is_known(name):
    """Also without the fields that have the values of Transformers' defaults."""
    about = PUBLISHED[name]["config"]
    if "max_window_layers" in about:
        about = about | {"use_sliding_window": True, "sliding_window": 9}
    defaults = {"sliding_window": 4096, "max_window_layers": 28}
    about = {field: value for field, value in about.items() if defaults.get(field) != value}
    config = read_config(about, name, digits="all")
    with torch.device("meta"):
        model = build_model(config)
    assert model.num_weights == PUBLISHED[name]["weights"]
    shape = shape_of(config)
    assert set(shape.windows) == ({4096} if name == "Mistral-7B-v0.1" else {None})
    assert (shape.rotary.scaling == "llama3") == (name == "Llama-3.1-8B")
    assert shape.rotary.base == about.get("rope_theta", 10000)


def test_model_is_printed_as_a_file_without_its_weights(tmp_path, arb_here):
    """So that its memory is known before it is fetched."""
    config = PUBLISHED["Qwen3-8B"]["config"]
    (tmp_path / "config.json").write_text(json.dumps(config))
    done = arb_here("import", str(tmp_path), "--print-config", "--rule", "nibble")
    (tmp_path / "model.toml").write_text(done.stdout)
    about = {"digits": "all", "rule": "nibble", "direction": "factored"}
    assert read_model(tmp_path / "model.toml") == read_config(config, "it", **about)
