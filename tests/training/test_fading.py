"""Weights that fade from all digits to the trit, in the course of a run."""

import dataclasses
import shutil
from pathlib import Path

import pytest
import torch
from made_runs import observer_with, train

from arbcli.base.errors import ArbError
from arbcli.base.run_files import checkpoint_path
from arbcli.config.training import FADE_FROM, FADING_SHARE
from arbcli.data.opening import open_texts
from arbcli.generation.generation import generate
from arbcli.generation.load import load_model, saved_config
from arbcli.generation.sampling import Sampling
from arbcli.inspect.probe import open_saved
from arbcli.interop.exporting import export
from arbcli.kernels.runtime.device import EAGER_STEPS, deterministic
from arbcli.model.checkpoint import load_checkpoint
from arbcli.model.rules import FADED, FADING, STAGES, find_rule, stage_rule
from arbcli.training.configure import new_config
from arbcli.training.observer import Observer
from arbcli.training.resume import resume_run
from arbcli.training.schedule import fade_share, fade_stage, learning_rate
from arbcli.training.trainer import Trainer
from arbcli.verify.kernels.codec.decode_digits import digits_reference, scales_reference

FADES = (FADE_FROM, FADE_FROM + FADING_SHARE)
SMALL = {
    "dim": 32, "layers": 1, "heads": 1, "ffn": 32, "ctx": 16, "batch": 2, "steps": 20,
    "rule": "nibble", "digits": "fade", "device": "cpu", "warmup": 2,
}  # fmt: skip
MIXED = {"rule": "moment", "mlp_rule": "nibble"}


def trainer_of(text: str, **options) -> Trainer:
    config = new_config(**SMALL | options, data=[text])
    return Trainer(config, open_texts(config.data, None, seed=0, context=16))


def test_stages_take_equal_turns_and_the_last_stage_stays():
    stages = [fade_stage(step, 1000, FADES) for step in range(1001)]
    assert tuple(dict.fromkeys(stages)) == STAGES
    assert stages[int(1000 * FADE_FROM)] == "all" != stages[int(1000 * FADE_FROM) + 1]
    turn = 1000 * FADING_SHARE / 16
    assert all(stages.count(stage) == pytest.approx(turn, abs=1) for stage in STAGES[1:-1])
    assert [fade_stage(step, 1, FADES) for step in (0, 1)] == ["all", "trit"]
    early = [fade_stage(step, 1000, (0.0, 0.5)) for step in range(1001)]
    assert (early[0], early[1], early[500]) == ("all", "15/16", "trit")
    assert early[:600] == stages[400:1000]
    assert [fade_stage(step, 1000, (0.0, 0.25)) for step in range(501)] == early[::2]


@pytest.mark.parametrize("rule", FADING)
def test_weight_is_all_digits_and_the_trit_each_by_its_share(rule, text):
    tensor = trainer_of(text, rule=rule).model.blocks[0].mlp.output.weight
    packed = tensor.packed
    every, trit = digits_reference(packed), digits_reference(packed._replace(remainder=None))
    scale = scales_reference(packed).bfloat16().double()
    for number, stage in enumerate(STAGES):
        share = number / 16
        wanted = ((1 - share) * every + share * trit) * scale
        tensor.rule = stage_rule(rule, stage)
        assert torch.equal(tensor.weight(), wanted.bfloat16()), stage
        assert constants(tensor.rule) == constants(find_rule(rule, "all"))


def constants(rule) -> dict[str, object]:
    """Return the constants of steps of a rule; that of trits has another moment and clip."""
    of_reading = {"reads_all", "kept", "read_radix", "fits_a_byte", "unit_std", "__module__"}
    names = {name for name in dir(rule) if isinstance(getattr(rule, name), int | float | str)}
    return {name: getattr(rule, name) for name in names - of_reading}


@pytest.fixture(scope="module")
def faded(tmp_path_factory) -> Path:
    """Train a run to its end, and keep a checkpoint of the middle."""
    text, options = b"ternary weights learn to read. " * 100, SMALL | MIXED
    return train(tmp_path_factory.mktemp("faded"), text, **options, save_every=12, keep=3)


