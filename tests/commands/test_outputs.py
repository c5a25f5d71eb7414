"""Places to write to are refused before work begins."""

import os
from pathlib import Path

import pytest

from arbcli.commands._outputs import PICTURES, check_file, check_folder
from arbcli.errors import ArbError


def test_good_places_pass(tmp_path):
    for name in ("new.png", "new.PDF", "new.svg"):
        check_file(tmp_path / name, "--plot", PICTURES)
    check_folder(tmp_path, "--ledger")
    check_folder(tmp_path / "new" / "below", "--ledger")
    check_folder(Path("relative"), "--ledger")


def test_bad_places_are_refused(tmp_path, monkeypatch):
    (tmp_path / "folder.png").mkdir()
    (tmp_path / "text.txt").touch()
    for name in ("text.txt", "none", "folder.png", "nowhere/a.png"):
        with pytest.raises(ArbError):
            check_file(tmp_path / name, "--plot", PICTURES)
    for name in ("text.txt", "text.txt/below"):
        with pytest.raises(ArbError, match="is not a folder"):
            check_folder(tmp_path / name, "--ledger")
    monkeypatch.setattr(os, "access", lambda *_: False)
    with pytest.raises(ArbError, match="Permission denied"):
        check_file(tmp_path / "a.png", "--plot", PICTURES)
    with pytest.raises(ArbError, match="Permission denied"):
        check_folder(tmp_path, "--ledger")


def test_file_that_is_there_is_asked_itself_and_else_its_folder(tmp_path, monkeypatch):
    asked, path = [], tmp_path / "a.png"
    monkeypatch.setattr(os, "access", lambda *place: asked.append(place) or True)
    check_file(path, "--plot", PICTURES)
    path.touch()
    check_file(path, "--plot", PICTURES)
    assert asked == [(tmp_path, os.W_OK), (path, os.W_OK)]
