"""Whatever uses a model does so in deterministic mode, on its backend, and without gradients."""

from collections.abc import Callable

import pytest
import torch

from arbcli.config.presets import preset
from arbcli.data import Text
from arbcli.errors import ArbError
from arbcli.infer.chunks import chunk_depths
from arbcli.infer.evaluation import evaluate
from arbcli.infer.generation import OUT_OF_MEMORY, Sampling, continue_text, generate
from arbcli.infer.several import Request, continue_several, generate_several
from arbcli.kernels.runtime import backend as backends
from arbcli.model.build import build_model
from arbcli.model.language_model import LanguageModel

SAMPLING = Sampling(seed=3)


def evaluated(model: LanguageModel, tmp_path) -> None:
    path = tmp_path / "text"
    path.write_bytes(b"twelve bytes")
    about = {"stride": None, "batch": 1, "backend": "torch"}
    evaluate(model, "", Text([path]), "", **about)


USES: dict[str, tuple[Callable, bool]] = {
    "evaluate": (evaluated, True),
    "continue_text": (
        lambda model, _: continue_text(model, "", b"a", 3, SAMPLING, backend="torch"), True,
    ),
    "generate": (lambda model, _: list(generate(model, b"a", 3, backend="torch")), False),
    "continue_several": (
        lambda model, _: continue_several(
            model, [Request(prompt=b"a", length=2, sampling=SAMPLING)], backend="torch"
        ), True,
    ),
    "chunk_depths": (lambda model, _: chunk_depths(model, b"abcdefghij", "torch"), True),
}  # fmt: skip
"""What uses a model, and whether it is in deterministic mode."""


@pytest.mark.parametrize("name", USES)
def test_model_is_used_in_deterministic_mode_on_the_backend_without_gradients(
    name, small_hnet, tmp_path
):
    use, is_deterministic = USES[name]
    given = {k: v for k, v in small_hnet.items() if k not in ("preset", "batch")}
    model = build_model(preset("hnet-tiny", **given), torch.float32)
    model.initialise(0)
    seen = set()

    def look(*_) -> None:
        mode = torch.get_deterministic_debug_mode()
        seen.add((mode == 2, backends._forced, torch.is_grad_enabled()))

    model.embedding.register_forward_hook(look)
    use(model, tmp_path)
    assert seen == {(is_deterministic, "torch", False)}
    assert torch.get_deterministic_debug_mode() == 1  # of these tests
    assert backends._forced is None


def of_several(model: LanguageModel, _tmp_path) -> None:
    several = [Request(prompt=b"a", length=1, sampling=SAMPLING)]
    list(generate_several(model, several, backend="torch"))


HINTS = {
    "evaluate": (evaluated, "use a smaller `--batch`"),
    "continue_text": (USES["continue_text"][0], OUT_OF_MEMORY),
    "generate": (USES["generate"][0], OUT_OF_MEMORY),
    "generate_several": (of_several, OUT_OF_MEMORY),
}
"""What uses a model, and what to do where there is no memory for it."""


@pytest.mark.parametrize("name", HINTS)
def test_want_of_memory_is_said_with_what_helps(name, tmp_path):
    use, hint = HINTS[name]
    model = build_model(preset("tiny", dim=8, layers=1, heads=1, ffn=8, ctx=8), torch.float32)

    def take(*_) -> None:
        raise torch.OutOfMemoryError("there is none")

    model.embedding.register_forward_hook(take)
    with pytest.raises(ArbError, match="the GPU's memory is not enough") as caught:
        use(model, tmp_path)
    assert caught.value.hint == hint


IN_RANGE = {
    "temperature": (0, 1e-6, 1e6), "top_k": (1, 256), "top_p": (1e-9, 1.0), "seed": (0, 2**31 - 1),
}  # fmt: skip
OUT_OF_RANGE = {
    "temperature": (-1e-9, 9e-7, 1.1e6), "top_k": (0, 2**20 + 1), "top_p": (0.0, 1.0001),
    "seed": (-1, 2**31),
}  # fmt: skip


@pytest.mark.parametrize("name", IN_RANGE)
def test_every_way_to_sample_is_taken_to_its_limits(name):
    for value in IN_RANGE[name]:
        assert getattr(Sampling(**{name: value}), name) == value
    for value in OUT_OF_RANGE[name]:
        with pytest.raises(ArbError, match=rf"`--{name.replace('_', '-')}` is {value}"):
            Sampling(**{name: value})
