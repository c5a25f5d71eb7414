"""Predictions of a teacher, learnt besides the text; gradients of models of tokens, too."""

import dataclasses
import shutil
from pathlib import Path

import pytest
import torch
from made_runs import train
from references import decoded, dense_gradients
from states import assert_same, state_of

from arbcli.base.errors import ArbError
from arbcli.base.run_files import checkpoint_path
from arbcli.config.model import BlockConfig, ModelConfig, StageConfig
from arbcli.config.parts.attention import AttentionConfig
from arbcli.config.parts.mlp import MLPConfig
from arbcli.data.opening import open_texts
from arbcli.generation.load import saved_config
from arbcli.kernels.runtime.backend import use_backend
from arbcli.model.build import build_model
from arbcli.model.checkpoint import load_checkpoint
from arbcli.training.check import check_run
from arbcli.training.configure import new_config
from arbcli.training.observer import Observer
from arbcli.training.resume import resume_run
from arbcli.training.run import start_run
from arbcli.training.teacher import read_teacher
from arbcli.training.trainer import Trainer
from arbcli.verify.reference import Reference, reference_loss

CTX = 10
SMALL, LARGE = 301, 5003
RUN = {
    "dim": 32, "layers": 1, "heads": 1, "ffn": 32, "ctx": 16, "batch": 2, "steps": 10,
    "digits": "fade", "device": "cpu", "compute": "fp32", "warmup": 2,
}  # fmt: skip


def model_of(vocabulary: int, dim: int, dtype: torch.dtype, seed: int, **options):
    block = BlockConfig(mixer=AttentionConfig(heads=2), channel=MLPConfig(width=16))
    stage = StageConfig(dim=dim, blocks=(block,) * 2)
    config = ModelConfig(ctx=CTX, stages=(stage,), vocabulary=vocabulary, digits="all", **options)
    return build_model(config, dtype, seed=seed)