def test_run_resumed_while_it_fades_ends_with_the_same_bits(faded, tmp_path):
    run, notes = Path(shutil.copytree(faded, tmp_path / "run")), []
    last = load_checkpoint(checkpoint_path(run, 20))

    def stage(step: int) -> str:
        return saved_config(load_checkpoint(checkpoint_path(run, step))).digits

    assert stage(12) == fade_stage(12, 20, FADES)
    assert stage(12) in FADED
    resume_run(checkpoint_path(run, 12), Observer())
    assert load_checkpoint(checkpoint_path(run, 20)).digest == last.digest
    assert stage(20) == "trit"
    probed, _ = open_saved(run, steps=8, note=print)
    assert fade_stage(20, probed.steps, probed.fades) == "trit"
    resume_run(run, observer_with(noted=notes.append), steps=28)  # 20 is in the middle of it
    assert notes[0].endswith("; weights are annealed by 63% there, not 100%")
    assert (stage(24), stage(28)) == (fade_stage(24, 28, FADES), "trit")


def test_checkpoints_of_the_middle_are_read_and_not_exported(text, faded, tmp_path):
    trainer = trainer_of(text, **MIXED)
    for _ in range(12):
        trainer.train_step()
    middle = checkpoint_path(faded, 12)
    model, ids = load_model(middle, compute="fp32"), torch.arange(16)[None]
    trainer.model.compute_dtype = torch.float32
    assert torch.equal(model(ids), trainer.model(ids))
    assert len(b"".join(generate(model, b"a", 3, Sampling(seed=0)))) >= 3
    for form in ("hf", "safetensors"):
        with pytest.raises(ArbError, match="are fading from all digits to the trit") as caught:
            export(middle, form, out=tmp_path / "weights")
        assert "the end of the run" in caught.value.hint
    assert not (tmp_path / "weights").exists()
    export(faded, "safetensors", out=tmp_path / "weights")
    with pytest.raises(ArbError, match="middle of a run"):
        new_config(preset=saved_config(load_checkpoint(middle)))


def test_embedding_and_head_may_keep_all_digits(tmp_path):
    options = SMALL | {"fields": {"symbol_digits": "all"}}
    model = load_model(train(tmp_path, b"ternary weights. " * 100, **options))
    assert model.config.digits == "trit"
    for weight in (model.embedding.weight, model.head.weight):
        assert weight.packed.remainder is not None
    assert model.blocks[0].mlp.output.weight.packed.remainder is None


def test_rate_grows_to_that_of_the_trit_while_weights_fade():
    config = new_config(**SMALL | {"rule": "moment", "schedule": "constant", "warmup": 0})
    growth = find_rule("moment", "all").fade_growth
    for step in (0, 8, 13, 18, 20):
        wanted = config.lr * (1 + (growth - 1) * fade_share(step, 20, FADES))
        assert learning_rate(config, step) == pytest.approx(wanted)
    assert fade_share(8, 20, FADES) == 0 != fade_share(9, 20, FADES)
    assert fade_share(18, 20, FADES) == 1
    for given, step in (({"fade_from": 0.0}, 5), ({"fade_from": 0.2, "fade_to": 0.4}, 6)):
        early = dataclasses.replace(config, **given)
        assert learning_rate(early, step) == pytest.approx(config.lr * (1 + (growth - 1) / 2))


@pytest.mark.gpu
@pytest.mark.parametrize("rules", [*({"rule": rule} for rule in FADING), MIXED], ids=str)
def test_captured_steps_fade_with_the_bits_of_eager_steps(rules, text):
    outcomes = []
    for capture in (False, True):
        config = new_config(**SMALL | rules | {"steps": 60, "device": "cuda"}, data=[text])
        texts = open_texts(config.data, None, seed=0, context=16)
        losses = []
        with deterministic():
            trainer = Trainer(config, texts, capture=capture)
            for _ in range(config.steps):
                losses.append(float(trainer.train_step()))
                if trainer.digits in FADED and len(losses) % 5 == 0:
                    list(generate(trainer.model, b"a", 2, Sampling(seed=0)))
        assert (trainer._graph is not None) == capture
        outcomes.append((losses, {name: t.cpu() for name, t in trainer.model.state_dict().items()}))
    assert outcomes[0][0] == outcomes[1][0]
    assert all(torch.equal(part, outcomes[1][1][name]) for name, part in outcomes[0][1].items())
    assert EAGER_STEPS < 60 * FADING_SHARE / 4
