"""A text that several files train on."""

from pathlib import Path

import pytest

from arbcli.data.opening import open_texts
from arbcli.data.text import Texts


@pytest.fixture(scope="session")
def lines(tmp_path_factory) -> Path:
    """Write lines of which no two are alike."""
    path = tmp_path_factory.mktemp("lines") / "text.txt"
    path.write_bytes(b"".join(b"line %d of a text to learn. " % (i * i) for i in range(900)))
    return path


@pytest.fixture(scope="session")
def texts(lines) -> Texts:
    return open_texts((str(lines),), (), seed=3, context=64)
