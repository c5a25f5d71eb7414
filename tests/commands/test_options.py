"""Errors speak of fields, and a command line of its options: one place translates."""

import dataclasses
import inspect
import re
from pathlib import Path
from typing import Annotated
from unittest import mock

import pytest
import settings_page
import typer.main
from pages import FOLDER, PAGES, page
from typer.testing import CliRunner

from arbcli import config
from arbcli.base.errors import ArbError
from arbcli.cli import app
from arbcli.commands._help import Command
from arbcli.commands._options import (
    fill_options,
    find_run,
    given_options,
    in_options,
    rename_options,
    repeat_options,
)
from arbcli.config.file import read_settings
from arbcli.config.presets import preset
from arbcli.config.settings import GROUPS, RUN
from arbcli.config.short_forms import ARGUMENTS, arguments
from arbcli.config.training import BACKENDS, SETTINGS, TrainConfig, spelled_out, train_config
from arbcli.kernels.runtime import backend
from arbcli.training import configure
from arbcli.training.schedule import LOG_EVERY

SHOWN = {
    ("`lr` is -1.0", "lr"): "`--lr` is -1.0",
    ("`scale_type` is `T5`", "scale_type"): "`--tscale-type` is `T5`",
    ("`rule` is `rule`", "rule"): "`--rule` is `rule`",
    ("`moe_top_k` is 9 of 8 experts", "moe_top_k"): "`--moe-top-k` is 9 of 8 experts",
    ("add `graph=False`", "graph"): "add `--no-graph`",
    ("add `knowledge_codebook=True`", "knowledge_codebook"): "add `--knowledge`",
    ("leave `compute=fp8` out", "compute"): "leave `--compute fp8` out",
    ("use `digits=all` or `digits=fade`", "digits"): "use `--weights int8` or `--weights anneal`",
    ("leave `direction=factored` out", "direction"): "leave `--optimizer adafactor` out",
    ("leave `reduce_dtype` out", "reduce_dtype"): "leave `--reduce-dtype` out",
    ("leave `compute` out", "lr"): "leave `compute` out",
    ("no such part: `moe`", "moe"): "no such part: `--moe/--no-moe`",
}


@pytest.mark.parametrize(("text", "field"), SHOWN)
def test_field_of_an_error_is_shown_as_its_option(text, field):
    assert in_options(text, (field,)) == SHOWN[text, field]


def test_every_field_of_an_error_is_shown():
    text = "make `dim` a multiple of 8, or choose other `heads`"
    shown = "make `--dim` a multiple of 8, or choose other `--heads`"
    assert in_options(text, ("dim", "heads")) == shown


def test_error_of_a_configuration_names_the_field():
    with pytest.raises(ArbError, match="`scale_type` is `T5`") as caught:
        preset("tiny", scale_type="T5")
    assert caught.value.fields == ("scale_type",)


def test_values_of_an_option_may_follow_one_another():
    """A shell makes them of `--data *.txt`."""
    words = "train --data a.txt b.txt - --val c d --steps 5 --data=e f --json"
    said = "train --data a.txt --data b.txt --data - --val c --val d --steps 5 --data=e f --json"
    assert repeat_options(words.split()) == said.split()
    assert repeat_options([]) == []


@pytest.mark.parametrize(("words", "said"), [
    ("train --profile", "train --profile 3"),
    ("train --profile --json", "train --profile 3 --json"),
    ("train --profile 7 --json", "train --profile 7 --json"),
    ("train --profile=7 --profile", "train --profile=7 --profile 3"),
    ("train --profile -1", "train --profile -1"),
    ("train --attention --moe", "train --attention latent --moe"),
    ("train --attention dense", "train --attention dense"),
    ("train --no-attention", "train --attention none"),
])  # fmt: skip
def test_value_of_an_option_may_be_left_out(words, said):
    assert fill_options(words.split()) == said.split()


@pytest.mark.parametrize(("old", "now"), [
    ("--digits all", "--weights int8"),
    ("--digits=fade --steps 3", "--weights=anneal --steps 3"),
    ("--weights ternary --digits trit", "--weights ternary"),
    ("--direction orthogonal --wire int8", "--optimizer muon --reduce-dtype int8"),
    ("--direction sign", "--optimizer sign"),
])  # fmt: skip
def test_older_option_is_accepted_with_a_line_that_names_the_new_option(old, now, capsys):
    assert rename_options(["train", *old.split()]) == ["train", *now.split()]
    said = capsys.readouterr().err
    for option in ("--digits", "--direction", "--wire"):
        assert (option in said) == (option in old)
    assert rename_options(["train", *now.split()]) == ["train", *now.split()]
    assert capsys.readouterr().err == ""


