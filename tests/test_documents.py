"""Pages say what configurations say, and name files, tests and commands that exist."""

import dataclasses
import importlib.util
import re
import shlex
import tomllib
from pathlib import Path

import pytest
import torch
import typer.main

from arbcli.cli import app
from arbcli.commands._options import fill_options, repeat_options
from arbcli.config.kinds import BESIDE, CHANNELS, MIXERS
from arbcli.config.model import BlockConfig, ModelConfig, StageConfig
from arbcli.config.model_file import model_from_toml, model_lines, to_toml
from arbcli.config.parts.base import PartConfig
from arbcli.config.parts.rotary import RotaryConfig
from arbcli.families.ahead.config import AheadConfig
from arbcli.families.graph.config import (
    CodebookConfig,
    IteratedConfig,
    MemoriesConfig,
    QuantiserConfig,
)
from arbcli.families.hnet.config import ChunkingConfig
from arbcli.families.media.config import CompositeConfig
from arbcli.kernels.matmul.row_matmul import MOST_COLUMNS
from arbcli.kernels.sources import kernel_files
from arbcli.model.build import build_model
from arbcli.model.layers.products import FEW_ROWS
from arbcli.verify.registry import BY_NAME, KERNELS

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
    config = ({**MIXERS, **CHANNELS, **BESIDE} | OTHERS)[kind]
    rows = re.findall(rf"^\| `{kind}` \| `(\w+)` \| (\S+) \| \S.* \|$", PAGE, re.MULTILINE)
    common = {field.name for field in dataclasses.fields(PartConfig)}
    fields = [field for field in dataclasses.fields(config) if field.init]
    assert rows == [(field.name, default(field)) for field in fields if field.name not in common]


def test_page_lists_the_fields_of_every_part():
    rows = re.findall(r"^\| every part \| `(\w+)` \| (\S+) \| \S.* \|$", PAGE, re.MULTILINE)
    fields = [field for field in dataclasses.fields(PartConfig) if field.init]
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


def test_tables_of_kernels_name_functions_and_their_limits():
    section = PAGE.partition("## Which kernel is used")[2].partition("\n## ")[0]
    rows = [line for line in section.splitlines() if line.startswith("| ")]
    named = {name for row in rows for name in re.findall(r"`(\w+)`", row)} - {*MIXERS, "nvfp4"}
    sources = "\n".join(path.read_text() for path in kernel_files())
    functions = re.findall(r"^def (\w+)", sources, re.MULTILINE)
    assert len(named) > 10
    assert not named - {*BY_NAME, *functions}
    assert section.count(f"more than {FEW_ROWS} ") == 2
    assert f" {MOST_COLUMNS:,} " in section


def test_readme_is_short():
    assert len((ROOT / "README.md").read_text().splitlines()) < 200


LINES = (ROOT / "docs" / "system.md").read_text().splitlines()
ROWS = [
    [cell.strip() for cell in line.split(" | ")]
    for line in (line.removeprefix("| ").removesuffix(" |") for line in LINES)
    if re.match(r"\d+ \|", line)
]
COMMANDS = sorted({row[4].strip("`") for row in ROWS})


def test_page_has_every_claim_once_with_its_state():
    assert [int(row[0]) for row in ROWS] == list(range(1, 167))
    for row in ROWS:
        assert len(row) == 5, row
        assert re.match(r"works|in part: .|left out[:, ] ?.", row[2]), row


@pytest.mark.parametrize("row", ROWS, ids=[row[0] for row in ROWS])
def test_files_that_are_named_exist(row):
    for path in re.findall(r"`([\w./-]+)`", row[3]):
        assert (ROOT / path).exists() or (ROOT / "arbcli" / path).exists(), path
    for page in re.findall(r"\]\(([\w-]+\.md)", " ".join(row)):
        assert (ROOT / "docs" / page).exists(), page


@pytest.mark.parametrize("command", COMMANDS)
def test_command_parses(command):
    program, *words = shlex.split(command)
    if program == "python":
        assert words[0] == "-m"
        assert importlib.util.find_spec(words[1])
    elif program == "pytest":
        path, _, name = words[0].partition("::")
        assert len(words) == 1
        assert (ROOT / path).exists()
        assert not name or f"def {name}(" in (ROOT / path).read_text()
    else:
        assert program == "arb"
        parsed(fill_options(repeat_options(words)))


def parsed(words: list[str]) -> None:
    """Parse words of a command line as `arb` does, and run nothing."""
    group = typer.main.get_command(app)
    if words == ["--help"]:
        return
    program = group.make_context("arb", list(words))  # which names `-h`, that commands keep
    command = group.get_command(program, words[0])
    context = command.make_context(words[0], words[1:], parent=program)
    if words[0] == "verify-kernels":
        known = {spec.name for spec in KERNELS}
        assert set(context.params["names"] or ()) <= known


@pytest.mark.parametrize("words", ["train --no-such-option", "verify-kernels --time=1"])
def test_wrong_command_is_noticed(words):
    with pytest.raises(typer.BadParameter.__bases__[0]):
        parsed(words.split())
