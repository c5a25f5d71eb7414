"""A run that cannot fit is refused before it starts, and the model of the CUDA allocator."""

import dataclasses
from base64 import b85decode
from contextlib import ExitStack
from pathlib import Path
from unittest import mock
from zlib import decompress

import pytest
from marks import mostly_slow

from arbcli.base.errors import ArbError
from arbcli.inspect import room
from arbcli.inspect.allocator import Allocator, segment_bytes
from arbcli.inspect.memory import predict
from arbcli.inspect.peak import predict_peak
from arbcli.inspect.room import check_memory, least_bytes
from arbcli.training.configure import new_config

SMALL = {"dim": 32, "layers": 1, "heads": 2, "ffn": 48, "ctx": 16, "batch": 4, "device": "cpu"}


def test_run_is_refused_where_less_is_free_than_a_step_takes(monkeypatch):
    config = new_config(**SMALL)
    least = least_bytes(config)
    for available in (None, least):
        monkeypatch.setattr(
            "arbcli.kernels.runtime.device.available_bytes", lambda size=available: size
        )
        check_memory(config)
    monkeypatch.setattr("arbcli.kernels.runtime.device.available_bytes", lambda: least - 1)
    with pytest.raises(ArbError, match="a training step needs"):
        check_memory(config)


@pytest.mark.parametrize(("options", "most"), mostly_slow([
    ({}, 1.6), ({"recompute": True}, 3.0), ({"compute": "bf16"}, 2.5), ({"accum": 3}, 1.6),
    ({"preset": "arb-tiny", "batch": 16}, 3.0),
], lambda options, _: not options))  # fmt: skip
def test_least_memory_is_at_most_and_near_that_of_a_step(options, most):
    sizes = {"dim": 64, "layers": 2, "heads": 2, "ffn": 176, "ctx": 64, "batch": 64}
    config = new_config(**sizes | {"compute": "fp32", "device": "cpu"} | options)
    least = least_bytes(config)
    assert least <= predict_peak(config).peak_bytes <= most * least


SHAPE = {"dim": 64, "layers": 2, "heads": 2, "ffn": 176, "ctx": 32, "batch": 8, "compute": "fp32"}
DENSE = 2 * (6 * 64 + 2 * 176)
"""Numbers that two blocks keep of a position: six of the stream, two of the width of the MLP."""


@pytest.mark.parametrize(
    ("options", "accum", "width", "numbers"),
    [
        ({}, 1, 4, DENSE), ({"compute": "bf16", "accum": 3}, 3, 2, DENSE),
        ({"recompute": True}, 1, 4, 2 * 64), ({"weights": "float"}, 1, 4, 2 * 64),
        ({"preset": "arb-tiny", "attention": "none"}, 1, 4, 2 * (64 + 2 * 176)),
        ({"preset": "hnet-tiny"}, 1, 4, 0),
    ],
)  # fmt: skip
def test_least_is_state_batches_activations_and_logits(options, accum, width, numbers):
    config = new_config(**SHAPE | {"device": "cpu"} | options)
    state = predict(config.model)
    kept = state.adamw_bytes if "weights" in options else state.total.state_bytes
    positions = 8 * 32
    activations = positions * (numbers + 2 * 256) * width  # logits and their gradient
    assert least_bytes(config) == kept + positions * accum * 16 + activations


def test_room_is_that_of_the_device_of_the_run(monkeypatch):
    check = mock.Mock()
    monkeypatch.setattr(room, "check_room", check)
    monkeypatch.setattr(room, "free_bytes", lambda device: {"cuda": 12, "cpu": 34}[device.type])
    config = new_config(dim=32, heads=2, ctx=16, device="cpu")
    for device, free in (("cpu", 34), ("cuda:1", 12)):
        room.check_memory(dataclasses.replace(config, device=device), "do so")
        needed = room.least_bytes(config)
        assert check.call_args == mock.call(needed, "a training step", "do so", free)


MIB = 2**20
RECORDED = Path(__file__).parent / "recorded_tiny.txt"
"""Allocations of torch 2.11 on an H200 from the start of `tiny`, batch 16, to its captured step:
a size, or minus how many allocations ago what is freed was made; `c` where the capture begins."""


def test_segment_bytes_follow_the_block():
    expected = {512: 2, MIB: 2, MIB + 512: 20, 10 * MIB - 512: 20, 10 * MIB: 10,
                10 * MIB + 512: 12, 33 * MIB: 34}  # fmt: skip
    assert {size: segment_bytes(size) // MIB for size in expected} == expected


def test_recorded_run_reserves_as_torch_did():
    memory, blocks = Allocator(), []
    with ExitStack() as stack:
        for event in decompress(b85decode(RECORDED.read_text().replace("\n", ""))).split():
            if event == b"c":
                assert memory.peak_reserved == 127_926_272
                memory.empty_cache()
                stack.enter_context(memory.capturing())
            elif event.startswith(b"-"):
                memory.release(blocks[int(event)])
            else:
                blocks.append(memory.allocate(int(event)))
    assert memory.peak_reserved == 199_229_440