def test_words_of_options_are_words_of_files_and_of_the_library(tmp_path):
    file = tmp_path / "a.toml"
    file.write_text("optimizer = 'adafactor'\nreduce_dtype = 'int8'\n[model]\nweights = 'int8'\n")
    assert read_settings(file) == {
        "direction": "factored", "reduce_dtype": "int8", "weights": "ternary", "digits": "all",
    }  # fmt: skip
    given = {"preset": "tiny", "device": "cpu", "backend": "torch", "compute": "fp32"}
    for words, found in (
        ({"weights": "anneal"}, ("ternary", "fade", "orthogonal", "rule")),
        ({"optimizer": "muon"}, ("ternary", "trit", "orthogonal", "rule")),
        ({"optimizer": "muon", "weights": "float"}, ("float", "trit", "orthogonal", "muon")),
        ({"direction": "orthogonal", "weights": "ste"}, ("ste", "trit", "orthogonal", "muon")),
        ({"weights": "float"}, ("float", "trit", "orthogonal", "adamw")),
    ):
        config = train_config(**given | words)
        model = config.model
        assert (model.weights, model.digits, model.direction, config.optimizer) == found
    with pytest.raises(ArbError, match="only works with float weights"):
        train_config(**given, optimizer="adamw")


def test_backends_are_those_that_there_are():
    assert BACKENDS == backend.BACKENDS


COMMANDS = typer.main.get_command(app).commands


def test_every_option_of_train_has_a_heading_that_pages_know():
    headings = {option.rich_help_panel for option in COMMANDS["train"].params}
    assert headings == {*GROUPS, None}  # the last of `--help-all`


@pytest.mark.parametrize("command", ["", *COMMANDS])
def test_page_of_help_fits_80_columns(command):
    page, short = (CliRunner().invoke(app, [*command.split(), f]).stdout for f in ("--help", "-h"))
    assert page == short
    whole = CliRunner().invoke(app, [*command.split(), "--help-all"]).stdout
    for text in (page, whole):
        assert max(map(len, text.splitlines()), default=0) <= 80
        assert ".  [" not in text
        assert text.isascii()


def test_page_of_train_has_the_common_options_and_the_complete_page_all():
    page, whole = (
        CliRunner().invoke(app, ["train", option]).stdout for option in ("--help", "--help-all")
    )
    listed = [{*re.findall(r"^  (--[a-z-]+)", text, re.MULTILINE)} for text in (page, whole)]
    assert len(page.splitlines()) <= 90
    assert 25 <= len(listed[0]) <= 40
    known = {option.opts[0] for option in COMMANDS["train"].params}
    assert listed[1] >= known - {"--help"} > listed[0] - {"--help"}
    assert "Dynamic chunks: hnet-" in whole
    assert "Dynamic chunks: hnet-" not in page


@pytest.mark.parametrize(("assigned", "found"), [
    ("steps=7", {"steps": 7}),
    ("reduce-dtype=int8", {"reduce_dtype": "int8"}),
    ("weights=int8", {"weights": "ternary", "digits": "all"}),
    ("model.lr=1", {"lr": 1.0}),
    ("data=['a', 'b']", {"data": ("a", "b")}),
    ("model.bound=10", {"fields": {"bound": 10}}),
    ("attention.rule=nibble", {"fields": {"attention.rule": "nibble"}}),
])  # fmt: skip
def test_assignment_sets_a_setting_or_a_field(assigned, found):
    assert given_options(assignments=[assigned]) == found


@pytest.mark.parametrize(("given", "says"), [
    (["steps"], "`steps` sets nothing"),
    (["steps=a"], "`steps` is `a`"),
    (["steps=3", "steps=4"], "`steps` is set twice"),
    (["steps=3"], "`--set steps` does not combine with `--steps`"),
    (["device=cpu"], "`--set device` does not combine with `--device`"),
])  # fmt: skip
def test_assignment_that_contradicts_or_sets_nothing_is_refused(given, says):
    with pytest.raises(ArbError, match=says):
        given_options(assignments=given, steps=5 if given == ["steps=3"] else None)


