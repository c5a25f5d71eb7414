"""The noise of a run: no two updates share any."""

import pytest

from arbcli.data.opening import open_texts
from arbcli.kernels.update import (
    blend_moment,
    gradient_gains,
    quantise_gradient,
    step_scales,
    step_trits,
)
from arbcli.model import packed
from arbcli.training.configure import new_config
from arbcli.training.trainer import Trainer


@pytest.fixture
def used_keys(monkeypatch) -> list[tuple[str, int]]:
    """Note every key that anything draws from, and what for."""
    used = []

    def spy(module, name, purpose):
        draw = getattr(module, name)

        def noted(keys, *args):
            used.extend((purpose, key) for key in keys.flatten().tolist())
            return draw(keys, *args)

        monkeypatch.setattr(module, name, noted)

    spy(step_scales, "random_bits", "scales")
    spy(gradient_gains, "random_bits", "statistics")
    spy(blend_moment, "random_halves", "moment")
    spy(step_trits, "random_halves", "weights")
    spy(packed, "random_bits", "start")
    spy(quantise_gradient, "random_halves", "wire")
    return used


def purposes(used: list[tuple[str, int]]) -> dict[str, int]:
    return {name: sum(name == other for other, _ in used) for name in dict(used)}


DENSE = {"dim": 16, "layers": 2, "heads": 2, "ffn": 24, "ctx": 8, "batch": 2}


@pytest.mark.parametrize("wire", [None, "int8"])
@pytest.mark.parametrize("shape", ["dense", "graph"])
def test_no_two_draws_of_a_run_have_one_key(shape, wire, used_keys, text, small_graph):
    """Neither of steps, micro-batches, tensors, matrices in one, messages, nor of purposes."""
    dense = shape == "dense"
    options = (DENSE if dense else small_graph) | {"accum": 2, "reduce_dtype": wire}
    backend = {"device": "cpu", "backend": "torch", "direction": None if wire else "factored"}
    config = new_config(data=[text], steps=3, **backend, **options)
    trainer = Trainer(config, open_texts(config.data, None, seed=0, context=config.model.ctx))
    weights = [tensor for tensor in trainer.model.weights().values() if not tensor.frozen]
    tensors, steps = len(weights), 2 if dense else 1
    assert purposes(used_keys) == {"start": tensors}
    for _ in range(steps):
        trainer.train_step()
    # a look at how large gradients are makes zeros of them, which no noise rounds
    used = [pair for pair in used_keys if pair != ("wire", 0)]
    counts = purposes(used)
    if dense:  # each micro-batch updates each tensor once, trits and scales in the last
        updates = {"wire": 2, "moment": 1} if wire else {"statistics": 4, "moment": 2}
        draws = {"scales": 1, "weights": 1} | updates  # what travelled is stepped by once
        expected = {purpose: steps * number * tensors for purpose, number in draws.items()}
        assert counts == {"start": tensors} | expected
    else:  # tables step by the rows that are read, and experts by the tokens that chose them
        assert sum(tensor.matrices for tensor in weights) > tensors
        assert counts["wire" if wire else "scales"] > tensors
    keys = [key for _, key in used]
    assert len(set(keys)) == len(keys)
