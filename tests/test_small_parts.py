"""Small parts that commands call: what each says or counts, in all of its cases."""

import json

import pytest
from graph_parts import graph_config

from arbcli.base.errors import ArbError
from arbcli.base.run_files import COMPANIONS, check_free, require_run
from arbcli.commands._options import check_is_model
from arbcli.config.fields import change_fields
from arbcli.config.presets import preset
from arbcli.data.chat_template import TEMPLATE, ChatTemplate, keep_template
from arbcli.data.special_tokens import MAP, SETTINGS, special_tokens
from arbcli.generation.load import load_model
from arbcli.inspect.saved import open_saved
from arbcli.interop.huggingface.dense import shape_of


def test_model_of_another_kind_has_no_shape():
    config = preset("tiny", layers=2)
    assert shape_of(config) is not None
    assert shape_of(change_fields(config, {"blocks.0.mixer.window": 3})).windows == (3, None)
    for other in (preset("hnet-tiny"), graph_config(), preset("tiny", streams=2)):
        assert shape_of(other) is None
    for field, value in (
        ("contribution", 0.5), ("blocks.0.channel", "none"), ("blocks.0.mixer", "none"),
        ("channel", "none"), ("mixer", {"kind": "mamba", "heads": 4}),
        ("channel", {"kind": "experts", "experts": 4, "width": 7}), ("mixer.sub_norm", False),
    ):  # fmt: skip
        assert shape_of(change_fields(config, {field: value})) is None, field


@pytest.mark.parametrize(
    ("files", "refuse"),
    [
        (["config.json"], check_free),
        (["step-000001.safetensors"], check_free),
        (["step-000001.safetensors"], require_run),
        (["config.json"], check_is_model),
    ],
)
def test_command_of_a_hint_can_be_pasted(files, refuse, tmp_path):
    run = tmp_path / "a run"
    run.mkdir()
    for name in files:
        (run / name).write_text('{"model_type": "llama"}')
    with pytest.raises(ArbError) as caught:
        refuse(run)
    assert f" '{run}'`" in caught.value.hint


def test_matrices_of_a_model_without_a_shape_have_its_own_names(saved, small_graph):
    given = {name: value for name, value in small_graph.items() if name not in ("preset", "batch")}
    path = saved("arb-tiny", **given)
    weights = open_saved(path, print).weights()
    tensors = load_model(path, device="cpu").packed_tensors()
    assert {*weights} == {*tensors}
    name = next(iter(tensors))
    assert weights[name]().equal(tensors[name].weight())


def test_template_of_a_run_is_that_of_its_tokenizer(tmp_path):
    """Also where an earlier run left another, or a kill left half of its settings."""
    source, run = tmp_path / "source", tmp_path / "run"
    for folder in (source, run):
        folder.mkdir()
    kept = run / COMPANIONS
    for text, left, settings in (
        ("one", "", {}),
        ("two", "{", {}),
        ("three", '{"eos_token": "<a>", "model_max_length": 9}', {"model_max_length": 9}),
        ("four", '{"bos_token": "<a>", "extra_special_tokens": {"audio_token": "<b>"}}', {}),
    ):
        (source / TEMPLATE).write_text(text)
        named, others = {"eos_token": f"<{text}>"}, {"image_token": "<i>"}
        (source / SETTINGS).write_text(json.dumps(named | {"extra_special_tokens": others}))
        if left:
            (kept / SETTINGS).write_text(left)
            (kept / MAP).write_text('{"eos_token": "<c>"}')
        keep_template(source / "tokenizer.json", run)
        assert (kept / TEMPLATE).read_text() == text
        written = settings | named | {"extra_special_tokens": others}
        assert json.loads((kept / SETTINGS).read_text()) == written
        assert special_tokens(kept) == named | others
    (source / TEMPLATE).unlink()
    with pytest.raises(ArbError, match="has a chat template, and there is none next to"):
        keep_template(source / "tokenizer.json", run)
    assert ChatTemplate("{{ 2 * 3 % 4 }}", "a", {}).render([]) == "2"