def batch_of(vocabulary: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    ids, targets = torch.randint(vocabulary, (2, 3, CTX), generator=generator)
    return ids, targets, torch.rand(3, CTX, generator=generator) < 0.4


@pytest.mark.parametrize(
    ("tied", "vocabulary", "norm_gain", "dtype"),
    [
        (False, SMALL, True, torch.float32), (True, LARGE, False, torch.float32),
        (True, SMALL, False, torch.bfloat16), (False, LARGE, False, torch.bfloat16),
    ],
)  # fmt: skip
def test_divergence_and_gradients_agree_with_those_of_the_reference(
    vocabulary, tied, norm_gain, dtype
):
    student = model_of(vocabulary, 24, dtype, 0, tied=tied, norm_gain=norm_gain)
    teacher = model_of(vocabulary, 32, dtype, 1, tied=not tied)
    ids, targets, _ = batch_of(vocabulary)
    weights = {name: part.requires_grad_() for name, part in decoded(student).items()}
    logits, _ = Reference(weights, student.config)(ids)
    theirs, _ = Reference(decoded(teacher), teacher.config)(ids)
    shares, log_theirs = theirs.softmax(-1), theirs.log_softmax(-1)
    wanted = (shares * (log_theirs - logits.log_softmax(-1))).sum(-1).mean()
    (wanted + reference_loss(logits, targets)).backward()
    grads = dense_gradients(student)
    with use_backend("torch"):
        losses = student.losses(ids, targets, teacher=teacher)
        (losses["text"] + losses["teacher"]).backward()
        of_positions = student.position_losses(ids, targets).mean()
    assert float(of_positions) == pytest.approx(float(losses["text"].detach()), rel=1e-3)
    close = 1e-5 if dtype == torch.float32 else 3e-2
    assert float(losses["teacher"].detach()) == pytest.approx(float(wanted), rel=close)
    for name, part in student.weights().items():
        if not part.frozen:
            error = (grads[name] - weights[name].grad).norm() / weights[name].grad.norm()
            assert error < close, name


@pytest.mark.parametrize("vocabulary", [SMALL, LARGE])
def test_divergence_of_documents_counts_learnt_positions(vocabulary):
    student, teacher = (model_of(vocabulary, 24, torch.float32, seed) for seed in (0, 1))
    ids, targets, ignored = batch_of(vocabulary)
    documents = torch.tensor([0] * 4 + [1] * 6).expand(3, CTX)
    with use_backend("torch"), torch.no_grad():
        divergence = student.losses(
            ids, targets.masked_fill(ignored, -1), documents.contiguous(), teacher=teacher
        )["teacher"]
        logits = [
            torch.cat([model(part) for part in (ids[:, :4], ids[:, 4:])], dim=1).double()
            for model in (student, teacher)
        ]
    of_student, of_teacher = (part.log_softmax(-1) for part in logits)
    wanted = (of_teacher.exp() * (of_teacher - of_student)).sum(-1)[~ignored].mean()
    torch.testing.assert_close(divergence.double(), wanted, rtol=1e-4, atol=1e-6)


@pytest.fixture(scope="module")
def teacher(tmp_path_factory) -> Path:
    """Train a teacher, next to its text."""
    folder, text = tmp_path_factory.mktemp("teacher"), b"ternary weights learn to read. " * 100
    return train(folder, text, **RUN | {"digits": "all"})


@pytest.fixture
def taught(teacher, tmp_path):
    """A copy of the run of a teacher, and settings of a run that it teaches."""
    run = tmp_path / "teacher"
    shutil.copytree(teacher, run)
    text = str(teacher.parent / "text.txt")
    return run, RUN | {"data": [text], "teacher": str(run)}


def test_teacher_that_a_model_equals_diverges_by_nothing_and_stays(taught):
    run, settings = taught
    config = new_config(**settings)
    texts = open_texts(config.data, None, seed=0, context=16)
    saved = read_teacher(config)
    with pytest.raises(ValueError, match="read_teacher"):
        Trainer(config, texts)
    trainer = Trainer(config, texts, teacher=saved.checkpoint)
    trainer.initialise_from(load_checkpoint(checkpoint_path(run, 10)))
    before = state_of(trainer.teacher)
    names = trainer.model.state_dict().keys() - before.keys()
    assert any("moment" in name for name in names)
    trainer.train_step()
    assert abs(float(trainer.loss_parts["teacher"])) < 1e-6
    for _ in range(config.steps - 1):
        trainer.train_step()
    assert float(trainer.loss_parts["teacher"]) > 1e-3
    assert_same(state_of(trainer.teacher), before)


def test_run_with_a_teacher_resumes_to_the_same_bits_and_needs_that_teacher(taught, tmp_path):
    teacher, settings = taught
    run = tmp_path / "run"
    start_run(new_config(**settings, save_every=6, keep=3), run, Observer())
    last = load_checkpoint(checkpoint_path(run, 10))
    assert saved_config(last).digits == "trit"
    resume_run(checkpoint_path(run, 6), Observer())
    assert load_checkpoint(checkpoint_path(run, 10)).digest == last.digest
    assert check_run(run).passed
    path = checkpoint_path(teacher, 10)
    other = tmp_path / "other"
    start_run(new_config(**settings | {"teacher": None, "seed": 1}), other, Observer())
    path.write_bytes(checkpoint_path(other, 10).read_bytes())
    with pytest.raises(ArbError, match="not the teacher"):
        resume_run(run, Observer(), steps=12)
    assert "teacher" in check_run(run).stops
    path.unlink()
    with pytest.raises(ArbError, match="step-"):
        resume_run(run, Observer(), steps=12)


def test_teacher_of_other_symbols_is_refused(taught, tmp_path):
    _, settings = taught
    config = new_config(**settings)
    model = dataclasses.replace(config.model, vocabulary=SMALL)
    with pytest.raises(ArbError, match="256 symbols"):
        read_teacher(dataclasses.replace(config, model=model))
    with pytest.raises(ArbError, match="nowhere"):
        read_teacher(new_config(**settings | {"teacher": "nowhere"}))
