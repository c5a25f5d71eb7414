"""The probe finds each fault that is planted, by its name, and nothing wrong with a sound model."""

import dataclasses
import gc
import json
import math
from unittest import mock

import pytest
import torch
from made_runs import train
from marks import mostly_slow
from torch.nn import functional

from arbcli.commands.probe_loss import _chunks
from arbcli.config.training import train_config_from
from arbcli.data.opening import open_texts
from arbcli.data.text import entropy, held_out_batch
from arbcli.inspect.probe import (
    _block_ranges,
    _count_acausal_changes,
    _histogram,
    examine,
    open_saved,
    probe,
)
from arbcli.inspect.verdicts import ProbeReport
from arbcli.kernels.codec.packing import unpack_trits
from arbcli.model.packed import StreamedTensor
from arbcli.training.configure import new_config
from arbcli.training.schedule import learning_rate
from arbcli.training.trainer import Trainer

STEPS = 12
SMALL = {"dim": 32, "layers": 2, "heads": 2, "ffn": 48, "ctx": 32, "batch": 8, "steps": STEPS}
TIMID = {"lr": 0.002, "steps": 3}


@pytest.fixture(scope="module")
def text(numbers) -> str:
    return numbers


@pytest.fixture(scope="module")
def run(text, tmp_path_factory):
    return train(tmp_path_factory.mktemp("runs"), b"", **SMALL, data=[text], save_every=6)


def trainer_of(text: str, **changes) -> Trainer:
    config = new_config(**SMALL | {"data": [text]} | changes)
    return Trainer(
        config, open_texts(config.data, None, seed=config.seed, context=config.model.ctx)
    )


def names(report: ProbeReport) -> list[str]:
    return [verdict.name for verdict in report.verdicts]


def evidence(report: ProbeReport, name: str) -> str:
    return next(verdict.evidence for verdict in report.verdicts if verdict.name == name)


@pytest.mark.parametrize(
    ("rule", "seed"),
    mostly_slow(
        [("nibble", 0), ("carry", 1), ("nibble", 1), ("carry", 0)],
        lambda *case: case == ("nibble", 0),
    ),
)
def test_probe_finds_nothing_wrong_with_other_rules(rule, seed):
    # the moment of `nibble` takes ten steps to fill
    report = probe(new_config(**SMALL | {"steps": 24}, rule=rule, seed=seed), steps=24)
    assert names(report) == ["ok"]


@pytest.mark.parametrize("seed", mostly_slow([0, 1], lambda seed: seed == 0))
def test_probe_names_the_mass_flips_of_votes(seed):  # which not every seed has
    report = probe(new_config(**SMALL, rule="votes", seed=seed), steps=STEPS)
    assert "spike" in names(report)
    assert not report.passed
    assert "of all trits" in evidence(report, "spike")


def test_probe_looks_at_several_streams(text):
    """Their biases are a module that is given nothing."""
    report = probe(new_config(**SMALL | {"data": [text], "steps": 2}, streams=2), steps=2)
    last = report.readings[-1]
    assert len(last.residual_rms) == 3
    assert None not in (*last.residual_rms, *last.mixer_rms, *last.channel_rms)
    assert len(last.stream_ranges) == 2
    for of_block in last.stream_ranges:
        for least, most in (of_block[:2], of_block[4:6]):  # of a, about 0.12 and 0.88 at first
            assert 0 < least < 0.3 < 0.7 < most < 1
        for least, most in (of_block[2:4], of_block[6:]):  # of c, 1 at first
            assert 0 < least <= most < 2


def test_ranges_of_streams_are_those_of_attention_and_then_of_the_mlp():
    ends = torch.arange(16).view(4, 4)  # of a and of c, the least and the largest
    branches = ["mlp", "attention"] * 2
    names = [f"blocks.{index // 2}.{branch}_streams" for index, branch in enumerate(branches)]
    parts = [(f"blocks.{index}.attention", f"blocks.{index}.mlp") for index in range(2)]
    ranges = _block_ranges(dict(zip(names, ends, strict=True)), parts)
    assert ranges == ((4, 5, 6, 7, 0, 1, 2, 3), (12, 13, 14, 15, 8, 9, 10, 11))
    alone = _block_ranges({"blocks.0.mlp_streams": ends[0]}, [(None, "blocks.0.mlp")])
    assert alone == ((None, None, None, None, 0, 1, 2, 3),)
    assert _block_ranges({}, parts) == ()


