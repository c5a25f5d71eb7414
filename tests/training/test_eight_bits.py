"""Steps that multiply in FP8."""

import pytest

from arbcli.data.opening import open_texts
from arbcli.kernels.update.step_trits import GOLDEN_TURN
from arbcli.model.layers import fp8_product
from arbcli.training.configure import new_config
from arbcli.training.trainer import Trainer


@pytest.mark.parametrize("reduce_dtype", [None, "int16"])
def test_steps_dither_weights_by_their_number_and_evaluations_multiply_in_bf16(
    reduce_dtype, tmp_path, monkeypatch
):
    turns: list[int | None] = []
    multiply = fp8_product.fp8_matmul

    def recorded(*args, turn, **options):
        turns.append(turn if turn is None else int(turn))
        return multiply(*args, turn=turn, **options)

    monkeypatch.setattr(fp8_product, "fp8_matmul", recorded)
    text = tmp_path / "text.txt"
    text.write_bytes(b"ternary weights learn to read. " * 400)
    settings = {
        "preset": "tiny", "dim": 32, "layers": 1, "heads": 2, "ffn": 48, "ctx": 32, "batch": 4,
        "accum": 2, "weights": "int8", "device": "cpu", "reduce_dtype": reduce_dtype,
    }  # fmt: skip
    config = new_config(data=[str(text)], compute="fp8", **settings)
    texts = open_texts(config.data, None, seed=0, context=32)
    trainer = Trainer(config, texts)
    for step in range(3):
        trainer.train_step()
        measured = {None} if reduce_dtype and step == 0 else set()  # gradients, before the step
        assert {*turns} == {step * GOLDEN_TURN % 2**16} | measured
        turns.clear()
    loss = trainer.evaluate(1)
    assert not turns
    exact = Trainer(new_config(data=[str(text)], compute="bf16", **settings), texts)
    exact.model.load_state_dict(trainer.model.state_dict())
    assert exact.evaluate(1) == loss
    trainer.train_step()
    assert {*turns} == {3 * GOLDEN_TURN % 2**16}
