"""Errors speak of fields, and a command line of its options: one place translates."""

import re
import time
from unittest import mock

import pytest
import settings_page
import typer.main
from pages import FOLDER, PAGES, page
from typer.testing import CliRunner

from arbcli.base.errors import ArbError
from arbcli.cli import app
from arbcli.commands import _run_display
from arbcli.commands._options import (
    fill_options,
    given_options,
    read_budget,
    rename_options,
    repeat_options,
    replace_fields,
)
from arbcli.config.file import read_settings
from arbcli.config.short_forms import ARGUMENTS
from arbcli.config.training import TrainConfig, resolve_names, train_config
from arbcli.training import configure

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
    assert replace_fields(text, (field,)) == SHOWN[text, field]


def test_values_of_an_option_may_follow_one_another():
    """A shell makes them of `--data *.txt`."""
    words = "train --data a.txt b.txt - --val c d --steps 5 --data=e f --json"
    said = "train --data a.txt --data b.txt --data - --val c --val d --steps 5 --data=e f --json"
    assert repeat_options(words.split()) == said.split()
    assert repeat_options([]) == []
    for word in ("--profile", "--no-attention"):  # a prompt, and options of other commands
        assert fill_options(["generate", "--prompt", word]) == ["generate", "--prompt", word]


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
    for command, words in (("train", now), ("generate", old)):  # or a prompt
        assert rename_options([command, *words.split()]) == [command, *words.split()]
    assert capsys.readouterr().err == ""


def test_words_of_options_are_words_of_files_and_of_the_library(tmp_path):
    file = tmp_path / "a.toml"
    file.write_text("optimizer = 'adafactor'\nreduce_dtype = 'int8'\n[model]\nweights = 'int8'\n")
    assert read_settings(file) == {
        "direction": "factored", "reduce_dtype": "int8", "weights": "ternary", "digits": "all",
    }  # fmt: skip
    given = {"preset": "tiny", "device": "cpu", "backend": "torch", "compute": "fp32"}
    for words, expected in (
        ({"weights": "anneal"}, ("ternary", "fade", "orthogonal", "rule")),
        ({"optimizer": "muon"}, ("ternary", "trit", "orthogonal", "rule")),
        ({"optimizer": "muon", "weights": "float"}, ("float", "trit", "orthogonal", "muon")),
        ({"direction": "orthogonal", "weights": "ste"}, ("ste", "trit", "orthogonal", "muon")),
        ({"weights": "float"}, ("float", "trit", "orthogonal", "adamw")),
    ):
        config = train_config(**given | words)
        model = config.model
        assert (model.weights, model.digits, model.direction, config.optimizer) == expected
    with pytest.raises(ArbError, match="only works with float weights"):
        train_config(**given, optimizer="adamw")


COMMANDS = typer.main.get_command(app).commands


@pytest.mark.parametrize("command", ["", *COMMANDS])
def test_page_of_help_fits_80_columns(command):
    page, short = (CliRunner().invoke(app, [*command.split(), f]).stdout for f in ("--help", "-h"))
    assert page == short
    whole = CliRunner().invoke(app, [*command.split(), "--help-all"]).stdout
    for text in (page, whole):
        assert max(map(len, text.splitlines()), default=0) <= 80
        assert ".  [" not in text
        assert text.isascii()
        assert not re.search(r"\w-$", text, re.MULTILINE), "a name is broken"


def test_page_of_train_has_the_common_options_and_the_complete_page_all():
    page, whole = (
        CliRunner().invoke(app, ["train", option]).stdout for option in ("--help", "--help-all")
    )
    listed = [{*re.findall(r"^  (--[a-z-]+)", text, re.MULTILINE)} for text in (page, whole)]
    assert len(page.splitlines()) <= 90
    assert 25 <= len(listed[0]) <= 40
    known = {option.opts[0] for option in COMMANDS["train"].params}
    assert listed[1] >= known - {"--help"} > listed[0] - {"--help"}
    assert "Dynamic chunks:" in whole
    assert "Dynamic chunks:" not in page


@pytest.mark.parametrize(("assigned", "expected"), [
    ("steps=7", {"steps": 7}),
    ("reduce-dtype=int8", {"reduce_dtype": "int8"}),
    ("weights=int8", {"weights": "ternary", "digits": "all"}),
    ("model.lr=1", {"lr": 1.0}),
    ("data=['a', 'b']", {"data": ("a", "b")}),
    ("model.bound=10", {"fields": {"bound": 10}}),
    ("attention.rule=nibble", {"fields": {"attention.rule": "nibble"}}),
])  # fmt: skip
def test_assignment_sets_a_setting_or_a_field(assigned, expected):
    assert given_options(assignments=[assigned]) == expected


CHOSEN = {
    "tokenizer": "tokenizer.json", "sound": "pcm16", "picture": "grey:64x48",
    "teacher": "runs/large", "data_format": "tokens16",
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
    "show_windows", "decode",
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
    for early in ("train_config", "check_texts", "check_regular", "find_run", "may_have_gpu"):
        # no model has all of them
        monkeypatch.setattr(f"arbcli.commands._options.{early}", mock.Mock())
    words, expected = [], {"processes": 1} if command == "train" else {}
    for number, option in enumerate(options, 11):
        given, value = arguments_of(option, number)
        words += given
        expected |= resolve_names({option.name: value})
    assert "enough" in arb_here(command, *words).stderr
    assert new_config.call_args.kwargs == expected


def test_page_of_settings_is_that_of_the_fields():
    assert settings_page.PAGE.read_text() == settings_page.page(), "python tests/settings_page.py"


@pytest.mark.parametrize("name", PAGES)
def test_page_shows_every_figure_of_its_report(name):
    """`python tests/commands/pages.py` writes them again, to be read before they are committed."""
    assert page(name) == (FOLDER / f"{name}.txt").read_text(encoding="utf-8")


def test_duration_is_estimated_once_a_step_is_done(capsys):
    with mock.patch.object(_run_display, "Timer") as timer:
        display = _run_display.RunDisplay(quiet=False, as_json=False)
        display.steps, display._start_time, display._advice = 10, time.perf_counter(), ""
        display._start_timer()
        display.print_estimate()
        assert timer.call_count == 2
        assert capsys.readouterr().err == ""
        display.stepped(1)
        display.print_estimate()
        assert timer.call_count == 2
    assert "time    about " in capsys.readouterr().err


def test_every_page_has_its_text():
    assert {path.stem for path in FOLDER.glob("*.txt")} == set(PAGES)


def test_budget_has_a_unit():
    sizes = {"6GiB": 6 * 2**30, "500MiB": 500 * 2**20, "4GB": 4 * 10**9, "1.5 kib": 1536, "7": 7}
    assert {budget: read_budget(budget) for budget in sizes} == sizes
    for budget in ("", "GiB", "6 gallons", "-1GB", "1e9", "6GiBB"):
        with pytest.raises(ArbError, match="--budget"):
            read_budget(budget)
