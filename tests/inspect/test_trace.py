"""Torch's compiler stays out of a traced step, with every version of torch."""

import sys

import torch

from arbcli.inspect.trace import MARK, no_compiler


def test_functions_that_torch_keeps_from_its_compiler_run_without_it(monkeypatch):
    """Else a prediction imports the compiler, for a second: torch's `_disable_dynamo` differs."""
    monkeypatch.delitem(sys.modules, "torch._dynamo", raising=False)

    def function() -> bool:
        return "torch._dynamo" in sys.modules

    kept_out, version = torch._disable_dynamo(function), f"torch {torch.__version__}"
    with no_compiler():
        assert getattr(function, MARK, None) is function, version
        assert not kept_out(), version
    assert not hasattr(function, MARK)
