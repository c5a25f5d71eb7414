"""What is not given is what the machine has, and what it has not is refused."""

import pytest
import torch

from arbcli.errors import ArbError
from arbcli.train import configure
from arbcli.train.configure import new_config

PLACE = torch.device("cpu")


def test_settings_are_checked_against_the_device(monkeypatch):
    def refuse(compute, place):
        raise ArbError(f"{compute} on {place}")

    monkeypatch.setattr(configure, "check_compute", refuse)
    with pytest.raises(ArbError, match="fp8 on cpu"):
        new_config(device="cpu", compute="fp8")


def test_what_is_not_given_is_of_the_device(monkeypatch):
    asked = []
    monkeypatch.setattr(configure, "resolve_device", lambda name: asked.append(name) or PLACE)
    monkeypatch.setattr(configure, "default_compute", lambda place: asked.append(place) or "fp32")
    monkeypatch.setattr(
        configure, "resolve_backend", lambda name, place: asked.append((name, place)) or "torch"
    )
    config = new_config(steps=3)
    assert (config.device, config.compute, config.backend) == ("cpu", "fp32", "torch")
    assert (config.steps, asked) == (3, [None, PLACE, (None, PLACE)])
    asked.clear()
    config = new_config(device="cpu", compute="bf16", backend="native")
    assert (config.compute, asked) == ("bf16", ["cpu", ("native", PLACE)])
