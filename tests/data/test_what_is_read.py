"""Whatever is read is bounded and held to a schema, and what is wrong is one line of one error."""

import json
import os
from pathlib import Path

import pytest
from altered import WRITTEN, altered
from made_runs import TINY, observer_with

from arbcli.base.errors import ArbError
from arbcli.base.reading import check_schema, open_regular, parse_json, read_json, read_small
from arbcli.base.run_files import latest_run
from arbcli.inspect.saved import open_saved
from arbcli.interop.gguf.container import GGUFFile
from arbcli.training.check import check_run
from arbcli.training.configure import new_config
from arbcli.training.directory import read_facts
from arbcli.training.observer import Observer
from arbcli.training.record import MAX_LINE, METRICS, best_step, read_all_records, read_records
from arbcli.training.resume import resume_run
from arbcli.training.run import start_run


def no_regular_files(folder: Path) -> list[Path]:
    os.mkfifo(folder / "fifo")
    (folder / "loop").symlink_to("loop")
    return [folder / "fifo", Path("/dev/zero"), folder, folder / "loop", folder / "missing"]


def test_irregular_file_is_refused_and_not_waited_for(tmp_path):
    for path in no_regular_files(tmp_path):
        for read in (read_small, read_json, lambda path: open_saved(path, print), GGUFFile):
            if path != tmp_path or read in (read_small, read_json, GGUFFile):
                with pytest.raises(ArbError, match=r"cannot read|there is no"):
                    read(path)
        with pytest.raises(ArbError, match="cannot read"), open_regular(path):
            pass


NO_JSON = {
    b"": "Expecting value", b"{": "Expecting", b"\xff": "codec can't decode",
    b"[" * 100_000: "nested too deeply", b"[0, " + b"[" * 64 + b"]" * 65: "nested too deeply",
    b'{"a":' * 65 + b"1" + b"}" * 65: "nested too deeply",
    b"9" * 5000: "has 5000 digits$", b'{"a": NaN}': "`NaN` is not a number",
    b"-Infinity": "`-Infinity` is not a number", "{}".encode("utf-16"): "codec can't decode",
}  # fmt: skip


@pytest.mark.parametrize("text", NO_JSON, ids=lambda text: repr(text[:9]))
def test_invalid_json_is_refused_with_the_reason(text, tmp_path):
    with pytest.raises(ValueError, match=NO_JSON[text]):
        parse_json(text)
    (tmp_path / "file").write_bytes(text)
    with pytest.raises(ArbError, match="is not JSON: ") as told:
        read_json(tmp_path / "file")
    assert told.value.hint == "it was truncated or altered: restore it from a copy"


def test_schema_names_the_wrong_field():
    schema = {"text": dict | None, "text.size": int}
    for good in ({}, {"text": None}, {"text": {"size": 3}}):
        check_schema(good, schema, "`f`", "h")
    for bad, said in (
        ([], "`f` has `[]` in place of an object"),
        ({"text": 3}, "`f` has no valid `text`: it is `3`"),
        ({"text": {}}, "`f` has no valid `text.size`: it is missing"),
        ({"text": {"size": ""}}, "`f` has no valid `text.size`: it is ``"),
        ({"text": {"size": "x" * 99}}, f"`f` has no valid `text.size`: it is `{'x' * 60}...`"),
    ):
        with pytest.raises(ArbError) as told:
            check_schema(bad, schema, "`f`", "h")
        assert (str(told.value), told.value.hint) == (said, "h")


BAD_LINES = (
    b'{"step": 3, "lo', b"{", b"[1]", b"null", b'{"step": -Infinity, "val_loss": 0.1}',
    b'{"step": 1' + b"0" * 400 + b', "val_loss": 1' + b"0" * 400 + b"}",
    b'{"step": 1, "val_loss": -Infinity}', b'{"step": 1, "val_loss": 1' + b"0" * 400 + b"}",
    b'{"step": 1e400}', b'{"step": "1"}', b'{"step": 1, "val_loss": "0"}', b"[" * 10**5,
    b'{"step": ' + b"9" * 5000 + b"}", b"\xff", b"x" * (MAX_LINE + 5),
)  # fmt: skip


def test_torn_or_altered_lines_of_records_are_left_out(own_run):
    good, path = read_records(own_run), own_run / METRICS
    whole = path.read_bytes()
    for line in BAD_LINES:
        path.write_bytes(whole + line)
        assert read_records(own_run) == good, line
        assert read_all_records(own_run) == (good, 1 + (len(line) > MAX_LINE)), line
        assert best_step(read_records(own_run)) in (1, 2, 3, 4), line
    path.write_bytes(whole + b"\n".join(BAD_LINES))
    notes: list[str] = []
    assert open_saved(own_run, notes.append).report().run["last_record"] == good[-1]
    assert "torn or altered" in notes[-1]
    check_run(own_run)
    resume_run(own_run, Observer())


@pytest.mark.parametrize("name", ["digests", "extended", "threads", "init_digest", "number"])
@pytest.mark.parametrize("value", [None, "x", -1, [3], {"a": 1}])
def test_value_of_config_that_cannot_be_is_refused_and_none_is_missing(name, value, own_run):
    path = own_run / "config.json"
    facts = json.loads(path.read_text())
    path.write_text(json.dumps(facts | {name: value}))
    if value is None or (name, value) in (("init_digest", "x"), ("number", -1)):
        assert read_facts(own_run).get(name) == value
        assert check_run(own_run).passed is (name != "init_digest" or value is None)
        return
    with pytest.raises(ArbError, match=name):
        read_facts(own_run)
    assert not check_run(own_run).passed


def test_threads_that_no_machine_has_are_not_believed(own_run):
    """So many threads ended the process: `libgomp: Thread creation failed`."""
    path = own_run / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"threads": 10**6}))
    notes: list[str] = []
    resume_run(own_run, observer_with(noted=notes.append), steps=5)
    assert any("began with 1,000,000 threads, too many for this machine" in n for n in notes)
    assert (own_run / "step-000005.safetensors").exists()


def test_run_that_was_started_last_is_found_with_the_clock_set_back(finished_run, tmp_path):
    facts = json.loads((finished_run / "config.json").read_text())
    for name, about in {
        "old": {"started": "2031-01-01", "number": None},
        "a": {"started": "2030-01-01", "number": 1},
        "b": {"started": "2020-01-01", "number": 2},
        "c": {"started": "2019-01-01", "number": 2},
    }.items():
        run = tmp_path / name
        run.mkdir()
        (run / "step-000003.safetensors").touch()
        (run / "config.json").write_text(json.dumps(facts | about))
    assert latest_run(tmp_path).name == "b"


def test_later_run_has_a_higher_number(finished_run, tmp_path):
    config = new_config(**TINY, steps=1, data=[str(finished_run.parent / "text.txt")])
    for name, number in (("b", 1), ("a", 2), ("c", 3), ("d", 3)):
        start_run(config, tmp_path / name, Observer())
        assert read_facts(tmp_path / name)["number"] == number
        if name == "c":  # damaged, and no concern of others
            (tmp_path / "c" / "config.json").write_text("{")


def test_lock_that_is_a_fifo_is_not_waited_for(own_run):
    (own_run / ".lock").unlink()
    os.mkfifo(own_run / ".lock")
    with pytest.raises(ArbError, match="cannot lock"):
        resume_run(own_run, Observer())


def test_altered_files_are_refused_and_read_as_they_were():
    """`python tests/altered.py` writes it again: read a difference as a change."""
    assert list(altered()) == WRITTEN.read_text(encoding="utf-8").splitlines()
