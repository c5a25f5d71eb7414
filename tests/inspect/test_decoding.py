"""Sizes of a decoding step are those of a whole window's last position; its memory returns."""

import dataclasses
import json
from functools import partial

import pytest
import torch
from cells import Cell

from arbcli.commands.probe_loss import _pair
from arbcli.config.presets import preset
from arbcli.inspect import decoding
from arbcli.inspect.decoding import audit_decoding, probe_decoding
from arbcli.kernels.runtime.backend import use_backend
from arbcli.training.configure import new_config
from arbcli.training.directory import open_run_texts

SMALL = {"dim": 32, "layers": 2, "heads": 2, "ffn": 48, "ctx": 32, "batch": 2, "device": "cpu"}
COMPRESSED = {
    "preset": "arb-deep-small", "head_width": 16, "ffn": 16, "layers": 3, "experts": 4,
    "hash_layers": 1, "ratios": (2, 8),
}  # fmt: skip
PREFILL = 17


@pytest.fixture
def config(numbers):
    return lambda **options: new_config(**SMALL | options, data=[numbers])


@torch.no_grad()
def expected_sizes(config) -> tuple[list[float], list[list[float]], list[tuple[float, float]]]:
    """Read stream, branches and attention logits from one forward of the whole window."""
    model = decoding._model(config, None)
    ids = decoding._held_out(open_run_texts(config).val, PREFILL + 1, config.device)
    streams, branches, logits = [], [], []

    def block(_module, _args, output):
        streams.append(float(output.total()[0, -1].abs().max()))

    def part(_module, _args, output):
        branches.append(float(output.added[0, -1].abs().max()))

    def rotated(prepare, *args):
        parts = prepare(*args)
        q, k, _ = (part[0].double() for part in parts)
        scores = q[:, -1:] @ k.mT / q.shape[-1] ** 0.5
        logits.append((float(scores.min()), float(scores.max())))
        return parts

    for index in range(SMALL["layers"]):
        model.blocks[index].register_forward_hook(block)
        model.blocks[index].attention.register_forward_hook(part)
        model.blocks[index].mlp.register_forward_hook(part)
        attention = model.blocks[index].attention
        attention.fused_backward = False  # else queries and keys are within the fused attention
        attention.rotary_norm = partial(rotated, attention.rotary_norm)
    with use_backend("torch"):
        model(ids[None])
    return streams, [branches[i : i + 2] for i in range(0, len(branches), 2)], logits


def test_sizes_of_a_decoded_position_are_those_of_a_whole_window(config):
    report = probe_decoding(config(), PREFILL)
    streams, branches, logits = expected_sizes(config())
    assert [block.name for block in report.blocks] == ["blocks.0", "blocks.1"]
    # float32 products of other shapes sum in another order
    assert [block.stream for block in report.blocks] == pytest.approx(streams, rel=1e-4)
    for block, sizes, ends in zip(report.blocks, branches, logits, strict=True):
        assert [*block.branches] == ["attention", "mlp"]
        assert [*block.branches.values()] == pytest.approx(sizes, rel=1e-4)
        assert (block.attention_min, block.attention_max) == pytest.approx(ends, rel=1e-4)
    assert report.passed


@pytest.mark.parametrize("kind", ["streams", "latent", "compressed"])
def test_every_attention_shows_its_logits(kind, config):
    options = {"streams": {"streams": 2}, "compressed": COMPRESSED}.get(kind, {})
    run = config(**options)
    if kind == "latent":
        run = dataclasses.replace(run, model=Cell("latent", "none", 1, "plain").model())
    report = probe_decoding(run, PREFILL)
    for block in report.blocks:
        assert block.attention_min < 0 < block.attention_max
    json.dumps(dataclasses.asdict(report), allow_nan=False)


def test_value_that_is_not_finite_fails_in_its_block(config, monkeypatch):
    build = decoding._model

    def broken(*args):
        model = build(*args)
        model.blocks[1].mlp.register_forward_hook(
            lambda _part, _args, output: output._replace(added=output.added * torch.inf)
        )
        return model

    monkeypatch.setattr(decoding, "_model", broken)
    report = probe_decoding(config(), PREFILL)
    first, second = report.blocks
    assert not report.passed
    assert first.stream is not None
    assert second.stream is None
    assert (_pair(None, None), _pair(1.0, None, 1)) == ("-", "1.0 to -")


def test_decoding_returns_to_its_level_of_memory(config, monkeypatch):
    report = audit_decoding(config(), PREFILL)
    stages = ["load", "prepare", "prefill", "end", "end", "end"]
    assert [level.stage for level in report.levels] == stages
    assert report.passed
    assert report.levels[1].live_bytes >= report.levels[0].live_bytes + report.cache_bytes
    kept, step = [], decoding.Decoder.step

    def leaking(decoder):
        kept.append(torch.zeros(100))
        step(decoder)

    model = dataclasses.replace(config().model, vocabulary=300)  # without a tokenizer
    assert audit_decoding(dataclasses.replace(config(), model=model), PREFILL).passed
    monkeypatch.setattr(decoding.Decoder, "step", leaking)
    assert not audit_decoding(config(), PREFILL).passed


def test_step_in_which_the_first_chunk_begins_returns_to_the_level(config):
    model = preset("hnet-tiny", boundaries="every", chunk_length=2)
    assert audit_decoding(dataclasses.replace(config(), model=model), 6).passed
