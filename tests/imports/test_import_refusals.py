"""A folder that is damaged, or of no model that we know, is refused in one line, by its name."""

import json
import pickle

import pytest
import torch
from folders import plain_folder
from safetensors.torch import save_file

from arbcli.errors import ArbError
from arbcli.imports.config_json import read_config
from arbcli.imports.run import import_folder


def refused(folder, tmp_path) -> str:
    with pytest.raises(ArbError) as caught:
        import_folder(folder, tmp_path / "run")
    assert caught.value.hint
    assert not (tmp_path / "run").exists()
    message = str(caught.value)
    assert "\n" not in message
    return message


@pytest.mark.parametrize(("field", "value"), [
    ("model_type", "gpt2"), ("hidden_act", "gelu"), ("mlp_bias", True), ("quantization_config", {}),
    ("rope_scaling", {"rope_type": "dynamic", "factor": 2.0}), ("sliding_window", 16),
    ("rope_scaling", {"rope_type": "linear"}), ("auto_map", {"AutoConfig": "code.Config"}),
    ("final_logit_softcapping", 30.0), ("hidden_size", "32"), ("num_hidden_layers", 10**9),
    ("layer_types", ["full_attention"] * 2), ("partial_rotary_factor", 0.5),
    ("rms_norm_eps", 0.5), ("rope_interleaved", True), ("no_rope_layers", [1]),
    ("rope_parameters", {"rope_type": "yarn", "factor": 2.0, "attention_factor": 1.5}),
])  # fmt: skip
def test_field_of_a_config_is_refused_by_its_name(tmp_path, field, value):
    plain_folder(tmp_path / "model", **{field: value})
    message = refused(tmp_path / "model", tmp_path)
    wanted = {"rope_scaling": "rope_parameters", "rms_norm_eps": "norm_eps"}.get(field, field)
    assert wanted in message


@pytest.mark.parametrize(("kind", "name"), [
    ("llama", "num_attention_heads"), ("mistral", "num_key_value_heads"),
    ("qwen2", "num_key_value_heads"), ("qwen3", "num_key_value_heads"), ("qwen3", "head_dim"),
])  # fmt: skip
def test_field_that_is_missing_is_named(kind, name):
    """Transformers would take a number of its own for it, such as 8 heads of keys."""
    values = {"model_type": kind, "max_position_embeddings": 8, "num_hidden_layers": 1}
    values |= dict.fromkeys(("num_attention_heads", "num_key_value_heads", "head_dim"), 4)
    with pytest.raises(ArbError, match=f"has no `{name}`"):
        read_config({key: value for key, value in values.items() if key != name}, "it")


def test_damaged_files_are_refused(tmp_path):
    folder = tmp_path / "model"
    weights = plain_folder(folder)
    file, name = folder / "model.safetensors", "model.layers.0.mlp.up_proj.weight"
    whole = file.read_bytes()
    size = int.from_bytes(whole[:8], "little")
    header = json.loads(whole[8 : 8 + size])

    def with_header(**fields) -> bytes:
        text = json.dumps(header | {name: header[name] | fields}).encode()
        return len(text).to_bytes(8, "little") + text + whole[8 + size :]

    begin, end = header[name]["data_offsets"]
    for content, why in (
        (b"", "truncated"), (whole[:-1], "truncated"), (whole + b"\0", "goes on"),
        (b"\xff" * 8 + whole[8:], "truncated"), (whole[:8] + b"x" + whole[9:], "not JSON"),
        (with_header(dtype="I8"), "is I8"), (with_header(shape=[48, 31]), name),
        (with_header(shape=[32, 48]), r"\[32, 48\]"), (with_header(shape=[-48, -32]), name),
        (with_header(data_offsets=[begin + 2, end + 2]), name),
        (with_header(data_offsets=[0, end - begin]), "is at the bytes"),
    ):  # fmt: skip
        file.write_bytes(content)
        with pytest.raises(ArbError, match=why):
            import_folder(folder, tmp_path / "run")
    for changed, why in (
        ({name: torch.full((48, 32), torch.nan)}, "not finite"),
        ({"model.layers.1.mlp.up_proj.weight": weights[name].clone()}, "no place"),
    ):
        save_file(weights | changed, file)
        assert why in refused(folder, tmp_path)
    save_file({key: w for key, w in weights.items() if key != name}, file)
    assert f"has no `{name}`" in refused(folder, tmp_path)


def test_shards_that_are_missing_or_outside_are_refused(tmp_path):
    folder = tmp_path / "model"
    weights = plain_folder(folder)
    (folder / "model.safetensors").rename(folder / "model-00001-of-00001.safetensors")
    index = folder / "model.safetensors.index.json"

    def write(name: str, **others: str) -> None:
        index.write_text(json.dumps({"weight_map": dict.fromkeys(weights, name) | others}))

    write("model-00001-of-00001.safetensors")
    assert import_folder(folder, tmp_path / "whole").num_weights > 0
    write("model-00001-of-00001.safetensors", **{"lm_head.weight": "model-2.safetensors"})
    assert "model-2.safetensors" in refused(folder, tmp_path)
    write("model-00001-of-00001.safetensors", other="model-00001-of-00001.safetensors")
    assert "has no `other`" in refused(folder, tmp_path)
    save_file(weights, tmp_path / "outside.safetensors")
    for name in ("../outside.safetensors", str(tmp_path / "outside.safetensors"), "code.py"):
        write(name)
        assert "is not a safetensors file there" in refused(folder, tmp_path)


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


def test_run_is_not_written_over(tmp_path):
    plain_folder(tmp_path / "model")
    import_folder(tmp_path / "model", tmp_path / "run")
    with pytest.raises(ArbError, match="holds a run already"):
        import_folder(tmp_path / "model", tmp_path / "run")