def test_page_of_help_has_groups_and_types_in_words():
    page = CliRunner().invoke(app, ["train", "--help-all"], terminal_width=120).stdout
    for title in GROUPS:
        assert f"\n{title}:\n" in page
    for words in ("--steps N ", "--lr X ", "--data PATH ", "--preset PRESET ", "--plot PATH ",
                  "--resume auto|PATH ", "--moe / --no-moe "):  # fmt: skip
        assert words in page
    assert page.count("arb-tiny and arb-3b") == 1
    assert not re.search("x[<>]=|range|<|NAME|TEXT|INTEGER", page)


def test_group_of_one_option_has_its_heading():
    """And what has no group of its own comes first."""

    def command(
        first: bool = False, second: Annotated[bool, typer.Option(rich_help_panel=RUN)] = False
    ):
        """Do nothing."""

    own = typer.Typer(add_completion=False, rich_markup_mode=None)
    own.command(cls=Command)(command)
    lines = CliRunner().invoke(own, ["--help"]).stdout.splitlines()
    assert lines.index("Options:") < lines.index(f"{RUN}:")
    assert "--second" in lines[lines.index(f"{RUN}:") + 1]


def test_configurations_know_no_option():
    for path in Path(config.__file__).parent.glob("*.py"):
        assert path.name == "settings.py" or "--" not in path.read_text(), path


def test_settings_name_other_settings_only():
    """A name in backquotes is shown as its option."""
    for name, one in SETTINGS.items():
        assert {*re.findall(r"`(\w+)", one.setting.help)} <= {*SETTINGS}, name
        assert one.setting.help, name
        assert one.setting.group in GROUPS, name


CHOSEN = {
    "tokenizer": "tokenizer.json", "sound": "pcm16", "picture": "grey:64x48",
    "teacher": "runs/large",
    "preset": "hnet-tiny", "data": ["a.txt", "b.txt"], "val": ["c.txt"], "field": "body",
    "schedule": "wsd", "rule": "nibble", "digits": "int8", "direction": "muon",
    "attention_rule": "carry", "mlp_rule": "moment",
    "scale_type": "T6", "weights": "ste", "optimizer": "muon", "compute": "fp32",
    "device": "cuda:1", "backend": "torch", "boundaries": "space", "outer_blocks": "mamba",
    "reduce_dtype": "int8", "moe_gate": "hash", "attention": "compressed",
    "votes_fixes": ("start", "bound"), "objective": "masked", "code_search": "nearest",
}  # fmt: skip
"""A value of each option that is neither a number nor a switch."""
OTHERS = {
    "minutes", "config_file", "print_config", "out", "resume", "init_from", "plot", "log", "force",
    "dry_run", "quiet", "as_json", "budget", "what_if", "snapshot", "checkpoint", "gpus", "profile",
    "ranks", "help", "model_file", "no_save", "floats", "pin", "run", "assignments", "help_all",
    "show_windows",
}  # fmt: skip
"""Options that set no field of a configuration."""


def arguments_of(option, number: int) -> tuple[list[str], object]:
    """Give an option a value that no other one has: the words, and what is to come of them."""
    if option.is_flag:
        return ([option.secondary_opts[0]], False) if option.secondary_opts else (option.opts, True)
    name = option.opts[0]
    if option.name in CHOSEN:
        value = CHOSEN[option.name]
        if isinstance(value, tuple):
            return [name, ",".join(value)], value
        words = [word for one in value for word in (name, one)]
        return (words if option.multiple else [name, value]), value
    value = number + 0.5 if option.name in ("lr", "final_lr") else number
    return [name, str(value)], value


