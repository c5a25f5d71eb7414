"""A small model that was trained on stories predicts a story here as in Transformers.

It is `stories260K` of llama2.c, as a folder of Transformers. Random models, which the other tests
import, predict nothing: of them no error of a position or of a token would show in a loss.
"""

from pathlib import Path

import pytest
import torch
from torch.nn import functional

from arbcli.base.reading import read_json
from arbcli.data.tokens import Tokenizer
from arbcli.generation.load import load_weights
from arbcli.interop.exporting import export
from arbcli.interop.huggingface.config_json import read_config
from arbcli.interop.huggingface.folder import WeightFolder
from arbcli.interop.importing import import_folder, read_float

FOLDER = Path(__file__).parents[3] / "shared" / "data" / "stories260K"
STORY = (
    "Once upon a time, there was a little girl named Lily. She loved to play outside in the park."
    " One day, she saw a big, red ball. She wanted to play with it, but it was too high."
)
LOSS = 0.5
"""Highest nats a token of the story; a uniform guess costs ln 512 = 6.2."""

pytestmark = pytest.mark.skipif(not FOLDER.is_dir(), reason="needs ../shared/data/stories260K")


@torch.no_grad()
def test_trained_model_predicts_a_story_as_in_transformers(tmp_path):
    transformers = pytest.importorskip("transformers", reason="needs the extra `export-test`")
    theirs = transformers.AutoModelForCausalLM.from_pretrained(FOLDER).eval()
    tokenizer = Tokenizer.read(FOLDER / "tokenizer.json")
    tokens = [*tokenizer.beginning, *tokenizer.encode(STORY.encode())]
    assert tokens == transformers.AutoTokenizer.from_pretrained(FOLDER)(STORY).input_ids
    ids = torch.tensor(tokens)[None]
    wanted = theirs(ids).logits

    def loss(logits: torch.Tensor) -> float:
        return float(functional.cross_entropy(logits[0, :-1], ids[0, 1:]))

    assert loss(wanted) < LOSS
    config = read_config(read_json(FOLDER / "config.json"), "it", weights="float")
    twin = read_float(WeightFolder(FOLDER), config)
    torch.testing.assert_close(twin(ids), wanted, rtol=0, atol=1e-4)
    import_folder(FOLDER, tmp_path / "run")
    ours = load_weights(tmp_path / "run", print).model(ids)
    assert abs(loss(ours) - loss(wanted)) < 0.005
    export(tmp_path / "run", "hf", out=tmp_path / "back")
    again = transformers.AutoModelForCausalLM.from_pretrained(
        tmp_path / "back", dtype=torch.float32
    ).eval()
    torch.testing.assert_close(again(ids).logits, ours, rtol=0, atol=1e-4)
