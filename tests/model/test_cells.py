"""Every mixer with every channel mixer learns, goes on exactly, and reads a text in pieces."""

import torch
from cells import AHEAD, COVER, FEW, Cell, each_cell
from references import logits_in_parts
from states import assert_same, state_of

from arbcli.data.opening import open_texts
from arbcli.kernels.runtime.backend import use_backend
from arbcli.kernels.runtime.device import deterministic
from arbcli.model.build import build_model
from arbcli.model.language_model import LanguageModel
from arbcli.training.configure import new_config
from arbcli.training.trainer import Trainer

STEPS = 50


def trainer(cell: Cell, folder, *, windows: int = 1) -> Trainer:
    """Train a cell on a text that has so many windows, so that each step reads the same ones."""
    model = cell.model()
    path = folder / "text.txt"
    path.write_bytes((b"ternary weights learn to read. " * 9)[: model.ctx + windows])
    config = new_config(
        preset=model, data=[str(path)], val=[str(path)], device="cpu", compute="fp32", batch=4,
        steps=STEPS, backend="torch", lr=1.0,
    )  # fmt: skip
    return Trainer(config, open_texts(config.data, config.val, seed=0, context=model.ctx))


def unmoved(learner: Trainer, before: dict[str, torch.Tensor]) -> set[str]:
    """Name the weights all of whose integers are what they were."""
    after = state_of(learner.model)
    return {
        name
        for name in learner.model.weights()
        if all(torch.equal(before[p], after[p]) for p in after if p.startswith(f"{name}."))
    }


@each_cell([*COVER, AHEAD], quick=[FEW[0], FEW[3]])
def test_cell_learns_with_all_its_weights(cell, tmp_path):
    with deterministic():
        learner = trainer(cell, tmp_path)
        before, first = state_of(learner.model), float(learner.train_step())
        frozen = {name for name, weight in learner.model.weights().items() if weight.frozen}
        for _ in range(STEPS - 1):
            last = float(learner.train_step())
            if last < 0.8 * first and unmoved(learner, before) == frozen:
                break
    assert last < 0.8 * first
    assert unmoved(learner, before) == frozen


@each_cell([*COVER, AHEAD], quick=[FEW[4], AHEAD])
def test_cell_goes_on_from_a_checkpoint_as_if_it_had_never_stopped(cell, tmp_path):
    with deterministic():
        whole, resumed = (trainer(cell, tmp_path, windows=40) for _ in range(2))
        for _ in range(2):
            whole.train_step()
        resumed.restore(whole.checkpoint("text"))
        for learner in (whole, resumed) * 2:
            learner.train_step()
    assert_same(state_of(whole.model), state_of(resumed.model))


def text_with_room(lm: LanguageModel) -> torch.Tensor:
    """Draw a text, (1, ctx), whose chunks all find a slot."""
    for seed in range(100):
        generator = torch.Generator().manual_seed(seed)
        ids = torch.randint(97, 123, (1, lm.config.ctx), generator=generator)
        if not lm.stages:
            return ids
        with torch.enable_grad():
            lm.losses(ids, ids)
        if lm.gauges()["joined"] == 0:
            return ids
    raise AssertionError("no text has room for its chunks")


@each_cell(quick=FEW)
@torch.no_grad()
def test_cell_reads_a_text_in_pieces_as_it_does_at_once(cell):
    lm = build_model(cell.model(), torch.float32)
    length = lm.config.ctx
    with use_backend("torch"):
        ids = text_with_room(lm)
        whole = lm(ids)
        got = logits_in_parts(lm, ids, [1, 1, 3, 1, 4, *[1] * (length - 10)])
    torch.testing.assert_close(got, whole, rtol=1e-4, atol=1e-4)
