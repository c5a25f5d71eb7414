"""The program from its first moment on: a signal while it is being loaded shows no traceback."""

import signal
import subprocess
import sys
from functools import partial

import pytest

LOADING = """
import importlib.abc, os, signal, sys
class Stop(importlib.abc.MetaPathFinder):
    def find_spec(self, name, path, target=None):
        if name == {name!r}:
            signal.raise_signal({number})
sys.meta_path.insert(0, Stop())
sys.argv = ["arb", "count-params"]
import runpy
runpy.run_module("arbcli", run_name="__main__")
"""


@pytest.mark.parametrize(
    ("number", "name"),
    [(signal.SIGINT, "arbcli.cli"), (signal.SIGTERM, "typer"), (signal.SIGINT, "torch")],
)
def test_signal_while_the_program_is_loaded_ends_it_in_a_line(number, name):
    code = LOADING.format(name=name, number=int(number))
    command = [sys.executable, "-c", code]
    # as from a terminal, though the tests may run where a signal is ignored
    heard = partial(signal.signal, number, signal.SIG_DFL)
    done = subprocess.run(command, capture_output=True, text=True, check=False, preexec_fn=heard)
    assert done.returncode == 3
    (line,) = done.stderr.splitlines()
    assert line.startswith(f"error: stopped by {signal.Signals(number).name}")
