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
from safetensors.numpy import load_file

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
from arbcli.generation.load import load_weights
from arbcli.model.build import build_model
from arbcli.verify.registry import KERNELS

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


@pytest.mark.parametrize("kind", [*MIXERS, *CHANNELS, *BESIDE, *OTHERS, "every part"])
def test_page_lists_the_fields_of_a_part_with_their_defaults(kind):
    config = ({**MIXERS, **CHANNELS, **BESIDE, "every part": PartConfig} | OTHERS)[kind]
    rows = re.findall(rf"^\| `?{kind}`? \| `(\w+)` \| (\S+) \| \S.* \|$", PAGE, re.MULTILINE)
    common = {field.name for field in dataclasses.fields(PartConfig) if config is not PartConfig}
    fields = [field for field in dataclasses.fields(config) if field.init]
    assert rows == [(field.name, default(field)) for field in fields if field.name not in common]


@pytest.mark.parametrize("name", VALUES)
def test_page_lists_the_fields_of_models_stages_and_blocks(name):
    rows = re.findall(rf"^\| {name} \| `(\w+)` \| \S.* \|$", PAGE, re.MULTILINE)
    fields = [field.name for field in dataclasses.fields(VALUES[name]) if field.name != "digits"]
    assert rows == ["optimizer" if field == "direction" else field for field in fields]


@pytest.mark.parametrize("example", EXAMPLES, ids=range(len(EXAMPLES)))
def test_example_of_a_model_builds_and_is_written_back(example):
    config = model_from_toml(tomllib.loads(example)["model"], "docs/models.md")
    with torch.device("meta"):
        model = build_model(config)
    assert len(model.weights()) > len(config.main.blocks)
    written = tomllib.loads("\n".join(model_lines(config)))
    assert model_from_toml(written["model"], "written") == config


@pytest.mark.parametrize(
    ("rule", "digits"), [("moment", "trit"), ("moment", "all"), ("nibble", "all"), ("carry", "all")]
)
def test_formula_of_the_format_rebuilds_weights(saved, rule, digits):
    page = (ROOT / "docs" / "format.md").read_text()
    names: dict = {}
    exec(page.split("```python\n")[1].split("```")[0], names)
    path = saved(dim=200, ffn=330, rule=rule, digits=digits, scale_type="T6")
    tensors, model = load_file(path), load_weights(path, print).model
    for name, tensor in model.weights().items():
        if not tensor.frozen:
            given = tensors, name, tensor.in_features, 6, rule, digits == "all"
            assert torch.equal(torch.from_numpy(names["weight"](*given)), tensor.weight().float())


LINES = (ROOT / "docs" / "system.md").read_text().splitlines()
ROWS = [
    [cell.strip() for cell in line.split("|")[1:-1]]
    for line in LINES
    if re.match(r"\| \d+ \|", line)
]
COMMANDS = sorted({row[3].strip("`") for row in ROWS} - {""})


def test_page_has_every_claim_once_with_its_state():
    assert [int(row[0]) for row in ROWS] == list(range(1, 167))
    for row in ROWS:
        assert len(row) == 4, row
        assert re.match(r"works|in part: .|left out[:, ] ?.", row[2]), row
        assert row[3] or row[2].startswith("left out"), row


@pytest.mark.parametrize("command", [c for c in COMMANDS if c.startswith("pytest ")])
def test_command_names_a_test(command):
    path, _, name = command.removeprefix("pytest ").partition("::")
    assert (ROOT / path).exists()
    assert not name or f"def {name}(" in (ROOT / path).read_text()


OF_ARB = [("docs/system.md", command) for command in COMMANDS if command.startswith("arb ")]
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").rglob("*.md"))]
BLOCK = re.compile(r"^```(?:sh)?\n(.*?)^```|((?:^    .*\n)+)", re.MULTILINE | re.DOTALL)
BLOCKS = [
    (page.relative_to(ROOT).as_posix(), re.split(r"  #| > ", line)[0].strip())
    for page in PAGES
    for block in BLOCK.findall(page.read_text())
    for line in "".join(block).replace("\\\n", " ").splitlines()
    if re.match(r" *arb ", line)
]
"""Commands of `arb` in the blocks of code of all pages, each with its page."""


@pytest.mark.parametrize(("page", "command"), sorted({*BLOCKS, *OF_ARB}))
def test_command_of_a_page_parses(page, command):
    parsed(fill_options(repeat_options(shlex.split(command)[1:])))


def anchors(page: Path) -> set[str]:
    """List the anchors of the headings of a page, as GitHub writes them."""
    text = re.sub(r"(?ms)^```.*?^```", "", page.read_text())
    headings = re.findall(r"^#+ (.*)$", text, re.M)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.relative_to(ROOT).as_posix())
def test_links_lead_to_files_and_headings(page):
    for target in re.findall(r"\]\((?!\w+://)([^)\s]+)\)", page.read_text()):
        name, _, anchor = target.partition("#")
        path = (page.parent / name).resolve() if name else page
        assert path.exists(), target
        assert not anchor or anchor in anchors(path), target


def test_benchmarks_of_pages_exist_unless_the_log_names_a_commit():
    pages = [page for page in PAGES if page.parent.name != "log"]
    names = {name for p in pages for name in re.findall(r"benchmarks\.(\w+)", p.read_text())}
    assert len(names) > 10
    for name in names - {"NAME"}:
        assert importlib.util.find_spec(f"benchmarks.{name}"), name


def test_documents_have_at_most_350_000_bytes_and_the_readme_does_not_open_the_log():
    sizes = [len(page.read_bytes()) for page in (ROOT / "docs").rglob("*.md")]
    assert sum(sizes) <= 350_000
    readme = (ROOT / "README.md").read_text()
    assert "docs/log" not in readme
    assert len(readme.splitlines()) < 200


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
