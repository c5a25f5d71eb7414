"""A text of numbers for probes and audits."""

import pytest


@pytest.fixture(scope="session")
def numbers(tmp_path_factory) -> str:
    """Path of a text whose lines are numbers of trits and bytes."""
    path = tmp_path_factory.mktemp("text") / "text.txt"
    path.write_bytes(b"".join(b"%d trits are %d bytes. " % (n, n // 5) for n in range(2000)))
    return str(path)