def test_probe_looks_into_blocks_of_any_parts(text):
    """Compressed attention and experts on four streams, of which the first are chosen by a hash.

    The others are chosen by scores that are 1e-4 apart at least, less than bfloat16 rounds.
    """
    sizes = {"dim": 32, "layers": 3, "heads": 2, "head_width": 16, "ffn": 16, "ctx": 32}
    given = sizes | {"preset": "arb-deep-small", "experts": 4, "hash_layers": 1, "batch": 4}
    given["ratios"] = (2, 8)
    given |= {"data": [text], "steps": 2, "device": "cpu", "compute": "fp32"}
    report = probe(new_config(**given), steps=2)
    assert names(report) == ["ok"]
    last = report.readings[-1]
    assert None not in (*last.mixer_rms, *last.channel_rms)
    assert len(last.mixer_rms) == len(last.channel_rms) == len(last.stream_ranges) == 3
    assert report.acausal_logits == 0
    assert report.acausal_layers == (0, 0, 0, 0)


def test_probe_shows_the_chunks_of_a_model(text, small_hnet):
    given = small_hnet | {"data": [text], "steps": 3, "device": "cpu"}
    report = probe(new_config(**given), steps=3)
    assert names(report) == ["ok"]
    chunks = report.chunks
    assert len(chunks.mean_lengths) == 2
    assert 1 <= chunks.mean_lengths[0] <= chunks.mean_lengths[1] <= 24
    places = sum(number * (length + 1) for length, number in enumerate(chunks.lengths))
    assert places == 4 * 24
    assert sum(chunks.lengths) * chunks.mean_lengths[0] == pytest.approx(places)
    assert len(chunks.sample_bytes) == len(chunks.sample_depths) == 24
    assert chunks.sample_depths[0] == 2
    json.dumps(dataclasses.asdict(report), allow_nan=False)


def test_probe_shows_the_mean_length_of_chunks_of_tokens_alone(text, small_hnet, byte_tokenizer):
    given = small_hnet | {"data": [text], "tokenizer": byte_tokenizer, "device": "cpu"}
    chunks = probe(new_config(**given, fields={"stages.0.streams": 2}, steps=1), steps=1).chunks
    assert (chunks.sample_bytes, chunks.sample_depths) == ((), ())
    assert [line.endswith(" tokens on average") for line in _chunks(chunks)] == [True]


@pytest.mark.parametrize("part", mostly_slow(["codebook", "moe_graph"], lambda p: p == "moe_graph"))
def test_acausal_part_of_a_graph_is_named(part, text, small_graph, monkeypatch):
    trainer = trainer_of(text, **small_graph)
    module = getattr(trainer.model, part)
    forward = module.forward

    def leaking(x, *args):
        outputs = forward(x, *args)
        return outputs._replace(**{outputs._fields[0]: outputs[0] + 0.01 * x.roll(-1, dims=1)})

    monkeypatch.setattr(module, "forward", leaking)
    assert names(examine(trainer, 1))[0] == "acausal"


def test_causality_of_experts_is_checked_in_float32(text):
    """One unit of bfloat16, by which sums of other rows may differ, would count as a leak."""
    trainer = trainer_of(text, preset="arb-deep-small", layers=1, hash_layers=1, compute="bf16")
    model, dtypes = trainer.model, set()
    channel = model.blocks[0].branches[1].part
    channel.register_forward_pre_hook(lambda module, args: dtypes.add(args[0].dtype))
    assert _count_acausal_changes(model, torch.zeros(2, 8, dtype=torch.int64)) == (0, (0, 0))
    assert dtypes == {torch.float32}
    assert model.compute_dtype == torch.bfloat16