@pytest.mark.parametrize("command", ["train", "audit-memory", "probe-loss"])
def test_every_option_reaches_its_field(command, arb_here, monkeypatch):
    known = typer.main.get_command(app).commands[command].params
    fields = {"preset", *TrainConfig.__slots__, *ARGUMENTS}
    options = [option for option in known if option.name in fields]
    # one that is new is either, and none is given that does what nobody expects here
    assert {option.name for option in known} <= {*fields, *OTHERS}
    new_config = mock.Mock(side_effect=ArbError("enough"))
    monkeypatch.setattr(configure, "new_config", new_config)
    for early in ("train_config", "check_named", "check_regular", "find_run", "may_have_gpu"):
        # no model has all of them
        monkeypatch.setattr(f"arbcli.commands._options.{early}", mock.Mock())
    words, expected = [], {}
    for number, option in enumerate(options, 11):
        given, value = arguments_of(option, number)
        words += given
        expected |= spelled_out({option.name: value})
    assert "enough" in arb_here(command, *words).stderr
    assert new_config.call_args.kwargs == expected


@pytest.mark.parametrize("command", ["train", "audit-memory"])
def test_help_shows_the_real_defaults(command):
    """Where a page names a number or a word, and not how it is found."""
    defaults = {field.name: field.default for field in dataclasses.fields(TrainConfig)}
    defaults |= {name: one.default for name, one in arguments("dense").items()}
    defaults |= {"preset": "tiny", "digits": "ternary", "sub_norms": "yes"}
    defaults |= {"log_every": LOG_EVERY, "votes_fixes": "none"}
    told = {}
    for option in typer.main.get_command(app).commands[command].params:
        found = re.search(r"\[default: ([\w.]+)\]", option.help or "")
        if found and option.name in defaults:
            told[option.name] = found[1]
    assert told == {name: str(defaults[name]) for name in told}
    assert told.keys() >= {"batch", "accum", "seed", "preset", "digits"}
    if command == "train":
        assert told.keys() >= {"steps", "warmup", "schedule", "keep", "save_every"}


def test_page_of_help_shows_defaults_and_only_groups_that_fit(arb_here):
    page = " ".join(arb_here("generate", "--help").stdout.split())
    for default in ("512, or the rest of a file", "0.8", "256", "1.0"):
        assert f"[default: {default}]" in page
    assert "x>=" not in page
    assert "--prompt TEXT" in page
    assert "native on a CPU" in page
    for heading in ("Model:", "Optimisation:"):
        assert heading not in page
    train = arb_here("train", "--help").stdout
    assert train.index("Optimisation:") < train.index("Run:") < train.index("--seed")


def test_auto_says_which_run_it_is(tmp_path, capsys):
    run = tmp_path / "001-a"
    run.mkdir()
    (run / "config.json").write_text("{}")
    (run / "step-000001.safetensors").touch()
    assert find_run(Path("auto"), tmp_path) == run
    assert capsys.readouterr().err == f"auto is `{run}`\n"
    assert find_run(run, tmp_path) == run
    assert capsys.readouterr().err == ""


def test_page_of_settings_is_that_of_the_fields():
    assert settings_page.PAGE.read_text() == settings_page.page(), "python tests/settings_page.py"


def test_no_option_is_named_by_its_metavar():
    """Typer 0.27 takes the letters of `PRESET` for those of `--preset`, which it then lacks.

    In an annotation the name of an option stands where the default does otherwise.
    """
    for command in app.registered_commands:
        for name, parameter in inspect.signature(command.callback).parameters.items():
            for info in getattr(parameter.annotation, "__metadata__", ()):
                same = (info.metavar or "").replace("_", "-").lower() == name.replace("_", "-")
                assert isinstance(info.default, str) or not same, (command.callback, name)


@pytest.mark.parametrize("name", PAGES)
def test_page_shows_every_figure_of_its_report(name):
    """`python tests/commands/pages.py` writes them again, to be read before they are committed."""
    assert page(name) == (FOLDER / f"{name}.txt").read_text(encoding="utf-8")


def test_every_page_has_its_text():
    assert {path.stem for path in FOLDER.glob("*.txt")} == set(PAGES)


def test_option_that_knows_its_words_refuses_no_word_as_it_does_another():
    def refuses(option, word: str) -> bool:
        try:
            option.callback(None, option, [word] if option.multiple else word)
        except ArbError:
            return True
        except TypeError:  # of a number
            return False
        return False

    options = [
        o
        for command in COMMANDS.values()
        for o in command.params
        if o.callback and o.name != "help_all"
    ]
    knowing = [option for option in options if refuses(option, "no such word")]
    assert len(knowing) > 60
    assert [option.name for option in knowing if not refuses(option, "")] == []
