"""Small parts that commands call: what each says or counts, in all of its cases."""

import ctypes
import json
import sys
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from unittest import mock

import pytest
from graph_parts import graph_config

from arbcli.base import environment
from arbcli.base.errors import ArbError
from arbcli.base.run_files import COMPANIONS
from arbcli.commands import evaluate, import_model
from arbcli.config.model import StageConfig
from arbcli.config.parts.base import PartConfig
from arbcli.config.presets import preset
from arbcli.data.chat_template import TEMPLATE, ChatTemplate, keep_template
from arbcli.data.special_tokens import MAP, SETTINGS, special_tokens
from arbcli.families.compressed.config import CompressedAttentionConfig
from arbcli.families.experts.config import ExpertsConfig
from arbcli.families.mamba.config import MambaConfig
from arbcli.inspect.parts import _stream, _words
from arbcli.inspect.saved import open_saved
from arbcli.interop.huggingface.dense import shape_of
from arbcli.training import teacher


@pytest.mark.parametrize(
    ("platform", "library", "device", "found"),
    [("darwin", False, False, True), ("linux", True, False, True), ("linux", False, True, True),
     ("linux", False, False, False)],
)  # fmt: skip
def test_gpu_may_be_present_if_its_library_or_device_is(
    platform, library, device, found, monkeypatch
):
    monkeypatch.setattr(sys, "platform", platform)
    opened = mock.Mock(side_effect=None if library else OSError)
    monkeypatch.setattr(ctypes, "CDLL", opened)
    monkeypatch.setattr(Path, "exists", lambda path: device and str(path) == "/dev/kfd")
    assert environment.may_have_gpu() == found


SITE = preset("tiny", dim=64).site()
WIDTHS: dict[str, tuple[PartConfig, int]] = {
    "compressed": (
        CompressedAttentionConfig(heads=4, head_width=8, ratio=2, top_k=2, window=3,
                                  index_heads=2, index_width=8), 64 + 2 * 4 * 8),
    "experts": (ExpertsConfig(experts=4, width=7, top_k=2), 64 + 2 * 2 * 7),
    "mamba": (MambaConfig(heads=4, states=7), 64 + 2 * 2 * 64),
}  # fmt: skip


@pytest.mark.parametrize("name", WIDTHS)
def test_numbers_that_a_step_keeps_of_a_position_are_counted(name):
    part, width = WIDTHS[name]
    assert part.saved_width(SITE) == width


def test_stream_has_fields_that_differ_from_the_default():
    stage = preset("tiny", dim=64).main
    assert _words(_stream(stage)) == "dim 64"
    other = replace(stage, streams=2, contribution=0.5, bound=3.0)
    assert isinstance(other, StageConfig)
    assert _words(_stream(other)) == "dim 64, streams 2, contribution 0.5, bound 3.0"


def with_main(**changes: object):
    config = preset("tiny", layers=2)
    return replace(config, stages=(replace(config.main, **changes),))


def first_block(**changes: object):
    config = preset("tiny", layers=2)
    one, other = config.main.blocks
    return with_main(blocks=(replace(one, **changes), other))


def test_model_of_another_kind_has_no_shape():
    config = preset("tiny", layers=2)
    block = config.main.blocks[0]
    assert shape_of(config) is not None
    narrow = replace(block, mixer=replace(block.mixer, window=3))
    assert shape_of(with_main(blocks=(narrow, block))).windows == (3, None)
    for other in (
        preset("hnet-tiny"), graph_config(), preset("tiny", streams=2),
        with_main(contribution=0.5), first_block(channel=None), first_block(mixer=None),
        with_main(blocks=(replace(block, channel=None),) * 2),
        with_main(blocks=(replace(block, mixer=MambaConfig(heads=4)),) * 2),
        with_main(blocks=(replace(block, channel=ExpertsConfig(experts=4, width=7)),) * 2),
        with_main(blocks=(replace(block, mixer=replace(block.mixer, sub_norm=False)),) * 2),
    ):  # fmt: skip
        assert shape_of(other) is None


def test_matrices_of_a_model_without_a_shape_have_its_own_names(saved, small_graph):
    given = {name: value for name, value in small_graph.items() if name not in ("preset", "batch")}
    found = open_saved(saved("arb-tiny", **given), print)
    tensors = found.model.packed_tensors()
    assert {*found.weights()} == {*tensors}
    name = next(iter(tensors))
    assert found.weights()[name]().equal(tensors[name].weight())


def test_teacher_reads_the_tokens_of_the_student(monkeypatch):
    checkpoint = SimpleNamespace(data={"tokenizer": "a digest"})
    saved = SimpleNamespace(checkpoint=checkpoint, path="a")
    monkeypatch.setattr(teacher, "read_saved", lambda *_: saved)
    monkeypatch.setattr(teacher, "saved_config", lambda _: preset("tiny"))
    monkeypatch.setattr(teacher.Tokenizer, "read", lambda path: f"read {path}")
    monkeypatch.setattr(teacher, "TOKENIZER_DIGEST", "tokenizer")
    checked = mock.Mock()
    monkeypatch.setattr(teacher, "check_digest", checked)
    config = SimpleNamespace(teacher="a", model=preset("tiny"), tokenizer="tokens.json")
    assert teacher.read_teacher(config) is saved
    assert checked.mock_calls == [mock.call("read tokens.json", "a digest", Path("tokens.json"))]


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


@pytest.mark.parametrize("peers", [None, {"FLAC": 2.0}])
def test_kind_of_a_text_is_shown_with_its_peers(peers):
    loss = SimpleNamespace(kind="sound", nats_per_byte=1.5, bytes=1000, bits_per_unit=3.0,
                           unit="sample", units=500, peer_bits_per_unit=peers)  # fmt: skip
    shown = str(evaluate._kind_rows(loss))
    assert "this model 3.000" in shown
    assert ("pip install 'arb[media]'" in shown) == (peers is None)
    assert ("FLAC 2.000" in shown) == (peers is not None)


@pytest.mark.parametrize(("vocabulary", "there"), [(256, False), (300, False), (300, True)])
def test_import_reports_a_missing_tokenizer(vocabulary, there, tmp_path, monkeypatch):
    from arbcli.interop import importing

    said, run = [], tmp_path / "run"
    run.mkdir()
    if there:
        (run / "tokenizer.json").touch()
    report = SimpleNamespace(vocabulary=vocabulary, run="the run")
    monkeypatch.setattr(import_model, "note", said.append)
    monkeypatch.setattr(import_model, "emit", lambda *_, **__: None)
    monkeypatch.setattr(import_model, "_tables", lambda _: [])
    monkeypatch.setattr(import_model, "read_folder_config", lambda *_, **__: None)
    monkeypatch.setattr(importing, "import_folder", lambda *_, **__: report)
    import_model.import_model(tmp_path, out=run, print_config=False, as_json=True)
    missing = vocabulary != 256 and not there
    line = f"`{tmp_path}` has no `tokenizer.json`: copy one to `the run` to read text"
    assert said == [line] * missing
