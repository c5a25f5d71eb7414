"""Pages about models say what the configurations say, and their examples build."""

import dataclasses
import re
import tomllib
from pathlib import Path

import pytest
import torch

from arbcli.config.model import BlockConfig, ModelConfig, StageConfig
from arbcli.config.model_file import model_from_toml, model_lines, to_toml
from arbcli.config.parts import BESIDE, CHANNELS, MIXERS
from arbcli.config.parts.ahead import AheadConfig
from arbcli.config.parts.chunking import ChunkingConfig
from arbcli.config.parts.composite import CompositeConfig
from arbcli.config.parts.memories import (
    CodebookConfig,
    IteratedConfig,
    MemoriesConfig,
    QuantiserConfig,
)
from arbcli.config.parts.rotary import RotaryConfig
from arbcli.model.build import build_model

ROOT = Path(__file__).parents[1]
PAGE = (ROOT / "docs" / "models.md").read_text()
EXAMPLES = re.findall(r"```toml\n(.*?)```", PAGE, re.DOTALL)
OTHERS = {
    "chunking": ChunkingConfig, "memories": MemoriesConfig, "codebook": CodebookConfig,
    "iterated": IteratedConfig, "rotary": RotaryConfig, "quantiser": QuantiserConfig,
    "ahead": AheadConfig, "composite": CompositeConfig,
}  # fmt: skip
VALUES = {"model": ModelConfig, "stage": StageConfig, "block": BlockConfig}


def default(field: dataclasses.Field) -> str:
    if field.default is dataclasses.MISSING:
        return "required"
    if dataclasses.is_dataclass(field.default):
        return "`{}`"
    return "none" if field.default is None else f"`{to_toml(field.default)}`"


@pytest.mark.parametrize("kind", [*MIXERS, *CHANNELS, *BESIDE, *OTHERS])
def test_page_lists_the_fields_of_a_part_with_their_defaults(kind):
    config = (MIXERS | CHANNELS | BESIDE | OTHERS)[kind]
    rows = re.findall(rf"^\| `{kind}` \| `(\w+)` \| (\S+) \| \S.* \|$", PAGE, re.MULTILINE)
    fields = [field for field in dataclasses.fields(config) if field.init]
    assert rows == [(field.name, default(field)) for field in fields]


@pytest.mark.parametrize("name", VALUES)
def test_page_lists_the_fields_of_models_stages_and_blocks(name):
    rows = re.findall(rf"^\| {name} \| `(\w+)` \| \S.* \|$", PAGE, re.MULTILINE)
    assert rows == [field.name for field in dataclasses.fields(VALUES[name])]


@pytest.mark.parametrize("example", EXAMPLES, ids=range(len(EXAMPLES)))
def test_example_of_a_model_builds_and_is_written_back(example):
    config = model_from_toml(tomllib.loads(example)["model"], "docs/models.md")
    with torch.device("meta"):
        model = build_model(config)
    assert len(model.weights()) > len(config.main.blocks)
    written = tomllib.loads("\n".join(model_lines(config)))
    assert model_from_toml(written["model"], "written") == config


def test_page_has_examples():
    assert len(EXAMPLES) == 6


def test_readme_is_short():
    assert len((ROOT / "README.md").read_text().splitlines()) < 200