def test_readings_are_those_of_the_held_out_batch(text, monkeypatch):
    trainer, peaks = trainer_of(text, warmup=2, steps=3), iter([500, 900, 700])
    monkeypatch.setattr("arbcli.inspect.probe.peak_bytes", lambda device: next(peaks))
    ids, targets = held_out_batch(trainer.texts.val, 0, trainer.config.batch, SMALL["ctx"], "cpu")
    rates = [learning_rate(trainer.config, step) for step in range(3)]
    report = examine(trainer, 3)
    last = report.readings[-1]
    with torch.no_grad():  # by the weights that the last step left
        logits = trainer.model(ids).double()
    losses = functional.cross_entropy(logits.mT, targets, reduction="none")
    assert last.val_loss == pytest.approx(float(losses.mean()), rel=1e-5)
    ends = [*report.position_starts[1:], SMALL["ctx"]]
    for start, end, loss in zip(report.position_starts, ends, last.loss_by_position, strict=True):
        assert loss == pytest.approx(float(losses[:, start:end].mean()), rel=1e-5)
    assert last.logit_min == pytest.approx(float(logits.min()), rel=1e-5)
    assert last.logit_max == pytest.approx(float(logits.max()), rel=1e-5)
    entropies = torch.special.entr(logits.softmax(-1)).sum(-1)
    assert last.prediction_entropy == pytest.approx(float(entropies.mean()), rel=1e-5)
    assert [reading.lr for reading in report.readings] == [None, *rates]
    assert report.peak_bytes == 900
    assert report.state_bytes == trainer.state_bytes()
    assert report.num_weights == trainer.num_weights
    assert report.uniform_loss == pytest.approx(math.log(256))
    assert report.text_entropy == entropy(trainer.texts.val)
    assert report.config["lr"] == trainer.config.lr


@pytest.mark.parametrize(
    "rule", mostly_slow(["moment", "nibble", "carry", "votes"], lambda r: r in ("nibble", "votes"))
)
def test_flips_are_those_that_the_updates_count(rule, text):
    trainer = trainer_of(text, rule=rule)
    weights = {name: w for name, w in trainer.model.weights().items() if not w.frozen}
    seen, step_of = [], trainer.train_step

    def noted():
        seen.append({n: unpack_trits(w.trits, w.in_features) for n, w in weights.items()})
        return step_of()

    trainer.train_step = noted
    report = examine(trainer, 4)
    seen.append({n: unpack_trits(w.trits, w.in_features) for n, w in weights.items()})
    shares = sum(reading.flip_share for reading in report.readings[1:])
    assert round(shares * trainer.updater.num_weights) == int(trainer.updater.flips) > 0
    for tensor in report.tensors:
        for digit in {"moment", "remainder"} & tensor.digits.keys():
            assert sum(tensor.digits[digit].counts) == tensor.num_weights
        assert tensor.digits["scale"].low < tensor.digits["scale"].high
        of_tensor = torch.stack([trits[tensor.name] for trits in seen]).int()
        before, after = of_tensor[:-1], of_tensor[1:]
        counted = {
            "up_share": after > before, "down_share": after < before,
            "into_zero_share": (after == 0) & (before != 0),
            "out_of_zero_share": (after != 0) & (before == 0),
            "still_share": (after == before).all(0),
        }  # fmt: skip
        for name, moves in counted.items():
            assert getattr(tensor, name) == pytest.approx(float(moves.double().mean()), abs=1e-6)
        assert tensor.changed


@pytest.mark.parametrize(
    "direction", mostly_slow(["orthogonal", "factored"], lambda name: name == "factored")
)
def test_update_size_is_1_where_rounding_is_small(direction, text):
    """Whatever the learning rate of a matrix is multiplied by."""
    lr = 4.0 if direction == "orthogonal" else 1.0
    report = examine(trainer_of(text, lr=lr, warmup=0, direction=direction), 2)
    for tensor in report.tensors:
        if tensor.name != "embedding.weight":  # its rows of absent bytes do not move
            assert 0.8 < tensor.update_size < 1.1, tensor.name


def test_probe_leaves_no_hooks(text, monkeypatch):
    trainer, unfreeze = trainer_of(text), mock.Mock()
    monkeypatch.setattr(gc, "get_freeze_count", lambda: 0)
    monkeypatch.setattr(gc, "unfreeze", unfreeze)
    examine(trainer, 1)
    unfreeze.assert_called_once_with()  # what is alive is collected again
    assert not any(m._forward_hooks or m._forward_pre_hooks for m in trainer.model.modules())
    streamed = [part for part in trainer.model.modules() if isinstance(part, StreamedTensor)]
    assert streamed
    assert all(weight.sink is trainer.updater for weight in streamed)


@pytest.mark.parametrize("shift", mostly_slow([1, SMALL["ctx"]], lambda shift: shift == 1))
def test_acausal_attention_is_named(shift, text, monkeypatch):
    attention = functional.scaled_dot_product_attention

    def leaking(q, k, v, is_causal):
        length = q.shape[-2]
        mask = torch.ones(length, length, dtype=torch.bool, device=q.device).tril(shift)
        return attention(q, k, v, attn_mask=mask)

    monkeypatch.setattr(functional, "scaled_dot_product_attention", leaking)
    report = examine(trainer_of(text), 1)
    assert names(report)[0] == "acausal"
    assert report.acausal_logits > 0
    assert report.acausal_layers[0] == 0 < report.acausal_layers[1]


def saturate(weight) -> None:
    weight.exponent.fill_(-96)
    weight.fraction.fill_(0)


PLANTED = {
    "blown-up stream": (
        lambda model: model.blocks[1].mlp.output.weight.exponent.add_(9),
        "residual-growth", "taking off in block 1"),
    "compressed logits": (
        lambda model: model.head.weight.exponent.sub_(4), "logits-compressed", "spread by 0.06"),
    "branch that adds nothing": (
        lambda model: model.blocks[0].mlp.output.weight.exponent.sub_(20),
        "dead", "channel mixer of `blocks.0`"),
    "saturated scales": (
        lambda model: saturate(model.blocks[1].attention.output.weight),
        "saturated", "`blocks.1.attention.output.weight` 100% of each scale"),
}  # fmt: skip


@pytest.mark.parametrize("name", PLANTED)
def test_fault_of_weights_is_named_with_its_place(name, text):
    plant, verdict, place = PLANTED[name]
    trainer = trainer_of(text, **TIMID)
    plant(trainer.model)
    report = examine(trainer, 2)
    assert place in evidence(report, verdict)
    assert report.readings[-1].takeoff_layer == (1 if verdict == "residual-growth" else None)


def test_growth_is_reported_for_bytes_and_layers(text, monkeypatch):
    trainer = trainer_of(text, **TIMID)
    block = trainer.model.blocks[1]
    plain, place = block.forward, 9

    def enlarging(*given, **options):
        output = plain(*given, **options)
        parts = output.x.split((place, 1, output.x.shape[1] - place - 1), dim=1)
        return output._replace(x=torch.cat((parts[0], 40 * parts[1], parts[2]), dim=1))

    sound = examine(trainer_of(text, **TIMID), 1).readings[0]
    monkeypatch.setattr(block, "forward", enlarging)
    reading = examine(trainer, 1).readings[0]
    assert reading.residual_most[:2] == sound.residual_most[:2]
    assert 20 < reading.residual_most[2] / sound.residual_most[2] < 41
    assert sound.growth_by_position == pytest.approx([sound.residual_growth] * 6, rel=0.3)
    *near, grown, last = reading.growth_by_position  # from 0, 1, 2, 4, 8 and 16 on
    assert (*near, last) == (*sound.growth_by_position[:4], sound.growth_by_position[5])
    assert 5 < grown / sound.growth_by_position[4] < 8  # one of eight bytes, 40 times


@pytest.mark.parametrize(
    ("path", "function", "what"),
    [("blocks.1.mlp.output", "forward", "output of `{}` by step 0"),
     ("blocks.0.attention.qkv.weight", "gradient", "gradient of `{}` by step 1")],
)  # fmt: skip
def test_nan_is_traced_to_the_module_or_weight_that_makes_it(
    path, function, what, text, monkeypatch
):
    trainer = trainer_of(text)
    faulty = trainer.model.get_submodule(path)
    sound = getattr(faulty, function)
    monkeypatch.setattr(faulty, function, lambda *x, **how: sound(*x, **how) * math.nan)
    report = examine(trainer, 2)
    assert report.first_nonfinite == what.format(path)
    assert names(report)[0] == "spike"
    if function == "gradient":
        assert f"`{path}` changed" in evidence(report, "dead")
    else:
        assert report.readings[-1].val_loss is None


def snapshot(run) -> dict:
    return {p.name: (p.read_bytes(), p.stat().st_mtime_ns) for p in run.iterdir()}


def test_probe_of_a_saved_model_steps_as_the_run_did(run, text):
    before = snapshot(run)
    config, checkpoint = open_saved(run / "step-000006.safetensors", steps=6, note=print)
    assert config.steps == STEPS
    report = probe(config, steps=6, checkpoint=checkpoint)
    assert report.passed
    assert [reading.step for reading in report.readings] == [*range(6, 13)]
    assert snapshot(run) == before
    plain = trainer_of(text)
    losses = [float(plain.train_step()) for _ in range(STEPS)]
    assert [reading.loss for reading in report.readings[1:]] == losses[6:]


def test_probe_continues_the_average_of_a_run_that_learns_from_a_teacher(run, text, tmp_path):
    given = SMALL | {"steps": 2, "weight_average": 2, "teacher": run, "data": [text]}
    config, checkpoint = open_saved(train(tmp_path, b"", **given), steps=1, note=print)
    assert [r.step for r in probe(config, steps=1, checkpoint=checkpoint).readings] == [2, 3]


def test_options_replace_those_of_the_run_and_another_text_its_texts(run, text, monkeypatch):
    """Neither the held-out text of the run nor the field of its records is of another text."""
    config, checkpoint = open_saved(run, steps=5, note=print)
    assert config.steps == checkpoint.step + 5 > STEPS  # it has ended, and is taken to go on
    monkeypatch.setattr(
        "arbcli.inspect.probe.run_config",
        lambda _, facts: dataclasses.replace(train_config_from(facts), val=("v.txt",), field="a"),
    )
    given = {"batch": 3, "lr": 0.5, "device": "cpu", "backend": "torch"}
    named = {"data": [text], "val": ["w.txt"], "field": "body"}
    expected = ({}, ("v.txt",), "a"), ({"data": [text]}, (), None), (named, ("w.txt",), "body")
    for texts, val, field in expected:
        config, _ = open_saved(run, steps=1, note=print, **given | texts)
        assert (config.val, config.field, config.data) == (val, field, (text,))
        assert {name: getattr(config, name) for name in given} == given


def test_probe_reads_the_field_that_is_named(run, tmp_path):
    records = tmp_path / "a.jsonl"
    records.write_text('{"said": "' + "abc " * 200 + '", "other": "' + "x" * 4000 + '"}\n')
    config, checkpoint = open_saved(run, steps=1, note=print, data=[str(records)], field="said")
    read = probe(config, steps=1, checkpoint=checkpoint)
    assert read.text_entropy == pytest.approx(math.log(4), rel=0.1)


@pytest.mark.parametrize(
    ("values", "ends", "counts", "share"),
    [
        (range(-8, 8), (-8, 7), [1] * 16, 2 / 16),
        (range(-128, 128), (-128, 127), [16] * 16, 2 / 256),
        ([-3, 3, 3, 0], (-3, 3), [1, 0, 0, 1, 0, 0, 2], 3 / 4),
    ],
)
def test_bins_of_a_histogram_are_of_equal_width(values, ends, counts, share):
    histogram = _histogram(torch.tensor(list(values)), *ends)
    assert (histogram.low, histogram.high) == ends
    assert list(histogram.counts) == counts
    assert histogram.saturated_share == pytest.approx(share)


def test_what_a_short_context_does_not_use_is_not_dead():
    """No entry of compressed attention is complete in a context below its ratio."""
    shape = SMALL | {"attention": "compressed", "ctx": 6, "ratios": (8, 8)}
    report = probe(new_config(**shape), steps=2)
    assert "dead" not in names(report)
    assert not any("beta" in tensor.name for tensor in report.tensors)
    longer = probe(new_config(**shape | {"ctx": 16}), steps=1)
    assert any("beta" in tensor.name for tensor in longer.tensors)
